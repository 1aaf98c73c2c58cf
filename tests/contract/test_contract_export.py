"""`merge`, `verify`, `export` and `push`: equal vectors, exit codes, and refusals offline."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import Files, command, names
from safetensors.torch import load_file
from tiny_folders import contents, sentences
from transformers import AutoModel

from angle_llm import SentenceEncoder

TEXTS = [*sentences(10, seed=6), 'She said "no".', "</s> <s>", "Hi " * 80]


def test_a_merged_model_equals_its_adapter_and_not_its_base(model: str, merged: str, files: Files) -> None:
    options = {"prompt": "summarize_one_word", "max_length": 100}
    rows, whole, base = (
        SentenceEncoder.from_pretrained(path, **(options if path == files.llama else {})).encode(TEXTS)
        for path in (model, merged, files.llama)
    )
    np.testing.assert_allclose(whole, rows, rtol=1e-4, atol=1e-5)
    assert np.abs(base - rows).max() > 0.05
    assert not any("adapter" in name for name in contents(Path(merged)))


def test_every_merged_weight_is_base_plus_update(model: str, merged: str, files: Files) -> None:
    """W + (alpha / rank) B A, computed in float64 from the files alone."""
    adapter, whole = load_file(f"{model}/adapter_model.safetensors"), load_file(f"{merged}/model.safetensors")
    config = json.loads(Path(f"{model}/adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    base, changed = AutoModel.from_pretrained(files.llama).state_dict(), 0
    for name, weight in base.items():
        key = next((key for key in adapter if key.endswith(f"{name.removesuffix('.weight')}.lora_A.weight")), None)
        due = weight.double()
        if key is not None:
            due = due + scale * adapter[key.replace("lora_A", "lora_B")].double() @ adapter[key].double()
            changed += 1
        stored = whole[name] if name in whole else whole[f"model.{name}"]
        np.testing.assert_allclose(stored.numpy(), due.float().numpy(), rtol=0, atol=1e-6)
    assert changed == len(adapter) / 2 == 14


def test_verify_ends_in_0_for_the_same_and_1_for_another_encoder(
    model: str, merged: str, files: Files, tmp_path: Path
) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(text for text in TEXTS if text.strip()) + "\n")
    words = [
        "--texts",
        tmp_path / "texts.txt",
        "--json",
        tmp_path / "report.json",
        "--pairs",
        files.pairs,
    ]
    command("angle-llm", "verify", model, merged, *words)
    assert json.loads((tmp_path / "report.json").read_text())["holds"] is True
    names(command("angle-llm", "verify", model, files.llama, code=1).stdout, "not", "cos")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("merge {base} out", ["{base}"]),
        ("merge nowhere out", ["nowhere"]),
        ("verify {model}", ["1|two"]),
        ("verify {model} nowhere", ["nowhere"]),
        ("verify {model} {model} --tolerance 0", ["--tolerance"]),
        ("verify {model} {model} --texts none.txt", ["--texts", "none.txt"]),
        ("push {merged} noslash", ["noslash", "/"]),
    ],
)
def test_a_mistake_is_refused(
    words: str, named: list[str], model: str, merged: str, files: Files, tmp_path: Path
) -> None:
    places = {"model": model, "merged": merged, "base": files.llama}
    done = command("angle-llm", *(word.format(**places) for word in words.split()), cwd=tmp_path, code=2)
    names(done.stdout + done.stderr, *(each.format(**places) for each in named))
    assert not (tmp_path / "out").exists()


def test_push_dry_run_lists_files_and_card(merged: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(merged, tmp_path / "merged"))
    (copy / "training_args.bin").write_bytes(b"a pickle")
    before = contents(copy)
    shown = command("angle-llm", "push", copy, "user/name", "--dry-run").stdout
    names(
        shown, r"model\.safetensors", r"README\.md", 'Summarize sentence "{text}" in one word:"', r"training_args\.bin"
    )
    assert contents(copy) == before


@pytest.mark.needs("sentence_transformers")
def test_sentence_transformers_gives_the_same_vectors(model: str, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    command("angle-llm", "export", model, tmp_path / "out", "--to", "sentence-transformers")
    rows = library.SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(rows, SentenceEncoder.from_pretrained(model).encode(TEXTS), rtol=1e-3, atol=1e-4)

"""Damaged, foreign or hostile files are refused, never partly loaded and never run."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from programs import run
from safetensors.torch import load_file, save_file
from tiny import save_tiny_base, tiny_encoder
from tiny_tokenizers import VOCABULARY
from transformers import AddedToken, AutoTokenizer

from angle_llm.model.checks import TOKENIZER_FILES, ArtifactError, as_artifact_error
from angle_llm.model.encoder import SentenceEncoder

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs inotify")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base("llama", tmp_path_factory.mktemp("base"))


def test_a_full_model_without_some_of_its_weights_is_refused(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    save_file(dict(list(tensors.items())[1::2]), weights, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match="lacks"):
        SentenceEncoder.from_pretrained(tmp_path / "model")


def test_code_in_a_model_folder_is_never_run(base: Path, tmp_path: Path) -> None:
    """Even if a user answers yes to the prompt of transformers."""
    shutil.copytree(base, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"model_type": "trap", "auto_map": {"AutoConfig": "trap.Trap", "AutoModel": "trap.Trap"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\nclass Trap: pass\n")
    code = f"from angle_llm import SentenceEncoder; SentenceEncoder.from_pretrained({str(tmp_path / 'model')!r})"
    (tmp_path / "program.py").write_text(code)
    assert run("python", tmp_path / "program.py", stdin="y\ny\n").returncode != 0
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("special", [True, False])
def test_a_token_beyond_the_embeddings_is_allowed_if_it_is_special(base: Path, tmp_path: Path, special: bool) -> None:
    """Early copies of LLaMA-2 have a `<pad>` that is not the padding token, one past the embeddings."""
    shutil.copytree(base, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([AddedToken("<pad>", special=special)])
    assert tokenizer.convert_tokens_to_ids("<pad>") == VOCABULARY
    assert "<pad>" not in tokenizer.all_special_tokens
    tokenizer.save_pretrained(tmp_path / "model")
    if special:
        rows = SentenceEncoder.from_pretrained(tmp_path / "model", device="cpu").encode(["Some <pad> text."])
        assert torch.from_numpy(rows).isfinite().all()
    else:
        with pytest.raises(ArtifactError, match="1 tokens, '<pad>' first, beyond the model's 400 embeddings"):
            SentenceEncoder.from_pretrained(tmp_path / "model", device="cpu")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "bert", "roberta"])
@pytest.mark.parametrize("saved", [True, False])
def test_a_folder_without_its_tokenizer_files_is_refused(kind: str, saved: bool, tmp_path: Path) -> None:
    """transformers then makes an empty tokenizer for most models, and every word becomes unknown."""
    save_tiny_base(kind, tmp_path)
    if saved:
        shutil.rmtree(tmp_path)
        tiny_encoder(kind).save_pretrained(tmp_path)
    for name in TOKENIZER_FILES:
        (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(ArtifactError, match=rf"{tmp_path}.*(tokenizer\.json|tokenizer)"):
        SentenceEncoder.from_pretrained(tmp_path, device="cpu")


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("not for you"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("CUDA error: device-side assert triggered"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_the_machine_are_not_reported_as_damage(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, as_artifact_error("folder"):
        raise error
    assert raised.value is error


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ArtifactError, match="without another package: sentencepiece"), as_artifact_error("folder"):
        raise ImportError("sentencepiece is needed")


KINDS = ["adapter", "whole", "base", "angle-emb", "parquet", "npy"]
FEW, MANY = 5, 335
"""Of each kind: 30 and 2,010 in all."""


def outcomes(kinds: list[str], first: int, count: int, work: Path) -> Counter[str]:
    """Open damaged folders in a monitored process (`open_damaged`); count those that load, with finite vectors, and those that
    are refused by an error of this package. Anything else fails."""
    here = Path(__file__).parent
    changed = {"PYTHONPATH": f"{here.parent}{os.pathsep}{here.parents[1]}", "TMPDIR": str(work), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-B", str(here / "open_damaged.py"), ",".join(kinds), str(first), str(count), str(work)],
        env=os.environ | changed,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"the process ended with {done.returncode} after {lines[-1:]}: {done.stderr[-2000:]}"
    *ends, last = lines
    assert len(ends) == count * len(kinds)
    bad = [line for line in ends if line["outcome"] not in ("loaded", "refused") or line["seen"]]
    assert not bad, "\n".join(map(str, bad))
    assert last["grown_bytes"] < 300_000_000  # an undamaged folder takes a few megabytes
    return Counter(line["outcome"] for line in ends)


@linux
def test_damaged_and_hostile_folders_open_or_are_refused_without_running_code(tmp_path: Path) -> None:
    found = outcomes(KINDS, 0, FEW, tmp_path)
    assert found["refused"] > found["loaded"] > 0


@linux
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_damaged_folders(kind: str, tmp_path: Path) -> None:
    outcomes([kind], FEW, MANY - FEW, tmp_path)

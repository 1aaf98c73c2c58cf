"""A merge onto a multimodal base: the composite model with other weights in its text model, and nothing else changed."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from composites import CONFIGS, no_tower_of_timm, save_composite
from hub_server import open_hub
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tiny import add_adapter, save_tiny_adapter, save_tiny_base, train_a_little
from transformers import AutoModel

from angle_llm import SentenceEncoder, cli
from angle_llm.export.merge import merge
from angle_llm.export.sentence_transformers import export_sentence_transformers
from angle_llm.model.source.checks import ArtifactError
from angle_llm.model.source.weights import model_file
from angle_llm.settings.train import LoraSettings

TEXTS = ["A man eats.", "A man eats 3 apples.", "word " * 20]
ADAPTER = LoraSettings(rank=2, alpha=6, targets=["q_proj", "o_proj", "up_proj"])
ADAPTED = ("q_proj.weight", "o_proj.weight", "up_proj.weight")
TOWERS = ("vision_tower", "visual", "vision_model", "audio_tower")
QUICK = ("gemma3", "qwen2_5_vl")
"""Keys `language_model.model.` and `model.`; keys `model.language_model.` are in two other tests."""


@pytest.fixture(autouse=True)
def _timm() -> Iterator[None]:
    with no_tower_of_timm():
        yield


def saved(name: str, folder: Path, dtype: str = "float32", **options: Any) -> tuple[Path, Path]:
    """Write a composite base with files of a processor, and an adapter on it; return both folders."""
    base, model = save_composite(name, folder / "base")
    if dtype != "float32":
        model.to(getattr(torch, dtype)).save_pretrained(base)
    (base / "preprocessor_config.json").write_text('{"image_mean":   [0.5]}')
    (base / "chat_template.jinja").write_text("{{ messages }}")
    options = {"pooling": "mean" if name == "embedding_gemma2" else "last", "prompt": "plain", **options}
    return base, save_tiny_adapter(base, folder / "adapter", ADAPTER, layout="padded", **options)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for path in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(path).items()}


def rows_of_transformers(encoder: SentenceEncoder, folder: Path) -> tuple[str, np.ndarray]:
    """Return the class that `AutoModel` opens, and its embeddings of the texts, one at a time."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for text in TEXTS:
        with torch.no_grad():
            states_TD = model(input_ids=torch.tensor(encoder.tokenize([text]))).last_hidden_state[0]
        rows.append(states_TD.mean(0) if encoder.pooling == "mean" else states_TD[-1])
    return type(model).__name__, torch.stack(rows).numpy()


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in CONFIGS])
def test_the_composite_model_has_the_vectors_of_the_adapter_and_the_towers_of_the_base(
    name: str, tmp_path: Path
) -> None:
    base, run = saved(name, tmp_path)
    out = tmp_path / "out"
    found = merge(run, out, composite=True, device="cpu")
    assert found is not None
    assert found.holds
    # Tensors: only adapted layers of the text model differ.
    before, after = tensors_of(base), tensors_of(out)
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    towers = {key for key in before if any(part in key.split(".") for part in TOWERS)}
    assert changed == {key for key in before.keys() - towers if key.endswith(ADAPTED)}
    assert changed
    # All other files of the base.
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    # Vectors, in transformers and here.
    encoder = SentenceEncoder.from_pretrained(run, device="cpu", layout="padded")
    expected = encoder.encode(TEXTS)
    model_class, rows = rows_of_transformers(encoder, out)
    assert model_class == type(AutoModel.from_pretrained(base)).__name__
    assert relative(rows, expected) < 1e-6  # rounding to float32
    assert relative(rows_of_transformers(encoder, base)[1], expected) > 1e-4
    assert relative(SentenceEncoder.from_pretrained(out, device="cpu", layout="padded").encode(TEXTS), expected) < 1e-6


def test_shards_and_names_of_a_base_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys as transformers 5 names them; the tower stays in bfloat16, and the configuration names the dtype of the merge."""
    base, _ = saved("gemma3", tmp_path / "one", dtype="bfloat16")
    tensors = {
        f"model.{key.replace('language_model.model', 'language_model')}": t for key, t in tensors_of(base).items()
    }
    (base / "model.safetensors").unlink()
    files = {
        "model-00001-of-00002.safetensors": sorted(tensors)[::2],
        "model-00002-of-00002.safetensors": sorted(tensors)[1::2],
    }
    for file, keys in files.items():
        save_file({key: tensors[key] for key in keys}, base / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: file for file, keys in files.items() for key in keys}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    run = save_tiny_adapter(base, tmp_path / "adapter", ADAPTER, pooling="last", prompt="plain", dtype="bfloat16")
    monkeypatch.setattr(sys.modules["angle_llm.export.merge"], "SHARD_BYTES", 20_000)
    merge(run, tmp_path / "out", composite=True, device="cpu")
    after = tensors_of(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert after.keys() == tensors.keys()
    for key, tensor in after.items():
        is_text = key.startswith("model.language_model.")
        assert tensor.dtype == (torch.float32 if is_text else torch.bfloat16)
        assert is_text or torch.equal(tensor, tensors[key])
    merge(run, tmp_path / "text", check=False)
    encoder = SentenceEncoder.from_pretrained(tmp_path / "text", device="cpu")
    assert AutoModel.from_pretrained(tmp_path / "out").dtype == torch.float32
    assert relative(rows_of_transformers(encoder, tmp_path / "out")[1], encoder.encode(TEXTS)) < 1e-6
    # In the dtype of the base, the configuration is unchanged. transformers 4 also reads the dtype of each part.
    merge(run, tmp_path / "half", composite=True, dtype="bfloat16", check=False)
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "half").values()} == {torch.bfloat16}
    assert (tmp_path / "half" / "config.json").read_bytes() == (base / "config.json").read_bytes()
    config = json.loads((base / "config.json").read_text())
    config["text_config"]["torch_dtype"] = config.pop("dtype")
    (base / "config.json").write_text(json.dumps(config))
    merge(run, tmp_path / "parts", composite=True, check=False)
    written = json.loads((tmp_path / "parts" / "config.json").read_text())
    assert written["dtype"] == written["torch_dtype"] == written["text_config"]["torch_dtype"] == "float32"


def test_the_command_the_card_and_the_files_of_an_upload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, run = saved("gemma3", tmp_path)
    cli.run(["merge", str(run), str(tmp_path / "whole"), "--composite"])
    readme = (tmp_path / "whole" / "README.md").read_text()
    assert "the whole multimodal model (`Gemma3ForConditionalGeneration`)" in readme
    assert 'encoder.save_pretrained("text")' in readme
    capsys.readouterr()
    cli.run(["push", str(tmp_path / "whole"), "user/name", "--dry-run"])
    files = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert {
        "config.json",
        "preprocessor_config.json",
        "chat_template.jinja",
        "model.safetensors",
        "tokenizer.json",
    } <= {*files}
    # The text model of the folder, as the card and the message of `export` say.
    with pytest.raises(ArtifactError, match=r"is a composite model\. Save its text model"):
        export_sentence_transformers(tmp_path / "whole", tmp_path / "exported")
    encoder = SentenceEncoder.from_pretrained(tmp_path / "whole", device="cpu")
    encoder.save_pretrained(tmp_path / "text")
    export_sentence_transformers(tmp_path / "text", tmp_path / "exported", check=False)
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["model_type"] == "gemma3_text"
    assert "multimodal" not in (tmp_path / "exported" / "README.md").read_text()


def test_the_split_of_tekken_is_in_the_composite_model(tmp_path: Path) -> None:
    base, _ = saved("mistral3", tmp_path / "one")
    (base / "tekken.json").write_text(json.dumps({"config": {"pattern": r"\p{N}|\p{L}+"}}))
    run = save_tiny_adapter(base, tmp_path / "adapter", ADAPTER, pooling="last", prompt="plain")
    report = merge(run, tmp_path / "out", composite=True, device="cpu")
    assert report is not None
    assert report.holds
    assert (tmp_path / "out/tekken.json").is_file()


def test_several_adapters_are_combined_in_the_composite_model(tmp_path: Path) -> None:
    base, run = saved("qwen3_vl", tmp_path)
    out = tmp_path / "out"
    merge(run, out, others=[str(base)], weights=[0.5, 0.5], composite=True, device="cpu")
    merge(run, tmp_path / "first", composite=True, check=False)
    first, untrained, mean = tensors_of(tmp_path / "first"), tensors_of(base), tensors_of(out)
    for key, tensor in mean.items():
        assert torch.allclose(tensor, (first[key] + untrained[key]) / 2, rtol=0, atol=1e-7), key


def test_what_a_composite_model_cannot_be_is_refused(tmp_path: Path) -> None:
    plain = save_tiny_adapter(save_tiny_base("llama", tmp_path / "plain"), tmp_path / "of_plain")
    with pytest.raises(ArtifactError, match=r"--composite: expected an encoder on a multimodal base, got .*of_plain"):
        merge(plain, tmp_path / "out", composite=True)
    _, both_ways = saved("gemma3", tmp_path / "a", attention="bidirectional", pooling="mean")
    with pytest.raises(ArtifactError, match=r"is bidirectional, which a composite model cannot compute"):
        merge(both_ways, tmp_path / "out", composite=True)
    _, first = saved("qwen3_vl", tmp_path / "b", layers=1)
    with pytest.raises(ArtifactError, match="uses the first 1 layers"):
        merge(first, tmp_path / "out", composite=True)
    assert not (tmp_path / "out").exists()


def test_weights_too_large_for_float16_are_refused(tmp_path: Path) -> None:
    base, _ = saved("gemma3", tmp_path)
    tensors = load_file(base / "model.safetensors")
    tensors["language_model.model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    run = save_tiny_adapter(base, tmp_path / "large", ADAPTER, pooling="last", prompt="plain", layout="padded")
    with pytest.raises(ArtifactError, match="not finite"):
        merge(run, tmp_path / "out", composite=True, dtype="float16", device="cpu")
    assert not (tmp_path / "out").exists()


def test_files_of_a_processor_on_the_hub_are_fetched_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = open_hub(tmp_path / "cache", monkeypatch)
    base, _ = saved("gemma3", tmp_path)
    hub.put("org/base", base)
    encoder = SentenceEncoder.from_pretrained("org/base", device="cpu", pooling="last", prompt="plain", layout="padded")
    add_adapter(encoder, ADAPTER)
    train_a_little(encoder.model)
    encoder.save_pretrained(tmp_path / "run")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with patch.object(sys.modules["angle_llm.export.merge"], "model_file", wraps=model_file) as asked:
        merge(tmp_path / "run", tmp_path / "offline", composite=True, check=False)
    assert [call.args[1] for call in asked.call_args_list] == ["processor_config.json"]  # the hub does not answer
    assert (tmp_path / "offline" / "tokenizer.json").is_file()
    assert not (tmp_path / "offline" / "preprocessor_config.json").exists()
    assert "unknown whether org/base has processor_config.json, preprocessor_config.json" in capsys.readouterr().out
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    merge(tmp_path / "run", tmp_path / "out", composite=True, check=False)
    assert (tmp_path / "out" / "preprocessor_config.json").read_bytes() == (
        base / "preprocessor_config.json"
    ).read_bytes()
    assert "unknown whether" not in capsys.readouterr().out

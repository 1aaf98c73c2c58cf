"""`verify` accepts forms of one encoder, and names each difference of another one."""

import copy
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny_adapter, save_tiny_base, tiny_encoder
from tokenizers import AddedToken

from angle_llm import SentenceEncoder, load_prompt
from angle_llm.evaluate import sts_score
from angle_llm.evaluate.encoding import encode_usable
from angle_llm.export.comparison import TIMES_SMALLER, Encoded, FormFacts, Verification, compare_forms
from angle_llm.export.exported_folder import ExportFacts
from angle_llm.export.formats.onnx_folder import GRAPH_NAME
from angle_llm.export.merge import merge
from angle_llm.export.texts import SENTENCES
from angle_llm.export.verify import VerifyOptions, _built_in_texts, _library_versions, verify
from angle_llm.model.source.checks import CARD_NAME, EXPORT_NAME, ArtifactError
from angle_llm.settings.export import VerifySettings
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import LoraSettings

PAIRS = "starter:graded_pairs.tsv"
SEGMENTS = load_prompt("summarize_one_word").to_dict() | {"tokenization": "segments", "edits": ["append_full_stop"]}


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, adapter/ on it, merged/ of it."""
    folder = tmp_path_factory.mktemp("forms")
    save_tiny_adapter(save_tiny_base("llama", folder / "base"), folder / "adapter", max_length=100)
    merge(folder / "adapter", folder / "merged", check=False)
    return folder


def change(forms: Path, out: Path, **card: Any) -> Path:
    """The merged folder with another card."""
    SentenceEncoder.from_pretrained(forms / "merged", device="cpu").save_pretrained(out)
    values = json.loads((out / CARD_NAME).read_text(encoding="utf-8"))
    (out / CARD_NAME).write_text(json.dumps(values | card), encoding="utf-8")
    return out


def problems(found: Verification) -> str:
    assert not found.holds
    return "\n".join(found.problems)


def test_all_forms_pass_in_one_call(forms: Path) -> None:
    found = verify([forms / "adapter", forms / "merged", forms / "adapter"], VerifyOptions(device="cpu"))
    assert found.holds
    assert [other.form.kind for other in found.comparisons] == ["whole model", "adapter"]
    merged, itself = found.comparisons
    assert 0 < merged.largest_difference < 1e-9
    assert itself.largest_difference == 0
    assert found.base_difference > 0.01


def test_names_that_an_export_splits_are_skipped_in_a_path_with_a_tilde(
    forms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    encoder = SentenceEncoder.from_pretrained(forms / "adapter", device="cpu")
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "modules.json").write_text("[]")
    ExportFacts(encoder.prompts, "last", 100, plain_names=["Nobody"]).write(tmp_path / "exported")
    texts, notes = _built_in_texts(encoder, ["~/exported"])
    assert (len(texts), any("Nobody" in text for text in texts), len(notes)) == (len(SENTENCES) - 1, False, 1)


@pytest.mark.parametrize(("kind", "skipped"), [("bert", 1), ("llama", 0)])
def test_for_a_server_names_that_an_export_would_split_are_skipped(kind: str, skipped: int) -> None:
    encoder = tiny_encoder(kind)
    tokenizer = copy.deepcopy(encoder.tokenizer)
    tokenizer.add_tokens([AddedToken("supercali", normalized=False)])
    encoder = SentenceEncoder(encoder.model.backbone, tokenizer)
    texts, notes = _built_in_texts(encoder, ["http://127.0.0.1:1"])
    assert (len(texts), "supercali" in "".join(texts)) == (len(SENTENCES) - skipped, not skipped)
    assert len(notes) == skipped


def test_figures_match_their_definitions_and_the_base_is_another_encoder(forms: Path) -> None:
    texts = ["A man is eating.", "Nobody eats.", "hello"]
    found = verify([forms / "adapter", forms / "base"], VerifyOptions(texts=texts, device="cpu"))
    options: Any = {"prompt": "summarize_one_word", "pooling": "last", "max_length": 100, "device": "cpu"}
    a = SentenceEncoder.from_pretrained(forms / "adapter", device="cpu").encode(texts).astype(np.float64)
    b = SentenceEncoder.from_pretrained(forms / "base", **options).encode(texts).astype(np.float64)
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    (other,) = found.comparisons
    assert other.mean_difference == pytest.approx(1 - cosines.mean(), abs=1e-6)
    assert other.largest_difference == pytest.approx(1 - cosines.min(), abs=1e-6)
    assert other.worst_text == texts[int(cosines.argmin())]
    relative = np.linalg.norm(a - b, axis=1) / np.linalg.norm(a, axis=1)
    assert other.largest_relative_difference == pytest.approx(relative.max(), rel=1e-5)
    assert found.base_difference == pytest.approx(1 - cosines.mean(), abs=1e-6), "its base is that base"
    assert f"{TIMES_SMALLER} times smaller" in problems(found)
    assert (other.form.kind, other.form.prompt, other.form.max_length) == ("backbone", found.first.prompt, 100)


def test_an_untrained_encoder_does_not_hold(forms: Path, tmp_path: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(forms / "base", device="cpu")
    encoder.add_lora(LoraSettings(rank=2))
    encoder.save_pretrained(tmp_path / "zero")
    found = verify([tmp_path / "zero", forms / "base"], VerifyOptions(device="cpu"))
    assert found.comparisons[0].largest_difference == 0
    problems(found)


@pytest.mark.parametrize(
    ("card", "messages"),
    [
        ({"prompt": load_prompt("plain").to_dict()}, ["prompt '{text}'", "1e-05"]),
        ({"prompt": SEGMENTS}, ["token ids"]),
        ({"pooling": "mean"}, ["pooling mean", "1e-05"]),
        ({"max_length": 60}, ["max_length 60", "1e-05"]),
    ],
)
def test_other_prompt_or_pooling_is_named(
    card: dict[str, Any], messages: list[str], forms: Path, tmp_path: Path
) -> None:
    found = problems(
        verify([forms / "adapter", change(forms, tmp_path / "other", **card)], VerifyOptions(device="cpu"))
    )
    assert all(message in found for message in messages)


def test_one_wrong_tensor_and_one_that_is_not_finite(forms: Path, tmp_path: Path) -> None:
    other = change(forms, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["layers.1.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert "1e-05" in problems(verify([forms / "adapter", other], VerifyOptions(device="cpu")))
    assert (
        verify([forms / "adapter", other], VerifyOptions(tolerance=0.5, device="cpu")).comparisons[0].tolerance == 0.5
    )
    tensors["norm.weight"][3] = torch.nan
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"norm\.weight"):
        verify([forms / "adapter", other], VerifyOptions(device="cpu"))


def test_bfloat16_has_its_own_tolerance(forms: Path, tmp_path: Path) -> None:
    merge(forms / "adapter", tmp_path / "half", dtype="bfloat16", check=False)
    (half,) = verify([forms / "adapter", tmp_path / "half"], VerifyOptions(device="cpu")).comparisons
    assert half.tolerance == 1e-3
    assert 1e-7 < half.largest_difference < 1e-2
    strict = verify([forms / "adapter", tmp_path / "half"], VerifyOptions(tolerance=1e-7, device="cpu"))
    assert "1e-07" in problems(strict)


def test_a_merged_folder_records_its_base(forms: Path, tmp_path: Path) -> None:
    from_merged = verify([forms / "merged", forms / "adapter"], VerifyOptions(device="cpu"))
    from_adapter = verify([forms / "adapter", forms / "merged"], VerifyOptions(device="cpu"))
    assert from_merged.base_difference == pytest.approx(from_adapter.base_difference, rel=1e-5)
    assert from_merged.holds
    unknown = verify([change(forms, tmp_path / "bare"), forms / "merged"], VerifyOptions(device="cpu"))
    assert unknown.holds
    assert unknown.base_difference is None


def test_correlations_are_compared_too(forms: Path) -> None:
    found = verify([forms / "adapter", forms / "merged"], VerifyOptions(score=sts_score(PAIRS), device="cpu"))
    assert found.holds
    assert found.first.spearman == pytest.approx(
        sts_score(PAIRS)(SentenceEncoder.from_pretrained(forms / "adapter", device="cpu")), abs=1e-3
    )
    scores = iter([70.0, 70.2])
    odd = verify([forms / "adapter", forms / "merged"], VerifyOptions(score=lambda _: next(scores), device="cpu"))
    assert "Spearman 70.20" in problems(odd)


def test_a_program_encodes_texts_without_letters(forms: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(forms / "adapter", device="cpu")
    program = SimpleNamespace(encode=encoder.encode, tokenize=lambda texts: encoder.tokenize(texts), dimensions=0)
    np.testing.assert_array_equal(encode_usable(program, ["?!", "no"]), encoder.encode(["?!", "no"]))


def test_flags_of_a_server_need_one() -> None:
    with pytest.raises(SettingsError, match="--server-model and --send-prompt belong to --server"):
        VerifySettings(("a", "b"), send_prompt=True)
    VerifySettings(("a", "http://localhost:1"), send_prompt=True)


def test_the_tolerance_may_be_0(forms: Path) -> None:
    found = verify([forms / "adapter", forms / "merged", forms / "adapter"], VerifyOptions(tolerance=0, device="cpu"))
    merged, itself = found.comparisons
    assert (merged.tolerance, itself.problems) == (0, ())
    assert "exceeds 0e+00" in problems(found)


@pytest.mark.parametrize(("length", "same"), [(1.0005, True), (1.05, False), (0.95, False)])
def test_vectors_of_a_normalised_encoder_have_length_1(length: float, same: bool) -> None:
    facts = FormFacts("name", "onnx", "float32", "prompt", "last", 100, 2, normalize=True)
    rows_ND = np.array([[1.0, 0.0], [0.6, 0.8]])
    first, other = (Encoded(facts, [[1], [2]], rows) for rows in (rows_ND, rows_ND * [[1.0], [length]]))
    found = compare_forms(first, other, [("one", None), ("two", None)], None, None)
    assert ["the vectors have other lengths" in problem for problem in found.problems] == ([] if same else [True])


def test_versions_are_those_of_the_imported_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution onnxruntime-gpu has the module onnxruntime, and no distribution of this name."""
    for name in (EXPORT_NAME, GRAPH_NAME):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    library: Any = ModuleType("onnxruntime")
    monkeypatch.setitem(sys.modules, "onnxruntime", library)
    assert _library_versions([tmp_path]).startswith("onnxruntime unknown, transformers ")
    library.__version__ = "1.2.3"
    assert _library_versions([tmp_path]).startswith("onnxruntime 1.2.3, transformers ")
    assert _library_versions([tmp_path]).endswith(f", torch {torch.__version__}")


def test_a_gpu_with_too_little_memory_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The comparison is repeated on the CPU; with a device, the error is raised."""
    tiny_encoder("bert").save_pretrained(tmp_path / "model")
    devices: list[Any] = []

    def encode(form: Any, *_: Any) -> Any:
        devices.append(form.device.type)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("angle_llm.export.verify.torch_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("angle_llm.export.verify._encode", encode)
    for device, count in ((None, 2), ("cpu", 1)):
        devices.clear()
        with pytest.raises(torch.OutOfMemoryError):
            verify([tmp_path / "model", tmp_path / "model"], VerifyOptions(device=device))
        assert len(devices) == count

"""Export to ONNX: the vectors of the encoder, computed by onnxruntime and tokenizers alone, for any batch and length."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kills import contents
from programs import run as program
from readers.families import FAMILIES, make_encoder
from tiny import save_tiny_adapter, save_tiny_base, tiny_encoder
from tiny_tokenizers import markup

from angle_llm import PromptTemplate, SentenceEncoder, load_prompt
from angle_llm.export.comparison import TIMES_SMALLER, TOLERANCE, Comparison
from angle_llm.export.formats import onnx_graph
from angle_llm.export.formats.onnx_folder import GRAPH_NAME, OnnxModel, is_onnx_folder
from angle_llm.export.texts import SENTENCES
from angle_llm.export.verify import VerifyOptions, verify
from angle_llm.model.pooling import POOLINGS, Pooling
from angle_llm.model.source.checks import CARD_NAME, EXPORT_NAME, ArtifactError
from angle_llm.model.vectors import cosine_differences
from angle_llm.prompts import SidePrompts

BATCH = "angle_llm.export.formats.onnx_folder._BATCH"
"""Number of texts that are computed together."""
for library in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(library, reason="the extra `onnx` is not installed")

export_onnx = partial(onnx_graph.export_onnx, check=False)
PROMPT = PromptTemplate("mine", 'The sentence "{text}" means "', tokenization="segments")
LONG = "They went on and on along the river. " * 30
TEXTS = [*SENTENCES[:12], LONG]
"""Texts of 1 to 100 tokens, and a text longer than the maximum length."""


def compare(saved: Path, folder: Path, texts: list[str] = TEXTS) -> Comparison:
    """Compare a folder with its encoder by `verify`."""
    return verify([saved, folder], VerifyOptions(texts=texts, device="cpu")).comparisons[0]


def largest_difference(a: Any, b: Any) -> float:
    return float(cosine_differences(a.astype(np.float64), b.astype(np.float64)).max())


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on a tiny BERT with a prompt that has a tail, and its export beside it."""
    folder = tmp_path_factory.mktemp("onnx")
    save_tiny_adapter(save_tiny_base("bert", folder / "base"), folder / "adapter", prompt=PROMPT, max_length=100)
    export_onnx(folder / "adapter", folder / "onnx")
    return folder


@pytest.fixture
def encoder(run: Path) -> SentenceEncoder:
    return SentenceEncoder.from_pretrained(run / "adapter", device="cpu")


def test_the_graph_gives_the_vectors_for_any_batch_and_length(
    run: Path, encoder: SentenceEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compare(run / "adapter", run / "onnx")
    assert not found.problems
    assert found.texts_with_other_tokens == 0
    assert len(encoder.tokenize([LONG])[0]) == 100
    rows = encoder.encode(TEXTS)
    for texts_together in (1, 2, 5, 13):  # traced with 2 texts of 7 tokens
        monkeypatch.setattr(BATCH, texts_together)
        model = OnnxModel(run / "onnx")
        assert largest_difference(model.encode(TEXTS), rows) <= TOLERANCE
    assert model.encode([]).shape == (0, 32)


def test_the_files(run: Path, encoder: SentenceEncoder) -> None:
    assert {path.relative_to(run / "onnx").as_posix() for path in (run / "onnx").rglob("*") if path.is_file()} == {
        "1_Pooling/config.json", "README.md", "angle_llm_export.json", "config.json", "config_sentence_transformers.json",
        "merge.json", "modules.json", GRAPH_NAME, "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json",
        "verification.json",
    }  # fmt: skip
    assert is_onnx_folder(run / "onnx")
    assert not is_onnx_folder(run / "adapter")
    model = OnnxModel(run / "onnx")
    graph = {
        value.name: (value.type, value.shape) for value in [*model.session.get_inputs(), *model.session.get_outputs()]
    }
    assert graph["input_ids"] == graph["attention_mask"] == ("tensor(int64)", ["batch", "tokens"])
    assert graph["sentence_embedding"] == ("tensor(float)", ["batch", 32])
    assert (model.bits, model.pooling, model.normalize) == (None, "mean", False)


def test_padding_may_be_on_the_left(run: Path, encoder: SentenceEncoder, tmp_path: Path) -> None:
    shutil.copytree(run / "onnx", tmp_path / "left")
    change_json(tmp_path / "left" / "tokenizer.json", lambda spec: spec["padding"].update(direction="Left"))
    model = OnnxModel(tmp_path / "left")
    assert model.tokenizer.encode_batch(["a", "a b c"])[0].attention_mask[0] == 0
    assert largest_difference(model.encode(TEXTS), encoder.encode(TEXTS)) <= TOLERANCE


@pytest.mark.slow
def test_int8_weights_change_the_vectors_a_little(run: Path, encoder: SentenceEncoder, tmp_path: Path) -> None:
    export_onnx(run / "adapter", tmp_path / "int8", dtype="int8")
    model = OnnxModel(tmp_path / "int8")
    assert model.bits == 8
    assert (tmp_path / "int8" / GRAPH_NAME).stat().st_size < (run / "onnx" / GRAPH_NAME).stat().st_size
    assert 1e-7 < largest_difference(model.encode(TEXTS), encoder.encode(TEXTS)) < 0.01  # 0.002 in SmolLM2


def without_prompt(spec: dict[str, Any], base: dict[str, Any]) -> None:
    spec.update(base | {name: spec[name] for name in ("padding", "truncation")})


def without_special_tokens(spec: dict[str, Any], base: dict[str, Any]) -> None:
    spec["post_processor"] = None


def truncated_to_64(spec: dict[str, Any], base: dict[str, Any]) -> None:
    spec["truncation"]["max_length"] = 64


WRONG_TOKENIZERS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], None], tuple[str, ...]]] = {
    "no prompt": (without_prompt, (f"{len(TEXTS)} of {len(TEXTS)} texts have different token ids", "exceeds")),
    "no special tokens": (without_special_tokens, ("different token ids", "exceeds")),
    "shorter texts": (truncated_to_64, ("different token ids", "exceeds")),
}


@pytest.mark.parametrize("name", WRONG_TOKENIZERS)
def test_verify_finds_a_wrong_tokenizer(name: str, run: Path, tmp_path: Path) -> None:
    spoil, messages = WRONG_TOKENIZERS[name]
    shutil.copytree(run / "onnx", tmp_path / "wrong")
    base = json.loads((run / "base" / "tokenizer.json").read_text())
    change_json(tmp_path / "wrong" / "tokenizer.json", lambda spec: spoil(spec, base))
    problems = compare(run / "adapter", tmp_path / "wrong").problems
    for message in messages:
        assert any(message in problem for problem in problems), problems


def test_verify_finds_another_maximum_length_without_long_texts(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "onnx", tmp_path / "wrong")
    change_json(tmp_path / "wrong" / "tokenizer.json", lambda spec: spec["truncation"].update(max_length=64))
    problems = compare(run / "adapter", tmp_path / "wrong", ["hello", "A man is eating."]).problems
    assert problems == ("max_length 64, expected 100",)


@pytest.mark.parametrize("name", [GRAPH_NAME, "tokenizer.json"])
def test_a_damaged_file_is_refused(name: str, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "onnx", tmp_path / "damaged")
    (tmp_path / "damaged" / name).write_bytes((run / "onnx" / name).read_bytes()[:200])
    with pytest.raises(ArtifactError, match="damaged cannot be opened"):
        OnnxModel(tmp_path / "damaged")


def test_damaged_folders_and_other_targets_are_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "onnx", tmp_path / "damaged")
    (tmp_path / "damaged" / EXPORT_NAME).write_bytes((run / "onnx" / EXPORT_NAME).read_bytes()[:200])
    with pytest.raises(ArtifactError, match=EXPORT_NAME):
        OnnxModel(tmp_path / "damaged")
    before = contents(run)
    problems = {
        "adapter/in": "in the folder of the adapter",
        "base/in": "in the folder of the base",
        "onnx": "has files",
    }
    for target, problem in problems.items():
        with pytest.raises(ArtifactError, match=problem):
            export_onnx(run / "adapter", run / target)
    assert contents(run) == before
    with pytest.raises(FileNotFoundError, match="is not a saved encoder"):
        export_onnx(run / "base", tmp_path / "out")


def test_two_prompts_with_a_tail_are_refused_with_advice(tmp_path: Path) -> None:
    prompts = SidePrompts(PROMPT, load_prompt("plain"))
    tiny_encoder("bert", prompt=prompts, max_length=60).save_pretrained(tmp_path / "model")
    with pytest.raises(ArtifactError, match="--as query"):
        export_onnx(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_model_that_torch_cannot_export_is_refused(tmp_path: Path) -> None:
    make_encoder("qwen3.5", "one prompt", tmp_path)
    with pytest.raises(ArtifactError, match=r"cannot export model type 'qwen3_5_text'.*--to sentence-transformers"):
        export_onnx(tmp_path / "model", tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name, kind in FAMILIES.items() if not kind.gguf and name != "qwen3.5"])
def test_families(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, _ = make_encoder(family, "one prompt", tmp_path)
    export_onnx(tmp_path / "model", tmp_path / "onnx")
    assert json.loads((tmp_path / "onnx" / EXPORT_NAME).read_text())["plain_names"] == []
    texts = [text for text in [*SENTENCES, LONG, *markup()] if has_tokens(encoder, text)]
    found = compare(tmp_path / "model", tmp_path / "onnx", texts)
    print(f"{family}: 1-cos {found.largest_difference:.1e} on {len(texts)} texts")
    assert not found.problems
    if family == "mpnet":  # its positions count the ids that are not 1, but this tokenizer pads with 0
        return
    rows = encoder.encode(texts)
    change_json(tmp_path / "onnx" / "tokenizer.json", lambda spec: spec["padding"].update(direction="Left"))
    for texts_together in (1, 7):
        monkeypatch.setattr(BATCH, texts_together)
        assert largest_difference(OnnxModel(tmp_path / "onnx").encode(texts), rows) <= TOLERANCE


def test_bidirectional_attention_is_exported(tmp_path: Path) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    save_tiny_adapter(base, tmp_path / "adapter", attention="bidirectional", max_length=100)
    export_onnx(tmp_path / "adapter", tmp_path / "onnx")
    assert not compare(tmp_path / "adapter", tmp_path / "onnx").problems


def has_tokens(encoder: SentenceEncoder, text: str) -> bool:
    try:
        encoder.tokenize([text])
    except ValueError:
        return False
    return True


@pytest.mark.slow
def test_two_prompts_and_normalisation(tmp_path: Path) -> None:
    encoder, _ = make_encoder("qwen3", "two prompts, normalised", tmp_path)
    export_onnx(tmp_path / "model", tmp_path / "onnx")
    model = OnnxModel(tmp_path / "onnx")
    assert model.normalize
    assert model.prompts == encoder.prompts
    export_onnx(tmp_path / "model", tmp_path / "documents", side="document")
    for side, folder in (("query", "onnx"), ("document", "onnx"), ("document", "documents")):
        theirs, ours = OnnxModel(tmp_path / folder).for_side(side), encoder.for_side(side)  # type: ignore[arg-type]
        assert theirs.tokenize(TEXTS) == ours.tokenize(TEXTS)
        assert np.abs(theirs.encode(TEXTS) - ours.encode(TEXTS)).max() < 1e-6  # float32
    assert OnnxModel(tmp_path / "documents").tokenize(TEXTS) == encoder.for_side("document").tokenize(TEXTS)


def last_position_without_mask(states_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return states_BTD[:, -1]


def mean_over_padding(states_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return states_BTD.mean(dim=1)


def without_mask(self: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    return FORWARD(self, input_ids, attention_mask.new_ones(attention_mask.shape))


def a_little_longer(self: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    rows_BD, *others = FORWARD(self, input_ids, attention_mask)
    return (1.05 * rows_BD, *others)


def without_normalisation(self: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    self.normalize = False
    return FORWARD(self, input_ids, attention_mask)


FORWARD = onnx_graph._Graph.forward
WRONG_GRAPHS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = {
    "mean pooling": ("last", lambda patch: patch.setitem(POOLINGS, "last", POOLINGS["mean"]), "exceeds"),
    "last position without mask": (
        "last",
        lambda patch: patch.setitem(POOLINGS, "last", Pooling(last_position_without_mask)),
        "exceeds",
    ),
    "mean over padding": (
        "mean",
        lambda patch: patch.setitem(POOLINGS, "mean", Pooling(mean_over_padding)),
        "exceeds",
    ),
    "padding is not masked": (
        "mean",
        lambda patch: patch.setattr(onnx_graph._Graph, "forward", without_mask),
        "exceeds",
    ),
    "mean divided by the root of the length": (
        "mean",
        lambda patch: patch.setitem(POOLINGS, "mean", POOLINGS["mean_sqrt_len"]),
        "the vectors have other lengths",
    ),
    "not normalised": (
        "normalised",
        lambda patch: patch.setattr(onnx_graph._Graph, "forward", without_normalisation),
        "the vectors have other lengths",
    ),
    "length 1.05": (
        "normalised",
        lambda patch: patch.setattr(onnx_graph._Graph, "forward", a_little_longer),
        "the vectors have other lengths",
    ),
}
"""Encoder, part of the export that is broken, and what `verify` reports."""


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of a LLaMA with last-token pooling, of a BERT with mean pooling, and of a normalised BERT."""
    folder = tmp_path_factory.mktemp("encoders")
    save_tiny_adapter(save_tiny_base("llama-tied", folder / "llama"), folder / "last", max_length=100)
    save_tiny_adapter(save_tiny_base("bert", folder / "bert"), folder / "mean", max_length=100)
    shutil.copytree(folder / "mean", folder / "normalised")
    change_json(folder / "normalised" / CARD_NAME, lambda card: card.update(normalize=True))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_GRAPHS)
def test_verify_finds_a_wrong_graph(name: str, encoders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, spoil, message = WRONG_GRAPHS[name]
    with monkeypatch.context() as patch:
        spoil(patch)
        export_onnx(encoders / saved, tmp_path / "wrong")
    problems = compare(encoders / saved, tmp_path / "wrong").problems
    print(problems)
    assert any(message in problem for problem in problems), problems
    if name == "last position without mask":
        # One text at a time hides the fault: batches must be padded as the folder says.
        monkeypatch.setattr(BATCH, 1)
        alone = OnnxModel(tmp_path / "wrong").encode(TEXTS)
        assert largest_difference(alone, SentenceEncoder.from_pretrained(encoders / saved).encode(TEXTS)) <= TOLERANCE


@pytest.mark.slow
def test_verify_finds_the_base_in_place_of_the_merged_model(encoders: Path, tmp_path: Path) -> None:
    base = SentenceEncoder.from_pretrained(encoders / "llama", device="cpu", max_length=100)
    base.save_pretrained(tmp_path / "base")
    export_onnx(tmp_path / "base", tmp_path / "wrong")
    assert any("exceeds" in problem for problem in compare(encoders / "last", tmp_path / "wrong").problems)


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
def test_weights_of_a_large_model_are_in_a_second_file(
    int8: bool, encoders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_graph, "_LARGEST_FILE", 1000)
    export_onnx(encoders / "last", tmp_path / "large", dtype="int8" if int8 else None)
    files = {path.name: path.stat().st_size for path in (tmp_path / "large" / GRAPH_NAME).parent.iterdir()}
    assert set(files) == {"model.onnx", "model.onnx.data"}
    assert files["model.onnx.data"] > 10_000
    model = OnnxModel(tmp_path / "large")
    assert model.bits == (8 if int8 else None)
    assert compare(encoders / "last", tmp_path / "large").largest_difference <= (1e-2 if int8 else TOLERANCE)


@pytest.mark.slow
def test_verify_finds_wrong_scales_of_int8_weights(encoders: Path, tmp_path: Path) -> None:
    """Scales of the blocks in reversed order."""
    import onnx

    export_onnx(encoders / "last", tmp_path / "int8", dtype="int8")
    assert not any("exceeds" in problem for problem in compare(encoders / "last", tmp_path / "int8").problems)
    graph = onnx.load(tmp_path / "int8" / GRAPH_NAME)
    scales = [value for value in graph.graph.initializer if "scale" in value.name]
    assert scales
    for scale in scales:
        scale.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale)[::-1].copy(), scale.name))
    onnx.save(graph, tmp_path / "int8" / GRAPH_NAME)
    problems = compare(encoders / "last", tmp_path / "int8").problems
    assert any("exceeds" in problem for problem in problems), problems


@pytest.mark.slow
def test_other_model_types_are_refused_by_name(tmp_path: Path) -> None:
    from tiny_tokenizers import TOKENIZERS, VOCABULARY
    from transformers import AutoModel, MambaConfig

    backbone = AutoModel.from_config(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4)
    )
    encoder = SentenceEncoder(backbone.eval(), TOKENIZERS["smollm2"](), pooling="mean", prompt=load_prompt("plain"))
    encoder.save_pretrained(tmp_path / "mamba")
    with pytest.raises(ArtifactError, match="'mamba'"):
        export_onnx(tmp_path / "mamba", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_commands_export_and_verify(run: Path, tmp_path: Path) -> None:
    done = program("angle-llm", "export", run / "adapter", tmp_path / "out", "--to", "onnx")
    assert done.returncode == 0, done.stderr
    assert "verdict: the same encoder" in done.stdout
    report = json.loads((tmp_path / "out" / "verification.json").read_text())
    assert report["holds"]
    assert report["base_difference"] > TIMES_SMALLER * report["comparisons"][0]["largest_difference"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "onnxruntime.InferenceSession" in card
    assert "onnxruntime.InferenceSession" in done.stdout
    code = (
        card.split("```python\n")[1]
        .split("```")[0]
        .replace('"tokenizer.json"', repr(str(tmp_path / "out/tokenizer.json")))
    )
    code = code.replace(repr(GRAPH_NAME).replace("'", '"'), repr(str(tmp_path / "out" / GRAPH_NAME)))
    values: dict[str, Any] = {"texts": TEXTS}
    exec(code, values)
    encoder = SentenceEncoder.from_pretrained(run / "adapter", device="cpu")
    assert largest_difference(values["rows"], encoder.encode(TEXTS)) <= TOLERANCE

    shutil.copytree(run / "onnx", tmp_path / "wrong")
    shutil.copyfile(run / "base" / "tokenizer.json", tmp_path / "wrong" / "tokenizer.json")
    spec = json.loads((run / "onnx" / "tokenizer.json").read_text())
    change_json(
        tmp_path / "wrong" / "tokenizer.json",
        lambda it: it.update({key: spec[key] for key in ("padding", "truncation")}),
    )
    done = program("angle-llm", "verify", run / "adapter", tmp_path / "out", tmp_path / "wrong")
    assert done.returncode == 1
    assert "different token ids" in done.stdout
    refused = program("angle-llm", "export", run / "adapter", tmp_path / "half", "--to", "onnx", "--dtype", "float16")
    assert refused.returncode == 2
    assert "--dtype with --to onnx" in refused.stderr

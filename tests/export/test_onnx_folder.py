"""Export to ONNX: the vectors of the encoder, computed by onnxruntime and tokenizers alone, for any batch and length."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kills import contents
from programs import run as program
from readers.families import FAMILIES, make_encoder
from tiny import save_tiny_adapter, save_tiny_base, tiny_encoder

from angle_llm import PromptTemplate, SentenceEncoder, load_prompt
from angle_llm.export.comparison import TIMES_SMALLER, TOLERANCE, Comparison, compare_forms, cosine_differences
from angle_llm.export.formats.onnx_folder import FACTS_NAME, GRAPH_NAME, OnnxModel, is_onnx_folder
from angle_llm.export.formats.onnx_graph import export_onnx
from angle_llm.export.texts import SENTENCES
from angle_llm.export.verify import _encode
from angle_llm.model.pooling import POOLINGS, Pooling
from angle_llm.model.source.checks import EXPORT_NAME, ArtifactError
from angle_llm.prompts import SidePrompts

for library in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(library, reason="the extra `onnx` is not installed")

PROMPT = PromptTemplate("mine", 'The sentence "{text}" means "', tokenization="segments")
LONG = "They went on and on along the river. " * 30
TEXTS = [*SENTENCES[:12], LONG]
"""Texts of 1 to 100 tokens, and a text longer than the maximum length."""


def compare(encoder: SentenceEncoder, folder: Path, texts: list[str]) -> Comparison:
    """Compare a folder with its encoder like `verify`: facts, token ids, vectors."""
    forms = (encoder, "adapter", "first"), (OnnxModel(folder), "ONNX", "other")
    first, other = (_encode(form, kind, name, texts, None, [None]) for form, kind, name in forms)  # type: ignore[arg-type]
    return compare_forms(first, other, texts, None)


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


def test_the_graph_gives_the_vectors_for_any_batch_and_length(run: Path, encoder: SentenceEncoder) -> None:
    found = compare(encoder, run / "onnx", TEXTS)
    assert not found.problems
    assert found.texts_with_other_tokens == 0
    assert len(encoder.tokenize([LONG])[0]) == 100
    rows = encoder.encode(TEXTS)
    for texts_together in (1, 2, 5, 13):  # traced with 2 texts of 7 tokens
        model = OnnxModel(run / "onnx", texts_together=texts_together)
        assert largest_difference(model.encode(TEXTS), rows) <= TOLERANCE
    assert model.encode([]).shape == (0, 32)


def test_the_files(run: Path, encoder: SentenceEncoder) -> None:
    assert FACTS_NAME == EXPORT_NAME
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
    model = OnnxModel(tmp_path / "left", texts_together=5)
    assert model.tokenizer.encode_batch(["a", "a b c"])[0].attention_mask[0] == 0
    assert largest_difference(model.encode(TEXTS), encoder.encode(TEXTS)) <= TOLERANCE


def test_encoding_imports_neither_torch_nor_transformers(run: Path, encoder: SentenceEncoder, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(['torch', 'transformers', 'sentence_transformers', 'onnx'])\n"
        "import numpy; from angle_llm.export.formats.onnx_folder import OnnxModel\n"
        "numpy.save(sys.argv[2], OnnxModel(sys.argv[1]).encode(sys.argv[3:]))"
    )
    command = [sys.executable, "-c", code, str(run / "onnx"), str(tmp_path / "rows.npy"), *TEXTS]
    subprocess.run(command, check=True)
    assert largest_difference(np.load(tmp_path / "rows.npy"), encoder.encode(TEXTS)) <= TOLERANCE


def test_int8_weights_change_the_vectors_a_little(run: Path, encoder: SentenceEncoder, tmp_path: Path) -> None:
    export_onnx(run / "adapter", tmp_path / "int8", int8=True)
    model = OnnxModel(tmp_path / "int8")
    assert model.bits == 8
    assert (tmp_path / "int8" / GRAPH_NAME).stat().st_size < (run / "onnx" / GRAPH_NAME).stat().st_size
    assert 1e-7 < largest_difference(model.encode(TEXTS), encoder.encode(TEXTS)) < 0.01  # 0.002 in SmolLM2


def test_a_folder_without_the_prompt_is_found(run: Path, encoder: SentenceEncoder, tmp_path: Path) -> None:
    shutil.copytree(run / "onnx", tmp_path / "bare")
    truncated = json.loads((run / "onnx" / "tokenizer.json").read_text())
    bare = json.loads((run / "base" / "tokenizer.json").read_text())
    bare |= {name: truncated[name] for name in ("padding", "truncation")}
    (tmp_path / "bare" / "tokenizer.json").write_text(json.dumps(bare))
    found = compare(encoder, tmp_path / "bare", TEXTS)
    assert found.texts_with_other_tokens == len(TEXTS)
    assert found.largest_difference > TIMES_SMALLER * TOLERANCE


def test_damaged_folders_and_other_targets_are_refused(run: Path, tmp_path: Path) -> None:
    for name in (GRAPH_NAME, "tokenizer.json", FACTS_NAME):
        shutil.copytree(run / "onnx", tmp_path / "damaged", dirs_exist_ok=True)
        (tmp_path / "damaged" / name).write_bytes((run / "onnx" / name).read_bytes()[:200])
        with pytest.raises(ValueError, match="damaged"):
            OnnxModel(tmp_path / "damaged")
    before = contents(run)
    for target in ("adapter/in", "base/in", "onnx"):
        with pytest.raises(ArtifactError, match=target.partition("/")[0]):
            export_onnx(run / "adapter", run / target)
    assert contents(run) == before
    with pytest.raises(FileNotFoundError, match="base"):
        export_onnx(run / "base", tmp_path / "out")


def test_two_prompts_with_a_tail_are_refused_with_advice(tmp_path: Path) -> None:
    prompts = SidePrompts(PROMPT, load_prompt("plain"))
    tiny_encoder("bert", prompt=prompts, max_length=60).save_pretrained(tmp_path / "model")
    with pytest.raises(ArtifactError, match="--as query"):
        export_onnx(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name, kind in FAMILIES.items() if not kind.gguf])
def test_families(family: str, tmp_path: Path) -> None:
    encoder, _ = make_encoder(family, "one prompt", tmp_path)
    export_onnx(tmp_path / "model", tmp_path / "onnx")
    names = json.loads((tmp_path / "onnx" / FACTS_NAME).read_text())["plain_names"]
    texts = [
        text for text in [*SENTENCES, LONG] if has_tokens(encoder, text) and not any(name in text for name in names)
    ]
    found = compare(encoder, tmp_path / "onnx", texts)
    print(f"{family}: 1-cos {found.largest_difference:.1e} on {len(texts)} texts")
    assert not found.problems
    if family == "mpnet":  # its positions count the ids that are not 1, but this tokenizer pads with 0
        return
    rows = encoder.encode(texts)
    change_json(tmp_path / "onnx" / "tokenizer.json", lambda spec: spec["padding"].update(direction="Left"))
    for texts_together in (1, 7):
        left = OnnxModel(tmp_path / "onnx", texts_together=texts_together)
        assert largest_difference(left.encode(texts), rows) <= TOLERANCE


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


@pytest.mark.slow
def test_wrong_folders_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real exports of a base, with another pooling, and with a pooling that needs padding on the left."""
    save_tiny_adapter(save_tiny_base("llama-tied", tmp_path / "base"), tmp_path / "adapter", max_length=100)
    encoder = SentenceEncoder.from_pretrained(tmp_path / "adapter", device="cpu")
    export_onnx(tmp_path / "adapter", tmp_path / "right")
    assert not compare(encoder, tmp_path / "right", TEXTS).problems

    def difference(name: str) -> float:
        found = compare(encoder, tmp_path / name, TEXTS)
        assert any("1-cos" in problem for problem in found.problems)
        assert found.texts_with_other_tokens == 0
        print(f"{name}: 1-cos {found.largest_difference:.1e}")
        return found.largest_difference

    SentenceEncoder.from_pretrained(tmp_path / "base", device="cpu", max_length=100).save_pretrained(
        tmp_path / "untrained"
    )
    export_onnx(tmp_path / "untrained", tmp_path / "of the base")
    assert difference("of the base") > TIMES_SMALLER * TOLERANCE
    for name, pooling in (("mean", POOLINGS["mean"]), ("last position", Pooling(last_position_without_mask))):
        with monkeypatch.context() as patch:
            patch.setitem(POOLINGS, "last", pooling)
            export_onnx(tmp_path / "adapter", tmp_path / name)
        assert difference(name) > TIMES_SMALLER * TOLERANCE
    # Padding on the left, or one text at a time, hides the last fault: batches must be padded as the folder says.
    alone = OnnxModel(tmp_path / "last position", texts_together=1).encode(TEXTS)
    assert largest_difference(alone, encoder.encode(TEXTS)) <= TOLERANCE


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

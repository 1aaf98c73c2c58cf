"""Export for sentence-transformers: complete or not written, with the vectors of the encoder.

Where the library is not installed, the parts of the folder are combined here as the library does.
"""

import importlib.util
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kills import contents
from safetensors.torch import load_file, save_file
from tiny import KINDS, LIKE_ANOTHER, save_tiny_adapter, save_tiny_base, tiny_encoder
from tiny_tokenizers import VOCABULARY, unigram
from transformers import AutoModel, PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaModel

from angle_llm import PromptTemplate, SentenceEncoder, cli, load_prompt
from angle_llm.export.exported_folder import LIBRARY, ExportFacts
from angle_llm.export.forms import kind_of
from angle_llm.export.merge import merge
from angle_llm.export.sentence_transformers import export_sentence_transformers
from angle_llm.export.verify import VerifyOptions, verify
from angle_llm.model.pooling import pooling_named
from angle_llm.model.source import sentence_transformers_folder as find_sentence_transformers
from angle_llm.model.source.checks import ArtifactError
from angle_llm.settings.parsing import MissingLibraryError

TEXTS = [
    "A man is eating.",
    'Someone says "no", then eats {text} for </s> a long time',
    "Where is it?",
    "</s> [CLS] <|im_end|>",
]
LONG = "They went on and on along the river. " * 30

needs_library = pytest.mark.needs("sentence_transformers")


def save_adapter(kind: str, folder: Path, **options: Any) -> Path:
    return save_tiny_adapter(save_tiny_base(kind, folder / "base"), folder / "adapter", **options)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return save_adapter("llama", tmp_path)


def by_hand(folder: Path, texts: list[str]) -> np.ndarray:
    """Tokenizer, model and pooling as the files of the folder name them."""
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    assert {"pooling_mode_cls_token", "pooling_mode_mean_tokens"} <= pooling.keys()  # needed by TEI
    (mode,) = [name for name, on in pooling.items() if name.startswith("pooling_mode_") and on]
    ours = {"lasttoken": "last", "cls_token": "cls", "mean_tokens": "mean", "max_tokens": "last-max"}
    options = json.loads((folder / "sentence_bert_config.json").read_text())
    model: Any = AutoModel.from_pretrained(folder, **options.get("model_args", {})).eval()
    dimensions = getattr(model.config, "word_embed_proj_dim", None) or model.config.hidden_size
    assert pooling["word_embedding_dimension"] == dimensions
    batch = PreTrainedTokenizerFast.from_pretrained(folder)(
        texts, padding=True, truncation="longest_first", return_tensors="pt"
    )
    with torch.no_grad():
        states = model(**batch).last_hidden_state
        rows = pooling_named(ours[mode.removeprefix("pooling_mode_")]).function(states, batch["attention_mask"])
    return rows.numpy()


def by_library(folder: Path, texts: list[str]) -> np.ndarray:
    library: Any = importlib.import_module("sentence_transformers")
    rows: np.ndarray = library.SentenceTransformer(str(folder), device="cpu").encode(texts)
    return rows


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    a, b = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (a, b))
    return float(((a - b) ** 2).sum(1).max() / 2)


@needs_library
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("kind", "tokenization"),
    [
        *(
            pytest.param(kind, "joined", marks=[pytest.mark.slow] * (kind in LIKE_ANOTHER - {"qwen2", "qwen3"}))
            for kind in KINDS
        ),
        ("llama", "segments"),
        ("qwen2", "segments"),
    ],
)
def test_the_folder_gives_the_vectors(kind: str, tokenization: str, tmp_path: Path) -> None:
    name = "summarize_one_word_edited" if tokenization == "joined" else "summarize_one_word"
    prompt = replace(load_prompt(name), tokenization=tokenization)
    run = save_adapter(kind, tmp_path, prompt=prompt, max_length=100)
    found = export_sentence_transformers(run, tmp_path / "out", device="cpu")
    assert found.comparisons[0].form.kind == "sentence-transformers"
    assert found.comparisons[0].largest_difference < 1e-9
    texts = [*TEXTS, LONG]
    expected = SentenceEncoder.from_pretrained(run, device="cpu").encode(texts)
    for rows in (by_hand, by_library):
        assert largest_difference(rows(tmp_path / "out", texts), expected) < 1e-9
    model_type = json.loads((tmp_path / "out" / "config.json").read_text())["model_type"]
    base_type = json.loads((tmp_path / "base" / "config.json").read_text())["model_type"]
    as_llama = kind == "qwen2" and tokenization == "joined"
    assert model_type == ("llama" if as_llama else base_type), "transformers would rebuild the tokenizer of Qwen2"


@needs_library
@pytest.mark.parametrize("pooling", ["max", "mean_sqrt_len", "weightedmean"])
def test_an_encoder_that_normalises_is_exported_with_the_module(pooling: str, tmp_path: Path) -> None:
    encoder = tiny_encoder("qwen2", prompt=load_prompt("plain_eos"), pooling=pooling, max_length=60, normalize=True)
    assert encoder.tokenize([LONG])[0][-1] == encoder.tokenizer.eos_token_id
    encoder.save_pretrained(tmp_path / "whole")
    found = export_sentence_transformers(tmp_path / "whole", tmp_path / "out", device="cpu")
    assert found.holds
    assert found.comparisons[0].form.normalize
    rows = by_library(tmp_path / "out", [*TEXTS, LONG])
    assert np.abs(rows - encoder.encode([*TEXTS, LONG])).max() < 1e-6  # float32
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    (tmp_path / "out" / "modules.json").write_text(json.dumps(modules[:2]))
    again = verify([tmp_path / "whole", tmp_path / "out"], VerifyOptions(device="cpu"))
    assert "normalize" in "".join(again.problems)


@pytest.mark.parametrize(("kind", "pooling"), [("bert", "cls"), ("bert", "last-max"), ("llama", "mean")])
def test_a_full_model_keeps_its_weights(kind: str, pooling: str, tmp_path: Path) -> None:
    encoder = tiny_encoder(kind, pooling=pooling, max_length=60)
    encoder.save_pretrained(tmp_path / "whole")
    export_sentence_transformers(tmp_path / "whole", tmp_path / "out", check=False)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out")]
    assert weights[0] == weights[1]
    assert largest_difference(by_hand(tmp_path / "out", TEXTS), encoder.encode(TEXTS)) < 1e-9
    facts = ExportFacts.read(tmp_path / "out")
    assert (facts.prompt, facts.pooling, facts.max_length) == (encoder.prompts, pooling, 60)


def test_the_command_and_its_files(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    cli.run(["export", str(run), str(out), "--to", "sentence-transformers", "--no-verify", "--dtype", "bfloat16"])
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == {
        "1_Pooling/config.json", "README.md", "angle_llm_export.json", "config.json", "config_sentence_transformers.json",
        "merge.json", "model.safetensors", "modules.json", "sentence_bert_config.json", "tokenizer.json",
        "tokenizer_config.json", "verification.json",
    }  # fmt: skip
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter", "out"}


def test_the_folder_is_not_opened_as_a_backbone(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokenizer applies the prompt: a second prompt would raise no error."""
    export_sentence_transformers(run, tmp_path / "out", check=False)
    with pytest.raises(ArtifactError, match="was exported for another library"):
        SentenceEncoder.from_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match="does not store how it was trained"):
        verify([tmp_path / "out", run])
    assert (kind_of(tmp_path / "out"), kind_of(run)) == (LIBRARY, "adapter")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingLibraryError, match=r"--no-verify skips it.*sentence-transformers is not installed"):
        export_sentence_transformers(run, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(MissingLibraryError, match="sentence-transformers is not installed"):
        verify([run, tmp_path / "out"], VerifyOptions(device="cpu"))


@needs_library
def test_a_unigram_tokenizer_is_exported(tmp_path: Path) -> None:
    """XLM-R, as multilingual-e5 and bge-m3: special tokens are pieces of the tokenizer."""
    config = XLMRobertaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=120, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    XLMRobertaModel(config).save_pretrained(tmp_path / "base")
    unigram().save_pretrained(tmp_path / "base")
    prompt = PromptTemplate("mine", "query: {text}")
    encoder = SentenceEncoder.from_pretrained(
        tmp_path / "base", prompt=prompt, pooling="mean", max_length=80, device="cpu"
    )
    encoder.save_pretrained(tmp_path / "model")
    report = export_sentence_transformers(tmp_path / "model", tmp_path / "out", device="cpu")
    assert report is not None
    assert report.holds
    assert np.abs(by_library(tmp_path / "out", TEXTS) - encoder.encode(TEXTS)).max() < 1e-5


def test_unsupported_encoders_are_refused(tmp_path: Path) -> None:
    tiny_encoder("llama", pooling="first-last-avg").save_pretrained(tmp_path / "pooled")
    tiny_encoder("llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    for name, message in (("pooled", "first-last-avg"), ("half", "bfloat16")):
        with pytest.raises(ArtifactError, match=message):
            export_sentence_transformers(tmp_path / name, tmp_path / "out", check=False, dtype="float32")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("use", [merge, export_sentence_transformers])
def test_the_error_for_a_run_directory_names_its_model(use: Any, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run/model")
    with pytest.raises(FileNotFoundError, match=r"Did you mean .*run/model\?$"):
        use(tmp_path / "run", tmp_path / "out")
    shutil.rmtree(tmp_path / "run/model")
    with pytest.raises(FileNotFoundError, match="model folder"):
        use(tmp_path / "run", tmp_path / "out")


def test_other_folders_are_not_replaced(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "other")
    before = contents(tmp_path / "other")
    for target, problem in {
        "adapter/in": "in the folder of the adapter",
        "base/in": "in the folder of the base",
        "other": "has files",
    }.items():
        with pytest.raises(ArtifactError, match=problem):
            export_sentence_transformers(run, tmp_path / target, check=False)
    assert contents(tmp_path / "other") == before


@needs_library
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_folder_of_another_encoder_is_found(kind: str, tmp_path: Path) -> None:
    prompt = PromptTemplate("mine", 'The sentence "{text}" means "', tokenization="segments")
    run = save_adapter(kind, tmp_path, prompt=prompt, max_length=80)
    export_sentence_transformers(run, tmp_path / "out", check=False)
    assert verify([run, tmp_path / "out"], VerifyOptions(device="cpu")).holds

    def problems(name: str, file: str, content: bytes) -> str:
        shutil.copytree(tmp_path / "out", tmp_path / name)
        (tmp_path / name / file).write_bytes(content)
        found = verify([run, tmp_path / name], VerifyOptions(device="cpu"))
        assert not found.holds
        return found.text()

    pooling = json.dumps({"word_embedding_dimension": 32, "pooling_mode_max_tokens": True}).encode()
    assert "1e-05" in problems("pooled", "1_Pooling/config.json", pooling)
    bare = (tmp_path / "base" / "tokenizer.json").read_bytes()
    assert "token ids" in problems("bare", "tokenizer.json", bare)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors[next(name for name in tensors if name.endswith(("v_proj.weight", "value.weight")))] *= 1.5
    save_file(tensors, tmp_path / "wrong.safetensors", metadata={"format": "pt"})
    wrong = (tmp_path / "wrong.safetensors").read_bytes()
    assert "1e-05" in problems("wrong", "model.safetensors", wrong)


@needs_library
def test_correlations_of_the_folder_are_compared(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_sentence_transformers(run, tmp_path / "out", check=False)
    command = ["verify", str(run), str(tmp_path / "out"), "--pairs", "starter:graded_pairs.tsv"]
    with pytest.raises(SystemExit, match="0"):
        cli.run(command)
    spearman, expected = re.findall(r"Spearman (\S+), expected (\S+)", capsys.readouterr().out)[0]
    assert float(spearman) == pytest.approx(float(expected), abs=0.01)


@needs_library
def test_a_bad_export_is_not_kept(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(find_sentence_transformers.OUR_POOLINGS, "last", "mean_tokens")
    with pytest.raises(SystemExit, match="1"):
        cli.run(["export", str(run), str(tmp_path / "out")])
    assert "was not written" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}

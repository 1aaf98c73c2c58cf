"""Rerankers: raw scores equal to `CrossEncoder.predict`, and models that would be scored wrongly."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny_adapter, save_tiny_base
from tiny_rerankers import RERANKERS, save_tiny_reranker
from tiny_tokenizers import sentences

from angle_llm.model.reranker import Reranker, is_reranker, scorer_identity
from angle_llm.model.source.checks import ArtifactError
from angle_llm.settings.parsing import MissingLibraryError

pytestmark = pytest.mark.needs("sentence_transformers")
TEXTS = sentences()
PAIRS = [(TEXTS[number % 3], TEXTS[number]) for number in range(40)]


def library(folder: Path, **options: Any) -> Any:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(folder), activation_fn=torch.nn.Identity(), device="cpu", local_files_only=True, **options)


@pytest.mark.parametrize("kind", RERANKERS)
def test_scores_are_raw_and_equal_the_library_pair_by_pair(kind: str, tmp_path: Path) -> None:
    folder = save_tiny_reranker(kind, tmp_path / kind)
    scores = Reranker(str(folder), device="cpu").scores(PAIRS)
    model = library(folder)
    alone = [model.predict(pair).item() for pair in PAIRS]
    # float32, a difference of two logits up to 20; padding in a batch changes the order of additions
    np.testing.assert_allclose(scores, alone, rtol=0, atol=5e-5)
    assert np.ptp(scores) > 0.01, "the pairs must differ"
    assert scores.min() < 0 or scores.max() > 1, "not passed through a sigmoid"
    assert scores.dtype == np.float32


def test_instructions_of_queries_are_not_used(tmp_path: Path) -> None:
    reranker = Reranker(str(save_tiny_reranker("bert", tmp_path / "a")), device="cpu")
    with_instruction = [((query, "Find an answer."), document) for query, document in PAIRS]
    np.testing.assert_array_equal(reranker.scores(with_instruction), reranker.scores(PAIRS))


@pytest.mark.parametrize("kind", RERANKERS)
def test_a_folder_that_the_library_saved_has_the_same_scores(kind: str, tmp_path: Path) -> None:
    folder = save_tiny_reranker(kind, tmp_path / kind)
    library(folder).save_pretrained(str(tmp_path / "saved"))
    first, saved = Reranker(str(folder), device="cpu"), Reranker(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_array_equal(first.scores(PAIRS), saved.scores(PAIRS))
    assert is_reranker(str(tmp_path / "saved"))
    assert is_reranker(str(folder)) == (kind != "qwen3")


def test_the_identity_changes_with_all_that_changes_scores(tmp_path: Path) -> None:
    folder = save_tiny_reranker("bert", tmp_path / "a")
    same = scorer_identity(Reranker(str(folder), device="cpu"))
    assert scorer_identity(Reranker(str(folder), device="cpu")) == same
    assert json.loads(json.dumps(same)) == same
    short = Reranker(str(folder), device="cpu", max_length=12)
    assert scorer_identity(short) != same
    assert short.scores(PAIRS).tolist() == library(folder, max_length=12).predict(PAIRS).tolist()
    assert scorer_identity(Reranker(str(folder), device="cpu", dtype="bfloat16"))["dtype"] == "bfloat16"
    other = save_tiny_reranker("bert", tmp_path / "b", seed=1)
    assert scorer_identity(Reranker(str(other), device="cpu"))["reranker"] != same["reranker"]
    answers = save_tiny_reranker("qwen3", tmp_path / "c")
    before = scorer_identity(Reranker(str(answers), device="cpu"))
    (answers / "chat_template.jinja").write_text(
        (answers / "chat_template.jinja").read_text().replace("<think>", "Is it relevant?")
    )
    assert scorer_identity(Reranker(str(answers), device="cpu"))["tokenizer"] != before["tokenizer"]


def test_models_without_a_trained_score_are_refused(tmp_path: Path) -> None:
    base = save_tiny_base("bert", tmp_path / "base")
    with pytest.raises(ArtifactError, match=r"base: expected a reranker .* got BertModel without"):
        Reranker(str(base))
    encoder = shutil.copytree(save_tiny_reranker("qwen3", tmp_path / "qwen"), tmp_path / "encoder")
    (encoder / "modules.json").write_text("[]")
    with pytest.raises(ArtifactError, match="got Qwen3ForCausalLM without"):  # Qwen3-Embedding: ForCausalLM too
        Reranker(str(encoder))
    classes = save_tiny_reranker("bert", tmp_path / "classes", labels=3)
    with pytest.raises(ArtifactError, match="expected one score per pair, got 3 labels"):
        Reranker(str(classes))
    adapter = save_tiny_adapter(base, tmp_path / "adapter")
    assert not any(map(is_reranker, map(str, (base, encoder, adapter, tmp_path / "none"))))
    with pytest.raises(FileNotFoundError, match="none"):
        Reranker(str(tmp_path / "none"))


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_a_classifier_without_its_head_is_refused(kind: str, tmp_path: Path) -> None:
    # The library would score with a random head.
    folder = save_tiny_reranker(kind, tmp_path / kind)
    weights = load_file(folder / "model.safetensors")
    backbone = {name: weight for name, weight in weights.items() if not name.startswith("classifier.")}
    save_file(backbone, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"expected the tensor classifier\..*, got none: its score is not trained"):
        Reranker(str(folder), device="cpu")


def test_a_language_model_needs_its_question_and_its_answers(tmp_path: Path) -> None:
    folder = save_tiny_reranker("qwen3", tmp_path / "qwen")
    template = folder / "chat_template.jinja"
    template.write_text("{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}")
    with pytest.raises(ValueError, match="cannot carry a 'query'/'document' pair"):
        Reranker(str(folder), device="cpu").scores(PAIRS)
    template.unlink()
    with pytest.raises(ArtifactError, match="expected a chat template with the roles query and document"):
        Reranker(str(folder), device="cpu")
    # The library would take the unknown token for both answers, and every score would be 0.
    config = json.loads((folder / "tokenizer_config.json").read_text())
    words = json.loads((folder / "tokenizer.json").read_text())
    words["added_tokens"] = [token for token in words["added_tokens"] if token["content"] not in ("yes", "no")]
    (folder / "tokenizer.json").write_text(json.dumps(words))
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": "<|im_end|>"}))
    with pytest.raises(ArtifactError, match="no tokens yes and no"):
        Reranker(str(folder), device="cpu")


def test_the_template_of_the_guide_is_the_prompt_of_qwen3_reranker(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
    lines = guide.partition("      <|im_start|>system\n")[2].partition("\n\n## ")[0].splitlines()
    folder = save_tiny_reranker("qwen3", tmp_path / "qwen")
    template = "\n".join(["<|im_start|>system", *(line.removeprefix("      ") for line in lines)])
    (folder / "chat_template.jinja").write_text(template + "\n", encoding="utf-8")
    reranker = Reranker(str(folder), device="cpu", max_length=400)
    ids = reranker.model.preprocess([("Who eats?", "A man eats.")])["input_ids"][0]
    assert reranker.model.tokenizer.decode(ids) == (  # the strings of the model card
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: Who eats?\n<Document>: A man eats.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_scores_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    reranker = Reranker(str(save_tiny_reranker("bert", tmp_path / "a")), device="cpu")
    reranker.model[0].model.classifier.bias.data.fill_(float("nan"))
    with pytest.raises(ArtifactError, match=r"the score of .* is not finite. Set --dtype float32"):
        reranker.scores(PAIRS)


def test_the_library_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingLibraryError, match=r"reranker x: sentence-transformers .* 'angle_llm\[export\]'"):
        Reranker("x")

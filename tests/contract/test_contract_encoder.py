"""`SentenceEncoder` in Python: exact vectors, edits of a prompt, and shared work."""

import numpy as np
import pytest
import torch
from commands import Files
from tiny_folders import sentences
from transformers import AutoModel, AutoTokenizer

from angle_llm import PromptTemplate, SentenceEncoder

PROMPT = 'Summarize sentence "{text}" in one word:"'
TEXTS = [*sentences(12, seed=9), "Hi", 'She said "no".', "Hi", "A man runs in the park, and nobody looks at him. " * 2]
CLOSE = 2e-6
"""Relative difference of two rows that are equal but for the rounding of float32."""


def plain_rows(folder: str, texts: list[str], template: str = "{text}", pooling: str = "last") -> np.ndarray:
    """Rows of plain transformers for one text at a time: no batch, no padding, no mask."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in texts:
        ids = tokenizer(template.replace("{text}", text), return_tensors="pt")["input_ids"]
        with torch.no_grad():
            states = model(input_ids=ids).last_hidden_state[0]
        rows.append((states[-1] if pooling == "last" else states.mean(dim=0)).numpy())
    return np.stack(rows)


def assert_close(rows: np.ndarray, due: np.ndarray, within: float = CLOSE) -> None:
    assert rows.shape == due.shape
    assert (np.linalg.norm(rows - due, axis=1) / np.linalg.norm(due, axis=1)).max() <= within


@pytest.fixture(scope="module")
def llama(files: Files) -> SentenceEncoder:
    return SentenceEncoder.from_pretrained(files.llama)


@pytest.mark.parametrize(
    ("kind", "template", "pooling"),
    [("llama", PROMPT, "last"), ("mistral", PROMPT, "last"), ("llama", "{text}", "mean"), ("bert", "{text}", "mean")],
)
@pytest.mark.parametrize("budget", [None, 60])
def test_rows_equal_the_plain_model_on_one_text_at_a_time(
    kind: str, template: str, pooling: str, budget: int | None, files: Files
) -> None:
    prompt = PromptTemplate(name="x", template=template)
    encoder = SentenceEncoder.from_pretrained(getattr(files, kind), prompt=prompt, pooling=pooling)
    rows = encoder.encode(TEXTS, micro_batch_tokens=budget)
    assert_close(rows, plain_rows(getattr(files, kind), TEXTS, template, pooling))


def test_the_edits_of_a_prompt_change_the_text(llama: SentenceEncoder) -> None:
    rows = llama.with_prompt("summarize_one_word_edited").encode(['A "dog" runs', "Who runs?", "A dog."])
    assert_close(rows, llama.encode(["A 'dog' runs.", "Who runs.", "A dog."]))


def test_repeated_texts_and_shared_prefixes_are_computed_once(llama: SentenceEncoder, files: Files) -> None:
    texts = sentences(20) * 3
    _, stats = llama.encode(texts, return_stats=True)
    assert (stats.texts, stats.unique_texts) == (60, 20)
    assert stats.computed_tokens < 0.3 * stats.logical_tokens
    _, alone = llama.encode(sentences(20), return_stats=True)
    assert stats.computed_tokens == alone.computed_tokens < alone.logical_tokens
    _, padded = SentenceEncoder.from_pretrained(files.bert).encode(texts, return_stats=True)
    assert padded.unique_texts == 20
    assert padded.computed_tokens >= padded.logical_tokens / 3

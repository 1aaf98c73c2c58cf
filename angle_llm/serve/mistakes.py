"""Find the mistake that explains wrong vectors of a server.

The encoder repeats likely mistakes, such as a dropped prompt. The mistake that reproduces the vectors is named.

Legend: M texts (each text for each side), D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layout.micro_batches import LayoutSupport
from angle_llm.model.source.tokenizer import SideTokenizers, count_positions
from angle_llm.model.vectors import cosine_differences
from angle_llm.prompts import PLACEHOLDER, PromptTemplate, Side, SidePrompts

Rows: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
HALF = 1e-3
"""Largest 1 - cos between vectors that one model computes in bfloat16 and in float32."""
_TEXTS = 6
"""Number of texts for which a mistake must reproduce the vector."""
_LENGTHS = (32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192)
"""Usual maximum lengths."""


def likely_mistake(
    encoder: SentenceEncoder,
    server: Any,
    expected_MD: Rows,
    observed_MD: Rows,
    base_MD: Rows | None,
    texts: Sequence[tuple[str, Side | None]],
    tolerance: float,
) -> str:
    """Return the mistake that explains the vectors of a server, as text; empty if none is found.

    Args:
        encoder: the encoder that is served.
        server: the server, with the interface of `export.forms.Form`.
        expected_MD, observed_MD, base_MD: vectors of the encoder, the server, and the untrained base (None: unknown).
        texts: the M texts, each with its side.
        tolerance: largest allowed 1 - cos.
    """
    if observed_MD.shape != expected_MD.shape:
        return ""
    difference_M = cosine_differences(observed_MD, expected_MD)
    wrong = [int(text) for text in np.flatnonzero(difference_M > tolerance)]
    if not wrong:
        return ""
    if difference_M.max() <= HALF:
        return f"rounding: half precision differs by up to {HALF:.0e} (--tolerance {HALF:.0e})"

    # The shortest texts: long texts can have a second mistake, if they are truncated in another way.
    chosen = sorted(wrong, key=lambda number: len(texts[number][0]))[:_TEXTS]
    # A mistake must be much closer to the observed vectors than the encoder is.
    limits = np.maximum(tolerance, np.minimum(HALF, difference_M[chosen] / 20))

    def encode(form: Any) -> Rows:
        pairs = [texts[number] for number in chosen]
        rows = [(form if side is None else form.for_side(side)).encode([text]) for text, side in pairs]
        return np.concatenate(rows).astype(np.float64)

    def explains(rows_CD: Rows) -> bool:
        return bool((cosine_differences(rows_CD, observed_MD[chosen]) <= limits).all())

    if base_MD is not None and explains(base_MD[chosen]):
        return "the bare base is served, without the training"
    if (cosine_differences(encode(server), expected_MD[chosen]) <= limits).all():
        return "a text has the right vector alone, but not with other texts: their order, or the mask of the padding"
    for name, changed in _mistakes(encoder):
        if explains(encode(changed)):
            return name
    return f"none found that reproduces the vectors; {len(wrong)} of {len(texts)} texts are wrong"


def _mistakes(encoder: SentenceEncoder) -> list[tuple[str, SentenceEncoder]]:
    """Return likely mistakes, each as its name and an encoder that makes it."""
    query, document = encoder.prompts.query, encoder.prompts.document
    changes: dict[str, Callable[[PromptTemplate], PromptTemplate]] = {
        "the prompt is dropped": lambda prompt: replace(prompt, template=PLACEHOLDER, edits=(), instruction=""),
        "the prompt of the other side is used": lambda prompt: document if prompt == query else query,
        "the prompt is added twice": lambda prompt: replace(
            prompt, template=prompt.format(prompt.written), instruction=""
        ),
        "the prompt after the text is dropped": lambda prompt: replace(
            prompt, template=prompt.head + PLACEHOLDER, instruction=""
        ),
    }
    mistakes = []
    for name, change in changes.items():
        with suppress(ValueError):  # the prompt is too long
            mistakes.append((name, encoder.with_prompt(SidePrompts(change(query), change(document)))))
    # A folder without our files is served without the prompt and with the pooling that the server prefers.
    for prefix, prompted in [("", encoder), ("the prompt is dropped, and ", dict(mistakes)["the prompt is dropped"])]:
        padded = prompted.changed(layouts=LayoutSupport("padded", "for every pooling"))
        for pooling in ("last", "mean", "cls", "max", "weightedmean"):
            changed = padded.changed(model=encoder.model.changed(pooling=pooling))
            mistakes.append((f"{prefix}pooling {pooling}, expected {encoder.pooling}", changed))
    positions = count_positions(encoder.model.backbone) or max(_LENGTHS)
    for length in (length for length in _LENGTHS if length <= positions):
        name = f"texts are truncated to {length} tokens, expected {encoder.max_length}"
        with suppress(ValueError):  # the prompt is too long
            tokenizers = SideTokenizers.of(encoder.tokenizer, encoder.prompts, length)
            mistakes.append((name, encoder.changed(tokenizers=tokenizers)))
    return mistakes

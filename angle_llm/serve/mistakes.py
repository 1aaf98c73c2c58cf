"""Find the mistake that explains wrong vectors of a program that serves an encoder.

The encoder repeats likely mistakes, such as a dropped prompt or another pooling. The mistake that reproduces the vectors is
named. Two mistakes at once are tried too.

Legend: M texts (each text for each side), D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch

from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layers import lora
from angle_llm.model.layout.attention import attention_kernels
from angle_llm.model.pooling import EmbeddingModel
from angle_llm.model.source.checks import evaluating
from angle_llm.model.tokenizer import SentenceTokenizer, count_positions
from angle_llm.model.vectors import unit_rows
from angle_llm.prompts import PLACEHOLDER, PromptTemplate, Side

Rows = np.ndarray[Any, np.dtype[np.float64]]
POOLINGS = ("last", "mean", "cls", "max", "weightedmean")
LENGTHS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
"""Usual maximum lengths of programs."""
HALF = 1e-3
"""Largest 1 - cos between vectors that one model computes in bfloat16 and in float32."""
TEXTS = 8
"""Number of texts that a mistake must explain."""


@dataclass(frozen=True)
class _Way:
    """How a program may compute the vector of a text; the defaults are the right way."""

    edit: Callable[[str], str] = str
    prompt: Callable[[PromptTemplate], PromptTemplate] | None = None
    ids: Callable[[list[int]], list[int]] | None = None
    pooling: str | None = None
    base: bool = False
    length: int | None = None


def likely_mistake(
    encoder: SentenceEncoder,
    due_MD: Rows,
    found_MD: Rows,
    base_MD: Rows | None,
    texts: Sequence[tuple[str, Side | None]],
    alone: Callable[[str, Side | None], Rows],
    tolerance: float,
) -> str:
    """Return the mistake that explains the vectors of a program, as text; empty if the vectors are right.

    Args:
        encoder: the encoder that is served.
        due_MD: vectors of the encoder.
        found_MD: vectors of the program.
        base_MD: vectors of the untrained base; None if the base is unknown.
        texts: the M texts, each with its side.
        alone: function that returns the vector (1, D) of one text by the program.
        tolerance: largest allowed 1 - cos.
    """
    if found_MD.shape != due_MD.shape:
        return ""
    apart_M = _differences(found_MD, due_MD)
    wrong = [int(m) for m in np.flatnonzero(~(apart_M <= tolerance))]
    if not wrong:
        return ""
    if apart_M.max() <= HALF:
        return f"a difference of rounding: half precision differs by up to {HALF:.0e} (--tolerance {HALF:.0e})"
    limit_M = np.maximum(tolerance, np.minimum(HALF, apart_M / 20))
    lengths_M = np.array([len(encoder.for_side(side or "query").tokenize([text])[0]) for text, side in texts])
    try_all = _Trials(encoder, found_MD, limit_M, texts)
    right = [m for m in range(len(texts)) if m not in wrong]
    if right and lengths_M[wrong].min() > lengths_M[right].max():  # only the longest texts are wrong
        found = try_all(_truncations(encoder), sorted(wrong, key=lambda m: lengths_M[m])[:2])
        shown = f"texts of {lengths_M[right].max()} tokens are right and of {lengths_M[wrong].min()} tokens are wrong"
        return f"{found or 'the text is truncated, or not truncated, in another way'} ({shown})"
    # Long texts may be truncated in another way, too.
    short = (
        np.flatnonzero(lengths_M < encoder.max_length)
        if lengths_M.min() < encoder.max_length
        else np.arange(len(texts))
    )
    if base_MD is not None and (_differences(found_MD, base_MD) <= limit_M)[short].all():
        return "the bare base is served, without the training"
    nearest_M = (unit_rows(found_MD) @ unit_rows(due_MD).T).argmax(axis=1)
    moved = [int(m) for m in short if nearest_M[m] != m and (_differences(found_MD, due_MD[nearest_M]) <= limit_M)[m]]
    if len(moved) > len(short) / 3:
        if all(texts[m][0] == texts[int(nearest_M[m])][0] for m in moved):
            return "the prompt of the other side is used"
        return "texts get the vectors of other texts: the order is wrong"
    wrong = [m for m in wrong if m in short] or wrong
    if all(_differences(alone(*texts[m]), due_MD[m : m + 1])[0] <= limit_M[m] for m in _spread(wrong, TEXTS // 2)):
        return "the vector of a text depends on the other texts of a request: padding is not masked"
    # Wrong and short texts first, because most trials fail at the first text.
    chosen = sorted(_spread(wrong, TEXTS - 2) + _spread(right, 2), key=lambda m: (m in right, lengths_M[m]))
    return try_all(_ways(encoder), chosen) or (
        f"no likely mistake reproduces the vectors; {len(texts) - len(right)} of {len(texts)} texts are wrong"
    )


def _differences(rows_MD: Rows, others_MD: Rows) -> Rows:
    """Return 1 - cos (M,) between corresponding rows."""
    differences_M: Rows = ((unit_rows(rows_MD) - unit_rows(others_MD)) ** 2).sum(axis=1) / 2
    return differences_M


def _spread(places: Sequence[int], number: int) -> list[int]:
    """Return at most `number` of the places, evenly spaced."""
    return [places[int(i)] for i in np.unique(np.linspace(0, len(places) - 1, number).astype(int))] if places else []


def _ways(encoder: SentenceEncoder) -> list[tuple[str, dict[str, Any]]]:
    """Return the likely mistakes: a name, and the fields of `_Way` that differ."""
    prompts, tokenizer, special = encoder.prompts, encoder.tokenizer, encoder.tokenizers.query.special_tokens
    names = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
    tokens = {number for name in names if (number := getattr(tokenizer, name, None)) is not None}
    swapped = {prompts.query: prompts.document, prompts.document: prompts.query}
    found: list[tuple[str, dict[str, Any]]] = [
        ("the prompt is dropped", {"prompt": lambda own: replace(own, template=PLACEHOLDER, edits=())}),
        ("the prompt of the other side is used", {"prompt": swapped.__getitem__}),
        ("the prompt is added twice", {"prompt": lambda own: replace(own, template=own.format(own.template))}),
        ("the prompt after the text is dropped", {"prompt": lambda own: replace(own, template=own.head + PLACEHOLDER)}),
        ("the edits of the prompt are dropped", {"prompt": lambda own: replace(own, edits=())}),
        ("the token after the prompt is dropped", {"prompt": lambda own: replace(own, append=None)}),
        *((f"pooling {name}, expected {encoder.pooling}", {"pooling": name}) for name in POOLINGS),
    ]
    for number in sorted(tokens):
        shown = f"a special token {tokenizer.convert_ids_to_tokens(number)} is added"
        found.append((f"{shown} before the text", {"ids": lambda ids, number=number: [number, *ids]}))
        found.append((f"{shown} after the text", {"ids": lambda ids, number=number: [*ids, number]}))
    before, after = len(special.before), len(special.after)
    if before or after:
        found.append(("the special tokens are dropped", {"ids": lambda ids: ids[before : len(ids) - after]}))
    if before and after:
        found.append(("the special tokens after the text are dropped", {"ids": lambda ids: ids[: len(ids) - after]}))
    if lora.is_adapted(encoder.model.backbone):
        found.append(("the bare base is served", {"base": True}))
    found += [
        ("white space around texts is removed", {"edit": str.strip}),
        ("texts are in lower case", {"edit": str.lower}),
    ]
    return [way for way in found if way[1].get("pooling") != encoder.pooling]


def _truncations(encoder: SentenceEncoder) -> list[tuple[str, dict[str, Any]]]:
    """Return the likely mistakes with texts that are too long, as `_ways`."""
    most, due = count_positions(encoder.model.backbone) or max(LENGTHS), encoder.max_length
    shown = f"expected {due} tokens and the whole prompt"
    found: list[tuple[str, dict[str, Any]]] = [("texts are not truncated", {"length": most})]
    for length in sorted({due, *(length for length in LENGTHS if length <= most)}):
        cut = {"length": most, "ids": lambda ids, length=length: ids[:length]}
        left = {"length": most, "ids": lambda ids, length=length: ids[-length:]}
        found += [
            (f"the text is truncated to {length} tokens, {shown}", {"length": length}),
            (f"the text is truncated to {length} tokens without the end of the prompt, {shown}", cut),
            (f"the text is truncated to the last {length} tokens, {shown}", left),
        ]
    return found


class _Trials:
    """Computes vectors as `_Way` says, and compares them with the vectors of the program."""

    def __init__(
        self, encoder: SentenceEncoder, found_MD: Rows, limit_M: Rows, texts: Sequence[tuple[str, Side | None]]
    ) -> None:
        self._encoder, self._found_MD, self._limit_M, self._texts = encoder, found_MD, limit_M, texts
        self._tokenizers: dict[tuple[str, int], SentenceTokenizer] = {}

    def __call__(self, ways: Sequence[tuple[str, dict[str, Any]]], chosen: Sequence[int]) -> str:
        """Return the name of the first mistake, or two mistakes, that reproduce the vectors of the chosen texts; or ""."""
        for names, changed in _with_pairs(ways):
            try:
                if all(self._reproduces(_Way(**changed), m) for m in chosen):
                    return names
            except ValueError:  # the way is not possible, such as a prompt that is too long
                continue
        return ""

    def _reproduces(self, way: _Way, m: int) -> bool:
        """Return whether a way gives the vector of the program for text `m`."""
        encoder, (text, side) = self._encoder, self._texts[m]
        prompt, length = encoder.prompts.of(side or "query"), way.length or encoder.max_length
        prompt = way.prompt(prompt) if way.prompt else prompt
        key = (prompt.fingerprint, length)
        if key not in self._tokenizers:
            self._tokenizers[key] = SentenceTokenizer(encoder.tokenizer, prompt, length)
        (ids,) = self._tokenizers[key]([way.edit(text)])
        ids = way.ids(ids) if way.ids else ids
        if not ids:
            return False
        model = encoder.model
        if way.pooling is not None:
            model = EmbeddingModel(model.backbone, way.pooling, model.causal, model.dimensions, model.normalize)
        backbone: Any = model.backbone
        ids_BT = torch.tensor([ids], device=encoder.device)
        weights = backbone.disable_adapter() if way.base else nullcontext()
        with evaluating(model), attention_kernels(encoder.device), torch.no_grad(), weights:
            row_BD = model(ids_BT, torch.ones_like(ids_BT)).double().cpu().numpy()
        return bool(_differences(row_BD, self._found_MD[m : m + 1])[0] <= self._limit_M[m])


def _with_pairs(ways: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each mistake, then each two mistakes that change different fields."""
    yield from ways
    for (name, changed), (other, more) in combinations(ways, 2):
        if not changed.keys() & more.keys():
            yield f"{name}, and {other}", changed | more

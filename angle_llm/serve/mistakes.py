"""Find the mistake that explains wrong vectors of a program that serves an encoder.

The encoder repeats likely mistakes, such as a dropped prompt, one or two at a time. The one that reproduces the vectors of
the program is named.

Legend: M texts (each text for each side), D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
import torch

from angle_llm.device import evaluating
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.heads import EmbeddingModel
from angle_llm.model.layers import lora
from angle_llm.model.layout.attention import attention_kernels
from angle_llm.model.source.tokenizer import SentenceTokenizer, count_positions
from angle_llm.model.vectors import cosine_differences, unit_rows
from angle_llm.prompts import PLACEHOLDER, PromptTemplate, Side

Rows: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Way: TypeAlias = tuple[str, dict[str, Any]]
"""A mistake: its name, and the arguments of `_row` that repeat it."""
HALF = 1e-3
"""Largest 1 - cos between vectors that one model computes in bfloat16 and in float32."""


def likely_mistake(
    encoder: SentenceEncoder,
    program: Any,
    expected_MD: Rows,
    observed_MD: Rows,
    base_MD: Rows | None,
    texts: Sequence[tuple[str, Side | None]],
    tolerance: float,
) -> str:
    """Return the mistake that explains the vectors of a program, as text; empty if the directions are right.

    Args:
        encoder: the encoder that is served.
        program: the program, with the interface of `export.forms.Form`.
        expected_MD, observed_MD, base_MD: vectors of the encoder, the program, and the untrained base (None: unknown).
        texts: the M texts, each with its side.
        tolerance: largest allowed 1 - cos.
    """
    if observed_MD.shape != expected_MD.shape:
        return ""
    case = _Case(encoder, expected_MD, observed_MD, texts, tolerance)
    if not case.wrong:
        return ""
    if case.differences.max() <= HALF:
        return f"rounding: half precision differs by up to {HALF:.0e} (--tolerance {HALF:.0e})"

    # Only long texts are wrong: truncation.
    shortest_wrong = case.lengths[case.wrong[0]]
    if case.right and shortest_wrong > max(case.lengths[text] for text in case.right):
        mistake = case.first(_truncations(encoder), case.wrong[:2])
        mistake = mistake or "the text is truncated, or not truncated, in another way"
        return f"{mistake} (wrong: texts of {shortest_wrong} tokens and more)"

    # The vectors belong to the base, or to other texts.
    short = case.short
    if base_MD is not None and case.is_explained_by(base_MD, short):
        return "the bare base is served, without the training"
    nearest = [int(text) for text in (unit_rows(observed_MD) @ unit_rows(expected_MD).T).argmax(axis=1)]
    moved = [m for m in short if nearest[m] != m and case.is_explained_by(expected_MD[nearest], [m])]
    if len(moved) > len(short) / 3:
        if all(texts[m][0] == texts[nearest[m]][0] for m in moved):
            return "the prompt of the other side is used"
        return "texts get the vectors of other texts: the order is wrong"

    # Texts are right alone, but not together.
    chosen = _spread([text for text in case.wrong if text in short] or case.wrong, 6)
    alone = [(program.for_side(side) if side else program).encode([text]) for text, side in (texts[m] for m in chosen)]
    alone_MD = observed_MD.copy()
    alone_MD[chosen] = np.concatenate(alone)
    if (cosine_differences(alone_MD, expected_MD)[chosen] <= case.limits[chosen]).all():
        return "the vector of a text depends on the other texts of a request: padding is not masked"

    # One or two mistakes, which the encoder repeats.
    ways = _ways(encoder)
    pairs = [
        (f"{a}, and {b}", way | more) for (a, way), (b, more) in combinations(ways, 2) if not way.keys() & more.keys()
    ]
    return case.first([*ways, *pairs], [*chosen, *_spread(case.right, 2)]) or (
        f"none found that reproduces the vectors; {len(case.wrong)} of {len(texts)} texts are wrong"
    )


@dataclass(frozen=True)
class _Case:
    """Vectors that a program computed, and those that the encoder computes. Texts are numbers from 0 to M - 1."""

    encoder: SentenceEncoder
    expected_MD: Rows
    observed_MD: Rows
    texts: Sequence[tuple[str, Side | None]]
    tolerance: float

    @cached_property
    def differences(self) -> Rows:
        """1 - cos between the two vectors of each text."""
        return cosine_differences(self.observed_MD, self.expected_MD)

    @cached_property
    def limits(self) -> Rows:
        """Largest 1 - cos of each text at which a mistake explains the observed vector."""
        return np.maximum(self.tolerance, np.minimum(HALF, self.differences / 20))

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of each text."""
        return [len(self.encoder.for_side(side or "query").tokenize([text])[0]) for text, side in self.texts]

    @cached_property
    def right(self) -> list[int]:
        """Texts with the right vector."""
        return [int(text) for text in np.flatnonzero(self.differences <= self.tolerance)]

    @cached_property
    def wrong(self) -> list[int]:
        """Texts with a wrong vector, shortest first."""
        wrong = [int(text) for text in np.flatnonzero(self.differences > self.tolerance)]
        return sorted(wrong, key=self.lengths.__getitem__)

    @property
    def short(self) -> list[int]:
        """Texts that are not truncated; all texts if there are none. A program may truncate in another way, too."""
        every = range(len(self.texts))
        return [text for text in every if self.lengths[text] < self.encoder.max_length] or list(every)

    def is_explained_by(self, rows_MD: Rows, texts: Sequence[int]) -> bool:
        """Return whether vectors equal the observed vectors of some texts."""
        return bool((cosine_differences(rows_MD, self.observed_MD)[texts] <= self.limits[texts]).all())

    def first(self, ways: Iterable[Way], texts: Sequence[int]) -> str:
        """Return the name of the first mistake that reproduces the vectors of some texts; empty if there is none."""
        for name, way in ways:
            with suppress(ValueError):  # not possible, such as a prompt that is too long
                if all(self._is_reproduced(text, way) for text in texts):  # most trials fail at the first text
                    return name
        return ""

    def _is_reproduced(self, text: int, way: dict[str, Any]) -> bool:
        """Return whether the encoder gives the observed vector of a text if it repeats a mistake."""
        row_1D = _row(self.encoder, *self.texts[text], **way)
        return bool(cosine_differences(row_1D, self.observed_MD[[text]])[0] <= self.limits[text])


def _spread(numbers: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of the numbers, evenly spaced."""
    if not numbers:
        return []
    return [numbers[int(index)] for index in np.unique(np.linspace(0, len(numbers) - 1, count).astype(int))]


def _row(
    encoder: SentenceEncoder,
    text: str,
    side: Side | None,
    *,
    edit: Callable[[str], str] = str,
    prompt: Callable[[PromptTemplate], PromptTemplate] | None = None,
    length: int | None = None,
    ids: Callable[[list[int]], list[int]] = list,
    pooling: str | None = None,
    dense: bool = True,
    base: bool = False,
) -> Rows:
    """Encode a text with a changed encoder, such as with another prompt or pooling; return the embedding (1, D).

    `edit`, `prompt` and `ids` are functions that change the text, the prompt of its side, and the token ids. `length` is
    the maximum length. Without `dense`, the Dense modules are skipped; with `base`, the adapter is disabled.
    """
    template = encoder.prompts.of(side or "query")
    template = prompt(template) if prompt else template
    tokenizer = SentenceTokenizer(encoder.tokenizer, template, length or encoder.max_length)
    ids_BT = torch.tensor([ids(tokenizer([edit(text)])[0])], device=encoder.device)
    model, backbone = encoder.model, encoder.model.backbone
    if pooling is not None or not dense:
        layers = model.dense if dense else None
        options = replace(model.options, pooling=pooling or model.options.pooling)
        model = EmbeddingModel(backbone, options, layers)
    weights: Any = backbone.disable_adapter() if base else nullcontext()  # type: ignore[operator]
    with evaluating(model), attention_kernels(encoder.device), torch.no_grad(), weights:
        row_1D: Rows = model(ids_BT, torch.ones_like(ids_BT)).double().cpu().numpy()
    return row_1D


def _ways(encoder: SentenceEncoder) -> list[Way]:
    """Return the likely mistakes that do not depend on the length of a text."""
    # Mistakes of the prompt, the pooling and the text.
    prompts = encoder.prompts
    tokenizer = encoder.tokenizer
    before, after = encoder.tokenizers.query.special_tokens
    others = {prompts.query: prompts.document, prompts.document: prompts.query}
    poolings = ("last", "mean", "cls", "max", "weightedmean")
    ways: list[Way] = [
        ("the prompt is dropped", {"prompt": lambda prompt: replace(prompt, template=PLACEHOLDER, edits=())}),
        ("the prompt of the other side is used", {"prompt": others.__getitem__}),
        (
            "the prompt is added twice",
            {"prompt": lambda prompt: replace(prompt, template=prompt.format(prompt.template))},
        ),
        (
            "the prompt after the text is dropped",
            {"prompt": lambda prompt: replace(prompt, template=prompt.head + PLACEHOLDER)},
        ),
        ("the edits of the prompt are dropped", {"prompt": lambda prompt: replace(prompt, edits=())}),
        ("the token after the prompt is dropped", {"prompt": lambda prompt: replace(prompt, append=None)}),
        *((f"pooling {name}, expected {encoder.pooling}", {"pooling": name}) for name in poolings),
        ("white space around texts is removed", {"edit": str.strip}),
        ("texts are in lower case", {"edit": str.lower}),
        ("the special tokens are dropped", {"ids": lambda ids: ids[len(before) : len(ids) - len(after)]}),
        ("the special tokens after the text are dropped", {"ids": lambda ids: ids[: len(ids) - len(after)]}),
    ]
    # A special token is added.
    names = ("bos_token", "eos_token", "cls_token", "sep_token")
    for token in dict.fromkeys(token for name in names if (token := getattr(tokenizer, name, None))):
        added = [tokenizer.convert_tokens_to_ids(token)]
        ways.append((f"a special token {token} is added before the text", {"ids": partial(list.__add__, added)}))
        ways.append((f"a special token {token} is added after the text", {"ids": lambda ids, added=added: ids + added}))
    # Parts of the model are missing.
    if len(encoder.model.dense):
        ways.append(("the Dense modules are dropped", {"dense": False}))
    if lora.is_adapted(encoder.model.backbone):
        ways.append(("the bare base is served", {"base": True}))
    return ways


def _truncations(encoder: SentenceEncoder) -> list[Way]:
    """Return the likely mistakes with texts that are too long."""
    usual = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
    most = count_positions(encoder.model.backbone) or max(usual)
    due = encoder.max_length
    ways: list[Way] = [("texts are not truncated", {"length": most})]
    for length in sorted({due, *(length for length in usual if length <= most)}):
        name = f"the text is truncated to {length} tokens, expected {due}"
        ways.append((name, {"length": length}))
        cut, left = (lambda ids, n=length: ids[:n]), (lambda ids, n=length: ids[-n:])
        ways.append((f"{name}, and the end of the prompt is lost", {"length": most, "ids": cut}))
        ways.append((f"{name}, and its start is lost", {"length": most, "ids": left}))
    return ways

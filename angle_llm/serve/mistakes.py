"""Find the mistake that explains wrong vectors of a program that serves an encoder.

The encoder repeats likely mistakes, such as a dropped prompt, one or two at a time. The one that reproduces the vectors of
the program is named.

Legend: M texts (each text for each side), D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
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
    due_MD: Rows,
    found_MD: Rows,
    base_MD: Rows | None,
    texts: Sequence[tuple[str, Side | None]],
    tolerance: float,
) -> str:
    """Return the mistake that explains the vectors of a program, as text; empty if the directions are right.

    Args:
        encoder: the encoder that is served.
        program: the program, with the interface of `SentenceTransformersModel`.
        due_MD, found_MD, base_MD: vectors of the encoder, the program, and the untrained base (None: unknown).
        texts: the M texts, each with its side.
        tolerance: largest allowed 1 - cos.
    """
    if found_MD.shape != due_MD.shape:
        return ""
    apart_M = cosine_differences(found_MD, due_MD)
    wrong, right = np.flatnonzero(apart_M > tolerance).tolist(), np.flatnonzero(apart_M <= tolerance).tolist()
    if not wrong:
        return ""
    if apart_M.max() <= HALF:
        return f"rounding: half precision differs by up to {HALF:.0e} (--tolerance {HALF:.0e})"
    limit_M = np.maximum(tolerance, np.minimum(HALF, apart_M / 20))

    def equal(rows_MD: Rows, places: Sequence[int]) -> bool:
        return bool((cosine_differences(rows_MD, found_MD)[places] <= limit_M[places]).all())

    def first(ways: Iterable[Way], places: Sequence[int]) -> str:
        """Return the name of the first mistake that reproduces the vectors of the texts; empty if there is none."""
        for name, way in ways:
            try:  # most trials fail at the first text
                if all(
                    cosine_differences(_row(encoder, *texts[m], **way), found_MD[[m]])[0] <= limit_M[m] for m in places
                ):
                    return name
            except ValueError:  # not possible, such as a prompt that is too long
                continue
        return ""

    lengths = [len(encoder.for_side(side or "query").tokenize([text])[0]) for text, side in texts]
    wrong.sort(key=lengths.__getitem__)
    if right and lengths[wrong[0]] > max(lengths[m] for m in right):
        found = first(_truncations(encoder), wrong[:2]) or "the text is truncated, or not truncated, in another way"
        return f"{found} (wrong: texts of {lengths[wrong[0]]} tokens and more)"
    # Long texts may be truncated in another way, too.
    short = [m for m in range(len(texts)) if lengths[m] < encoder.max_length] or list(range(len(texts)))
    if base_MD is not None and equal(base_MD, short):
        return "the bare base is served, without the training"
    nearest = [int(n) for n in (unit_rows(found_MD) @ unit_rows(due_MD).T).argmax(axis=1)]
    moved = [m for m in short if nearest[m] != m and equal(due_MD[nearest], [m])]
    if len(moved) > len(short) / 3:
        if all(texts[m][0] == texts[nearest[m]][0] for m in moved):
            return "the prompt of the other side is used"
        return "texts get the vectors of other texts: the order is wrong"
    chosen = _spread([m for m in wrong if m in short] or wrong, 6)
    sent = [(program.for_side(side) if side else program).encode([text]) for text, side in (texts[m] for m in chosen)]
    if (cosine_differences(np.concatenate(sent).astype(np.float64), due_MD[chosen]) <= limit_M[chosen]).all():
        return "the vector of a text depends on the other texts of a request: padding is not masked"
    ways = _ways(encoder)
    pairs = [
        (f"{a}, and {b}", way | more) for (a, way), (b, more) in combinations(ways, 2) if not way.keys() & more.keys()
    ]
    return first([*ways, *pairs], [*chosen, *_spread(right, 2)]) or (
        f"none found that reproduces the vectors; {len(wrong)} of {len(texts)} texts are wrong"
    )


def _spread(places: Sequence[int], number: int) -> list[int]:
    """Return at most `number` of the places, evenly spaced."""
    return [places[int(i)] for i in np.unique(np.linspace(0, len(places) - 1, number).astype(int))] if places else []


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
    own = encoder.prompts.of(side or "query")
    tokenizer = SentenceTokenizer(encoder.tokenizer, prompt(own) if prompt else own, length or encoder.max_length)
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
    prompts, tokenizer, (before, after) = encoder.prompts, encoder.tokenizer, encoder.tokenizers.query.special_tokens
    others = {prompts.query: prompts.document, prompts.document: prompts.query}
    poolings = ("last", "mean", "cls", "max", "weightedmean")
    ways: list[Way] = [
        ("the prompt is dropped", {"prompt": lambda own: replace(own, template=PLACEHOLDER, edits=())}),
        ("the prompt of the other side is used", {"prompt": others.__getitem__}),
        ("the prompt is added twice", {"prompt": lambda own: replace(own, template=own.format(own.template))}),
        ("the prompt after the text is dropped", {"prompt": lambda own: replace(own, template=own.head + PLACEHOLDER)}),
        ("the edits of the prompt are dropped", {"prompt": lambda own: replace(own, edits=())}),
        ("the token after the prompt is dropped", {"prompt": lambda own: replace(own, append=None)}),
        *((f"pooling {name}, expected {encoder.pooling}", {"pooling": name}) for name in poolings),
        ("white space around texts is removed", {"edit": str.strip}),
        ("texts are in lower case", {"edit": str.lower}),
        ("the special tokens are dropped", {"ids": lambda ids: ids[len(before) : len(ids) - len(after)]}),
        ("the special tokens after the text are dropped", {"ids": lambda ids: ids[: len(ids) - len(after)]}),
    ]
    names = ("bos_token", "eos_token", "cls_token", "sep_token")
    for token in dict.fromkeys(token for name in names if (token := getattr(tokenizer, name, None))):
        added = [tokenizer.convert_tokens_to_ids(token)]
        ways.append((f"a special token {token} is added before the text", {"ids": partial(list.__add__, added)}))
        ways.append((f"a special token {token} is added after the text", {"ids": lambda ids, added=added: ids + added}))
    if len(encoder.model.dense):
        ways.append(("the Dense modules are dropped", {"dense": False}))
    if lora.is_adapted(encoder.model.backbone):
        ways.append(("the bare base is served", {"base": True}))
    return ways


def _truncations(encoder: SentenceEncoder) -> list[Way]:
    """Return the likely mistakes with texts that are too long."""
    usual = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
    most, due = count_positions(encoder.model.backbone) or max(usual), encoder.max_length
    ways: list[Way] = [("texts are not truncated", {"length": most})]
    for length in sorted({due, *(length for length in usual if length <= most)}):
        name = f"the text is truncated to {length} tokens, expected {due}"
        ways.append((name, {"length": length}))
        cut, left = (lambda ids, n=length: ids[:n]), (lambda ids, n=length: ids[-n:])
        ways.append((f"{name}, and the end of the prompt is lost", {"length": most, "ids": cut}))
        ways.append((f"{name}, and its start is lost", {"length": most, "ids": left}))
    return ways

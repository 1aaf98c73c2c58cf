"""Are these forms one encoder? The same sentences go through each of them, and the vectors are compared.

What is compared is the weights, not the rounding of the arithmetic: every form is opened with the values it has, and
computes in float32.

    adapter         the base's weights rounded to the type they had in training (or as they come out of 4 bits), widened,
                    and the float32 adapter applied to them layer by layer: the function that was trained, without the
                    rounding of bfloat16 activations, which differs from one batch to the next
    whole model     its stored weights, widened
    backbone        the same, with the prompt, pooling and length of the first form, for it has none of its own
    sentence-transformers   the same, encoded by that library, which has to be installed

Where one form is the adapter and another a model it was merged into, their numbers are compared too (see `weights`): a
merge in the arithmetic of bfloat16 is no farther off than the rounding of a good one, and only they show it.

Agreement alone shows nothing where nothing was trained: an untouched base agrees with itself. So the first form must also
be `TIMES_SMALLER` times farther from its base than from its other forms. One form is in memory at a time.

Legend: N texts, D dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from angle_llm.export.library import LIBRARY, LibraryModel, is_library_folder
from angle_llm.export.report import (
    NOISE,
    SPEARMAN_TOLERANCE,
    TIMES_SMALLER,
    TOLERANCE,
    Comparison,
    FormFacts,
    Verification,
    WeightsCount,
)
from angle_llm.export.sentences import SENTENCES
from angle_llm.export.weights import compare_weights
from angle_llm.model.artifact import EncoderCard
from angle_llm.model.checks import is_saved_encoder
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.hub import find
from angle_llm.model.quantization import dequantize
from angle_llm.prompts import PromptTemplate

MERGE_NAME = "merge.json"
"""Where a merged directory says what it was made of."""

Rows = np.ndarray[Any, np.dtype[np.float64]]
Score = Callable[[SentenceEncoder], float]
"""An encoder to its Spearman × 100 on some pairs."""


class VerificationError(ValueError):
    """Two forms that should be one encoder are not; the message is the report."""


@dataclass(frozen=True)
class _Seen:
    """What a form makes of the texts; the form itself may be gone."""

    facts: FormFacts
    ids: list[list[int]]
    rows_ND: Rows


def verify(
    forms: Sequence[str | Path],
    *,
    texts: Sequence[str] | None = None,
    score: Score | None = None,
    tolerance: float | None = None,
    device: str | None = None,
    names: Sequence[str] | None = None,
    original_base: bool = False,
) -> Verification:
    """Compares every form with the first one: saved directories, adapter or whole, sentence-transformers folders, and plain
    backbones.

    `texts` None takes the built-in sentences. `score` gives each form a figure to compare too. `tolerance` is how large
    1 - cos may be, whatever the weights are; None: what follows from the stored types, and no wrong weight. `names` are
    told instead of the paths. `original_base` puts adapters on their base's weights as they are stored, not on the values
    they were trained on.

    Raises:
        ValueError: for fewer than two forms, or texts that cannot be encoded.
        FileNotFoundError, ArtifactError: for a form that cannot be opened.
        MissingLibraryError: for a sentence-transformers folder where that library is not installed.
    """
    if len(forms) < 2:
        raise ValueError(f"verify compares two forms or more, got {len(forms)}. Name another one.")
    names = [str(form) for form in forms] if names is None else names
    forms = [form if is_library_folder(form) else find(str(form)).folder or form for form in forms]
    if is_library_folder(forms[0]):
        raise ValueError(
            f"{names[0]} is a sentence-transformers folder, which does not tell how it was trained. Name the encoder it was "
            "made from first, and the folder after it."
        )

    opened = _open(forms[0], device, original_base=original_base)
    usage = {"prompt": opened.prompt, "pooling": opened.pooling, "max_length": opened.max_length}
    chosen = _encodable(opened, SENTENCES) if texts is None else list(texts)
    first = _look(opened, forms[0], names[0], chosen, score)
    base_rows_ND, base_note = _base_rows(opened, forms[0], first.facts.kind, chosen, device)
    del opened  # before the next one is loaded

    comparisons, notes = [], []
    for path, name in zip(forms[1:], names[1:], strict=True):
        if _kind(path) == LIBRARY:
            seen = _look_at_library(first.facts, path, name, chosen, device, score)
        else:
            opened = _open(path, device, usage, original_base=original_base)
            seen = _look(opened, path, name, chosen, score)
            del opened
        compared = _compare(first, seen, chosen, tolerance)
        count = compare_weights({forms[0]: first.facts, path: seen.facts}, original=original_base)
        comparisons.append(_with_weights(compared, count, judged=tolerance is None))

    base_difference, problems = None, []
    if base_rows_ND is not None:
        base_difference = float(_differences(base_rows_ND, first.rows_ND).mean())
        if not base_difference >= TIMES_SMALLER * NOISE:
            problems.append(f"{names[0]} equals its untouched base: there is no training in it.")
        else:
            comparisons = [_beside_base(other, base_difference) for other in comparisons]
    left_out = len(SENTENCES) - len(chosen) if texts is None else 0
    if left_out:
        notes.append(f"{left_out} built-in texts left out: the tokenizer leaves nothing of them.")
    return Verification(
        texts=len(chosen),
        first=first.facts,
        base_difference=base_difference,
        base_note=base_note,
        comparisons=tuple(comparisons),
        notes=tuple(notes),
        problems=tuple(problems),
    )


def _kind(path: str | Path) -> str:
    if is_library_folder(path):
        return LIBRARY
    if not is_saved_encoder(path):
        return "backbone"
    return "whole model" if EncoderCard.read(Path(path).expanduser()).base is None else "adapter"


def _open(
    path: str | Path, device: str | None, usage: dict[str, Any] | None = None, *, original_base: bool = False
) -> SentenceEncoder:
    """A form with the values it has; `usage` is the prompt, pooling and length of a backbone, which has none."""
    kind = _kind(path)
    if kind == "backbone":
        return SentenceEncoder.from_pretrained(path, device=device, **(usage or {}))
    if kind == "adapter" and original_base:
        return SentenceEncoder.from_pretrained(path, device=device, dtype="float32", bits=None)
    return SentenceEncoder.from_pretrained(path, device=device)


def _compute_in_float32(encoder: SentenceEncoder) -> None:
    """Widens the weights of an encoder in place; their values stay. Out of 4 or 8 bits they come as they were used."""
    if encoder.bits is not None:
        dequantize(encoder.model.backbone, torch.float32)
    for tensor in (*encoder.model.parameters(), *encoder.model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()


def _look(encoder: SentenceEncoder, path: str | Path, name: str, texts: Sequence[str], score: Score | None) -> _Seen:
    """Facts and rows of a form, which is widened."""
    bits = "" if encoder.bits is None else f" in {encoder.bits} bits"
    dtype = str(encoder.dtype).removeprefix("torch.")
    _compute_in_float32(encoder)
    facts = FormFacts(
        name=name,
        kind=_kind(path),
        dtype=dtype + bits,
        prompt=_wording(encoder.prompt),
        prompt_fingerprint=encoder.prompt.fingerprint,
        pooling=encoder.pooling,
        max_length=encoder.max_length,
        dimensions=encoder.dimensions,
        spearman=None if score is None else score(encoder),
    )
    return _Seen(facts, encoder.tokenize(texts), encoder.encode(texts).astype(np.float64))


def _look_at_library(
    mine: FormFacts, path: str | Path, name: str, texts: Sequence[str], device: str | None, score: Score | None
) -> _Seen:
    """Facts and rows of a sentence-transformers folder. One from elsewhere does not say how it words and pools: it is held
    to the first form's way, `mine`, by its ids and vectors."""
    model = LibraryModel(path, device)
    told = model.facts
    rows_ND = model.encode(texts).astype(np.float64)
    facts = FormFacts(
        name=name,
        kind=LIBRARY,
        dtype=model.dtype,
        prompt=mine.prompt if told is None else _wording(told.prompt),
        prompt_fingerprint=mine.prompt_fingerprint if told is None else told.prompt.fingerprint,
        pooling=mine.pooling if told is None else told.pooling,
        max_length=model.max_length,
        dimensions=rows_ND.shape[1],
        spearman=None
        if score is None
        else score(cast("SentenceEncoder", model)),  # it encodes, which is all that is asked
    )
    return _Seen(facts, model.ids(texts), rows_ND)


def _wording(prompt: PromptTemplate) -> str:
    more = [*prompt.edits, *(["segments"] if prompt.tokenization == "segments" else [])]
    return f"{prompt.template!r} ({', '.join(more)})" if more else repr(prompt.template)


def _encodable(encoder: SentenceEncoder, texts: Sequence[str]) -> list[str]:
    """The texts of which the tokenizer leaves something."""

    def is_encodable(text: str) -> bool:
        try:
            encoder.tokenize([text])
        except ValueError:
            return False
        return True

    return [text for text in texts if is_encodable(text)]


def _base_rows(
    encoder: SentenceEncoder, path: str | Path, kind: str, texts: Sequence[str], device: str | None
) -> tuple[Rows | None, str]:
    """Rows of the base the first form was made from, used as the first form is; or None and why not."""
    if kind == "adapter":
        backbone: Any = encoder.model.backbone
        with backbone.disable_adapter():
            return encoder.encode(texts).astype(np.float64), ""
    if kind == "backbone":
        return None, "it is a backbone itself"
    try:
        origin = json.loads((Path(path).expanduser() / MERGE_NAME).read_text(encoding="utf-8"))
        base = SentenceEncoder.from_pretrained(
            origin["base"],
            prompt=encoder.prompt,
            pooling=encoder.pooling,
            max_length=encoder.max_length,
            dtype=origin["base_dtype"],
            device=device,
            revision=origin["base_revision"],
            bits=origin["bits"],
            layers=origin.get("layers"),  # older directories have all
            dimensions=encoder.dimensions,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:  # an old or foreign directory, or a base that is gone
        return None, f"its base cannot be opened ({error})"
    _compute_in_float32(base)
    return base.encode(texts).astype(np.float64), ""


def _unit(rows_ND: Rows) -> Rows:
    length_N1 = np.linalg.norm(rows_ND, axis=1, keepdims=True)
    unit_ND: Rows = rows_ND / np.maximum(length_N1, np.finfo(np.float64).tiny)
    return unit_ND


def _differences(rows_ND: Rows, others_ND: Rows) -> Rows:
    """1 - cos (N,), as half the squared distance of unit vectors: right far below the rounding of the cosine."""
    differences_N: Rows = ((_unit(rows_ND) - _unit(others_ND)) ** 2).sum(axis=1) / 2
    return differences_N


def _compare(first: _Seen, other: _Seen, texts: Sequence[str], tolerance: float | None) -> Comparison:
    mine, its = first.facts, other.facts
    stored = [facts.dtype for facts in (mine, its) if facts.kind != "adapter"] or ["float32"]
    allowed = max(TOLERANCE[dtype] for dtype in stored) if tolerance is None else tolerance
    problems = []
    if its.prompt_fingerprint != mine.prompt_fingerprint:
        problems.append(f"prompt {its.prompt}, the first has {mine.prompt}")
    if its.pooling != mine.pooling:
        problems.append(f"pooling {its.pooling}, the first has {mine.pooling}")
    if its.max_length != mine.max_length:
        problems.append(f"max_length {its.max_length}, the first has {mine.max_length}")
    other_ids = sum(a != b for a, b in zip(first.ids, other.ids, strict=True))
    if other_ids:
        problems.append(f"{other_ids} of {len(texts)} texts become other tokens")
    if its.dimensions != mine.dimensions:
        problems.append(f"{its.dimensions} dimensions, the first has {mine.dimensions}")
        differences_N = relative_N = np.full(len(texts), np.nan)
    else:
        differences_N = _differences(other.rows_ND, first.rows_ND)
        distance_N = np.linalg.norm(other.rows_ND - first.rows_ND, axis=1)
        relative_N = distance_N / np.maximum(np.linalg.norm(first.rows_ND, axis=1), np.finfo(np.float64).tiny)
    worst = int(np.nan_to_num(differences_N, nan=np.inf).argmax())
    largest = float(differences_N[worst])
    if not largest <= allowed:  # nor is a NaN
        problems.append(
            f"1-cos {largest:.1e} is more than the {allowed:.0e} allowed, for the text {texts[worst]!r:.60}"
        )
    if mine.spearman is not None and its.spearman is not None:
        apart = abs(its.spearman - mine.spearman)
        if not apart <= max(SPEARMAN_TOLERANCE[dtype] for dtype in stored):
            problems.append(f"Spearman {its.spearman:.2f}, the first has {mine.spearman:.2f}")
    return Comparison(
        form=its,
        tolerance=allowed,
        minimum_cosine=1 - largest,
        mean_cosine=1 - float(differences_N.mean()),
        largest_difference=largest,
        mean_difference=float(differences_N.mean()),
        largest_relative_difference=float(relative_N.max()),
        worst_text=texts[worst],
        texts_with_other_tokens=other_ids,
        problems=tuple(problems),
    )


def _with_weights(other: Comparison, count: WeightsCount | None, *, judged: bool) -> Comparison:
    """The comparison with the count of wrong weights, and a problem more if there are any and they are `judged`."""
    if count is None or not count.wrong or not judged:
        return replace(other, weights=count)
    return replace(other, weights=count, problems=(*other.problems, f"{count}; the most in {count.worst_tensor}"))


def _beside_base(other: Comparison, base_difference: float) -> Comparison:
    """The comparison, with a problem more if the form is not much nearer to the first than the base is."""
    if base_difference >= TIMES_SMALLER * other.largest_difference:
        return other
    problem = (
        f"1-cos {other.largest_difference:.1e} is not {TIMES_SMALLER} times smaller than the difference from the base, "
        f"{base_difference:.1e}"
    )
    return replace(other, problems=(*other.problems, problem))

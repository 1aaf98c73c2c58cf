"""Verify that several forms are the same encoder: encode the same texts with each and compare the vectors.

Weights are compared, not arithmetic: every form is opened with the values it has and computes in float32.

    adapter                 base weights rounded to their dtype in training (or dequantised), widened, plus the float32
    adapter:
                            the trained function without the rounding of bfloat16 activations
    whole model             stored weights, widened
    backbone                the same, with prompt, pooling and maximum length of the first form
    sentence-transformers   the same, encoded by that library

For an adapter and a model it was merged into, the weights are compared too (`merge.count_wrong`): vectors cannot show a
merge in bfloat16 arithmetic. Agreement alone shows nothing without training: the first form must differ from its base
`TIMES_SMALLER` times more than from the other forms. One form is in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from angle_llm.export.comparison import (
    NOISE,
    TIMES_SMALLER,
    Comparison,
    Encoded,
    FormFacts,
    Rows,
    Verification,
    compare_forms,
    cosine_differences,
)
from angle_llm.export.library import LIBRARY, LibraryModel, is_library_folder
from angle_llm.export.texts import SENTENCES
from angle_llm.export.weights import compare_weights
from angle_llm.model.artifact import EncoderCard
from angle_llm.model.checks import is_saved_encoder
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.hub import find
from angle_llm.model.quantization import dequantize
from angle_llm.prompts import PromptTemplate

MERGE_NAME = "merge.json"
"""Provenance of a merged model."""

Score = Callable[[SentenceEncoder], float]
"""Spearman × 100 of an encoder on some pairs."""


class VerificationError(ValueError):
    """Two forms that should be the same encoder differ; the message is the report."""


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
    """Compare every form with the first one.

    Args:
        forms: saved folders (adapter or whole), sentence-transformers folders, or models.
        texts: texts to encode; None: the built-in ones.
        score: computes a figure for each form, compared too.
        tolerance: largest 1 - cos. None: by the stored dtypes, and no wrong weight is allowed.
        device: where to compute; None: the best available.
        names: names in the report instead of the paths.
        original_base: apply adapters to the base weights as stored, not to the values they were trained on.

    Raises:
        ValueError: for fewer than two forms, or texts that cannot be encoded.
        FileNotFoundError, ArtifactError: for a form that cannot be opened.
        MissingLibraryError: for a sentence-transformers folder if the library is not installed.
    """
    if len(forms) < 2:
        raise ValueError(f"verify: expected two or more forms, got {len(forms)}.")
    names = [str(form) for form in forms] if names is None else names
    forms = [form if is_library_folder(form) else find(str(form)).folder or form for form in forms]
    if is_library_folder(forms[0]):
        raise ValueError(
            f"{names[0]} is a sentence-transformers folder, which does not store how it was trained. Name the original encoder "
            "first, and the folder after it."
        )

    encoder = _open(forms[0], device, original_base=original_base)
    usage = {"prompt": encoder.prompt, "pooling": encoder.pooling, "max_length": encoder.max_length}
    chosen = _encodable(encoder, SENTENCES) if texts is None else list(texts)
    first = _encode(encoder, forms[0], names[0], chosen, score)
    base_rows_ND, base_note = _base_rows(encoder, forms[0], first.facts.kind, chosen, device)
    del encoder  # before the next one is loaded

    base_difference, problems = None, []
    if base_rows_ND is not None:
        base_difference = float(cosine_differences(base_rows_ND, first.rows_ND).mean())
        if not base_difference >= TIMES_SMALLER * NOISE:
            problems.append(f"{names[0]} equals its base: it was not trained.")
    comparisons = []
    for path, name in zip(forms[1:], names[1:], strict=True):
        if _kind(path) == LIBRARY:
            other = _encode_by_library(first.facts, path, name, chosen, device, score)
        else:
            encoder = _open(path, device, usage, original_base=original_base)
            other = _encode(encoder, path, name, chosen, score)
            del encoder
        compared = compare_forms(first, other, chosen, tolerance)
        count = compare_weights({forms[0]: first.facts, path: other.facts}, original=original_base)
        found = [f"{count}; most in {count.worst_tensor}"] if count and count.wrong and tolerance is None else []
        if base_difference is not None and not problems:
            found += _too_near_the_base(compared, base_difference)
        comparisons.append(replace(compared, weights=count, problems=(*compared.problems, *found)))

    skipped = len(SENTENCES) - len(chosen) if texts is None else 0
    return Verification(
        texts=len(chosen),
        first=first.facts,
        base_difference=base_difference,
        base_note=base_note,
        comparisons=tuple(comparisons),
        notes=(f"{skipped} built-in texts skipped: the tokenizer gives no token for them.",) if skipped else (),
        problems=tuple(problems),
    )


def _too_near_the_base(compared: Comparison, base_difference: float) -> list[str]:
    if base_difference >= TIMES_SMALLER * compared.largest_difference:
        return []
    return [
        f"1-cos {compared.largest_difference:.1e} is not {TIMES_SMALLER} times smaller than the difference from the base, "
        f"{base_difference:.1e}"
    ]


def _kind(path: str | Path) -> str:
    if is_library_folder(path):
        return LIBRARY
    if not is_saved_encoder(path):
        return "backbone"
    return "whole model" if EncoderCard.read(Path(path).expanduser()).base is None else "adapter"


def _open(
    path: str | Path, device: str | None, usage: dict[str, Any] | None = None, *, original_base: bool = False
) -> SentenceEncoder:
    """Open a form with the values it has; `usage` is prompt, pooling and maximum length for a backbone."""
    kind = _kind(path)
    if kind == "backbone":
        return SentenceEncoder.from_pretrained(path, device=device, **(usage or {}))
    if kind == "adapter" and original_base:
        return SentenceEncoder.from_pretrained(path, device=device, dtype="float32", bits=None)
    return SentenceEncoder.from_pretrained(path, device=device)


def _widen(encoder: SentenceEncoder) -> None:
    """Convert the weights to float32 in place without changing values; quantised weights are dequantised."""
    if encoder.bits is not None:
        dequantize(encoder.model.backbone, torch.float32)
    for tensor in (*encoder.model.parameters(), *encoder.model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()


def _encode(
    encoder: SentenceEncoder, path: str | Path, name: str, texts: Sequence[str], score: Score | None
) -> Encoded:
    bits = "" if encoder.bits is None else f" in {encoder.bits} bits"
    dtype = str(encoder.dtype).removeprefix("torch.")
    _widen(encoder)
    facts = FormFacts(
        name=name,
        kind=_kind(path),
        dtype=dtype + bits,
        prompt=_describe(encoder.prompt),
        prompt_fingerprint=encoder.prompt.fingerprint,
        pooling=encoder.pooling,
        max_length=encoder.max_length,
        dimensions=encoder.dimensions,
        spearman=None if score is None else score(encoder),
    )
    return Encoded(facts, encoder.tokenize(texts), encoder.encode(texts).astype(np.float64))


def _encode_by_library(
    first: FormFacts, path: str | Path, name: str, texts: Sequence[str], device: str | None, score: Score | None
) -> Encoded:
    """Encode with sentence-transformers. A folder of unknown origin is assumed to have the prompt and pooling of the
    first form; ids and vectors show whether it does."""
    model = LibraryModel(path, device)
    facts = model.facts
    rows_ND = model.encode(texts).astype(np.float64)
    form = FormFacts(
        name=name,
        kind=LIBRARY,
        dtype=model.dtype,
        prompt=first.prompt if facts is None else _describe(facts.prompt),
        prompt_fingerprint=first.prompt_fingerprint if facts is None else facts.prompt.fingerprint,
        pooling=first.pooling if facts is None else facts.pooling,
        max_length=model.max_length,
        dimensions=rows_ND.shape[1],
        spearman=None if score is None else score(cast("SentenceEncoder", model)),  # only `encode` is used
    )
    return Encoded(form, model.ids(texts), rows_ND)


def _describe(prompt: PromptTemplate) -> str:
    more = [*prompt.edits, *(["segments"] if prompt.tokenization == "segments" else [])]
    return f"{prompt.template!r} ({', '.join(more)})" if more else repr(prompt.template)


def _encodable(encoder: SentenceEncoder, texts: Sequence[str]) -> list[str]:
    """The texts that have at least one token."""

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
    """Rows of the base of the first form, with the same prompt and pooling; or None and the reason."""
    if kind == "adapter":
        backbone: Any = encoder.model.backbone
        with backbone.disable_adapter():
            return encoder.encode(texts).astype(np.float64), ""
    if kind == "backbone":
        return None, "it is a model without training"
    origin_file = Path(path).expanduser() / MERGE_NAME
    if not origin_file.is_file():
        return None, f"it has no {MERGE_NAME}: all its weights were trained, or its origin is not recorded"
    try:
        origin = json.loads(origin_file.read_text(encoding="utf-8"))
        base = SentenceEncoder.from_pretrained(
            origin["base"],
            prompt=encoder.prompt,
            pooling=encoder.pooling,
            max_length=encoder.max_length,
            dtype=origin["base_dtype"],
            device=device,
            revision=origin["base_revision"],
            bits=origin["bits"],
            layers=origin["layers"],
            dimensions=encoder.dimensions,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:  # a damaged file, or a base that is not available
        return None, f"its base cannot be opened ({error})"
    _widen(base)
    return base.encode(texts).astype(np.float64), ""

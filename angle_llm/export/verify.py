"""Verify that several forms are the same encoder: encode the same texts with each and compare the vectors.

Weights are compared, not arithmetic: every form is opened with the values it has and computes in float32.

    adapter                 base weights rounded to their dtype in training (or dequantised), widened, plus the float32
                            adapter: the trained function without the rounding of bfloat16 activations
    whole model             stored weights, widened
    backbone                the same, with prompt, pooling, maximum length and normalisation of the first form
    sentence-transformers   the same, encoded by that library

For an adapter and a model it was merged into, the weights are compared too (`weights.count_wrong`): vectors cannot show
a merge in bfloat16 arithmetic. Agreement alone shows nothing without training: the first form must differ from its base
`TIMES_SMALLER` times more than from the other forms. One form is in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from angle_llm.export.card import MERGE_NAME, REPORT_NAME, CardFacts, model_card
from angle_llm.export.comparison import (
    NOISE,
    TIMES_SMALLER,
    Encoded,
    FormFacts,
    Rows,
    Verification,
    compare_forms,
    cosine_differences,
)
from angle_llm.export.exported_folder import (
    LIBRARY,
    ExportFacts,
    SentenceTransformersModel,
    is_sentence_transformers_folder,
)
from angle_llm.export.programs import installed_versions
from angle_llm.export.texts import SENTENCES
from angle_llm.export.weights import WeightsCount, count_wrong
from angle_llm.io import write_json
from angle_llm.model.artifact import EncoderCard
from angle_llm.model.checks import is_saved_encoder
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.hub import find
from angle_llm.model.quantization import dequantize
from angle_llm.prompts import SIDES, Side, SidePrompts, load_prompts

Form: TypeAlias = SentenceEncoder | SentenceTransformersModel
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
    side: Side | None = None,
) -> Verification:
    """Compare every form with the first one.

    Args:
        forms: saved folders (adapter or whole), sentence-transformers folders, or models.
        texts: texts to encode; None: the built-in ones that the tokenizer of the first form has tokens for.
        score: computes a metric for each form, compared too.
        tolerance: largest 1 - cos. None: by the stored dtypes, and no wrong weight is allowed.
        device: where to compute; None: the best available.
        names: names in the report instead of the paths.
        original_base: apply adapters to the base weights as stored, not to the values they were trained on.
        side: compare encoders with two prompts on this side only. None: on both.

    Raises:
        ValueError: for fewer than two forms, or texts that cannot be encoded.
        FileNotFoundError, ArtifactError: for a form that cannot be opened.
        MissingLibraryError: for a sentence-transformers folder if the library is not installed.
    """
    if len(forms) < 2:
        raise ValueError(f"verify: expected two or more forms, got {len(forms)}.")
    names = [str(form) for form in forms] if names is None else names
    forms = [form if is_sentence_transformers_folder(form) else find(str(form)).folder or form for form in forms]
    if is_sentence_transformers_folder(forms[0]):
        raise ValueError(
            f"{names[0]} is a sentence-transformers folder, which does not store how it was trained. Name the original "
            "encoder first, and the folder after it."
        )
    encoder = _open(forms[0], device, {}, original_base)
    assert isinstance(encoder, SentenceEncoder)
    prompts = encoder.prompts if side is None else load_prompts(encoder.prompts.of(side))
    usage = {"prompt": prompts, "pooling": encoder.pooling, "max_length": encoder.max_length}
    usage["normalize"] = encoder.normalize
    sides: Sequence[Side | None] = SIDES if prompts.differ else [side]
    notes = []
    if texts is None:
        texts = [text for text in SENTENCES if _has_tokens(encoder, text)]
        if skipped := len(SENTENCES) - len(texts):
            notes.append(f"built-in texts skipped: {skipped}. The tokenizer has no tokens for them.")
        names_in_texts = {name for form in forms for name in _plain_names(form)}
        known = [text for text in texts if not any(name in text for name in names_in_texts)]
        if skipped := len(texts) - len(known):
            notes.append(
                f"built-in texts skipped: {skipped}. They contain a name that the exported tokenizer reads as plain characters."
            )
        texts = known
    texts = list(texts)
    first = _encode(encoder, _kind(forms[0]), names[0], texts, score, sides)
    base_rows_ND, base_note = _base_rows(encoder, forms[0], texts, device, sides)
    del encoder  # before the next one is loaded

    base_difference, problems = None, []
    if base_rows_ND is not None:
        base_difference = float(cosine_differences(base_rows_ND, first.rows_ND).mean())
        if not base_difference >= TIMES_SMALLER * NOISE:
            problems.append(f"{names[0]} equals its base: it was not trained.")
    untrained = bool(problems)
    comparisons = []
    for path, name in zip(forms[1:], names[1:], strict=True):
        other = _encode(_open(path, device, usage, original_base), _kind(path), name, texts, score, sides)
        compared = compare_forms(first, other, texts * len(sides), tolerance)
        count = _count([(forms[0], first.facts), (path, other.facts)], original_base)
        found = list(compared.problems)
        if count and count.wrong and tolerance is None:
            found.append(f"{count}; most in {count.worst_tensor}")
        if not (base_difference is None or untrained or base_difference >= TIMES_SMALLER * compared.largest_difference):
            found.append(
                f"1-cos {compared.largest_difference:.1e} is not {TIMES_SMALLER} times smaller than the difference from "
                f"the base, {base_difference:.1e}"
            )
        comparisons.append(replace(compared, weights=count, problems=tuple(found)))
        problems += [f"{name}: {problem}" for problem in found]
    return Verification(
        len(texts),
        first.facts,
        base_difference,
        base_note,
        tuple(comparisons),
        tuple(problems),
        tuple(notes),
        installed_versions(*([LIBRARY] if any(map(is_sentence_transformers_folder, forms)) else [])),
    )


def _count(forms: list[tuple[str | Path, FormFacts]], original_base: bool) -> WeightsCount | None:
    """Return the wrong weights of two forms, if one is an adapter and the other a model that is not quantised."""
    (adapter, its), (model, facts) = sorted(forms, key=lambda form: form[1].kind != "adapter")
    if its.kind != "adapter" or facts.kind == "adapter" or "bits" in facts.dtype:
        return None
    return count_wrong(Path(adapter).expanduser(), model, facts.dtype, original=original_base)


def finish_folder(
    folder: Path,
    source: Path,
    names: tuple[str, str],
    *,
    check: bool,
    device: str | None,
    original_base: bool = False,
    side: Side | None = None,
) -> Verification | None:
    """Compare a new folder with its origin `source`, and write report and README.md into it.

    Args:
        names: names of source and folder for the user, as in `verify`.
        check: False skips the comparison, which the report records.
        original_base: as in `verify`; the report and the card then note the difference from the adapter on the values
            it was trained on.
        side: as in `verify`.

    Raises:
        VerificationError: if the two differ.
    """
    found = None
    if check:
        found = verify([source, folder], names=names, device=device, original_base=original_base, side=side)
        if not found.holds:
            raise VerificationError(
                f"{names[1]} was not written: it differs from the encoder in {names[0]}:\n{found.text()}"
            )
        if original_base:
            (trained,) = verify([source, folder], names=names, device=device).comparisons
            note = (
                f"The difference from the adapter on the values it was trained on is 1-cos {trained.largest_difference:.1e} "
                f"at most, {trained.mean_difference:.1e} in the mean."
            )
            found = replace(found, notes=(*found.notes, note))
    write_json(folder / REPORT_NAME, {"holds": None} if found is None else found.to_dict())
    (folder / "README.md").write_text(model_card(CardFacts.read(folder), Path(names[1]).name), encoding="utf-8")
    return found


def _plain_names(form: str | Path) -> Sequence[str]:
    """Return the names that an exported folder reads as plain characters, unlike its encoder."""
    facts = ExportFacts.read(Path(form)) if is_sentence_transformers_folder(form) else None
    return facts.plain_names if facts else ()


def _kind(path: str | Path) -> str:
    if is_sentence_transformers_folder(path):
        return LIBRARY
    if not is_saved_encoder(path):
        return "backbone"
    return "whole model" if EncoderCard.read(Path(path).expanduser()).base is None else "adapter"


def _open(path: str | Path, device: str | None, usage: dict[str, Any], original_base: bool) -> Form:
    """Open a form with the values it has; `usage` are the options of the first form, which a backbone gets."""
    kind = _kind(path)
    if kind == LIBRARY:
        return SentenceTransformersModel(path, device=device, prompt=usage["prompt"], pooling=usage["pooling"])
    if kind == "backbone":
        named = {name: value for name, value in usage.items() if name != "normalize"}
        encoder = SentenceEncoder.from_pretrained(path, device=device, **named)
        encoder.model.normalize = usage.get("normalize", encoder.normalize)
        return encoder
    options: dict[str, Any] = {"dtype": "float32", "bits": None} if kind == "adapter" and original_base else {}
    return SentenceEncoder.from_pretrained(path, device=device, **options)


def _widen(encoder: SentenceEncoder) -> None:
    """Convert the weights to float32 in place without changing values; quantised weights are dequantised."""
    if encoder.bits is not None:
        dequantize(encoder.model.backbone, torch.float32)
    for tensor in (*encoder.model.parameters(), *encoder.model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()


def _encode(
    encoder: Form,
    kind: str,
    name: str,
    texts: Sequence[str],
    score: Score | None,
    sides: Sequence[Side | None],
) -> Encoded:
    """Return facts, ids and rows of a form: of all texts as each side."""
    dtype = str(encoder.dtype).removeprefix("torch.") + (f" in {encoder.bits} bits" if encoder.bits else "")
    if isinstance(encoder, SentenceEncoder):
        _widen(encoder)
    by_side = _by_side(encoder, sides)
    rows_ND = _rows(by_side, texts)
    facts = FormFacts(
        name=name,
        kind=kind,
        dtype=dtype,
        prompt=_shown(
            encoder.prompts if len(sides) > 1 or not sides[0] else load_prompts(encoder.prompts.of(sides[0]))
        ),
        pooling=encoder.pooling,
        max_length=encoder.max_length,
        dimensions=rows_ND.shape[1],
        normalize=encoder.normalize,
        # Only encoding is used.
        spearman=None if score is None else score(cast("SentenceEncoder", encoder if len(sides) > 1 else by_side[0])),
    )
    return Encoded(facts, [ids for one in by_side for ids in one.tokenize(texts)], rows_ND)


def _by_side(encoder: Form, sides: Sequence[Side | None]) -> Sequence[Form]:
    """Return the form that encodes texts as each side; None if the first form has one prompt."""
    if sides[0] is None and isinstance(encoder, SentenceEncoder) and encoder.prompts.differ:
        sides = ["query"]  # a problem of the comparison
    return [encoder if side is None else encoder.for_side(side) for side in sides]


def _rows(by_side: Sequence[Form], texts: Sequence[str]) -> Rows:
    return np.concatenate([one.encode(texts) for one in by_side]).astype(np.float64)


def _shown(prompts: SidePrompts) -> str:
    """Return template, edits, tokenization and appended token of the prompts."""
    shown = []
    for prompt in (prompts.query, prompts.document):
        more = [*prompt.edits, *(["segments"] if prompt.tokenization == "segments" else [])]
        more += [] if prompt.append is None else [f"then {prompt.append}"]
        shown.append(repr(prompt.template) + (f" ({', '.join(more)})" if more else ""))
    return f"{shown[0]} (queries), {shown[1]} (documents)" if prompts.differ else shown[0]


def _has_tokens(encoder: SentenceEncoder, text: str) -> bool:
    try:
        for tokenize in encoder.tokenizers.distinct:
            tokenize([text])
    except ValueError:
        return False
    return True


def _base_rows(
    encoder: SentenceEncoder,
    path: str | Path,
    texts: Sequence[str],
    device: str | None,
    sides: Sequence[Side | None],
) -> tuple[Rows | None, str]:
    """Return the rows of the base of the first form, with the same prompt and pooling; or None and the reason."""
    if _kind(path) == "adapter":
        backbone: Any = encoder.model.backbone
        with backbone.disable_adapter():
            return _rows(_by_side(encoder, sides), texts), ""
    merged = Path(path).expanduser() / MERGE_NAME
    if not merged.is_file():
        return None, "not compared: a whole model was not merged, so its base is unknown"
    try:
        origin = json.loads(merged.read_text(encoding="utf-8"))
        base = SentenceEncoder.from_pretrained(
            origin["base"],
            prompt=encoder.prompts,
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
        return None, f"unknown: cannot be opened ({error})"
    _widen(base)
    return _rows(_by_side(base, sides), texts), ""

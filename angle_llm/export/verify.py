"""Verify that several forms are the same encoder: encode the same texts with all forms, and compare the embeddings.

A form is a stored version of an encoder (see `forms`). For an adapter and its merged model, the weights are compared too
(`weights.count_wrong`), because vectors cannot show a merge in bfloat16 arithmetic. Forms of an untrained encoder would
agree in any case, so the first form must differ from its base `TIMES_SMALLER` times more than from every other form. One
form is in memory at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from angle_llm.device import is_out_of_memory, release_cached_memory
from angle_llm.export.card import REPORT_NAME, CardFacts, model_card
from angle_llm.export.comparison import NOISE, TIMES_SMALLER, Encoded, FormFacts, Rows, Verification, compare_forms
from angle_llm.export.exported_folder import LIBRARY, ExportFacts
from angle_llm.export.forms import PACKAGES, Form, FormPath, convert_to_float32, kind_of, open_form, saved_folder
from angle_llm.export.texts import SENTENCES
from angle_llm.export.tokenizer import changed_names
from angle_llm.export.weights import WeightsCount, count_wrong
from angle_llm.io import log, write_json
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layers.quantized_layers import bits_text
from angle_llm.model.source.backbone import torch_device
from angle_llm.model.source.checks import MERGE_NAME, read_json
from angle_llm.model.vectors import cosine_differences, untokenizable
from angle_llm.prompts import SIDES, Side, load_prompts
from angle_llm.serve.client import ServerModel, is_server
from angle_llm.serve.mistakes import likely_mistake
from angle_llm.settings.parsing import MissingLibraryError

Score: TypeAlias = Callable[[Any], float]
"""A function from an encoder to its Spearman × 100 on a file of scored pairs."""
Sides: TypeAlias = Sequence[Side | None]
"""Sides for which every text is encoded: as query, as document; [None]: with the only prompt."""


class VerificationError(ValueError):
    """Error for two stored versions of an encoder that must be equal but differ. The message contains the report."""


@dataclass(frozen=True)
class VerifyOptions:
    """Options of `verify`."""

    texts: Sequence[str] | None = None
    """Texts to encode; None: the built-in texts that all forms can encode alike."""
    score: Score | None = None
    """Function that computes a score of each form, which is compared too."""
    tolerance: float | None = None
    """Largest allowed 1 - cos. None: chosen by the stored dtypes; wrong weights are then not allowed."""
    side: Side | None = None
    """Compare encoders with two prompts as encoders of queries only, or of documents only. None: both."""
    device: str | None = None
    """Device of the computation; None: the best available."""
    names: Sequence[str] | None = None
    """Names of the forms in the report; None: the paths."""
    base: str | None = None
    """The untrained base of the first form; None: as stored with it, if it is stored."""
    server: Mapping[str, Any] = field(default_factory=dict)
    """`send_prompt` and `model` of `ServerModel`, for servers."""


def verify(forms: Sequence[FormPath], options: VerifyOptions | None = None) -> Verification:
    """Check that stored versions of an encoder (forms) give the same embeddings as the first form; return the report.

    `forms` are at least two folders or model names: saved encoders (adapter or whole model), sentence-transformers
    folders, URLs of servers, or other models. If a GPU has too little memory for the comparison in float32, the CPU is used.

    Raises:
        ValueError: if the first form is computed by another program, or for texts that cannot be encoded.
        ServerError: if a server does not answer with embeddings.
        FileNotFoundError, ArtifactError: for a form that cannot be opened.
        MissingLibraryError: for a form whose program is not installed.
    """
    options = options or VerifyOptions()
    try:
        return _verify(forms, options)
    except Exception as error:  # libraries raise a lack of memory in many classes
        if not is_out_of_memory(error) or options.device is not None or torch_device(None).type == "cpu":
            raise
    log("the GPU has too little memory for the comparison in float32: it is repeated on the CPU")
    release_cached_memory()
    return _verify(forms, replace(options, device="cpu"))


def _verify(forms: Sequence[FormPath], options: VerifyOptions) -> Verification:
    """Compare the forms as `verify` does, on the device of the options."""
    names = options.names or [str(form) for form in forms]
    paths = [saved_folder(form) for form in forms]
    kinds = [kind_of(path) for path in paths]
    if kinds[0] in PACKAGES:
        raise ValueError(f"{names[0]} ({kinds[0]}) does not store how it was trained. Name the original encoder first.")

    # Vectors of the first form and of its untrained base.
    encoder = open_form(paths[0], {}, device=options.device)
    assert isinstance(encoder, SentenceEncoder)
    prompts = encoder.prompts if options.side is None else load_prompts(encoder.prompts.of(options.side))
    sides: Sides = SIDES if prompts.differ else [options.side]
    texts, notes = _built_in_texts(encoder, paths) if options.texts is None else (options.texts, [])
    first = _encode(encoder, kinds[0], names[0], texts, options.score, sides)
    base_ND, base_note = _base_rows(encoder, paths[0], texts, options.device, sides, options.base)
    usage = {name: getattr(encoder, name) for name in ("pooling", "max_length", "normalize")} | {"prompt": prompts}
    del encoder  # one form in memory at a time

    # The first form must be trained.
    problems = list[str]()
    base_difference = None
    if base_ND is not None:
        base_difference = float(cosine_differences(base_ND, first.rows_ND).mean())
    elif "server" in kinds:
        notes.append("whether the model was trained is not checked. Name its untrained base: --base MODEL.")
    is_trained = base_difference is None or base_difference >= TIMES_SMALLER * NOISE
    if not is_trained:
        problems.append(f"{names[0]} equals its base: it was not trained.")

    # Every other form, used as the first form was trained.
    sided_texts = [(text, side) for side in sides for text in texts]
    comparisons = []
    for path, form_kind, name in zip(paths[1:], kinds[1:], names[1:], strict=True):
        form = open_form(path, {**usage, **options.server}, device=options.device)
        encoded = _encode(form, form_kind, name, texts, options.score, sides)
        expected_difference = base_difference if is_trained else None
        comparison = compare_forms(first, encoded, sided_texts, options.tolerance, expected_difference)
        form_problems = list(comparison.problems)
        stored = [(paths[0], first.facts), (path, encoded.facts)]
        weights = _count_wrong_weights(stored)
        if weights and weights.wrong and options.tolerance is None:
            form_problems.append(f"{weights}; most in {weights.worst_tensor}")
        if isinstance(form, ServerModel):
            notes += [f"{name}: {note}" for note in form.notes]
            if form_problems:
                original = open_form(paths[0], {}, device=options.device)
                assert isinstance(original, SentenceEncoder)
                convert_to_float32(original)
                rows = (first.rows_ND, encoded.rows_ND, base_ND)
                mistake = likely_mistake(original.with_prompt(prompts), form, *rows, sided_texts, comparison.tolerance)
                if mistake:
                    form_problems.append(f"likely mistake: {mistake}")
        comparisons.append(replace(comparison, weights=weights, problems=tuple(form_problems)))
        problems += [f"{name}: {problem}" for problem in form_problems]
        del form
    return Verification(
        texts=len(texts),
        first=first.facts,
        base_difference=base_difference,
        base_note=base_note,
        comparisons=tuple(comparisons),
        problems=tuple(problems),
        notes=tuple(notes),
        compared_in=_library_versions(paths),
    )


def _built_in_texts(encoder: SentenceEncoder, forms: Sequence[FormPath]) -> tuple[list[str], list[str]]:
    """Return the built-in texts that all stored versions of an encoder can encode alike, and notes for the report.

    `forms` are the paths of the stored versions. The note gives the number of skipped texts and the reason.
    """
    # Added tokens whose name an exported tokenizer reads as plain text give other ids. A server may use such a tokenizer.
    exported = [ExportFacts.read(Path(form).expanduser()) for form in forms]
    split_names = {name for facts in exported if facts is not None for name in facts.plain_names}
    if any(map(is_server, forms)) and hasattr(encoder.tokenizer, "backend_tokenizer"):
        split_names |= set(changed_names(encoder.tokenizer, with_prompt=True))
    sides = [encoder.for_side(side) for side in SIDES]
    texts = [
        text
        for text in SENTENCES
        if not any(untokenizable(side, text) for side in sides) and not any(name in text for name in split_names)
    ]
    skipped = len(SENTENCES) - len(texts)
    reason = "without tokens, or with a name that an exported tokenizer splits like text"
    return texts, [f"built-in texts skipped: {skipped} ({reason})."] if skipped else []


def _library_versions(forms: Sequence[FormPath]) -> str:
    """Return the names and versions of the libraries that compute the embeddings of the forms, as text."""
    programs = sorted({PACKAGES.get(kind_of(form), "") for form in forms} - {""})
    # From the module: its distribution can have another name, such as onnxruntime-gpu.
    modules = {name.replace("_", "-"): importlib.import_module(name) for name in (*programs, "transformers", "torch")}
    return ", ".join(f"{name} {getattr(module, '__version__', 'unknown')}" for name, module in modules.items())


def _count_wrong_weights(forms: list[tuple[FormPath, FormFacts]]) -> WeightsCount | None:
    """Compare the stored weights of an adapter and a model, and return the number of weights that differ from a merge.

    `forms` has the path and facts of two stored versions of an encoder, in any order. The result is None unless one
    form is an adapter and the second a model that is not quantised.
    """
    (adapter, its), (model, facts) = sorted(forms, key=lambda form: form[1].kind != "adapter")
    if its.kind != "adapter" or facts.kind not in ("whole model", "backbone", LIBRARY) or "bits" in facts.dtype:
        return None
    return count_wrong(Path(adapter).expanduser(), model, facts.dtype)


def finish_folder(folder: Path, source: Path, name: str, options: VerifyOptions | None) -> Verification | None:
    """Compare a new folder with the encoder that it was made from, and write the report and README.md to the folder.

    Args:
        folder: merged or exported encoder, still under a temporary name.
        source: folder of the encoder that `folder` was made from.
        name: final path of the folder.
        options: how the two are compared. None: no comparison; the report then records the omission, and the result is
            None.

    Raises:
        VerificationError: if the two encoders differ.
    """
    report = None
    if options is not None:
        report = verify([source, folder], replace(options, names=(str(source), name)))
        if not report.holds:
            raise VerificationError(
                f"{name} was not written: it differs from the encoder in {source}:\n{report.text()}"
            )
    write_report(folder, report, name)
    return report


def write_report(folder: Path, result: Verification | None, name: str) -> None:
    """Write the report of a verification (None: skipped) and README.md to a folder that will have the path `name`."""
    write_json(folder / REPORT_NAME, {"holds": None} if result is None else result.to_dict())
    (folder / "README.md").write_text(model_card(CardFacts.read(folder), Path(name).name), encoding="utf-8")


def _encode(form: Form, kind: str, name: str, texts: Sequence[str], score: Score | None, sides: Sides) -> Encoded:
    """Encode texts with an opened form; return its facts with the token ids and embeddings of all texts.

    `kind` and `name` describe the form in the report.
    """
    dtype = str(form.dtype).removeprefix("torch.") + (f" in {bits_text(form.bits)}" if form.bits else "")
    if isinstance(form, SentenceEncoder):
        convert_to_float32(form)
    by_side = _by_side(form, sides)
    try:
        rows_ND = _rows(by_side, texts)
    except FloatingPointError as error:
        raise FloatingPointError(f"{name}: {error}") from None
    prompts = [form.prompts.of(side) for side in (SIDES if sides[0] is None else sides) if side]
    facts = FormFacts(
        name=name,
        kind=kind,
        dtype=dtype,
        prompt=", ".join(dict.fromkeys(repr(prompt.written) for prompt in prompts)),
        pooling=form.pooling,
        max_length=form.max_length,
        dimensions=rows_ND.shape[1],
        normalize=form.normalize,
        # A score calls only `encode`, which all forms have.
        spearman=None if score is None else score(form if len(sides) > 1 else by_side[0]),
    )
    return Encoded(facts, [ids for sided in by_side for ids in sided.tokenize(texts)], rows_ND)


def _by_side(encoder: Form, sides: Sides) -> Sequence[Form]:
    """Return one encoder per side (query, document); for side None, the encoder itself.

    If the side is None and `encoder` has two prompts, the result uses the prompt of queries.
    """
    if sides[0] is None and isinstance(encoder, SentenceEncoder) and encoder.prompts.differ:
        sides = ["query"]  # the first form has one prompt: `compare_forms` reports the difference
    return [encoder if side is None else encoder.for_side(side) for side in sides]


def _rows(by_side: Sequence[Form], texts: Sequence[str]) -> Rows:
    """Return the embeddings of the texts by each encoder, stacked in float64: shape (encoders × texts, D)."""
    return np.concatenate([form.encode(texts) for form in by_side]).astype(np.float64)


def _base_rows(
    encoder: SentenceEncoder, path: FormPath, texts: Sequence[str], device: str | None, sides: Sides, named: str | None
) -> tuple[Rows | None, str]:
    """Return the embeddings of texts by the untrained base model of an encoder, or None and the reason.

    The base gets the prompt and pooling of the encoder. The reason is that the base is unknown or cannot be opened; it
    is "" if there are embeddings. `encoder` is the opened encoder, and `path` its folder. `named` is the base if it is
    not stored.
    """
    # Adapter: the same model, with the adapter disabled.
    if kind_of(path) == "adapter":
        backbone: Any = encoder.model.backbone
        with backbone.disable_adapter():
            return _rows(_by_side(encoder, sides), texts), ""
    # Merged model: the base is named in its folder, or by the user.
    merged = Path(path).expanduser() / MERGE_NAME
    origin: dict[str, Any] = {"base": named} if named or not merged.is_file() else read_json(merged)
    if origin.get("base") is None:
        return None, "not compared: the folder of this whole model does not name its base"
    try:
        base = SentenceEncoder.from_pretrained(
            origin["base"],
            prompt=encoder.prompts,
            pooling=encoder.pooling,
            max_length=encoder.max_length,
            dtype=origin.get("base_dtype", "auto"),
            device=device,
            revision=origin.get("base_revision"),
            bits=origin.get("bits"),
            layers=origin.get("layers"),
            dimensions=encoder.dimensions,
            attention=encoder.attention,
        )
    except (OSError, ValueError, TypeError, MissingLibraryError) as error:  # a damaged file, or an unavailable base
        return None, f"unknown: cannot be opened ({error})"
    convert_to_float32(base)
    return _rows(_by_side(base, sides), texts), ""

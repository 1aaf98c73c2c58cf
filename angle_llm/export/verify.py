"""Verify that several forms are the same encoder: encode the same texts with all forms, and compare the embeddings.

A form is a stored version of an encoder. Every form is opened with its stored weights and computes in float32, so that
differences come from the weights and not from the arithmetic:

    adapter                 base weights rounded to their dtype in training (or dequantised), converted to float32, plus
                            the float32 adapter: the trained function without the rounding of bfloat16 activations
    whole model             stored weights, converted to float32
    backbone                like a whole model, with prompt, pooling, maximum length and normalisation of the first form
    sentence-transformers   like a whole model, encoded by sentence-transformers
    onnx, llama.cpp         folders of `export --to onnx` and `--to gguf`, computed by onnxruntime and llama.cpp
    server                  texts are sent to a server, which computes as it is configured

For an adapter and its merged model, the weights are compared too (`weights.count_wrong`), because vectors cannot show a
merge in bfloat16 arithmetic. Forms of an untrained encoder would agree in any case, so the first form must differ from
its base `TIMES_SMALLER` times more than from the other forms. One form is in memory at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from angle_llm.export.card import REPORT_NAME, CardFacts, model_card
from angle_llm.export.comparison import (
    NOISE,
    TIMES_SMALLER,
    TIMES_SMALLER_QUANTISED,
    Encoded,
    FormFacts,
    Rows,
    Verification,
    compare_forms,
    is_quantised,
)
from angle_llm.export.exported_folder import (
    LIBRARY,
    ExportFacts,
    SentenceTransformersModel,
    is_sentence_transformers_folder,
)
from angle_llm.export.formats.llama_cpp import PROGRAM as LLAMA_CPP
from angle_llm.export.formats.llama_cpp import LlamaCppModel, is_gguf_export
from angle_llm.export.formats.onnx_folder import FORM as ONNX
from angle_llm.export.formats.onnx_folder import OnnxModel, is_onnx_folder
from angle_llm.export.texts import SENTENCES
from angle_llm.export.tokenizer import changed_names
from angle_llm.export.weights import WeightsCount, count_wrong
from angle_llm.io import write_json
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.source.checks import MERGE_NAME, is_saved_encoder, read_json
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.quantization import dequantize
from angle_llm.model.source.resolve import resolve_model
from angle_llm.model.vectors import cosine_differences
from angle_llm.prompts import SIDES, Side, SidePrompts, load_prompts
from angle_llm.serve.client import ServerModel, is_server
from angle_llm.serve.mistakes import likely_mistake

Form: TypeAlias = Any
"""A `SentenceEncoder`, or an encoder that another program computes, with the interface of `SentenceTransformersModel`.

`tokenize` of another program returns an empty list if token ids are not known."""


class ProgramKind(NamedTuple):
    """A kind of form that another program computes."""

    name: str
    recognises: Callable[[str | Path], bool]
    """Returns whether a path or URL is a form of this kind."""
    open: Callable[[Any, str | None, dict[str, Any]], Form]
    """Opens a form. Arguments: path or URL, device, and the expected `prompt`, `pooling`, `max_length`, `normalize`."""
    package: str = ""
    """Python package that computes the vectors; empty for a server."""


def _open_library(path: str | Path, device: str | None, usage: dict[str, Any]) -> Form:
    """Open a sentence-transformers folder."""
    return SentenceTransformersModel(path, device=device, prompt=usage["prompt"], pooling=usage["pooling"])


SERVER = "server"
PROGRAM_KINDS: tuple[ProgramKind, ...] = (
    ProgramKind(SERVER, is_server, lambda url, device, usage: ServerModel(url, **usage)),
    ProgramKind(ONNX, is_onnx_folder, lambda path, device, usage: OnnxModel(path), "onnxruntime"),
    ProgramKind(LLAMA_CPP, is_gguf_export, lambda path, device, usage: LlamaCppModel(path), "xllamacpp"),
    ProgramKind(LIBRARY, is_sentence_transformers_folder, _open_library, LIBRARY),
)
"""The kinds of forms that other programs compute. The first kind that recognises a path is used."""

Score = Callable[[SentenceEncoder], float]
"""A function from an encoder to its Spearman × 100 on a file of scored pairs."""


class VerificationError(ValueError):
    """Error for two stored versions of an encoder that must be equal but differ. The message contains the report."""


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
    base: str | None = None,
    server_options: Mapping[str, Any] | None = None,
) -> Verification:
    """Check that stored versions of an encoder (forms) give the same embeddings as the first form; return the report.

    Args:
        forms: at least two folders or model names: saved encoders (adapter or whole model), sentence-transformers
            folders, URLs of servers, or other models.
        texts: texts to encode; None: the built-in texts that all forms can encode alike.
        score: function that computes a score of each form, which is compared too.
        tolerance: largest allowed 1 - cos. None: chosen by the stored dtypes; wrong weights are then not allowed.
        device: device of the computation; None: the best available.
        names: names of the forms in the report; None: the paths.
        original_base: apply adapters to the stored base weights, not to the values in training (rounded, dequantised).
        side: compare encoders with two prompts as encoders of queries only, or of documents only. None: both.
        base: the untrained base of the first form; None: as stored with it, if it is stored.
        server_options: `send_prompt` and `model` of `ServerModel`, for servers.

    Raises:
        ValueError: if the first form is computed by another program, or for texts that cannot be encoded.
        ServerError: if a server does not answer with embeddings.
        FileNotFoundError, ArtifactError: for a form that cannot be opened.
        MissingLibraryError: for a sentence-transformers folder if the library is not installed.
    """
    names = [str(form) for form in forms] if names is None else names
    programs = [_program(form) for form in forms]
    forms = [form if program else _saved_folder(form) for form, program in zip(forms, programs, strict=True)]
    if programs[0] is not None:
        raise ValueError(
            f"{names[0]} ({programs[0].name}) does not store how it was trained. Name the original encoder first."
        )
    encoder = open_form(forms[0], device, {}, original_base)
    assert isinstance(encoder, SentenceEncoder)
    prompts = encoder.prompts if side is None else load_prompts(encoder.prompts.of(side))
    usage: dict[str, Any] = {"prompt": prompts, "pooling": encoder.pooling, "max_length": encoder.max_length}
    usage |= {"normalize": encoder.normalize, **(server_options or {})}
    sides: Sequence[Side | None] = SIDES if prompts.differ else [side]
    notes: list[str] = []
    if texts is None:
        texts, notes = _built_in_texts(encoder, forms)
    texts = list(texts)
    first = _encode(encoder, _kind(forms[0]), names[0], texts, score, sides)
    base_rows_ND, base_note = _base_rows(encoder, forms[0], texts, device, sides, base)
    if base_rows_ND is None and any(map(is_server, forms)):
        notes.append("base distance not checked. Name the untrained base: --base MODEL.")
    del encoder  # free the memory before the next form is opened

    base_difference, problems = None, []
    if base_rows_ND is not None:
        base_difference = float(cosine_differences(base_rows_ND, first.rows_ND).mean())
        if not base_difference >= TIMES_SMALLER * NOISE:
            problems.append(f"{names[0]} equals its base: it was not trained.")
    untrained = bool(problems)
    comparisons = []
    sided = [(text, each) for each in sides for text in texts]
    for path, name, program in list(zip(forms, names, programs, strict=True))[1:]:
        opened = open_form(path, device, usage, original_base)
        other = _encode(opened, _kind(path), name, texts, score, sides)
        notes += [f"{name}: {note}" for note in getattr(opened, "notes", [])]
        compared = compare_forms(first, other, texts * len(sides), tolerance)
        count = _count([(forms[0], first.facts), (path, other.facts)], original_base)
        found = list(compared.problems)
        if count and count.wrong and tolerance is None:
            found.append(f"{count}; most in {count.worst_tensor}")
        # Rounding to 8 bits changes vectors by about 1e-3, and training by 0.1 and more.
        times = TIMES_SMALLER_QUANTISED if is_quantised(compared.form) else TIMES_SMALLER
        apart = compared.mean_difference if is_quantised(compared.form) else compared.largest_difference
        if not (base_difference is None or untrained or base_difference >= times * apart):
            found.append(
                f"1-cos {apart:.1e} is not {times} times smaller than the difference from the base, {base_difference:.1e}"
            )
        if found and program is not None and program.name == SERVER:
            original = open_form(forms[0], device, {}, original_base).with_prompt(prompts)
            _widen(original)
            rows = (first.rows_ND, other.rows_ND, base_rows_ND)
            mistake = likely_mistake(original, opened, *rows, sided, compared.tolerance)
            found += [f"likely mistake: {mistake}"] if mistake else []
        del opened  # free the memory, and end the program, before the next form is opened
        comparisons.append(replace(compared, weights=count, problems=tuple(found)))
        problems += [f"{name}: {problem}" for problem in found]
    return Verification(
        texts=len(texts),
        first=first.facts,
        base_difference=base_difference,
        base_note=base_note,
        comparisons=tuple(comparisons),
        problems=tuple(problems),
        notes=tuple(notes),
        compared_in=_library_versions(forms),
    )


def _built_in_texts(encoder: SentenceEncoder, forms: Sequence[str | Path]) -> tuple[list[str], list[str]]:
    """Return the built-in texts that all stored versions of an encoder can encode alike, and notes for the report.

    `forms` are the paths of the stored versions. The notes give the number of skipped texts and the reason.
    """
    texts, notes = [text for text in SENTENCES if _has_tokens(encoder, text)], []
    if skipped := len(SENTENCES) - len(texts):
        notes.append(f"built-in texts skipped: {skipped}. The tokenizer has no tokens for these texts.")
    exported = [ExportFacts.read(Path(form).expanduser()) for form in forms if is_sentence_transformers_folder(form)]
    names = {name for facts in exported if facts is not None for name in facts.plain_names}
    if any(map(is_server, forms)) and hasattr(encoder.tokenizer, "backend_tokenizer"):
        names |= set(changed_names(encoder.tokenizer, with_prompt=True))  # the server may use an exported folder
    known = [text for text in texts if not any(name in text for name in names)]
    if skipped := len(texts) - len(known):
        notes.append(
            f"built-in texts skipped: {skipped}. They contain a name that an exported tokenizer splits like text."
        )
    return known, notes


def _has_tokens(encoder: SentenceEncoder, text: str) -> bool:
    """Return whether a text has at least one token, for the tokenizers of all prompts of an encoder."""
    try:
        for tokenize in encoder.tokenizers.distinct:
            tokenize([text])
    except ValueError:
        return False
    return True


def _library_versions(forms: Sequence[str | Path]) -> str:
    """Return the names and versions of the libraries that compute the embeddings of the forms, as text."""
    names = sorted({kind.package for form in forms if (kind := _program(form)) and kind.package})
    # From the module: its distribution can have another name, such as onnxruntime-gpu.
    modules = {name: importlib.import_module(name.replace("-", "_")) for name in (*names, "transformers", "torch")}
    return ", ".join(f"{name} {getattr(module, '__version__', 'unknown')}" for name, module in modules.items())


def _count(forms: list[tuple[str | Path, FormFacts]], original_base: bool) -> WeightsCount | None:
    """Compare the stored weights of an adapter and a model, and return the number of weights that differ from a merge.

    `forms` has the path and facts of two stored versions of an encoder, in any order. The result is None unless one
    form is an adapter and the other a model that is not quantised. `original_base` merges into the stored base weights,
    not into the values in training.
    """
    (adapter, its), (model, facts) = sorted(forms, key=lambda form: form[1].kind != "adapter")
    if its.kind != "adapter" or facts.kind not in ("whole model", "backbone", LIBRARY) or "bits" in facts.dtype:
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
    """Compare a new folder with the encoder that it was made from, and write the report and README.md to the folder.

    Args:
        folder: merged or exported encoder, still under a temporary name.
        source: folder of the encoder that `folder` was made from.
        names: names of source and folder in the report.
        check: False skips the comparison; the report then records the omission, and the result is None.
        device: device of the comparison; None: the best available.
        original_base: whether the adapter was merged into the stored base weights. The report then also notes the
            difference from the adapter on the base values in training.
        side: compare encoders with two prompts as encoders of queries only, or of documents only. None: both.

    Raises:
        VerificationError: if the two encoders differ.
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
                f"The difference from the adapter on the base values in training is 1-cos {trained.largest_difference:.1e} "
                f"at most, {trained.mean_difference:.1e} in the mean."
            )
            found = replace(found, notes=(*found.notes, note))
    write_report(folder, found, names[1])
    return found


def write_report(folder: Path, found: Verification | None, name: str) -> None:
    """Write the report of a verification (None: skipped) and README.md to a folder that will have the path `name`."""
    write_json(folder / REPORT_NAME, {"holds": None} if found is None else found.to_dict())
    (folder / "README.md").write_text(model_card(CardFacts.read(folder), Path(name).name), encoding="utf-8")


def _kind(path: str | Path) -> str:
    """Return the kind of a stored encoder: adapter, whole model, backbone, or the name of a `ProgramKind`.

    A backbone is a model without the settings of an encoder, such as prompt and pooling.
    """
    if (program := _program(path)) is not None:
        return program.name
    if not is_saved_encoder(path):
        return "backbone"
    return "whole model" if EncoderCard.read(Path(path).expanduser()).base is None else "adapter"


def _program(path: str | Path) -> ProgramKind | None:
    """Return the kind of a form that another program computes; None for a form that this package computes."""
    return next((kind for kind in PROGRAM_KINDS if kind.recognises(path)), None)


def _saved_folder(path: str | Path) -> str | Path:
    """Return the local folder of a saved encoder, which is downloaded if it is on the hub.

    For another model, return `path` unchanged.
    """
    source = resolve_model(str(path))
    return path if source.card is None else Path(source.location.name)


def open_form(path: str | Path, device: str | None, usage: dict[str, Any], original_base: bool) -> Form:
    """Open a stored encoder with its stored weights.

    `usage` is the prompt, pooling, maximum length, normalisation and, if present, attention, layers and dimensions for a
    model that does not store these settings. `original_base` opens an adapter on the stored base weights, not on the
    values in training.
    """
    if (program := _program(path)) is not None:
        return program.open(path, device, usage)
    kind = _kind(path)
    if kind == "backbone":
        options = ("prompt", "pooling", "max_length", "attention", "layers", "dimensions")
        named = {name: usage[name] for name in options if name in usage}
        encoder = SentenceEncoder.from_pretrained(path, device=device, **named)
        encoder.model.normalize = usage.get("normalize", encoder.normalize)
        return encoder
    stored: dict[str, Any] = {"dtype": "float32", "bits": None} if kind == "adapter" and original_base else {}
    return SentenceEncoder.from_pretrained(path, device=device, **stored)


def _widen(encoder: SentenceEncoder) -> None:
    """Convert the weights of an encoder to float32 in place, without changing their values.

    Quantised weights are dequantised.
    """
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
    """Encode texts with an opened encoder; return its facts with the token ids and embeddings of all texts.

    The texts are encoded for each of `sides`: as queries, as documents, or with the only prompt (None). `kind` and
    `name` describe the encoder in the report.
    """
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
        # A score calls only `encode`, which all forms have.
        spearman=None if score is None else score(encoder if len(sides) > 1 else by_side[0]),
    )
    return Encoded(facts, [ids for form in by_side for ids in form.tokenize(texts)], rows_ND)


def _by_side(encoder: Form, sides: Sequence[Side | None]) -> Sequence[Form]:
    """Return one encoder per side (query, document); for side None, the encoder itself.

    If the side is None and `encoder` has two prompts, the result uses the prompt of queries.
    """
    if sides[0] is None and isinstance(encoder, SentenceEncoder) and encoder.prompts.differ:
        sides = ["query"]  # the first form has one prompt: `compare_forms` reports the difference
    return [encoder if side is None else encoder.for_side(side) for side in sides]


def _rows(by_side: Sequence[Form], texts: Sequence[str]) -> Rows:
    """Return the embeddings of the texts by each encoder, stacked in float64: shape (encoders × texts, D)."""
    return np.concatenate([form.encode(texts) for form in by_side]).astype(np.float64)


def _shown(prompts: SidePrompts) -> str:
    """Return the template, edits, tokenization and appended token of the prompts as text, for the report."""
    shown = []
    for prompt in (prompts.query, prompts.document):
        more = [*prompt.edits, *(["segments"] if prompt.tokenization == "segments" else [])]
        more += [] if prompt.append is None else [f"then {prompt.append}"]
        shown.append(repr(prompt.template) + (f" ({', '.join(more)})" if more else ""))
    return f"{shown[0]} (queries), {shown[1]} (documents)" if prompts.differ else shown[0]


def _base_rows(
    encoder: SentenceEncoder,
    path: str | Path,
    texts: Sequence[str],
    device: str | None,
    sides: Sequence[Side | None],
    named: str | None,
) -> tuple[Rows | None, str]:
    """Return the embeddings of texts by the untrained base model of an encoder, or None and the reason.

    The base gets the prompt and pooling of the encoder. The reason is that the base is unknown or cannot be opened; it
    is "" if there are embeddings. `encoder` is the opened encoder, and `path` its folder. Texts are encoded for each of
    `sides`: as queries, as documents, or with the only prompt (None). `named` is the base if it is not stored.
    """
    if _kind(path) == "adapter":
        backbone: Any = encoder.model.backbone
        with backbone.disable_adapter():
            return _rows(_by_side(encoder, sides), texts), ""
    merged = Path(path).expanduser() / MERGE_NAME
    if named is None and not merged.is_file():
        return None, "not compared: a whole model was not merged, so its base is unknown"
    try:
        unknown = {"base": named, "base_dtype": "auto"} | dict.fromkeys(("base_revision", "bits", "layers"))
        origin: dict[str, Any] = unknown if named else read_json(merged)
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
            attention=encoder.attention,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:  # a damaged file, or a base that is not available
        return None, f"unknown: cannot be opened ({error})"
    _widen(base)
    return _rows(_by_side(base, sides), texts), ""

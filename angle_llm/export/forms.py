"""Forms: stored versions of an encoder, and the programs that compute their vectors.

Every form is opened with its stored weights and computes in float32, so that differences between forms come from the
weights and not from the arithmetic:

    adapter                 base weights rounded to their dtype in training (or dequantised), converted to float32, plus
                            the float32 adapter: the trained function without the rounding of bfloat16 activations
    whole model             stored weights, converted to float32
    backbone                like a whole model, with prompt, pooling, maximum length and normalisation of another form
    sentence-transformers   like a whole model, encoded by sentence-transformers
    onnx, llama.cpp         folders of `export --to onnx` and `--to gguf`, computed by onnxruntime and llama.cpp
    server                  texts are sent to a server, which computes as it is configured
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from angle_llm.export.exported_folder import LIBRARY, ExportFacts, SentenceTransformersModel
from angle_llm.export.exported_folder import is_sentence_transformers_folder as is_library_folder
from angle_llm.export.formats import llama_cpp, onnx_folder
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layers.quantization import dequantize
from angle_llm.model.source.checks import EXPORT_NAME, is_saved_encoder
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.resolve import resolve_model
from angle_llm.prompts import Side, SidePrompts
from angle_llm.serve.client import ServerModel, is_server

FormPath: TypeAlias = str | Path
"""Folder or name of a model, or URL of a server."""
_NOT_STORED = ("prompt", "pooling", "max_length", "attention", "layers", "dimensions")
"""Names in `Opening.usage` that a backbone does not store."""


class Form(Protocol):
    """An opened form: a `SentenceEncoder`, or an encoder that another program computes."""

    @property
    def prompts(self) -> SidePrompts: ...
    @property
    def pooling(self) -> str: ...
    @property
    def max_length(self) -> int: ...
    @property
    def normalize(self) -> bool: ...
    @property
    def dtype(self) -> object:
        """Dtype of the stored weights."""

    @property
    def bits(self) -> int | None:
        """Bits of quantised weights; None for other weights."""

    def for_side(self, side: Side) -> Form:
        """Return a form that encodes all texts as queries or as documents."""

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, prompt included; an empty list if the program does not report them."""

    def encode(self, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the embeddings (N, D) in float32."""


@dataclass(frozen=True)
class Opening:
    """How forms are opened."""

    device: str | None = None
    """Device of the computation; None: the best available."""
    original_base: bool = False
    """Whether adapters are applied to the stored base weights, not to the values in training (rounded, dequantised)."""
    usage: Mapping[str, Any] = field(default_factory=dict)
    """Values for forms that do not store them: prompt, pooling, max_length, normalize and, if present, attention, layers
    and dimensions; for servers also send_prompt and model."""


@dataclass(frozen=True)
class FormKind:
    """A kind of forms. The first kind in `KINDS` that recognises a path is its kind."""

    name: str
    recognises: Callable[[FormPath], bool]
    open: Callable[[FormPath, Opening], Form]
    package: str = ""
    """Python package of another program that computes the vectors; empty for a server, and for this package."""
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """Largest allowed 1 - cos by stored dtype. For another dtype, the limit depends on its precision."""


@dataclass(frozen=True, kw_only=True)
class ExportKind(FormKind):
    """The kind of the folders that `export --to` writes for one target."""

    target: str
    """Value of `--to`."""
    marker: str
    """Name of the file that only folders of `export` have."""
    files: Sequence[str] = ()
    """Patterns of the paths of files that a saved encoder and a sentence-transformers folder do not have."""
    facts: Callable[[Path], ExportFacts | None]
    """Function that reads the facts of a folder; None for a folder of another target."""
    instructions: Callable[[Path], str] | None = None
    """Function that returns how to use a folder, in Markdown; None: sentence-transformers opens the folder."""


def _open_library(path: FormPath, opening: Opening) -> Form:
    """Open a sentence-transformers folder."""
    usage = opening.usage
    return SentenceTransformersModel(path, device=opening.device, prompt=usage["prompt"], pooling=usage["pooling"])


def _onnx_facts(folder: Path) -> ExportFacts | None:
    """Read the facts of an ONNX folder; return None for another folder."""
    return ExportFacts.read(folder) if onnx_folder.is_onnx_folder(folder) else None


def _gguf_facts(folder: Path) -> ExportFacts | None:
    """Read the facts of a folder with a GGUF file; return None for another folder."""
    if not llama_cpp.is_gguf_export(folder):
        return None
    usage = llama_cpp.Usage.read(folder)
    _, pooling = llama_cpp.stored_facts(folder / llama_cpp.GGUF_NAME)
    return ExportFacts(usage.prompt, pooling, usage.max_length, normalize=usage.normalize)


def _is_adapter(path: FormPath) -> bool:
    """Return whether a path is the folder of a saved adapter."""
    return is_saved_encoder(path) and EncoderCard.read(Path(path).expanduser()).base is not None


def _open_adapter(path: FormPath, opening: Opening) -> Form:
    """Open a saved adapter on its base."""
    stored: dict[str, Any] = {"dtype": "float32", "bits": None} if opening.original_base else {}
    return SentenceEncoder.from_pretrained(path, device=opening.device, **stored)


def _open_backbone(path: FormPath, opening: Opening) -> Form:
    """Open a model that does not store how it is used."""
    options = {name: opening.usage[name] for name in _NOT_STORED if name in opening.usage}
    encoder = SentenceEncoder.from_pretrained(path, device=opening.device, **options)
    normalize = opening.usage.get("normalize", encoder.normalize)
    return encoder.changed(model=encoder.model.changed(normalize=normalize))


SERVER = FormKind("server", is_server, lambda url, opening: ServerModel(str(url), **opening.usage))
ADAPTER = FormKind("adapter", _is_adapter, _open_adapter)
_EIGHT_BITS = 1e-2
"""Tolerance of weights in 8 bits: only a guard against a wrong file. Spearman on scored pairs measures their quality."""
EXPORT_KINDS = (
    ExportKind(
        "onnx",
        onnx_folder.is_onnx_folder,
        lambda path, _: onnx_folder.OnnxModel(path),
        "onnxruntime",
        tolerances={"float32 in 8 bits": _EIGHT_BITS},
        target="onnx",
        marker=EXPORT_NAME,
        files=[f"{onnx_folder.GRAPH_NAME}*"],
        facts=_onnx_facts,
        instructions=onnx_folder.onnx_usage,
    ),
    ExportKind(
        "llama.cpp",
        llama_cpp.is_gguf_export,
        lambda path, _: llama_cpp.LlamaCppModel(path),
        "xllamacpp",
        # In float16, weights and activations have 11 bits. "other" is a dtype that `export` does not write.
        tolerances={"float32": 1e-5, "float16": 1e-4, "q8_0": _EIGHT_BITS, "other": 1e-5},
        target="gguf",
        marker=llama_cpp.USAGE_NAME,
        files=[llama_cpp.GGUF_NAME, llama_cpp.USAGE_NAME],
        facts=_gguf_facts,
        instructions=lambda folder: llama_cpp.Usage.read(folder).described(),
    ),
    ExportKind(
        LIBRARY, is_library_folder, _open_library, LIBRARY, target=LIBRARY, marker=EXPORT_NAME, facts=ExportFacts.read
    ),
)
"""The targets of `angle-llm export`."""
PROGRAM_KINDS: tuple[FormKind, ...] = (SERVER, *EXPORT_KINDS)
"""The kinds of forms that other programs compute."""
KINDS = (
    *PROGRAM_KINDS,
    ADAPTER,
    FormKind(
        "whole model",
        is_saved_encoder,
        lambda path, opening: SentenceEncoder.from_pretrained(path, device=opening.device),
    ),
    FormKind("backbone", lambda path: True, _open_backbone),
)


def kind_of(path: FormPath) -> FormKind:
    """Return the kind of a form."""
    return next(form_kind for form_kind in KINDS if form_kind.recognises(path))


def open_form(path: FormPath, opening: Opening) -> Form:
    """Open a stored version of an encoder."""
    return kind_of(path).open(path, opening)


def saved_folder(path: FormPath) -> FormPath:
    """Return the local folder of a saved encoder, which is downloaded if it is on the hub.

    For another model, and for a form of another program, return `path` unchanged.
    """
    if kind_of(path) in PROGRAM_KINDS:
        return path
    source = resolve_model(str(path))
    return path if source.card is None else Path(source.location.name)


def convert_to_float32(encoder: SentenceEncoder) -> None:
    """Convert the weights of an encoder to float32 in place, without changing their values; dequantise quantised weights."""
    if encoder.bits is not None:
        dequantize(encoder.model.backbone, torch.float32)
    for tensor in (*encoder.model.parameters(), *encoder.model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()

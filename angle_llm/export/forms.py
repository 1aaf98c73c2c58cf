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

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from angle_llm.export.exported_folder import LIBRARY, SentenceTransformersModel
from angle_llm.export.formats.llama_cpp import LlamaCppModel, is_gguf_export
from angle_llm.export.formats.onnx_folder import OnnxModel, is_onnx_folder
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layers.quantization import dequantize
from angle_llm.model.source.checks import is_saved_encoder
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.resolve import resolve_model
from angle_llm.model.source.sentence_transformers_folder import find_sentence_transformers
from angle_llm.serve.client import ServerModel, is_server

FormPath: TypeAlias = str | Path
"""Folder or name of a model, or URL of a server."""
Form: TypeAlias = SentenceEncoder | SentenceTransformersModel | OnnxModel | LlamaCppModel | ServerModel
"""An opened form: an encoder, or the interface of another program that computes it."""
PACKAGES = {LIBRARY: "sentence_transformers", "onnx": "onnxruntime", "llama.cpp": "xllamacpp", "server": ""}
"""Module of the program by kind of form; "" for a server."""


def kind_of(path: FormPath) -> str:
    """Return the kind of a form, as in the table of this module."""
    if is_server(path):
        return "server"
    if is_onnx_folder(path):
        return "onnx"
    if is_gguf_export(path):
        return "llama.cpp"
    if is_saved_encoder(path):
        return "whole model" if EncoderCard.read(Path(path).expanduser()).base is None else "adapter"
    return "backbone" if find_sentence_transformers(Path(path).expanduser()) is None else LIBRARY


def open_form(path: FormPath, usage: Mapping[str, Any], *, device: str | None = None) -> Form:
    """Open a stored version of an encoder.

    Args:
        path: folder or name of a model, or URL of a server.
        usage: values for forms that do not store them: prompt, pooling, max_length and normalize; for servers also
            send_prompt and model.
        device: device of the computation; None: the best available.

    Raises:
        ServerError, FileNotFoundError, ArtifactError, MissingLibraryError: see `verify`.
    """
    kind = kind_of(path)
    if kind == "server":
        return ServerModel(str(path), **usage)
    if kind == "onnx":
        return OnnxModel(path)
    if kind == "llama.cpp":
        return LlamaCppModel(path)
    if kind == LIBRARY:
        return SentenceTransformersModel(path, device=device, prompt=usage["prompt"], pooling=usage["pooling"])
    options: dict[str, Any] = {}
    if kind == "backbone":
        options = {name: usage[name] for name in ("prompt", "pooling", "max_length") if name in usage}
    encoder = SentenceEncoder.from_pretrained(path, device=device, **options)
    if kind == "backbone" and "normalize" in usage:
        encoder = encoder.changed(model=encoder.model.changed(normalize=usage["normalize"]))
    return encoder


def saved_folder(path: FormPath) -> FormPath:
    """Return the local folder of a saved encoder, which is downloaded if it is on the hub.

    For another model, and for a form of another program, return `path` unchanged.
    """
    if kind_of(path) in PACKAGES:
        return path
    source = resolve_model(str(path))
    return path if source.card is None else Path(source.location.name)


def convert_to_float32(encoder: SentenceEncoder) -> None:
    """Convert the weights of an encoder to float32 in place, without changing their values; dequantise quantised weights."""
    if encoder.bits is not None:
        dequantize(encoder.model.backbone, torch.float32)
    encoder.model.float()

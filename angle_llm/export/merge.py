"""Merge an adapter into the weights of its base. The merged model needs neither peft nor the base.

    base, tensor by tensor ──► values of training ──► float32 + update ──► one rounding ──► shards
                                                                                  │
    saved adapter ◄─────────────── verify: equal vectors? ────────────────────────┘

The adapter is merged into the base weights it was trained on: rounded to the dtype in the encoder card, and dequantised
if the base was quantised. With the stored base weights, the result would be another encoder (peft#2321). A base in
safetensors is read tensor by tensor, so that merging needs the memory of one shard and one layer; verification loads
both forms, one after the other. The target folder is written atomically, after verification.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from angle_llm import __version__
from angle_llm.export.card import MERGE_NAME
from angle_llm.export.comparison import Verification
from angle_llm.export.verify import finish_folder
from angle_llm.export.weights import open_adapters_base
from angle_llm.io import write_json
from angle_llm.model.layers.lora import LoraAdapter, is_transposed, read_adapter
from angle_llm.model.source.artifact import check_writable, write_directory, write_earlier_names, write_library_form
from angle_llm.model.source.backbone import BackboneLocation, load_tokenizer, torch_dtype
from angle_llm.model.source.checks import CARD_NAME, ArtifactError, is_saved_encoder
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.resolve import locate
from angle_llm.model.source.weights import BaseWeights

SHARD_BYTES = 4_000_000_000
"""Default maximum size of a weights file, in bytes."""


def merge(
    run: str | Path,
    out: str | Path,
    *,
    base: Literal["dequantised", "original"] = "dequantised",
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
    check: bool = True,
    device: str | None = None,
) -> Verification | None:
    """Merge a saved LoRA adapter into its base, write the whole model to a folder, and return the verification.

    The verification compares the merged model with the adapter.

    Args:
        run: folder of the adapter.
        out: folder of the merged model.
        base: "dequantised" merges into the weights that the adapter was trained on. "original" merges into the stored
            weights; the result then differs slightly from an adapter that was trained on a quantised base.
        dtype: dtype of the merged weights, which are computed in float32 and rounded once.
        shard_bytes: maximum size of a weights file.
        check: False skips verification, for a machine that cannot hold the model. The folder records the omission, and
            the result is None.
        device: device of the verification; None: the best available.

    Raises:
        FileNotFoundError: if there is no adapter at `run`, or its base is missing.
        ArtifactError: for an adapter that cannot be merged, a base with other weights than in training, or a target
            that would overwrite its inputs.
        VerificationError: if the merged model differs from the adapter; nothing is written.
    """
    source, target = Path(run).expanduser(), Path(out).expanduser()
    if not is_saved_encoder(source):
        inside = source / "model"
        hint = f"Use {inside}." if is_saved_encoder(inside) else "Use the model folder of a run."
        raise FileNotFoundError(f"expected a saved adapter, got {source}, which has no {CARD_NAME}. {hint}")
    card = EncoderCard.read(source)
    if card.base is None:
        raise ArtifactError(f"expected an adapter, got a whole model in {source}, which needs no merge.")
    check_target(source, locate(card.base), target)
    adapter = read_adapter(source)
    original = base == "original"
    weights = open_adapters_base(source, card, original=original)
    adapter.check_fits(weights.skeleton)
    provenance = {
        "base": card.base,
        "base_revision": card.base_revision,
        "base_fingerprint": card.base_fingerprint,
        "base_weights": base,
        "base_dtype": "float32" if original else card.dtype,
        "bits": None if original else card.bits,
        "layers": card.layers,
        "adapter_sha256": adapter.sha256,
        "adapter": {key: adapter.config.get(key) for key in ("r", "lora_alpha", "use_rslora", "use_dora")},
        "dtype": dtype,
        "angle_llm": __version__,
    }
    found: list[Verification | None] = []

    def fill(folder: Path) -> None:
        _write_weights(folder, weights, adapter, torch_dtype(dtype), shard_bytes)
        config: Any = weights.skeleton.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # the merged model is not quantised, unlike its base
        config.dtype = torch_dtype(dtype)
        config.architectures = [type(weights.skeleton).__name__]
        config.save_pretrained(folder)
        write_earlier_names(folder)
        tokenizer = load_tokenizer(BackboneLocation(str(source)))
        tokenizer.save_pretrained(folder)
        whole = replace(card, dtype=dtype, base=None, base_revision=None, base_fingerprint=None, bits=None, layers=None)
        whole.write(folder)
        write_library_form(folder, weights.skeleton, tokenizer, whole)
        write_json(folder / MERGE_NAME, provenance)
        names = (str(run), str(out))
        found.append(finish_folder(folder, source, names, check=check, device=device, original_base=original))

    write_directory(target, fill)
    return found[0]


def check_target(source: Path, base: BackboneLocation, target: Path) -> None:
    """Check that a target folder does not overwrite, and is not inside, a saved encoder (`source`) or its base.

    Raises:
        ArtifactError: with the path that would be overwritten.
    """
    # A GGUF base is one file: a target in the folder of the file does not change the file.
    read = {"adapter": source, "base": Path(base.name) / (base.gguf_file or "")}
    check_writable(target, **read)
    for what, path in read.items():
        if path.exists() and target.resolve().is_relative_to(path.resolve()):
            raise ArtifactError(f"{target} is in the folder of the {what}, {path}. Choose another folder.")


def _write_weights(
    folder: Path, weights: BaseWeights, adapter: LoraAdapter, dtype: torch.dtype, shard_bytes: int
) -> None:
    """Write the tensors of the merged model to one safetensors file, or to several files with an index.

    Tensors have the names that `save_pretrained` gives them. `weights` are the base weights, and `dtype` is the dtype
    of the files. A file has at most `shard_bytes` bytes.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    shapes = {
        name: tensor.to("meta", dtype if tensor.is_floating_point() else None)
        for name, tensor in weights.skeleton.state_dict().items()
    }
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=shard_bytes)
    for file, names in split.filename_to_tensors.items():
        tensors = {name: _merged(name, weights, adapter, dtype) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        del tensors  # free the memory before the next shard
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)


def _merged(name: str, weights: BaseWeights, adapter: LoraAdapter, dtype: torch.dtype) -> Tensor:
    """Return the tensor `name` of the merged model, in `dtype`: the base weight plus the update of the adapter, if any.

    Raises:
        ArtifactError: for values that are not finite.
    """
    path, _, kind = name.rpartition(".")
    values = weights.values(name)
    if kind == "weight" and path in adapter.updates:
        transposed = is_transposed(weights.skeleton.get_submodule(path))
        values = adapter.updates[path].merged(values, transposed=transposed)
    if not values.is_floating_point():
        return values.contiguous()
    stored = values.to(dtype).contiguous()
    if not bool(torch.isfinite(stored).all()):
        raise ArtifactError(
            f"{name} has values that are not finite in {str(dtype).removeprefix('torch.')}. If they are finite in float32, "
            "choose another --dtype; otherwise the adapter is damaged."
        )
    return stored

"""Merge an adapter into the weights of its base: the result needs neither peft nor the base.

    base, tensor by tensor ──► values of training ──► float32 + update ──► one rounding ──► shards
                                                                                  │
    saved adapter ◄─────────────── verify: equal vectors? ────────────────────────┘

The base has the values of training: rounded to the dtype of the card, and dequantised if it was quantised. On the
original values the adapter would be another encoder (peft#2321). A base in safetensors is read tensor by tensor, so
merging needs the memory of one shard and one layer; verification loads each form. The target is written atomically,
after verification.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from angle_llm import __version__
from angle_llm.export.card import CardFacts, model_card
from angle_llm.export.comparison import Verification
from angle_llm.export.verify import MERGE_NAME, VerificationError, verify
from angle_llm.export.weights import open_adapters_base
from angle_llm.io import write_json
from angle_llm.model.artifact import EncoderCard, check_writable, write_directory
from angle_llm.model.backbone import BackboneLocation, load_tokenizer, locate, torch_dtype
from angle_llm.model.checks import CARD_NAME, ArtifactError, is_saved_encoder
from angle_llm.model.depth import cut_layers
from angle_llm.model.lora import LoraAdapter, is_transposed, read_adapter
from angle_llm.model.weights import BaseWeights

REPORT_NAME = "verification.json"
SHARD_BYTES = 4_000_000_000


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
    """Merge the saved adapter `run` into its base, write it to `out`, and return the verification.

    Args:
        base: "dequantised" merges into the values the adapter was trained on, "original" into the stored weights, where
        an
            adapter trained on a quantised base differs slightly.
        dtype: dtype of the stored weights, rounded once.
        shard_bytes: size of a weights file.
        check: False skips verification, for a machine that cannot hold the model; the folder records it.
        device: where to verify; None: the best available.

    Raises:
        FileNotFoundError: if there is no adapter at `run`, or its base is missing.
        ArtifactError: for an adapter that cannot be merged, another base, or a target that would overwrite its inputs.
        VerificationError: if the merged model differs from the adapter; nothing is written.
    """
    source, target = Path(run).expanduser(), Path(out).expanduser()
    card = _adapter_card(source)
    location = locate(card.base or "")
    check_target(source, location, target)
    stored = torch_dtype(dtype)
    adapter = read_adapter(source)

    original = base == "original"
    weights = open_adapters_base(card, original=original)
    _check_base(card, weights, source, rounded=not original)
    if card.layers is not None:
        cut_layers(weights.skeleton, card.layers)
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
    found: Verification | None = None

    def fill(folder: Path) -> None:
        nonlocal found
        _write_weights(folder, weights, adapter, stored, shard_bytes)
        _write_config(folder, weights, dtype)
        load_tokenizer(BackboneLocation(str(source))).save_pretrained(folder)
        merged = EncoderCard(card.prompt, card.pooling, card.max_length, dtype, base=None, dimensions=card.dimensions)
        merged.write(folder)
        write_json(folder / MERGE_NAME, provenance)
        if check:
            found = _check([source, folder], [str(run), str(out)], device, original=original)
        write_json(folder / REPORT_NAME, {"holds": None} if found is None else found.to_dict())
        facts = CardFacts(
            "whole", target.name, card.prompt, card.pooling, card.max_length, card.base, card.base_revision,
            dimensions=card.dimensions, verification=None if found is None else found.to_dict(), origin=provenance,
        )  # fmt: skip
        (folder / "README.md").write_text(model_card(facts), encoding="utf-8")

    write_directory(target, fill)
    return found


def _adapter_card(source: Path) -> EncoderCard:
    if not is_saved_encoder(source):
        inside = source / "model"
        hint = f" {inside} is one." if is_saved_encoder(inside) else " Give the model folder of a run."
        raise FileNotFoundError(f"{source} has no {CARD_NAME}: not a saved adapter.{hint}")
    card = EncoderCard.read(source)
    if card.base is None:
        raise ArtifactError(f"{source} holds a whole model, not an adapter: nothing to merge.")
    return card


def check_target(source: Path, location: BackboneLocation, target: Path) -> None:
    """Refuse a target that would overwrite the adapter or its base, or be written into their folders."""
    check_writable(target)
    place = target.resolve()
    # A folder below that of a GGUF file does not touch the file.
    base = Path(location.name) / (location.gguf_file or "")
    for what, read in (("adapter", source), ("base", base)):
        if read.exists():
            read = read.resolve()
            if place == read or place in read.parents or read in place.parents:
                raise ArtifactError(f"{target} would overwrite the {what}, {read}. Choose another folder.")


def _check_base(card: EncoderCard, weights: BaseWeights, source: Path, *, rounded: bool) -> None:
    # Rounding to float16 and then to the fingerprint's bfloat16 differs from rounding to bfloat16 at once.
    comparable = rounded or card.dtype != "float16"
    if comparable and card.base_fingerprint is not None and weights.fingerprint() != card.base_fingerprint:
        raise ArtifactError(
            f"{source} was trained on weights with fingerprint {card.base_fingerprint}, but {card.base} has "
            f"{weights.fingerprint()}. Restore the original base, or name the right one in {source / CARD_NAME}."
        )


def _check(forms: list[Path], names: list[str], device: str | None, *, original: bool) -> Verification:
    """Verify a merged folder; on the original base also report the difference from the trained values."""
    found = verify(forms, names=names, device=device, original_base=original)
    if not found.holds:
        raise VerificationError(
            f"{names[1]} was not written: it differs from the encoder in {names[0]}:\n{found.text()}"
        )
    if original:
        (drift,) = verify(forms, names=names, device=device).comparisons
        note = (
            "compared with the adapter on the stored weights of the base. The difference from the adapter on the values it "
            f"was trained on is 1-cos at most {drift.largest_difference:.1e}, mean {drift.mean_difference:.1e}."
        )
        found = replace(found, notes=(*found.notes, note))
    return found


def _write_weights(
    folder: Path, weights: BaseWeights, adapter: LoraAdapter, dtype: torch.dtype, shard_bytes: int
) -> None:
    """Write the tensors with the names of `save_pretrained`: one file, or shards and their index."""
    from safetensors.torch import save_file

    shards = list(_shards(weights, dtype, shard_bytes))
    files: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: _merged(name, weights, adapter, dtype) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
        del tensors  # before the next shard is made
    if len(shards) > 1:
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": files})


def _shards(weights: BaseWeights, dtype: torch.dtype, shard_bytes: int) -> Iterator[list[str]]:
    """Tensor names in groups of at most `shard_bytes`, or one tensor."""
    names: list[str] = []
    size = 0
    for name, tensor in weights.skeleton.state_dict().items():
        item = dtype.itemsize if tensor.is_floating_point() else tensor.dtype.itemsize
        if names and size + tensor.numel() * item > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.numel() * item
    yield names


def _merged(name: str, weights: BaseWeights, adapter: LoraAdapter, dtype: torch.dtype) -> Tensor:
    """A tensor of the merged model in the stored dtype."""
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


def _write_config(folder: Path, weights: BaseWeights, dtype: str) -> None:
    config: Any = weights.skeleton.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the base was quantised, the merged model is not
    config.dtype = torch_dtype(dtype)
    config.architectures = [type(weights.skeleton).__name__]
    config.save_pretrained(folder)

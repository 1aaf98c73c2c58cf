"""An adapter put into its base's weights: a directory that needs neither peft nor the base.

    base, tensor by tensor ──► as the adapter saw it ──► float32 + update ──► one rounding ──► shards
                                                                                  │
    the saved adapter ◄──────────── verify: the same vectors? ────────────────────┘

The base's values are those of training: rounded to the card's dtype, and where the base was quantised, as they come out of
their bits. On the original values the adapter would be another encoder (peft issue 2321). A base in safetensors is read
tensor by tensor, so the merge needs the memory of one output shard and one layer; the verification loads each form whole.

The target is written whole or not at all, and not before it is shown to be the same encoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from angle_llm import __version__
from angle_llm.export.model_card import model_card
from angle_llm.export.report import Verification
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
    """Writes the saved adapter `run`, merged into its base, as the directory `out`; returns what the verification found.

    `base` "dequantised" merges onto the values the adapter was trained on, "original" onto the base's weights as they are
    stored, where a quantised adapter is no longer quite the one that was trained. `dtype` is what is stored, rounded once.
    `check` False leaves the verification out, for a machine that cannot hold the model; the directory says so.

    Raises:
        FileNotFoundError: if there is no adapter at `run`, or its base is gone.
        ArtifactError: for an adapter that cannot be merged, another base, or a target that is in the way.
        VerificationError: if the merged model is not the adapter's; nothing is written then.
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
        (folder / "README.md").write_text(model_card(target.name, merged, provenance, found), encoding="utf-8")

    write_directory(target, fill)
    return found


def _adapter_card(source: Path) -> EncoderCard:
    if not is_saved_encoder(source):
        inside = source / "model"
        hint = f" {inside} is one." if is_saved_encoder(inside) else " Give the model directory of a run."
        raise FileNotFoundError(f"{source} has no {CARD_NAME}, so it is no saved adapter.{hint}")
    card = EncoderCard.read(source)
    if card.base is None:
        raise ArtifactError(f"{source} holds a whole model, no adapter: there is nothing to merge.")
    return card


def check_target(source: Path, location: BackboneLocation, target: Path) -> None:
    """Refuses to write onto, into or around what is read."""
    check_writable(target)
    place = target.resolve()
    for what, folder in (("adapter", source), ("base", Path(location.name))):
        if folder.exists():
            read = folder.resolve()
            if place == read or place in read.parents or read in place.parents:
                raise ArtifactError(f"{target} is in the way of the {what}, {folder}. Choose another directory.")


def _check_base(card: EncoderCard, weights: BaseWeights, source: Path, *, rounded: bool) -> None:
    # Through float16 and on to the fingerprint's bfloat16 is another rounding than to bfloat16 at once.
    comparable = rounded or card.dtype != "float16"
    if comparable and card.base_fingerprint is not None and weights.fingerprint() != card.base_fingerprint:
        raise ArtifactError(
            f"{source} was trained on weights with fingerprint {card.base_fingerprint}, but {card.base} has "
            f"{weights.fingerprint()}. Put the original base there, or name the right one in {source / CARD_NAME}."
        )


def _check(forms: list[Path], names: list[str], device: str | None, *, original: bool) -> Verification:
    """The verification of a merged folder; on the original base it also says how far that is from what was trained."""
    found = verify(forms, names=names, device=device, original_base=original)
    if not found.holds:
        raise VerificationError(
            f"{names[1]} was not written, for it would not be the encoder in {names[0]}:\n{found.text()}"
        )
    if original:
        (drift,) = verify(forms, names=names, device=device).comparisons
        note = (
            "compared with the adapter on the base's weights as they are stored. From the adapter on the values it was "
            f"trained on it differs by 1-cos {drift.largest_difference:.1e} at most, {drift.mean_difference:.1e} in the mean."
        )
        found = replace(found, notes=(*found.notes, note))
    return found


def _write_weights(
    folder: Path, weights: BaseWeights, adapter: LoraAdapter, dtype: torch.dtype, shard_bytes: int
) -> None:
    """Writes the backbone's tensors as `save_pretrained` names them: one file, or shards and their index."""
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
    """The names of the tensors, in the backbone's order, in groups that take at most `shard_bytes`, or one tensor."""
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
    """A tensor of the merged model, in the stored type."""
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
            f"{name} has numbers that are not finite in {str(dtype).removeprefix('torch.')}. If they are in float32, choose "
            "another --dtype, else the adapter is damaged."
        )
    return stored


def _write_config(folder: Path, weights: BaseWeights, dtype: str) -> None:
    config: Any = weights.skeleton.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the base was stored in bits, this is not
    config.dtype = torch_dtype(dtype)
    config.architectures = [type(weights.skeleton).__name__]
    config.save_pretrained(folder)

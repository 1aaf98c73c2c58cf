"""A saved LoRA adapter as what it adds to the weights, computed in float32.

    LoRA    W' = W + s B A              s = alpha / rank, for rsLoRA alpha / sqrt(rank)
    DoRA    W' = m (W + s B A) / |W + s B A|        the length of each output's row; m learned, one per output

Arithmetic in a narrower type is the classic way to spoil a merge, so W' is float32 whatever W is; who stores it narrower
rounds it once, at the end. Only what is understood is merged: an adapter with other parts (trained embeddings, biases,
ranks that differ by layer) is refused, for leaving a part out would give another model without a word.

Legend: O outputs, I inputs, R rank.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from angle_llm.model.artifact import ArtifactError, read_json

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_ROOT = "base_model.model."
_A, _B, _MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
_UNDERSTOOD = {
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core",
    "peft_type", "peft_version", "qalora_group_size", "r", "revision", "runtime_config", "target_modules", "task_type",
    "use_dora", "use_rslora",
}  # fmt: skip
"""Keys of peft's configuration that are computed with here, or that say nothing of W'."""
_LARGEST_ALPHA = 1e6
"""Far above any that is trained with, far below what makes numbers that are not finite."""


@dataclass(frozen=True)
class LoraUpdate:
    """What an adapter does to one linear layer."""

    a_RI: Tensor
    b_OR: Tensor
    scaling: float
    magnitude_O: Tensor | None
    """DoRA's; None for LoRA."""

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)"""
        return self.b_OR.shape[0], self.a_RI.shape[1]

    def merged(self, weight: Tensor, *, transposed: bool = False) -> Tensor:
        """W' in float32, contiguous; `weight` is (O, I) of any floating type, (I, O) if `transposed`, and left as it is."""
        own = weight.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        weight_OI = own.T if transposed else own
        weight_OI.addmm_(self.b_OR, self.a_RI, alpha=self.scaling)
        if self.magnitude_O is not None:
            length_O = torch.linalg.vector_norm(weight_OI, dim=1)
            weight_OI.mul_((self.magnitude_O / length_O)[:, None])
        return own

    def exactly(self, weight: Tensor, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
        """W' in float64, shaped as `weight`, and how far from it float32 arithmetic may come, whatever its order.

        Each term goes through at most R + 2 roundings (its product, R - 1 sums, the scaling, the sum with W), and each moves
        it by u = 2^-24 of its size. DoRA's length has I terms, whose errors do not add up but cancel: about sqrt(I) u."""
        weight_OI = (weight.T if transposed else weight).double()
        a_RI, b_OR = self.a_RI.double(), self.b_OR.double()
        exact_OI = weight_OI + self.scaling * b_OR @ a_RI
        size_OI = weight_OI.abs() + abs(self.scaling) * b_OR.abs() @ a_RI.abs()
        roundings = len(a_RI) + 2.0
        if self.magnitude_O is not None:
            factor_O1 = (self.magnitude_O.double() / torch.linalg.vector_norm(exact_OI, dim=1))[:, None]
            exact_OI, size_OI = factor_O1 * exact_OI, factor_O1.abs() * size_OI
            roundings += exact_OI.shape[1] ** 0.5 + 3
        reach_OI = roundings * 2.0**-24 * size_OI
        return (exact_OI.T, reach_OI.T) if transposed else (exact_OI, reach_OI)


@dataclass(frozen=True)
class LoraAdapter:
    """A saved adapter: its updates by the path of their layer, and its identity."""

    updates: dict[str, LoraUpdate]
    sha256: str
    """Of the file with its tensors."""
    config: dict[str, Any]
    """peft's, as it was read."""

    def check_fits(self, backbone: nn.Module) -> None:
        """Raises `ArtifactError` unless every update has its layer in the backbone, of its kind and shape."""
        layers = dict(backbone.named_modules())
        for path, update in self.updates.items():
            layer = layers.get(path)
            if layer is None:
                raise ArtifactError(f"the adapter changes {path}, and the base has no such layer: it is another model.")
            if not (isinstance(layer, nn.Linear) or is_transposed(layer)):
                raise ArtifactError(
                    f"the adapter changes {path}, which is of type {type(layer).__name__}. Only linear layers are merged."
                )
            shape = linear_shape(layer)
            if shape != update.shape:
                raise ArtifactError(
                    f"the adapter's update of {path} is {update.shape}, outputs by inputs, and the base's layer {shape}: it is "
                    "another model."
                )


def is_transposed(layer: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as (I, O): GPT-2's do."""
    return type(layer).__name__ == "Conv1D"


def linear_shape(layer: nn.Module) -> tuple[int, int]:
    """(O, I) of a linear layer, however it keeps its weight: of a quantised one the weight itself is packed."""
    held: Any = layer
    outputs, inputs = tuple(held.weight.shape)[::-1] if is_transposed(layer) else (held.out_features, held.in_features)
    return outputs, inputs


def read_adapter(folder: Path) -> LoraAdapter:
    """Reads the adapter of a saved directory, all of it or not at all.

    Raises:
        FileNotFoundError: if the folder holds no adapter.
        ArtifactError: for damaged files, tensors without their partners, or parts that cannot be merged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} holds no {name}, so there is no adapter.")
    try:
        config = read_json(folder / CONFIG_NAME)
        tensors = {key: tensor.float() for key, tensor in load_file(folder / WEIGHTS_NAME).items()}
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise ArtifactError(
            f"the adapter in {folder} cannot be read ({WEIGHTS_NAME}): {error} Save it again."
        ) from error
    odd = next((key for key, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None)
    if odd is not None:
        raise ArtifactError(
            f"{folder / WEIGHTS_NAME}: {odd} holds numbers that are not finite. Save the adapter again."
        )
    scaling = _scaling(config, folder / CONFIG_NAME)
    paths = [key.removeprefix(_ROOT).removesuffix(_A) for key in tensors if key.startswith(_ROOT) and key.endswith(_A)]
    updates: dict[str, LoraUpdate] = {}
    for path in paths:
        a_RI, b_OR = tensors.pop(_ROOT + path + _A), tensors.pop(_ROOT + path + _B, None)
        magnitude_O = tensors.pop(_ROOT + path + _MAGNITUDE, None)
        if b_OR is None or (magnitude_O is None) == bool(config.get("use_dora")):
            raise ArtifactError(f"{folder / WEIGHTS_NAME} holds a part of the update of {path} only. Save it again.")
        rank = config["r"]
        fits = a_RI.ndim == 2 and b_OR.ndim == 2 and a_RI.shape[0] == b_OR.shape[1] == rank
        if not fits or (magnitude_O is not None and magnitude_O.shape != b_OR.shape[:1]):
            raise ArtifactError(
                f"{folder / WEIGHTS_NAME}: the update of {path} needs A ({rank}, I) and B (O, {rank}), found "
                f"{tuple(a_RI.shape)} and {tuple(b_OR.shape)}. Save the adapter again."
            )
        updates[path] = LoraUpdate(a_RI, b_OR, scaling, magnitude_O)
    if tensors or not updates:
        odd = min(tensors, default="nothing")
        raise ArtifactError(
            f"{folder / WEIGHTS_NAME} holds {odd}, which is no update of a linear layer. Save the adapter again."
        )
    return LoraAdapter(updates, hashlib.sha256((folder / WEIGHTS_NAME).read_bytes()).hexdigest(), config)


def _scaling(config: dict[str, Any], path: Path) -> float:
    """s; refuses a configuration that asks for more than is computed here."""
    if config.get("peft_type") != "LORA":
        raise ArtifactError(f"{path}: only LoRA and DoRA adapters are merged, this one is {config.get('peft_type')!r}.")
    for key, value in config.items():
        if key not in _UNDERSTOOD and value not in (None, False, {}, [], "none"):
            raise ArtifactError(f"{path}: `{key}` is {value!r}, and an adapter with it cannot be merged here.")
    if not isinstance(config.get("init_lora_weights", True), bool) and config["init_lora_weights"] != "gaussian":
        raise ArtifactError(
            f"{path}: `init_lora_weights` {config['init_lora_weights']!r} changes the base's weights too."
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not (type(rank) is int and rank > 0 and type(alpha) in (int, float) and abs(alpha) < _LARGEST_ALPHA):  # type: ignore[arg-type]
        raise ArtifactError(f"{path}: needs a rank `r` and `lora_alpha`, found {rank!r} and {alpha!r}. Save it again.")
    dropout = config.get("lora_dropout") or 0.0
    if not (type(dropout) in (int, float) and 0 <= dropout <= 1):
        raise ArtifactError(f"{path}: `lora_dropout` must be in 0 .. 1, found {dropout!r}. Save it again.")
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return float(alpha) / divisor  # type: ignore[arg-type]

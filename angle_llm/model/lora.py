"""LoRA: added to a backbone and loaded onto it through peft; a saved adapter as what it adds to the weights, in float32.

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
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from angle_llm.config import LoraSettings, unknown_name
from angle_llm.model.checks import ArtifactError, read_json
from angle_llm.model.fast_paths import shorten

ALL_LINEAR = "all-linear"


def add_lora(backbone: nn.Module, settings: LoraSettings) -> nn.Module:
    """Wraps the backbone; only the adapter trains, in float32 whatever the base's dtype.

    Raises:
        ValueError: if no layer of the backbone bears a target's name.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    transposed = any(type(layer).__name__ == "Conv1D" for layer in backbone.modules())  # GPT-2's linear layers
    config = LoraConfig(
        task_type=TaskType.FEATURE_EXTRACTION,
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft divides it; fractions are fine
        lora_dropout=settings.dropout,
        target_modules=ALL_LINEAR
        if list(settings.targets) == [ALL_LINEAR]
        else _known_targets(backbone, settings.targets),
        fan_in_fan_out=transposed,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        bias="none",
    )
    with _quiet_peft():
        adapted: nn.Module = get_peft_model(backbone, config)
    adapted.base_model.model.config.use_cache = False  # type: ignore[union-attr]
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    shorten(adapted)
    return adapted.train(backbone.training)


def on_plain_layers(adapted: nn.Module) -> None:
    """Makes LoRA layers whose quantized base layer was replaced by a plain one those of plain layers, which can merge."""
    from peft.tuners.lora.layer import Linear, LoraLayer

    for layer in adapted.modules():
        if isinstance(layer, LoraLayer) and type(layer.get_base_layer()) is nn.Linear and not isinstance(layer, Linear):
            layer.__class__ = Linear  # type: ignore[assignment]
            layer.is_target_conv_1d_layer = False  # type: ignore[assignment]  # the one attribute peft's quantized layers lack
    shorten(adapted)


def _known_targets(backbone: nn.Module, targets: list[str]) -> list[str]:
    """The targets, each the name of a layer or the end of one; peft passes over a misspelt one if another is found."""
    paths = [path for path, _ in backbone.named_modules()]
    for target in targets:
        if not any(path == target or path.endswith(f".{target}") for path in paths):
            linear = {
                path.rpartition(".")[2]
                for path, layer in backbone.named_modules()
                if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
            }
            raise ValueError(f"{unknown_name('LoRA target', target, linear)} Or all of them: [{ALL_LINEAR!r}].")
    return list(targets)


def load_lora(backbone: nn.Module, folder: Path) -> nn.Module:
    """Puts a saved adapter on the backbone it was trained on, to be used, not trained.

    Its files are read here, not by peft, which would import modules and run patterns that a configuration names.

    Raises:
        FileNotFoundError: if the folder holds no adapter.
        ArtifactError: if its tensors are not those of its configuration, or do not fit the backbone.
    """
    adapter = read_adapter(folder)
    adapter.check_fits(backbone)
    return apply_lora(backbone, adapter)


def apply_lora(backbone: nn.Module, adapter: LoraAdapter) -> nn.Module:
    """Puts an adapter that was read tensor by tensor on a backbone it fits, to be used, not trained.

    Raises:
        ArtifactError: if peft does not change just the layers the adapter is for.
    """
    from peft import LoraConfig, TaskType, get_peft_model, set_peft_model_state_dict

    config = LoraConfig(
        task_type=TaskType.FEATURE_EXTRACTION,
        inference_mode=True,
        r=adapter.config["r"],
        lora_alpha=adapter.config["lora_alpha"],
        lora_dropout=float(adapter.config.get("lora_dropout") or 0.0),
        target_modules=_targets(backbone, adapter),
        fan_in_fan_out=any(type(layer).__name__ == "Conv1D" for layer in backbone.modules()),
        use_rslora=bool(adapter.config.get("use_rslora")),
        use_dora=bool(adapter.config.get("use_dora")),
        bias="none",
    )
    tensors: dict[str, torch.Tensor] = {}
    for path, update in adapter.updates.items():
        root = f"base_model.model.{path}"
        tensors |= {f"{root}.lora_A.weight": update.a_RI, f"{root}.lora_B.weight": update.b_OR}
        if update.magnitude_O is not None:
            tensors[f"{root}.lora_magnitude_vector"] = update.magnitude_O
    with _quiet_peft():
        adapted: nn.Module = get_peft_model(backbone, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.float32)
    needed = _shapes(adapted)
    if needed != {key: tuple(tensor.shape) for key, tensor in tensors.items()}:
        odd = min(needed.keys() ^ tensors.keys(), default="the shape of one")
        raise ArtifactError(f"peft would change other layers than the adapter's {len(adapter.updates)}: {odd}.")
    with _quiet_peft():
        set_peft_model_state_dict(adapted, tensors)
    shorten(adapted)
    return adapted.train(backbone.training)


def _targets(backbone: nn.Module, adapter: LoraAdapter) -> list[str]:
    """The layers the adapter is for, by the names its configuration has for them if those are just these layers."""
    named = adapter.config.get("target_modules")
    if isinstance(named, list) and named and all(isinstance(name, str) for name in named):
        ends = tuple(f".{name}" for name in named)
        if {path for path, _ in backbone.named_modules() if f".{path}".endswith(ends)} == set(adapter.updates):
            return named
    return sorted(adapter.updates)


def _shapes(adapted: nn.Module) -> dict[str, tuple[int, ...]]:
    """The tensors of an adapter, as they are named in its file."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    return {key: tuple(tensor.shape) for key, tensor in state.items()}


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """peft 0.21 asks transformers 5.23 for a name that is on its way out, and warns of what `load_lora` refuses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Found missing adapter keys", category=UserWarning)
        yield


def is_adapted(model: nn.Module) -> bool:
    """Whether peft has wrapped the model."""
    return hasattr(model, "peft_config")


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(trainable, all) parameters; two that are packed into a byte of a 4-bit layer count as two."""
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return trainable, sum(_size(parameter) for parameter in model.parameters())


def _size(parameter: Any) -> int:
    packed = getattr(parameter, "quant_state", None)
    return int(parameter.numel() if packed is None else packed.shape.numel())


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
    """(O, I) of a linear layer, however it keeps its weight: of a quantized one the weight itself is packed."""
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

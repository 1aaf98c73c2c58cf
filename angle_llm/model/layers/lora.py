"""LoRA adapters: add a new adapter to a backbone, read and apply a saved adapter, and merge it into the weights.

    LoRA    W' = W + s B A                          s = alpha / rank; rsLoRA: alpha / sqrt(rank)
    DoRA    W' = m (W + s B A) / |W + s B A|        |·|: norm of the row of an output; m: learned, a number per output

W' is computed in float32 for any dtype of W, and rounded once when it is stored, because half-precision arithmetic makes
a merge inexact. Saved adapters with anything else (trained embeddings, biases, a rank per layer) raise an error, because
a merge would ignore it.

Legend: O outputs, I inputs, R rank.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from angle_llm.io import sha256_of
from angle_llm.model.layers import replace_layers
from angle_llm.model.layers.fused_lora import use_fused_lora
from angle_llm.model.source.checks import ArtifactError, read_json
from angle_llm.settings.parsing import unknown_name
from angle_llm.settings.train import LoraSettings

ALL_LINEAR = "all-linear"
"""LoRA target that means all linear layers."""
CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_ROOT = "base_model.model."
_A, _B, _MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
_SUPPORTED = {
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core",
    "peft_type", "peft_version", "qalora_group_size", "r", "revision", "runtime_config", "target_modules", "task_type",
    "use_dora", "use_rslora",
}  # fmt: skip
"""Keys of `adapter_config.json` that this module reads, or that do not change the adapted weights."""
_LARGEST_ALPHA = 1e6
"""Upper limit of the alpha of a saved adapter: far above real values, far below the range of float32."""


def is_adapted(model: nn.Module) -> bool:
    """Return whether a model has an adapter, that is, whether it is wrapped by a class of peft."""
    return hasattr(model, "get_base_model")  # older versions of peft leave `peft_config` on the unwrapped model


def without_adapter(backbone: nn.Module) -> nn.Module:
    """Return the backbone inside the wrapper of peft, or the argument if it has no adapter.

    The layers of the backbone still contain the adapter.
    """
    inner: nn.Module = backbone.get_base_model() if is_adapted(backbone) else backbone  # type: ignore[operator]
    return inner


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer is a linear layer that stores its weight as (inputs, outputs): `Conv1D` of GPT-2."""
    return type(layer).__name__ == "Conv1D"


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of trainable parameters and the number of all parameters.

    4-bit weights are counted individually, although two weights are packed into a byte.
    """
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    packed: list[Any] = [getattr(parameter, "quant_state", None) or parameter for parameter in model.parameters()]
    return trainable, sum(math.prod(weight.shape) for weight in packed)


def add_lora(backbone: nn.Module, settings: LoraSettings) -> nn.Module:
    """Return a backbone with a new LoRA adapter; only the adapter is trainable, in float32 for any dtype of the base.

    Raises:
        ValueError: for a target that is no layer, or that peft refuses (`out_proj` of Mamba), or if there are experts.
    """
    targets = list(settings.targets)
    target_modules = ALL_LINEAR if targets == [ALL_LINEAR] else _existing(backbone, targets)
    try:
        adapted: Any = _wrapped(
            backbone,
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=target_modules,
        )
    except ValueError as error:
        for path, layer in list(backbone.named_modules()):
            if hasattr(layer, "base_layer"):  # peft replaces layers one by one
                backbone.set_submodule(path, layer.base_layer)
        if "is incompatible" not in str(error):  # an error of another setting, such as the rank
            raise
        names = sorted(name for name in _linear_names(backbone) if f"'{name}'" not in str(error))
        raise ValueError(
            f"LoRA targets {' '.join(targets)}: peft does not adapt this {type(backbone).__name__}: {error} Choose from "
            f"--lora.targets {' '.join(names)}."
        ) from error
    if experts := adapted.peft_config["default"].target_parameters:
        raise ValueError(
            f"LoRA targets: peft would also adapt the expert weights {', '.join(sorted(experts))}, which is not supported. "
            "Name other layers, such as --lora.targets q_proj k_proj v_proj o_proj."
        )
    without_adapter(adapted).config.use_cache = False  # type: ignore[union-attr]
    replace_layers(adapted)
    model: nn.Module = adapted.train(backbone.training)
    return model


def _existing(backbone: nn.Module, targets: list[str]) -> list[str]:
    """Check that every LoRA target is the name of linear layers, or the end of their paths; return the targets.

    The check is needed because peft ignores a misspelt target if another target is correct.

    Raises:
        ValueError: for a target without a layer, or of layers that are not linear, such as embeddings.
    """
    paths = dict(backbone.named_modules())
    for target in targets:
        matched = [layer for path, layer in paths.items() if path == target or path.endswith(f".{target}")]
        if not matched or not all(isinstance(layer, nn.Linear) or is_transposed(layer) for layer in matched):
            known = unknown_name("LoRA target", target, _linear_names(backbone))
            raise ValueError(f"{known} Or all of them: [{ALL_LINEAR!r}].")
    return targets


def _linear_names(backbone: nn.Module) -> set[str]:
    """Return the names of the linear layers of a backbone, without the path."""
    return {
        path.rpartition(".")[2]
        for path, layer in backbone.named_modules()
        if isinstance(layer, nn.Linear) or is_transposed(layer)
    }


def _wrapped(backbone: nn.Module, **options: Any) -> nn.Module:
    """Return a backbone with a new LoRA adapter in float32; `options` are arguments of `peft.LoraConfig`."""
    from peft import LoraConfig, TaskType, get_peft_model

    transposed = any(is_transposed(layer) for layer in backbone.modules())
    config = LoraConfig(task_type=TaskType.FEATURE_EXTRACTION, fan_in_fan_out=transposed, bias="none", **options)
    with _quiet_peft():
        adapted: nn.Module = get_peft_model(backbone, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.float32)
    return adapted


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """Suppress two warnings of peft inside this context: a deprecated name in transformers 5.23, and missing adapter keys.

    `apply_lora` checks the keys itself.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Found missing adapter keys", category=UserWarning)
        yield


@dataclass(frozen=True)
class LoraUpdate:
    """The LoRA or DoRA update of the weight W of a linear layer: W' = W + scaling · B A, for LoRA."""

    a_RI: Tensor
    """Matrix A (R, I): rank, inputs."""
    b_OR: Tensor
    """Matrix B (O, R): outputs, rank."""
    scaling: float
    """alpha / rank; alpha / sqrt(rank) for rsLoRA."""
    magnitude_O: Tensor | None
    """Learned norm of every row of W' in DoRA, (O,); None for LoRA."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (outputs, inputs) of the weight that the update applies to."""
        return self.b_OR.shape[0], self.a_RI.shape[1]

    def merged(self, weight: Tensor, *, transposed: bool = False) -> Tensor:
        """Return the weight with the LoRA or DoRA update merged, as a new float32 tensor in the shape of `weight`.

        `weight` has the shape (outputs, inputs), or (inputs, outputs) if `transposed`, and any floating dtype.
        """
        merged = weight.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        weight_OI = merged.T if transposed else merged
        weight_OI.addmm_(self.b_OR, self.a_RI, alpha=self.scaling)
        if self.magnitude_O is not None:
            length_O = torch.linalg.vector_norm(weight_OI, dim=1)
            weight_OI.mul_((self.magnitude_O / length_O)[:, None])
        return merged

    def exactly(self, weight: Tensor, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
        """Return the updated weight in float64, and an upper bound on the float32 rounding error of `merged`.

        Both have the shape of `weight`, which is as in `merged`. The bound holds for any order of additions. For rank R, a
        term of the sum is rounded at most R + 2 times: the product, R - 1 sums, the scaling, the sum with W. Every
        rounding has a relative error of at most u = 2^-24. The norm of DoRA is a sum of I terms (inputs), whose errors
        partly cancel: about sqrt(I) u.
        """
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
    """The contents of a saved adapter: an update for every adapted layer, and the configuration."""

    updates: dict[str, LoraUpdate]
    """Path of a layer in the backbone → update of its weight."""
    sha256: str
    """SHA-256 of the file `adapter_model.safetensors`."""
    config: dict[str, Any]
    """Contents of `adapter_config.json`."""

    def check_fits(self, backbone: nn.Module, name: str = "the adapter", base: str = "the base") -> None:
        """Check that a backbone has a linear layer of the right shape for every update of the adapter.

        `name` and `base` are the names of the adapter and the backbone in the error message.

        Raises:
            ArtifactError: if a layer is missing or has another shape.
        """
        layers = dict(backbone.named_modules())
        for path, update in self.updates.items():
            layer = layers.get(path)
            if layer is None:
                raise ArtifactError(
                    f"{name} changes {path}, but {base} has no such layer. Use the base of the adapter."
                )
            if not (isinstance(layer, nn.Linear) or is_transposed(layer)):
                raise ArtifactError(
                    f"{name} changes {path}, which in {base} is a {type(layer).__name__}, not a linear layer."
                )
            held: Any = layer  # the weight of a 4-bit layer is packed, so its shape is not (O, I)
            shape = tuple(held.weight.shape)[::-1] if is_transposed(layer) else (held.out_features, held.in_features)
            if shape != update.shape:
                raise ArtifactError(
                    f"{name} changes {path} by {update.shape}, but in {base} its shape is {shape}. Use the base of the adapter."
                )


def apply_lora(backbone: nn.Module, adapter: LoraAdapter) -> nn.Module:
    """Return a backbone with a saved adapter added, for inference; `saved_lora.make_trainable` prepares it for training.

    `read_adapter` reads the files, because peft would import modules that the configuration names.

    Raises:
        ArtifactError: if peft does not change exactly the layers of the adapter.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    config = adapter.config
    tensors: dict[str, Tensor] = {}
    for path, update in adapter.updates.items():
        tensors |= {_ROOT + path + _A: update.a_RI, _ROOT + path + _B: update.b_OR}
        if update.magnitude_O is not None:
            tensors[_ROOT + path + _MAGNITUDE] = update.magnitude_O
    adapted = _wrapped(
        backbone,
        inference_mode=True,
        r=config["r"],
        lora_alpha=config["lora_alpha"],
        lora_dropout=float(config.get("lora_dropout") or 0.0),
        target_modules=_targets(backbone, adapter),
        use_rslora=bool(config.get("use_rslora")),
        use_dora=bool(config.get("use_dora")),
    )
    needed = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    if {key: tensor.shape for key, tensor in needed.items()} != {key: tensor.shape for key, tensor in tensors.items()}:
        odd = min(needed.keys() ^ tensors.keys(), default="a tensor with another shape")
        raise ArtifactError(
            f"the adapter has {len(adapter.updates)} layers, but peft would change other layers or shapes: {odd}."
        )
    with _quiet_peft():
        set_peft_model_state_dict(adapted, tensors)
    use_fused_lora(adapted)
    return adapted.train(backbone.training)


def _targets(backbone: nn.Module, adapter: LoraAdapter) -> list[str]:
    """Return the LoRA targets for peft that select exactly the layers of a saved adapter.

    These are the names in the configuration of the adapter, or full paths if the names would select other layers.
    """
    names = adapter.config.get("target_modules")
    if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
        ends = tuple(f".{name}" for name in names)
        if {path for path, _ in backbone.named_modules() if f".{path}".endswith(ends)} == set(adapter.updates):
            return names
    return sorted(adapter.updates)


def read_adapter(folder: Path) -> LoraAdapter:
    """Read and check the LoRA adapter in a folder: `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        FileNotFoundError: if the folder contains no adapter.
        ArtifactError: for damaged files, incomplete updates, or anything but LoRA, rsLoRA and DoRA on linear layers.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}, so it contains no adapter.")
    file = folder / WEIGHTS_NAME
    config = read_json(folder / CONFIG_NAME)
    try:
        tensors = {key: tensor.float() for key, tensor in load_file(file).items()}
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise ArtifactError(f"the adapter {file} cannot be read: {error} Save it again.") from error
    odd = next((key for key, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None)
    if odd is not None:
        raise ArtifactError(f"{file}: {odd} has values that are not finite. Save the adapter again.")
    scaling = _scaling(config, folder / CONFIG_NAME)
    rank = config["r"]
    paths = [key.removeprefix(_ROOT).removesuffix(_A) for key in tensors if key.startswith(_ROOT) and key.endswith(_A)]
    updates: dict[str, LoraUpdate] = {}
    for path in paths:
        a_RI, b_OR = tensors.pop(_ROOT + path + _A), tensors.pop(_ROOT + path + _B, None)
        magnitude_O = tensors.pop(_ROOT + path + _MAGNITUDE, None)
        if b_OR is None or (magnitude_O is None) == bool(config.get("use_dora")):
            raise ArtifactError(f"{file}: the update of {path} is incomplete. Save the adapter again.")
        fits = a_RI.ndim == 2 and b_OR.ndim == 2 and a_RI.shape[0] == b_OR.shape[1] == rank
        if not fits or (magnitude_O is not None and magnitude_O.shape != b_OR.shape[:1]):
            raise ArtifactError(
                f"{file}: the update of {path}: expected A ({rank}, I) and B (O, {rank}), got {tuple(a_RI.shape)} and "
                f"{tuple(b_OR.shape)}. Save the adapter again."
            )
        updates[path] = LoraUpdate(a_RI, b_OR, scaling, magnitude_O)
    if tensors or not updates:
        odd = min(tensors, default=None)
        problem = "contains no update" if odd is None else f"contains {odd}, which is no update of a linear layer"
        raise ArtifactError(f"{file} {problem}. Save the adapter again.")
    return LoraAdapter(updates, sha256_of(file), config)


def _scaling(config: dict[str, Any], path: Path) -> float:
    """Return the scaling of LoRA updates for an adapter configuration: alpha / rank, or alpha / sqrt(rank) for rsLoRA.

    `path` is the file of the configuration, for messages.

    Raises:
        ArtifactError: if the configuration is invalid, or describes anything but plain LoRA, rsLoRA or DoRA.
    """
    rank, alpha, dropout = config.get("r"), config.get("lora_alpha"), config.get("lora_dropout") or 0.0
    initial = config.get("init_lora_weights", True)
    expected = {
        "init_lora_weights": (
            isinstance(initial, bool) or initial == "gaussian",
            "an initialization that keeps the base",
        ),
        "r": (type(rank) is int and rank > 0, "a positive integer"),
        "lora_alpha": (type(alpha) in (int, float) and abs(alpha) < _LARGEST_ALPHA, "a number"),  # type: ignore[arg-type]
        "lora_dropout": (type(dropout) in (int, float) and 0 <= dropout <= 1, "a number in 0 .. 1"),
    }
    if config.get("peft_type") != "LORA":
        raise ArtifactError(f"{path}: `peft_type`: expected LORA, got {config.get('peft_type')!r}.")
    for key, value in config.items():
        if key not in _SUPPORTED and value not in (None, False, {}, [], "none"):
            raise ArtifactError(f"{path}: `{key}` = {value!r} is not supported.")
    for key, (holds, what) in expected.items():
        if not holds:
            raise ArtifactError(f"{path}: `{key}`: expected {what}, got {config.get(key)!r}.")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)  # type: ignore[arg-type,operator]

"""LoRA: add it to a backbone, load it, and compute what it adds to the weights.

    LoRA    W' = W + s B A              s = alpha / rank, for rsLoRA alpha / sqrt(rank)
    DoRA    W' = m (W + s B A) / |W + s B A|        the norm of each output's row; m learned, one per output

W' is computed in float32 whatever the dtype of W, and rounded once, when it is stored: arithmetic in a narrower dtype
spoils a merge. A saved adapter with other parts (trained embeddings, biases, ranks per layer) is refused, since a merge
without them would be another model.

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

from angle_llm.config import LoraSettings
from angle_llm.io import sha256_of
from angle_llm.model.checks import ArtifactError, read_json
from angle_llm.model.kept_activations import keep_fewer_activations
from angle_llm.model.lora_product import use_short_lora
from angle_llm.settings_io import unknown_name

ALL_LINEAR = "all-linear"
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
"""Keys of a peft configuration that are used here, or that do not change W'."""
_LARGEST_ALPHA = 1e6
"""Far above any real value, far below the range of float32."""


def is_adapted(model: nn.Module) -> bool:
    """Return whether peft has wrapped the model."""
    return hasattr(model, "get_base_model")  # older versions of peft leave `peft_config` on the model inside


def without_adapter(backbone: nn.Module) -> nn.Module:
    """Return the backbone inside the wrapper of peft, with adapted layers; or the backbone itself."""
    inner: nn.Module = backbone.get_base_model() if is_adapted(backbone) else backbone  # type: ignore[operator]
    return inner


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a linear layer stores its weight as (I, O), as in GPT-2."""
    return type(layer).__name__ == "Conv1D"


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return (trainable, all) parameters; two that are packed into a byte of a 4-bit layer count as two."""
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    packed: list[Any] = [getattr(parameter, "quant_state", None) or parameter for parameter in model.parameters()]
    return trainable, sum(math.prod(each.shape) for each in packed)


def add_lora(backbone: nn.Module, settings: LoraSettings) -> nn.Module:
    """Wrap the backbone with a new adapter; only the adapter trains, in float32 whatever the dtype of the base.

    Raises:
        ValueError: if no layer of the backbone has the name of a target.
    """
    targets = list(settings.targets)
    adapted = _wrapped(
        backbone,
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else _existing(backbone, targets),
        use_rslora=settings.rslora,
        use_dora=settings.dora,
    )
    without_adapter(adapted).config.use_cache = False  # type: ignore[union-attr]
    use_short_lora(adapted)
    keep_fewer_activations(adapted)
    return adapted.train(backbone.training)


def _existing(backbone: nn.Module, targets: list[str]) -> list[str]:
    """Return the targets, each of which is the name of a layer or the end of one;
    peft ignores a misspelt one among others."""
    paths = dict(backbone.named_modules())
    for target in targets:
        if not any(path == target or path.endswith(f".{target}") for path in paths):
            linear = {
                path.rpartition(".")[2]
                for path, layer in paths.items()
                if isinstance(layer, nn.Linear) or is_transposed(layer)
            }
            raise ValueError(f"{unknown_name('LoRA target', target, linear)} Or all of them: [{ALL_LINEAR!r}].")
    return targets


def _wrapped(backbone: nn.Module, **options: Any) -> nn.Module:
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
    """Suppress warnings of a deprecated name in transformers 5.23, and of missing keys, which `apply_lora` refuses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Found missing adapter keys", category=UserWarning)
        yield


@dataclass(frozen=True)
class LoraUpdate:
    """The update of one linear layer."""

    a_RI: Tensor
    b_OR: Tensor
    scaling: float
    magnitude_O: Tensor | None
    """Of DoRA; None for LoRA."""

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)"""
        return self.b_OR.shape[0], self.a_RI.shape[1]

    def merged(self, weight: Tensor, *, transposed: bool = False) -> Tensor:
        """Return W' as a new float32 tensor; `weight` is (O, I) of any floating dtype, (I, O) if `transposed`."""
        own = weight.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        weight_OI = own.T if transposed else own
        weight_OI.addmm_(self.b_OR, self.a_RI, alpha=self.scaling)
        if self.magnitude_O is not None:
            length_O = torch.linalg.vector_norm(weight_OI, dim=1)
            weight_OI.mul_((self.magnitude_O / length_O)[:, None])
        return own

    def exactly(self, weight: Tensor, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
        """Return W' in float64, and how far float32 arithmetic in any order can be from it; both shaped as `weight`.

        Each term has at most R + 2 roundings (its product, R - 1 sums, the scaling, the sum with W) of u = 2^-24 of its
        size. The norm of DoRA has I terms, whose errors partly cancel: about sqrt(I) u."""
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
    """A saved adapter."""

    updates: dict[str, LoraUpdate]
    """By the path of their layer."""
    sha256: str
    """Of the file with its tensors."""
    config: dict[str, Any]
    """The configuration of peft."""

    def check_fits(self, backbone: nn.Module, name: str = "the adapter", base: str = "the base") -> None:
        """Raise `ArtifactError` unless every update has its linear layer in the backbone, of its shape."""
        layers = dict(backbone.named_modules())
        for path, update in self.updates.items():
            layer = layers.get(path)
            if layer is None:
                raise ArtifactError(f"{name} changes {path}, but {base} has no such layer: it is another model.")
            if not (isinstance(layer, nn.Linear) or is_transposed(layer)):
                raise ArtifactError(f"{name} changes {path}, which in {base} is a {type(layer).__name__}, not linear.")
            held: Any = layer  # not its weight: that of a 4-bit layer is packed
            shape = tuple(held.weight.shape)[::-1] if is_transposed(layer) else (held.out_features, held.in_features)
            if shape != update.shape:
                raise ArtifactError(
                    f"{name} changes {path} by {update.shape}, outputs by inputs, but in {base} it is {shape}: it is another "
                    "model."
                )


def apply_lora(backbone: nn.Module, adapter: LoraAdapter) -> nn.Module:
    """Wrap the backbone with a saved adapter that fits it, for use, not for training.

    The adapter was read here and not by peft, which would import modules and run patterns that a configuration names.

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
        odd = min(needed.keys() ^ tensors.keys(), default="the shape of one")
        raise ArtifactError(f"peft would change other layers than the adapter's {len(adapter.updates)}: {odd}.")
    with _quiet_peft():
        set_peft_model_state_dict(adapted, tensors)
    use_short_lora(adapted)
    return adapted.train(backbone.training)


def _targets(backbone: nn.Module, adapter: LoraAdapter) -> list[str]:
    """Return the layers of the adapter: by the names in its configuration if these select exactly them, else by their
    paths."""
    names = adapter.config.get("target_modules")
    if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
        ends = tuple(f".{name}" for name in names)
        if {path for path, _ in backbone.named_modules() if f".{path}".endswith(ends)} == set(adapter.updates):
            return names
    return sorted(adapter.updates)


def read_adapter(folder: Path) -> LoraAdapter:
    """Read all of the adapter in a saved folder.

    Raises:
        FileNotFoundError: if the folder has no adapter.
        ArtifactError: for damaged files, incomplete updates, or parts that are not supported.
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
        odd = min(tensors, default="nothing")
        raise ArtifactError(f"{file} contains {odd}, which is no update of a linear layer. Save the adapter again.")
    return LoraAdapter(updates, sha256_of(file), config)


def _scaling(config: dict[str, Any], path: Path) -> float:
    """Return s; refuse a configuration that needs more than the formulas above."""
    rank, alpha, dropout = config.get("r"), config.get("lora_alpha"), config.get("lora_dropout") or 0.0
    initial = config.get("init_lora_weights", True)
    expected = {
        "init_lora_weights": (isinstance(initial, bool) or initial == "gaussian", "one that keeps the base"),
        "r": (type(rank) is int and rank > 0, "a rank"),
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

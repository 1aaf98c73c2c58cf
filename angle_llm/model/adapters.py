"""LoRA through peft: added to a backbone, loaded onto it, described."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from angle_llm.config import LoraSettings
from angle_llm.errors import unknown
from angle_llm.model.artifact import ArtifactError
from angle_llm.model.lora_linear import lora_linear
from angle_llm.model.merging import LoraAdapter, read_adapter

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
    _shorten(adapted)
    return adapted.train(backbone.training)


def _shorten(adapted: nn.Module) -> None:
    """Lets plain LoRA layers compute by `lora_linear`; all else about them stays peft's."""
    from peft.tuners.lora.layer import Linear

    for layer in adapted.modules():
        if type(layer) is Linear:
            layer.__class__ = _short_linear()  # type: ignore[assignment]


def on_plain_layers(adapted: nn.Module) -> None:
    """Makes LoRA layers whose quantised base layer was replaced by a plain one those of plain layers, which can merge."""
    from peft.tuners.lora.layer import Linear, LoraLayer

    for layer in adapted.modules():
        if isinstance(layer, LoraLayer) and type(layer.get_base_layer()) is nn.Linear and not isinstance(layer, Linear):
            layer.__class__ = Linear  # type: ignore[assignment]
            layer.is_target_conv_1d_layer = False  # type: ignore[assignment]  # the one attribute peft's quantised layers lack
    _shorten(adapted)


def _has_own_ways(layer: nn.Module) -> bool:
    """Whether somebody has hooked into its call or replaced it."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in vars(layer) or any(getattr(layer, name) for name in hooks)


def _autocasts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


@cache
def _short_linear() -> type[nn.Module]:
    from peft.tuners.lora.layer import Linear

    class ShortLinear(Linear):
        """peft's layer, by the shorter way where nothing but plain LoRA is asked for."""

        def forward(self, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
            base: Any = self.base_layer
            active = self.active_adapters
            plain = (
                not (args or named or self.disable_adapters or self.merged)
                and len(active) == 1
                and active[0] in self.lora_A
                and active[0] not in self.lora_variant
                and self.lora_B[active[0]].bias is None
                and type(base) is nn.Linear
                and not _has_own_ways(base)
                and not base.weight.requires_grad
                and not hasattr(base.weight, "ds_id")  # ZeRO-3 gathers a layer's weights when the layer is called
                and x.dtype == base.weight.dtype
                and not _autocasts(x.device.type)
                and not (self.training and isinstance(self.lora_dropout[active[0]], nn.Dropout))
            )
            if not plain:
                result: torch.Tensor = super().forward(x, *args, **named)
                return result
            lora_a: Any = self.lora_A[active[0]]
            lora_b: Any = self.lora_B[active[0]]
            return lora_linear(x, base.weight, base.bias, lora_a.weight, lora_b.weight, self.scaling[active[0]])

    return ShortLinear


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
            raise ValueError(f"{unknown('LoRA target', target, linear)} Or all of them: [{ALL_LINEAR!r}].")
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
    _shorten(adapted)
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

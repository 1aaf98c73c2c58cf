"""LoRA adapters: add a new adapter to a backbone, and merge an update into the weights.

    LoRA    W' = W + s B A                          s = alpha / rank; rsLoRA: alpha / sqrt(rank)
    DoRA    W' = m (W + s B A) / |W + s B A|        |·|: norm of the row of an output; m: learned, a number per output

W' is computed in float32 for any dtype of W, and rounded once when it is stored, because half-precision arithmetic makes
a merge inexact.

Legend: O outputs, I inputs, R rank.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from angle_llm.model.layers.replacements import replace_layers
from angle_llm.settings.parsing import unknown_name
from angle_llm.settings.train import LoraSettings

ALL_LINEAR = "all-linear"
"""LoRA target that means all linear layers."""

_EMBEDDING_GEMMA_2 = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What `ALL_LINEAR` means for EmbeddingGemma 2: its projection of embeddings and the inputs of its layers stay frozen."""


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
    """Return a backbone with a new LoRA adapter; only the adapter is trainable, in float32 also for a half-precision base.

    Raises:
        ValueError: for a target that is no layer, or of layers that cannot be adapted (`out_proj` of Mamba), or if there are
            experts.
    """
    adapted: Any = peft_model(
        backbone,
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=_target_modules(backbone, list(settings.targets)),
    )
    # Expert weights are not supported.
    if experts := adapted.peft_config["default"].target_parameters:
        raise ValueError(
            f"LoRA targets: peft would also adapt the expert weights {', '.join(sorted(experts))}, which is not supported. "
            "Name other layers, such as --lora.targets q_proj k_proj v_proj o_proj."
        )
    make_trainable(adapted)
    model: nn.Module = adapted.train(backbone.training)
    return model


def make_trainable(adapted: nn.Module) -> None:
    """Prepare a backbone with an adapter for training, in place: only the adapter weights become trainable."""
    config: Any = adapted.peft_config
    for adapter_config in config.values():
        adapter_config.inference_mode = False
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_" in name)
    without_adapter(adapted).config.use_cache = False  # type: ignore[union-attr]
    replace_layers(adapted)


def _target_modules(backbone: nn.Module, targets: list[str]) -> list[str] | str:
    """Return the argument `target_modules` of peft for LoRA targets: names of layers, ends of their paths, or `ALL_LINEAR`.

    The check is needed because peft ignores a misspelt target if another target is correct.

    Raises:
        ValueError: for a target without a layer, or of layers that are not linear, such as embeddings, or that are read
            directly; also for a backbone whose layers share weights.
    """
    linear = {
        path: layer for path, layer in backbone.named_modules() if isinstance(layer, nn.Linear) or is_transposed(layer)
    }
    if len({id(layer.weight) for layer in linear.values()}) < len(linear):
        raise ValueError(
            f"LoRA: layers of {type(backbone).__name__} share weights, so different adapters on them could not be merged. Train "
            "all weights (--lora.rank 0), or use another model."
        )
    adaptable = [path for path in linear if not is_read_directly(backbone, path)]
    if targets == [ALL_LINEAR] and backbone.config.model_type == "embedding_gemma2_text":  # type: ignore[union-attr]
        return list(_EMBEDDING_GEMMA_2)
    if targets == [ALL_LINEAR]:
        return ALL_LINEAR if len(adaptable) == len(linear) else adaptable
    names = {path.rpartition(".")[2] for path in adaptable}
    paths = [path for path, _ in backbone.named_modules()]
    for target in targets:
        matched = [path for path in paths if path == target or path.endswith(f".{target}")]
        if not matched or any(path not in linear for path in matched):
            message = unknown_name("LoRA target", target, names)
            raise ValueError(f"{message} Or all of them: [{ALL_LINEAR!r}].")
        if not set(matched) <= set(adaptable):
            raise ValueError(
                f"LoRA target {target!r}: the model reads its weight directly, so an adapter on it can have no effect. Choose "
                f"from --lora.targets {' '.join(sorted(names))}, or omit the flag, which adapts all of these."
            )
    return targets


def is_read_directly(backbone: nn.Module, path: str) -> bool:
    """Return whether a backbone reads the weight of a linear layer in place of calling the layer.

    These are the layers of a Mamba mixer of `transformers` after `in_proj`, and in training the coefficients of Gemma-3n. The
    weight of `dt_proj` is read on every device; kernels for training on a GPU read the weights of `x_proj` and `out_proj`
    too. An adapter would be skipped there.
    """
    parent, _, name = path.rpartition(".")
    if name in ("prediction_coefs", "correction_coefs"):  # Gemma-3n
        return True
    return name != "in_proj" and {"A_log", "D"} <= backbone.get_submodule(parent)._parameters.keys()


def peft_model(backbone: nn.Module, **options: Any) -> nn.Module:
    """Return a backbone with a new LoRA adapter, in float32 also for a half-precision base.

    `options` are arguments of `peft.LoraConfig`.
    """
    from peft import LoraConfig, PeftModel, TaskType

    transposed = any(is_transposed(layer) for layer in backbone.modules())
    config = LoraConfig(task_type=TaskType.FEATURE_EXTRACTION, fan_in_fan_out=transposed, bias="none", **options)
    with warnings.catch_warnings():  # peft reads a name that is deprecated in transformers 5.23
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        return PeftModel(backbone, config)  # the class of the task passes arguments that CLIP does not take


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
        bound_OI = roundings * 2.0**-24 * size_OI
        return (exact_OI.T, bound_OI.T) if transposed else (exact_OI, bound_OI)

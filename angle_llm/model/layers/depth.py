"""Read states between the layers of a backbone, and truncate a backbone to its first layers.

The *finished* state after m layers is the output of a backbone that has only the first m layers. It is the output of
layer m, passed through the modules after the last layer: the final norm of LLaMA, no module in BERT. So one forward pass
gives the finished states after any number of layers.

Legend: B texts, T tokens, D dimensions, R pooled positions, L layers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from angle_llm.device import evaluating, is_out_of_memory, relative_difference
from angle_llm.model.layers.fingerprint import ORIGINAL, weights_fingerprint
from angle_llm.model.layers.lora import is_adapted, without_adapter
from angle_llm.model.layers.quantization import without_outliers

_AFTER = ("norm", "final_norm", "ln_f", "final_layer_norm", "final_layernorm", "project_out", "embedding_projection")
"""Attribute names of modules that `transformers` models apply after the last layer, in the order of execution."""


@dataclass(frozen=True)
class LayerStack:
    """The list of layers of a backbone, and the modules after the last layer."""

    owner: nn.Module
    """Module that has the list of layers as an attribute."""
    name: str
    """Attribute name of the list of layers in `owner`."""
    after: tuple[nn.Module, ...]
    """Modules that are applied after the last layer, such as the final norm."""

    @classmethod
    def of(cls, backbone: nn.Module) -> LayerStack:
        """Find the layers of a backbone, and the modules after the last layer.

        The layers are the only `nn.ModuleList`, outside of other lists, with as many modules as the config has layers.

        Raises:
            ValueError: if the backbone has no such list, or more than one.
        """
        backbone = without_adapter(backbone)
        count: int = backbone.config.get_text_config().num_hidden_layers  # type: ignore[operator,union-attr]
        paths = [
            path
            for path, module in backbone.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == count and not re.search(r"\.\d", path)
        ]
        if len(paths) != 1:
            raise ValueError(
                f"layers: {type(backbone).__name__} has {len(paths)} lists of {count} modules, so states between its layers "
                "are not available. Use all layers."
            )
        owner_path, _, name = paths[0].rpartition(".")
        owner = backbone.get_submodule(owner_path)
        parts = [getattr(owner, part, None) for part in _AFTER]
        return cls(owner, name, tuple(part for part in parts if isinstance(part, nn.Module)))

    @property
    def layers(self) -> nn.ModuleList:
        """All layers of the backbone, in order."""
        layers: nn.ModuleList = getattr(self.owner, self.name)
        return layers

    def finish(self, states: Tensor) -> Tensor:
        """Apply the modules after the last layer, such as the final norm, to the output (…, D) of any layer."""
        for module in self.after:
            states = module(states)
        return states

    @contextmanager
    def states_after(self, numbers: Sequence[int], pick: Callable[[Tensor], Tensor]) -> Iterator[dict[int, Tensor]]:
        """Record values computed from the outputs of the layers `numbers` (from 1), in forward passes inside this context.

        Yields a dictionary from layer number to `pick(output)`. The output (B, T, D) of a layer is before the final norm
        (see `finish`).
        """
        states: dict[int, Tensor] = {}

        def keep(number: int, _: nn.Module, __: Any, output: Any) -> None:
            states[number] = pick(output[0] if isinstance(output, tuple) else output)

        with ExitStack() as hooks:
            for number in numbers:
                hooks.enter_context(self.layers[number - 1].register_forward_hook(partial(keep, number)))
            yield states

    def check(self, backbone: nn.Module) -> None:
        """Check that the output of the backbone is the output of its last layer, passed through the modules `after`.

        Raises:
            ValueError: if the outputs differ, because the backbone computes unknown steps after its last layer.
        """
        if not _are_equal(*self.probe(backbone, len(self.layers))):
            raise ValueError(
                f"layers: {type(without_adapter(backbone)).__name__} has unknown steps after its last layer, so states after "
                "fewer layers are not available. Use all layers."
            )

    def probe(self, backbone: nn.Module, number: int) -> tuple[Tensor, Tensor]:
        """Return states after the first `number` layers and after all layers, (2, 4, D), for two fixed token sequences.

        The modules after the last layer, such as the final norm, are applied to both.
        """
        with (
            evaluating(backbone) as device,
            without_outliers(backbone),
            self.states_after([number], self.finish) as states_of_layer,
        ):
            ids_BT = torch.tensor([[7, 5, 3, 1], [4, 2, 6, 8]], device=device)
            states: Tensor = backbone(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)).last_hidden_state
        return states_of_layer[number], states


def cut_layers(backbone: nn.Module, keep: int) -> None:
    """Remove all layers but the first `keep` from a backbone, with or without adapter, and from its config, in place.

    Raises:
        ValueError: if the backbone has fewer layers.
    """
    stack = LayerStack.of(backbone)
    total = len(stack.layers)
    if not 1 <= keep <= total:
        raise ValueError(f"layers: expected 1 .. {total}, the layers of the backbone; got {keep}.")
    config: Any = without_adapter(backbone).config.get_text_config()  # type: ignore[operator,union-attr]
    ends_in_full_attention = config.model_type in ("embedding_gemma2_text", "gemma4_text", "gemma4_unified_text")
    if ends_in_full_attention and config.layer_types[keep - 1] != "full_attention":
        allowed = [number for number, name in enumerate(config.layer_types, 1) if name == "full_attention"]
        raise ValueError(
            f"layers: the last layer of this model must have full attention; expected one of {allowed}, got {keep}."
        )
    values = config.to_dict()
    setattr(stack.owner, stack.name, stack.layers[:keep])
    config.num_hidden_layers = keep
    for name, value in values.items():  # also lists with an entry per layer
        if "layer" in name and isinstance(value, list) and len(value) == total:
            setattr(config, name, value[:keep])
    if config.model_type == "gpt_neo":  # `attention_layers` is read from this
        config.attention_types = [[[name], 1] for name in config.attention_layers]
    if per_layer := values.get("per_layer_config"):
        config.per_layer_config = {number: value for number, value in per_layer.items() if int(number) < keep}
    if config.model_type == "embedding_gemma2_text":  # the inputs of all layers are one projection
        ple: Any = stack.owner.ple
        ple.num_hidden_layers = keep
        for name, linear in ple.per_layer_model_projection.named_modules():  # with an adapter: also its B
            if isinstance(linear, nn.Linear) and "lora_A" not in name:
                linear.out_features = keep * ple.hidden_size_per_layer_input
                kept = linear.weight[: linear.out_features].detach()
                linear.weight = nn.Parameter(kept, requires_grad=linear.weight.requires_grad)


def first_layers(backbone: nn.Module, keep: int) -> nn.Module:
    """Return a backbone with only the first `keep` layers, which shares its weights with the given backbone.

    `weights_fingerprint` of both is the same, because a saved adapter records the fingerprint of the whole base.

    Raises:
        ValueError: if the backbone has fewer layers, or computes other states without the last layers.
    """
    stack = LayerStack.of(backbone)
    shared = {id(tensor): tensor for tensor in (*backbone.parameters(), *backbone.buffers())}
    short = copy.deepcopy(backbone, shared)  # with this memo, tensors are not copied
    cut_layers(short, keep)
    if not is_adapted(backbone):
        setattr(short, ORIGINAL, weights_fingerprint(backbone))
    states, _ = stack.probe(backbone, keep)
    try:
        _, short_states = LayerStack.of(short).probe(short, keep)
        equal = _are_equal(states, short_states)
    except RuntimeError as error:  # Gemma-4 has a projection for all layers, and so has a quantized EmbeddingGemma 2
        if is_out_of_memory(error):
            raise
        equal = False
    if not equal:
        raise ValueError(
            f"layers: {type(without_adapter(backbone)).__name__} gives other states with {keep} layers only, so it cannot be "
            "truncated. Use all layers."
        )
    return short


def _are_equal(one_BTD: Tensor, other_BTD: Tensor) -> bool:
    """Return whether two tensors of states are equal up to rounding: 1 % in half precision, else 0.001 %."""
    return relative_difference(one_BTD, other_BTD) < (1e-2 if other_BTD.dtype.itemsize == 2 else 1e-5)

"""The layers of a backbone: states between them, and a backbone with only the first ones.

A state *after m layers* is that of a backbone of the first m layers: the output of layer m after what follows the last
layer (the final norm of a LLaMA, nothing in a BERT). So one forward pass of all layers contains the states of every
shorter one.

Legend: B texts, T tokens, D dimensions, R pooled positions, L layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from angle_llm.model.backbone import weights_fingerprint
from angle_llm.model.checks import evaluating, relative_difference
from angle_llm.model.lora import is_adapted, without_adapter
from angle_llm.model.quantization import ORIGINAL, without_outliers

_AFTER = ("norm", "final_norm", "ln_f", "final_layer_norm", "final_layernorm", "project_out")
"""Names of the modules after the last layer, beside the list of layers, in the order of execution."""


@dataclass(frozen=True)
class LayerStack:
    """The list of layers of a backbone, and the modules after the last one."""

    owner: nn.Module
    name: str
    """The list of layers is this attribute of `owner`."""
    after: tuple[nn.Module, ...]

    @classmethod
    def of(cls, backbone: nn.Module) -> LayerStack:
        """Find the only list of as many modules as the config has layers; `check` compares its states.

        Raises:
            ValueError: if there is not exactly one.
        """
        backbone = without_adapter(backbone)
        count: int = backbone.config.get_text_config().num_hidden_layers  # type: ignore[operator,union-attr]
        paths = [
            path
            for path, module in backbone.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == count and ".0." not in f"{path}."
        ]
        if len(paths) != 1:
            raise ValueError(
                f"layers: {type(backbone).__name__} has {len(paths)} lists of {count} modules, so states between its layers "
                "are not available. Use all layers."
            )
        place, _, name = paths[0].rpartition(".")
        owner = backbone.get_submodule(place)
        parts = [getattr(owner, part, None) for part in _AFTER]
        return cls(owner, name, tuple(part for part in parts if isinstance(part, nn.Module)))

    @property
    def layers(self) -> nn.ModuleList:
        """All L layers."""
        layers: nn.ModuleList = getattr(self.owner, self.name)
        return layers

    def finish(self, states: Tensor) -> Tensor:
        """Apply what follows the last layer to states (…, D)."""
        for module in self.after:
            states = module(states)
        return states

    @contextmanager
    def states_after(self, numbers: Sequence[int], pick: Callable[[Tensor], Tensor]) -> Iterator[dict[int, Tensor]]:
        """Yield a dictionary that a forward pass fills:
        for each number m, `pick` of the unfinished states (B, T, D) after layer m."""
        found: dict[int, Tensor] = {}

        def keeper(number: int) -> Callable[..., None]:
            def keep(_: nn.Module, __: Any, output: Any) -> None:
                found[number] = pick(output[0] if isinstance(output, tuple) else output)

            return keep

        handles = [self.layers[number - 1].register_forward_hook(keeper(number)) for number in numbers]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def check(self, backbone: nn.Module) -> None:
        """Raise `ValueError` unless the last states of the backbone are the finished ones of its last layer."""
        if not _are_equal(*self.probe(backbone, len(self.layers))):
            raise ValueError(
                f"layers: {type(without_adapter(backbone)).__name__} has unknown steps after its last layer, so states after "
                "fewer layers are not available. Use all layers."
            )

    def probe(self, backbone: nn.Module, number: int) -> tuple[Tensor, Tensor]:
        """Return finished states of some tokens after so many layers, and those of the whole backbone."""
        with (
            evaluating(backbone) as device,
            without_outliers(backbone),
            self.states_after([number], self.finish) as found,
        ):
            ids_BT = torch.tensor([[7, 5, 3, 1], [4, 2, 6, 8]], device=device)
            states: Tensor = backbone(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)).last_hidden_state
        return found[number], states


def cut_layers(backbone: nn.Module, keep: int) -> None:
    """Drop all layers but the first `keep` from a backbone, adapted or not, and from its config.

    Raises:
        ValueError: if it has fewer.
    """
    stack = LayerStack.of(backbone)
    total = len(stack.layers)
    if not 1 <= keep <= total:
        raise ValueError(f"layers: expected 1 .. {total}, the layers of the backbone; got {keep}.")
    setattr(stack.owner, stack.name, stack.layers[:keep])
    cut_config(without_adapter(backbone).config, keep)


def cut_config(config: Any, keep: int) -> None:
    """Change the config of a backbone to that of its first `keep` layers."""
    config = config.get_text_config()
    values, total = config.to_dict(), config.num_hidden_layers
    config.num_hidden_layers = keep
    for name, value in values.items():
        if "layer" in name and isinstance(value, list) and len(value) == total:
            setattr(config, name, value[:keep])


def first_layers(backbone: nn.Module, keep: int) -> nn.Module:
    """Return a backbone of the first `keep` layers that shares its weights with the given one, which stays whole.

    Its fingerprint is that of the whole one, since an adapter needs the whole base.

    Raises:
        ValueError: if it has fewer layers, or gives other states without the rest.
    """
    stack = LayerStack.of(backbone)
    stack.check(backbone)
    shared = {id(tensor): tensor for tensor in (*backbone.parameters(), *backbone.buffers())}
    short = copy.deepcopy(backbone, shared)
    cut_layers(short, keep)
    if not is_adapted(backbone):
        setattr(short, ORIGINAL, weights_fingerprint(backbone))
    states, _ = stack.probe(backbone, keep)
    _, short_states = LayerStack.of(short).probe(short, keep)
    if not _are_equal(states, short_states):
        raise ValueError(
            f"layers: {type(without_adapter(backbone)).__name__} gives other states with {keep} layers only, so it cannot be "
            "truncated. Use all layers."
        )
    return short


def _are_equal(one_BTD: Tensor, other_BTD: Tensor) -> bool:
    """Return whether states are equal up to rounding (three digits in half precision)."""
    return relative_difference(one_BTD, other_BTD) < (1e-2 if other_BTD.dtype.itemsize == 2 else 1e-5)

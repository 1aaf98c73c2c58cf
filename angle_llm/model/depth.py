"""The layers of a backbone: states between them, and a backbone that keeps the first ones alone.

A text's state *after m layers* is what a backbone of the first m layers would give: what leaves layer m, put through what
the backbone does after its last layer (the final norm of a LLaMA, nothing in a BERT). So one forward pass of all layers
has the states of every shorter backbone in it.

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
from angle_llm.model.lora import is_adapted
from angle_llm.model.quantization import ORIGINAL, without_outliers

_AFTER = ("norm", "final_norm", "ln_f", "final_layer_norm", "final_layernorm", "project_out")
"""What architectures call the modules after their last layer, beside the list of layers, in the order they run."""


@dataclass(frozen=True)
class LayerStack:
    """Where a backbone keeps its layers, and what comes after the last."""

    owner: nn.Module
    name: str
    """The list of layers is this attribute of `owner`."""
    after: tuple[nn.Module, ...]

    @classmethod
    def of(cls, backbone: nn.Module) -> LayerStack:
        """Found by the number of layers the config tells; whether it is right is asked by `check`.

        Raises:
            ValueError: if the backbone has no one list of so many layers.
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
                f"{type(backbone).__name__} has {len(paths)} lists of {count} modules, so its layers are not known: states "
                "between them cannot be taken. Use all layers."
            )
        place, _, name = paths[0].rpartition(".")
        owner = backbone.get_submodule(place)
        parts = [getattr(owner, part, None) for part in _AFTER]
        return cls(owner, name, tuple(part for part in parts if isinstance(part, nn.Module)))

    @property
    def layers(self) -> nn.ModuleList:
        """All of them, L."""
        layers: nn.ModuleList = getattr(self.owner, self.name)
        return layers

    def finish(self, states: Tensor) -> Tensor:
        """What the backbone does to states (…, D) after its last layer."""
        for module in self.after:
            states = module(states)
        return states

    @contextmanager
    def states_after(self, numbers: Sequence[int], pick: Callable[[Tensor], Tensor]) -> Iterator[dict[int, Tensor]]:
        """Within this, a forward pass puts into the dictionary, for each number m, `pick` of the states (B, T, D) that leave
        layer m, not finished."""
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
        """Asks the backbone whether its last states are those of its last layer, finished.

        Raises:
            ValueError: if it does something else with them.
        """
        ours, its = self.probe(backbone, len(self.layers))
        if not _agree(ours, its):
            raise ValueError(
                f"{type(without_adapter(backbone)).__name__} does more after its last layer than is known here, so states after "
                "fewer layers cannot be taken. Use all layers."
            )

    @torch.no_grad()
    def probe(self, backbone: nn.Module, number: int) -> tuple[Tensor, Tensor]:
        """States of some tokens after so many layers, finished, and as the whole backbone gives them."""
        ids_BT = torch.tensor([[7, 5, 3, 1], [4, 2, 6, 8]], device=next(backbone.parameters()).device)
        was_training = backbone.training
        backbone.eval()
        try:
            with without_outliers(backbone), self.states_after([number], self.finish) as found:
                states: Tensor = backbone(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)).last_hidden_state
        finally:
            backbone.train(was_training)
        return found[number], states


def without_adapter(backbone: nn.Module) -> nn.Module:
    """The backbone inside peft's wrapping, its layers as they are adapted; or the backbone itself."""
    inner: nn.Module = backbone.get_base_model() if is_adapted(backbone) else backbone  # type: ignore[operator]
    return inner


def cut_layers(backbone: nn.Module, keep: int) -> None:
    """Drops all layers but the first `keep` from a backbone, adapted or not, and from its config.

    Raises:
        ValueError: if it has not so many.
    """
    depth = LayerStack.of(backbone)
    total = len(depth.layers)
    if not 1 <= keep <= total:
        raise ValueError(f"layers must be in 1 .. {total}, as the backbone has {total}; got {keep}.")
    setattr(depth.owner, depth.name, depth.layers[:keep])
    config: Any = without_adapter(backbone).config.get_text_config()  # type: ignore[operator,union-attr]
    by_layer = {
        name: value
        for name, value in config.to_dict().items()
        if "layer" in name and isinstance(value, list) and len(value) == total
    }
    config.num_hidden_layers = keep
    for name, value in by_layer.items():
        setattr(config, name, value[:keep])


def first_layers(backbone: nn.Module, keep: int) -> nn.Module:
    """A backbone of the first `keep` layers that shares its weights with the given one, which stays whole.

    Its fingerprint (`weights_fingerprint`) stays that of the whole one, which is what an adapter needs in its base's place.

    Raises:
        ValueError: if it has not so many layers, or gives other states without the rest.
    """
    depth = LayerStack.of(backbone)
    depth.check(backbone)
    shared = {id(tensor): tensor for tensor in (*backbone.parameters(), *backbone.buffers())}
    short = copy.deepcopy(backbone, shared)
    cut_layers(short, keep)
    if not is_adapted(backbone):
        setattr(short, ORIGINAL, weights_fingerprint(backbone))
    states, _ = depth.probe(backbone, keep)
    _, its = LayerStack.of(short).probe(short, keep)
    if not _agree(states, its):
        raise ValueError(
            f"{type(without_adapter(backbone)).__name__} gives other states when it has {keep} layers only, so it cannot be "
            "cut. Use all layers."
        )
    return short


def _agree(one_BTD: Tensor, other_BTD: Tensor) -> bool:
    """Equal up to rounding, which half precision has at three digits."""
    if one_BTD.shape != other_BTD.shape:
        return False
    half = other_BTD.dtype in (torch.float16, torch.bfloat16)
    one_BTD, other_BTD = one_BTD.cpu().double(), other_BTD.cpu().double()  # there: MPS has no float64
    apart = (one_BTD - other_BTD).norm() / other_BTD.norm().clamp(min=1e-30)
    return bool(apart < (1e-2 if half else 1e-5))

"""The loss, and the depths and widths at which it is taken."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from angle_llm.config.checked import Checked, require


@dataclass(frozen=True)
class ObjectiveSettings(Checked):
    """The loss: a weighted sum of terms. See `angle_llm.losses` for their formulas. The defaults follow from the
    measurements of docs/LOG.md (binary NLI: the in-batch term alone)."""

    cosine_weight: float = 0.0
    """Weight of the cosine ranking term (CoSENT)."""
    in_batch_weight: float = 1.0
    """Weight of the in-batch contrastive term."""
    angle_weight: float = 0.0
    """Weight of the angle ranking term."""
    regression_weight: float = 0.0
    """Weight of the regression term: squared differences of cosine and score (SBERT). For graded pairs."""
    cosine_temperature: float = 0.05
    """Divides cosine differences."""
    in_batch_temperature: float = 0.05
    """Divides cosines of the in-batch term."""
    angle_temperature: float = 0.05
    """Divides angle differences (the published runs: 1.0)."""
    angle_form: str = "phase"
    """phase, reference or paper."""
    contrastive_form: str = "symmetric"
    """forward: left texts against all right texts. symmetric: every text with a positive against all texts."""
    positive_above: float = 0.5
    """A pair with a score (0..1) above this is a positive of the in-batch term."""


@dataclass(frozen=True)
class NestedSettings(Checked):
    """Depths and widths at which the loss is taken too, so that the trained encoder may be cut to them (Matryoshka). The
    whole vector after all layers is always among them; every depth goes with every width."""

    dimensions: list[int] = field(default_factory=list)
    """The first so many dimensions of a vector, in ascending order, such as 64 128 256."""
    layers: list[int] = field(default_factory=list)
    """The first so many layers, in ascending order, such as 10 20."""
    dimension_weights: list[float] = field(default_factory=list)
    """One for each of the dimensions, and last that of the full width; only their proportions count. Empty: equal."""
    layer_weights: list[float] = field(default_factory=list)
    """One for each of the layers, and last that of all layers; only their proportions count. Empty: equal."""

    def __post_init__(self) -> None:
        for name, values, weights in (
            ("dimensions", self.dimensions, self.dimension_weights),
            ("layers", self.layers, self.layer_weights),
        ):
            ascending = values == sorted(set(values)) and all(value >= 1 for value in values)
            require(ascending, f"nested.{name} must ascend from 1 or more, each number once; got {values}.")
            which = f"nested.{name.removesuffix('s')}_weights"
            right = not weights or len(weights) == len(values) + 1
            require(right, f"{which} needs {len(values) + 1} numbers, the last for all {name}; got {weights}.")
            sound = all(0 <= weight < math.inf for weight in weights) and (not weights or sum(weights) > 0)
            require(sound, f"{which} must be finite numbers, 0 or more, and not all 0; got {weights}.")

    def weight(self, layer: int | None, dimension: int | None) -> float:
        """Of the loss after so many layers at so many dimensions, None being all; those of all such losses sum to 1."""
        by_layer = _share(self.layers, self.layer_weights, layer)
        return by_layer * _share(self.dimensions, self.dimension_weights, dimension)


def _share(values: list[int], weights: list[float], value: int | None) -> float:
    weights = weights or [1.0] * (len(values) + 1)
    return weights[len(values) if value is None else values.index(value)] / sum(weights)

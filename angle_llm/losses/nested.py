"""The same objective at several depths and widths, so that an encoder may be cut after training.

Shapes: N rows (unique texts), D columns of one vector, S vectors side by side in a row, one for each depth.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from angle_llm.config import NestedSettings, ObjectiveSettings
from angle_llm.losses.angle import AngleObjective, ObjectiveValue

Objective = Callable[[Tensor, Tensor, Tensor, Tensor], ObjectiveValue]
"""(embeddings, left_P, right_P, score_P) -> value: what training asks of an objective."""


@dataclass(frozen=True)
class NestedObjective:
    """L = Σ w_mk · L_plain(E_mk): E_mk are the first k columns of the vectors after m layers, weights sum to 1.

    Widths are the full one, D, and each of ``nested.dimensions``: Matryoshka representation learning (arXiv 2205.13147).
    Depths are all layers and each of ``nested.layers``; every depth is taken at every width: 2D Matryoshka, espresso
    sentence embeddings (arXiv 2402.14776), without its further terms that draw shallow vectors towards the deep one.
    w_mk is the product of the weight of m and the weight of k, which are equal unless settings say otherwise. A term of
    weight 0 is not computed.

    A row of embeddings (N, S·D) holds the vector after all layers and then one for each of ``nested.layers``, as
    ``EmbeddingModel.read_layers`` makes it. An angle reads the halves of the k columns it is given, so every k must be even.

    The parts of its value are those of the plain objective on the whole vector after all layers, under their names, and the
    loss of every other term: ``dim64``, ``layer12``, ``layer12_dim64``.

    Raises ``ValueError`` for an odd width with an angle weight.
    """

    plain: AngleObjective
    nested: NestedSettings

    def __post_init__(self) -> None:
        odd = [width for width in self.nested.dimensions if width % 2]
        if odd and self.plain.angle_weight:
            raise ValueError(
                f"nested.dimensions has {odd[0]}, and an angle needs an even number of columns, half of them real and half "
                "imaginary parts. Take even numbers, or set objective.angle_weight to 0."
            )

    def check_width(self, columns: int) -> None:
        """Raise ``ValueError`` if a vector of so many columns cannot be cut as asked."""
        too_wide = [width for width in self.nested.dimensions if width >= columns]
        if too_wide:
            raise ValueError(
                f"nested.dimensions must be below {columns}, which is the full width and always there; got {too_wide[0]}."
            )

    def __call__(self, embeddings_NC: Tensor, left_P: Tensor, right_P: Tensor, score_P: Tensor) -> ObjectiveValue:
        """The loss of a batch, given rows (N, S·D); the rest is as ``AngleObjective`` takes it.

        Raises ``ValueError`` for rows that are not so many vectors, or as ``AngleObjective`` does.
        """
        depths = [None, *self.nested.layers]
        columns = embeddings_NC.shape[-1] // len(depths)
        if embeddings_NC.ndim != 2 or columns * len(depths) != embeddings_NC.shape[1]:
            raise ValueError(
                f"embeddings must be a matrix (N, {len(depths)}·D), the vectors of all and of {len(depths) - 1} inner layers "
                f"side by side; got shape {tuple(embeddings_NC.shape)}. Was the encoder told to read these layers?"
            )
        self.check_width(columns)
        parts: dict[str, Tensor] = {}
        losses: list[Tensor] = []
        for place, depth in enumerate(depths):
            for width in (None, *self.nested.dimensions):
                weight = self.nested.weight(depth, width)
                if not weight:
                    continue
                start = place * columns
                value = self.plain(embeddings_NC[:, start : start + (width or columns)], left_P, right_P, score_P)
                losses.append(weight * value.loss)
                parts |= _named(value, depth, width)
        return ObjectiveValue(torch.stack(losses).sum(), parts)


def _named(value: ObjectiveValue, depth: int | None, width: int | None) -> dict[str, Tensor]:
    """What is logged of a term."""
    if depth is None and width is None:
        return value.parts
    names = ([] if depth is None else [f"layer{depth}"]) + ([] if width is None else [f"dim{width}"])
    return {"_".join(names): value.loss.detach()}


def objective_for(objective: ObjectiveSettings, nested: NestedSettings) -> AngleObjective | NestedObjective:
    """The objective that settings ask for: nested if they name a depth or a width."""
    plain = AngleObjective(**asdict(objective))
    return NestedObjective(plain, nested) if nested.layers or nested.dimensions else plain

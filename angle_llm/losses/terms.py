"""Base classes of losses: terms, their weighted sum, and the properties that a trainer needs.

Shapes: N rows (unique texts), D columns, P scored pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from angle_llm.device import on_device
from angle_llm.losses.blocks import PairSimilarity, RowVector, WholeMatrix, from_rows
from angle_llm.losses.relation import Relation
from angle_llm.losses.similarity import Similarity, cosine, unit
from angle_llm.objective import POSITIVE_ABOVE

NO_FIELDS = frozenset[str]()


@dataclass(frozen=True)
class ObjectiveValue:
    """The loss of a batch, and the values of its terms for logs."""

    loss: Tensor
    """Total loss, a scalar tensor; call `loss.backward()`."""
    parts: dict[str, Tensor]
    """Name of a loss term → value before its weight is applied, a detached scalar; terms with weight 0 are missing."""


class Objective(ABC):
    """Base class of training losses: a function of embeddings and scored pairs, with properties that a trainer needs."""

    @property
    def embeddings_per_text(self) -> int:
        """Number of embeddings side by side in a row; 0 if a row is not an embedding."""
        return 1

    @property
    def needs_pairs(self) -> bool:
        """Whether the loss is constant without pairs of two different texts."""
        return False

    @property
    def needs(self) -> frozenset[str]:
        """Optional fields of `Relation` without which the loss cannot be computed, such as `teacher_vectors`."""
        return NO_FIELDS

    @abstractmethod
    def __call__(self, embeddings: Tensor, relation: Relation, /) -> ObjectiveValue:
        """Compute the loss of a batch from embeddings, one row per unique text, and scored pairs of their rows."""

    def cosines(self, embeddings: Tensor, relation: Relation, /) -> dict[str, Tensor]:
        """Return mean cosines of the embeddings by kind of pair, for logs (see `mean_cosines`)."""
        return mean_cosines(embeddings, relation)

    def check_width(self, columns: int) -> None:  # noqa: B027
        """Raise `ValueError` if the loss cannot be computed from embeddings with `columns` dimensions."""


class BatchPairs:
    """Scored pairs of a batch, with number and device of its embedding rows: input of `Term.prepare`."""

    def __init__(self, relation: Relation, rows: int, device: torch.device) -> None:
        self.relation = relation
        self.rows, self.device = rows, device
        self._sides = on_device(relation.left, device), on_device(relation.right, device)
        self._similarities: dict[Similarity, PairSimilarity] = {}

    def similarities(self, similarity: Similarity = cosine) -> PairSimilarity:
        """Return the row vector (P,) of the similarities of the scored pairs; the same object for all terms of the batch."""
        if similarity not in self._similarities:
            self._similarities[similarity] = PairSimilarity(similarity, *self._sides)
        return self._similarities[similarity]


class BatchTerm(NamedTuple):
    """A term for the pairs of a batch: a function of a few vectors that are computed from the embeddings."""

    vectors: tuple[RowVector, ...]
    value: Callable[..., Tensor]
    """Function that maps the values of `vectors`, one argument per vector, to a scalar.

    A vector that several terms share is computed once."""


class Term(ABC):
    """Base class of loss terms: name, weight, requirements, and the value for a batch."""

    name: str
    """Name of the term in metrics, as `loss/NAME`."""
    weight: float
    """Weight of the term in the loss."""
    needs_pairs: bool = True
    """Whether the term is constant without pairs of two different texts."""

    @property
    def needs(self) -> frozenset[str]:
        """Optional fields of `Relation` without which the term cannot be computed."""
        return NO_FIELDS

    @abstractmethod
    def prepare(self, pairs: BatchPairs) -> BatchTerm:
        """Prepare the term for a batch. The vectors of all terms are computed together, in blocks (module `blocks`)."""


@dataclass(frozen=True)
class FunctionTerm(Term):
    """A loss term from a function of embeddings (N, D) and their relation to a scalar, differentiated by autograd.

    The embeddings are float32 or float64. The tensors of the relation are on the CPU. Memory is not limited to a block.
    """

    name: str
    """Name of the term in metrics, as `loss/NAME`."""
    function: Callable[[Tensor, Relation], Tensor]
    """Function of embeddings (N, D) and their relation that returns a scalar."""
    weight: float = 1.0
    """Weight of the term in the loss."""
    needs_pairs: bool = False
    """Whether the term is constant without pairs of two different texts."""
    needs: frozenset[str] = NO_FIELDS
    """Optional fields of `Relation` without which the term cannot be computed, such as `teacher_vectors`."""

    def __post_init__(self) -> None:
        module = self.function
        if isinstance(module, nn.Module) and any(weight.requires_grad for weight in module.parameters()):
            raise TypeError(
                f"loss: {type(module).__name__} has parameters, which a run does not train. Set them to constants "
                "(requires_grad_(False)), or use a function."
            )

    def prepare(self, pairs: BatchPairs) -> BatchTerm:
        def value(x_ND: Tensor) -> Tensor:
            scalar = self.function(x_ND, pairs.relation)
            if not isinstance(scalar, Tensor) or scalar.numel() != 1:
                got = f"a tensor {tuple(scalar.shape)}" if isinstance(scalar, Tensor) else type(scalar).__name__
                raise ValueError(f"loss {self.name}: expected a scalar tensor, got {got}")
            if scalar.requires_grad or not (x_ND.requires_grad and torch.is_grad_enabled()):
                return scalar.to(x_ND.device)  # a loss without pairs can return a constant of the CPU
            if scalar.item() != 0:  # 0: nothing to learn from this batch
                raise ValueError(
                    f"loss {self.name}: expected a scalar that depends on the embeddings, got a constant. Compute it with torch, "
                    "without detach() and item()."
                )
            return 0 * x_ND.sum()

        return BatchTerm((WholeMatrix(value),), torch.squeeze)


class SumOfTerms(Objective):
    """A training loss that is a weighted sum of terms: L = Σ weight · term.

    Raises:
        ValueError: without a term, or if two terms have the same name.
    """

    def __init__(self, *terms: Term) -> None:
        if not terms:
            raise ValueError("expected at least one term, got none")
        names = [term.name for term in terms]
        if len(set(names)) < len(names):
            raise ValueError(f"expected terms with different names, got {', '.join(names)}")
        self._terms = terms

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of the loss, in the order of the logs."""
        return self._terms

    @property
    def needs_pairs(self) -> bool:
        return all(term.needs_pairs for term in self.terms)

    @property
    def needs(self) -> frozenset[str]:
        return NO_FIELDS.union(*(term.needs for term in self.terms))

    def __call__(self, embeddings: Tensor, relation: Relation, /) -> ObjectiveValue:
        """Compute the loss of a batch from embeddings (N, D) and scored pairs of their rows.

        Computes in float32 at least, also under autocast: half-precision embeddings are converted to float32. The pairs can
        be on another device than the embeddings.

        Raises:
            ValueError: for shapes that do not fit, row numbers out of range, or a missing field of the relation.
        """
        if embeddings.ndim != 2 or not embeddings.is_floating_point():
            raise ValueError(
                "embeddings: expected a floating-point matrix (N, D), one row per unique text; got "
                f"{embeddings.dtype} of shape {tuple(embeddings.shape)}."
            )
        relation.check_rows(len(embeddings))
        device = embeddings.device
        with torch.autocast(device.type, enabled=False):
            x_ND = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
            pairs = BatchPairs(relation.widened(), len(x_ND), device)
            prepared = [term.prepare(pairs) for term in self.terms]
            # Vectors that terms share are computed once. Cosines come first, whichever term reads them, so that the order
            # in which gradients are summed does not depend on the weights.
            distinct = list(dict.fromkeys(chain.from_iterable(term.vectors for term in prepared)))
            cosines = pairs.similarities()
            vectors = sorted(distinct, key=lambda vector: vector is not cosines)
            # One call, so that all gradients are added in one matrix.
            value_of = dict(zip(vectors, from_rows(x_ND, *vectors), strict=True))
            values = [term.value(*(value_of[vector] for vector in term.vectors)) for term in prepared]
            loss = torch.stack([term.weight * value for term, value in zip(self.terms, values, strict=True)]).sum()
        return ObjectiveValue(loss, {term.name: value.detach() for term, value in zip(self.terms, values, strict=True)})


LossFunction = Callable[[Tensor, Relation], Tensor]
"""Function of embeddings (N, D) and the relation of their rows that returns a scalar."""
Loss = Objective | Term | LossFunction | Sequence["Objective | Term | LossFunction"]


def as_objective(loss: Loss) -> Objective:
    """Return the training loss for a function, a term, a loss, or the sum of a list of these.

    Raises:
        ValueError: for two terms with the same name.
        TypeError: for another type, such as a loss in a list that is not a sum of terms, or a module with parameters.
    """
    if isinstance(loss, Objective):
        return loss
    terms: list[Term] = []
    for part in loss if isinstance(loss, Sequence) else [loss]:
        if isinstance(part, SumOfTerms):
            terms += part.terms
        elif isinstance(part, Term):
            terms.append(part)
        elif isinstance(part, type):
            raise TypeError(f"loss: expected an object, got the class {part.__name__}; pass {part.__name__}(…)")
        elif callable(part) and not isinstance(part, Objective):
            terms.append(FunctionTerm(getattr(part, "__name__", type(part).__name__), part))
        else:
            raise TypeError(
                "loss: expected a function (embeddings, relation) -> scalar, a Term, a sum of terms, or a list of these, got "
                f"{type(part).__name__}"
            )
    return SumOfTerms(*terms)


def described(value: object) -> str:
    """Return a text with the names, weights and fields of a loss, for the identity of a run.

    A function is described by its name, because a Python version or a docstring changes its compiled code.
    """
    if isinstance(value, SumOfTerms):
        return " + ".join(map(described, value.terms))
    if is_dataclass(value):
        listed = [f"{item.name}={described(getattr(value, item.name))}" for item in fields(value)]
        return f"{type(value).__qualname__}({', '.join(listed)})"
    if isinstance(value, Term):
        return f"{type(value).__qualname__}(name={value.name!r}, weight={value.weight!r})"
    if isinstance(value, partial):
        return f"{described(value.func)}({described(value.args)}, {described(value.keywords)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {described(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple | frozenset):
        items = map(described, value)  # the order of a set differs between processes
        return f"[{', '.join(sorted(items) if isinstance(value, frozenset) else items)}]"
    if value is None or isinstance(value, str | bytes | int | float):
        return repr(value)
    return getattr(value, "__name__", type(value).__qualname__)


def mean_cosines(x_ND: Tensor, relation: Relation) -> dict[str, Tensor]:
    """Return mean cosines of pairs of texts, as scalars on the device; a kind without a pair is missing.

    positives: scored pairs of two rows with a score above 0.5; negatives: other scored pairs; in_batch: all pairs of two
    rows without a score (a text with two prompts has two rows); margin: positives - in_batch.
    """
    unit_ND = unit(x_ND.detach())
    left_P, right_P = relation.left, relation.right
    rows = len(x_ND)
    # The pairs of each kind; in_batch are all pairs of the batch without the distinct scored pairs.
    positive_P = relation.score > POSITIVE_ABOVE
    two_rows_P = left_P != right_P
    distinct_P = _first_of_equal(torch.minimum(left_P, right_P) * rows + torch.maximum(left_P, right_P))
    chosen_3P = torch.stack([positive_P, ~positive_P, distinct_P]) & two_rows_P
    # Sums of cosines by kind.
    index_2P = on_device(torch.stack([left_P, right_P]), unit_ND.device)
    cosine_P = (unit_ND[index_2P[0]] * unit_ND[index_2P[1]]).sum(dim=1)
    sums_3 = on_device(chosen_3P.to(unit_ND.dtype), unit_ND.device) @ cosine_P
    positives, negatives, scored = chosen_3P.sum(dim=1).tolist()
    means = {"positives": sums_3[0] / positives} if positives else {}
    means |= {"negatives": sums_3[1] / negatives} if negatives else {}
    if unscored := rows * (rows - 1) // 2 - scored:
        # Sum over all pairs of rows: half of (|Σ u|² - Σ |u|²).
        total = (unit_ND.sum(dim=0).square().sum() - unit_ND.square().sum()) / 2
        means["in_batch"] = (total - sums_3[2]) / unscored
        if positives:
            means["margin"] = means["positives"] - means["in_batch"]
    return means


def _first_of_equal(key_P: Tensor) -> Tensor:
    """Return a boolean mask (P,) of the first entry of each distinct value."""
    sorted_P, order_P = key_P.sort(stable=True)
    first_P = torch.ones(len(key_P), dtype=torch.bool)
    first_P[order_P[1:]] = sorted_P[1:] != sorted_P[:-1]
    return first_P

"""Slow reference formulas of the objectives: loops over numbers. Imports nothing of the package.

A number is a 0-dimensional tensor, so that autograd gives the gradient; a row is a list of numbers. Where a formula has
no value or no gradient (a zero row, nothing to compare), the convention is written out as a branch that returns 0.
"""

import math
from collections.abc import Callable, Sequence
from itertools import permutations

import torch
from torch import Tensor

Number = Tensor | float
Row = Sequence[Tensor]
Pair = tuple[int, int, float]  # left row, right row, score


def rows_of(matrix: Tensor) -> list[list[Tensor]]:
    return [list(row.unbind()) for row in matrix.unbind()]


def norm(row: Row) -> Number:
    squares = sum(x * x for x in row)
    return torch.sqrt(squares) if squares > 0 else 0.0


def unit(row: Row) -> list[Number]:
    length = norm(row)
    return [x / length if length > 0 else 0.0 for x in row]


def cosine(left: Row, right: Row) -> Number:
    scale = norm(left) * norm(right)
    return sum(x * y for x, y in zip(left, right, strict=True)) / scale if scale > 0 else 0.0


def constant(number: Number) -> float:
    """The number without its gradient."""
    return float(number.detach() if isinstance(number, Tensor) else number)


def halves(row: Row) -> list[tuple[Tensor, Tensor]]:
    """The complex numbers of a row: (real, imaginary)."""
    half = len(row) // 2
    return list(zip(row[:half], row[half:], strict=True))


def complex_quotient_sum(left: Row, right: Row) -> tuple[Number, Number]:
    """Σ z/w · (‖w‖/‖z‖), division written with the norm of the whole of w: ((ac + bd) + (bc - ad)i) / (‖z‖‖w‖)."""
    scale = norm(left) * norm(right)
    if not scale > 0:
        return 0.0, 0.0
    real = sum(a * c + b * d for (a, b), (c, d) in zip(halves(left), halves(right), strict=True)) / scale
    imaginary = sum(b * c - a * d for (a, b), (c, d) in zip(halves(left), halves(right), strict=True)) / scale
    return real, imaginary


def angle_reference(left: Row, right: Row) -> Number:
    real, imaginary = complex_quotient_sum(left, right)
    return abs(real + imaginary)


def angle_paper(left: Row, right: Row) -> Number:
    real, imaginary = complex_quotient_sum(left, right)
    square = real * real + imaginary * imaginary
    return -torch.sqrt(square) if square > 0 else 0.0


def angle_phase(left: Row, right: Row) -> Number:
    """Difference of the two arguments, reduced to [-π, π]."""
    weights, weighted = 0.0, 0.0
    for (a, b), (c, d) in zip(halves(left), halves(right), strict=True):
        if (a == 0 and b == 0) or (c == 0 and d == 0):
            continue
        turn = torch.atan2(b, a) - torch.atan2(d, c)
        if turn > math.pi:
            turn = turn - 2 * math.pi
        if turn < -math.pi:
            turn = turn + 2 * math.pi
        weight = torch.sqrt(a * a + b * b) * torch.sqrt(c * c + d * d)
        weights, weighted = weights + weight, weighted + weight * abs(turn)
    return 1 - 2 / math.pi * weighted / weights if weights > 0 else 0.0


ANGLE_FORMS: dict[str, Callable[[Row, Row], Number]] = {
    "reference": angle_reference,
    "paper": angle_paper,
    "phase": angle_phase,
}


def exp(x: Number) -> Tensor:
    return torch.exp(torch.as_tensor(x, dtype=torch.float64))


def ranking_loss(similarity: Sequence[Number], score: Sequence[float], temperature: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, j in permutations(range(len(score)), 2):
        if score[i] < score[j]:
            total = total + exp((similarity[i] - similarity[j]) / temperature)
    return torch.log(1 + total)


def regression_loss(similarity: Sequence[Number], score: Sequence[float]) -> Tensor:
    squares = [
        torch.as_tensor((one - other) ** 2, dtype=torch.float64) for one, other in zip(similarity, score, strict=True)
    ]
    return mean(squares)


def partners(pairs: Sequence[Pair], positive_above: float) -> set[tuple[int, int]]:
    """Positive pairs in the given direction, (left, right)."""
    return {(left, right) for left, right, score in pairs if score > positive_above and left != right}


def symmetric_loss(
    rows: Sequence[Row],
    pairs: Sequence[Pair],
    temperature: float,
    positive_above: float,
    text: Sequence[int] | None = None,
) -> Tensor:
    together = {frozenset(pair) for pair in partners(pairs, positive_above)}
    losses = []
    for anchor in range(len(rows)):
        others = [row for row in range(len(rows)) if row != anchor]
        positives = [row for row in others if {anchor, row} in together]
        skipped = skipped_texts(anchor, pairs, positive_above, text)
        negatives = [row for row in others if text_of(row, text) not in skipped]
        losses += anchor_loss(rows, anchor, positives, negatives, temperature)
    return mean(losses)


def forward_loss(
    rows: Sequence[Row],
    pairs: Sequence[Pair],
    temperature: float,
    positive_above: float,
    text: Sequence[int] | None = None,
) -> Tensor:
    given = partners(pairs, positive_above)
    rights = {right for left, right, _ in pairs if left != right}
    losses = []
    for anchor in range(len(rows)):
        positives = [row for row in range(len(rows)) if (anchor, row) in given]
        skipped = skipped_texts(anchor, pairs, positive_above, text)
        negatives = [k for k in rights if text_of(k, text) not in skipped]
        losses += anchor_loss(rows, anchor, positives, negatives, temperature)
    return mean(losses)


def text_of(row: int, text: Sequence[int] | None) -> int:
    return row if text is None else text[row]


def skipped_texts(row: int, pairs: Sequence[Pair], positive_above: float, text: Sequence[int] | None) -> set[int]:
    """The text of the row, and the texts that are together with it in a positive pair."""
    own = text_of(row, text)
    links = [{text_of(one, text), text_of(other, text)} for one, other in partners(pairs, positive_above)]
    return {own}.union(*(link for link in links if own in link))


CONTRASTIVE_FORMS = {"symmetric": symmetric_loss, "forward": forward_loss}


def anchor_loss(
    rows: Sequence[Row], anchor: int, positives: Sequence[int], negatives: Sequence[int], temperature: float
) -> list[Tensor]:
    """The loss of the anchor in a list, or an empty list without a positive."""
    weight = {row: exp(cosine(rows[anchor], rows[row]) / temperature) for row in {*positives, *negatives}}
    rest = sum(weight[row] for row in negatives)
    losses = [-torch.log(weight[row] / (weight[row] + rest)) for row in positives]
    return [mean(losses)] if losses else []


def contrast_with_options(
    rows: Sequence[Row],
    pairs: Sequence[Pair],
    temperature: float,
    *,
    symmetric: bool = False,
    text: Sequence[int] | None = None,
    threshold: Callable[[float], float] | None = None,
    guide: Sequence[Row] | None = None,
    keep_own: bool = True,
    strength: float = 0.0,
) -> Tensor:
    """The in-batch loss of pairs with scores 0 and 1, one sum over negatives for each anchor and positive.

    `threshold` maps the cosine of the positive to the largest cosine of a negative.
    """
    edges = partners(pairs, 0.5)
    edges |= {(right, left) for left, right in edges} if symmetric else set()
    pairs = [*pairs, *((right, left, score) for left, right, score in pairs)] if symmetric else pairs
    documents = {right for left, right, _ in pairs if left != right}
    vectors = rows if guide is None else guide

    def logit(one: int, other: int) -> Number:
        return cosine(rows[one], rows[other]) / temperature

    losses = []
    for anchor in range(len(rows)):
        own = {right for left, right, score in pairs if left == anchor and score <= 0.5}
        of_anchor = []
        for positive in [right for left, right in sorted(edges) if left == anchor]:
            skips = skipped_texts(anchor, pairs, 0.5, text)
            candidates = range(len(rows)) if symmetric else documents
            attraction = total = exp(logit(anchor, positive))
            highest = math.inf
            if threshold is not None:
                highest = threshold(constant(cosine(vectors[anchor], vectors[positive])))
            for other in [row for row in candidates if text_of(row, text) not in skips]:
                is_own = other in own
                if constant(cosine(vectors[anchor], vectors[other])) > highest and not (is_own and keep_own):
                    continue
                weight = 0.0 if is_own else strength * constant(cosine(rows[anchor], rows[other]))
                total = total + exp(logit(anchor, other) + weight)
            of_anchor.append(-torch.log(attraction / total))
        losses += [mean(of_anchor)] if of_anchor else []
    return mean(losses)


def infonce_without_fake_negatives(
    groups: Sequence[tuple[Row, Sequence[Row]]], temperature: float, margin: float
) -> Tensor:
    """ms-swift's InfoNCE with `INFONCE_USE_BATCH` and `INFONCE_MASK_FAKE_NEGATIVE`, after its documentation.

    A group is a query and its documents, the positive first. A document has similarity -inf where it is more similar to
    the query than the positive plus `INFONCE_FAKE_NEG_MARGIN`.
    """
    losses = []
    for query, documents in groups:
        others = [row for _, some in groups for row in some]
        positive = cosine(query, documents[0])
        found = [cosine(query, row) for row in others]
        terms = [exp(one / temperature) for one in found if constant(one) <= constant(positive) + margin]
        losses.append(-torch.log(exp(positive / temperature) / sum(terms)))
    return mean(losses)


def teacher_similarity(
    rows: Sequence[Row],
    teacher: Sequence[Row],
    temperature: float,
    teacher_temperature: float,
    text: Sequence[int] | None = None,
) -> Tensor:
    """KL(teacher ‖ student) of the softmax over cosines to the rows of other texts; mean over all rows."""
    divergences = []
    for i in range(len(rows)):
        others = [j for j in range(len(rows)) if text_of(j, text) != text_of(i, text)]
        taught = {j: exp(cosine(teacher[i], teacher[j]) / teacher_temperature) for j in others}
        learned = {j: exp(cosine(rows[i], rows[j]) / temperature) for j in others}
        taught_sum, learned_sum = sum(taught.values()), sum(learned.values())
        divergence = torch.zeros((), dtype=torch.float64)
        for j in others:
            p, q = taught[j] / taught_sum, learned[j] / learned_sum
            divergence = divergence + p * torch.log(p / q)
        divergences.append(divergence)
    return mean(divergences)


def mean(values: Sequence[Tensor]) -> Tensor:
    return sum(values, start=torch.zeros((), dtype=torch.float64)) / max(len(values), 1)


def objective_parts(
    embeddings: Tensor,
    pairs: Sequence[Pair],
    *,
    angle_form: str,
    contrastive_form: str,
    positive_above: float,
    temperatures: tuple[float, float, float],
) -> dict[str, Tensor]:
    """The parts of the AnglE objective, temperatures in the order cosine, in-batch, angle."""
    rows = rows_of(embeddings)
    score = [score for _, _, score in pairs]
    cosines = [cosine(rows[left], rows[right]) for left, right, _ in pairs]
    angles = [ANGLE_FORMS[angle_form](rows[left], rows[right]) for left, right, _ in pairs]
    return {
        "cosine": ranking_loss(cosines, score, temperatures[0]),
        "in_batch": CONTRASTIVE_FORMS[contrastive_form](rows, pairs, temperatures[1], positive_above),
        "angle": ranking_loss(angles, score, temperatures[2]),
        "regression": regression_loss(cosines, score),
    }


def value_and_gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    """A scalar function and its gradient by autograd; zeros where the function does not depend on its argument."""
    leaf = at.detach().clone().requires_grad_()
    value = function(leaf)
    if not value.requires_grad:
        return value.detach(), torch.zeros_like(at)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient

"""The objective written anew from its definition, slowly: loops over pairs, float64, no code of the package.

`x` is (N, D), one row a unique text; `left`, `right` (P,) are row numbers, `score` (P,) the scores of the pairs.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b) / (a.norm() * b.norm())


def angle(a: Tensor, b: Tensor, form: str) -> Tensor:
    """Similarity by angle of two rows whose first halves are real and second halves imaginary parts."""
    z, w = (torch.complex(*(row / row.norm()).chunk(2)) for row in (a, b))
    product = z * w.conj()
    if form == "reference":
        return (product.sum().real + product.sum().imag).abs()
    if form == "paper":
        return -product.sum().abs()
    phase = torch.atan2(product.imag, product.real).abs()
    return 1 - 2 / math.pi * (product.abs() * phase).sum() / product.abs().sum()


def ranking(similarity: Sequence[Tensor], score: Sequence[float], temperature: float) -> Tensor:
    """log(1 + the sum of exp((s_i - s_j) / temperature) over all pairs i, j with a lower score of i)."""
    terms = [
        torch.exp((similarity[i] - similarity[j]) / temperature)
        for i in range(len(score))
        for j in range(len(score))
        if score[i] < score[j]
    ]
    return torch.log1p(torch.stack(terms).sum())


def in_batch(
    x: Tensor, left: Sequence[int], right: Sequence[int], score: Sequence[float], temperature: float, form: str
) -> Tensor:
    """Mean over anchors of the mean over their positives of the cross-entropy against their negatives."""
    positive = {(a, b) for a, b, s in zip(left, right, score, strict=True) if s > 0.5 and a != b}
    partners = positive | {(b, a) for a, b in positive}
    edges = sorted(partners if form == "symmetric" else positive)
    rows = range(len(x)) if form == "symmetric" else sorted({b for a, b in zip(left, right, strict=True) if a != b})
    anchors = []
    for anchor in sorted({a for a, _ in edges}):
        negative = [k for k in rows if k != anchor and (anchor, k) not in partners]
        losses = []
        for partner in (b for a, b in edges if a == anchor):
            logits = torch.stack([cosine(x[anchor], x[k]) / temperature for k in (partner, *negative)])
            losses.append(torch.logsumexp(logits, 0) - logits[0])
        anchors.append(torch.stack(losses).mean())
    return torch.stack(anchors).mean()


def parts(
    x: Tensor,
    left: Sequence[int],
    right: Sequence[int],
    score: Sequence[float],
    *,
    temperature: tuple[float, float, float] = (0.05, 0.05, 0.05),
    angle_form: str = "phase",
    contrastive_form: str = "symmetric",
) -> dict[str, Tensor]:
    """Every part before its weight; `temperature` is of the cosine, in-batch and angle part."""
    pairs = [(x[a], x[b]) for a, b in zip(left, right, strict=True)]
    cosines = [cosine(a, b) for a, b in pairs]
    differences = torch.stack([(c - s) ** 2 for c, s in zip(cosines, score, strict=True)])
    return {
        "cosine": ranking(cosines, score, temperature[0]),
        "in_batch": in_batch(x, left, right, score, temperature[1], contrastive_form),
        "angle": ranking([angle(a, b, angle_form) for a, b in pairs], score, temperature[2]),
        "regression": differences.mean(),
    }

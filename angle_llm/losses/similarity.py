"""Similarity of two embeddings: cosine, and three readings of the angle in complex space.

Shapes: N rows, P pairs, D columns, H = D/2 complex columns.

Every similarity compares row p of `left_PD` with row p of `right_PD` and does not depend on the length of either row.
Larger means more similar. A row of length 0 has similarity 0 and gradient 0 to everything, never NaN.

The angle forms read a row as H complex numbers: the first half holds the real parts, the second half the imaginary ones
(z = a + bi on the left, w = c + di on the right).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Similarity = Callable[[Tensor, Tensor], Tensor]
"""(left_PD, right_PD) -> similarity_P"""


def unit(x_ND: Tensor) -> Tensor:
    """Return the rows scaled to length 1: x / ‖x‖, shape (N, D).

    A row so short that its squares underflow (length under √tiny of its dtype; 1e-19 in float32) counts as zero: it
    stays zero and gets a zero gradient. `torch.nn.functional.normalize` would give it a gradient of size 1e12.
    """
    length_N1 = torch.linalg.vector_norm(x_ND, dim=1, keepdim=True)
    shortest = torch.finfo(x_ND.dtype).tiny ** 0.5
    # x / inf is 0, and so is its gradient: to x (1 / inf) and to the length (masked).
    return x_ND.div(length_N1.masked_fill(length_N1 < shortest, math.inf))


def cosine(left_PD: Tensor, right_PD: Tensor) -> Tensor:
    """Return cos(x, y) = x·y / (‖x‖‖y‖), shape (P,), in [-1, 1].
    Its gradient is 0 where x and y are parallel or opposite."""
    return (unit(left_PD) * unit(right_PD)).sum(dim=1)


def angle_reference(left_PD: Tensor, right_PD: Tensor) -> Tensor:
    """Return the angle of angle-emb 0.6.1: |Re q + Im q|, q = Σ z·conj(w) / (‖z‖‖w‖); (P,), in [0, √2].

    It divides by the norms of whole rows, sums real and imaginary parts over the columns, and takes the absolute value
    last. So it is not an angle: identical rows give 1; left turned by +45° against right in every column gives √2 (the
    optimum), by 135° gives 0; the opposite row gives 1 again. Swapping the two rows changes it, as Im q changes sign.
    Alone it does not distinguish a row from its opposite. It exists to reproduce published runs.

    Source: angle-emb 0.6.1, `angle_emb/loss.py::angle_loss` with `pooling_strategy='sum'`, before its factor tau. A
    row of zeros gives NaN there and 0 here.
    """
    real_P, imaginary_P = _complex_cosine(left_PD, right_PD)
    return (real_P + imaginary_P).abs()


def angle_paper(left_PD: Tensor, right_PD: Tensor) -> Tensor:
    """Return the angle as in the paper: -Δθ, Δθ = |q|, q = Σ z·conj(w) / (‖z‖‖w‖); shape (P,), in [-1, 0].

    Eq. 7 is abs[((ac + bd) + (bc - ad)i) / √((c² + d²)(a² + b²))]. Read column by column it is identically 1, for it is
    the modulus of a quotient divided by its own modulus, and has no gradient. Read with a, b, c, d as vectors and the
    products as dot products, it is |q|. Eq. 8 requires a *smaller* Δθ of the more similar pair, hence the minus sign.

    Note that Δθ is a modulus, not an angle. It is 1, its maximum, where the rows are identical, so eq. 8
    pushes similar pairs apart. It ignores a rotation common to all columns, and the opposite row counts as identical.
    It exists to reproduce the formula as printed.

    Source: Li & Li, arXiv 2309.12871, eq. 7 and 8.
    """
    real_P, imaginary_P = _complex_cosine(left_PD, right_PD)
    # vector_norm has gradient 0 at q = 0, where torch.hypot has NaN.
    modulus_P: Tensor = torch.linalg.vector_norm(torch.stack((real_P, imaginary_P)), dim=0)
    return -modulus_P


def angle_phase(left_PD: Tensor, right_PD: Tensor) -> Tensor:
    """Return the mean difference of phase: 1 - 2θ̄/π; shape (P,), in [-1, 1].

        θ_h = |arg(z_h·conj(w_h))| ∈ [0, π],   m_h = |z_h||w_h|,   θ̄ = Σ m_h θ_h / Σ m_h

    Each complex column weighs as much as it contributes to the complex product, so the phase of a small, noisy number
    counts little. Identical rows give 1, opposite rows -1, all columns turned by φ give 1 - 2φ/π: linear in the angle,
    with a slope that does not vanish near agreement or opposition as the cosine's does, which is the motivation of the
    paper. Symmetric in its two rows. At θ_h = 0 or π exactly, and where m_h = 0, the gradient through θ_h is 0. Two
    rows without a complex column in common (Σ m = 0), as when one is zero, have similarity 0 and gradient 0.

    Source: this package, after the idea of arXiv 2309.12871, section "Angle Objective".
    """
    a_PH, b_PH = _complex_halves(unit(left_PD))
    c_PH, d_PH = _complex_halves(unit(right_PD))
    real_PH, imaginary_PH = a_PH * c_PH + b_PH * d_PH, b_PH * c_PH - a_PH * d_PH

    # atan2 and sqrt have no gradient at 0, and where(alive, f(x), 0) alone would still propagate its NaN (0 · inf):
    # replace the input before, and mask the result after.
    alive_PH = real_PH.square() + imaginary_PH.square() >= torch.finfo(real_PH.dtype).tiny
    real_PH, imaginary_PH = real_PH.where(alive_PH, 1.0), imaginary_PH.where(alive_PH, 0.0)
    weight_PH = (real_PH.square() + imaginary_PH.square()).sqrt().where(alive_PH, 0.0)
    phase_PH = torch.atan2(imaginary_PH.abs(), real_PH)

    weight_P = weight_PH.sum(dim=1)
    comparable_P = weight_P > 0
    phase_P = (weight_PH * phase_PH).sum(dim=1) / weight_P.where(comparable_P, 1.0)
    return (1 - phase_P * (2 / math.pi)).where(comparable_P, 0.0)


ANGLE_FORMS: dict[str, Similarity] = {"reference": angle_reference, "paper": angle_paper, "phase": angle_phase}


def _complex_halves(x_PD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the real parts (P, H) and imaginary parts (P, H) of rows."""
    columns = x_PD.shape[1]
    if columns % 2:
        raise ValueError(
            f"angle: expected an even number of columns, half real and half imaginary parts; got {columns}. "
            "Use an encoder with an even embedding size, or set angle_weight to 0."
        )
    return x_PD[:, : columns // 2], x_PD[:, columns // 2 :]


def _complex_cosine(left_PD: Tensor, right_PD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the real and imaginary part, (P,) each, of q = Σ z·conj(w) / (‖z‖‖w‖). The real part is the cosine."""
    a_PH, b_PH = _complex_halves(unit(left_PD))
    c_PH, d_PH = _complex_halves(unit(right_PD))
    return (a_PH * c_PH + b_PH * d_PH).sum(dim=1), (b_PH * c_PH - a_PH * d_PH).sum(dim=1)

"""Similarities of embedding pairs: cosine, and three versions of the angle in complex space.

Shapes: N rows, P pairs, D columns, H = D/2 complex columns.

Every similarity compares row p of `left_PD` with row p of `right_PD`, and does not depend on the lengths of the rows. A
larger value means more similar. A row of length 0 has similarity 0 to every row, with gradient 0, never NaN.

The angle forms read a row as H complex numbers: the first half of the columns contains the real parts, the second half
the imaginary parts (z = a + bi is a complex number of the left row, w = c + di of the right row).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Similarity = Callable[[Tensor, Tensor], Tensor]
"""Signature of a similarity function: (left embeddings (P, D), right embeddings (P, D)) -> similarities (P,)."""


def unit(x_ND: Tensor) -> Tensor:
    """Scale each row of a matrix to Euclidean length 1, x / ‖x‖; shape (N, D).

    A row whose squares underflow (shorter than √tiny of its dtype; 1e-19 in float32) counts as zero: the result is zero
    and its gradient is zero. With `torch.nn.functional.normalize`, the gradient would have size 1e12.
    """
    length_N1 = torch.linalg.vector_norm(x_ND, dim=1, keepdim=True)
    shortest = torch.finfo(x_ND.dtype).tiny ** 0.5
    # x / inf is 0, and so are its gradients with respect to x (1 / inf) and to the length (masked).
    return x_ND.div(length_N1.masked_fill(length_N1 < shortest, math.inf))


def cosine(left_PD: Tensor, right_PD: Tensor) -> Tensor:
    """Compute the cosine of each pair of rows, x·y / (‖x‖‖y‖); shape (P,), in [-1, 1].

    The gradient is 0 for parallel and for opposite rows.
    """
    return (unit(left_PD) * unit(right_PD)).sum(dim=1)


def angle_reference(left_PD: Tensor, right_PD: Tensor) -> Tensor:
    """Compute the angle similarity of angle-emb 0.6.1, to reproduce published runs; shape (P,), in [0, √2].

        similarity = |Re q + Im q|,   q = Σ z·conj(w) / (‖z‖‖w‖)

    z and w are the left and the right row as complex numbers (see the module docstring). The value is not an angle.
    Identical rows give 1. If every complex number of the left row is turned by +45° against the right row, the value is
    √2, the maximum; at 135° it is 0, and opposite rows give 1 again. So the value alone does not distinguish a row from
    its opposite. Swapping the two rows changes the value, because Im q changes its sign.

    Source: angle-emb 0.6.1, `angle_emb/loss.py::angle_loss` with `pooling_strategy='sum'`, before the factor tau. For a
    row of zeros, angle-emb returns NaN, and this function 0.
    """
    real_P, imaginary_P = _complex_cosine(left_PD, right_PD)
    return (real_P + imaginary_P).abs()


def angle_paper(left_PD: Tensor, right_PD: Tensor) -> Tensor:
    """Compute the angle similarity as printed in the AnglE paper, to reproduce the formula; shape (P,), in [-1, 0].

        similarity = -Δθ,   Δθ = |q|,   q = Σ z·conj(w) / (‖z‖‖w‖)

    z = a + bi and w = c + di are the left and the right row as complex numbers (see the module docstring). Eq. 6 is
    abs[((ac + bd) + (bc - ad)i) / √((c² + d²)(a² + b²))]. Computed for each column, the value is always 1 and has no
    gradient, because it is the modulus of a quotient divided by the same modulus. With vectors a, b, c, d and dot
    products, the value is |q|. Eq. 7 requires a *smaller* Δθ for the more similar pair, hence the minus sign.

    Δθ is a modulus, not an angle. Its maximum is 1, for identical rows, so eq. 7 moves similar pairs apart. Δθ ignores
    a rotation of all columns by the same angle, and opposite rows count as identical.

    Source: Li & Li, arXiv 2309.12871, eq. 6 and 7 (in the numbering with the cosine objective as eq. 1).
    """
    real_P, imaginary_P = _complex_cosine(left_PD, right_PD)
    # vector_norm has gradient 0 at q = 0, where torch.hypot has NaN.
    modulus_P: Tensor = torch.linalg.vector_norm(torch.stack((real_P, imaginary_P)), dim=0)
    return -modulus_P


def angle_phase(left_PD: Tensor, right_PD: Tensor) -> Tensor:
    """Compute the angle similarity of each pair of rows: its weighted mean phase difference; shape (P,), in [-1, 1].

        similarity = 1 - 2θ̄/π,   θ_h = |arg(z_h·conj(w_h))| ∈ [0, π],   m_h = |z_h||w_h|,   θ̄ = Σ m_h θ_h / Σ m_h

    z and w are the left and the right row as complex numbers (see the module docstring). The weight m_h is the size of
    complex column h of the product, so the phase of a small, noisy number counts little. Identical rows give 1, opposite
    rows -1, and a rotation of all columns by φ gives 1 - 2φ/π. So the similarity is linear in the angle. Unlike the slope
    of the cosine, its slope does not vanish for almost parallel or opposite rows, which is the motivation of the paper.
    Swapping the two rows has no effect.

    If θ_h is exactly 0 or π, or m_h = 0, the gradient through θ_h is 0. If Σ m = 0, for example because a row is zero,
    similarity and gradient are 0.

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
"""Name of an angle form (setting `angle_form`) → similarity function."""


def _complex_halves(x_PD: Tensor) -> tuple[Tensor, Tensor]:
    """Read rows (P, D) as complex numbers: return the real parts (P, D/2), the first half, and the imaginary parts.

    Raises:
        ValueError: for an odd number of columns.
    """
    columns = x_PD.shape[1]
    if columns % 2:
        raise ValueError(
            f"angle: expected an even number of columns, half real and half imaginary parts; got {columns}. "
            "Use an encoder with an even embedding size, or set angle_weight to 0."
        )
    return x_PD[:, : columns // 2], x_PD[:, columns // 2 :]


def _complex_cosine(left_PD: Tensor, right_PD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the real part (P,) and the imaginary part (P,) of the complex cosine q = Σ z·conj(w) / (‖z‖‖w‖).

    z and w are the left and the right row, read as complex numbers. The real part is the cosine of the two rows.
    """
    a_PH, b_PH = _complex_halves(unit(left_PD))
    c_PH, d_PH = _complex_halves(unit(right_PD))
    return (a_PH * c_PH + b_PH * d_PH).sum(dim=1), (b_PH * c_PH - a_PH * d_PH).sum(dim=1)

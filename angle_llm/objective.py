"""The fields of the AnglE objective, declared once: `losses.AngleObjective` computes it, `settings.objective` sets it.

This module imports neither torch nor settings. The text below a field is its `--help` text.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

POSITIVE_ABOVE = 0.5
"""Two texts with a score (0 to 1) above this value count as a positive pair, such as a question and its answer."""


@dataclass(frozen=True)
class ObjectiveFields:
    """Weights, temperatures and variants of the terms of the training loss (the AnglE objective).

    Raises:
        ValueError: for a weight or temperature out of range.
    """

    PREFIX: ClassVar[str] = ""
    """Prefix of the setting names in error messages, such as `objective.`."""

    cosine_weight: float = 0.0
    """Weight of the cosine ranking term (CoSENT)."""
    in_batch_weight: float = 1.0
    """Weight of the in-batch contrastive term."""
    angle_weight: float = 0.0
    """Weight of the angle ranking term."""
    regression_weight: float = 0.0
    """Weight of the regression term: squared difference of cosine and score (SBERT). For graded pairs."""
    cosine_temperature: float = 0.05
    """Divides the cosine differences of the cosine ranking term."""
    in_batch_temperature: float = 0.05
    """Divides the cosines of the in-batch term and, with kl_weight or teacher_similarity_weight, the student's cosines."""
    angle_temperature: float = 0.05
    """Divides the angle differences of the angle ranking term (published runs: 1.0)."""
    angle_form: Literal["phase", "reference", "paper"] = "phase"
    """How the angle of a pair is computed: phase, reference (as in angle-emb) or paper (equations 6 and 7 of AnglE)."""
    contrastive_form: Literal["symmetric", "forward"] = "symmetric"
    """Which texts the in-batch term contrasts. forward: left texts against all right texts. symmetric: every text with a
    positive against all texts."""
    hardness_strength: float = 0.0
    """Weights each in-batch negative by exp(strength · cosine), so that near negatives count more. 0: equal weights.
    Negatives from your data have weight 1. LLaVE uses 9."""
    kl_weight: float = 0.0
    """Weight of the KL divergence between teacher and student scores of a query's texts. For data of
    format group with teacher scores."""
    teacher_temperature: float = 0.05
    """Divides teacher scores and cosines: 0.05 for cosines, about 1 for logits of a reranker."""
    teacher_vector_weight: float = 0.0
    """Weight of 1 - cosine between the embedding and the teacher's vector of a text. If widths differ, the first
    dimensions of the wider vector are compared."""
    teacher_similarity_weight: float = 0.0
    """Weight of the KL divergence between the teacher's and the student's cosines of each text to the other texts of the
    batch (RankCSE). Widths can differ."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if (name.endswith("_weight") or name == "hardness_strength") and not 0 <= value < math.inf:
                raise ValueError(f"{self.PREFIX}{name}: expected a finite number of 0 or more, got {value!r}.")
            if name.endswith("_temperature") and not 0 < value < math.inf:
                raise ValueError(
                    f"{self.PREFIX}{name}: expected a finite number greater than 0, as similarities are divided by it; got "
                    f"{value!r}. angle-emb's tau multiplies instead: its tau 20 is a temperature of 0.05."
                )

"""Objectives: from an embedding matrix and a relation on its rows to a number. They have never met a model."""

from angle_llm.losses.angle import AngleObjective, ObjectiveValue
from angle_llm.losses.contrastive import CONTRASTIVE_FORMS, contrastive_loss
from angle_llm.losses.ranking import ranking_loss
from angle_llm.losses.similarity import ANGLE_FORMS, cosine, unit

__all__ = [
    "ANGLE_FORMS",
    "CONTRASTIVE_FORMS",
    "AngleObjective",
    "ObjectiveValue",
    "contrastive_loss",
    "cosine",
    "ranking_loss",
    "unit",
]

"""Losses: from an embedding matrix and a relation of its rows to a scalar. Imports torch only."""

from angle_llm.losses.angle import AngleObjective, ObjectiveValue
from angle_llm.losses.nested import MixedObjective, NestedObjective, Objective, Part
from angle_llm.losses.relation import Relation
from angle_llm.losses.repulsion import FalseNegatives

__all__ = [
    "AngleObjective",
    "FalseNegatives",
    "MixedObjective",
    "NestedObjective",
    "Objective",
    "ObjectiveValue",
    "Part",
    "Relation",
]

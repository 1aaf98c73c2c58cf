"""Loss functions: from a matrix of embeddings, and scored pairs of its rows (`Relation`), to a scalar.

Imports torch only.
"""

from angle_llm.losses.angle import AngleObjective, ObjectiveValue
from angle_llm.losses.negatives import FalseNegatives
from angle_llm.losses.nested import MixedObjective, NestedObjective, Objective, Part
from angle_llm.losses.relation import Relation

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

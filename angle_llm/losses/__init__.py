"""Loss functions: from a matrix of embeddings, and scored pairs of its rows (`Relation`), to a scalar.

Imports torch only.
"""

from angle_llm.losses.angle import AngleObjective
from angle_llm.losses.negatives import FalseNegatives
from angle_llm.losses.nested import MixedObjective, NestedObjective, Part
from angle_llm.losses.relation import Relation
from angle_llm.losses.terms import FunctionTerm, Objective, ObjectiveValue, SumOfTerms, Term

__all__ = [
    "AngleObjective",
    "FalseNegatives",
    "FunctionTerm",
    "MixedObjective",
    "NestedObjective",
    "Objective",
    "ObjectiveValue",
    "Part",
    "Relation",
    "SumOfTerms",
    "Term",
]

"""Loss functions: from a matrix of embeddings, and scored pairs of its rows (`Relation`), to a scalar.

Imports torch only.
"""

from angle_llm.losses.angle import AngleObjective as AngleObjective
from angle_llm.losses.negatives import FalseNegatives as FalseNegatives
from angle_llm.losses.nested import MixedObjective as MixedObjective
from angle_llm.losses.nested import NestedObjective as NestedObjective
from angle_llm.losses.nested import Part as Part
from angle_llm.losses.relation import Relation as Relation
from angle_llm.losses.terms import FunctionTerm as FunctionTerm
from angle_llm.losses.terms import Objective as Objective
from angle_llm.losses.terms import ObjectiveValue as ObjectiveValue
from angle_llm.losses.terms import SumOfTerms as SumOfTerms
from angle_llm.losses.terms import Term as Term

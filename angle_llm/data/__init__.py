"""Training and evaluation data: from files to batches.

sources     what the path of a data or evaluation source means, resolved once to rows
files       rows of one file: a reader class per file type; rows of a BEIR folder
columns     find the column of each field
formats     convert a row to an `Example`
examples    read all examples of a source, with a report of every row
store       keep examples that do not fit in memory on disk
mixture     combine several datasets
order       choose the examples of each batch
batch       unique texts and scored pairs of a batch: `TextBatch`
corpus      read the texts of one column
positives   collect queries with positives and candidates, for mining and scoring
keys        compare texts, exactly or without case, spacing and punctuation
leakage     find repeated and contradicting rows, and rows of evaluation sets
"""

from angle_llm.data.formats import DataError, Example, Group, LabelledText, PositivePair, ScoredPair, Triple

__all__ = ["DataError", "Example", "Group", "LabelledText", "PositivePair", "ScoredPair", "Triple"]

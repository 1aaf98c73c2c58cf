"""Training and evaluation data: from files to batches.

readers   rows of any file, folder, standard input or hub dataset (`file_types`: one class per type of file; `beir`; `rows`)
columns   which column holds which field          formats   what a row means: `Example`
examples  all examples of a source, and a report of every row          store   examples that do not fit memory
mixture   several datasets          order   which examples each batch holds          batch   `TextBatch`
corpus    the texts of one column          keys   equal and near-equal texts
"""

from angle_llm.data.formats import DataError, Example, Group, PositivePair, ScoredPair, Triple

__all__ = ["DataError", "Example", "Group", "PositivePair", "ScoredPair", "Triple"]

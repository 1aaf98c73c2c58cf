"""A batch of training data: unique texts for the encoder, and scored pairs of these texts for the loss.

Shapes: N unique texts, P scored pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from angle_llm.data.formats import Example, Group, LabelledText, pairs_of


@dataclass
class TextBatch:
    """A training batch, for data of every format: N unique texts, and P scored pairs of these texts.

    A text that occurs five times in a batch is one entry of `texts`: it is encoded once and is never its own negative.
    A pair may consist of the same text twice (`left == right`), and the same pair may occur more than once. A text with
    two prompts or two instructions has two entries, for example as a query and as a document, or in two datasets.

    `texts`, `prompts` and `instructions` have N entries; all other fields have P entries.
    """

    texts: list[str]
    """Unique texts, in the order of the rows of the embedding matrix."""
    left: Tensor
    """(P,) int64: index in `texts` of the first text of each pair."""
    right: Tensor
    """(P,) int64: index in `texts` of the second text of each pair."""
    score: Tensor
    """(P,) float32: similarity of each pair, from 0 (unrelated) to 1 (same meaning)."""
    prompts: list[int]
    """Prompt of each text, as an index into the list of prompts of the training run."""
    instructions: list[str | None]
    """Instruction of each text; None: the default of its prompt."""
    group: Tensor
    """(P,) int64: number of the training example that contains each pair."""
    teacher: Tensor
    """(P,) float32: teacher score of each pair, NaN for a pair without a teacher score."""
    label: Tensor
    """(P,) int64: class number of the text of each pair, -1 for a pair without a class."""

    def __len__(self) -> int:
        """Return N, the number of unique texts."""
        return len(self.texts)

    @classmethod
    def from_examples(cls, examples: Sequence[Example], prompts: Sequence[tuple[int, int]] = ()) -> TextBatch:
        """Create a batch with the unique texts of the examples, in order of first occurrence, and all scored pairs.

        Pairs by type of example, in the order of the examples:

            ScoredPair      (left, right, score)
            PositivePair    (left, right, 1)
            Triple          (anchor, positive, 1), (anchor, negative, 0)
            Group           (query, positive, 1) for each positive, then (query, negative, 0) for each negative
            LabelledText    (text, text, 1), both as a query

        `prompts` has two prompt indices for each example: the prompt of the first text of its pairs (the query) and the
        prompt of the second text (the document). If they are equal, the instruction of an example is used for all its texts,
        unless it has an instruction for documents. Without examples the batch is empty (N = P = 0).

        `group` has the index of the example of each pair, `teacher` its teacher score (NaN without a teacher), and `label`
        the number of its label in order of first occurrence (-1 without a label).
        """
        row_of: dict[tuple[int, str | None, str], int] = {}
        pairs: list[tuple[int, int, float, int]] = []
        teacher: list[float] = []
        class_of: dict[str, int] = {}
        classes: list[int] = []

        def row(prompt: int, instruction: str | None, text: str) -> int:
            return row_of.setdefault((prompt, instruction, text), len(row_of))

        prompts = prompts or [(0, 0)] * len(examples)
        for number, (example, (query_prompt, document_prompt)) in enumerate(zip(examples, prompts, strict=True)):
            pairs_of_example = pairs_of(example)
            query = (query_prompt, example.instruction)
            shared = example.instruction if query_prompt == document_prompt else None
            document = (document_prompt, example.document_instruction or shared)
            label = -1
            if isinstance(example, LabelledText):
                document = query
                label = class_of.setdefault(example.label, len(class_of))
            classes += [label] * len(pairs_of_example)
            for left, right, score in pairs_of_example:
                pairs.append((row(*query, left), row(*document, right), score, number))
            scores = example.scores if isinstance(example, Group) else None
            teacher += [math.nan] * len(pairs_of_example) if scores is None else scores
        left_P, right_P, score_P, group_P = zip(*pairs, strict=True) if pairs else ((), (), (), ())
        return cls(
            texts=[text for _, _, text in row_of],
            left=torch.tensor(left_P, dtype=torch.int64),
            right=torch.tensor(right_P, dtype=torch.int64),
            score=torch.tensor(score_P, dtype=torch.float32),
            prompts=[prompt for prompt, _, _ in row_of],
            instructions=[instruction for _, instruction, _ in row_of],
            group=torch.tensor(group_P, dtype=torch.int64),
            teacher=torch.tensor(teacher, dtype=torch.float32),
            label=torch.tensor(classes, dtype=torch.int64),
        )

"""A batch: a set of unique texts and the relation between them, the input of encoder and loss.

Shapes: N unique texts, P scored pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from angle_llm.data.formats import Example, Group, pairs_of


@dataclass
class TextBatch:
    """N unique texts and P scored pairs of them; every data format is converted to it before encoding.

    A text that occurs five times is one entry of `texts`: it is encoded once and is never its own negative. A pair may
    relate a text to itself (`left == right`), and the same pair may occur more than once. A text under two prompts is
    two entries: as a query and as a document, or in two datasets.

    Fields that describe texts have N rows (`prompts`), fields that describe the relation have P rows (`left`, `right`,
    `score`, `group`, `teacher`).

    Raises:
        ValueError: if the tensors of the relation differ in length, have another dtype or point outside `texts`, and if
            a text occurs twice under one prompt.
    """

    texts: list[str]
    """Unique texts; the position is the row of the embedding matrix."""
    left: Tensor
    """(P,) int64: row of the first text of each pair."""
    right: Tensor
    """(P,) int64: row of the second text of each pair."""
    score: Tensor
    """(P,) float32: similarity of each pair; 1 for the same meaning, 0 for unrelated texts."""
    prompts: list[int] = field(default_factory=list)
    """Number of each text's prompt among the prompts of the run; empty means 0, the prompt of the run, for all."""
    group: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """(P,) int64: number of the example of each pair; empty means that each pair is an example."""
    teacher: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32))
    """(P,) float32: teacher score of each pair, NaN without one; empty means NaN for all."""

    def __post_init__(self) -> None:
        self.prompts = self.prompts or [0] * len(self.texts)
        pairs = len(self.left)
        self.group = self.group if len(self.group) else torch.arange(pairs)
        self.teacher = self.teacher if len(self.teacher) else torch.full((pairs,), torch.nan)
        for name, dtype in (
            ("left", torch.int64), ("right", torch.int64), ("score", torch.float32),
            ("group", torch.int64), ("teacher", torch.float32),
        ):  # fmt: skip
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.shape != (pairs,):
                raise ValueError(
                    f"TextBatch.{name}: expected {dtype} of shape (P,) with P = {pairs} pairs as in `left`, got "
                    f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                )
            if (
                name in ("left", "right")
                and len(tensor)
                and not 0 <= int(tensor.min()) <= int(tensor.max()) < len(self.texts)
            ):
                raise ValueError(f"TextBatch.{name} points outside the {len(self.texts)} texts: {tensor.tolist()}")
        if len(set(zip(self.prompts, self.texts, strict=True))) != len(self.texts):
            raise ValueError("TextBatch.texts must be unique; use TextBatch.from_examples")

    def __len__(self) -> int:
        """Return the number of unique texts, N: the rows that the encoder computes."""
        return len(self.texts)

    @classmethod
    def from_examples(cls, examples: Sequence[Example], prompts: Sequence[tuple[int, int]] = ()) -> TextBatch:
        """Return a batch of examples. Texts are numbered by first occurrence, pairs are in the order of the examples.

        A scored pair gives the pair `(left, right, score)`, a positive pair `(left, right, 1)`, a triple two pairs:
        `(anchor, positive, 1)`, then `(anchor, negative, 0)`, a group the pairs of its query with each positive, then
        with each negative. `prompts` has the prompt numbers of each example: that of queries, the first texts of pairs,
        and that of documents, the second texts. Without examples the batch is empty (N = P = 0), for a rank without a
        share of the batch.
        """
        row_of: dict[tuple[int, str], int] = {}
        pairs: list[tuple[int, int, float, int]] = []
        teacher: list[float] = []
        for number, (example, sides) in enumerate(zip(examples, prompts or [(0, 0)] * len(examples), strict=True)):
            own = pairs_of(example)
            for left, right, score in own:
                rows = [row_of.setdefault(key, len(row_of)) for key in zip(sides, (left, right), strict=True)]
                pairs.append((rows[0], rows[1], score, number))
            scores = example.scores if isinstance(example, Group) else None
            teacher += [math.nan] * len(own) if scores is None else scores
        left_P, right_P, score_P, group_P = zip(*pairs, strict=True) if pairs else ((), (), (), ())
        return cls(
            texts=[text for _, text in row_of],
            left=torch.tensor(left_P, dtype=torch.int64),
            right=torch.tensor(right_P, dtype=torch.int64),
            score=torch.tensor(score_P, dtype=torch.float32),
            prompts=[prompt for prompt, _ in row_of],
            group=torch.tensor(group_P, dtype=torch.int64),
            teacher=torch.tensor(teacher, dtype=torch.float32),
        )

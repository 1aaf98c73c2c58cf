"""A batch is a set of texts and a relation on it; an epoch is a list of batches.

Shapes: N unique texts, P scored pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from angle_llm.data.draws import Draws
from angle_llm.data.formats import Example, PositivePair, ScoredPair, Triple


@dataclass
class TextBatch:
    """N unique texts and P scored pairs of them, the form every data format takes before it is encoded.

    A text that occurs five times is one entry of `texts`: it is encoded once and cannot become its own negative.
    A pair may relate a text to itself (`left == right`), and the same pair may occur more than once. A text under two
    prompts is two entries.

    Raises `ValueError` when the three tensors differ in length, have another type, or point outside `texts`, and when a
    text is listed twice under one prompt.
    """

    texts: list[str]
    """The unique texts; position = row of the embedding matrix."""
    left: Tensor
    """(P,) int64: row of the first text of each pair."""
    right: Tensor
    """(P,) int64: row of the second text of each pair."""
    score: Tensor
    """(P,) float32: how similar the pair is; 1 for the same meaning, 0 for another."""
    prompts: list[int] = field(default_factory=list)
    """For each text the number of its prompt among those of the run; empty stands for all 0, the run's own."""

    def __post_init__(self) -> None:
        self.prompts = self.prompts or [0] * len(self.texts)
        needed = {"left": torch.int64, "right": torch.int64, "score": torch.float32}
        for name, dtype in needed.items():
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.shape != (len(self.left),):
                raise ValueError(
                    f"TextBatch.{name} must be {dtype} of shape (P,) with P = {len(self.left)} pairs as in `left`; "
                    f"it is {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
        if len(set(zip(self.prompts, self.texts, strict=True))) != len(self.texts):
            raise ValueError("TextBatch.texts must be unique; build it with TextBatch.from_examples")
        for name in ("left", "right"):
            rows: Tensor = getattr(self, name)
            if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < len(self.texts)):
                raise ValueError(f"TextBatch.{name} points outside the {len(self.texts)} texts: {rows.tolist()}")

    def __len__(self) -> int:
        """Number of unique texts, N: the rows the encoder will compute."""
        return len(self.texts)

    @classmethod
    def from_examples(cls, examples: Sequence[Example], prompts: Sequence[int] = ()) -> TextBatch:
        """Put examples on one set of texts, numbered by first appearance, relations in the order of the examples; `prompts`
        has the number of each example's prompt.

        A scored pair gives one relation `(left, right, score)`, a positive pair `(left, right, 1)`, a triple two:
        `(anchor, positive, 1)`, then `(anchor, negative, 0)`. No example gives an empty batch (N = P = 0), so that a
        process whose share of a batch is empty can still take part in it.
        """
        row_of: dict[tuple[int, str], int] = {}
        left: list[int] = []
        right: list[int] = []
        score: list[float] = []

        def relate(prompt: int, first: str, second: str, similarity: float) -> None:
            left.append(row_of.setdefault((prompt, first), len(row_of)))
            right.append(row_of.setdefault((prompt, second), len(row_of)))
            score.append(similarity)

        for example, prompt in zip(examples, prompts or [0] * len(examples), strict=True):
            if isinstance(example, ScoredPair):
                relate(prompt, example.left, example.right, example.score)
            elif isinstance(example, PositivePair):
                relate(prompt, example.left, example.right, 1.0)
            elif isinstance(example, Triple):
                relate(prompt, example.anchor, example.positive, 1.0)
                relate(prompt, example.anchor, example.negative, 0.0)
            else:
                raise TypeError(
                    f"needed ScoredPair, PositivePair or Triple; came {type(example).__name__}: {example!r}"
                )
        return cls(
            texts=[text for _, text in row_of],
            left=torch.tensor(left, dtype=torch.int64),
            right=torch.tensor(right, dtype=torch.int64),
            score=torch.tensor(score, dtype=torch.float32),
            prompts=[prompt for prompt, _ in row_of],
        )


def batch_indices(n: int, batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
    """Cut a shuffled `range(n)` into batches: every index once, the last batch holds what remains.

    A function of its arguments alone, so a resumed run and every process of a distributed one see the same batches; see
    `random_order`.

    Raises `ValueError` for a negative `n`, `seed` or `epoch`, an `epoch` of 2**64 or more, or a `batch_size` below 1.
    """
    if n < 0 or batch_size < 1:
        raise ValueError(f"batch_indices needs n >= 0 and batch_size >= 1; came n={n}, batch_size={batch_size}")
    if seed < 0 or not 0 <= epoch < 2**64:
        raise ValueError(f"batch_indices needs seed >= 0 and 0 <= epoch < 2**64; came seed={seed}, epoch={epoch}")
    return list(Draws.of_one(n).epoch(epoch, batch_size, seed=seed)) if n else []

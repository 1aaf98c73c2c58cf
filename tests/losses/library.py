"""Losses of sentence-transformers on given vectors."""

import importlib
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast


def library_loss(name: str) -> Any:
    """Return a loss class of sentence-transformers."""
    return getattr(importlib.import_module("sentence_transformers.sentence_transformer.losses"), name)


class GivenVectors(nn.Sequential):
    """A stub of a SentenceTransformer: the embeddings are a field of the features."""

    max_seq_length = 8
    device = torch.device("cpu")

    def __init__(self, field: str = "vectors", width: int = 0) -> None:
        super().__init__(nn.Identity())
        self.field, self.width = field, width
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))

    def get_embedding_dimension(self) -> int:
        return self.width

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features[self.field]}


def columns(rows_ND: Tensor, count: int, guide_NG: Tensor | None = None) -> list[dict[str, Tensor]]:
    """Features of `count` columns of a batch: the first rows are the anchors, then positives, then negatives."""
    guides = [None] * count if guide_NG is None else guide_NG.chunk(count)
    made = []
    for vectors, guide in zip(rows_ND.chunk(count), guides, strict=True):
        ids = torch.zeros(len(vectors), 1, dtype=torch.int64)
        made.append({"vectors": vectors, "input_ids": ids} | ({} if guide is None else {"guide": guide}))
    return made


def pairs_of_columns(batch: int, count: int) -> list[tuple[int, int, float]]:
    """The pairs of these rows: of anchor and positive with score 1, of anchor and negative with score 0."""
    return [(row, row + number * batch, float(number == 1)) for row in range(batch) for number in range(1, count)]

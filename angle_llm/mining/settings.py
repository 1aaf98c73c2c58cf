"""What `angle-llm data mine` is told."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from angle_llm.config import DataSource, SettingsError


@dataclass(frozen=True)
class MineSettings:
    """Which pairs need negatives, which encoder finds them, and which of those it finds are taken."""

    pairs: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PAIRS")]
    """Positive pairs, scored pairs or triples: a file, data set folder or hub id, as training takes them."""
    model: str
    """The encoder that finds them: a saved directory, a model folder, a hub id, a .gguf file, or package:NAME/path/inside."""
    out: Path
    """The .jsonl file of triples to write; its report lies beside it, NAME.report.json. Given again, a command that was
    killed goes on."""

    format: str = "auto"
    """What a row means: scored_pair, positive_pair, triple, nli_pairs, nli_triples; auto tells by the columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our field names to the file's column names, where they differ and are not recognised."""
    score_range: tuple[float, float] | None = None
    """The scale of the scores: unlike, alike."""
    where: dict[str, str] = field(default_factory=dict)
    """Keep only the rows whose columns equal these values."""
    limit: int | None = None
    """Mine for at most this many examples."""
    shuffle_seed: int | None = None
    """Shuffle the examples with this seed before the limit is taken. None: the file's order."""
    positive_above: float = 0.8
    """Scored pairs above this score (rescaled to 0..1) are positive pairs."""

    corpus: Path | None = None
    """Where negatives come from: text, .jsonl, .csv, .tsv, .parquet, or a folder of them. None: the positives of all pairs."""
    column: str | None = None
    """The column of the corpus that holds the text. None: `text`, `sentence`, or the only one."""

    ranks: tuple[int, int | None] = (10, 50)
    """First and last rank that is looked at, 1 the candidate nearest to the anchor. The nearest are often no negatives but
    paraphrases nobody has labelled. None as the last: to the farthest."""
    margin: float | None = None
    """A negative's cosine must be below its positive's by more than this. None: not asked."""
    relative_margin: float | None = 0.05
    """A negative's cosine must be below its positive's by more than this share of it: 0.05 is below 95 % of it, the best of
    the positive-aware rules in NV-Retriever (arXiv 2407.15831). None: not asked."""
    max_score: float | None = None
    """A negative's cosine is this at most."""
    min_score: float | None = None
    """A negative's cosine is this at least."""
    same_cluster: Literal["refuse", "allow"] = "refuse"
    """Texts that positive pairs link, over any number of steps, are a cluster: whether a negative may come from its anchor's."""
    judge: str | None = None
    """A second encoder that must agree: by its cosines too the negative is farther from the anchor than the positive."""

    negatives: int = 1
    """Negatives for a pair; each makes a triple."""
    sampling: Literal["top", "random"] = "top"
    """Of those left: the nearest, or some at random."""
    seed: int = 42
    """Of `--sampling random`."""
    short: Literal["keep", "drop"] = "keep"
    """Pairs with fewer negatives left than asked for: keep what there is, or leave them out."""

    prompt: str | None = None
    """Prompt name or YAML file. None: as saved with the model, or the usual one of its kind."""
    pooling: str | None = None
    """How token states become a vector. None: as saved with the model, or the usual one of its kind."""
    max_length: int | None = None
    """Tokens of a worded text. None: as saved with the model, or the usual one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number type of the weights."""

    index: Literal["exact", "faiss"] = "exact"
    """exact: every candidate, block by block. faiss: faiss looks for the nearest in float32, and they are ranked as exact
    does."""
    vectors: Path | None = None
    """A folder that keeps the vectors, for other settings with the same texts. None: they go when the triples are written."""
    shard_rows: int = 8192
    """Texts embedded at a time; at most so many are embedded again after a kill. Another number is another job: it may change
    the last digit of a cosine."""
    block_pairs: int = 1024
    """Pairs mined at a time; at most so many are mined again after a kill."""
    block_candidates: int = 8192
    """Candidates held in memory at a time."""

    def __post_init__(self) -> None:
        first, last = self.ranks
        if first < 1 or (last is not None and last < first):
            raise SettingsError(
                f"--ranks names the first and the last rank, from 1, as in --ranks 10 50; came {first} {last}."
            )
        counts = ("negatives", "shard_rows", "block_pairs", "block_candidates")
        for name, least in [*((name, 1) for name in counts), ("seed", 0)]:
            if getattr(self, name) < least:
                raise SettingsError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}.")
        if last is not None and self.negatives > last - first + 1:
            raise SettingsError(
                f"--negatives {self.negatives} are more than the {last - first + 1} ranks of --ranks {first} {last} hold."
            )
        for name in ("positive_above", "margin", "relative_margin", "max_score", "min_score"):
            if (bound := getattr(self, name)) is not None and not math.isfinite(bound):
                raise SettingsError(f"--{name.replace('_', '-')} must be finite, got {bound}.")
        if self.out.suffix != ".jsonl":
            raise SettingsError(f"--out names the file of triples, NAME.jsonl; came {self.out}.")
        if self.column is not None and self.corpus is None:
            raise SettingsError("--column is one of --corpus, and none is given. For the pairs: --columns.")

    @property
    def source(self) -> DataSource:
        """The pairs as training would be told of them."""
        return DataSource(
            path=self.pairs,
            format=self.format,
            columns=self.columns,
            score_range=self.score_range,
            where=dict(self.where),
            limit=self.limit,
            shuffle_seed=self.shuffle_seed,
        )

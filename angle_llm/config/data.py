"""Where training rows come from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from angle_llm.config.checked import Checked, require


@dataclass(frozen=True)
class DataSource(Checked):
    """Where training rows come from and how they are read."""

    path: str = "starter:nli_triples.jsonl.gz"
    """A JSONL, JSON, CSV, TSV (each also .gz) or Parquet file, `starter:NAME` for a file that comes with the package, a
    data set folder, or a Hugging Face data set id; only an id reaches the network. FOLDER@NAME is the file FOLDER/NAME.* and
    ID@SPLIT a split of a data set. A relative path is looked for in the working directory, then in ANGLE_LLM_DATA. For
    training also several, with their weights: stsb@train:2.0,my.jsonl; a YAML file may name `sets` in its place, each with
    settings of its own."""
    format: str = "auto"
    """What a row means: scored_pair, positive_pair, triple, nli_pairs, nli_triples; auto tells by the columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our field names to the file's column names, where they differ and are not recognised."""
    split: str = "train"
    """Split of a hub data set."""
    revision: str | None = None
    """Commit, tag or branch of a hub data set."""
    name: str | None = None
    """Configuration of a hub data set."""
    score_range: tuple[float, float] | None = None
    """Score of two texts that have nothing in common and of two that mean the same; scores are rescaled to 0..1. A reversed
    range, such as 1 0, is for labels whose small numbers mean alike."""
    where: dict[str, str | int | float] = field(default_factory=dict)
    """Keep only the rows whose columns equal these values."""
    limit: int | None = None
    """Use at most this many examples."""
    shuffle_seed: int | None = None
    """Shuffle the examples with this seed before the limit is taken; none keeps the file's order."""
    on_bad_row: Literal["raise", "skip"] = "raise"
    """raise: the first bad row stops the run, with its file and line. skip: bad rows are left out and counted."""
    max_bad_ratio: float = 0.1
    """With skip: a larger share of bad rows than this stops the run all the same."""


_MOST = 1000


@dataclass(frozen=True)
class MixedSet(DataSource):
    """One set of a mixture."""

    weight: float = 1.0
    """How often each of its examples comes in an epoch: 2 is twice, 0.5 every other epoch."""
    prompt: str | None = None
    """A prompt's name or YAML file for this set's texts. None: the run's."""
    objective: dict[str, float | str] = field(default_factory=dict)
    """Settings of the objective that are otherwise for this set, such as {in_batch_weight: 0, cosine_weight: 1}. In a mixed
    batch, sets with another objective or prompt are no negatives of its texts."""

    def __post_init__(self) -> None:
        right = 0 < self.weight <= _MOST
        require(
            right,
            f"the weight of {self.path} must be above 0 and at most {_MOST}, got {self.weight}. Leave a set of weight 0 away.",
        )


@dataclass(frozen=True)
class DataSettings(DataSource):
    """What is trained on: one source, or a mixture of several sets."""

    sets: list[MixedSet] = field(default_factory=list)
    """The sets of a mixture, each with its own format, range, prompt, weight and objective; `path` and what follows it
    belongs to one source and is refused then. In a YAML file; single values can be changed as --data.sets.0.weight 2."""
    temperature: float = 1.0
    """Shares of the sets in an epoch: a set of n examples gets weight · n^(1/temperature), and the epoch stays as long as
    with 1. Large temperatures make all sets equally large."""
    batches: Literal["mixed", "by_set"] = "mixed"
    """mixed: a batch holds examples of all sets. by_set: each batch is of one set, so that texts of one kind are each
    other's negatives."""

    def __post_init__(self) -> None:
        temperature = self.temperature
        require(0 < temperature < math.inf, f"data.temperature must be a positive number, got {temperature}.")
        for item in fields(DataSource) if self.sets else ():
            value = getattr(self, item.name)
            require(
                value == getattr(DataSource(), item.name),
                f"data.sets is given, and data.{item.name} is {value!r}: each set has its own. Set it there (on the command "
                f"line: --data.sets.0.{item.name.replace('_', '-')}), or leave data.sets away.",
            )

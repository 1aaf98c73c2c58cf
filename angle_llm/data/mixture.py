"""The examples of a training run: a dataset, or a mixture of several datasets with weights.

    "stsb@train:2.0,nli@train,my.jsonl" ──► datasets with weight, prompt and objective ──► `Mixture`

A `Mixture` numbers the examples of all datasets consecutively. Its `Draws` define how many examples an epoch takes from
each dataset, and in which order.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from angle_llm.data.examples import DataReport, load_examples
from angle_llm.data.formats import DataError, Example, LabelledText
from angle_llm.data.order import Draws, Order
from angle_llm.data.sources import MEMORY, STARTER, Source, find_path, without_extension
from angle_llm.data.store import digest_of
from angle_llm.settings.train import MAX_WEIGHT, DataSettings, DataSource, MixedSet

_WEIGHT = re.compile(r"(?P<path>.+):(?P<weight>\d+(\.\d*)?|\.\d+)")


@dataclass(frozen=True)
class LoadedSet:
    """One dataset of a training mixture: its examples, and the settings that apply to this dataset only."""

    name: str
    """Name of the dataset in logs: the end of its path, unique among the datasets of the run."""
    examples: Sequence[Example]
    weight: float = 1.0
    """Number of times that an epoch contains an example of this dataset: 2 is twice, 0.5 is every second epoch."""
    prompt: str | dict[str, str] | None = None
    """Prompt for the texts of this dataset; None: the prompt of the training run."""
    objective: dict[str, float | str] = field(default_factory=dict)
    """Objective (loss) settings that differ for this dataset: name → value."""
    report: DataReport | None = None
    """Counts of used, dropped and bad rows; None if the examples were not read from a file."""


class Mixture(Sequence[Example]):
    """Sequence of the examples of one or several datasets; `draws` defines which examples an epoch uses.

    Args:
        sets: The datasets. Indices count the examples of the first dataset, then the examples of the second dataset,
            and so on.
        by_set: Whether all examples of a batch come from the same dataset.
    """

    def __init__(self, sets: Sequence[LoadedSet], *, by_set: bool = False) -> None:
        self.sets = list(sets)
        self.draws = Draws.of(
            [len(dataset.examples) for dataset in sets],
            [dataset.weight for dataset in sets],
            by_set=by_set,
            classes=[classes_of(dataset.examples) for dataset in sets],
        )
        self._ends: list[int] = np.cumsum(self.draws.sizes).tolist()

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Mixture:
        """Wrap examples in a `Mixture` with a single dataset; return a `Mixture` unchanged."""
        return examples if isinstance(examples, Mixture) else cls([LoadedSet("data", examples)])

    def without_classes(self) -> Mixture:
        """Return a mixture whose batches do not depend on classes, for losses that do not read them."""
        mixture = copy(self)
        mixture.draws = replace(self.draws, classes=(None,) * len(self.sets))
        return mixture

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]  # no slices
        number = self.set_of(index)
        return self.sets[number].examples[index - (self._ends[number - 1] if number else 0)]

    def set_of(self, index: int) -> int:
        """Return the number (from 0) of the dataset that contains the example with this index."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return bisect_right(self._ends, index)

    @property
    def digest(self) -> str:
        """Hash of the examples of all datasets, their order in epochs, and the prompts of the datasets."""
        plain = self.draws == Draws((len(self),), (len(self),)) and self.sets[0].prompt is None
        how = "" if plain else f" {self.draws} {[dataset.prompt for dataset in self.sets]}"
        return "+".join(digest_of(dataset.examples) for dataset in self.sets) + how

    def summary(self) -> Iterator[str]:
        """Yield lines to print: for each dataset its row counts, and which fraction of an epoch it supplies."""
        total = sum(self.draws.counts)
        for dataset, count in zip(self.sets, self.draws.counts, strict=True):
            if dataset.report is not None:
                yield dataset.report.summary()
            if len(self.sets) > 1:
                prompt = {"prompt": dataset.prompt} if dataset.prompt else {}
                more = "".join(f", {name} {value}" for name, value in (prompt | dataset.objective).items())
                yield f"  as {dataset.name}: {count:,} of an epoch's {total:,} examples ({count / total:.1%}){more}"


def classes_of(examples: Sequence[Example]) -> Order | None:
    """Return the class number of each labelled text, in order of first occurrence; None for other examples."""
    if not isinstance(next(iter(examples), None), LabelledText):
        return None
    number: dict[str, int] = {}
    labels = (example.label for example in examples if isinstance(example, LabelledText))
    return np.array([number.setdefault(label, len(number)) for label in labels], dtype=np.int64)


def load_mixture(settings: DataSettings, cache: Path | None = None, in_memory: Mapping[str, Source] = {}) -> Mixture:
    """Read all datasets in the settings, and combine them to a `Mixture`; `cache` is described at `load_examples`.

    `in_memory` has the sources of paths that name rows in memory.

    Raises:
        DataError: for a dataset that cannot be read, or a dataset that is named twice.
    """
    sets = sets_of(settings)
    loaded = []
    for name, mixed_set in zip(_names([mixed_set.path for mixed_set in sets]), sets, strict=True):
        source = DataSource(**{item.name: getattr(mixed_set, item.name) for item in fields(DataSource)})
        data = load_examples(source, cache, in_memory.get(mixed_set.path))
        loaded.append(
            LoadedSet(name, data.examples, mixed_set.weight, mixed_set.prompt, mixed_set.objective, data.report)
        )
    return Mixture(loaded, by_set=settings.batches == "by_set")


def sets_of(settings: DataSettings) -> list[MixedSet]:
    """Return the settings of each training dataset.

    These are `settings.sets` if the list is not empty. Otherwise the datasets listed in `settings.path` get all other
    settings in common.

    Raises:
        DataError: for a dataset that is named twice, or an empty name in a list.
    """
    sets = list(settings.sets)
    if not sets:
        common = {item.name: getattr(settings, item.name) for item in fields(DataSource)}
        sets = [MixedSet(**common | {"path": path}, weight=weight) for path, weight in _listed(settings.path)]
    for number, mixed_set in enumerate(sets):
        if replace(mixed_set, weight=1) in [replace(earlier, weight=1) for earlier in sets[:number]]:
            raise DataError(
                f"{mixed_set.path} is named twice; to use its examples twice, set a weight, such as {mixed_set.path}:2"
            )
    return sets


def _listed(path: str) -> list[tuple[str, float]]:
    """Parse a list of dataset paths with weights, such as `a:2.0,b`; return (path, weight) for each dataset.

    The default weight is 1. An existing file whose name contains a comma, or ends like a weight, is a single path.
    """
    with suppress(OSError):  # a list can be longer than a file name can be
        if find_path(path).exists():
            return [(path, 1.0)]
    listed = []
    for part in map(str.strip, path.split(",")):
        weighted = None if find_path(part).exists() else _WEIGHT.fullmatch(part)
        weight = float(weighted["weight"]) if weighted else 1.0
        if not 0 < weight <= MAX_WEIGHT:
            raise DataError(f"{part}: expected a weight above 0 and at most {MAX_WEIGHT} after the colon")
        listed.append((weighted["path"] if weighted else part, weight))
    if len(listed) > 1 and not all(name for name, _ in listed):
        raise DataError(f"{path!r}: expected dataset paths separated by commas, got an empty path; remove the comma")
    return listed


def _names(paths: Sequence[str]) -> list[str]:
    """Return a short, distinct name for each path: the file name without extension; a repeated name gets #2, #3, …"""
    names: list[str] = []
    for path in paths:
        short = without_extension(path).removeprefix(STARTER).removeprefix(MEMORY) or path
        same = sum(name == short or name.startswith(f"{short}#") for name in names)
        names.append(f"{short}#{same + 1}" if same else short)
    return names

"""The examples of a run: those of one set, or of several, as settings mix them.

stsb@train:2.0,nli@train,my.jsonl ──► sets, each with weight, prompt, objective ──► examples numbered through, and `Draws`
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from pathlib import Path

from angle_llm.config import DataSettings, DataSource, MixedSet
from angle_llm.data.draws import Draws
from angle_llm.data.formats import DataError, Example
from angle_llm.data.places import KINDS, below_data
from angle_llm.data.sources import DataReport, load_examples
from angle_llm.data.store import ByNumber, ExampleStore, Selected, digest_of

_WEIGHT = re.compile(r"(?P<path>.+):(?P<weight>\d+(\.\d*)?|\.\d+)")


@dataclass(frozen=True)
class LoadedSet:
    """A set of a mixture, read."""

    name: str
    """As logs name it: the end of its path."""
    examples: Sequence[Example]
    weight: float = 1.0
    prompt: str | None = None
    objective: dict[str, float | str] = field(default_factory=dict)
    report: DataReport | None = None


class Mixture(ByNumber):
    """The examples of one or several sets, numbered through."""

    def __init__(self, sets: Sequence[LoadedSet], temperature: float = 1.0, *, by_set: bool = False) -> None:
        self.sets = list(sets)
        self.draws = Draws.of(
            [len(each.examples) for each in sets], [each.weight for each in sets], temperature, by_set=by_set
        )
        """How an epoch draws from them."""
        self._ends = list(accumulate(len(each.examples) for each in sets))

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Mixture:
        """One set of plain examples; a mixture as it is."""
        return examples if isinstance(examples, Mixture) else cls([LoadedSet("data", examples)])

    def __len__(self) -> int:
        return self._ends[-1]

    def _at(self, number: int) -> Example:
        which = self.set_of(number)
        return self.sets[which].examples[number - (self._ends[which - 1] if which else 0)]

    def set_of(self, index: int) -> int:
        """The number of the set that an example belongs to."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return bisect_right(self._ends, index)

    @property
    def in_memory(self) -> bool:
        """Whether no set is kept on disk."""
        return not any(isinstance(each.examples, ExampleStore | Selected) for each in self.sets)

    @property
    def digest(self) -> str:
        """Equal for equal examples, drawn and worded alike; of one set that is drawn whole, its examples' own."""
        plain = Draws.of_one(len(self)) == self.draws and self.sets[0].prompt is None
        how = "" if plain else f" {self.draws} {[each.prompt for each in self.sets]}"
        return "+".join(digest_of(each.examples) for each in self.sets) + how

    def summary(self) -> Iterator[str]:
        """What became of every row of each set, and its share of an epoch."""
        drawn = sum(self.draws.counts)
        for each, count in zip(self.sets, self.draws.counts, strict=True):
            if each.report is not None:
                yield each.report.summary()
            if len(self.sets) > 1:
                own = "".join(
                    f", {what}" for what in (each.prompt and f"prompt {each.prompt}", _told(each.objective)) if what
                )
                yield f"  as {each.name}: {count:,} of an epoch's {drawn:,} examples ({count / drawn:.1%}){own}"


def load_mixture(settings: DataSettings, cache: Path | None = None) -> Mixture:
    """Reads the sets that settings name; `cache` is where large ones are kept, see `load_examples`.

    Raises `DataError` for a set that cannot be read, or is named twice.
    """
    sets = sets_of(settings)
    names = _names([each.path for each in sets])
    loaded = []
    for name, each in zip(names, sets, strict=True):
        data = load_examples(_source(each), cache)
        loaded.append(LoadedSet(name, data.examples, each.weight, each.prompt, each.objective, data.report))
    return Mixture(loaded, settings.temperature, by_set=settings.batches == "by_set")


def sets_of(settings: DataSettings) -> list[MixedSet]:
    """The sets that settings name, one at least.

    Raises `DataError` for a set that is named twice: its weight says how often it comes.
    """
    if settings.sets:
        sets = list(settings.sets)
    else:
        common = {item.name: getattr(settings, item.name) for item in fields(DataSource)}
        sets = [MixedSet(**common | {"path": path}, weight=weight) for path, weight in _listed(settings.path)]
    for number, each in enumerate(sets):
        if replace(each, weight=1) in [replace(other, weight=1) for other in sets[:number]]:
            raise DataError(f"{each.path} is named twice; a weight, as in {each.path}:2, has its examples come twice")
    return sets


def _listed(path: str) -> list[tuple[str, float]]:
    """`a:2.0,b` as paths and weights; a file whose name has a comma or ends like a weight is itself."""
    if below_data(path).exists():
        return [(path, 1.0)]
    listed = []
    for part in map(str.strip, path.split(",") if "," in path else [path]):
        found = None if below_data(part).exists() else _WEIGHT.fullmatch(part)
        listed.append((found["path"], float(found["weight"])) if found else (part, 1.0))
    if len(listed) > 1 and not all(name for name, _ in listed):
        raise DataError(f"{path!r} lists sets with a comma, and one of them has no name")
    return listed


def _source(one: MixedSet) -> DataSource:
    return DataSource(**{item.name: getattr(one, item.name) for item in fields(DataSource)})


def _names(paths: Sequence[str]) -> list[str]:
    """Short and different."""
    names: list[str] = []
    for path in paths:
        short = Path(path).name.removesuffix(".gz")
        for kind in KINDS:
            short = short.removesuffix(kind)
        short = short.removeprefix("starter:") or path
        same = sum(name == short or name.startswith(f"{short}#") for name in names)
        names.append(f"{short}#{same + 1}" if same else short)
    return names


def _told(objective: dict[str, float | str]) -> str:
    return ", ".join(f"{name} {value if isinstance(value, str) else f'{value:g}'}" for name, value in objective.items())

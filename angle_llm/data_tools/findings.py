"""What the keys of files tell: repeated rows, pairs labelled two ways, pairs of evaluation sets.

| finding | trouble? | what it is |
|---|---|---|
| unreadable | trouble | the file, or its columns, cannot be understood; or no example is left |
| rejected | trouble | rows that cannot be used; a strict run stops at the first |
| classes | trouble | a score column that holds 0, 1 and 2, which are probably the classes of NLI |
| contradiction | trouble | a pair of texts with labels more than half the scale apart, in rows of any of the files |
| unlike itself | trouble | two texts that are the same, labelled as unlike |
| contamination | trouble | rows whose pair is in an evaluation set |
| untokenisable | trouble | texts of which the tokenizer leaves nothing; training stops at them |
| label not read | note | positive pairs, beside a column of numbers that may be their label |
| scale | note | scores outside 0 to 1, and the scale they were read on here |
| one label | note | all scores are the same: the terms that compare scores teach nothing |
| duplicate, near duplicate | note | rows that say what an earlier row says, to the letter or but for case, spacing, punctuation |
| across files | note | the same, of a row in an earlier file |
| other label | note | a pair with labels that differ by half the scale or less |
| same texts | note | two texts that are the same, labelled as alike |
| sentences | note | texts of 4 words and more that are in an evaluation set |
| truncated | note | texts that lose their end at max_length |
| columns, rows | note | what is not used, and rows dropped for a documented reason, in the report itself |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from angle_llm.data_tools.evaluation_sets import EvaluationSet
from angle_llm.data_tools.ledger import Ledger

PLACES = 5
"""Places that a finding names."""
APART = 0.5
"""Labels of one pair that differ by more than this, on the scale 0 to 1, contradict each other."""


@dataclass(frozen=True)
class Finding:
    """Something to know of a file; `trouble` makes the exit code 1."""

    kind: str
    trouble: bool
    count: int
    text: str
    places: list[str] = field(default_factory=list)
    """The first few."""


@dataclass(frozen=True)
class Marks:
    """What is found of one file by comparing keys: the findings, and why rows would be taken out of it, by line."""

    findings: list[Finding]
    quarantined: dict[int, str]


def compare(names: Sequence[str], ledgers: Sequence[Ledger], sets: Sequence[Sequence[EvaluationSet]]) -> list[Marks]:
    """Compares the rows of all files with one another, and those of each with its evaluation sets. One `Marks` a file."""
    marks = [Marks([], {}) for _ in names]
    rows = _Stacked.of(ledgers, line="line", exact="exact", near="near")
    relations = _Stacked.of(
        ledgers, line="relation_line", key="relation", score="relation_score", used="relation_used", self="to_itself"
    )
    _contradictions(names, relations, marks)
    _to_themselves(relations, marks)
    for index, own_sets in enumerate(sets):
        _contamination(ledgers[index], own_sets, marks[index])
    _duplicates(names, rows, marks)
    return marks


@dataclass(frozen=True)
class _Stacked:
    """Columns of all files, one under the other."""

    file: NDArray[np.int64]
    columns: dict[str, NDArray[Any]]

    @classmethod
    def of(cls, ledgers: Sequence[Ledger], **names: str) -> _Stacked:
        columns = {
            short: np.concatenate([np.asarray(getattr(ledger, name)) for ledger in ledgers] or [np.empty(0)])
            for short, name in names.items()
        }
        sizes = [len(getattr(ledger, names["line"])) for ledger in ledgers]
        return cls(np.repeat(np.arange(len(ledgers)), sizes), columns)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def firsts(self, name: str) -> NDArray[np.int64]:
        """For each entry, the place of the first entry with the same key."""
        _, first, inverse = np.unique(self[name], return_index=True, return_inverse=True)
        return first[inverse].astype(np.int64)


def _add(
    marks: Marks, kind: str, trouble: bool, lines: NDArray[Any], text: str, reason: str = "", others: Sequence[str] = ()
) -> None:
    """A finding over rows; `others` are places that belong to them, one each, `reason` takes them out of the file."""
    distinct, index = np.unique(lines, return_index=True)
    if not len(distinct):
        return
    places = [
        f"{line}{f' and {others[at]}' if others else ''}"
        for line, at in zip(distinct[:PLACES].tolist(), index[:PLACES].tolist(), strict=True)
    ]
    marks.findings.append(Finding(kind, trouble, len(distinct), f"{len(distinct):,} {text}", places))
    if reason:
        for line in distinct.tolist():
            marks.quarantined.setdefault(int(line), reason)


def _contradictions(names: Sequence[str], relations: _Stacked, marks: Sequence[Marks]) -> None:
    if not len(relations.file):
        return
    _, group = np.unique(relations["key"], return_inverse=True)
    low, high = np.full(group.max() + 1, np.inf), np.full(group.max() + 1, -np.inf)
    np.minimum.at(low, group, relations["score"])
    np.maximum.at(high, group, relations["score"])
    # Of 1, 0.5 and 0.2, only 1 and 0.2 contradict each other.
    distance = np.maximum(high[group] - relations["score"], relations["score"] - low[group])
    used = relations["used"] == 1
    for index, mark in enumerate(marks):
        mine = (relations.file == index) & used
        opposed = mine & (distance > APART + 1e-9)
        others = [_other(names, relations, group, at, index) for at in np.flatnonzero(opposed)[: 20 * PLACES].tolist()]
        lines = relations["line"][opposed]
        _add(
            mark, "contradiction", True, lines, "rows hold a pair that another row labels the opposite way",
            "contradiction", others + [""] * (len(lines) - len(others)),
        )  # fmt: skip
        differs = mine & (distance > 0) & ~opposed
        _add(
            mark, "other label", False, relations["line"][differs], "rows hold a pair that another row labels otherwise"
        )


def _other(names: Sequence[str], relations: _Stacked, group: NDArray[Any], at: int, file: int) -> str:
    """Where the row stands that says the opposite of the one at `at`."""
    same = np.flatnonzero(group == group[at])
    scores = relations["score"][same]
    farthest = same[int(np.argmax(np.abs(scores - relations["score"][at])))]
    line, where = int(relations["line"][farthest]), int(relations.file[farthest])
    return str(line) if where == file else f"{names[where]}:{line}"


def _to_themselves(relations: _Stacked, marks: Sequence[Marks]) -> None:
    for index, mark in enumerate(marks):
        mine = (relations.file == index) & (relations["used"] == 1) & (relations["self"] == 1)
        unlike = mine & (relations["score"] < APART)
        _add(
            mark, "unlike itself", True, relations["line"][unlike],
            "rows label two texts as unlike that are the same (but for case, spacing, punctuation)", "unlike itself",
        )  # fmt: skip
        _add(
            mark, "same texts", False, relations["line"][mine & ~unlike], "rows pair a text with itself",
        )  # fmt: skip


def _contamination(ledger: Ledger, sets: Sequence[EvaluationSet], marks: Marks) -> None:
    keys, lines = np.asarray(ledger.relation), np.asarray(ledger.relation_line)
    used = np.asarray(ledger.relation_used) == 1
    sentences = np.fromiter(ledger.sentences, dtype=np.uint64, count=len(ledger.sentences))
    for each in sets:
        found = lines[np.isin(keys, each.pairs) & used] if len(keys) else lines
        _add(marks, "contamination", True, found, f"rows hold a pair of {each.name}", f"its pair is in {each.name}")
    met = {each.name: int(np.isin(sentences, each.sentences).sum()) for each in sets}
    if listed := ", ".join(f"{name} {count:,}" for name, count in met.items() if count):
        text = f"so many of the texts of 4 words and more are sentences of {listed}"
        marks.findings.append(Finding("sentences", False, sum(met.values()), text))


def _duplicates(names: Sequence[str], rows: _Stacked, marks: Sequence[Marks]) -> None:
    own = np.arange(len(rows.file))
    exact, near = rows.firsts("exact"), rows.firsts("near")
    for index, mark in enumerate(marks):
        mine = rows.file == index
        within = rows.file[near] == index
        for kind, first, which, text in (
            ("duplicate", exact, mine & (exact != own) & within, "rows repeat an earlier row to the letter, pairs in any order"),
            (
                "near duplicate", near, mine & (near != own) & (exact == own) & within,
                "rows repeat an earlier row but for case, spacing, punctuation",
            ),
            ("across files", near, mine & ~within, "rows repeat a row of an earlier file (case, spacing, punctuation aside)"),
        ):  # fmt: skip
            earlier = [
                f"{'' if rows.file[at] == index else names[rows.file[at]] + ':'}{int(rows['line'][at])}"
                for at in first[which][: 20 * PLACES].tolist()
            ]
            lines = rows["line"][which]
            _add(mark, kind, False, lines, text, kind, earlier + [""] * (len(lines) - len(earlier)))

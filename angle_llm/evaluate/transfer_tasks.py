"""Transfer tasks: where their files lie, and how they become labelled examples in splits.

SentEval's seven classification tasks (Conneau & Kiela 2018). Their text is tokenised, some of it lower-cased, as
SentEval gives it to an encoder; the published figures are on that text. Two layouts are read below a data directory:

* this project's: `transfer/mr.tsv` and so on, with a header line (also `.jsonl`, each also `.gz`);
* SentEval's own download (its `data` or `data/downstream`): `MR/rt-polarity.pos`, `SST/binary/sentiment-train`, …

Words are parted by single spaces, as SentEval's splitting and joining leaves them. An empty line is no example and is
left out; SentEval counts four in CR and three in MPQA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from angle_llm.config import unknown_name
from angle_llm.data.formats import DataError
from angle_llm.data.readers import open_rows
from angle_llm.evaluate.sts_tasks import text_of

Protocol = Literal["cross_validation", "train_test", "train_dev_test"]
Split = Literal["all", "train", "dev", "test"]


class LabelledText(NamedTuple):
    """One or two texts (`second` is "" for one) and their class."""

    text: str
    label: str
    second: str = ""


@dataclass(frozen=True)
class TransferTask:
    """Labelled examples in splits, and the protocol by which they are measured.

    The splits are "all" for cross-validation, "train" and "test" (and "dev") for the others. `positive` is the class
    that F1 is about, None where only accuracy is told. `official` is the number of examples in all splits as published.
    """

    name: str
    label: str
    protocol: Protocol
    splits: dict[Split, tuple[LabelledText, ...]]
    source: str
    positive: str | None = None
    official: int | None = None


_Reader = Callable[[Path], Iterator[LabelledText]]


@dataclass(frozen=True)
class _Spec:
    """Where a task lies: per split, file stem and columns (text, label, second text), or SentEval's files and
    reader."""

    label: str
    protocol: Protocol
    own: dict[Split, str]
    columns: tuple[str, ...]
    senteval: dict[Split, tuple[str, ...]]
    reader: _Reader
    official: int
    positive: str | None = None


def _one_class(label: str) -> _Reader:
    """Every line is a text of the class."""
    return lambda path: (LabelledText(text, label) for _, text in _lines(path, "latin-1"))


def _by_ending(path: Path) -> Iterator[LabelledText]:
    """The file's ending tells the class: `.pos` and `subj.objective` hold class 1, as in SentEval."""
    return _one_class("1" if path.suffix in {".pos", ".objective"} else "0")(path)


def _sst(path: Path) -> Iterator[LabelledText]:
    for number, line in _lines(path, "utf-8"):
        text, tab, label = line.rpartition("\t")
        if not tab or label not in {"0", "1"} or not text.strip():
            raise ValueError(f"{path}:{number}: a text, a tab and 0 or 1 are needed, found {line!r}.")
        yield LabelledText(text.strip(), label)


def _trec(path: Path) -> Iterator[LabelledText]:
    for number, line in _lines(path, "latin-1"):
        label, colon, rest = line.partition(":")
        text = rest.partition(" ")[2].strip()
        if not colon or not text:
            raise ValueError(f"{path}:{number}: COARSE:fine and a question are needed, found {line!r}.")
        yield LabelledText(text, label)


def _mrpc(path: Path) -> Iterator[LabelledText]:
    for number, line in _lines(path, "utf-8"):
        cells = line.split("\t")
        if len(cells) != 5:
            raise ValueError(f"{path}:{number}: five columns are needed, found {len(cells)}.")
        if cells[0] in {"0", "1"}:
            yield LabelledText(cells[3].strip(), cells[0], cells[4].strip())
        elif number > 1:
            raise ValueError(f"{path}:{number}: the first column must be 0 or 1, found {cells[0]!r}.")


_TEXT = ("text", "label")
_SPECS: dict[str, _Spec] = {
    "mr": _Spec(
        "MR", "cross_validation", {"all": "transfer/mr"}, _TEXT,
        {"all": ("MR/rt-polarity.pos", "MR/rt-polarity.neg")}, _by_ending, 10662,
    ),
    "cr": _Spec(
        "CR", "cross_validation", {"all": "transfer/cr"}, _TEXT,
        {"all": ("CR/custrev.pos", "CR/custrev.neg")}, _by_ending, 3775,
    ),
    "subj": _Spec(
        "SUBJ", "cross_validation", {"all": "transfer/subj"}, _TEXT,
        {"all": ("SUBJ/subj.objective", "SUBJ/subj.subjective")}, _by_ending, 10000,
    ),
    "mpqa": _Spec(
        "MPQA", "cross_validation", {"all": "transfer/mpqa"}, _TEXT,
        {"all": ("MPQA/mpqa.pos", "MPQA/mpqa.neg")}, _by_ending, 10606,
    ),
    "sst2": _Spec(
        "SST2", "train_dev_test",
        {"train": "transfer/sst2.train", "dev": "transfer/sst2.dev", "test": "transfer/sst2.test"}, _TEXT,
        {
            "train": ("SST/binary/sentiment-train",),
            "dev": ("SST/binary/sentiment-dev",),
            "test": ("SST/binary/sentiment-test",),
        },
        _sst, 67349 + 872 + 1821,
    ),
    "trec": _Spec(
        "TREC", "train_test", {"train": "transfer/trec.train", "test": "transfer/trec.test"}, ("text", "coarse"),
        {"train": ("TREC/train_5500.label",), "test": ("TREC/TREC_10.label",)}, _trec, 5452 + 500,
    ),
    "mrpc": _Spec(
        "MRPC", "train_test", {"train": "mrpc/train", "test": "mrpc/test"}, ("sentence1", "label", "sentence2"),
        {"train": ("MRPC/msr_paraphrase_train.txt",), "test": ("MRPC/msr_paraphrase_test.txt",)}, _mrpc, 4076 + 1725,
        positive="1",
    ),
}  # fmt: skip

TRANSFER_TASKS = tuple(_SPECS)
"""The seven tasks of the published tables, in their column order."""

_EXTENSIONS = (".tsv", ".jsonl", ".tsv.gz", ".jsonl.gz")


def available_transfer_tasks(data_dir: str | Path) -> list[str]:
    """Names of the tasks all of whose files are below `data_dir`, in either layout."""
    root = _existing(data_dir)
    return [name for name, spec in _SPECS.items() if _own_files(root, spec) or _senteval_files(root, spec)]


def read_transfer_task(data_dir: str | Path, name: str) -> TransferTask:
    """One task from the files below `data_dir`; this project's layout comes first where both are there.

    Raises `ValueError` for an unknown name or a malformed file, `FileNotFoundError` naming what was looked for.
    """
    if name not in _SPECS:
        raise ValueError(unknown_name("transfer task", name, TRANSFER_TASKS))
    root, spec = _existing(data_dir), _SPECS[name]
    if files := _own_files(root, spec):
        splits = {split: tuple(_own(path, spec.columns)) for split, [path] in files.items()}
    elif files := _senteval_files(root, spec):
        splits = {split: tuple(row for path in paths for row in spec.reader(path)) for split, paths in files.items()}
    else:
        own = ", ".join(f"{stem}.tsv" for stem in spec.own.values())
        theirs = ", ".join(file for paths in spec.senteval.values() for file in paths)
        present = ", ".join(available_transfer_tasks(root)) or "none"
        raise FileNotFoundError(
            f"task {name!r} needs, below {root}, {own} (or .jsonl, or with .gz), or SentEval's {theirs}. Transfer tasks "
            f"found there: {present}. Add the files or choose among those."
        )
    source = ", ".join(str(path) for paths in files.values() for path in paths)
    empty = [split for split, rows in splits.items() if not rows]
    if empty:
        raise ValueError(f"{source}: no examples in {', '.join(empty)}.")
    spaced = {split: tuple(map(_spaced, rows)) for split, rows in splits.items()}
    return TransferTask(name, spec.label, spec.protocol, spaced, source, spec.positive, spec.official)


def texts_of(rows: Iterable[LabelledText]) -> Iterator[str]:
    """Every text of the examples, repeats included."""
    for row in rows:
        yield row.text
        if row.second:
            yield row.second


def _existing(data_dir: str | Path) -> Path:
    root = Path(data_dir).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(
            f"no data directory at {root}. Give the one that holds transfer/, or SentEval's MR/, CR/ …"
        )
    return root


def _own_files(root: Path, spec: _Spec) -> dict[Split, list[Path]]:
    """The file of each split, or nothing if one is missing."""
    found = {
        split: next((path for ending in _EXTENSIONS if (path := root / (stem + ending)).is_file()), None)
        for split, stem in spec.own.items()
    }
    there = {split: [path] for split, path in found.items() if path is not None}
    return there if len(there) == len(found) else {}


def _senteval_files(root: Path, spec: _Spec) -> dict[Split, list[Path]]:
    base = root / "downstream" if (root / "downstream").is_dir() else root
    files = {split: [base / name for name in names] for split, names in spec.senteval.items()}
    return files if all(path.is_file() for paths in files.values() for path in paths) else {}


def _own(path: Path, columns: tuple[str, ...]) -> Iterator[LabelledText]:
    text, label, *second = columns
    for row in open_rows(path, tables=True).good_rows(columns):
        if row.values.get(label) in (None, ""):
            raise DataError(f"{row.place}: column {label}: expected a class, got none.")
        yield LabelledText(text_of(row, text), str(row.values[label]), text_of(row, second[0]) if second else "")


def _spaced(row: LabelledText) -> LabelledText:
    return row._replace(text=" ".join(row.text.split()), second=" ".join(row.second.split()))


def _lines(path: Path, encoding: str) -> Iterator[tuple[int, str]]:
    """(number from 1, line) without the empty lines."""
    with path.open(encoding=encoding, newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line.strip()

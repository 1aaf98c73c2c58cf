"""Transfer tasks: labelled examples in splits, from files.

SentEval's seven classification tasks (Conneau & Kiela 2018). Their text is tokenised and in part lower-cased, as in
SentEval and published tables. Two layouts are read below a data directory:

* this project's: `transfer/mr.tsv` and so on, with a header line (also `.jsonl`, each also `.gz`);
* SentEval's own download (its `data` or `data/downstream`): `MR/rt-polarity.pos`, `SST/binary/sentiment-train`, …

Words are separated by single spaces, as in SentEval. Empty lines are skipped; SentEval counts four in CR and three in
MPQA as examples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
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
    """Labelled examples in splits, and the protocol of the evaluation.

    The splits are "all" for cross-validation, "train" and "test" (and "dev") for the others. `positive` is the class
    of F1, None for accuracy only. `official` is the published number of examples in all splits.
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
    """Files of a task by split: stem and columns (text, label, second text) here, files and reader of SentEval."""

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
    """Class from the file name: `.pos` and `subj.objective` have class 1, as in SentEval."""
    return _one_class("1" if path.suffix in {".pos", ".objective"} else "0")(path)


def _sst(path: Path) -> Iterator[LabelledText]:
    for number, line in _lines(path, "utf-8"):
        text, tab, label = line.rpartition("\t")
        if not tab or label not in {"0", "1"} or not text.strip():
            raise ValueError(f"{path}:{number}: expected a text, a tab and 0 or 1, got {line!r}.")
        yield LabelledText(text.strip(), label)


def _trec(path: Path) -> Iterator[LabelledText]:
    for number, line in _lines(path, "latin-1"):
        label, colon, rest = line.partition(":")
        text = rest.partition(" ")[2].strip()
        if not colon or not text:
            raise ValueError(f"{path}:{number}: expected COARSE:fine and a question, got {line!r}.")
        yield LabelledText(text, label)


def _mrpc(path: Path) -> Iterator[LabelledText]:
    for number, line in _lines(path, "utf-8"):
        cells = line.split("\t")
        if len(cells) != 5:
            raise ValueError(f"{path}:{number}: expected five columns, got {len(cells)}.")
        if cells[0] in {"0", "1"}:
            yield LabelledText(cells[3].strip(), cells[0], cells[4].strip())
        elif number > 1:
            raise ValueError(f"{path}:{number}: expected 0 or 1 in the first column, got {cells[0]!r}.")


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

_PUBLISHED: dict[str, tuple[float, ...]] = {
    "sup-SimCSE-RoBERTa-large, w/ MLM": (88.45, 92.53, 95.19, 90.58, 93.30, 93.80, 77.74, 90.23),
    "sup-SimCSE-RoBERTa-base": (84.92, 92.00, 94.11, 89.82, 91.27, 88.80, 75.65, 88.08),
    "SBERT-base": (83.64, 89.43, 94.39, 89.86, 88.96, 89.60, 76.00, 87.41),
    "sup-SimCSE-BERT-base, w/ MLM": (82.68, 88.88, 94.52, 89.82, 88.41, 87.60, 76.12, 86.86),
    "sup-SimCSE-BERT-base": (82.69, 89.25, 94.81, 89.59, 87.31, 88.40, 73.51, 86.51),
    "unsup-SimCSE-BERT-base": (81.18, 86.46, 94.45, 88.88, 85.50, 89.80, 74.43, 85.81),
    "InferSent-GloVe": (81.57, 86.54, 92.50, 90.38, 84.18, 88.20, 75.77, 85.59),
    "Universal Sentence Encoder": (80.09, 85.19, 93.98, 86.70, 86.38, 93.20, 70.14, 85.10),
}
PUBLISHED_TRANSFER = {
    model: (dict(zip(TRANSFER_TASKS, row, strict=False)), row[-1]) for model, row in _PUBLISHED.items()
}
"""Model → accuracies × 100 by task and average as published: Gao et al. (2021), SimCSE (arXiv 2104.08821), table
E.1."""


_EXTENSIONS = (".tsv", ".jsonl", ".tsv.gz", ".jsonl.gz")


def available_transfer_tasks(data_dir: str | Path) -> list[str]:
    """Names of the tasks with all files below `data_dir`, in either layout."""
    root = _existing(data_dir)
    return [name for name, spec in _SPECS.items() if _own_files(root, spec) or _senteval_files(root, spec)]


def read_transfer_task(data_dir: str | Path, name: str) -> TransferTask:
    """A task from files below `data_dir`, this project's layout first.

    Raises `ValueError` for an unknown name or a malformed file, `FileNotFoundError` with the expected files.
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
            f"task {name!r}: expected below {root}: {own} (or .jsonl, or with .gz), or SentEval's {theirs}. Tasks in this "
            f"directory: {present}."
        )
    source = ", ".join(str(path) for paths in files.values() for path in paths)
    empty = [split for split, rows in splits.items() if not rows]
    if empty:
        raise ValueError(f"{source}: no examples in {', '.join(empty)}.")
    spaced = {split: tuple(map(_spaced, rows)) for split, rows in splits.items()}
    return TransferTask(name, spec.label, spec.protocol, spaced, source, spec.positive, spec.official)


def texts_of(rows: Iterable[LabelledText]) -> Iterator[str]:
    """All texts of the examples, repeats included."""
    for row in rows:
        yield row.text
        if row.second:
            yield row.second


def repeated_examples(task: TransferTask) -> int:
    """Number of test examples with the text (the pair of texts, in any order) of a training or dev example.

    In cross-validation every example is tested, so all examples that share a text count.
    """
    if task.protocol == "cross_validation":
        counts = Counter(map(_key, task.splits["all"]))
        return sum(count for count in counts.values() if count > 1)
    seen = {_key(row) for split, rows in task.splits.items() if split != "test" for row in rows}
    return sum(_key(row) in seen for row in task.splits["test"])


def without_repeated(task: TransferTask) -> TransferTask:
    """The task without test texts in training: in cross-validation the first example of each text, else train without
    the texts of dev and test, and dev without those of test."""
    if task.protocol == "cross_validation":
        first: dict[tuple[str, ...], LabelledText] = {}
        for row in task.splits["all"]:
            first.setdefault(_key(row), row)
        return replace(task, splits={"all": tuple(first.values())})
    seen: set[tuple[str, ...]] = set()
    splits = dict(task.splits)
    for split in ("test", "dev", "train"):
        if split in splits:
            splits[split] = tuple(row for row in task.splits[split] if split == "test" or _key(row) not in seen)
            seen |= {_key(row) for row in task.splits[split]}
    return replace(task, splits=splits)


def _key(row: LabelledText) -> tuple[str, ...]:
    return tuple(sorted((row.text, row.second)))


def _existing(data_dir: str | Path) -> Path:
    root = Path(data_dir).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(
            f"--data-dir: no directory at {root}. Expected a directory with transfer/, or SentEval's MR/, CR/ …"
        )
    return root


def _own_files(root: Path, spec: _Spec) -> dict[Split, list[Path]]:
    """The file of each split, or an empty dict if one is missing."""
    found = {
        split: next((path for ending in _EXTENSIONS if (path := root / (stem + ending)).is_file()), None)
        for split, stem in spec.own.items()
    }
    existing = {split: [path] for split, path in found.items() if path is not None}
    return existing if len(existing) == len(found) else {}


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

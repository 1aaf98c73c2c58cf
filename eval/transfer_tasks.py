"""Transfer tasks: labelled examples of SentEval's seven classification tasks (Conneau & Kiela 2018), and their protocols.

A data directory has one of two layouts:

* this project's layout: `transfer/mr.tsv` and so on, with a header line (also `.jsonl`, both also `.gz`);
* SentEval's download (its `data` or `data/downstream`, or the folder `senteval` that `transfer.py --download` writes):
  `MR/rt-polarity.pos`, `SST/binary/sentiment-train`, …
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from senteval import SENTEVAL_FILES, LabelledText, Split, read_senteval, read_table

from angle_llm.evaluate.results import PublishedRow
from angle_llm.evaluate.sts_tasks import (
    Layout,
    data_file,
    first_complete,
    is_complete,
    senteval_folder,
)
from angle_llm.settings.parsing import unknown_name

Protocol = Literal["cross_validation", "train_test", "train_dev_test"]


@dataclass(frozen=True)
class TransferTask:
    """A transfer task (text classification on frozen embeddings): labelled examples in splits, evaluation protocol.

    For cross-validation the only split is "all"; otherwise the splits are "train", "test" and perhaps "dev". `label` is
    the name in reports. `positive` is the class for F1; None: accuracy only. `official` is the published number of
    examples in all splits.

    `prepare_task` sets the last three fields. `repeated` is the number of test examples with the text of a training
    example. `dropped` is the number of examples removed for this reason. `sampled` is whether training examples were
    sampled.
    """

    name: str
    label: str
    protocol: Protocol
    splits: dict[Split, tuple[LabelledText, ...]]
    source: str
    positive: str | None = None
    official: int | None = None
    repeated: int = 0
    dropped: int = 0
    sampled: bool = False

    def texts(self) -> Iterator[str]:
        """Return the texts of all examples in all splits; texts can repeat."""
        return (text for rows in self.splits.values() for row in rows for text in (row.text, row.second) if text)


class _TaskDescription(NamedTuple):
    """Protocol of a transfer task, its published number of examples, and its files in this project's layout.

    The files are in the order of the splits. `columns` are the columns of the text, the class and the second text.
    """

    protocol: Protocol
    official: int
    files: tuple[str, ...]
    columns: tuple[str, ...] = ("text", "label")


_TASKS: dict[str, _TaskDescription] = {
    "mr": _TaskDescription("cross_validation", 10662, ("transfer/mr.tsv",)),
    "cr": _TaskDescription("cross_validation", 3775, ("transfer/cr.tsv",)),
    "subj": _TaskDescription("cross_validation", 10000, ("transfer/subj.tsv",)),
    "mpqa": _TaskDescription("cross_validation", 10606, ("transfer/mpqa.tsv",)),
    "sst2": _TaskDescription(
        "train_dev_test",
        67349 + 872 + 1821,
        ("transfer/sst2.train.tsv", "transfer/sst2.dev.tsv", "transfer/sst2.test.tsv"),
    ),
    "trec": _TaskDescription(
        "train_test", 5452 + 500, ("transfer/trec.train.tsv", "transfer/trec.test.tsv"), ("text", "coarse")
    ),
    "mrpc": _TaskDescription(
        "train_test", 4076 + 1725, ("mrpc/train.tsv", "mrpc/test.tsv"), ("sentence1", "label", "sentence2")
    ),
}

TRANSFER_TASKS = tuple(_TASKS)
"""Names of SentEval's seven transfer tasks, in the order of the columns of published tables."""

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
PUBLISHED_TRANSFER = tuple(
    PublishedRow(model, dict(zip(TRANSFER_TASKS, scores, strict=True)), average)
    for model, (*scores, average) in _PUBLISHED.items()
)
"""Published accuracies × 100 on the transfer tasks, from Gao et al. (2021), SimCSE (arXiv 2104.08821), table E.1."""


def available_transfer_tasks(data_dir: str | Path) -> list[str]:
    """Return the names of the transfer tasks whose files all exist in `data_dir`.

    The files can have this project's folder structure or SentEval's.
    """
    return [name for name in TRANSFER_TASKS if any(map(is_complete, _layouts(data_dir, name)))]


def read_transfer_task(data_dir: str | Path, name: str) -> TransferTask:
    """Read a transfer task by name from a data directory with this project's files or SentEval's files.

    If both exist, this project's files are used.

    Raises:
        ValueError: for an unknown name, a malformed file, or a split without examples.
        FileNotFoundError: if files are missing; the message lists them.
    """
    if name not in _TASKS:
        raise ValueError(unknown_name("transfer task", name, TRANSFER_TASKS))
    task, names = _TASKS[name], list(SENTEVAL_FILES[name])
    tables, archive = _layouts(data_dir, name)
    paths = first_complete(name, (tables, archive), available_transfer_tasks(data_dir))
    if paths is tables:
        splits = {split: tuple(read_table(path, task.columns)) for split, path in zip(names, tables, strict=True)}
    else:
        splits = {split: tuple(read_senteval(_archive(data_dir), name, split)) for split in names}
    source = ", ".join(map(str, paths))
    if empty := [split for split, rows in splits.items() if not rows]:
        raise ValueError(f"{source}: no examples in {', '.join(empty)}.")
    positive = "1" if name == "mrpc" else None
    return TransferTask(name, name.upper(), task.protocol, splits, source, positive, task.official)


def _layouts(data_dir: str | Path, name: str) -> tuple[Layout, Layout]:
    """Return the file paths of a transfer task in this project's folder layout, and in SentEval's layout."""
    tables = [data_file(Path(data_dir).expanduser() / file) for file in _TASKS[name].files]
    return tables, [_archive(data_dir) / file for files in SENTEVAL_FILES[name].values() for file in files]


def _archive(data_dir: str | Path) -> Path:
    """Return the folder of SentEval's tasks in a data directory."""
    root = Path(data_dir).expanduser()
    return root / "senteval" if (root / "senteval").is_dir() else senteval_folder(root)


def prepare_task(task: TransferTask, limit: int | None, drop_repeated: bool, seed: int) -> TransferTask:
    """Return the transfer task with repeated test texts counted, and training examples sampled.

    At most `limit` training examples are kept (None: all), by a random sample with `seed`. With `drop_repeated`,
    training examples whose text is also a test text are removed first.
    """
    used = without_repeated(task) if drop_repeated else task
    dropped = sum(len(rows) - len(used.splits[split]) for split, rows in task.splits.items())
    split: Split = "all" if "all" in used.splits else "train"
    rows = used.splits[split]
    sampled = limit is not None and len(rows) > limit
    if sampled:
        kept = np.sort(np.random.default_rng(seed).choice(len(rows), limit, replace=False))
        used = replace(used, splits={**used.splits, split: tuple(rows[index] for index in kept)})
    return replace(used, repeated=repeated_examples(task), dropped=dropped, sampled=sampled)


def repeated_examples(task: TransferTask) -> int:
    """Return the number of test examples whose text is also the text of a training or dev example.

    A pair and the same pair in reverse order are equal. In cross-validation each example is tested, so all examples
    that share their text count.
    """
    if task.protocol == "cross_validation":
        counts = Counter(map(_key, task.splits["all"]))
        return sum(count for count in counts.values() if count > 1)
    seen = {_key(row) for split, rows in task.splits.items() if split != "test" for row in rows}
    return sum(_key(row) in seen for row in task.splits["test"])


def without_repeated(task: TransferTask) -> TransferTask:
    """Return the transfer task without training examples whose text is also a test text.

    In cross-validation, only the first example of each text is kept. Otherwise the texts of dev and test are removed
    from train, and the texts of test from dev.
    """
    if task.protocol == "cross_validation":
        first: dict[tuple[str, ...], LabelledText] = {}
        for row in task.splits["all"]:
            first.setdefault(_key(row), row)
        return replace(task, splits={"all": tuple(first.values())})
    splits = dict(task.splits)
    seen = {_key(row) for row in splits["test"]}
    for split in ("dev", "train"):
        if split in splits:
            splits[split] = tuple(row for row in task.splits[split] if _key(row) not in seen)
            seen |= {_key(row) for row in task.splits[split]}
    return replace(task, splits=splits)


def _key(row: LabelledText) -> tuple[str, ...]:
    """Return the texts of an example in sorted order, so that a pair and its reverse are equal."""
    return tuple(sorted((row.text, row.second)))

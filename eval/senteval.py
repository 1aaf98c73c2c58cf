"""Read the labelled examples of SentEval's seven transfer tasks (text classification) from the files of its archive.

The text is tokenised and in part lower-cased, as in SentEval (Conneau & Kiela 2018) and published tables. Words are
separated by single spaces, as in SentEval. Empty lines are skipped; SentEval counts four empty lines in CR and three in
MPQA as examples.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from angle_llm.data.formats import DataError
from angle_llm.data.sources import resolve_source

REPOSITORY, COMMIT = "princeton-nlp/datasets-for-simcse", "e145e8bb659b2aa2669f32ef79cb4cdef6c58fef"
"""Data set of the Hugging Face hub with SentEval's files in senteval.tar (89.8 MB)."""
Split = Literal["all", "train", "dev", "test"]


class LabelledText(NamedTuple):
    """A classification example of a transfer task: a text or a pair of texts, and its class.

    `second` is "" for a single text.
    """

    text: str
    label: str
    second: str = ""


_MRPC_COLUMNS = ("#1 String", "Quality", "#2 String")
SENTEVAL_FILES: dict[str, dict[Split, tuple[str, ...]]] = {
    "mr": {"all": ("MR/rt-polarity.pos", "MR/rt-polarity.neg")},
    "cr": {"all": ("CR/custrev.pos", "CR/custrev.neg")},
    "subj": {"all": ("SUBJ/subj.objective", "SUBJ/subj.subjective")},
    "mpqa": {"all": ("MPQA/mpqa.pos", "MPQA/mpqa.neg")},
    "sst2": {
        "train": ("SST/binary/sentiment-train",),
        "dev": ("SST/binary/sentiment-dev",),
        "test": ("SST/binary/sentiment-test",),
    },
    "trec": {"train": ("TREC/train_5500.label",), "test": ("TREC/TREC_10.label",)},
    "mrpc": {"train": ("MRPC/msr_paraphrase_train.txt",), "test": ("MRPC/msr_paraphrase_test.txt",)},
}
"""Task name → split → files in SentEval's archive, in the order of the columns of published tables.

The only split of a cross-validation is "all"."""
_LINES = {"sst2": r"(?P<text>.*\S.*)\t(?P<label>[01])", "trec": r"(?P<label>[^:]*):[^ ]* (?P<text>.*\S.*)"}
"""Task name → pattern of a line with a class. Lines of other tasks are texts; the files of MRPC are tables."""


def download(folder: Path) -> None:
    """Extract SentEval's files into `folder/senteval`; the archive stays in the cache of huggingface_hub.

    Raises:
        OSError: if the hub refuses the archive; offline, if it is not in the cache.
        tarfile.TarError: for an archive with paths or links that leave the folder.
    """
    from huggingface_hub import hf_hub_download

    path = hf_hub_download(REPOSITORY, "senteval.tar", repo_type="dataset", revision=COMMIT)
    with tarfile.open(path) as archive:
        for member in archive.getmembers():  # with or without a folder around the tasks
            member.name = member.name.removeprefix("./").removeprefix("senteval/")
        archive.extractall(folder / "senteval", filter="data")


def read_senteval(folder: Path, name: str, split: Split) -> Iterator[LabelledText]:
    """Yield the examples of a split of the transfer task `name` from SentEval's archive, extracted to `folder`.

    Raises:
        DataError: for a line in another format, with file and line.
    """
    for file in SENTEVAL_FILES[name][split]:
        yield from read_table(folder / file, _MRPC_COLUMNS) if name == "mrpc" else _read_lines(folder / file, name)


def read_table(path: Path, columns: tuple[str, ...]) -> Iterator[LabelledText]:
    """Yield the examples in a table. `columns` names the columns of the text, the class, and perhaps the second text.

    Raises:
        DataError: for a row without a text or class, with file and line.
    """
    text, label, *second = columns
    for row in resolve_source(path, tables=True).good_rows(columns):
        if row.values[label] in (None, ""):
            raise DataError(f"{row.place}: column {label}: expected a class, got none.")
        yield _example(row.text(text), str(row.values[label]), row.text(second[0]) if second else "")


def _read_lines(path: Path, name: str) -> Iterator[LabelledText]:
    """Yield the examples in a file of the transfer task `name` with an example per line.

    If the lines have no class, the class is 1 for file names that end in `.pos` or `.objective`, else 0.
    """
    label_of_file = "1" if path.suffix in (".pos", ".objective") else "0"
    for row in resolve_source(path, encoding="utf-8" if name == "sst2" else "latin-1").good_rows():
        line = row.values["text"].strip()
        if not line:
            continue
        parts = re.fullmatch(_LINES.get(name, r"(?P<text>.+)"), line)
        if parts is None:
            raise DataError(
                f"{row.place}: expected a line of SentEval's {name.upper()}, a text and a class, got {line!r}."
            )
        yield _example(parts["text"], parts.groupdict().get("label", label_of_file))


def _example(*values: str) -> LabelledText:
    """Return an example with single spaces between words."""
    return LabelledText(*(" ".join(value.split()) for value in values))

"""STS tasks: read scored sentence pairs by task name or from a file.

A year of SemEval is one task; each pair has its sub-task. The text has two variants. Before training, scores of the two
variants differ by up to 3.7 points:

* `raw`: sentences as released. MTEB has this text of STS-B and SICK.
* `senteval`: the same pairs after SentEval's preprocessing (Moses tokenizer; lower-cased except SICK). SimCSE, PromptEOL
  and AnglE report scores on this text, and MTEB has it of STS12 to STS16.

Files in a data directory have this project's layout, or the layout of SentEval's download script:

| task | this project (raw; folders end in `_senteval_tok` for senteval) | SentEval (senteval) |
|---|---|---|
| sts12 … sts16 | sts/sts12.test.tsv | STS/STS12-en-test/STS.input.MSRpar.txt, STS.gs.MSRpar.txt, … |
| stsb, stsb-dev | stsb/test.tsv, stsb/dev.tsv | STS/STSBenchmark/sts-test.csv, sts-dev.csv |
| sickr, sickr-all | sick/test.tsv, … | SICK/SICK_test_annotated.txt, … |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from angle_llm.data.examples import load_examples, open_examples
from angle_llm.data.formats import DataError, ScoredPair
from angle_llm.data.sources import EXTENSIONS, Source, evaluation_source, is_data_name, without_extension
from angle_llm.evaluate.encoding import unique_names
from angle_llm.io import sha256_of_json
from angle_llm.prompts import PLACEHOLDER, InstructedText, PromptTemplate, instructed
from angle_llm.settings.encoder import CommandSource
from angle_llm.settings.parsing import SettingsError, unknown_name
from angle_llm.settings.train import DataSource

TextVariant = Literal["raw", "senteval"]

COLUMNS = ("sentence1", "sentence2", "score")
_SUBTASK_COLUMNS = ("subtask", "genre")

TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
"""Content of sts_tasks.yaml: names, sizes and files of the STS tasks, and published scores."""
TASKS = tuple(TABLE["tasks"])
"""Names of the STS tasks that `read_task` reads."""
PUBLISHED_TASKS = tuple(TABLE["published_tasks"])
"""Names of the seven STS tasks of published tables, in the order of their columns."""

PUBLISHED_EDITS = ("append_full_stop", "double_quotes_to_single", "final_question_mark_to_full_stop")
"""Text edits that `with_published_edits` applies, as names for `PromptTemplate.edits`."""


class StsPair(NamedTuple):
    """Two sentences, their gold similarity score, sub-task or genre ("" for none), and instruction ("" for none)."""

    sentence1: str
    sentence2: str
    score: float
    subtask: str = ""
    instruction: str = ""


def texts_of_pairs(pairs: Sequence[StsPair], *, one_prompt: bool) -> tuple[list[InstructedText], list[InstructedText]]:
    """Return the first and the second sentences; with one prompt for both, an instruction is used for both."""
    firsts = [instructed(pair.sentence1, pair.instruction) for pair in pairs]
    return firsts, [instructed(pair.sentence2, pair.instruction if one_prompt else None) for pair in pairs]


@dataclass(frozen=True)
class StsTask:
    """An STS task: sentence pairs with gold scores, and the variant of their text.

    `variant` is "raw" (sentences as released), "senteval" (SentEval's preprocessing), or "file" for a file of pairs.
    `official_pairs` is the number of pairs in the published task. `edits` is "published" after `with_published_edits`,
    else "". `label` is the name in reports.
    """

    name: str
    label: str
    variant: str
    source: str
    pairs: tuple[StsPair, ...]
    official_pairs: int | None = None
    edits: str = ""

    @property
    def text(self) -> str:
        """Name of the text variant in tables, such as `raw` or `senteval` (SentEval's preprocessing).

        After `with_published_edits`, the name ends in `, edited`.
        """
        return f"{self.variant}, edited" if self.edits else self.variant

    @property
    def digest(self) -> str:
        """Hash of the sentences and instructions; only tasks with equal digests can be compared."""
        return sha256_of_json([(*pair[:2], pair.instruction) for pair in self.pairs])[:16]


def select_tasks(
    names: Sequence[str],
    data_dir: Path | None,
    variant: TextVariant | Literal["auto"],
    columns: Mapping[str, str] = {},
    score_range: tuple[float, float] | None = None,
) -> list[StsTask]:
    """Read STS tasks by name or by path of a pair file; without names, read all available tasks of published tables.

    Files with equal names, or with the name of an STS task, get their folders as prefixes: stsb/test and sick/test.

    The text variant is `raw` (sentences as released) or `senteval` (SentEval's preprocessing). `auto` selects the
    variant with which the directory has more of the tasks, or `raw`. `columns` maps text1, text2, score to columns of all
    files in `names`; `score_range` has their scores of *unrelated* and *same meaning*.

    Raises:
        FileNotFoundError: for a missing directory or file, or if no published task is available.
        ValueError: if a task is selected twice, if `columns` is set without a file, or a task without a directory.
    """
    if (columns or score_range) and not any(map(_is_path, names)):
        raise SettingsError("--columns and --score-range are for files: expected a file in --tasks, got none.")
    if variant != "auto" and data_dir is None:
        raise SettingsError(f"--variant {variant}: expected STS tasks of --data-dir, which is not set.")
    text: TextVariant = "raw" if variant == "auto" else variant
    if variant == "auto" and data_dir is not None:
        wanted = {*(names or PUBLISHED_TASKS)}
        raw, senteval = (len(wanted.intersection(available_tasks(data_dir, text))) for text in get_args(TextVariant))
        text = "senteval" if senteval > raw else "raw"
    if not names:
        present = available_tasks(data_dir, text)
        names = [name for name in PUBLISHED_TASKS if name in present]
        if not names:
            lacks = "" if data_dir and data_dir.is_dir() else ", which is not a folder"
            raise FileNotFoundError(
                f"--data-dir: no STS task with {text} text below {data_dir}{lacks}. `angle-llm data get sts --to FOLDER` writes "
                "the files. Or set --tasks to task names or files."
            )
    files = {name: evaluation_source(name) for name in names if _is_path(name)}
    tasks = [
        read_pairs(files[name], columns, score_range) if name in files else read_task(data_dir, name, text)
        for name in names
    ]
    unique = unique_names([task.name for task in tasks], [files.get(name) for name in names], reserved=TASKS)
    renamed = zip(tasks, unique, strict=True)
    return [task if name == task.name else replace(task, name=name, label=name) for task, name in renamed]


def _is_path(name: str) -> bool:
    """Return whether an entry of `--tasks` is the path of a file of scored pairs, and not the name of an STS task."""
    return any(sign in name for sign in ":/@") or is_data_name(name)


def available_tasks(data_dir: str | Path | None, variant: TextVariant = "raw") -> list[str]:
    """Return the names of the STS tasks whose files all exist in `data_dir`, with the text variant."""
    return [name for name in TASKS if any(map(is_complete, _layouts(data_dir, name, variant)))]


def read_task(data_dir: str | Path | None, task: str, variant: TextVariant = "raw") -> StsTask:
    """Read an STS task by name from a data directory.

    If the directory has files in this project's layout and in SentEval's, this project's files are used.

    Raises:
        ValueError: for an unknown name, without a directory, or for a malformed file.
        FileNotFoundError: if files are missing; the message lists them.
    """
    if task not in TASKS:
        raise ValueError(
            f"{unknown_name('STS task', task, TASKS)} Or give the path of a file with {', '.join(COLUMNS)}."
        )
    layouts = _layouts(data_dir, task, variant)
    paths = first_complete(f"{task} with {variant} text", layouts, available_tasks(data_dir, variant))
    if paths is layouts[0]:
        source = ", ".join(map(str, paths))
        pairs = tuple(pair for path in paths for pair in read_pairs(path).pairs)
    else:
        source = ", ".join(map(str, dict.fromkeys(path.parent for path in paths)))
        tables = [path for path in paths if not path.name.startswith("STS.gs.")]
        pairs = tuple(pair for path in tables for pair in _senteval_pairs(path))
    entry = TABLE["tasks"][task]
    return StsTask(task, entry["label"], variant, source, pairs, entry["official_pairs"])


def read_pairs(
    path: str | Path | Source, columns: Mapping[str, str] = {}, score_range: tuple[float, float] | None = None
) -> StsTask:
    """Read a file of scored sentence pairs as an STS task with the name of the file.

    `path` is a TSV, CSV, JSONL or Parquet file, FOLDER@NAME, or `starter:NAME` (a file of the package). Its columns are
    sentence1, sentence2, score, and optionally subtask or genre. Other column names must be names that training
    recognises, or be given in `columns` (text1, text2, score → column). `score_range` has the score of *unrelated* and the
    score of *same meaning*; only their order is used. None: a larger score means more similar.

    Raises:
        DataError: if the file does not exist or lacks columns; for a malformed row with file and line.
    """
    source = evaluation_source(path)
    if source.kind in ("beir", "mteb"):
        raise DataError(f"{source.text}: expected a file of scored pairs.")
    fields = ("text1", "text2", "score")
    if not columns and set(COLUMNS) <= set(source.columns):
        columns = dict(zip(fields, COLUMNS, strict=True))
    reading = CommandSource(path=source.text, format="scored_pair", columns=dict(columns), score_range=score_range)
    column_of = open_examples(reading, source).columns
    first, second, gold = (column_of[field] for field in fields)
    instruction = column_of.get("instruction")
    group = next((column for column in _SUBTASK_COLUMNS if column in source.columns), None)
    sign = -1 if score_range is not None and score_range[0] > score_range[1] else 1
    pairs = []
    for row in source.good_rows():
        # A column with an empty name, such as the index of pandas, is neither.
        value = None if instruction is None else row.values.get(instruction)
        instructed = row.text(instruction) if instruction and str("" if value is None else value).strip() else ""
        subtask = None if group is None else row.values.get(group)
        name = "" if subtask is None else str(subtask).strip()
        pairs.append(StsPair(row.text(first), row.text(second), sign * row.number(gold), name, instructed))
    if not pairs:
        raise DataError(f"{source.name}: expected scored pairs, got no row.")
    name = without_extension(source.name)
    return StsTask(name, name, "file", source.text, tuple(pairs))


def read_examples(name: str, source: DataSource) -> StsTask:
    """Return an STS task with the scored pairs of a data source, which is read as for training.

    Raises:
        DataError: if the source has no scored pairs.
    """
    examples = load_examples(source).examples
    pairs = tuple(
        StsPair(row.left, row.right, row.score, "", row.instruction or "")
        for row in examples
        if isinstance(row, ScoredPair)
    )
    if not pairs:
        raise DataError(f"{source.path} has no scored pairs. Set its format: scored_pair.")
    return StsTask(name=name, label=name, variant="file", source=source.path, pairs=pairs)


def with_published_edits(task: StsTask) -> StsTask:
    """Edit all sentences of an STS task as the evaluation code of PromptEOL and AnglE does with a prompt."""
    edit = PromptTemplate("published", PLACEHOLDER, edits=PUBLISHED_EDITS).edit
    pairs = tuple(pair._replace(sentence1=edit(pair.sentence1), sentence2=edit(pair.sentence2)) for pair in task.pairs)
    return replace(task, pairs=pairs, edits="published")


def _senteval_pairs(path: Path) -> Iterator[StsPair]:
    """Yield the scored sentence pairs of a SentEval file.

    Words are joined by single spaces, as in SentEval's evaluation.
    """
    is_year = path.name.startswith("STS.input.")
    for pair in read_pairs(path).pairs:
        first, second = (" ".join(sentence.split()) for sentence in pair[:2])
        subtask = path.stem.removeprefix("STS.input.") if is_year else " ".join(pair.subtask.split())
        yield StsPair(first, second, pair.score, subtask)


def _layouts(data_dir: str | Path | None, task: str, variant: TextVariant) -> list[Layout]:
    """Return the file paths of an STS task in each folder layout that can have the text variant, this project's first.

    Text with the variant `senteval` (SentEval's preprocessing) can be in this project's layout or in SentEval's.

    Raises:
        ValueError: without a directory.
    """
    if data_dir is None:
        raise ValueError(
            "--data-dir: expected a directory with the STS tasks, as `angle-llm data get sts --to DATA` writes it. Or set "
            "--tasks to files of scored pairs."
        )
    root = Path(data_dir).expanduser()
    entry = TABLE["tasks"][task]
    files = [file if variant == "raw" else file.replace("/", "_senteval_tok/", 1) for file in entry["files"]]
    layouts: list[Layout] = [[data_file(root / file) for file in files]]
    if variant == "senteval":
        tables = [senteval_folder(root) / entry["senteval"].format(part) for part in entry["parts"]]
        gold = [path.with_name(path.name.replace("STS.input.", "STS.gs.")) for path in tables]
        layouts.append(list(dict.fromkeys([*tables, *gold])))
    return layouts


# --- files and values ---

Layout = Sequence[Path]
"""Paths of all files of an evaluation task, in one folder structure that a data directory can have."""


def senteval_folder(root: Path) -> Path:
    """Return the folder of SentEval's tasks in a data directory: `root/downstream` if it exists, else `root`."""
    return root / "downstream" if (root / "downstream").is_dir() else root


def data_file(path: Path) -> Path:
    """Return the existing file for a table path, which can have another format or compression suffix.

    Example: stsb/test.jsonl.gz for stsb/test.tsv. Without such a file, return the path unchanged.
    """
    others = (path.with_name(path.name.removesuffix(path.suffix) + ending) for ending in EXTENSIONS)
    return next((file for file in (path, *others) if file.is_file()), path)


def is_complete(files: Layout) -> bool:
    """Return whether all files in a list of paths exist."""
    return all(path.is_file() for path in files)


def first_complete(task: str, layouts: Sequence[Layout], present: Sequence[str]) -> Layout:
    """Return the first layout (list of the files of a task) whose files all exist.

    Raises:
        FileNotFoundError: if there is none. The message lists the missing files of `task` and the available tasks
            (`present`).
    """
    complete = next(filter(is_complete, layouts), None)
    if complete is None:
        missing = [str(path) for files in layouts for path in files if not path.is_file()]
        raise FileNotFoundError(
            f"task {task}: missing files: {', '.join(missing)}. Tasks in this directory: {', '.join(present) or 'none'}."
        )
    return complete

"""STS tasks as SentEval's download script lays them out (facebookresearch/SentEval, `get_transfer_data.bash`).

    STS/STS12-en-test/STS.input.MSRpar.txt   two sentences a line, tab-separated (any further columns are not read)
    STS/STS12-en-test/STS.gs.MSRpar.txt      their gold scores, line by line; a blank line: a pair nobody scored
    STS/STSBenchmark/sts-test.csv            tab-separated: genre, file, year, id, score, sentence1, sentence2
    SICK/SICK_test_annotated.txt             a header line; pair_ID, sentence_A, sentence_B, relatedness_score, …

The script tokenises the sentences, and lower-cases those of STS. SentEval splits them at white space and evaluations
join them by single spaces, as here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from angle_llm.evaluate.pairs import StsPair, scored_pair, utf8_lines

YEARS = {
    "sts12": ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"),
    "sts13": ("FNWN", "headlines", "OnWN"),
    "sts14": ("deft-forum", "deft-news", "headlines", "OnWN", "images", "tweet-news"),
    "sts15": ("answers-forums", "answers-students", "belief", "headlines", "images"),
    "sts16": ("answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
}
"""Sub-tasks of each year's test. STS13 goes without SMT, which is not freely given."""


@dataclass(frozen=True)
class _Columns:
    """Where a table's lines hold what; `genre` None: nowhere."""

    sentence1: int
    sentence2: int
    score: int
    genre: int | None
    header: bool


_STSB = _Columns(sentence1=5, sentence2=6, score=4, genre=0, header=False)
_SICK = _Columns(sentence1=1, sentence2=2, score=3, genre=None, header=True)
_SICK_SPLITS = ("SICK_train.txt", "SICK_trial.txt", "SICK_test_annotated.txt")

_TABLES: dict[str, tuple[str, tuple[str, ...], _Columns]] = {
    "stsb": ("STS/STSBenchmark", ("sts-test.csv",), _STSB),
    "stsb-dev": ("STS/STSBenchmark", ("sts-dev.csv",), _STSB),
    "sickr": ("SICK", _SICK_SPLITS[2:], _SICK),
    "sickr-all": ("SICK", _SICK_SPLITS, _SICK),
}


def senteval_files(data_dir: Path, task: str) -> list[Path]:
    """Every file the task needs. `data_dir` holds STS/ and SICK/, or a folder `downstream` that does."""
    root = data_dir / "downstream" if (data_dir / "downstream").is_dir() else data_dir
    if task in YEARS:
        folder = root / "STS" / f"{task.upper()}-en-test"
        return [folder / f"STS.{part}.{subtask}.txt" for subtask in YEARS[task] for part in ("input", "gs")]
    folder_name, files, _ = _TABLES[task]
    return [root / folder_name / file for file in files]


def senteval_pairs(data_dir: Path, task: str) -> tuple[StsPair, ...]:
    """The scored pairs of a task, in the order of its files.

    Raises `ValueError` with file and line for anything malformed, and for STS sentences with capital letters: those are
    not SentEval's text, wherever they lie.
    """
    files = senteval_files(data_dir, task)
    if task in YEARS:
        parts = zip(YEARS[task], files[::2], files[1::2], strict=True)
        pairs = tuple(pair for subtask, texts, gold in parts for pair in _year(subtask, texts, gold))
    else:
        pairs = tuple(pair for file in files for pair in _table(file, _TABLES[task][2]))
    if not pairs:
        raise ValueError(f"no scored pairs in {', '.join(map(str, files))}. Fetch them again.")
    sentences = (sentence for pair in pairs for sentence in (pair.sentence1, pair.sentence2))
    capital = next((sentence for sentence in sentences if sentence != sentence.lower()), None)
    if capital is not None and not task.startswith("sick"):
        raise ValueError(
            f"{files[0].parent} holds {capital!r}, and SentEval's text is lower-cased: these files were not prepared by its "
            "script. Run it, or put the sentences as they are into this project's layout (sts/sts12.test.tsv, …) as raw text."
        )
    return pairs


def _year(subtask: str, texts: Path, gold: Path) -> Iterator[StsPair]:
    lines, scores = list(utf8_lines(texts)), list(utf8_lines(gold))
    if len(lines) != len(scores):
        raise ValueError(
            f"{texts} has {len(lines)} lines and {gold} {len(scores)}; a gold score, or a blank line, is needed for each "
            "line of sentences. Fetch both again."
        )
    for (number, line), (_, score) in zip(lines, scores, strict=True):
        if score.strip():
            where = f"{texts}, line {number}"
            first, second, *_ = _cells(line, 2, where)
            yield scored_pair(first, second, score, subtask, where)


def _table(path: Path, columns: _Columns) -> Iterator[StsPair]:
    needed = max(columns.sentence1, columns.sentence2, columns.score) + 1
    for number, line in utf8_lines(path):
        if not line or (columns.header and number == 1):
            continue
        where = f"{path}, line {number}"
        cells = _cells(line, needed, where)
        genre = "" if columns.genre is None else cells[columns.genre]
        yield scored_pair(cells[columns.sentence1], cells[columns.sentence2], cells[columns.score], genre, where)


def _cells(line: str, needed: int, where: str) -> list[str]:
    cells = [" ".join(cell.split()) for cell in line.split("\t")]
    if len(cells) < needed:
        raise ValueError(f"{where}: {needed} tab-separated columns needed, {len(cells)} found.")
    return cells

"""Retrieval tasks: queries, candidates, and the relevant candidates of each query.

* groups of texts (a file with a column of lists, such as the five captions of an image): the first text of a group is a
  query, the others are its answers, among all other texts of the file;
* BEIR folders: `queries.jsonl` and `corpus.jsonl` (`_id`, `text`, in the corpus optionally `title`), `qrels/test.tsv`
  (`query-id`, `corpus-id`, `score`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from angle_llm.data.formats import DataError
from angle_llm.data.readers import open_rows
from angle_llm.evaluate.task_files import data_file, score_of, text_of

FLICKR30K = "flickr30k"
_FLICKR30K_FILE = "flickr30k/test_2016.jsonl.gz"
GROUP_COLUMNS = ("captions", "texts", "set")


@dataclass(frozen=True)
class RetrievalTask:
    """Queries and candidates.

    `relevant[q]`: index of each candidate that answers query q → its grade, above 0. `itself[q]`: index of the query
    among the candidates, which is skipped for this query; None if it is not a candidate.
    """

    name: str
    label: str
    queries: tuple[str, ...]
    candidates: tuple[str, ...]
    relevant: tuple[Mapping[int, float], ...]
    itself: tuple[int | None, ...]
    source: str


def groups_task(groups: Sequence[Sequence[str]], name: str, *, source: str = "") -> RetrievalTask:
    """Return a task with the first text of each group as query and the others as its answers, among all other texts.

    Groups of one text add a candidate and no query. Raises `ValueError` if no group has two texts.
    """
    starts = [0, *accumulate(map(len, groups))]
    asked = [(group, first) for group, first in zip(groups, starts, strict=False) if len(group) > 1]
    if not asked:
        raise ValueError(f"{source or name}: expected a group of at least two texts, got none.")
    return RetrievalTask(
        name,
        name,
        queries=tuple(group[0] for group, _ in asked),
        candidates=tuple(text for group in groups for text in group),
        relevant=tuple(dict.fromkeys(range(first + 1, first + len(group)), 1.0) for group, first in asked),
        itself=tuple(first for _, first in asked),
        source=source,
    )


def read_groups(path: str | Path, column: str | None = None) -> RetrievalTask:
    """Return a task from a file with a list of texts in each row, in `column`; None: captions, texts or set.

    Raises:
        DataError: with file and line of a malformed row.
    """
    path = Path(path).expanduser()
    groups: list[list[str]] = []
    for row in open_rows(path, tables=True).good_rows(() if column is None else (column,)):
        column = column or next((name for name in GROUP_COLUMNS if name in row.values), None)
        if column is None:
            raise DataError(
                f"{row.place}: expected a column {', '.join(GROUP_COLUMNS)}, found {', '.join(row.values)}. Set --column."
            )
        texts = row.values.get(column)
        if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
            raise DataError(f"{row.place}: column {column}: expected a list of texts, got {texts!r}.")
        groups.append(texts)
    return groups_task(groups, path.name.split(".")[0], source=str(path))


def read_flickr30k(data_dir: str | Path) -> RetrievalTask:
    """Return the test captions of Flickr30k, five for each of 1,000 images, as in AnglE's paper."""
    task = read_groups(Path(data_dir).expanduser() / _FLICKR30K_FILE, "captions")
    return replace(task, name=FLICKR30K, label="Flickr30k test captions")


def read_judged(folder: str | Path, split: str = "test") -> RetrievalTask:
    """Return a task from a BEIR folder. Queries without an answer above 0 are skipped, as in trec_eval.

    A candidate with the id of the query (as in ArguAna and Quora) is skipped for this query.

    Raises:
        DataError: for missing files, malformed rows and unknown ids in judgements.
    """
    root = Path(folder).expanduser()
    corpus = _by_id(root / "corpus.jsonl", titled=True)
    queries = _by_id(root / "queries.jsonl", titled=False)
    place_of = {key: place for place, key in enumerate(corpus)}
    answers: dict[str, dict[int, float]] = {}
    for row in open_rows(root / "qrels" / f"{split}.tsv", tables=True).good_rows(("query-id", "corpus-id", "score")):
        query, candidate = str(row.values["query-id"]), str(row.values["corpus-id"])
        if query not in queries or candidate not in place_of:
            raise DataError(f"{row.place}: no query {query} or no candidate {candidate} in the other files.")
        score = score_of(row, "score")
        if score > 0 and candidate != query:
            answers.setdefault(query, {})[place_of[candidate]] = score
    if not answers:
        raise ValueError(f"{root}: no judgement above 0 in qrels/{split}.tsv.")
    return RetrievalTask(
        root.name,
        root.name,
        queries=tuple(queries[query] for query in answers),
        candidates=tuple(corpus.values()),
        relevant=tuple(answers.values()),
        itself=tuple(place_of.get(query) for query in answers),
        source=str(root),
    )


def _by_id(path: Path, titled: bool) -> dict[str, str]:
    texts: dict[str, str] = {}
    for row in open_rows(data_file(path), tables=True).good_rows(("_id", "text")):
        title = row.values.get("title") if titled else None
        key = str(row.values["_id"])
        if key in texts:
            raise DataError(f"{row.place}: the id {key} occurs twice.")
        texts[key] = f"{title} {row.values.get('text') or ''}".strip() if title else text_of(row, "text")
    return texts

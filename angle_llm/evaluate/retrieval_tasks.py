"""Retrieval tasks: queries, candidates, and the relevant candidates of each query.

* groups of texts (a file with a column of lists, such as the five captions of an image): the first text of a group is a
  query, the others are its answers, among all other texts of the file;
* BEIR folders: `queries.jsonl` and `corpus.jsonl` (`_id`, `text`, in the corpus optionally `title`), `qrels/NAME.tsv`
  (`query-id`, `corpus-id`, `score`);
* pairs of a question and its answer, with more candidates on request.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Literal

from angle_llm.config import DataSource
from angle_llm.data.beir import part_of, read_judgements, read_texts, splits_of
from angle_llm.data.corpus import corpus_texts
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import DataError, Example, pairs_of
from angle_llm.data.readers import find_path, open_rows
from angle_llm.evaluate.task_files import file_folder

FLICKR30K = "flickr30k"
_FLICKR30K_FILE = "flickr30k/test_2016.jsonl.gz"
GROUP_COLUMNS = ("captions", "texts", "set")
POSITIVE_ABOVE = 0.5
"""Of scored pairs with questions and answers, those with a score (0..1) above this belong together."""

OwnDocument = Literal["auto", "skip", "keep"]
"""Treatment of the candidate that has the id of the query."""


@dataclass(frozen=True)
class RetrievalTask:
    """Queries and candidates.

    `relevant[q]`: index of each candidate that answers query q → its grade, above 0. `itself[q]`: index of the query
    among the candidates, which is skipped for this query; None if it is not a candidate. `strict`: whether strict
    accuracy is a metric of the task.
    """

    name: str
    label: str
    queries: tuple[str, ...]
    candidates: tuple[str, ...]
    relevant: tuple[Mapping[int, float], ...]
    itself: tuple[int | None, ...]
    source: str
    query_ids: tuple[str, ...]
    strict: bool = False

    @property
    def digest(self) -> str:
        """A hash of the queries, candidates, grades and skipped candidates: equal for the same task."""
        grades = [sorted(answers.items()) for answers in self.relevant]
        content = json.dumps([self.queries, self.candidates, grades, self.itself])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


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
        query_ids=tuple(str(first) for _, first in asked),
        strict=True,
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


# ---------------------------------------------------------------------------------------------------- BEIR folders


def is_beir(source: str | Path) -> bool:
    """Return whether a source is a BEIR folder, FOLDER@SPLIT of one, or one of its qrels files."""
    root, _ = root_and_split(str(source))
    return root.is_dir() and part_of(root, "corpus.jsonl").is_file()


def read_beir(source: str | Path, *, own: OwnDocument = "auto", binary: bool = False) -> RetrievalTask:
    """Return the task of a BEIR folder (qrels/test.tsv), FOLDER@NAME (qrels/NAME.tsv), or a file FOLDER/qrels/NAME.tsv.

    Queries without an answer above 0 are skipped, as in trec_eval. With `binary`, every answer has grade 1.

    `own` is about the candidate with the id of the query, such as a bug report of which the title is the query. A judged
    answer is never skipped. skip: it is no candidate for this query. keep: it is. auto: it is skipped, unless the ids
    are plain numbers and the texts differ: queries and documents that are counted separately share numbers by chance.

    Raises:
        FileNotFoundError: for missing files; the qrels of the folder are named.
        DataError: for malformed rows and unknown ids in judgements.
    """
    root, split = root_and_split(str(source))
    if root.is_file():
        raise ValueError(
            f"{root} is a file; expected a BEIR folder with corpus.jsonl, queries.jsonl and qrels/. For a file of questions "
            f"and answers, use --pairs {root}."
        )
    judged, found = part_of(root, f"qrels/{split}.tsv"), splits_of(root)
    if not judged.is_file():
        wanted = f"name one: {root}@{found[0]}" if found else "a BEIR folder has corpus.jsonl, queries.jsonl, qrels/"
        raise FileNotFoundError(f"no judgements at {judged}; found {', '.join(found) or 'none'}; {wanted}.")
    corpus, queries = read_texts(part_of(root, "corpus.jsonl")), read_texts(part_of(root, "queries.jsonl"))
    place_of = {key: place for place, key in enumerate(corpus)}
    answers: dict[str, dict[int, float]] = {}
    for query, judgements in read_judgements(judged).items():
        for line, candidate, score in judgements:
            if not queries.get(query) or candidate not in place_of:
                raise DataError(f"{judged}:{line}: no text of query {query}, or no candidate {candidate}.")
            if score > 0:
                answers.setdefault(query, {})[place_of[candidate]] = 1.0 if binary else score
    if not answers:
        raise ValueError(f"{judged}: expected a judgement above 0, got none.")

    def skipped(query: str) -> int | None:
        place = place_of.get(query)
        if place is None or own == "keep" or place in answers[query]:
            return None
        by_chance = query.isdecimal() and corpus[query] != queries[query]
        return None if own == "auto" and by_chance else place

    folder = root.resolve().name  # of `.` too
    name = folder if split == "test" else f"{folder}@{split}"
    return RetrievalTask(
        name,
        name,
        queries=tuple(queries[query] for query in answers),
        candidates=tuple(corpus.values()),
        relevant=tuple(answers.values()),
        itself=tuple(map(skipped, answers)),
        source=str(judged),
        query_ids=tuple(answers),
    )


def task_folder(source: str) -> Path:
    """Return the folder that contains a BEIR folder or a data file."""
    return root_and_split(source)[0].resolve().parent if is_beir(source) else file_folder(source)


def root_and_split(source: str) -> tuple[Path, str]:
    """Return the BEIR folder of a source and the name of its judgements."""
    path = find_path(source)
    if path.is_file() and path.parent.name == "qrels":
        return path.parent.parent, path.name.removesuffix(".gz").removesuffix(".tsv")
    folder, at, split = source.rpartition("@")
    root = path if path.exists() or not at else find_path(folder)
    return root, split if at and root != path else "test"


# ------------------------------------------------------------------------------------------- questions and answers


def read_answers(source: DataSource, corpus: str | Path | None = None, column: str | None = None) -> RetrievalTask:
    """Return a task from a file of positive pairs (or other examples), see `answers_task`.

    `corpus` is a text file or table with more candidates, in `column`.

    Raises:
        DataError: with file and line of a malformed row.
    """
    texts = () if corpus is None else corpus_texts(corpus, column)
    examples = load_examples(source).examples
    name = Path(source.path).name.split(".")[0]
    return answers_task(examples, texts, name, source=source.path)


def answers_task(examples: Iterable[Example], corpus: Iterable[str], name: str, *, source: str = "") -> RetrievalTask:
    """Return a task with the first texts of positive pairs as queries and the second ones as their answers.

    Candidates are all second texts, negatives too, and the corpus; equal texts are one candidate, and equal questions
    one query. A query that is also a candidate is skipped for itself, unless it is its own answer.

    Raises:
        DataError: without a positive pair.
    """
    place_of: dict[str, int] = {}
    answers: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for example in examples:
        for query, text, score in pairs_of(example):
            place = place_of.setdefault(text, len(place_of))
            if score > POSITIVE_ABOVE:
                answers[query][place] = 1.0
    for text in corpus:
        place_of.setdefault(text, len(place_of))
    if not answers:
        raise DataError(f"{source or name}: expected a question with its answer, got none.")
    itself = ((place_of.get(query), relevant) for query, relevant in answers.items())
    return RetrievalTask(
        name,
        name,
        queries=tuple(answers),
        candidates=tuple(place_of),
        relevant=tuple(answers.values()),
        itself=tuple(None if place in relevant else place for place, relevant in itself),
        source=source,
        query_ids=tuple(map(str, range(len(answers)))),
    )

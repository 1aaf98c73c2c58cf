"""Retrieval tasks: read queries, candidates, and the answers of each query from files.

* Groups of texts: a file with a column of lists, such as the five captions of an image. The first text of a group is a
  query, and its later texts are the answers, among all other texts in the file.
* BEIR folders: `queries.jsonl` and `corpus.jsonl` (`_id`, `text`, in the corpus optionally `title`), `qrels/NAME.tsv`
  or .jsonl (`query-id`, `corpus-id`, `score`); or the Parquet files of NanoBEIR.
* Files of questions and their answers, optionally with more candidates.
* Files of texts with a class, compared with each other or with the texts of a reference file.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from angle_llm.data.corpus import corpus_texts
from angle_llm.data.examples import load_examples
from angle_llm.data.files.beir import JudgedQueries
from angle_llm.data.formats import POSITIVE_ABOVE, DataError, LabelledText, pairs_of
from angle_llm.data.sources import Source, evaluation_source, resolve_source, without_extension
from angle_llm.io import sha256_of_json
from angle_llm.prompts import InstructedText, instructed, split_instructions
from angle_llm.settings.train import DataSource

GROUP_COLUMNS = ("captions", "texts", "set")


@dataclass(frozen=True)
class RetrievalTask:
    """A retrieval task: queries, candidate texts, and the graded answers of each query.

    `relevant[q]` maps the index of each candidate that answers query q to its grade, above 0. `itself[q]` is the index
    of the candidate that is skipped for query q, because it is the query itself; None if there is none. `strict` is
    whether the metrics include strict accuracy (1 if the first R candidates are exactly the R answers of the query).

    `unanswered` is the number of judged queries without an answer, which are no queries of the task.

    Only for texts with a class: `classes` has the class of each query, then of each candidate; all are encoded as queries.
    """

    name: str
    queries: tuple[InstructedText, ...]
    candidates: tuple[InstructedText, ...]
    relevant: tuple[Mapping[int, float], ...]
    itself: tuple[int | None, ...]
    source: str
    query_ids: tuple[str, ...]
    strict: bool = False
    classes: tuple[str, ...] = ()
    unanswered: int = 0

    @property
    def digest(self) -> str:
        """Hash of the queries, candidates, grades and skipped candidates; equal tasks have equal digests."""
        grades = [sorted(answers.items()) for answers in self.relevant]
        return sha256_of_json([self.queries, self.candidates, grades, self.itself, *self.classes])[:16]


def read_groups(path: str | Path | Source, column: str | None = None) -> RetrievalTask:
    """Read a retrieval task from a file with a list of texts in each row, such as the captions of an image.

    The first text of a list is a query, and its later texts are the answers. The candidates of a query are all texts in
    the file except the query itself. A list of one text adds a candidate and no query. Without `column`, the lists are
    in the column captions, texts or set.

    Raises:
        DataError: for a malformed row, with file and line.
        ValueError: if no list has two texts.
    """
    # Read the groups.
    source = resolve_source(path, tables=True, in_memory=True)
    groups: list[list[str]] = []
    for row in source.good_rows(() if column is None else (column,)):
        column = column or next((name for name in GROUP_COLUMNS if name in row.values), None)
        if column is None:
            raise DataError(
                f"{row.place}: expected a column {' or '.join(GROUP_COLUMNS)}, got {', '.join(row.values)}. "
                "Set --column."
            )
        texts = row.values.get(column)
        if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
            raise DataError(f"{row.place}: column {column}: expected a list of texts, got {texts!r}.")
        groups.append(texts)
    # Queries: the first texts of groups with at least two texts.
    starts = [0, *accumulate(map(len, groups))]
    asked = [(group, first) for group, first in zip(groups, starts, strict=False) if len(group) > 1]
    if not asked:
        raise ValueError(f"{source.text}: expected a row with at least two texts, got none.")
    return RetrievalTask(
        name=without_extension(source.name),
        queries=tuple(group[0] for group, _ in asked),
        candidates=tuple(text for group in groups for text in group),
        relevant=tuple(dict.fromkeys(range(first + 1, first + len(group)), 1.0) for group, first in asked),
        itself=tuple(first for _, first in asked),
        source=source.name,
        query_ids=tuple(str(first) for _, first in asked),
        strict=True,
    )


# ---------------------------------------------------------------------------------------------------- BEIR folders


def read_beir(source: str | Path | Source, *, binary: bool = False) -> RetrievalTask:
    """Read a retrieval task from a BEIR folder (corpus.jsonl, queries.jsonl, qrels/).

    `source` is FOLDER (judgements in qrels/test.tsv), FOLDER@NAME (qrels/NAME.tsv), or a file FOLDER/qrels/NAME.tsv.
    Queries without a grade above 0 are skipped, as in trec_eval, and counted. `binary` replaces every grade above 0 by 1.

    A query skips the candidate that has the id of the query, such as a bug report if its title is the query. The
    candidate is not skipped if it is a judged answer, or if the id is a plain number and the two texts differ: queries
    and documents that are numbered separately share ids by chance.

    Raises:
        DataError: for missing judgements, malformed rows and unknown ids in judgements.
        ValueError: for another source, or judgements without a grade above 0.
    """
    source = evaluation_source(source)
    if source.kind != "beir" or source.path is None:
        raise ValueError(
            f"expected a BEIR folder with corpus.jsonl, queries.jsonl and qrels/, got {source.text}. For a file of questions "
            f"and answers, use --pairs {source.text}."
        )
    (judged,) = source.files
    assert isinstance(judged, JudgedQueries)
    corpus, queries = judged.documents(), judged.queries()
    row_of = {document: row for row, document in enumerate(corpus)}

    # Grades of the answers of each query.
    answers: dict[str, dict[int, float]] = {}
    for query, judgements in judged.judgements.items():
        for line, document, score in judgements:
            if not queries.get(query) or document not in row_of:
                raise DataError(
                    f"{judged.name}:{line}: no text of query {query} among the queries, or no {document} in the corpus."
                )
            if score > 0:
                answers.setdefault(query, {})[row_of[document]] = 1.0 if binary else score
    if not answers:
        raise ValueError(f"{judged.name}: expected a judgement above 0, got none.")

    def skipped(query: str) -> int | None:
        row = row_of.get(query)
        if row is None or row in answers[query]:
            return None
        by_chance = query.isdecimal() and corpus[query] != queries[query]
        return None if by_chance else row

    # Name of the task, with the split unless it is `test`.
    folder = source.path.resolve().name  # resolved, because `.` has no name
    name = folder if judged.split == "test" else f"{folder}@{judged.split}"
    return RetrievalTask(
        name=name,
        queries=tuple(queries[query] for query in answers),
        candidates=tuple(corpus.values()),
        relevant=tuple(answers.values()),
        itself=tuple(map(skipped, answers)),
        source=judged.name,
        query_ids=tuple(answers),
        unanswered=len(judged.judgements) - len(answers),
    )


# ------------------------------------------------------------------------------------------- questions and answers


def read_answers(
    settings: DataSource, corpus: str | Path | None = None, column: str | None = None, source: Source | None = None
) -> RetrievalTask:
    """Read a retrieval task from a file of questions and answers: positive pairs, or other formats of training data.

    The first text of a positive pair is a query, and the second text is its answer. Candidates are all second texts
    (negatives too) and the texts of `corpus`, a text file or table with texts in `column`. White space at both
    ends is removed. Equal texts are one candidate, equal questions with equal instructions one query. A candidate that
    equals the query is skipped for this query, unless it is an answer of the query. `source` has the rows; None: the
    source that `settings.path` names.

    Raises:
        DataError: for a malformed row, with file and line, or a file without a positive pair.
    """
    row_of: dict[str, int] = {}
    answers: defaultdict[InstructedText, dict[int, float]] = defaultdict(dict)
    for example in load_examples(settings, source=source).examples:
        if isinstance(example, LabelledText):
            raise DataError(f"{settings.path}: expected questions and answers, got texts with a class. Use --classes.")
        for query, text, score in pairs_of(example):
            row = row_of.setdefault(text.strip(), len(row_of))
            if score > POSITIVE_ABOVE:
                answers[instructed(query.strip(), example.instruction)][row] = 1.0
    for text in () if corpus is None else corpus_texts(corpus, column):
        row_of.setdefault(text.strip(), len(row_of))
    if not answers:
        raise DataError(f"{settings.path}: expected a question with its answer, got none.")
    equal_rows = map(row_of.get, split_instructions(answers)[0])  # None for a query that equals no candidate
    itself = [None if row in relevant else row for row, relevant in zip(equal_rows, answers.values(), strict=True)]
    return RetrievalTask(
        name=without_extension(settings.path),
        queries=tuple(answers),
        candidates=tuple(row_of),
        relevant=tuple(answers.values()),
        itself=tuple(itself),
        source=settings.path,
        query_ids=tuple(map(str, range(len(answers)))),
    )


# --------------------------------------------------------------------------------------------- texts with a class


def read_classes(
    settings: DataSource, source: Source | None = None, reference: DataSource | None = None
) -> RetrievalTask:
    """Read a retrieval task from a file of texts with a class: each text is a query for the texts of its class.

    The candidates are the texts of `reference`, such as the training data. None: all other texts of the file; a text
    without another text of its class is then a candidate only. A query skips an equal candidate. `source` has the rows;
    None: the source that `settings.path` names.

    Raises:
        DataError: for a malformed row, a text with two classes, or a file without classes to compare.
    """
    class_of = _classes(settings, source)
    candidates = class_of if reference is None else _classes(reference)
    if not {*class_of.values()} & {*candidates.values()}:
        expected, got = (sorted({*labels.values()})[:3] for labels in (candidates, class_of))
        raise DataError(f"{settings.path}: expected classes of the reference, such as {expected}; got {got}.")
    counts = Counter(candidates.values())
    asked = {text: name for text, name in class_of.items() if reference is not None or counts[name] > 1}
    if not asked or len(counts) < 2:
        raise DataError(f"{settings.path}: expected two classes or more, and a class with two texts; got {len(counts)}")
    row_of = {text: row for row, text in enumerate(candidates)}
    return RetrievalTask(
        name=without_extension(settings.path),
        queries=tuple(asked),
        candidates=tuple(candidates),
        relevant=({},) * len(asked),
        itself=tuple(map(row_of.get, asked)),
        source=settings.path,
        query_ids=tuple(map(str, range(len(asked)))),
        classes=(*asked.values(), *candidates.values()),
    )


def _classes(settings: DataSource, source: Source | None = None) -> dict[InstructedText, str]:
    """Return the class of each distinct text, with its instruction, of a file. Raises as `read_classes`."""
    class_of: dict[InstructedText, str] = {}
    for example in load_examples(replace(settings, format="labelled_text"), source=source).examples:
        assert isinstance(example, LabelledText)
        text = instructed(example.text.strip(), example.instruction)
        if class_of.setdefault(text, example.label) != example.label:
            raise DataError(
                f"{settings.path}: {example.text.strip()!r:.60} has the classes {class_of[text]} and {example.label}; fix it"
            )
    return class_of

"""`angle-llm data questions`: write questions for documents with a language model, to train a search without questions.

    documents ──► passages ──► language model ──► lines of the replies ──► filters ──► pairs (question, passage)

The output of `--out NAME.jsonl`:

    NAME.jsonl             pairs `query` and `positive` (the passage), with style, document, and start of the passage
    NAME.passages.jsonl    all passages with their documents, to search in
    NAME.dropped.jsonl     dropped lines with the reason
    NAME.report.json       settings, counts of requests, and counts of lines by style and reason
    NAME.journal.jsonl     all replies: the same command resumes, and other filters need no new requests

Filters drop a question that a search cannot learn from: copied from its passage, in another language, repeated, or whose
document is not among the first results of an encoder (round-trip consistency of Promptagator, arXiv 2209.11755,
section 3.2).
"""

from __future__ import annotations

import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from angle_llm.data.corpus import Corpus, bad_row, corpus_texts
from angle_llm.data.formats import DataError, RowError, read_text
from angle_llm.data.keys import SCRIPTS_WITHOUT_SPACES, normalized
from angle_llm.data.sources import BadRow
from angle_llm.io import plain, progress_bar, write_json, write_json_lines
from angle_llm.model.unit_vectors import unit_rows
from angle_llm.model.vectors import Array
from angle_llm.settings.commands import QuestionFiles, QuestionSettings
from angle_llm.settings.parsing import SettingsError, need_library
from angle_llm.tools.language_models import Answer, Answers, Journal, LlmRequest, make_request, open_language_model
from angle_llm.tools.replies import read_answer
from angle_llm.tools.search import grid_blocks, nearest, on_grid

EASIER = (
    "Written questions are easier than questions of people: scores on them are too high. Measure the final encoder on real "
    "questions."
)
_PROMPTS = Path(__file__).with_suffix(".yaml")
_EXAMPLES = "examples"
"""Key of the text that precedes a prompt if there are examples."""
_EXAMPLES_SHOWN = 5
_LEAST_WORDS, _MOST_WORDS = 2, 40
"""Fewest and most words of a question."""
_PASSAGE_WORDS = 5
"""Fewest words of a passage for which questions are written."""
_WORD = re.compile(f"[{SCRIPTS_WITHOUT_SPACES}]|[^\\s{SCRIPTS_WITHOUT_SPACES}]+")
"""A word, or a character of a script without spaces."""
_CHARACTER = re.compile(f"[{SCRIPTS_WITHOUT_SPACES}]")
_SURE = 0.8
"""Probability from which on the language of a text counts as known."""


class Passage(NamedTuple):
    """A whole document or a part of a document."""

    text: str
    document: str
    """Id of the document."""
    start: int
    """Number of characters of the document before the passage."""


@dataclass
class Question:
    """A line of a reply, with the passage that it was written for."""

    query: str
    positive: str
    """The passage."""
    document: str
    """Id of the document of the passage."""
    start: int
    """Number of characters of the document before the passage."""
    style: str
    llm: str
    reason: str | None = None
    """Reason why the line is not used; None for a question."""


def questions_main(settings: QuestionSettings) -> None:
    """Write questions for documents, and print the report. Exit code 1 if requests have no answer.

    Raises:
        DataError: for documents that cannot be used, or a language model that does not answer.
        SettingsError: for unknown styles or a malformed file of prompts.
        MissingLibraryError: if a library of the extra `questions` is not installed.
    """
    from angle_llm.model.source.resolve import resolve_model

    # Passages and requests.
    for module in ("semantic_text_splitter", "py3langid"):
        need_library(module, "data questions", "questions")
    prompts = _read_prompts(settings)
    if not {"repeated", "not found"}.isdisjoint(settings.filters):
        resolve_model(settings.model)  # a wrong --model is an error before requests are sent
    llms = [open_language_model(name, settings) for name in dict.fromkeys(settings.llm)]
    passages = read_passages(settings)
    requests = list(_requests(settings, prompts, passages))
    # Answers, within the budget.
    with Journal(settings.beside("journal.jsonl")) as journal:
        answers = Answers(journal, settings, requests)
        print(_estimate(settings, passages, requests, answers), flush=True)
        if settings.max_requests == 0:
            return
        with progress_bar("questions", len(requests), "request", done=answers.requests) as bar:
            answers.collect(llms, bar.update)
    # Questions in the answers, with their passages (text, document, start).
    questions = [
        Question(text, *passages[request.row], style=request.kind, llm=request.llm, reason=reason)
        for request in requests
        if (answer := answers.by_key.get(request.key)) is not None
        for text, reason in _lines(answer, settings.count)
    ]
    drop_questions(questions, passages, settings)
    # Output.
    report = _write(settings, passages, answers, questions)
    shown = {name: value for name, value in report.items() if name != "settings"}
    print(f"{yaml.safe_dump(shown, sort_keys=False, width=200)}\nwritten to {settings.out}")
    if report["requests"]["failed"] or report["requests"]["not sent"]:
        print("Run the same command again to repeat failed requests. Requests that were not sent need a larger budget.")
        sys.exit(1)


# --- passages and requests --------------------------------------------------------------------------------------------


def read_passages(settings: QuestionFiles) -> list[Passage]:
    """Read documents and cut them into passages.

    Raises:
        DataError: for a document that cannot be read, or two documents with the same id.
    """
    from semantic_text_splitter import MarkdownSplitter

    corpus = Corpus.open(settings.documents, settings.column, settings.id_column)
    if settings.id_column is None:
        common_columns = set.intersection(*(set(file.columns) for file in corpus.source.files))
        corpus = replace(corpus, id_column=next((name for name in ("id", "_id") if name in common_columns), None))
    splitter = MarkdownSplitter(settings.passage_characters)
    passages = list[Passage]()
    seen = set[str]()
    for number, row in enumerate(corpus):
        if isinstance(row, BadRow):
            raise bad_row(row.place, row.reason)
        document = str(number) if row.id is None else row.id
        if document in seen:
            raise DataError(f"{row.place}: the id {document!r} occurs twice. Name another --id-column")
        seen.add(document)
        for start, text in splitter.chunk_indices(row.text):
            with suppress(RowError):  # a paragraph of invisible characters only
                passages.append(Passage(read_text({"text": text}, "text"), document, start))
    return passages


def _read_prompts(settings: QuestionFiles) -> dict[str, str]:
    """Return the template of each style. Raises `SettingsError` for a malformed file or an unknown style."""
    path = settings.prompts or _PROMPTS
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"--prompts: {path} is not valid YAML: {error}") from None
    prompts = {name: str(prompt) for name, prompt in values.items()} if isinstance(values, dict) else {}
    # Blanks of the styles, and of the text before the examples.
    blanks = {style: ["{count}", "{passage}"] for style in settings.styles}
    if settings.examples is not None:
        blanks[_EXAMPLES] = ["{examples}"]
    for name in blanks:
        if not all(blank in prompts.get(name, "") for blank in blanks[name]):
            raise SettingsError(f"--prompts: {path}: {name}: expected a text with {' and '.join(blanks[name])}.")
    return {name: prompts[name] for name in blanks}


def _requests(settings: QuestionSettings, prompts: dict[str, str], passages: Sequence[Passage]) -> Iterator[LlmRequest]:
    """Yield a request for each chosen passage, language model and style."""
    documents = list(dict.fromkeys(passage.document for passage in passages))
    if settings.shuffle_seed is not None:
        random.Random(settings.shuffle_seed).shuffle(documents)  # a larger limit includes a smaller one
    chosen = set(documents[: settings.limit])
    examples = [] if settings.examples is None else list(corpus_texts(settings.examples))
    for number, passage in enumerate(passages):
        if passage.document not in chosen or _count(_WORD.findall(passage.text)) < _PASSAGE_WORDS:
            continue
        shown = random.Random(settings.seed + number).sample(examples, min(_EXAMPLES_SHOWN, len(examples)))
        before = prompts[_EXAMPLES].replace("{examples}", "\n".join(shown)) + "\n\n" if shown else ""
        for llm in dict.fromkeys(settings.llm):
            for style in dict.fromkeys(settings.styles):
                message = prompts[style].replace("{count}", str(settings.count)).replace("{passage}", passage.text)
                yield make_request(settings, llm, number, passage.text, style, before + message)


def _estimate(
    settings: QuestionSettings, passages: Sequence[Passage], requests: Sequence[LlmRequest], answers: Answers
) -> str:
    """Return the number of requests, and an estimate of their tokens and cost, as text."""
    left = [request for request in requests if request.key not in answers.by_key]
    read = sum(len(request.message.encode()) for request in left) // 4
    new = len(left) * settings.max_new_tokens
    cost = settings.prices.cost(read, new)
    documents = len({passage.document for passage in passages})
    priced = f"; cost at most about {cost:{'.2f' if cost >= 1 else '.2g'}}" if cost else ""
    return (
        f"{documents:,} documents, {len(passages):,} passages, {len(requests):,} requests, {len(left):,} to send: about "
        f"{read:,} tokens to read, at most {new:,} to write{priced}"
    )


def _lines(answer: Answer, requested: int) -> Iterator[tuple[str, str | None]]:
    """Yield the lines of an answer with the reason why a line is not a question, or exceeds the `requested` number."""
    count = 0
    for text, reason in read_answer(answer.text, finished=answer.finished):
        try:
            read_text({"line": text}, "line")
        except RowError:  # such as a line of U+FFFD
            reason = reason or "blank"
        if reason is None:
            words = _count(_WORD.findall(text))
            if not _LEAST_WORDS <= words <= _MOST_WORDS:
                reason = "too short" if words < _LEAST_WORDS else "too long"
            else:
                count += 1
                reason = "more than requested" if count > requested else None
        yield text, reason


# --- filters ----------------------------------------------------------------------------------------------------------


def kept(questions: Iterable[Question]) -> list[Question]:
    """Return the questions that are not dropped."""
    return [question for question in questions if question.reason is None]


def drop_questions(questions: Sequence[Question], passages: Sequence[Passage], settings: QuestionSettings) -> None:
    """Set `reason` of each question that a filter of the settings drops."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    from angle_llm.model.encoder import SentenceEncoder

    # Filters that compare a question with its passage
    identifier: Any = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    for question in kept(questions):
        if "copied" in settings.filters and _copied_words(question) >= settings.copied_words:
            question.reason = "copied"
        elif "language" in settings.filters and _has_other_language(question, identifier):
            question.reason = "language"

    # Filters by an encoder.
    remaining = kept(questions)
    if {"repeated", "not found"}.isdisjoint(settings.filters) or not remaining:
        return
    encoder = SentenceEncoder.from_pretrained(settings.model, device=settings.device)
    rows_QD = encoder.encode_query([question.query for question in remaining], show_progress=True)
    if "repeated" in settings.filters:
        _drop_repeated(remaining, rows_QD, settings.similar)
    if "not found" in settings.filters:
        passages_PD = encoder.encode_document([passage.text for passage in passages], show_progress=True)
        blocks = grid_blocks(passages_PD, np.arange(len(passages)))
        passage_QR, _ = nearest(on_grid(rows_QD), blocks, settings.first)
        for question, passage_R in zip(remaining, passage_QR, strict=True):
            documents = {passages[number].document for number in passage_R}
            if question.reason is None and question.document not in documents:
                question.reason = "not found"


def _copied_words(question: Question) -> float:
    """Return the number of words in the longest sequence of words that a question and its passage share."""
    words, of_passage = (_WORD.findall(normalized(text)) for text in (question.query, question.positive))
    shared = SequenceMatcher(None, words, of_passage, autojunk=False).find_longest_match()
    return _count(words[shared.a : shared.a + shared.size])


def _count(words: Sequence[str]) -> float:
    """Return the number of words; a character of a script without spaces counts as half a word."""
    return sum(0.5 if _CHARACTER.fullmatch(word) else 1 for word in words)


def _has_other_language(question: Question, identifier: Any) -> bool:
    """Return whether a question has another language than its passage, if both languages are certain."""
    language, probability = identifier.classify(question.query)
    passage_language, passage_probability = identifier.classify(question.positive)
    return bool(language != passage_language and min(probability, passage_probability) >= _SURE)


def _drop_repeated(questions: Sequence[Question], rows_QD: Array, similar: float) -> None:
    """Mark questions that repeat an earlier kept question to their document; `rows_QD` are their vectors (Q, D)."""
    kept_of: defaultdict[str, list[Array]] = defaultdict(list)
    for question, unit_D in zip(questions, unit_rows(rows_QD), strict=True):
        if any(unit_D @ earlier_D >= similar for earlier_D in kept_of[question.document]):
            question.reason = "repeated"
        else:
            kept_of[question.document].append(unit_D)


# --- output -----------------------------------------------------------------------------------------------------------


def _write(
    settings: QuestionSettings, passages: Sequence[Passage], answers: Answers, questions: Sequence[Question]
) -> dict[str, Any]:
    """Write all output files, and return the report."""
    # Passages and questions.
    used = [asdict(question) for question in kept(questions)]
    for row in used:
        del row["reason"]
    dropped = (asdict(question) for question in questions if question.reason is not None)
    write_json_lines(settings.beside("passages.jsonl"), (passage._asdict() for passage in passages), writer="")
    write_json_lines(settings.beside("dropped.jsonl"), dropped, writer="")
    write_json_lines(settings.out.expanduser(), used, writer="")
    # Report.
    report: dict[str, Any] = plain({
        "note": EASIER,
        "documents": len({passage.document for passage in passages}),
        "passages": len(passages),
        "documents with questions": len({row["document"] for row in used}),
        **answers.report((question.style, question.llm, question.reason) for question in questions),
        "questions": len(used),
        "settings": settings,
    })  # fmt: skip
    write_json(settings.beside("report.json"), report, writer="")
    return report

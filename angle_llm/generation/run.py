"""A whole generation: sentences, requests, answers, pairs, report."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from angle_llm.config import SettingsError
from angle_llm.data.corpus import Corpus, bad_row
from angle_llm.data.formats import DataError
from angle_llm.data.keys import near
from angle_llm.data.readers import BadRow
from angle_llm.generation.asking import Asked, ask
from angle_llm.generation.budget import Budget
from angle_llm.generation.generators import Answer, Generator, Request, make_request
from angle_llm.generation.journal import Journal
from angle_llm.generation.pairs import Judge, account, as_row, choose, read_lines
from angle_llm.generation.parsing import read_answer
from angle_llm.generation.wording import Wording, load_wording
from angle_llm.io import plain, progress_bar, write_file, write_json

if TYPE_CHECKING:
    from angle_llm.generation.command import GenerateSettings

FORMAT_VERSION = 1


def generate(settings: GenerateSettings, generators: Sequence[Generator]) -> dict[str, Any]:
    """Asks for what has no answer yet, then writes pairs and report; returns the report.

    Raises:
        SettingsError, DataError, JournalError: for what cannot be read or written; before anything is asked.
        GenerationError: for a generator that refuses.
    """
    wording = load_wording(settings.prompt)
    if settings.out.exists() and not settings.beside(".journal.jsonl").exists():
        raise SettingsError(
            f"--out {settings.out} exists, and was not made here: there is no journal beside it. Name another."
        )
    sentences, sources = read_sentences(settings)
    requests = {one.name: _requests(settings, one, wording, sentences) for one in generators}
    budget = Budget(
        settings.prices,
        max_requests=settings.max_requests,
        max_cost=settings.max_cost,
        max_new_tokens=settings.most_new_tokens or settings.sampling.max_new_tokens,
    )
    asked = Asked()
    with Journal(settings.beside(".journal.jsonl")) as journal:
        every = [request for one in requests.values() for request in one]
        known = [journal.answers[request.key] for request in every if request.key in journal.answers]
        budget.count(known)
        if journal.answers:
            others = len(journal.answers) - len(known)
            remark = f"; {others:,} of other settings stay there" if others else ""
            print(
                f"{len(known):,} of {len(every):,} requests have their answer in {journal.path}{remark}",
                file=sys.stderr,
            )
        if settings.judge is not None and len(known) < len(every):
            open_judge(settings)  # a name that is wrong shows before anything is asked
        with _Bar(len(every), known, budget) as bar:
            for one in generators:
                came = ask(
                    requests[one.name], one, journal, budget, max_failures=settings.max_failures, progress=bar.note
                )
                asked.failed |= came.failed
                asked.unasked += came.unasked
        answers = journal.answers
    in_order = sorted(every, key=lambda request: request.row)  # stable: generators and sides in their order
    report = {
        "format_version": FORMAT_VERSION,
        "settings": _told(settings, wording),
        "sources": sources,
        "requests": {
            "total": len(every),
            "answered": sum(request.key in answers for request in every),
            "failed": len(asked.failed),
            "unasked": asked.unasked,
        },
        "failures": dict(Counter(asked.failed.values()).most_common(10)),
        **_write_pairs(settings, wording, in_order, answers, budget),
    }
    write_json(settings.beside(".report.json"), plain(report), writer="")
    return report


def read_sentences(settings: GenerateSettings) -> tuple[list[tuple[int, str]], dict[str, int]]:
    """(row number from 0, sentence), and the account of the rows.

    Raises:
        DataError: for a bad row, unless such rows are skipped; if there is no sentence.
    """
    corpus = Corpus.open(settings.sentences, settings.column)
    seen: set[str] = set()
    sentences: list[tuple[int, str]] = []
    count = {"rows": 0, "asked": 0, "repeated": 0, "bad": 0, "beyond_limit": 0}
    for row, found in enumerate(corpus):
        count["rows"] += 1
        if isinstance(found, BadRow):
            if settings.on_bad_row == "error":
                raise bad_row(found.place, found.reason)
            count["bad"] += 1
            continue
        text = " ".join(found.text.split())
        if near(text) in seen:
            count["repeated"] += 1
        else:
            seen.add(near(text))
            sentences.append((row, text))
    if settings.limit is not None and len(sentences) > settings.limit:
        count["beyond_limit"] = len(sentences) - settings.limit
        if settings.shuffle_seed is not None:
            random.Random(settings.shuffle_seed).shuffle(sentences)  # so a larger limit holds those of a smaller one
        sentences = sorted(sentences[: settings.limit])
    count["asked"] = len(sentences)
    if not sentences:
        raise DataError(f"{settings.sentences} holds no sentence to ask for. Name a file with one text a row")
    return sentences, count


def _requests(
    settings: GenerateSettings, generator: Generator, wording: Wording, sentences: Sequence[tuple[int, str]]
) -> list[Request]:
    return [
        make_request(generator, row, text, side, wording.ask(side, text, settings.size), settings.seed)
        for row, text in sentences
        for side in settings.sides
    ]


def _write_pairs(
    settings: GenerateSettings,
    wording: Wording,
    requests: Sequence[Request],
    answers: Mapping[str, Answer],
    budget: Budget,
) -> dict[str, Any]:
    """Writes the pairs; returns what the report says of lines, tokens and cost."""
    lines = read_lines(requests, answers, wording, settings.limits)
    judge = None if settings.judge is None else open_judge(settings)
    choose(lines, size=settings.size, generators=len(settings.generator), ensemble=settings.ensemble, judge=judge)
    kept = [line for line in lines if line.left_out is None]
    rows = [json.dumps(as_row(line, wording), ensure_ascii=False).encode() + b"\n" for line in kept]
    write_file(settings.out, lambda file: file.writelines(rows), writer="")
    used = [answers[request.key] for request in requests if request.key in answers]
    read = sum(answer.read_tokens for answer in used)
    new = sum(answer.new_tokens for answer in used)
    return {
        "account": account(requests, answers, lines),
        "pairs": len(kept),
        "read_tokens": read,
        "new_tokens": new,
        "cost": round(budget.prices.of(read, new), 6),
    }


def open_judge(settings: GenerateSettings) -> Judge:
    """The encoder that looks at pairs."""
    import numpy as np

    from angle_llm.model.encoder import SentenceEncoder

    assert settings.judge is not None
    encoder = SentenceEncoder.from_pretrained(settings.judge, device=settings.device)

    def cosines(pairs: Sequence[tuple[str, str]]) -> list[float]:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        if not texts:
            return []
        rows_ND = encoder.encode(texts)
        rows_ND = rows_ND / np.linalg.norm(rows_ND, axis=1, keepdims=True)
        place = {text: number for number, text in enumerate(texts)}
        return [float(rows_ND[place[left]] @ rows_ND[place[right]]) for left, right in pairs]

    return Judge(cosines, settings.judge_min, settings.judge_max)


def _told(settings: GenerateSettings, wording: Wording) -> dict[str, Any]:
    """The settings that decide what the pairs are; how fast and how often servers are asked is not among them."""
    return {
        "sentences": settings.sentences.name,
        "column": settings.column,
        "limit": settings.limit,
        "shuffle_seed": settings.shuffle_seed,
        "generators": list(settings.generator),
        "sides": list(settings.sides),
        "size": settings.size,
        "seed": settings.seed,
        "prompt": {**asdict(wording), "hash": wording.fingerprint()},
        "sampling": vars(settings.sampling),
        "dtype": settings.dtype,
        "body": settings.body,
        "limits": vars(settings.limits),
        "ensemble": settings.ensemble,
        "judge": settings.judge,
        "judge_min": settings.judge_min,
        "judge_max": settings.judge_max,
        "prices": vars(settings.prices),
    }


class _Bar:
    """Requests done, sentences found in an answer, failures, tokens, cost."""

    def __init__(self, total: int, known: Sequence[Answer], budget: Budget) -> None:
        self._bar = progress_bar("generate", total, "request", done=len(known))
        self._budget = budget
        self._answers = self._sentences = self._tokens = self._failures = 0

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def note(self, answers: Sequence[Answer], failures: int) -> None:
        """Counts what came of a batch."""
        for answer in answers:
            self._answers += 1
            self._tokens += answer.new_tokens
            self._sentences += sum(line.left_out is None for line in read_answer(answer.text, finished=answer.finished))
        self._failures += failures
        so_far = {
            "sentences": f"{self._sentences / max(1, self._answers):.1f}",
            "failed": self._failures,
            "tokens": self._tokens,
            "cost": f"{self._budget.cost:.4f}",
        }
        self._bar.set_postfix_str(", ".join(f"{name} {value}" for name, value in so_far.items()), refresh=False)
        self._bar.update(len(answers))

"""Makes the requests that have no answer yet, several at a time; every answer is in the journal before the next is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from angle_llm.generation.budget import Budget
from angle_llm.generation.generators import Answer, Failure, Generator, Request
from angle_llm.generation.journal import Journal


class GenerationError(RuntimeError):
    """A generator that cannot be used; what was answered stays in the journal."""


@dataclass
class Asked:
    """What became of a run's requests."""

    failed: dict[str, str] = field(default_factory=dict)
    """Key → reason."""
    unasked: int = 0
    """For which the budget had nothing left."""


def ask(
    requests: Sequence[Request],
    generator: Generator,
    journal: Journal,
    budget: Budget,
    *,
    max_failures: int,
    progress: Callable[[Sequence[Answer], int], None] = lambda answers, failures: None,
) -> Asked:
    """Asks a generator, batch by batch in the order of the requests; `progress` is called from the threads, one at a time.

    A batch is always the same requests, whatever is answered already: an answer of a batch may depend, by a rounding, on the
    others in it.

    Raises:
        GenerationError: when it refuses for good, or `max_failures` requests in a row fail.
    """
    state = _State(generator, journal, budget, max_failures, progress)
    batches = _batches(requests, generator.batch_size)
    todo = iter([batch for batch in batches if any(request.key not in journal.answers for request in batch)])
    if generator.workers == 1:
        state.work(todo)  # where Ctrl-C is heard at once
    else:
        with ThreadPoolExecutor(generator.workers) as pool:
            workers = [pool.submit(state.work, todo) for _ in range(generator.workers)]
            try:
                for worker in workers:
                    worker.result()
            finally:
                state.stopped = True  # also at Ctrl-C: the others end with the batch they are at
    if state.refusal is not None:
        raise GenerationError(state.refusal)
    missing = [request for request in requests if request.key not in journal.answers]
    state.asked.unasked = sum(request.key not in state.asked.failed for request in missing)
    return state.asked


def _batches(requests: Sequence[Request], size: int) -> list[Sequence[Request]]:
    return [requests[start : start + size] for start in range(0, len(requests), size)]


class _State:
    """What the threads share."""

    def __init__(
        self,
        generator: Generator,
        journal: Journal,
        budget: Budget,
        max_failures: int,
        progress: Callable[[Sequence[Answer], int], None],
    ) -> None:
        self.generator = generator
        self.journal = journal
        self.budget = budget
        self.max_failures = max_failures
        self.progress = progress
        self.asked = Asked()
        self.refusal: str | None = None
        self.stopped = False
        self._in_a_row = 0
        self._lock = threading.Lock()

    def work(self, todo: Iterator[Sequence[Request]]) -> None:
        """What each thread does."""
        while not self.stopped:
            with self._lock:
                batch = next(todo, None)
            if batch is None:
                return
            missing = [request for request in batch if request.key not in self.journal.answers]
            if not self.budget.reserve(missing):
                self.stopped = True
                return
            came: dict[str, Answer | Failure] = {}
            try:
                answered = self.generator.answer(batch)
                came = {request.key: one for request, one in zip(batch, answered, strict=True) if request in missing}
                self.journal.add((key, one) for key, one in came.items() if isinstance(one, Answer))
            except BaseException:
                self.stopped = True
                raise
            finally:
                self.budget.settle(missing, list(came.values()))
            with self._lock:
                self._note(came)

    def _note(self, came: Mapping[str, Answer | Failure]) -> None:
        name = self.generator.name
        for key, one in came.items():
            if isinstance(one, Answer):
                self._in_a_row = 0
                continue
            self._in_a_row += one.because_of != "request"
            self.asked.failed[key] = one.reason
            if one.because_of == "settings":
                self.refusal = f"{name} refuses: {one.reason}"
            elif self._in_a_row >= self.max_failures:
                self.refusal = (
                    f"{name} failed {self._in_a_row} times in a row, at last so: {one.reason} The same command goes on "
                    "from here."
                )
        self.stopped = self.stopped or self.refusal is not None
        answers = [one for one in came.values() if isinstance(one, Answer)]
        self.progress(answers, len(came) - len(answers))

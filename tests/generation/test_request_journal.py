"""Answers on disk and what may be spent: nothing is lost, nothing is paid twice, nothing is exceeded."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from angle_llm.config import SettingsError
from angle_llm.generation.budget import Budget, Prices
from angle_llm.generation.generators import Answer, Failure, Request
from angle_llm.generation.journal import Journal, JournalError

ANSWERS = {str(n): Answer(f"1. Sätze\n2. {n}", n % 2 == 0, n, 2 * n) for n in range(5)}


def test_answers_are_there_again(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.add(ANSWERS.items())
    with Journal(tmp_path / "journal.jsonl") as journal:
        assert journal.answers == ANSWERS


def test_the_first_answer_to_a_request_stays(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.add(ANSWERS.items())
        journal.add([("0", Answer("another", True, 9, 9))])
    with Journal(tmp_path / "journal.jsonl") as journal:
        assert journal.answers["0"] == ANSWERS["0"]


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_cut_anywhere_it_has_the_whole_lines_and_goes_on(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "journal.jsonl"
    with Journal(path) as journal:
        journal.add(ANSWERS.items())
    content = path.read_bytes()
    cut %= len(content) + 1
    path.write_bytes(content[:cut])
    whole = content[:cut].count(b"\n")
    with Journal(path) as journal:
        assert list(journal.answers) == list(ANSWERS)[:whole]
        journal.add(ANSWERS.items())
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "line", ["not JSON", "[]", '{"key": "1"}', '{"key": 1, "text": "", "finished": true}', "[" * 5000]
)
def test_a_damaged_line_is_told_with_its_place(tmp_path: Path, line: str) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.add(ANSWERS.items())
    path.write_text(path.read_text() + line + "\n" + path.read_text())
    with (
        pytest.raises(JournalError, match=r"journal.jsonl:6 is not what was written there\. Remove this line"),
        Journal(path),
    ):
        pass


def test_two_processes_do_not_write_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    code = f"from pathlib import Path; from angle_llm.generation.journal import Journal; Journal(Path({str(path)!r})).__enter__()"
    with Journal(path):
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "another process is writing" in second.stderr
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_threads_add_whole_lines(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        threads = [
            threading.Thread(target=lambda n=n: [journal.add([(f"{n} {m}", ANSWERS["1"])]) for m in range(50)])
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert len({json.loads(line)["key"] for line in lines}) == 400


REQUEST = Request(0, "x", "synonym", "one", "a message of thirty characters", 1, "key")


def test_requests_are_counted_those_of_earlier_runs_too() -> None:
    budget = Budget(Prices(), max_requests=3, max_cost=None, max_new_tokens=10)
    budget.count([ANSWERS["1"]])
    for _ in range(2):
        assert budget.reserve([REQUEST])
        budget.settle([REQUEST], [ANSWERS["1"]])
    assert not budget.reserve([REQUEST])


def test_a_failed_request_is_counted_and_costs_nothing() -> None:
    budget = Budget(Prices(1, 1), max_requests=1, max_cost=1, max_new_tokens=10)
    assert budget.reserve([REQUEST])
    budget.settle([REQUEST], [])
    assert budget.cost == 0
    assert not budget.reserve([REQUEST])


def test_an_answer_that_was_paid_for_and_is_none_costs() -> None:
    budget = Budget(Prices(1, 1), max_requests=None, max_cost=1, max_new_tokens=10)
    assert budget.reserve([REQUEST])
    budget.settle([REQUEST], [Failure("empty", "generator", 40, 10)])
    assert budget.cost == pytest.approx(50e-6)
    assert budget.requests == 1


def test_the_worst_price_is_that_of_a_token_for_each_byte() -> None:
    """Digits are a token each, in the tokenizers of LLaMA and Qwen."""
    digits = replace(REQUEST, message="1234567890" * 100)
    assert not Budget(Prices(1, 0), max_requests=None, max_cost=0.000999, max_new_tokens=1).reserve([digits])


def test_the_cost_is_never_exceeded_whatever_comes_at_once() -> None:
    most = 0.004
    budget = Budget(Prices(read=1, new=2), max_requests=None, max_cost=most, max_new_tokens=1000)
    answer = Answer("", True, 50, 600)  # the worst request costs 0.0021, this one 0.00125

    def spend() -> None:
        while budget.reserve([REQUEST]):
            budget.settle([REQUEST], [answer])

    threads = [threading.Thread(target=spend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # As many as one thread alone: another is not refused for what only might have been spent.
    assert budget.requests == 2
    assert budget.cost == pytest.approx(2 * 0.00125, rel=1e-12)
    assert budget.cost <= most


def test_a_limit_in_money_needs_prices() -> None:
    with pytest.raises(SettingsError, match="--max-cost needs the prices"):
        Budget(Prices(), max_requests=None, max_cost=1.0, max_new_tokens=10)

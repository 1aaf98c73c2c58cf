"""How far a long command is, told in a log file and on a terminal."""

from __future__ import annotations

import os
import sys

import pytest

from angle_llm import progress
from angle_llm.progress import ProgressBar


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_log_file_gets_the_first_and_the_last_piece(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("train", 5, "step") as bar:
        for number in range(5):
            bar.add(note=f"loss {number}")
    first, last = lines(capsys)
    assert first.startswith("train:  20% 1/5")
    assert first.endswith("loss 0]")
    assert last.startswith("train: 100% 5/5")
    assert last.endswith("loss 4]")


def test_and_one_line_a_minute_between(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with ProgressBar("embed", 100, "row") as bar:
        for _ in range(10):
            now += progress.LINE_EVERY_SECONDS / 3
            bar.add(10)
    assert [line.split()[2] for line in lines(capsys)] == ["10/100", "40/100", "70/100", "100/100"]


def test_what_was_there_counts_as_done_but_not_for_the_rate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with ProgressBar("embed", 1000, "row", done=900) as bar:
        now = 10.0
        bar.add(50)
    (line,) = lines(capsys)
    assert "950/1000 [00:10<00:10,  5.00row/s]" in line


def test_rest_does_not_count_for_the_rate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with ProgressBar("train", 10, "step") as bar:
        with bar.resting():
            now += 100.0
        now += 2.0
        bar.add(5)
    (line,) = lines(capsys)
    assert "5/10 [00:02<00:02,  2.50step/s]" in line


def test_nothing_done_nothing_told(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("train", 5, "step", done=5):
        pass
    assert lines(capsys) == []


def test_only_one_process_speaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with ProgressBar("train", 5, "step", speaks=False) as bar:
            bar.add(5)
    assert lines(capsys) == []


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressBar("train", 2, "step") as bar:
        assert bar.drawn
        bar.add(2, "loss 1")
    shown = capsys.readouterr().err
    assert "\r" in shown
    assert "2/2" in shown
    assert shown.count("\n") == 1


def test_so_does_a_notebook(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    with ProgressBar("train", 2, "step") as bar:
        assert bar.drawn
        bar.add(2)
    assert "\r" in capsys.readouterr().err


def test_over_counts_each_piece_and_tells_when_it_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(ProgressBar("mine", 3, "part").over("abc")) == ["a", "b", "c"]
    assert "3/3" in lines(capsys)[-1]

    def broken() -> None:
        for piece in ProgressBar("mine", 3, "part").over("abc"):
            if piece == "c":
                raise RuntimeError

    with pytest.raises(RuntimeError):
        broken()
    assert "2/3" in lines(capsys)[-1]


def test_what_only_fails_is_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("generate", 5, "request") as bar:
        bar.add(0, "failed 1")
        bar.add(0, "failed 2")
    assert [line[-9:-1] for line in lines(capsys)] == ["failed 1", "failed 2"]


def test_nobody_listening_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        closed = False

        def isatty(self) -> bool:
            return False

        def write(self, *_: object) -> None:
            raise BrokenPipeError

        flush = write

    shut = open(os.devnull, "w")  # noqa: PTH123, SIM115
    shut.close()
    for nobody in (Gone(), None, shut):
        monkeypatch.setattr(sys, "stderr", nobody)
        with ProgressBar("train", 5, "step") as bar:
            bar.add(5)


def test_a_part_of_something_larger_is_told_only_if_it_takes_minutes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    for seconds, told in ((1, 0), (progress.LINE_EVERY_SECONDS, 3)):
        with ProgressBar("encode", 30, "text", passing=True) as bar:
            for _ in range(3):
                now += seconds
                bar.add(10)
        assert len(lines(capsys)) == told

"""One update, however it is spread: the program `spreads.py` trains the same run in several ways and compares."""

from pathlib import Path

import pytest
from programs import run

FOLDER = Path(__file__).parent


def program(name: str, *arguments: str) -> str:
    """What one of the programs beside this file prints, if it ends well."""
    done = run("python", FOLDER / name, *arguments, seconds=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.fixture
def _deepspeed() -> None:
    pytest.importorskip("deepspeed", reason="the extra `distributed` is not installed")


@pytest.mark.parametrize(
    ("steps", "worlds"), [("12", "123"), pytest.param("50", "1234", marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_any_number_of_processes_ends_alike_in_float64(tmp_path: Path, steps: str, worlds: str) -> None:
    printed = program("spreads.py", str(tmp_path), "float64", steps, worlds)
    assert printed.count("adapters differ by") == len(worlds) - 1


@pytest.mark.usefixtures("_deepspeed")
@pytest.mark.parametrize(
    "names", [["ZeRO-3, offload"], pytest.param([], marks=pytest.mark.slow)], ids=["the farthest", "all"]
)
def test_every_strategy_ends_like_one_process(tmp_path: Path, names: list[str]) -> None:
    printed = program("spreads.py", str(tmp_path), "deepspeed", *names)
    ways = 2 + (len(names) or 6)
    assert printed.count("losses differ by") == 2 * ways


def test_a_run_moves_to_other_numbers_of_processes(tmp_path: Path) -> None:
    assert "adapters differ by" in program("spreads.py", str(tmp_path), "elastic")


@pytest.mark.slow
@pytest.mark.usefixtures("_deepspeed")
def test_a_run_moves_between_strategies(tmp_path: Path) -> None:
    assert "adapters differ by" in program("spreads.py", str(tmp_path), "elastic", "ZeRO")


@pytest.mark.slow
@pytest.mark.usefixtures("_deepspeed")
def test_bases_in_bits_are_spread_alike(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra `quantization` is not installed")
    printed = program("spreads.py", str(tmp_path), "bits", "ZeRO-2", "ZeRO-3")
    assert printed.count("losses differ by") == 2 * 2 * 4

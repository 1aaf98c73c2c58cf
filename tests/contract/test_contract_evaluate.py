"""The evaluation scripts: figures equal to those of scipy and numpy on the vectors, and the help of two programs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import TREE, Files, command, names
from scipy.stats import pearsonr, spearmanr
from tiny_folders import sentences, write_rows

from angle_llm import SentenceEncoder


def numbers(content: Any) -> Iterator[float]:
    """Every number in JSON, at any depth."""
    if isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from numbers(value)
    elif isinstance(content, int | float):
        yield float(content)


def holds(path: Path, due: float) -> bool:
    """Whether a JSON file holds the number."""
    return any(abs(number - due) < 1e-3 for number in numbers(json.loads(path.read_text())))


def unit_rows(model: str, texts: list[str]) -> np.ndarray:
    rows = SentenceEncoder.from_pretrained(model).encode(texts)
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def pairs_of(files: Files) -> tuple[list[str], list[str], list[float]]:
    rows = [line.split("\t") for line in Path(files.pairs).read_text().splitlines()[1:]]
    return [row[0] for row in rows], [row[1] for row in rows], [float(row[2]) for row in rows]


def test_sts_prints_and_writes_the_correlations(model: str, files: Files, tmp_path: Path) -> None:
    left, right, gold = pairs_of(files)
    cosines = (unit_rows(model, left) * unit_rows(model, right)).sum(axis=1)
    words = ["--model", model, "--tasks", files.pairs, "--json", tmp_path / "sts.json"]
    shown = command("python", "eval/sts.py", *words).stdout
    for statistic in (spearmanr, pearsonr):
        due = 100 * float(statistic(cosines, gold)[0])
        names(shown, re.escape(f"{due:.2f}"))
        assert holds(tmp_path / "sts.json", due)


def test_sts_compares_two_models_pair_by_pair(model: str, files: Files, tmp_path: Path) -> None:
    words = ["--tasks", files.pairs]
    command("python", "eval/sts.py", "--model", files.llama, *words, "--json", tmp_path / "base.json")
    shown = command("python", "eval/sts.py", "--model", model, *words, "--against", tmp_path / "base.json").stdout
    same = command("python", "eval/sts.py", "--model", files.llama, *words, "--against", files.llama).stdout
    left, right, gold = pairs_of(files)
    cosines = [(unit_rows(path, left) * unit_rows(path, right)).sum(axis=1) for path in (model, files.llama)]
    ours, base = (100 * float(spearmanr(each, gold)[0]) for each in cosines)
    names(shown, re.escape(f"| {ours:.2f} | {base:.2f} | {ours - base:+.2f} |"))
    names(same, r"\b0\.00\b")


def test_retrieval_counts_exactly(model: str, tmp_path: Path) -> None:
    texts = sentences(24)
    groups = [[*texts[3 * n : 3 * n + 3]] for n in range(8)]
    write_rows(tmp_path / "captions.jsonl", [{"captions": group} for group in groups])
    unit = unit_rows(model, texts)
    ranks = []
    for n in range(8):
        order = [row for row in np.argsort(-(unit @ unit[3 * n])) if row != 3 * n]
        ranks.append(1 + min(order.index(3 * n + 1), order.index(3 * n + 2)))
    words = ["--model", model, "--groups", tmp_path / "captions.jsonl", "--json", tmp_path / "r.json"]
    shown = command("angle-llm", "eval", "retrieval", *words).stdout
    due = 100 * float(np.mean([1 / rank for rank in ranks]))
    names(shown, "strict", re.escape(f"{due:.2f}"))
    assert holds(tmp_path / "r.json", due)


@pytest.mark.parametrize("program", ["eval/ablation.py", "eval/speed.py"])
def test_a_program_that_is_called_by_functions_elsewhere_has_help(program: str) -> None:
    assert len(command("python", program, "--help", cwd=TREE).stdout) > 100

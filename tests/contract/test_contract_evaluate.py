"""The evaluation scripts: figures equal to those of scipy and numpy on the vectors, and the help of every program."""

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


def test_published_edits_change_the_sentences(model: str, tmp_path: Path) -> None:
    rows = [f'The "dog" runs {n}?\tA cat sleeps {n * 7 % 10}\t{n % 6}' for n in range(10)]
    (tmp_path / "pairs.tsv").write_text("sentence1\tsentence2\tscore\n" + "\n".join(rows) + "\n")
    left, right = [f"The 'dog' runs {n}." for n in range(10)], [f"A cat sleeps {n * 7 % 10}." for n in range(10)]
    due = 100 * float(
        spearmanr((unit_rows(model, left) * unit_rows(model, right)).sum(1), [n % 6 for n in range(10)])[0]
    )
    words = ["--model", model, "--tasks", tmp_path / "pairs.tsv", "--edits", "published"]
    names(command("python", "eval/sts.py", *words).stdout, re.escape(f"{due:.2f}"))


def test_sts_reads_a_folder_of_evaluation_sets(model: str, files: Files, tmp_path: Path) -> None:
    for name in ("stsb/test", "stsb/dev", "sick/test", "sts/sts12.test"):
        path = tmp_path / f"{name}.tsv"
        path.parent.mkdir(exist_ok=True)
        path.write_text(Path(files.pairs).read_text())
    shown = command("python", "eval/sts.py", "--model", model, "--data-dir", tmp_path).stdout
    names(shown, "STS12", "STS-?B", "SICK", "raw")


def test_an_unknown_task_is_reported_before_the_model_is_loaded() -> None:
    done = command("python", "eval/sts.py", "--model", "./nowhere", "--tasks", "sts99", code=2)
    names(done.stderr, "sts99", "stsb")


def test_nested_measures_every_cut(model: str, files: Files, tmp_path: Path) -> None:
    left, right, gold = pairs_of(files)
    words = [
        "--model",
        model,
        "--tasks",
        files.pairs,
        "--dimensions",
        "8",
        "--layers",
        "1",
        "--json",
        tmp_path / "n.json",
    ]
    shown = command("python", "eval/nested.py", *words).stdout
    for layers in (1, 2):
        for dimensions in (8, 32):
            encoder = SentenceEncoder.from_pretrained(model, layers=layers, dimensions=dimensions)
            one, two = encoder.encode(left), encoder.encode(right)
            cosines = (one * two).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(two, axis=1)
            due = 100 * float(spearmanr(cosines, gold)[0])
            names(shown, re.escape(f"{due:.2f}"))
            assert holds(tmp_path / "n.json", due)
    done = command("python", "eval/nested.py", *words, "--columns", "score", "grade", code=2)
    names(done.stderr, "--columns score grade", "unknown column 'grade'")


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


@pytest.mark.needs("sklearn")
def test_transfer_classifies_frozen_vectors(model: str, tmp_path: Path) -> None:
    (tmp_path / "transfer").mkdir()
    rows = [f"{text}\t{n % 2}" for n, text in enumerate(f"{'A dog' if n % 2 else 'No cat'} {n}" for n in range(40))]
    (tmp_path / "transfer/cr.tsv").write_text("text\tlabel\n" + "\n".join(rows) + "\n")
    words = ["--model", model, "--data-dir", tmp_path, "--tasks", "cr", "--json", tmp_path / "t.json"]
    shown = command("python", "eval/transfer.py", *words).stdout
    names(shown, r"\bCR\b", r"\b100\.00\b", r"\b40\b")
    assert holds(tmp_path / "t.json", 100.0)


PROGRAMS = [f"recipes/{name}.py" for name in ("llama2_nli", "bert_nli", "sts_finetune")]
PROGRAMS += [f"eval/{name}.py" for name in ("sts", "transfer", "nested", "llm_supervision", "ablation")]
PROGRAMS += [f"eval/{name}.py" for name in ("speed", "gpu_check")]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_has_help(program: str) -> None:
    """tests/test_cli.py has the commands of `angle-llm`."""
    assert len(command("python", program, "--help", cwd=TREE).stdout) > 100

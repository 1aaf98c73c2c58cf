"""From vectors to figures: correlations, cosines, one encode call, and nothing undefined that looks like a number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from sts_samples import hashed_words

from angle_llm.evaluate import (
    StsPair,
    StsTask,
    UndefinedCorrelationError,
    evaluate,
    pair_cosines,
    pearson,
    read_task,
    spearman,
    sts_score,
)


def task(name: str, *pairs: tuple[str, str, float] | tuple[str, str, float, str]) -> StsTask:
    return StsTask(name, name.upper(), "raw", "written in the test", tuple(StsPair(*pair) for pair in pairs))


def average_ranks(values: list[float]) -> list[float]:
    """Rank of each value, equal values sharing the mean of the ranks they occupy: by counting, the slow way."""
    return [sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2 for value in values]


def slow_pearson(x: list[float], y: list[float]) -> float:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / math.sqrt(sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y))


@pytest.mark.parametrize("seed", range(5))
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
        ([1.0], [2.0], "at least two pairs"),
        ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], "all equal"),
        ([1.0, 2.0, 3.0], [4.0, 4.0, 4.0], "all equal"),
        ([1.0, 1.0 + 1e-15, 1.0 - 1e-15], [1.0, 2.0, 3.0], "all equal"),
        ([1.0, math.nan, 3.0], [1.0, 2.0, 3.0], "non-finite"),
        ([1.0, 2.0, 3.0], [1.0, math.inf, 3.0], "non-finite"),
    ],
)
def test_a_correlation_that_does_not_exist_is_an_error_with_the_reason(correlation, x, y, reason) -> None:
    with pytest.raises(UndefinedCorrelationError, match=reason):
        correlation(x, y)


def test_lists_of_different_length_are_an_error() -> None:
    with pytest.raises(ValueError, match="equal length"):
        spearman([1.0, 2.0], [1.0, 2.0, 3.0])


def test_cosines_of_any_scale_and_of_zero_vectors() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((9000, 7)).astype(np.float32)
    rows[1] *= 1e-30
    rows[2] *= 1e30
    rows[3] = 0
    left, right = np.arange(9000), np.roll(np.arange(9000), 1)

    cosines = pair_cosines(rows, left, right)

    assert cosines.dtype == np.float64
    assert cosines[3] == cosines[4] == 0
    for pair in (0, 1, 2, 4095, 4096, 8999):
        a, b = rows[left[pair]].astype(float), rows[right[pair]].astype(float)
        assert cosines[pair] == pytest.approx(a @ b / math.sqrt(a @ a) / math.sqrt(b @ b), abs=1e-12)


def test_distinct_sentences_of_all_tasks_are_encoded_in_one_call() -> None:
    calls: list[list[str]] = []

    def encode(texts: list[str]) -> np.ndarray:
        calls.append(list(texts))
        return hashed_words(texts)

    first = task("first", ("a b", "a c", 3), ("a b", "d e", 0), ("a b", "a b", 5))
    second = task("second", ("a c", "a b", 3), ("x y", "x z", 2), ("d e", "x y", 0))
    together = evaluate(encode, [first, second])

    assert calls == [["a b", "a c", "d e", "x y", "x z"]]
    assert together.sentences == 5
    assert together.dimensions == 512
    for alone in (first, second):
        assert together.tasks[alone.name] == evaluate(hashed_words, [alone]).tasks[alone.name]


def test_subtasks_are_concatenated_and_also_told_apart() -> None:
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(12)]
    pairs = []
    for subtask, shift in (("one", 0.0), ("two", 3.0)):
        for _ in range(30):
            sides = [" ".join(rng.choice(words, 4)) for _ in range(2)]
            pairs.append((*sides, shift + float(rng.integers(0, 5)), subtask))
    year = task("year", *pairs)

    result = evaluate(hashed_words, [year]).tasks["year"]

    cosines = []
    for one, two, _, _ in pairs:
        a, b = hashed_words([one, two]).astype(float)
        cosines.append(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)))
    cosines = np.round(cosines, 12).tolist()
    gold = [pair[2] for pair in pairs]
    assert result.pairs == 60
    assert result.pearson == pytest.approx(100 * slow_pearson(cosines, gold), abs=1e-8)
    assert list(result.subtasks) == ["one", "two"]
    assert result.subtasks["two"].pearson == pytest.approx(100 * slow_pearson(cosines[30:], gold[30:]), abs=1e-8)
    assert result.subtasks["one"].pairs == 30
    # One correlation over all pairs, not the mean of the sub-tasks': here the gold scores are on shifted scales.
    mean = (result.subtasks["one"].spearman + result.subtasks["two"].spearman) / 2
    assert abs(result.spearman - mean) > 1


def test_the_average_is_over_published_tasks_only() -> None:
    pairs = (("a b", "a b", 5.0), ("a b", "a c", 3.0), ("a b", "d e", 0.0))
    noisy = (("a b", "a b", 3.0), ("a b", "a c", 5.0), ("a b", "d e", 0.0))
    results = evaluate(hashed_words, [task("mine", *pairs), task("sickr", *noisy), task("sts12", *pairs)])

    assert results.averaged == ("sts12", "sickr")
    assert results.average == pytest.approx((results.tasks["sts12"].spearman + results.tasks["sickr"].spearman) / 2)
    assert results.tasks["sts12"].spearman == pytest.approx(100)
    assert evaluate(hashed_words, [task("mine", *pairs)]).average is None


@pytest.mark.parametrize("vector", [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
def test_a_collapsed_encoder_gives_nan_with_a_reason(vector: list[float]) -> None:
    pairs = (("a", "b", 1.0), ("c", "d", 2.0), ("a", "d", 3.0))
    scales = np.linspace(1, 9, 4)[:, None]  # all rows in one direction: cosine 1 up to rounding

    results = evaluate(lambda texts: scales[: len(texts)] * np.array(vector), [task("sts12", *pairs)])

    assert math.isnan(results.tasks["sts12"].spearman)
    assert math.isnan(results.tasks["sts12"].pearson)
    assert "all equal" in str(results.tasks["sts12"].undefined)
    assert results.average is not None
    assert math.isnan(results.average)
    assert results.zero_vectors == (0 if any(vector) else 4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_vector_that_is_not_finite_is_an_error_naming_the_sentence(value: float) -> None:
    def encode(texts: list[str]) -> np.ndarray:
        rows = hashed_words(texts)
        rows[texts.index("d e"), 3] = value
        return rows

    with pytest.raises(ValueError, match=r"1 of 3 vectors hold NaN or infinity, the first for 'd e'"):
        evaluate(encode, [task("t", ("a b", "a c", 3), ("a b", "d e", 0))])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (np.zeros((2, 4)), r"shape \(3, D\)"),
        (np.zeros(3), r"shape \(3, D\)"),
        (np.zeros((3, 0)), r"shape \(3, D\)"),
        (np.zeros((3, 4), dtype=np.int64), "floating-point"),
    ],
)
def test_what_encode_must_return(returned: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(lambda texts: returned, [task("t", ("a b", "a c", 3), ("a b", "d e", 0))])


def test_what_evaluate_must_be_given() -> None:
    with pytest.raises(ValueError, match="no tasks"):
        evaluate(hashed_words, [])
    with pytest.raises(ValueError, match="more than once: t"):
        evaluate(hashed_words, [task("t", ("a", "b", 1)), task("t", ("a", "c", 1))])
    with pytest.raises(ValueError, match="without any: t"):
        evaluate(hashed_words, [task("t")])


class Words:
    """`hashed_words` as a method, with a scale that tests may set to collapse it."""

    scale = 1.0

    def encode(
        self, texts: Sequence[str], *, micro_batch_tokens: int = 8192, show_progress: bool = False
    ) -> np.ndarray:
        return self.scale * hashed_words(list(texts))


def test_the_score_a_training_run_watches(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("sentence1\tsentence2\tscore\na b\ta b\t5\na b\ta c\t3\na b\td e\t0\n")
    score, encoder = sts_score(path), Words()
    assert score(encoder) == pytest.approx(100)
    assert 0 < sts_score("starter:graded_pairs.tsv")(encoder) < 100

    encoder.scale = 0.0
    with pytest.raises(UndefinedCorrelationError, match=r"pairs\.tsv: no Spearman correlation: .*all equal"):
        score(encoder)
    with pytest.raises(FileNotFoundError, match="no pair file"):
        sts_score(tmp_path / "other.tsv")


def test_known_answer_the_official_baseline_of_sts12(data_dir: Path) -> None:
    """Cosine of the sets of whitespace tokens: Pearson 0.311 over all of STS12 in the task paper."""

    def token_sets(texts: list[str]) -> np.ndarray:
        column = {word: i for i, word in enumerate(dict.fromkeys(word for text in texts for word in text.split()))}
        rows = np.zeros((len(texts), len(column)), dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            row[[column[word] for word in text.split()]] = 1
        return rows

    result = evaluate(token_sets, [read_task(data_dir, "sts12")]).tasks["sts12"]

    assert result.pairs == result.official_pairs == 3108
    assert result.pearson == pytest.approx(31.10, abs=0.006)
    assert list(result.subtasks) == ["MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"]

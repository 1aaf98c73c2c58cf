"""Transfer tasks: SentEval's protocols, repeated texts, samples, report and command."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from evaluate_samples import Words, opens, parsed, write
from senteval import LabelledText, Split
from transfer import (
    FeaturesAndLabels,
    Fitter,
    TransferSettings,
    evaluate_transfer,
    run_protocol,
    transfer_main,
    transfer_report,
)
from transfer_tasks import (
    TransferTask,
    prepare_task,
    repeated_examples,
    without_repeated,
)

from angle_llm.io import progress_bar
from angle_llm.prompts import PromptTemplate, SidePrompts

sklearn = pytest.importorskip("sklearn", reason="needs scikit-learn: pip install 'angle_llm[transfer]'")


def hashed_words(texts: Sequence[str]) -> np.ndarray:
    """Sum of one random direction per word: a linear classifier can recover the words."""
    directions = {
        word: np.random.default_rng(zlib.crc32(word.encode())).normal(size=12)
        for text in texts
        for word in text.split()
    }
    return np.array([sum(directions[word] for word in text.split()) for text in texts], dtype=np.float32)


def noisy_task(name: str = "mr", size: int = 80) -> TransferTask:
    """Two classes that depend on one word; one label in eight is wrong."""
    rng = np.random.default_rng(3)
    rows = []
    for index in range(size):
        good = bool(rng.integers(2))
        text = f"{'good' if good else 'bad'} {' '.join(f'w{rng.integers(9)}' for _ in range(1 + rng.integers(3)))} n{index}"
        rows.append(LabelledText(text, str(int(good != (rng.random() < 0.125)))))
    return TransferTask(name, name.upper(), "cross_validation", {"all": tuple(rows)}, "here", official=size)


def split_task(train: Sequence[LabelledText], test: Sequence[LabelledText], **more: object) -> TransferTask:
    return TransferTask("trec", "TREC", "train_test", {"train": tuple(train), "test": tuple(test)}, "here", **more)


def as_sentevals_inner_folds(part: FeaturesAndLabels, folds: int, seed: int) -> list[float]:
    """The accuracies in percent of SentEval's protocol, implemented independently with its solver."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score

    X, y = part
    splitter = StratifiedKFold(folds, shuffle=True, random_state=seed)
    accuracies = []
    for train, test in splitter.split(X, y):
        # As in SentEval, except for the intercept, which liblinear would regularise.
        candidates = [LogisticRegression(C=2.0**t, solver="newton-cg", tol=1e-8, max_iter=1000) for t in range(-2, 4)]
        means = [round(100 * cross_val_score(c, X[train], y[train], cv=splitter).mean(), 2) for c in candidates]
        best = candidates[int(np.argmax(means))].fit(X[train], y[train])
        accuracies.append(100 * best.score(X[test], y[test]))
    return accuracies


def test_cross_validation_equals_senteval() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(90, 6))
    y = np.where(X[:, 0] + rng.normal(size=90) > 0, "1", "0")
    outcome, _, _ = run_protocol("cross_validation", {"all": (X, y)}, 5, 1111)
    expected = as_sentevals_inner_folds((X, y), 5, 1111)
    assert outcome.accuracy == pytest.approx(np.mean(expected), abs=1e-9)  # the same predictions
    assert outcome.fits == 5 * (5 * 6 + 1)
    assert outcome.unconverged == 0


@pytest.mark.parametrize(("most", "solver"), [(15, "newton-cholesky"), (14, "lbfgs")])
def test_both_solvers_reach_the_same_optimum(most: int, solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newton's method is used for up to `most` coefficients; here there are 5 features times 3 classes."""
    from sklearn.linear_model import LogisticRegression

    monkeypatch.setattr("transfer._NEWTON_COEFFICIENTS", most)
    rng = np.random.default_rng(1)
    X = rng.normal(size=(120, 5)) * [1, 3, 0.1, 10, 1]
    y = rng.integers(3, size=120).astype(str)
    fitter = Fitter(progress_bar("", 1, "fit", enabled=False))
    classifier = fitter.fit(fitter.new((X, y)), (X, y), 4.0)
    assert classifier.solver == solver
    reference = LogisticRegression(C=4.0, solver="newton-cg", tol=1e-10, max_iter=1000).fit(X, y)
    # 1e-6 is the tolerance on the gradient of the mean loss; the coefficients follow to about 1e-4 of their size.
    np.testing.assert_allclose(classifier.decision_function(X), reference.decision_function(X), atol=2e-3)


def test_test_labels_change_only_the_accuracy() -> None:
    """Other test labels: the same choice of C and the same predictions."""
    rng = np.random.default_rng(2)
    parts: dict[Split, FeaturesAndLabels] = {
        split: (rng.normal(size=(60, 4)), rng.integers(2, size=60).astype(str)) for split in ("train", "dev", "test")
    }
    flipped = parts["test"][0], np.where(parts["test"][1] == "1", "0", "1")
    for protocol, splits in (("train_test", ("train", "test")), ("train_dev_test", ("train", "dev", "test"))):
        (one, _, predicted), (other, _, predicted_again) = (
            run_protocol(protocol, {split: {**parts, "test": test}[split] for split in splits}, 5, 0)
            for test in (parts["test"], flipped)
        )
        assert one.chosen == other.chosen
        assert one.dev_accuracy == other.dev_accuracy
        assert list(predicted) == list(predicted_again)
        assert one.accuracy == pytest.approx(100 - other.accuracy)


def test_classes_that_depend_on_words_are_learned() -> None:
    results = evaluate_transfer(hashed_words, [noisy_task()], folds=4)
    task = results.tasks["mr"]
    assert task.majority < 60
    assert task.accuracy > 75  # 87.5 could be reached: one label in eight is wrong
    assert task.interval.low < task.accuracy < task.interval.high
    assert results.average == task.accuracy
    assert "| **my\\|model** " in transfer_report(results, "my|model")


def test_f1_is_that_of_the_positive_class() -> None:
    rows = [LabelledText(f"{a} {b}", a, f"{b} {a}") for a in "01" for b in "wxyz"]
    task = split_task(rows, rows, positive="1")
    found = evaluate_transfer(hashed_words, [task], folds=2).tasks["trec"]
    assert (found.f1, found.accuracy, found.repeated) == (100, 100, 8)


def test_repeated_texts_are_counted_and_can_be_dropped() -> None:
    train = [LabelledText(f"t{i}", str(i % 2)) for i in range(20)]
    test = [train[0], train[3], LabelledText("new", "0"), LabelledText("new", "1")]
    task = split_task(train, test)
    assert repeated_examples(task) == 2
    clean = without_repeated(task)
    assert clean.splits["test"] == tuple(test)  # the test split is unchanged
    assert clean.splits["train"] == tuple(row for i, row in enumerate(train) if i not in (0, 3))
    assert repeated_examples(clean) == 0
    for drop, dropped in ((False, 0), (True, 2)):
        results = evaluate_transfer(hashed_words, [task], folds=2, drop_repeated=drop)
        assert (results.tasks["trec"].repeated, results.tasks["trec"].dropped) == (2, dropped)


def test_repeated_examples_are_dropped() -> None:
    """In cross-validation the first copy of a text is kept; a pair is repeated in any order, and dev is cleaned too."""
    rows = (LabelledText("a", "1"), LabelledText("b", "0"), LabelledText("a", "0"), LabelledText("c", "1"))
    task = TransferTask("cr", "CR", "cross_validation", {"all": rows}, "here")
    assert repeated_examples(task) == 2
    assert without_repeated(task).splits["all"] == (rows[0], rows[1], rows[3])
    pair, turned = LabelledText("a", "1", "b"), LabelledText("b", "1", "a")
    other, third = LabelledText("a", "1", "c"), LabelledText("d", "0", "e")
    splits: dict[Split, Any] = {"train": (turned, other, third), "dev": (third, pair), "test": (pair,)}
    clean = without_repeated(TransferTask("sst2", "SST2", "train_dev_test", splits, "here"))
    assert clean.splits == {"train": (other,), "dev": (third,), "test": (pair,)}


def test_sample_is_seeded_and_reported() -> None:
    task = noisy_task("cr")
    one, same, other = (prepare_task(task, 60, False, seed) for seed in (7, 7, 8))
    assert (len(one.splits["all"]), one.sampled) == (60, True)
    assert one == same
    assert one != other
    assert "60 (sample)" in transfer_report(evaluate_transfer(hashed_words, [task], folds=3, limit_train=60), "m")


@pytest.mark.parametrize(
    ("settings", "named"),
    [({}, r"10 folds.*6 of 0, 6 of 1"), ({"folds": 1}, "folds.*1"), ({"limit_train": 0}, "--limit-train.*0")],
)
def test_invalid_settings_are_refused(settings: dict[str, int], named: str) -> None:
    task = split_task([LabelledText(f"x{i}", str(i % 2)) for i in range(12)], noisy_task().splits["all"])
    with pytest.raises(ValueError, match=named):
        evaluate_transfer(hashed_words, [task], **settings)  # type: ignore[arg-type]


def test_too_few_examples_of_a_later_task_are_refused_before_texts_are_encoded() -> None:
    rare = [LabelledText(f"x {i}", "rare" if i < 10 else str(i % 2)) for i in range(100)]
    train = split_task(rare, noisy_task().splits["all"])
    crossed = replace(noisy_task(), name="rare", label="Rare", splits={"all": tuple(rare)})
    for task in (train, crossed):
        with pytest.raises(ValueError, match=rf"^{task.label}: .* of rare.*--limit-train"):
            evaluate_transfer(Mock(side_effect=AssertionError("encoded")), [noisy_task("cr"), task], folds=11)
    one_class = (LabelledText("x", "1"),) * 3
    searched = replace(noisy_task(), name="sst2", protocol="train_dev_test")
    searched = replace(searched, splits=dict.fromkeys(("train", "dev", "test"), one_class))
    with pytest.raises(ValueError, match="two classes to train on"):
        evaluate_transfer(Mock(side_effect=AssertionError("encoded")), [searched])
    with pytest.raises(ValueError, match=r"^Rare: 10 folds: .* 9 of rare"):  # the inner folds
        evaluate_transfer(hashed_words, [crossed])


def test_the_command_reads_measures_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"{row.text}\t{row.label}\n" for row in noisy_task().splits["all"]]
    for split, rows in {"train": lines[:60], "test": lines[60:]}.items():
        write(tmp_path / f"transfer/trec.{split}.tsv", "text\tcoarse\n" + "".join(rows))
    files = ["--data-dir", tmp_path, "--json", tmp_path / "o.json"]
    settings: Any = parsed(TransferSettings, "--model", "some/model", *files)
    opens(monkeypatch, Words)
    results = transfer_main(settings)
    content = json.loads((tmp_path / "o.json").read_text())
    assert content["average"] == {"tasks": ["trec"], "accuracy": results.average, "interval": None}
    assert content["tasks"]["trec"]["interval"]["low"] < content["tasks"]["trec"]["accuracy"]
    with pytest.raises(FileNotFoundError, match=r"--data-dir.*transfer"):
        transfer_main(TransferSettings(model="m", data_dir=tmp_path / "transfer"))


def test_two_prompts_need_the_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoSides(Words):
        prompts = SidePrompts(PromptTemplate("q", "Q: {text}"), PromptTemplate("d", "D: {text}"))

    write(tmp_path / "transfer/cr.tsv", "text\tlabel\n" + "".join(f"text {n}\t{n % 2}\n" for n in range(20)))
    settings = TransferSettings(model="m", data_dir=tmp_path, tasks=("cr",))
    opens(monkeypatch, TwoSides)
    with pytest.raises(ValueError, match="--as"):
        transfer_main(settings)

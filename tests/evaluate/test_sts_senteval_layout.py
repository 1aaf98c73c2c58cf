"""SentEval's own download layout gives the pairs and figures that this project's layout gives."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from sts_samples import hashed_words

from angle_llm.evaluate import StsPair, StsTask, available_tasks, evaluate, read_task, select_tasks, variant_of

SICK_HEADER = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment"
YEARS = {
    "sts12": ["MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"],
    "sts13": ["FNWN", "headlines", "OnWN"],
    "sts14": ["deft-forum", "deft-news", "headlines", "OnWN", "images", "tweet-news"],
    "sts15": ["answers-forums", "answers-students", "belief", "headlines", "images"],
    "sts16": ["answer-answer", "headlines", "plagiarism", "postediting", "question-question"],
}
EVERY_TASK = [*YEARS, "stsb", "stsb-dev", "sickr", "sickr-all"]


def write(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())


def write_year(root: Path, task: str, pairs: Iterable[StsPair]) -> None:
    """As the script leaves it, with a pair nobody scored in front of every third one."""
    pairs = list(pairs)
    for subtask in YEARS[task]:
        texts, gold = [], []
        for place, pair in enumerate(pair for pair in pairs if pair.subtask == subtask):
            if place % 3 == 0:
                texts.append("nobody scored this .\tand nobody will .")
                gold.append("")
            texts.append(f"{pair.sentence1}\t{pair.sentence2}")
            gold.append(str(pair.score))
        write(root / f"STS/{task.upper()}-en-test/STS.input.{subtask}.txt", texts)
        write(root / f"STS/{task.upper()}-en-test/STS.gs.{subtask}.txt", gold)


def write_stsb(root: Path, split: str, pairs: Iterable[StsPair]) -> None:
    lines = (f"{p.subtask}\tfile\t2012test\t{i}\t{p.score}\t{p.sentence1}\t{p.sentence2}" for i, p in enumerate(pairs))
    write(root / f"STS/STSBenchmark/sts-{split}.csv", lines)


def write_sick(root: Path, split: str, pairs: Iterable[StsPair]) -> None:
    lines = (f"{i}\t{p.sentence1}\t{p.sentence2}\t{p.score}\tNEUTRAL" for i, p in enumerate(pairs))
    write(root / f"SICK/SICK_{split}.txt", [SICK_HEADER, *lines])


def generated(seed: str, subtasks: Iterable[str] = ("",), capitals: bool = False) -> list[StsPair]:
    """Five pairs a sub-task, with quotes, other line separators and letters beyond ASCII in some."""
    rng = random.Random(seed)
    words = ["a", "man", "plays", "the", "guitar", '"', "it", "'s", "late", "café", "中文", "x\u2028y", "."]
    pairs = []
    for subtask in subtasks:
        for _ in range(5):
            one, two = (" ".join(rng.choices(words, k=6)) for _ in range(2))
            pairs.append(StsPair(one.title() if capitals else one, two, rng.randint(0, 25) / 5, subtask))
    return [pair._replace(sentence1=" ".join(pair.sentence1.split()), sentence2=" ".join(pair.sentence2.split()))
            for pair in pairs]  # fmt: skip


@pytest.fixture
def senteval(tmp_path: Path) -> Path:
    for task, subtasks in YEARS.items():
        write_year(tmp_path, task, generated(task, subtasks))
    for split in ("dev", "test", "train"):
        write_stsb(tmp_path, split, generated(split, ["main-news", "main-captions"]))
    for split in ("train", "trial", "test_annotated"):
        write_sick(tmp_path, split, generated(split, capitals=True))
    return tmp_path


def test_every_task_is_found_and_read_as_written(senteval: Path) -> None:
    assert available_tasks(senteval, "senteval") == EVERY_TASK
    for task, subtasks in YEARS.items():
        read = read_task(senteval, task, "senteval")
        assert list(read.pairs) == generated(task, subtasks)  # without the pairs nobody scored
        assert (read.variant, read.source) == ("senteval", str(senteval / f"STS/{task.upper()}-en-test"))
    assert list(read_task(senteval, "stsb", "senteval").pairs) == generated("test", ["main-news", "main-captions"])
    assert list(read_task(senteval, "stsb-dev", "senteval").pairs) == generated("dev", ["main-news", "main-captions"])
    assert list(read_task(senteval, "sickr", "senteval").pairs) == generated("test_annotated", capitals=True)
    assert len(read_task(senteval, "sickr-all", "senteval").pairs) == 15


def test_the_folder_around_it_will_do(senteval: Path, tmp_path: Path) -> None:
    """SentEval's data folder holds `downstream`, which holds the tasks."""
    (tmp_path / "data" / "downstream").mkdir(parents=True)
    for folder in ("STS", "SICK"):
        (senteval / folder).rename(tmp_path / "data" / "downstream" / folder)
    assert available_tasks(tmp_path / "data", "senteval") == EVERY_TASK
    assert len(read_task(tmp_path / "data", "sts13", "senteval").pairs) == 15


def test_its_text_is_taken_when_there_is_no_other(senteval: Path) -> None:
    assert available_tasks(senteval, "raw") == []
    assert variant_of(senteval) == "senteval"
    write(senteval / "stsb" / "test.tsv", ["sentence1\tsentence2\tscore", "A.\tB.\t1"])
    assert variant_of(senteval) == "raw"
    assert variant_of(None) == "raw"
    with pytest.raises(FileNotFoundError, match=r"task 'sts12' on raw text needs [^ ]*sts12\.test\.tsv \(not there"):
        read_task(senteval, "sts12", "raw")


def test_this_projects_files_come_first(senteval: Path) -> None:
    write(senteval / "stsb_senteval_tok" / "test.tsv", ["sentence1\tsentence2\tscore", "a .\tb .\t1"])
    assert read_task(senteval, "stsb", "senteval").pairs == (StsPair("a .", "b .", 1.0),)


def test_a_missing_file_is_named_in_both_layouts(senteval: Path) -> None:
    (senteval / "STS/STS12-en-test/STS.gs.MSRvid.txt").unlink()
    with pytest.raises(FileNotFoundError) as error:
        read_task(senteval, "sts12", "senteval")
    assert "sts_senteval_tok/sts12.test.tsv" in str(error.value)
    assert f"(not there: {senteval / 'STS/STS12-en-test/STS.gs.MSRvid.txt'})" in str(error.value)
    assert "sts12" not in available_tasks(senteval, "senteval")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "STS/STS13-en-test/STS.gs.FNWN.txt",
            "1\n2\n",
            r"has 7 lines and .*FNWN\.txt 2; a gold score, or a blank line",
        ),
        ("STS/STS13-en-test/STS.gs.FNWN.txt", "1\n" * 6 + "high\n", r"FNWN\.txt, line 7: the score .* found 'high'"),
        ("STS/STS13-en-test/STS.input.FNWN.txt", "a\tb\n" * 6 + "a b\n", r"FNWN\.txt, line 7: 2 tab-separated columns"),
        ("STS/STS13-en-test/STS.input.FNWN.txt", "a\tb\n" * 6 + "a\t \n", r"FNWN\.txt, line 7: a sentence is empty"),
        ("STS/STS13-en-test/STS.input.FNWN.txt", "A\tb\n" * 7, r"holds 'A', and SentEval's text is lower-cased"),
        ("STS/STSBenchmark/sts-test.csv", "g\tf\ty\t0\t1.0\ta\n", r"sts-test\.csv, line 1: 7 tab-separated columns"),
        ("STS/STSBenchmark/sts-test.csv", "", r"no scored pairs in .*sts-test\.csv"),
        ("SICK/SICK_test_annotated.txt", f"{SICK_HEADER}\n1\ta\tb\n", r"SICK_test_annotated\.txt, line 2: 4 tab-sep"),
    ],
)
def test_a_malformed_file_is_an_error_with_its_place(senteval: Path, file: str, text: str, message: str) -> None:
    (senteval / file).write_text(text)
    task = {"STS13-en-test": "sts13", "STSBenchmark": "stsb", "SICK": "sickr"}[Path(file).parent.name]
    with pytest.raises(ValueError, match=message):
        read_task(senteval, task, "senteval")


def figures(task: StsTask) -> list[float]:
    result = evaluate(hashed_words, [task]).tasks[task.name]
    means = (result.mean_over_subtasks or (), result.weighted_mean_over_subtasks or ())
    subtasks = sorted((name, one.spearman) for name, one in result.subtasks.items())
    return [result.spearman, result.pearson, *(number for mean in means for number in mean), *dict(subtasks).values()]


def test_the_real_tasks_give_equal_figures_in_both_layouts(data_dir: Path, tmp_path: Path) -> None:
    names = [name for name in available_tasks(data_dir, "senteval") if not name.startswith("sick")]
    assert {"sts12", "stsb", "stsb-dev"} <= set(names)
    for name in names:
        task = read_task(data_dir, name, "senteval")
        if name in YEARS:
            write_year(tmp_path, name, task.pairs)
        else:
            write_stsb(tmp_path, {"stsb": "test", "stsb-dev": "dev"}[name], task.pairs)
    assert available_tasks(tmp_path, "senteval") == names
    for ours, theirs in zip(
        select_tasks(names, data_dir, "senteval"), select_tasks(names, tmp_path, "senteval"), strict=True
    ):
        assert len(theirs.pairs) == theirs.official_pairs
        assert sorted(theirs.pairs) == sorted(ours.pairs)
        np.testing.assert_allclose(figures(theirs), figures(ours), atol=1e-10)  # another order of the pairs, if any

"""STS tasks: both file layouts, text variants, and errors with file and line."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from evaluate_samples import write

from angle_llm.data import DataError
from angle_llm.evaluate import StsPair, read_pairs, read_task, select_tasks
from angle_llm.evaluate.sts_tasks import available_tasks

HEADER = "sentence1\tsentence2\tscore\n"
SICK_HEADER = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"
YEARS = {
    "sts12": ["MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"],
    "sts13": ["FNWN", "headlines", "OnWN"],
    "sts14": ["deft-forum", "deft-news", "headlines", "OnWN", "images", "tweet-news"],
    "sts15": ["answers-forums", "answers-students", "belief", "headlines", "images"],
    "sts16": ["answer-answer", "headlines", "plagiarism", "postediting", "question-question"],
}


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    """A folder in this project's layout."""
    year = "subtask\tline\tsentence1\tsentence2\tscore\n"
    stsb = "genre\tfile\tyear\tid\tsentence1\tsentence2\tscore\n"
    write(tmp_path / "sts/sts12.test.tsv", year + "MSRpar\t0\tA cat.\tA dog.\t2.500\nMSRvid\t0\tOne.\tTwo.\t1\n")
    write(tmp_path / "sts_senteval_tok/sts12.test.tsv", year + "MSRpar\t0\ta cat .\ta dog .\t2.500\n")
    write(tmp_path / "stsb/test.tsv", stsb + "main-news\tf\ty\t1\tA.\tB.\t5.000\n")
    write(tmp_path / "stsb/dev.tsv", stsb + "main-news\tf\ty\t1\tC.\tD.\t0.000\n")
    for split, score in (("train", 1), ("trial", 2), ("test", 3)):
        header = "pair_id\tsentence1\tsentence2\tscore\tentailment\n"
        write(tmp_path / f"sick/{split}.tsv", header + f"1\t{split} a\t{split} b\t{score}\tNEUTRAL\n")
    return tmp_path


def test_each_task_reads_its_files(layout: Path) -> None:
    year = read_task(layout, "sts12")
    assert year.pairs == (StsPair("A cat.", "A dog.", 2.5, "MSRpar"), StsPair("One.", "Two.", 1.0, "MSRvid"))
    assert (year.label, year.variant, year.official_pairs) == ("STS12", "raw", 3108)
    tokenised = read_task(str(layout), "sts12", "senteval")
    assert (tokenised.variant, tokenised.pairs[0].sentence1) == ("senteval", "a cat .")
    assert read_task(layout, "stsb").pairs == (StsPair("A.", "B.", 5.0, "main-news"),)
    assert read_task(layout, "stsb-dev").pairs == (StsPair("C.", "D.", 0.0, "main-news"),)
    assert [pair.score for pair in read_task(layout, "sickr").pairs] == [3.0]
    assert [pair.score for pair in read_task(layout, "sickr-all").pairs] == [1.0, 2.0, 3.0]


def test_available_and_selected_tasks(layout: Path) -> None:
    assert available_tasks(layout) == ["sts12", "stsb", "stsb-dev", "sickr", "sickr-all"]
    assert available_tasks(layout, "senteval") == ["sts12"]
    assert [task.name for task in select_tasks((), layout, "auto")] == ["sts12", "stsb", "sickr"]
    assert [task.name for task in select_tasks(("stsb-dev",), layout, "raw")] == ["stsb-dev"]
    files = [f"{layout}/stsb/test.tsv", f"{layout}/sick@test", "stsb", "starter:graded_pairs.tsv"]
    apart = [(task.name, task.label) for task in select_tasks(files, layout, "raw")]
    assert [name for name, _ in apart] == ["stsb/test", "sick/test", "stsb", "graded_pairs"]
    assert [label for _, label in apart] == ["stsb/test", "sick/test", "STS-B", "graded_pairs"]
    (layout / "stsb/sts16.tsv").write_bytes((layout / "stsb/test.tsv").read_bytes())
    [mine] = select_tasks([f"{layout}/stsb/sts16.tsv"], layout, "raw")
    assert mine.name == "stsb/sts16", "no score of a published task"
    for names, range_, message in (
        ((), (1, 0), "expected a file in --tasks"),
        (files, (5, 5), "two different numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            select_tasks(names, layout, "raw", score_range=range_)
    (layout / "sts_senteval_tok/sts12.test.tsv").unlink()
    with pytest.raises(FileNotFoundError, match="senteval"):
        select_tasks((), layout, "senteval")


def test_missing_files_and_unknown_tasks(layout: Path) -> None:
    (layout / "sick/trial.tsv").unlink()
    with pytest.raises(FileNotFoundError, match=r"trial\.tsv"):
        read_task(layout, "sickr-all")
    with pytest.raises(FileNotFoundError, match="stsb_senteval_tok"):
        read_task(layout, "stsb", "senteval")
    with pytest.raises(ValueError, match=r"'sts-b'.*'stsb'"):
        read_task(layout, "sts-b")
    with pytest.raises(FileNotFoundError, match=r"no/stsb/test\.tsv"):
        read_task(layout / "no", "stsb")


def test_pair_file_has_columns_by_name_and_no_quoting(tmp_path: Path) -> None:
    text = '\ufeffscore\textra\tsentence2\tsentence1\r\n4.5\tx\tHe said "no\tA\u2028B\x85C\r\n\r\n0\ty\t"\t.\r\n'
    task = read_pairs(write(tmp_path / "pairs.tsv", text))
    assert task.pairs == (StsPair("A\u2028B\x85C", 'He said "no', 4.5), StsPair(".", '"', 0.0))
    assert (task.name, task.label, task.variant, task.official_pairs) == ("pairs", "pairs", "file", None)
    grouped = write(tmp_path / "p.jsonl", '{"sentence1": "a", "sentence2": "b", "score": 1, "genre": "news"}\n')
    assert read_pairs(grouped).pairs == (StsPair("a", "b", 1.0, "news"),)
    indexed = write(tmp_path / "indexed.csv", ",sentence1,sentence2,score\n7,a,b,1\n")  # the index of pandas
    assert read_pairs(indexed).pairs == (StsPair("a", "b", 1.0),)
    recognised = write(tmp_path / "fold" / "dev.csv", "text1,text2,label\na,b,1\n")
    for name in (str(recognised), f"{tmp_path}/fold@dev"):
        [task] = select_tasks([name], None, "auto")
        assert (task.name, task.pairs) == ("dev", (StsPair("a", "b", 1.0),))
    with pytest.raises(DataError, match="fold"):
        read_pairs(recognised.parent)
    renamed = str(write(tmp_path / "renamed.csv", "text1,text2,rating\na,b,1\n"))
    with pytest.raises(DataError, match=r"'score'.*--columns"):
        select_tasks([renamed], None, "auto")
    for wrong, message in (
        ({"score": "rate"}, "--columns score rate"),
        ({"grade": "rating"}, "--columns: unknown field"),
    ):
        with pytest.raises(DataError, match=message):
            select_tasks([renamed], None, "auto", wrong)
    assert select_tasks([renamed], None, "auto", {"score": "rating"})[0].pairs == (StsPair("a", "b", 1.0),)
    starter = read_pairs("starter:graded_pairs.tsv")
    assert (starter.name, starter.source) == ("graded_pairs", "starter:graded_pairs.tsv")
    assert len(starter.pairs) >= 100


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("sentence1\tsentence2\trating\na\tb\t1\n", "'score'"),
        (HEADER, "pairs.tsv"),
        (HEADER + "a\tb\t1\na\tb\n", r"pairs\.tsv:3"),
        (HEADER + "a\tb\thigh\n", r"pairs\.tsv:2.*'high'"),
        (HEADER + "a\tb\tnan\n", r"pairs\.tsv:2.*'nan'"),
        (HEADER + "a\tb\t2\na\t \t1\n", r"pairs\.tsv:3.*sentence2"),
    ],
)
def test_malformed_pair_file(tmp_path: Path, content: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_pairs(write(tmp_path / "pairs.tsv", content))
    with pytest.raises(DataError, match=r"other\.tsv"):
        read_pairs(tmp_path / "other.tsv")


def test_tasks_need_a_directory() -> None:
    for names in ((), ("stsb",)):
        with pytest.raises(ValueError, match=r"--data-dir: .*data get sts"):
            select_tasks(names, None, "auto")
    with pytest.raises(ValueError, match=r"--variant senteval: .*--data-dir"):
        select_tasks(("pairs.tsv",), None, "senteval")


def write_year(root: Path, task: str, pairs: Iterable[StsPair]) -> None:
    """As the script writes it, with a pair without score before every third one."""
    pairs = list(pairs)
    for subtask in YEARS[task]:
        texts, gold = "", ""
        for place, pair in enumerate(pair for pair in pairs if pair.subtask == subtask):
            if place % 3 == 0:
                texts += "not scored .\tnot scored either .\n"
                gold += "\n"
            texts += f"{pair.sentence1}\t{pair.sentence2}\n"
            gold += f"{pair.score}\n"
        write(root / f"STS/{task.upper()}-en-test/STS.input.{subtask}.txt", texts)
        write(root / f"STS/{task.upper()}-en-test/STS.gs.{subtask}.txt", gold)


def write_stsb(root: Path, split: str, pairs: Iterable[StsPair]) -> None:
    lines = (f"{p.subtask}\tf\t2012test\t{i}\t{p.score}\t{p.sentence1}\t{p.sentence2}\n" for i, p in enumerate(pairs))
    write(root / f"STS/STSBenchmark/sts-{split}.csv", "".join(lines))


def generated(seed: str, subtasks: Iterable[str] = ("",), capitals: bool = False) -> list[StsPair]:
    """Five pairs per sub-task, some with quotes, other line separators and non-ASCII letters."""
    rng = random.Random(seed)
    words = ["a", "man", "plays", "the", "guitar", '"', "it", "'s", "late", "café", "中文", "x\u2028y", "."]
    pairs = []
    for subtask in subtasks:
        for _ in range(5):
            one, two = (" ".join(" ".join(rng.choices(words, k=6)).split()) for _ in range(2))
            pairs.append(StsPair(one.title() if capitals else one, two, rng.randint(0, 25) / 5, subtask))
    return pairs


GENRES = ["main-news", "main-captions"]


@pytest.fixture
def senteval(tmp_path: Path) -> Path:
    for task, subtasks in YEARS.items():
        write_year(tmp_path, task, generated(task, subtasks))
    for split in ("dev", "test", "train"):
        write_stsb(tmp_path, split, generated(split, GENRES))
    for split in ("train", "trial", "test_annotated"):
        pairs = enumerate(generated(split, capitals=True))
        lines = (f"{i}\t{p.sentence1}\t{p.sentence2}\t{p.score}\tNEUTRAL\n" for i, p in pairs)
        write(tmp_path / f"SICK/SICK_{split}.txt", SICK_HEADER + "".join(lines))
    return tmp_path


def test_each_senteval_task_is_read(senteval: Path) -> None:
    assert available_tasks(senteval, "senteval") == [*YEARS, "stsb", "stsb-dev", "sickr", "sickr-all"]
    assert available_tasks(senteval) == []
    expected = {task: generated(task, subtasks) for task, subtasks in YEARS.items()}  # without pairs that have no score
    expected |= {"stsb": generated("test", GENRES), "stsb-dev": generated("dev", GENRES)}
    expected |= {"sickr": generated("test_annotated", capitals=True)}
    for task, pairs in expected.items():
        read = read_task(senteval, task, "senteval")
        assert (list(read.pairs), read.variant) == (pairs, "senteval")
    assert read_task(senteval, "sts12", "senteval").source == str(senteval / "STS/STS12-en-test")
    assert len(read_task(senteval, "sickr-all", "senteval").pairs) == 15


def test_senteval_in_downstream_and_order_of_layouts(senteval: Path, tmp_path: Path) -> None:
    assert select_tasks((), senteval, "auto")[0].variant == "senteval"
    with pytest.raises(FileNotFoundError, match=r"sts12\.test\.tsv"):
        read_task(senteval, "sts12", "raw")
    write(senteval / "stsb/test.tsv", HEADER + "A.\tB.\t1\n")
    assert {task.variant for task in select_tasks((), senteval, "auto")} == {"senteval"}  # all tasks, not one raw task
    assert {task.variant for task in select_tasks(("stsb", "sts12"), senteval, "auto")} == {"senteval"}
    assert select_tasks(("stsb",), senteval, "auto")[0].variant == "raw"
    write(senteval / "stsb_senteval_tok/test.tsv", HEADER + "a .\tb .\t1\n")
    assert read_task(senteval, "stsb", "senteval").pairs == (StsPair("a .", "b .", 1.0),)  # this project's layout first
    (senteval / "STS/STS12-en-test/STS.gs.MSRvid.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"STS\.gs\.MSRvid\.txt"):
        read_task(senteval, "sts12", "senteval")
    (tmp_path / "data/downstream").mkdir(parents=True)
    for folder in ("STS", "SICK"):
        (senteval / folder).rename(tmp_path / "data/downstream" / folder)
    assert len(available_tasks(tmp_path / "data", "senteval")) == 8
    assert len(read_task(tmp_path / "data", "sts13", "senteval").pairs) == 15


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("STS/STS13-en-test/STS.gs.FNWN.txt", "1\n2\n", r"FNWN\.txt"),
        ("STS/STS13-en-test/STS.gs.FNWN.txt", "1\n" * 6 + "high\n", r"FNWN\.txt:7.*'high'"),
        ("STS/STS13-en-test/STS.input.FNWN.txt", "a\tb\n" * 6 + "a b\n", r"FNWN\.txt:7"),
        ("STS/STSBenchmark/sts-test.csv", "g\tf\ty\t0\t1.0\ta\tb\ng\tf\ty\t0\t1.0\ta\n", r"sts-test\.csv:2"),
        ("STS/STSBenchmark/sts-test.csv", "", r"sts-test\.csv"),
        ("SICK/SICK_test_annotated.txt", f"{SICK_HEADER}1\ta\tb\n", r"SICK_test_annotated\.txt:2"),
    ],
)
def test_malformed_senteval_file(senteval: Path, file: str, text: str, named: str) -> None:
    (senteval / file).write_text(text)
    task = {"STS13-en-test": "sts13", "STSBenchmark": "stsb", "SICK": "sickr"}[Path(file).parent.name]
    with pytest.raises(ValueError, match=named):
        read_task(senteval, task, "senteval")


def test_real_files_have_the_published_sizes_in_both_variants(data_dir: Path) -> None:
    for variant in ("raw", "senteval"):
        names = available_tasks(data_dir, variant)
        assert {"sts12", "stsb", "stsb-dev"} <= set(names)
        for name in names:
            task = read_task(data_dir, name, variant)
            assert (len(task.pairs), task.variant) == (task.official_pairs, variant)
    raw, tokenised = (read_task(data_dir, "sts12", variant) for variant in ("raw", "senteval"))
    assert [pair.score for pair in raw.pairs] == [pair.score for pair in tokenised.pairs]
    assert all(pair.sentence1 == pair.sentence1.lower() for pair in tokenised.pairs)
    assert not all(pair.sentence1 == pair.sentence1.lower() for pair in raw.pairs)


def test_instructions_are_in_their_column(tmp_path: Path) -> None:
    rows = [{"text1": "a", "text2": "b", "score": 1, "task": task} for task in ("Compare.", None, " ")]
    path = write(tmp_path / "x.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    task = read_pairs(path, {"instruction": "task"})
    assert [pair.instruction for pair in task.pairs] == ["Compare.", "", ""]
    write(path, json.dumps(rows[0] | {"task": float("nan")}) + "\n")
    with pytest.raises(DataError, match="task is nan"):
        read_pairs(path, {"instruction": "task"})

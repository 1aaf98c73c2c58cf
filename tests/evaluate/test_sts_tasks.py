"""From files to scored pairs: layout, variants, and what is said when something is not there."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from angle_llm.evaluate import TASKS, StsPair, available_tasks, read_pairs, read_task

YEAR = "subtask\tline\tsentence1\tsentence2\tscore\n"
STSB = "genre\tfile\tyear\tid\tsentence1\tsentence2\tscore\n"
SICK = "pair_id\tsentence1\tsentence2\tscore\tentailment\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    """A small directory in the layout of the real one."""
    write(tmp_path / "sts/sts12.test.tsv", YEAR + "MSRpar\t0\tA cat.\tA dog.\t2.500\nMSRvid\t0\tOne.\tTwo.\t1\n")
    write(tmp_path / "sts_senteval_tok/sts12.test.tsv", YEAR + "MSRpar\t0\ta cat .\ta dog .\t2.500\n")
    write(tmp_path / "stsb/test.tsv", STSB + "main-news\tf\ty\t1\tA.\tB.\t5.000\n")
    write(tmp_path / "stsb/dev.tsv", STSB + "main-news\tf\ty\t1\tC.\tD.\t0.000\n")
    for split, score in (("train", 1), ("trial", 2), ("test", 3)):
        write(tmp_path / f"sick/{split}.tsv", SICK + f"1\t{split} a\t{split} b\t{score}\tNEUTRAL\n")
    return tmp_path


def test_each_task_reads_its_files(layout: Path) -> None:
    year = read_task(layout, "sts12")
    assert year.pairs == (StsPair("A cat.", "A dog.", 2.5, "MSRpar"), StsPair("One.", "Two.", 1.0, "MSRvid"))
    assert (year.label, year.variant, year.official_pairs) == ("STS12", "raw", 3108)
    assert read_task(layout, "stsb").pairs == (StsPair("A.", "B.", 5.0, "main-news"),)
    assert read_task(layout, "stsb-dev").pairs == (StsPair("C.", "D.", 0.0, "main-news"),)
    assert [pair.score for pair in read_task(layout, "sickr").pairs] == [3.0]
    assert [pair.score for pair in read_task(layout, "sickr-all").pairs] == [1.0, 2.0, 3.0]


def test_the_senteval_variant_has_its_own_text_and_label(layout: Path) -> None:
    task = read_task(str(layout), "sts12", "senteval")
    assert task.variant == "senteval"
    assert task.pairs[0].sentence1 == "a cat ."


def test_available_tasks_are_those_whose_files_are_all_there(layout: Path) -> None:
    assert available_tasks(layout) == ["sts12", "stsb", "stsb-dev", "sickr", "sickr-all"]
    assert available_tasks(layout, "senteval") == ["sts12"]
    (layout / "sick/trial.tsv").unlink()
    assert "sickr-all" not in available_tasks(layout)


def test_a_missing_file_is_named_with_what_is_there_instead(layout: Path) -> None:
    (layout / "sick/trial.tsv").unlink()
    with pytest.raises(FileNotFoundError) as error:
        read_task(layout, "sickr-all")
    message = str(error.value)
    assert "sick/train.tsv" in message
    assert f"(not there: {layout / 'sick' / 'trial.tsv'})" in message
    assert "sts12, stsb, stsb-dev, sickr." in message
    with pytest.raises(FileNotFoundError, match="stsb_senteval_tok"):
        read_task(layout, "stsb", "senteval")


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    for reading in (lambda: read_task(tmp_path / "no", "stsb"), lambda: available_tasks(tmp_path / "no")):
        with pytest.raises(FileNotFoundError, match=r"no data directory at .*no\."):
            reading()


def test_an_unknown_task_names_the_nearest(layout: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown STS task 'sts-b'\. Did you mean 'stsb'\?"):
        read_task(layout, "sts-b")


def test_read_pairs_takes_columns_by_name_and_quotes_as_characters(tmp_path: Path) -> None:
    text = '\ufeffscore\textra\tsentence2\tsentence1\r\n4.5\tx\tHe said "no\tA\u2028B\x85C\rD\r\n\r\n0\ty\t"\t.\r\n'
    task = read_pairs(write(tmp_path / "pairs.tsv", text))
    assert task.pairs == (StsPair("A\u2028B\x85C\rD", 'He said "no', 4.5), StsPair(".", '"', 0.0))
    assert (task.name, task.label, task.variant, task.official_pairs) == ("pairs", "pairs", "file", None)


@pytest.mark.parametrize(("row", "told"), [(b"a\t \t1", "empty"), (b"a\tcaf\xe9\t1", "not UTF-8")])
def test_read_pairs_names_the_line_of_a_sentence_that_is_none(tmp_path: Path, row: bytes, told: str) -> None:
    (tmp_path / "p.tsv").write_bytes(b"sentence1\tsentence2\tscore\na\tb\t2\n" + row + b"\n")
    with pytest.raises(ValueError, match=rf"p\.tsv, line 3: .*{told}"):
        read_pairs(tmp_path / "p.tsv")


def test_read_pairs_groups_by_genre(tmp_path: Path) -> None:
    text = "genre\tsentence1\tsentence2\tscore\nnews\ta\tb\t1\nforum\tc\td\t2\n"
    assert [pair.subtask for pair in read_pairs(write(tmp_path / "p.tsv", text)).pairs] == ["news", "forum"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing sentence1, sentence2, score"),
        ("sentence1\tsentence2\tlabel\na\tb\t1\n", "missing score, found sentence1, sentence2, label"),
        ("sentence1\tsentence2\tscore\n", "no pairs"),
        ("sentence1\tsentence2\tscore\na\tb\t1\na\tb\n", "line 3: 3 columns needed, as in the header; 2 found"),
        ("sentence1\tsentence2\tscore\na\tb\thigh\n", "line 2: the score must be a finite number, found 'high'"),
        ("sentence1\tsentence2\tscore\na\tb\tnan\n", "line 2: the score must be a finite number, found 'nan'"),
        ("sentence1\tsentence2\tscore\na\tb\t\n", "line 2: the score must be a finite number, found ''"),
    ],
)
def test_a_malformed_file_is_an_error_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_pairs(write(tmp_path / "pairs.tsv", text))


def test_a_missing_pair_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no pair file at .*pairs\.tsv"):
        read_pairs(tmp_path / "pairs.tsv")
    with pytest.raises(FileNotFoundError, match=r"no pair file at starter:nothing\.tsv"):
        read_pairs("starter:nothing.tsv")


def test_the_starter_pairs_come_with_the_package() -> None:
    starter = read_pairs("starter:graded_pairs.tsv")
    assert starter.source == "starter:graded_pairs.tsv"
    assert len(starter.pairs) >= 100
    assert len({pair.score for pair in starter.pairs}) >= 5
    assert len({pair.subtask for pair in starter.pairs}) >= 2


def stand_in_for_the_hub(monkeypatch: pytest.MonkeyPatch, load_dataset: object) -> None:
    """The network is not part of a test: only the call that would use it is replaced."""
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_without_a_directory_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, *, split: str) -> list[dict[str, object]]:
        asked.append((name, split))
        return [{"sentence1": "a", "sentence2": "b", "score": 2}]

    stand_in_for_the_hub(monkeypatch, load_dataset)
    for name in available_tasks(None):
        task = read_task(None, name)
        assert task.pairs == (StsPair("a", "b", 2.0),)
        assert task.variant == "raw"

    assert available_tasks(None) == [name for name in TASKS if name != "sickr"]
    assert ("mteb/sts12-sts", "test") in asked
    assert ("mteb/stsbenchmark-sts", "validation") in asked
    assert ("mteb/sickr-sts", "test") in asked


def test_what_the_hub_cannot_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, *, split: str) -> None:
        raise OSError("no route to host")

    stand_in_for_the_hub(monkeypatch, load_dataset)
    with pytest.raises(ConnectionError, match=r"mteb/sts12-sts .*no route to host.*data directory"):
        read_task(None, "sts12")
    with pytest.raises(ValueError, match="sickr-all"):
        read_task(None, "sickr")
    with pytest.raises(ValueError, match="raw text only"):
        read_task(None, "sts12", "senteval")
    assert available_tasks(None, "senteval") == []


def test_the_real_files_have_the_published_sizes_in_both_variants(data_dir: Path) -> None:
    for variant in ("raw", "senteval"):
        names = available_tasks(data_dir, variant)
        assert {"sts12", "stsb", "stsb-dev"} <= set(names)
        for name in names:
            task = read_task(data_dir, name, variant)
            assert len(task.pairs) == task.official_pairs
            assert task.variant == variant
    raw, tokenised = (read_task(data_dir, "sts12", variant) for variant in ("raw", "senteval"))
    assert [pair.score for pair in raw.pairs] == [pair.score for pair in tokenised.pairs]
    assert all(pair.sentence1 == pair.sentence1.lower() for pair in tokenised.pairs)
    assert not all(pair.sentence1 == pair.sentence1.lower() for pair in raw.pairs)

"""SentEval's downloads as training and evaluation data."""

from pathlib import Path

import pytest

from angle_llm.data import DataError, DataSource, ScoredPair, load_examples
from angle_llm.data.leakage import read_evaluation_sets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One part of STS12, STS-B, SICK and MRPC as the download script leaves them."""
    files = {
        "STS/STS12-en-test/STS.input.MSRpar.txt": "a man eats .\tsomeone eats .\ntwo\tthree\nred\tblue\textra\n",
        "STS/STS12-en-test/STS.gs.MSRpar.txt": "4.5\n\n0\n",
        "STS/STSBenchmark/sts-train.csv": 'main-captions\tMSRvid\t2012test\t0001\t5.000\tA plane.\tAn "air plane.\tlicence\turl\n'
        "main-news\tx\t2013\t0002\t1.2\tOne.\tTwo.\n",
        "SICK/SICK_train.txt": "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"
        "1\tA dog.\tA cat.\t3\tNEUTRAL\n",
        "MRPC/msr_paraphrase_train.txt": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t5\t6\tIt is so.\tSo it is.\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "range", "expected"),
    [
        (
            "STS/STS12-en-test/STS.input.MSRpar.txt",
            (0, 5),
            [("a man eats .", "someone eats .", 0.9), ("red", "blue", 0)],
        ),
        ("STS/STSBenchmark/sts-train.csv", (0, 5), [("A plane.", 'An "air plane.', 1), ("One.", "Two.", 0.24)]),
        ("SICK/SICK_train.txt", (1, 5), [("A dog.", "A cat.", 0.5)]),
        ("MRPC/msr_paraphrase_train.txt", None, [("It is so.", "So it is.", 1)]),
    ],
)
def test_the_pairs_of_a_download(
    name: str, range: tuple[float, float] | None, expected: list[tuple[str, str, float]], folder: Path
) -> None:
    loaded = load_examples(DataSource(str(folder / name), score_range=range))
    assert loaded.examples == [ScoredPair(left, right, pytest.approx(score)) for left, right, score in expected]
    assert loaded.report.rows_in == len(expected)


def test_damage_is_told(folder: Path) -> None:
    part = folder / "STS/STS12-en-test/STS.input.MSRpar.txt"
    source = DataSource(str(part), score_range=(0, 5))
    part.write_text("only one sentence\nx\ty\nu\tv\n")
    with pytest.raises(DataError, match=r"MSRpar\.txt:1: 2 fields with tabs between them; needed 3"):
        load_examples(source)
    part.write_text("x\ty\n")
    with pytest.raises(DataError, match=r"has 1 lines and STS\.gs\.MSRpar\.txt 3"):
        load_examples(source)
    part.with_name("STS.gs.MSRpar.txt").unlink()
    with pytest.raises(DataError, match="are not beside it"):
        load_examples(source)
    (folder / "notes.txt").write_text("just a line\n")
    with pytest.raises(DataError, match="Single texts are no pairs"):
        load_examples(DataSource(str(folder / "notes.txt")))


def test_tests_of_a_download_are_evaluation_sets_and_its_training_files_are_not(folder: Path) -> None:
    (folder / "STS/STSBenchmark/sts-test.csv").write_text("main-news\tx\t2013\t0002\t1.2\tOne test.\tTwo tests.\n")
    (folder / "LICENSE.txt").write_text("words\n")
    found, skipped = read_evaluation_sets([folder])
    assert [each.name for each in found] == [
        "STS/STS12-en-test/STS.input.MSRpar.txt",
        "STS/STSBenchmark/sts-test.csv",
    ]
    assert [len(each.pairs) for each in found] == [2, 1]
    assert {"STS/STSBenchmark/sts-train.csv", "SICK/SICK_train.txt", "LICENSE.txt"} <= set(skipped)

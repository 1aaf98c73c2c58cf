"""The development set without sentences of test sets."""

import json
from collections import Counter
from pathlib import Path

import pytest
from clean_dev import CleanDevSettings, main

from angle_llm.data.examples import load_examples
from angle_llm.data.formats import texts_of
from angle_llm.data.keys import normalized
from angle_llm.evaluate.sts_tasks import read_pairs
from angle_llm.settings.train import DataSource


def test_pairs_with_a_used_sentence_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = "sentence1\tsentence2\tscore\n"
    rows = "A man eats.\tA dog runs.\t1.5\nIt rains.\tIt snows.\t2\nIt snows .\tit rains\t2\nOne.\tTwo.\t5\n"
    (tmp_path / "dev.tsv").write_text(header.replace("\n", "\tgenre\n") + rows.replace("\n", "\tnews\n"))
    (tmp_path / "test.tsv").write_text(header + "a man eats\tNobody is here.\t4\n")
    (tmp_path / "train.jsonl").write_text(
        json.dumps({"query": "x", "positives": [{"title": "", "text": "One"}], "negatives": []}) + "\n"
    )
    monkeypatch.chdir(tmp_path)
    main(CleanDevSettings(files=("dev.tsv",), against=("test.tsv", "train.jsonl")))
    [pair] = read_pairs("clean_dev.tsv").pairs
    assert (pair.sentence1, pair.sentence2, pair.score, pair.subtask) == ("It rains.", "It snows.", 2.0, "news")


@pytest.mark.slow
def test_the_documented_set_has_five_sources_and_no_sentence_of_the_test_sets(data_dir: Path, tmp_path: Path) -> None:
    tests = [f"sts/sts{year}.test.tsv" for year in (12, 14, 15)] + ["stsb/test.tsv", "sick/test.tsv"]
    files = ["sts/sts12.train.tsv", "stsb/train.tsv", "stsb/dev.tsv"]
    out = tmp_path / "clean.tsv"
    triples = str(data_dir / "nli/nli_triplets.jsonl.gz")
    main(
        CleanDevSettings(
            files=tuple(str(data_dir / name) for name in files),
            against=(*(str(data_dir / name) for name in tests), triples),
            out=out,
        )
    )
    pairs = read_pairs(out).pairs
    assert Counter(pair.subtask for pair in pairs) == {
        "MSRpar": 596,
        "MSRvid": 265,
        "SMTeuroparl": 717,
        "main-captions": 121,
        "main-news": 868,
    }
    texts = {normalized(text) for pair in pairs for text in pair[:2]}
    for name in tests:
        assert not texts & {normalized(text) for pair in read_pairs(data_dir / name).pairs for text in pair[:2]}
    for triple in load_examples(DataSource(path=triples, format="triple")).examples:
        assert not texts & {normalized(text) for text in texts_of(triple)}

"""The development set without sentences of test sets."""

import json
from pathlib import Path

import pytest
from clean_dev import CleanDevSettings, main

from angle_llm.evaluate.sts_tasks import read_pairs


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

"""`angle-llm data check` and `data mine`: findings, the cleaned copy, and hard negatives."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Files, command, names
from tiny_folders import contents, read_rows, write_pairs, write_rows

from angle_llm import SentenceEncoder

GOOD = [
    {"text1": "A man eats.", "text2": "Someone eats.", "score": 1},
    {"text1": "A dog runs.", "text2": "Nobody runs.", "score": 0},
    {"text1": "A bird sings.", "text2": "An animal makes music.", "score": 1},
]
CONTRARY = {"text1": "a man EATS", "text2": "Someone  eats", "score": 0}
TESTED = {"text1": "A cat sleeps in the park.", "text2": "An animal rests there today.", "score": 1}
PAIRS = [
    ("A man eats.", "Someone eats."),
    ("A man eats.", "Someone has food."),
    ("Someone has food.", "There is food."),
    ("A dog runs.", "An animal moves."),
    ("The dog sleeps.", "An animal rests."),
    ("A child sings.", "Someone makes music."),
    ("Two women talk.", "People speak."),
    ("A car stops.", "A vehicle stands still."),
]


def check(*words: str | Path, code: int) -> dict[str, Any]:
    """The JSON of `angle-llm data check`."""
    content: dict[str, Any] = json.loads(command("angle-llm", "data", "check", *words, "--json", code=code).stdout)
    return content


def test_sound_rows_end_in_0_and_are_shown_token_by_token(files: Files, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "good.jsonl", GOOD)
    content = check(path, "--model", files.llama, code=0)
    (report,) = content["files"]
    assert (report["rows_in"], report["rows_used"], report["format"]) == (3, 3, "scored_pair")
    shown = command("angle-llm", "data", "check", path, "--model", files.llama).stdout
    names(shown, r"Summarize\|", "scored_pair")


def test_fix_keeps_the_good_rows_and_accounts_for_the_others(tmp_path: Path) -> None:
    rows = [*GOOD, GOOD[1], CONTRARY, "{broken", TESTED, {"text1": "", "text2": "x", "score": 1}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    against = write_pairs(tmp_path / "tested.tsv", [(TESTED["text1"], TESTED["text2"], 4.0)])
    words = [path, "--model", "none", "--against", against, "--fix", tmp_path / "out"]
    (fixed,) = check(*words, code=1)["fixed"]
    assert (fixed["rows_in"], fixed["kept"], fixed["quarantined"]) == (8, 2, 6)
    assert read_rows(tmp_path / "out/rows.jsonl") == [GOOD[1], GOOD[2]]
    quarantined = read_rows(tmp_path / "out/rows.quarantine.jsonl")
    assert [each["line"] for each in quarantined] == [1, 4, 5, 6, 7, 8]
    assert all(each["reason"] for each in quarantined)
    assert quarantined[4]["row"] == TESTED
    assert check(tmp_path / "out/rows.jsonl", "--model", "none", "--against", against, code=0)["trouble"] is False
    before = contents(tmp_path / "out")
    names(command("angle-llm", "data", "check", *words, code=2).stderr, "--fix", str(tmp_path / "out"))
    assert contents(tmp_path / "out") == before


def test_mined_negatives_are_the_nearest_texts_that_are_not_positives(files: Files, tmp_path: Path) -> None:
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"text1": one, "text2": two} for one, two in PAIRS])
    options = ["--ranks", "1", "6", "--relative-margin", "None", "--out", tmp_path / "mined.jsonl"]
    command("angle-llm", "data", "mine", pairs, "--model", files.bert, *options)
    report, rows = json.loads((tmp_path / "mined.report.json").read_text()), read_rows(tmp_path / "mined.jsonl")
    assert report["groups"]["positives"] == len(PAIRS)
    assert [(row["query"], text) for row in rows for text in row["positives"]] == PAIRS
    candidates = list(dict.fromkeys(two for _, two in PAIRS))
    encoder = SentenceEncoder.from_pretrained(files.bert)
    texts = [*candidates, *(row["query"] for row in rows)]
    vectors = dict(zip(texts, encoder.encode(texts), strict=True))
    unit = {text: vector / np.linalg.norm(vector) for text, vector in vectors.items()}
    cluster = {"A man eats.", "Someone eats.", "Someone has food.", "There is food."}
    for row in rows:
        own = cluster if row["query"] in cluster else {row["query"], *row["positives"]}
        free = [text for text in candidates if text not in own]
        due = max(free, key=lambda text: float(unit[row["query"]] @ unit[text]))
        assert row["negatives"] == [due]
        cosines = [float(unit[row["query"]] @ unit[text]) for text in (*row["positives"], due)]
        assert row["scores"] == pytest.approx(cosines, abs=2e-6)

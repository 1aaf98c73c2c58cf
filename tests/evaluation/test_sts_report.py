"""What is told about the figures: the table, the published rows, the JSON file; and the command that ties them."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tyro

from angle_llm.evaluation import (
    PUBLISHED,
    PUBLISHED_TASKS,
    StsEvalSettings,
    StsPair,
    StsResults,
    StsTask,
    evaluate,
    markdown_report,
    results_dict,
    select_tasks,
    sts_main,
    write_json,
)

PAIRS = (StsPair("a b", "a b", 5.0, "one"), StsPair("a b", "a c", 3.0, "one"), StsPair("a b", "d e", 0.0, "two"))
TSV = "sentence1\tsentence2\tscore\na b\ta b\t5\na b\ta c\t3\na b\td e\t0\n"


def hashed_words(texts: Sequence[str]) -> np.ndarray:
    rows = np.zeros((len(texts), 64), dtype=np.float32)
    for row, text in zip(rows, texts, strict=True):
        for word in text.split():
            row[zlib.crc32(word.encode()) % 64] += 1
    return rows


def results(*names: str, variant: str = "raw", official_pairs: int | None = 3) -> StsResults:
    tasks = [StsTask(name, name.upper(), variant, "here", PAIRS, official_pairs) for name in names]
    return evaluate(hashed_words, tasks)


def rows_of(report: str) -> dict[str, list[str]]:
    """Cells of the first table by the first cell of their row."""
    lines = report.split("\n\n")[0].split("\n")
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def test_published_averages_are_the_means_of_their_rows() -> None:
    for row in PUBLISHED:
        if row.spearman:
            assert set(row.spearman) == set(PUBLISHED_TASKS)
            assert sum(row.spearman.values()) / 7 == pytest.approx(row.average, abs=0.006)
        assert row.average_over(PUBLISHED_TASKS) == row.average
        assert row.average_over(()) is None
        assert (row.average_over(("stsb",)) is None) == (not row.spearman)


def test_the_table_compares_over_the_tasks_that_are_here() -> None:
    rows = rows_of(markdown_report(results("sts12", "stsb", "stsb-dev"), "my model"))

    assert rows["model"] == ["text", "STS12", "STSB", "STSB-DEV", "avg"]
    assert rows["**my model**"] == ["raw", "100.00", "100.00", "100.00", "100.00"]
    assert rows["AnglE-LLaMA2-7B v1"] == ["senteval", "78.68", "88.92", "–", "83.80"]
    assert "SimCSE-LLaMA2-7B" not in rows  # only its average over all seven is known


def test_all_seven_tasks_bring_the_rows_with_an_average_only() -> None:
    rows = rows_of(markdown_report(results(*PUBLISHED_TASKS), "my model"))
    assert {row.model for row in PUBLISHED} <= set(rows)
    assert rows["AnglE-LLaMA2-7B v2"][-1] == "85.96"
    assert rows["SimCSE-LLaMA2-7B"] == ["senteval", *["–"] * 7, "85.24"]


def test_a_file_alone_stands_alone() -> None:
    report = markdown_report(results("mine", variant="file", official_pairs=None), "my model")
    assert rows_of(report)["**my model**"] == ["file", "100.00"]
    assert "AnglE" not in report
    assert "Published" not in report
    assert "the sentences as in the file" in report


def test_the_report_says_which_text_each_number_is_on() -> None:
    raw, senteval = (markdown_report(results("sts12", variant=variant), "m") for variant in ("raw", "senteval"))
    assert "Text `raw`" in raw
    assert "Not the same text as the published rows: STS12" in raw
    assert "Text `senteval`" in senteval
    assert "Not the same text" not in senteval
    for report in (raw, senteval):
        assert "Published rows are on SentEval's text" in report


def test_every_task_and_subtask_has_its_figures() -> None:
    report = markdown_report(results("sts12"), "m")
    assert re.search(r"\| STS12 +\| raw +\| +3 \| +100\.00 \|", report)
    assert re.search(r"\| · one +\| raw +\| +2 \|", report)


def test_what_is_odd_is_said() -> None:
    report = markdown_report(results("sts12", official_pairs=3108), "m")
    assert "STS12: 3 pairs here, 3,108 in the published task" in report
    assert "STS12, two: no correlation: of similarities and gold scores, at least two pairs are needed" in report

    zero = evaluate(lambda texts: np.zeros((len(texts), 4)), [StsTask("sts12", "STS12", "raw", "here", PAIRS)])
    report = markdown_report(zero, "m")
    assert "3 of 3 sentences have the zero vector" in report
    assert rows_of(report)["**m**"] == ["raw", "nan", "nan"]


def test_a_pipe_in_a_name_does_not_break_the_table() -> None:
    lines = markdown_report(results("sts12"), "a|b").split("\n\n")[0].split("\n")
    assert "a\\|b" in lines[2]
    assert len({len(line) for line in lines}) == 1


def test_json_holds_model_settings_variant_and_figures(tmp_path: Path) -> None:
    settings = {"model": "m", "data_dir": tmp_path, "tasks": ("sts12",)}
    path = tmp_path / "new" / "sts.json"
    write_json(
        path,
        results_dict(results("sts12", "mine", variant="senteval"), "m", settings=settings, encoder={"pooling": "last"}),
    )
    content = json.loads(path.read_text())

    assert content["model"] == "m"
    assert content["variant"] == "senteval"
    assert content["settings"] == {"model": "m", "data_dir": str(tmp_path), "tasks": ["sts12"]}
    assert content["encoder"] == {"pooling": "last"}
    assert content["average"] == {"tasks": ["sts12"], "spearman": pytest.approx(100)}
    assert content["tasks"]["sts12"]["spearman"] == pytest.approx(100)
    assert content["tasks"]["sts12"]["pairs"] == 3
    assert content["tasks"]["sts12"]["variant"] == "senteval"
    assert content["tasks"]["sts12"]["subtasks"]["two"]["spearman"] is None
    assert "at least two pairs" in content["tasks"]["sts12"]["subtasks"]["two"]["undefined"]
    assert [file.name for file in path.parent.iterdir()] == ["sts.json"]


def test_a_failed_write_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sts.json"
    write_json(path, {"old": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"new": math.nan})

    def killed(self: Path, target: Path) -> None:
        raise OSError("killed before the rename")

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(OSError, match="before the rename"):
        write_json(path, {"new": 1})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["sts.json"]


@dataclass
class Prompt:
    name: str = "plain"
    template: str = "{text}"


class Words:
    """An encoder by the shape `sts_main` needs, which remembers how it was opened and asked."""

    prompt = Prompt()
    pooling = "sum"
    max_length = 77

    def __init__(self, path: str, **options: object) -> None:
        self.opened = (path, options)
        self.asked: list[dict[str, object]] = []

    def encode(
        self, texts: Sequence[str], *, micro_batch_tokens: int = 8192, show_progress: bool = False
    ) -> np.ndarray:
        self.asked.append({"texts": len(texts), "micro_batch_tokens": micro_batch_tokens})
        return hashed_words(texts)


def test_the_command_reads_encodes_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs.tsv").write_text(TSV)
    arguments = ["--model", "some/model", "--tasks", str(tmp_path / "pairs.tsv"), "--json", str(tmp_path / "out.json")]
    arguments += ["--prompt", "p", "--pooling", "mean", "--max-length", "50", "--micro-batch-tokens", "99"]
    arguments += ["--revision", "abc"]
    opened: list[Words] = []

    def open_encoder(path: str, /, **options: object) -> Words:
        opened.append(Words(path, **options))
        return opened[-1]

    sts_main(tyro.cli(StsEvalSettings, args=arguments), open_encoder)

    [encoder] = opened
    options = {"prompt": "p", "pooling": "mean", "max_length": 50}
    options |= {"dtype": "auto", "device": None, "revision": "abc"}
    assert encoder.opened == ("some/model", options)
    assert encoder.asked == [{"texts": 3, "micro_batch_tokens": 99}]
    report = capsys.readouterr().out
    assert rows_of(report)["**some/model**"] == ["file", "100.00"]
    assert "Prompt plain, pooling sum, at most 77 tokens." in report
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["settings"]["max_length"] == 50
    assert content["encoder"] == {
        "prompt": {"name": "plain", "template": "{text}"},
        "pooling": "sum",
        "max_length": 77,
    }
    assert content["tasks"]["pairs"]["spearman"] == pytest.approx(100)


def test_no_task_names_means_every_published_task_there_is(tmp_path: Path) -> None:
    for name in ("stsb/test", "stsb/dev", "sick/test", "sts/sts12.test"):
        path = tmp_path / f"{name}.tsv"
        path.parent.mkdir(exist_ok=True)
        path.write_text(TSV)
    assert [task.name for task in select_tasks((), tmp_path, "raw")] == ["sts12", "stsb", "sickr"]
    assert [task.name for task in select_tasks(("stsb-dev",), tmp_path, "raw")] == ["stsb-dev"]
    with pytest.raises(FileNotFoundError, match=r"no STS task on senteval text .*sts/stsNN\.test\.tsv"):
        select_tasks((), tmp_path, "senteval")


def test_missing_data_is_noticed_before_the_model_is_opened(tmp_path: Path) -> None:
    def open_encoder(path: str, /, **options: object) -> Words:
        raise AssertionError("opened too early")

    with pytest.raises(FileNotFoundError, match=r"no pair file"):
        sts_main(StsEvalSettings(model="m", tasks=(str(tmp_path / "no.tsv"),)), open_encoder)


def test_settings_that_cannot_be_meant_name_the_flag() -> None:
    with pytest.raises(ValueError, match=r"--max-length must be at least 1 token, found 0"):
        StsEvalSettings(model="m", max_length=0)
    with pytest.raises(ValueError, match=r"--micro-batch-tokens"):
        StsEvalSettings(model="m", micro_batch_tokens=-1)
    with pytest.raises(ValueError, match=r"--variant senteval needs --data-dir"):
        StsEvalSettings(model="m", variant="senteval")


def test_every_setting_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tyro.cli(StsEvalSettings, args=["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in ("a saved directory, a hub id", "the published tables", "prompt included", "Tokens computed at once"):
        assert words in text


def test_the_evaluation_room_knows_no_model() -> None:
    """Importing it loads neither torch nor transformers, scipy nor datasets; they wait for their use."""
    code = "import sys, angle_llm.evaluation; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("torch", "transformers", "scipy", "datasets", "tyro"):
        assert f"'{heavy}'" not in loaded

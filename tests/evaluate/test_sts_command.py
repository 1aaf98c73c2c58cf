"""The command: what it reads, opens, prints and writes, and what it refuses before it costs any waiting."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tyro
from hypothesis import given
from hypothesis import strategies as st
from sts_samples import hashed_words, rows_of

from angle_llm.evaluate import StsEvalSettings, edited, read_pairs, select_tasks, sts_main
from angle_llm.evaluate.command import EDITS
from angle_llm.prompts import PromptTemplate, load_prompt

TSV = "sentence1\tsentence2\tscore\na b\ta b\t5\na b\ta c\t3\na b\td e\t0\n"


class Words:
    """An encoder by the shape `sts_main` needs, which remembers how it was opened and asked."""

    prompt = PromptTemplate("plain", "{text}")
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
    assert content["encoder"]["prompt"]["template"] == "{text}"
    assert (content["encoder"]["pooling"], content["encoder"]["max_length"]) == ("sum", 77)
    assert content["tasks"]["pairs"]["spearman"] == pytest.approx(100)


def run(tmp_path: Path, *arguments: str, **kinds: type[Words]) -> list[Words]:
    """Runs the command on a pair file of 40 pairs with sub-tasks; gives the encoders it opened, `kinds` by name."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(40):
        words, score = [f"w{word}" for word in rng.choice(500, 12, replace=False)], int(rng.integers(0, 6))
        second = [words[0] if rng.random() < score / 6 else "w", *words[1 : 1 + score], *words[6 : 11 - score]]
        end = "." if i % 2 else "?"
        lines.append(f'{"one" if i % 3 else "two"}\ta {" ".join(words[:6])}{end}\ta "{" ".join(second)}" b\t{score}')
    (tmp_path / "pairs.tsv").write_text("subtask\tsentence1\tsentence2\tscore\n" + "\n".join(lines) + "\n")
    opened: list[Words] = []

    def open_encoder(path: str, /, **options: object) -> Words:
        opened.append(kinds.get(path, Words)(path, **options))
        return opened[-1]

    given = ["--model", "m", "--tasks", str(tmp_path / "pairs.tsv"), "--resamples", "60", *arguments]
    sts_main(tyro.cli(StsEvalSettings, args=given), open_encoder)
    return opened


class FirstWord(Words):
    """Knows the first word of a text and its length, no more."""

    def encode(
        self, texts: Sequence[str], *, micro_batch_tokens: int = 8192, show_progress: bool = False
    ) -> np.ndarray:
        return hashed_words([f"{text.split()[1]} {len(text) // 3}" for text in texts])


@given(st.text(min_size=1))
def test_published_edits_are_those_of_the_bundled_prompt_and_done_twice_done_once(sentence: str) -> None:
    bundled = load_prompt("summarize_one_word_edited")
    assert bundled.edits == EDITS["published"]
    assert bundled.edit(bundled.edit(sentence)) == bundled.edit(sentence)


def test_published_edits_are_done_whatever_the_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--pairs-out", str(tmp_path / "a.jsonl"), "--pairs-text"]
    run(tmp_path, "--edits", "published", *files)
    report = capsys.readouterr().out
    assert "Text `file, edited`" in report
    assert rows_of(report)["**m**"][0] == "file, edited"
    first, second = (json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()[:2])
    assert first["sentence1"].endswith(".")  # was a question mark
    assert first["sentence2"].startswith("a 'w")
    assert first["sentence2"].endswith("' b.")
    assert second["sentence1"].endswith(".")
    assert not second["sentence1"].endswith("..")
    content = json.loads((tmp_path / "a.json").read_text())["tasks"]["pairs"]
    assert content["edits"] == "published"

    run(tmp_path, *files)
    plain = json.loads((tmp_path / "a.json").read_text())["tasks"]["pairs"]
    assert plain["edits"] == ""
    assert plain["spearman"] != content["spearman"]
    assert 'a "w' in json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])["sentence2"]
    assert "edited" not in capsys.readouterr().out


def test_edits_of_a_task_change_its_sentences_alone(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text(TSV)
    task = read_pairs(tmp_path / "pairs.tsv")
    changed = edited(task, "shouted", str.upper)
    assert changed.text == "file, edited"
    assert [(p.sentence1, p.score) for p in changed.pairs] == [(p.sentence1.upper(), p.score) for p in task.pairs]


@pytest.mark.parametrize("ending", [".jsonl", ".csv"])
def test_scores_are_written_pair_by_pair(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "new" / f"pairs{ending}"
    run(tmp_path, "--pairs-out", str(path), "--json", str(tmp_path / "out.json"))
    text = path.read_text()
    lines = (
        [json.loads(line) for line in text.splitlines()]
        if ending == ".jsonl"
        else list(csv.DictReader(text.splitlines()))
    )
    content = json.loads((tmp_path / "out.json").read_text())["pairs"]["pairs"]
    assert [float(line["cosine"]) for line in lines] == content["cosine"]
    assert [float(line["gold"]) for line in lines] == content["gold"]
    assert [int(line["index"]) for line in lines] == list(range(40))
    assert {(line["task"], line["subtask"]) for line in lines} == {("pairs", "one"), ("pairs", "two")}
    assert "sentence1" not in lines[0]


def test_markdown_and_csv_files_hold_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "--markdown", str(tmp_path / "sts.md"), "--csv", str(tmp_path / "sts.csv"))
    printed = capsys.readouterr().out
    assert (tmp_path / "sts.md").read_text() == printed
    [whole, *_] = csv.DictReader((tmp_path / "sts.csv").read_text().splitlines())
    assert f"{float(whole['spearman']):.2f}" == rows_of(printed)["**m**"][1]
    assert float(whole["spearman_low"]) < float(whole["spearman"]) < float(whole["spearman_high"])


def test_another_model_and_its_saved_scores_compare_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "first.json"
    run(tmp_path, "--model", "first", "--json", str(saved), first=FirstWord)

    opened = run(tmp_path, "--against", "first", "--prompt", "p", "--json", str(tmp_path / "a.json"), first=FirstWord)
    assert [encoder.opened[0] for encoder in opened] == ["m", "first"]
    assert opened[0].opened[1] == opened[1].opened[1]  # the same flags for both
    assert "The other: first." in capsys.readouterr().out
    assert len(run(tmp_path, "--against", str(saved), "--json", str(tmp_path / "b.json"))) == 1
    assert f"The other: first ({saved})." in capsys.readouterr().out

    one, two = (json.loads((tmp_path / name).read_text())["comparison"] for name in ("a.json", "b.json"))
    assert one == two
    difference = one["tasks"]["pairs"]
    here = json.loads((tmp_path / "a.json").read_text())["tasks"]["pairs"]
    assert difference["spearman"] == here["spearman"]
    assert difference["other"] == json.loads(saved.read_text())["tasks"]["pairs"]["spearman"]
    assert difference["interval"]["low"] < difference["difference"] < difference["interval"]["high"]


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
    with pytest.raises(FileNotFoundError, match=r"no results file at no\.json"):
        sts_main(StsEvalSettings(model="m", tasks=("starter:graded_pairs.tsv",), against="no.json"), open_encoder)


def test_settings_that_cannot_be_meant_name_the_flag() -> None:
    with pytest.raises(ValueError, match=r"--max-length must be at least 1 token, found 0"):
        StsEvalSettings(model="m", max_length=0)
    with pytest.raises(ValueError, match=r"--micro-batch-tokens"):
        StsEvalSettings(model="m", micro_batch_tokens=-1)
    with pytest.raises(ValueError, match=r"--variant senteval needs --data-dir"):
        StsEvalSettings(model="m", variant="senteval")
    with pytest.raises(ValueError, match=r"--resamples and --seed must be at least 0, found -1 and 0"):
        StsEvalSettings(model="m", resamples=-1)
    with pytest.raises(ValueError, match=r"--against needs --resamples"):
        StsEvalSettings(model="m", resamples=0, against="other")
    with pytest.raises(ValueError, match=r"--pairs-out must end in \.csv or \.jsonl, found pairs\.txt"):
        StsEvalSettings(model="m", pairs_out=Path("pairs.txt"))
    with pytest.raises(ValueError, match=r"--pairs-text needs --pairs-out"):
        StsEvalSettings(model="m", pairs_text=True)


def test_every_setting_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tyro.cli(StsEvalSettings, args=["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "a saved directory, a hub id",
        "the published tables",
        "prompt included",
        "Tokens computed at once",
        "not what another training seed",
        "with its 95 % interval and p-value",
        "whatever the prompt",
    ):
        assert words in text


def test_the_evaluation_room_knows_no_model() -> None:
    """Importing it loads neither torch nor transformers, scipy nor datasets; they wait for their use."""
    code = "import sys, angle_llm.evaluate; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("torch", "transformers", "scipy", "datasets", "tyro"):
        assert f"'{heavy}'" not in loaded

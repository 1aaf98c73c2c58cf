"""The commands as a user types them: real processes, real files, mistakes without tracebacks."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from programs import run
from tiny import save_tiny_base

from angle_llm.cli import DEBUG_VARIABLE, NO_BARS, embed, guarded, main
from angle_llm.config import SettingsError
from angle_llm.data import DataError, DataReport, DataSource
from angle_llm.model.backbone import locate
from angle_llm.model.checks import ArtifactError
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.pooling import pooling_named
from angle_llm.prompts import PromptError
from angle_llm.train.trainer import TrainingError

ROOT = Path(__file__).parent.parent
SHORT = ["--data.limit", "8", "--batch-size", "4", "--max-steps", "2", "--model.max-length", "100", "--lora.rank", "4"]


def command(*arguments: str, cwd: Path = ROOT, code: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a console script of this environment and asserts its exit code."""
    script, *rest = arguments
    if script == "accelerate":  # a launcher, which starts processes of its own
        path = Path(sys.executable).parent / script
        result = subprocess.run(
            [str(path), *rest], cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    else:
        result = run(*arguments, cwd=cwd, stdin=stdin)
    assert result.returncode == code, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_base("llama", tmp_path_factory.mktemp("base")))


def launch(recipe: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    flags = [
        "--num_processes",
        "1",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    return command("accelerate", "launch", *flags, f"recipes/{recipe}.py", *arguments)


@pytest.mark.parametrize(
    ("recipe", "config", "kind"), [("llama2_nli", "starter", "llama"), ("bert_nli", "minilm_starter", "bert")]
)
def test_a_recipe_trains_and_says_how_to_use_the_result(recipe: str, config: str, kind: str, tmp_path: Path) -> None:
    folder = save_tiny_base(kind, tmp_path / "base")
    run = ["--run-dir", str(tmp_path / "run"), "--model.path", str(folder), "--model.dtype", "float32", *SHORT]
    shown = launch(recipe, "--config", f"recipes/{config}.yaml", *run).stdout
    assert "before" in shown
    assert "after" in shown
    assert f'from_pretrained("{tmp_path / "run" / "model"}")' in shown
    assert SentenceEncoder.from_pretrained(tmp_path / "run" / "model").encode(["A dog runs."]).shape == (1, 32)


def test_train_embed_and_eval(base: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pairs = tmp_path / "held_out.tsv"
    pairs.write_text("sentence1\tsentence2\tscore\nA dog.\tA dog.\t5\nA dog.\tNo cat.\t1\nA cat.\tA dog eats.\t2\n")
    arguments = [
        "--run-dir",
        str(run),
        "--model.path",
        base,
        "--model.dtype",
        "float32",
        "--evaluation.pairs",
        str(pairs),
    ]
    shown = command("angle-llm", "train", *arguments, *SHORT).stdout
    assert f"eval/sts.py --model {run}/model --tasks {pairs}\n" in shown, "how to use it names the run's own pairs"
    texts = ["A dog runs.", 'She said "no" {0}.', "Zwei Hunde – 犬"]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    model = str(run / "model")
    arguments = ["--model", model, "--output", str(tmp_path / "rows.npy")]
    shown = command("angle-llm", "embed", *arguments, "--input", str(tmp_path / "texts.txt")).stdout
    assert "3 rows of 32 dimensions" in shown
    rows = np.load(tmp_path / "rows.npy", allow_pickle=False)
    np.testing.assert_array_equal(rows, SentenceEncoder.from_pretrained(model).encode(texts))
    command("angle-llm", "embed", *arguments, "--input", "-", "--normalize", stdin="A dog runs.")
    np.testing.assert_allclose(
        np.load(tmp_path / "rows.npy"), rows[:1] / np.linalg.norm(rows[0]), atol=1e-6
    )  # float32, another micro-batch
    shown = command(
        "angle-llm", "eval", "--model", model, "--tasks", "starter:graded_pairs.tsv", "--json", str(tmp_path / "s.json")
    ).stdout
    (figures,) = json.loads((tmp_path / "s.json").read_text())["tasks"].values()
    assert figures["pairs"] == 340
    assert f"{figures['spearman']:.2f}" in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["trian"], ["unknown command 'trian'", "'train'"]),
        (["train", "--config", "none.yaml"], ["no settings file at none.yaml"]),
        (["train", "--model.path", "./nowhere"], ["no model at nowhere", "package:NAME"]),
        (["train", "--model.prompt", "sumarize_one_word"], ["'summarize_one_word'"]),
        (["train", "--data.path", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["train", "--evaluation.pairs", "nowhere.tsv"], ["nowhere.tsv"]),
        (["train", "--objective.angle-form", "fase"], ["'phase'"]),
        (["train", "--resume", "atuo"], ["--resume needs auto, never, or a checkpoint", "(there: none), got 'atuo'"]),
        (["embed", "--model", "./nowhere", "--input", "README.md", "--output", "x.txt"], ["must end in .npy"]),
        (["embed", "--model", "./nowhere", "--input", "README.md", "--output", "docs"], ["must end in .npy"]),
        (
            ["embed", "--model", "./nowhere", "--input", "README.md", "--output", "Makefile/a/x.npy"],
            ["Makefile/a/x.npy needs a folder", "Makefile is a file"],
        ),
        (
            ["embed", "--model", "./nowhere", "--input", "none.txt", "--output", "x.npy"],
            ["UTF-8 text file with one text a line", "no file none.txt", "Check the path"],
        ),
        (
            ["embed", "--model", "./nowhere", "--input", "docs", "--output", "x.npy"],
            ["UTF-8 text file with one text a line", "docs is a folder", "Name a file"],
        ),
        (
            ["embed", "--model", "./nowhere", "--input", "pyproject.toml", "--output", "x.npy"],
            ["pyproject.toml:4", "empty"],
        ),
        (["eval", "--model", "./nowhere", "--tasks", "sts99"], ["sts99"]),
    ],
)
def test_a_mistake_is_told_in_a_sentence(
    arguments: list[str],
    told: list[str],
    base: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if arguments[0] == "train":
        arguments = [*arguments, *([] if "--model.path" in arguments else ["--model.path", base])]
        arguments += ["--run-dir", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["angle-llm", *arguments])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stopped:
        main()
    shown = capsys.readouterr().err
    assert stopped.value.code == 2
    assert all(word in shown for word in told), shown
    assert DEBUG_VARIABLE not in shown, "a message that says what to do needs no more"
    assert not (tmp_path / "run" / "model").exists()


def embed_mistake(arguments: list[str], stdin: bytes = b"") -> str:
    """What `angle-llm embed` says to a mistake it must find without opening the model, which is not there."""
    result = run("angle-llm", "embed", "--model", "./nowhere", *arguments, stdin=stdin)
    assert result.returncode == 2, result.stderr
    return result.stderr


def test_texts_that_are_not_utf8_are_told_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xef\xbb\xbfa\ncaf\xe9\n")
    output = ["--output", str(tmp_path / "x.npy")]
    shown = embed_mistake(["--input", str(tmp_path / "latin.txt"), *output])
    assert "latin.txt:2: byte 0xe9 is not UTF-8. Convert it, as in `iconv -f latin1 -t utf-8`" in shown
    assert "standard input:2: byte 0xe9 is not UTF-8" in embed_mistake(["--input", "-", *output], b"a\ncaf\xe9\n")
    assert "standard input is empty" in embed_mistake(["--input", "-", *output])


def test_an_output_folder_that_is_closed_is_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root, who may run the tests, may write everywhere
    with pytest.raises(SettingsError, match=f"a folder you may write in; {tmp_path} is not"):
        embed(["--model", "./nowhere", "--input", "Makefile", "--output", str(tmp_path / "new" / "x.npy")])


def test_an_output_that_is_a_folder_is_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "x.npy").mkdir()
    assert "x.npy is a folder" in embed_mistake(
        ["--input", str(ROOT / "Makefile"), "--output", str(tmp_path / "x.npy")]
    )


def raise_it(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("body", "complete"),
    [
        (lambda: raise_it(SettingsError("ours")), True),
        (lambda: raise_it(DataError("ours")), True),
        (lambda: raise_it(PromptError("ours")), True),
        (lambda: raise_it(ArtifactError("ours")), True),
        (lambda: raise_it(TrainingError("ours")), True),
        (lambda: locate("./nowhere"), True),
        (lambda: pooling_named("lats"), True),
        (lambda: Path("nowhere.txt").read_text(), False),
        (lambda: raise_it(ValueError("another's")), False),
        (lambda: np.zeros(3).reshape(2), False),
        (lambda: raise_it(RuntimeError("CUDA out of memory")), False),
        (lambda: DataReport(DataSource(), "triple", False, {}, [], 1, 0, 0, {}, []), False),
    ],
)
def test_where_an_error_came_from_is_offered_for_those_not_written_here(
    body: Callable[[], object], complete: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(DEBUG_VARIABLE, raising=False)
    with pytest.raises(SystemExit):
        guarded(body)
    assert (f"{DEBUG_VARIABLE}=1 shows where it came from" in capsys.readouterr().err) is not complete


def test_the_debug_variable_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    with pytest.raises(DataError):
        guarded(lambda: raise_it(DataError("ours")))


def test_a_reader_that_stops_early_is_no_error() -> None:
    """`angle-llm train --help | head -1`"""
    path = Path(sys.executable).parent / "angle-llm"
    with subprocess.Popen(
        [str(path), "train", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_an_interrupt_ends_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        guarded(interrupted)
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_bars_are_for_terminals(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in NO_BARS:
        monkeypatch.setenv(variable, "")  # so that it is put back afterwards
        monkeypatch.delenv(variable)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    seen: list[str | None] = []
    guarded(lambda: seen.extend(os.environ.get(variable) for variable in NO_BARS))
    assert seen == [None if terminal else "1"] * 3


def test_redirected_output_is_readable(base: str, tmp_path: Path) -> None:
    """The libraries obey: no bar of theirs is drawn while weights load."""
    (tmp_path / "a.txt").write_text("A dog runs.\n")
    free = {name: value for name, value in os.environ.items() if name not in NO_BARS}
    script = Path(sys.executable).parent / "angle-llm"
    arguments = ["--model", base, "--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "x.npy")]
    result = subprocess.run([str(script), "embed", *arguments], env=free, capture_output=True, text=True, check=True)
    assert "Loading weights" not in result.stderr


def test_help_lists_the_commands() -> None:
    shown = command("angle-llm", "--help").stdout
    assert all(name in shown for name in ("train", "embed", "search", "eval"))
    assert "Traceback" not in command("angle-llm", "train", "--config", "none.yaml", code=2).stderr


def test_a_bad_row_names_file_and_line(tmp_path: Path, base: str) -> None:
    rows = '{"anchor": "a", "positive": "b", "negative": "c"}\n{"anchor": "a", "positive": "", "negative": "c"}\n'
    (tmp_path / "bad.jsonl").write_text(rows)
    arguments = ["--data.path", str(tmp_path / "bad.jsonl"), "--model.path", base]
    shown = command("angle-llm", "train", *arguments, cwd=tmp_path, code=2).stderr
    assert "bad.jsonl:2" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]

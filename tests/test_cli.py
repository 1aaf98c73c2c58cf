"""The command line: sub-commands, messages without tracebacks, exit codes, redirected output."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from programs import run
from tiny import save_tiny_base

from angle_llm import cli
from angle_llm.cli import DEBUG_VARIABLE, NO_BARS, main, run_cli
from angle_llm.data import DataError
from angle_llm.data.examples import DataReport
from angle_llm.model.source.resolve import locate
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import DataSource

ROOT = Path(__file__).parent.parent
EMBED = ["embed", "--model", "./nowhere"]
STARTER = ["eval", "sts", "--model", "./nowhere", "--tasks", "starter:graded_pairs.tsv"]
COMMANDS = [*cli.COMMANDS]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_base("llama", tmp_path_factory.mktemp("base")))


@pytest.mark.parametrize("command", ["", "eval", "data", *COMMANDS])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(cli.run([*command.split(), "--help"]))
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert f"angle-llm {command}".strip() in shown
    inner = [
        name.removeprefix(f"{command} ").split()[0] for name in COMMANDS if name.startswith(f"{command} ".lstrip())
    ]
    assert all(name in shown for name in inner)


def test_the_documentation_has_a_status_for_every_command() -> None:
    table = (ROOT / "docs/index.md").read_text().partition("## Commands")[2]
    named = [word.partition(" --")[0] for row in table.splitlines() for word in re.findall(r"`(.+?)`", row)]
    assert set(named) == set(COMMANDS)


def test_a_settings_file_sets_flags_of_every_command(tmp_path: Path) -> None:
    (tmp_path / "embed.yaml").write_text(f"{{model: ./nowhere, input: {ROOT / 'Makefile'}, output: x.txt}}")
    with pytest.raises(SettingsError, match=r"x\.txt"):
        cli.run(["embed", "--config", str(tmp_path / "embed.yaml")])


def test_flags_complete_a_settings_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.csv").write_text("a,b,year\n" + "".join(f"text {n},other {n},{n % 2}\n" for n in range(20)))
    split = ["data", "split", str(tmp_path / "rows.csv"), "--config", str(tmp_path / "split.yaml")]
    (tmp_path / "split.yaml").write_text("{columns: {text1: a, text2: b}, parts: {valid: 0.5}}")
    cli.run([*split, "--out", str(tmp_path / "out")])
    assert "20 rows = 10 in train.jsonl + 10 in valid.jsonl;" in capsys.readouterr().out
    cli.run([*split, "--out", str(tmp_path / "other"), "--parts", "test", "0.25"])
    assert "20 rows = 15 in train.jsonl + 5 in test.jsonl;" in capsys.readouterr().out
    cli.run([*split, "--out", str(tmp_path / "changed"), "--parts.valid", "0.1"])
    assert "20 rows = 18 in train.jsonl + 2 in valid.jsonl;" in capsys.readouterr().out
    (tmp_path / "mine.yaml").write_text("{model: ./nowhere}")
    with pytest.raises(SettingsError, match=r"--out.*\.jsonl"):  # the checks across fields follow the flags
        cli.run(["data", "mine", "rows.csv", "--config", str(tmp_path / "mine.yaml"), "--out", "groups.txt"])
    for content, message in (
        ("{part: {valid: 1}}", "'part'.*'parts'"),
        ("{parts: {valid: 2}}", r"split\.yaml: parts\.valid.*2"),
        ("{parts: 3}", r"split\.yaml: parts"),
    ):
        (tmp_path / "split.yaml").write_text(content)
        with pytest.raises(SettingsError, match=message):
            cli.run([*split, "--out", str(tmp_path / "other")])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], ["'trian'", "'train'"]),
        (["eval", "stss"], ["'eval stss'", "'eval sts'"]),
        (["data", "--format", "triple"], ["'data --format'", "data check"]),
        (["train", "--config", "none.yaml"], ["none.yaml"]),
        (["train", "--learning-rate", "3"], ["--learning-rate", "--optimizer.learning-rate"]),
        (["train", "--batch-size", "0"], ["TrainSettings: --batch-size: ", "0"]),
        (["plan", "--processes", "0"], ["processes: "]),
        (["train", "--model.path", "./nowhere"], ["nowhere", "package:NAME"]),
        (["plan"], ["no model is named", "--model.path"]),
        (["train", "--model.prompt", "sumarize_one_word"], ["'summarize_one_word'"]),
        (["train", "--data.path", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["train", "--evaluation.tasks", "nowhere.tsv"], ["nowhere.tsv"]),
        (
            ["train", "--evaluation.tasks", "README.mb"],
            ["README.mb", "no such file or folder. Did you mean README.md?"],
        ),
        (["train", "--model.path", "eval/reprot"], ["no model at eval/reprot. Did you mean eval/report"]),
        (["eval", "sts", "--model", "x", "--columns", "score", "rating"], ["--columns", "file in --tasks, got none"]),
        (["train", "--objective.angle-form", "fase"], ["phase", "'fase'"]),
        (["train", "--model.pooling", "lats"], ["'lats'", "'last'"]),
        (["train", "--data.format", "tripel"], ["'tripel'", "'triple'"]),
        (["train", "--optimizer.learning-rate", "-1"], ["--optimizer.learning-rate: ", "-1"]),
        (["train", "--lora.rank", "four"], ["--lora.rank", "four"]),
        (["train", "--lora.rnak", "4"], ["--lora.rnak", "--lora.rank"]),
        (["train", "--evaluation.every-steps", "3"], ["evaluation.every_steps", "evaluation.tasks"]),
        (["train", "--resume", "atuo"], ["--resume", "auto", "never", "'atuo'"]),
        ([*EMBED, "--input", "README.md", "--output", "x.txt"], ["x.txt", ".npy"]),
        ([*EMBED, "--input", "none.txt", "--output", "x.npy"], ["none.txt"]),
        ([*EMBED, "--input", "pyproject.toml", "--output", "x.npy"], ["pyproject.toml:4", "empty"]),
        (["eval", "sts", "--model", "./nowhere", "--tasks", "sts99"], ["sts99", "'stsb'"]),
        (["eval", "sts", "--model", "./nowhere", "--tasks", "none.tsv"], ["none.tsv"]),
        ([*STARTER, "--against", "none.json"], ["none.json"]),
        ([*STARTER, "--variant", "senteval"], ["--variant senteval", "--data-dir"]),
        (["eval", "sts", "--model", "./nowhere", "--max-length", "0"], ["--max-length: ", "got 0"]),
        (["eval", "sts", "--model", "./nowhere", "--config"], ["--config: expected a YAML file"]),
        ([*EMBED, "--input", "README.md", "--output", "x", "--shard-rows", "0"], ["--shard-rows: ", "got 0"]),
        (["data", "check"], ["FILE is missing"]),
        (["data", "check", "README.md", "--against", "a", "--against=b"], ["--against is given twice"]),
        (["train", "--data.columns", "text1", "a", "--data.columns", "text2", "b"], ["--data.columns is given twice"]),
        (["data", "check", "README.md", "--fix", "Makefile"], ["--fix Makefile", "not an empty folder"]),
    ],
)
def test_a_mistake_is_reported_in_a_sentence(
    arguments: list[str],
    expected: list[str],
    base: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if arguments[0] == "train":
        arguments = [*arguments, *([] if "--model.path" in arguments else ["--model.path", base])]
        arguments += ["--run-dir", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["angle-llm", *arguments])
    monkeypatch.delenv(DEBUG_VARIABLE, raising=False)
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stopped:
        main()
    shown = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().err).split())
    assert stopped.value.code == 2
    assert "Traceback" not in shown
    assert all(word in shown for word in expected), shown
    assert not (tmp_path / "run").exists()


def test_bytes_that_are_not_utf8_are_reported_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xef\xbb\xbfa\ncaf\xe9\n")
    output = ["--output", str(tmp_path / "x.npy")]
    for source, stdin, words in (
        (str(tmp_path / "latin.txt"), b"", ["latin.txt:2", "0xe9", "cp1252"]),
        ("-", b"a\ncaf\xe9\n", ["standard input:2", "0xe9"]),
        ("-", b"", ["standard input has no text"]),
    ):
        result = run("angle-llm", *EMBED, "--input", source, *output, stdin=stdin)
        assert result.returncode == 2
        assert all(word in result.stderr for word in words), result.stderr


def raise_it(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("body", "complete"),
    [
        (lambda: raise_it(SettingsError("ours")), True),
        (lambda: raise_it(DataError("ours")), True),
        (lambda: locate("./nowhere"), False),
        (lambda: Path("nowhere.txt").read_text(), False),
        (lambda: np.zeros(3).reshape(2), False),
        (lambda: DataReport(DataSource(), "triple", False, {}, [], 1, 0, 0, {}, []), False),
    ],
)
def test_the_debug_variable_is_named_for_errors_of_libraries(
    body: Callable[[], object], complete: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(DEBUG_VARIABLE, raising=False)
    with pytest.raises(SystemExit):
        run_cli(body)
    assert (f"{DEBUG_VARIABLE}=1" in capsys.readouterr().err) is not complete


def test_the_debug_variable_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    with pytest.raises(SystemExit) as done:
        run_cli(lambda: raise_it(DataError("ours")))
    assert done.value.code == 2
    assert 'raise_it(DataError("ours"))' in capsys.readouterr().err


def test_an_embedding_that_is_not_finite_is_an_error_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        run_cli(lambda: raise_it(FloatingPointError("not finite")))
    assert done.value.code == 2
    assert capsys.readouterr().err.startswith("error: not finite\n")


def test_an_unexpected_error_has_its_traceback_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Code 1 is a result of `verify` and `data check`."""
    with pytest.raises(SystemExit) as done:
        run_cli(lambda: {}["missing"])
    assert done.value.code == 2
    assert "KeyError: 'missing'" in capsys.readouterr().err


def test_a_closed_output_pipe_is_not_an_error() -> None:
    """`angle-llm train --help | head -1`"""
    path = Path(sys.executable).parent / "angle-llm"
    with subprocess.Popen(
        [str(path), "train", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_a_full_disk_is_the_exit_code_of_a_program() -> None:
    code = "import sys; from angle_llm.cli import run_cli; run_cli(lambda: (print('result'), sys.exit(0)))"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, "No space left" in done.stderr) == (2, True)


def test_a_full_disk_under_the_output_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also for a command that ends with an exit code, as `verify`. A closed stdout is none."""

    def ends() -> None:
        sys.stdout.write("result")
        sys.exit(0)

    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as stopped:
            run_cli(ends)
        patch.undo()
        with suppress(OSError):
            full.close()
    assert stopped.value.code == 2
    assert "No space left" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdout", None)
    run_cli(lambda: None)


def test_a_closed_output_pipe_needs_no_signal_of_unix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "SIGPIPE")

    def closed() -> None:
        raise BrokenPipeError

    with pytest.raises(SystemExit) as stopped:
        run_cli(closed)
    assert stopped.value.code == 141


def test_an_interrupt_ends_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        run_cli(interrupted)
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_bars_are_shown_only_in_terminals(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in NO_BARS:
        monkeypatch.setenv(variable, "")  # so that it is restored afterwards
        monkeypatch.delenv(variable)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    seen: list[str | None] = []
    run_cli(lambda: seen.extend(os.environ.get(variable) for variable in NO_BARS))
    assert seen == [None if terminal else "1"] * 3

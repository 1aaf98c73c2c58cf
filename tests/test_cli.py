"""The commands as a user types them: real processes, real files, mistakes without tracebacks."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import save_tiny_base

from angle_llm.cli import main
from angle_llm.modeling.encoder import SentenceEncoder

ROOT = Path(__file__).parent.parent
SHORT = ["--data.limit", "8", "--batch-size", "4", "--max-steps", "2", "--model.max-length", "100", "--lora.rank", "4"]


def command(*arguments: str, cwd: Path = ROOT, code: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a console script of this environment and asserts its exit code."""
    script, *rest = arguments
    path = Path(sys.executable).parent / script
    result = subprocess.run([str(path), *rest], cwd=cwd, input=stdin, capture_output=True, text=True, check=False)
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
    command("angle-llm", "train", "--run-dir", str(run), "--model.path", base, "--model.dtype", "float32", *SHORT)
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
        (["embed", "--model", "./nowhere", "--input", "README.md", "--output", "x.txt"], ["must end in .npy"]),
        (["embed", "--model", "./nowhere", "--input", "none.txt", "--output", "x.npy"], ["none.txt"]),
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
    assert not (tmp_path / "run" / "model").exists()


def test_help_lists_the_commands() -> None:
    shown = command("angle-llm", "--help").stdout
    assert all(name in shown for name in ("train", "embed", "eval"))
    assert "Traceback" not in command("angle-llm", "train", "--config", "none.yaml", code=2).stderr


def test_a_bad_row_names_file_and_line(tmp_path: Path, base: str) -> None:
    rows = '{"anchor": "a", "positive": "b", "negative": "c"}\n{"anchor": "a", "positive": "", "negative": "c"}\n'
    (tmp_path / "bad.jsonl").write_text(rows)
    arguments = ["--data.path", str(tmp_path / "bad.jsonl"), "--model.path", base]
    shown = command("angle-llm", "train", *arguments, cwd=tmp_path, code=2).stderr
    assert "bad.jsonl:2" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]

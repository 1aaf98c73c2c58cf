"""`angle-llm merge` and `angle-llm verify` as they are typed."""

import json
import sys
from pathlib import Path

import pytest
from tiny import save_tiny_base, train_a_little

from angle_llm import cli
from angle_llm.config import LoraSettings
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.lora import LoraUpdate


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    encoder = SentenceEncoder.from_pretrained(save_tiny_base("llama", tmp_path / "base"), device="cpu")
    encoder.add_lora(LoraSettings(rank=2, alpha=6))
    train_a_little(encoder.model)
    encoder.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["angle-llm", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_merge_then_verify(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "merge", adapter, tmp_path / "out", "--dtype", "float16", "--device", "cpu") == 0
    shown = capsys.readouterr().out
    assert "verdict: the same encoder" in shown
    assert str(tmp_path / "out") in shown
    assert SentenceEncoder.from_pretrained(tmp_path / "out").encode(["A dog runs."]).shape == (1, 32)

    (tmp_path / "texts.txt").write_text('A dog runs.\n\nShe said "no" {0}.\n', encoding="utf-8")
    more = ["--texts", tmp_path / "texts.txt", "--json", tmp_path / "new" / "report.json", "--device", "cpu"]
    assert run(monkeypatch, "verify", adapter, tmp_path / "out", *more, "--pairs", "starter:graded_pairs.tsv") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("2 texts")
    assert "Spearman" in shown
    report = json.loads((tmp_path / "new" / "report.json").read_text(encoding="utf-8"))
    assert report["holds"] is True
    assert report["first"]["spearman"] == pytest.approx(report["comparisons"][0]["form"]["spearman"], abs=1)

    assert run(monkeypatch, "verify", adapter, tmp_path / "out", tmp_path / "base", "--device", "cpu") == 1
    assert "verdict: NOT the same encoder" in capsys.readouterr().out


def test_a_bad_merge_ends_in_1(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LoraUpdate, "merged", lambda update, weight, transposed: weight.float())
    assert run(monkeypatch, "merge", adapter, tmp_path / "out", "--device", "cpu") == 1
    assert "was not written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_unverified(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "merge", adapter, tmp_path / "out", "--no-verify", "--shard-gigabytes", "0.00002") == 0
    assert "--no-verify" in capsys.readouterr().out
    assert len(list((tmp_path / "out").glob("model-*"))) > 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["merge", "nowhere", "out"], "nowhere has no angle_llm.json"),
        (["merge", "nowhere", "out", "--shard-gigabytes", "0"], "--shard-gigabytes must be positive"),
        (["verify", "nowhere"], "got 1"),
        (["verify", "nowhere", "there", "--tolerance", "0"], "--tolerance must be positive"),
        (["verify", "nowhere/a", "there"], "no model at"),
        (["verify", "a", "b", "--texts", "missing.txt"], "--texts"),
    ],
)
def test_mistakes_end_in_their_message(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nowhere").mkdir()
    assert run(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err

"""Checkpoints: complete or not written, damage reported, limited in number, only for the same run."""

import errno
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from runs import checkpoint_names
from torch import nn

from angle_llm.io import FolderError
from angle_llm.resumable_folder import ResumableFolder
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import CheckpointSettings, OptimizerSettings, TrainSettings
from angle_llm.train import checkpoint
from angle_llm.train.checkpoint import CheckpointFileError, Checkpoints, Progress
from angle_llm.train.distributed import Processes
from angle_llm.train.strategies import DataParallelStrategy
from angle_llm.train.token_budget import TokenBudget

FILES = ["manifest.json", "optimizer.safetensors", "weights.safetensors"]
IDENTITY: dict[str, str | None] = {"settings": "same", "base weights": None}


@dataclass
class Small:
    """A model of two layers and the checkpoints of its run."""

    run_dir: Path
    keep: int = 10
    seed: int = 0
    resume: str = "auto"

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.strategy = DataParallelStrategy(
            nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), OptimizerSettings(), Processes()
        )
        self.settings = TrainSettings(
            run_dir=str(self.run_dir), resume=self.resume, checkpoint=CheckpointSettings(keep=self.keep)
        )
        self.checkpoints = Checkpoints(self.settings, IDENTITY, self.strategy)
        self.folder = self.checkpoints.folder

    def step(self) -> None:
        for parameter in self.strategy.weights.values():
            parameter.grad = torch.randn_like(parameter) * random.random() * np.random.random()  # noqa: NPY002
        self.strategy.update(1e-3)

    def write(self, *steps: int) -> "Small":
        for step in steps:
            self.step()
            self.checkpoints.write(Progress(step, metrics_bytes=100 * step))
        return self


def resume(run_dir: Path, which: str = "auto") -> int:
    """The step that a fresh process resumes from, 0 for none."""
    return Small(run_dir, seed=1, resume=which).checkpoints.resume().step


def test_a_resumed_state_continues_as_if_never_interrupted(tmp_path: Path) -> None:
    small = Small(tmp_path, keep=2)
    for _ in range(3):
        small.step()
    random.gauss(0, 1)  # stores a second number for the next call
    np.random.standard_normal()  # noqa: NPY002
    here = Progress(3, 1234, evaluated=2, start={"a/b": -0.1}, best={"a/b": 1 / 3}, budget=TokenBudget(7, 5))
    path = small.checkpoints.write(here)
    assert sorted(file.name for file in path.iterdir()) == FILES
    assert not [file for file in path.iterdir() if b"pickle" in file.read_bytes() or file.suffix == ".pt"]

    def future(small: Small) -> list[Any]:
        small.step()
        drawn = [random.gauss(0, 1), np.random.standard_normal(), float(torch.rand(1))]  # noqa: NPY002
        return [*drawn, *(parameter.detach().clone() for parameter in small.strategy.weights.values())]

    expected = future(small)
    other = Small(tmp_path, seed=1)
    other.step()
    assert other.checkpoints.resume() == here
    groups = [one.strategy.optimizer.state_dict()["param_groups"] for one in (small, other)]
    assert groups[0] == groups[1]
    for got, due in zip(future(other), expected, strict=True):
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(due))


def test_a_state_before_the_first_step_and_scores_that_are_not_numbers(tmp_path: Path) -> None:
    Small(tmp_path).checkpoints.write(Progress(0, start={"a/b": 1.0, "a/c": math.nan}))
    other = Small(tmp_path, seed=1)
    start = other.checkpoints.resume().start
    assert start is not None
    assert [f"{value:.2f}" for value in start.values()] == ["1.00", "nan"]
    assert other.strategy.optimizer_state() == {}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])


def swap(path: Path) -> None:
    """Replaced by the same file of the checkpoint before."""
    path.write_bytes((path.parent.with_name("step-000002") / path.name).read_bytes())


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [cut, flip, swap, Path.unlink])
def test_damage_is_reported_and_the_previous_checkpoint_used(
    damage: Callable[[Path], None], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Small(tmp_path).write(1, 2, 3)
    path = small.folder / "step-000003" / name
    damage(path)
    assert resume(tmp_path) == 2
    assert f"warning: {path} is " in capsys.readouterr().out
    assert checkpoint_names(tmp_path) == ["step-000001", "step-000002"], "the damaged one is removed"


def test_a_checkpoint_that_the_disk_fails_to_read_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Small(tmp_path).write(1, 2, 3)
    check = ResumableFolder.check

    def fails(self: ResumableFolder, name: str) -> Any:
        if name == "step-000003":
            raise OSError(errno.EIO, "Input/output error")
        return check(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(ResumableFolder, "check", fails)
        small = Small(tmp_path, seed=1)
        assert small.checkpoints.resume().step == 2
        assert "step-000003 cannot be read: [Errno 5] Input/output error. Resuming from" in capsys.readouterr().out
        small.checkpoints.write(Progress(2))
        assert checkpoint_names(tmp_path) == ["step-000001", "step-000002", "step-000003"]
        small.checkpoints.write(Progress(3, evaluated=3))  # replaces it
    fresh = Small(tmp_path, seed=1).checkpoints.resume()
    assert (fresh.step, fresh.evaluated) == (3, 3)


def test_all_damaged_is_an_error_that_names_each(tmp_path: Path) -> None:
    small = Small(tmp_path).write(1, 2)
    (small.folder / "step-000002/optimizer.safetensors").unlink()
    os.truncate(small.folder / "step-000001/weights.safetensors", 10)
    (small.folder / "step-000001/.DS_Store").write_text("a file that is not read")
    for which, advice in (("auto", "--resume never"), ("step-000001", "--resume auto")):
        with pytest.raises(CheckpointFileError, match=f"Restore the files, or .*{advice}") as error:
            resume(tmp_path, which)
        assert "step-000001/weights.safetensors" in str(error.value)
        assert ("step-000002/optimizer.safetensors" in str(error.value)) == (which == "auto")
    (small.folder / "step-000001").rename(small.folder / "step-000009")
    with pytest.raises(CheckpointFileError, match=r"step-000009/manifest\.json"):
        resume(tmp_path, "step-000009")


def test_a_name_or_a_path_selects_and_later_checkpoints_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Small(tmp_path).write(1, 2, 3, 4)
    for wrong in ("", "atuo", "step-000007", str(tmp_path), "elsewhere/step-000002"):
        with pytest.raises(SettingsError, match=r"--resume.*step-000001, step-000002") as error:
            resume(tmp_path, wrong)
        assert repr(wrong) in str(error.value)
    assert resume(tmp_path, f"{tmp_path}/checkpoints/../checkpoints/step-000003") == 3
    assert resume(tmp_path, "checkpoints/step-000002") == resume(tmp_path, "step-000002") == 2
    assert checkpoint_names(tmp_path) == ["step-000001", "step-000002"]


def test_a_checkpoint_of_another_run_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    Small(tmp_path).write(1, 2)
    other = Small(tmp_path, seed=1)
    before = {name: parameter.detach().clone() for name, parameter in other.strategy.weights.items()}
    elsewhere = Checkpoints(other.settings, {**IDENTITY, "settings": "others"}, other.strategy)
    with pytest.raises(FolderError, match=r"step-000002.*--run-dir.*settings"):
        elsewhere.resume()
    smaller = DataParallelStrategy(nn.Linear(5, 4), OptimizerSettings(), Processes())
    with pytest.raises(CheckpointFileError, match="step-000002"):
        Checkpoints(replace(other.settings, resume="step-000002"), IDENTITY, smaller).resume()
    assert all(torch.equal(parameter, before[name]) for name, parameter in other.strategy.weights.items())
    assert checkpoint_names(tmp_path) == ["step-000001", "step-000002"]


def test_the_newest_are_kept_and_a_million_steps_are_in_order(tmp_path: Path) -> None:
    Small(tmp_path, keep=2).write(1, 999_999, 1_000_000)
    assert checkpoint_names(tmp_path) == ["step-1000000", "step-999999"]
    assert resume(tmp_path) == 1_000_000


def test_starting_over_removes_checkpoints_and_auto_reports_that_there_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(tmp_path) == 0
    assert f"{tmp_path}/checkpoints" in capsys.readouterr().out
    small = Small(tmp_path).write(1, 2)
    (small.folder / ".step-000003.tmp").mkdir()
    assert resume(tmp_path, "never") == 0
    assert "step-000002" in capsys.readouterr().out
    assert not list(small.folder.glob("*step-*"))
    Small(tmp_path).write(1)
    other = Small(tmp_path, seed=1, resume="never")  # also those of another run
    checkpoints = Checkpoints(other.settings, {**IDENTITY, "settings": "others"}, other.strategy)
    assert checkpoints.resume() == Progress()
    assert checkpoints.write(Progress(1)).is_dir()


def test_a_file_is_written_before_the_content_of_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small(tmp_path)
    calls: list[str] = []
    for owner, name in (
        (small.strategy, "optimizer_state"),
        (small.strategy, "full_weights"),
        (checkpoint, "save_file"),
    ):
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *given, name=name, original=original: (calls.append(name), original(*given))[1]
        )
    small.write(1)
    assert calls == ["optimizer_state", "save_file", "full_weights", "save_file"]


def test_a_failed_write_keeps_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Small(tmp_path, keep=1).write(1)
    for error, expected in (
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointFileError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("angle_llm.train.checkpoint.save_file", Mock(side_effect=error))
            with pytest.raises(expected) as raised:
                small.write(2)
        if expected is CheckpointFileError:
            assert all(text in str(raised.value) for text in ("step-000002", "No space left", "--resume auto"))
        assert not list(small.folder.glob(".step-*"))
        assert checkpoint_names(tmp_path) == ["step-000001"]
    assert resume(tmp_path) == 1
    assert checkpoint_names(small.write(2, 3).run_dir) == ["step-000003"]

"""Checkpoints as folders: written whole or not at all, damage found and named, no more kept than asked."""

import errno
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from angle_llm.config import OptimizerSettings, SettingsError
from angle_llm.train.checkpoint import (
    MANIFEST,
    SLOW_SECONDS,
    CheckpointError,
    Checkpoints,
    Progress,
    Run,
    SavedWeightsError,
    TrainingState,
    check_saved,
    step_of,
    verified,
)
from angle_llm.train.distributed import Processes
from angle_llm.train.strategies import DataParallelStrategy

FILES = ["manifest.json", "optimizer.safetensors", "progress.json", "random-00000.json", "weights.safetensors"]
RUN: Run = {"settings": "same", "base weights": None}


def small_state(seed: int = 0) -> TrainingState:
    torch.manual_seed(seed)
    return state_of(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))


def state_of(layers: nn.Module, run: Run = RUN) -> TrainingState:
    weights = dict(layers.named_parameters())
    return TrainingState.of(
        layers, lambda: DataParallelStrategy(layers, weights, OptimizerSettings(), Processes.alone()), run, 0
    )


def take_step(state: TrainingState) -> None:
    for parameter in state.weights.values():
        parameter.grad = torch.randn_like(parameter) * random.random() * np.random.random()  # noqa: NPY002
    state.strategy.update(1e-3)


def written(folder: Path, steps: int, keep: int = 10) -> Checkpoints:
    checkpoints, state = Checkpoints(folder, keep), small_state()
    for step in range(1, steps + 1):
        take_step(state)
        checkpoints.write(state, Progress(step, metrics_bytes=100 * step))
    return checkpoints


def test_what_comes_back_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    checkpoints, state = Checkpoints(tmp_path / "checkpoints", 2), small_state()
    for _ in range(3):
        take_step(state)
    random.gauss(0, 1)  # keeps a second number for the next call
    np.random.standard_normal()  # noqa: NPY002
    here = Progress(3, 1234, measured=2, start=-0.1, best=1 / 3)
    path = checkpoints.write(state, here)
    assert sorted(file.name for file in path.iterdir()) == FILES
    assert not [file for file in path.iterdir() if b"pickle" in file.read_bytes() or file.suffix == ".pt"]

    def future(state: TrainingState) -> list[Any]:
        take_step(state)
        drawn = [random.gauss(0, 1), np.random.standard_normal(), float(torch.rand(1))]  # noqa: NPY002
        return [*drawn, *(parameter.detach().clone() for parameter in state.weights.values())]

    expected = future(state)
    other = small_state(seed=1)
    take_step(other)
    assert checkpoints.begin(path, other) == here
    assert isinstance(other.strategy, DataParallelStrategy)
    assert isinstance(state.strategy, DataParallelStrategy)
    assert (
        other.strategy.optimizer.state_dict()["param_groups"] == state.strategy.optimizer.state_dict()["param_groups"]
    )
    for came, due in zip(future(other), expected, strict=True):
        assert torch.equal(torch.as_tensor(came), torch.as_tensor(due))


def test_a_state_before_the_first_step_comes_back(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, 1).write(small_state(), Progress())
    other = small_state(seed=1)
    assert Checkpoints(tmp_path, 1).begin(path, other) == Progress()
    assert other.strategy.optimizer_tensors() == {}


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def lose(path: Path, draw: random.Random) -> None:
    path.unlink()


def swap(path: Path, draw: random.Random) -> None:
    """With the same file of the checkpoint before."""
    before = path.parent.with_name("step-000002") / path.name
    path.write_bytes(before.read_bytes())


def test_five_hundred_damages_are_found_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = written(folder, 3)
    newest = folder / "step-000003"
    draw = random.Random(20)
    for number in range(500):
        damage = [flip, cut, lose, swap][number % 4]
        path = newest / draw.choice(FILES)
        whole = path.read_bytes()
        damage(path, draw)
        found = checkpoints.find("auto")
        shown = capsys.readouterr().out
        assert found == folder / "step-000002", (number, damage, path)
        assert f"warning: {path} is " in shown, (number, damage, shown)
        assert "Going on from step-000002" in shown
        path.write_bytes(whole)
    assert checkpoints.find("auto") == newest
    assert capsys.readouterr().out == ""


def test_two_files_of_a_checkpoint_changed_places(tmp_path: Path) -> None:
    path = written(tmp_path, 1).all()[0]
    first, second = path / "weights.safetensors", path / "optimizer.safetensors"
    first.rename(path / "aside")
    second.rename(first)
    (path / "aside").rename(second)
    with pytest.raises(CheckpointError, match=r"(weights|optimizer)\.safetensors is damaged"):
        verified(path)


def test_a_file_nobody_reads_does_no_harm(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 1)
    (tmp_path / "step-000001/.DS_Store").write_text("x")
    (tmp_path / "notes").mkdir()
    assert checkpoints.find("auto") == tmp_path / "step-000001"


def test_no_whole_one_is_an_error_that_names_all(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 2)
    (tmp_path / "step-000002/progress.json").unlink()
    os.truncate(tmp_path / "step-000001/weights.safetensors", 10)
    with pytest.raises(CheckpointError, match="--resume never") as error:
        checkpoints.find("auto")
    assert "step-000002/progress.json is missing" in str(error.value)
    assert "step-000001/weights.safetensors is damaged (10 bytes; " in str(error.value)
    assert checkpoints.find("never") is None
    with pytest.raises(CheckpointError, match=r"step-000001/weights\.safetensors"):
        checkpoints.find("step-000001")


def test_a_renamed_checkpoint_and_a_later_format_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = written(tmp_path, 1)
    (tmp_path / "step-000001").rename(tmp_path / "step-000009")
    with pytest.raises(CheckpointError, match=r"step-000009/manifest\.json is damaged \(it is that of step 1\)"):
        checkpoints.find("auto")
    (tmp_path / "step-000009").rename(tmp_path / "step-000001")
    monkeypatch.setattr("angle_llm.train.checkpoint.FORMAT_VERSION", 2)
    with pytest.raises(CheckpointError, match="format_version 1; this version reads 2"):
        checkpoints.find("auto")


def test_a_name_or_a_path_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = written(tmp_path / "checkpoints", 3)
    for name in ("step-000002", "checkpoints/step-000002", f"{tmp_path}/checkpoints/../checkpoints/step-000002"):
        assert checkpoints.find(name) == tmp_path / "checkpoints/step-000002"
    for wrong in ("atuo", "step-000007", str(tmp_path), "elsewhere/step-000002"):
        with pytest.raises(SettingsError, match="there: step-000001, step-000002, step-000003") as error:
            checkpoints.check_named(wrong)
        assert repr(wrong) in str(error.value)


def test_going_on_from_one_gives_up_the_later_ones(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 4)
    flip(tmp_path / "step-000004" / MANIFEST, random.Random(0))
    assert checkpoints.begin(tmp_path / "step-000002", small_state()).step == 2
    assert [path.name for path in checkpoints.all()] == ["step-000001", "step-000002"]


def test_another_runs_checkpoint_is_refused_and_nothing_has_changed(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 2)
    other = small_state(seed=1)
    before = {name: parameter.detach().clone() for name, parameter in other.weights.items()}
    other = replace(other, run={**RUN, "settings": "others"})
    with pytest.raises(CheckpointError, match=r"written with other settings \(same; this run: others\)"):
        checkpoints.begin(tmp_path / "step-000001", other)
    smaller = state_of(nn.Linear(5, 4))
    with pytest.raises(CheckpointError, match="other names or shapes"):
        checkpoints.begin(tmp_path / "step-000001", smaller)
    assert all(torch.equal(parameter, before[name]) for name, parameter in other.weights.items())
    assert len(checkpoints.all()) == 2


def test_the_newest_are_kept_and_a_million_steps_are_in_order(tmp_path: Path) -> None:
    checkpoints, state = Checkpoints(tmp_path, 2), small_state()
    for step in (1, 999_999, 1_000_000):
        checkpoints.write(state, Progress(step))
    assert [step_of(path) for path in checkpoints.all()] == [999_999, 1_000_000]
    assert {path.name for path in tmp_path.iterdir()} == {"step-999999", "step-1000000"}


def test_starting_over_clears_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = written(tmp_path, 2)
    (tmp_path / ".step-abc").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert checkpoints.begin(None, small_state()) == Progress()
    assert "starting over: removing the checkpoints up to step-000002" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_one_that_is_there_already_stays_and_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    checkpoints, state = written(tmp_path, 1), small_state(seed=3)
    before = (tmp_path / "step-000001" / MANIFEST).read_bytes()
    checkpoints.write(state, Progress(1))
    assert (tmp_path / "step-000001" / MANIFEST).read_bytes() == before
    flip(tmp_path / "step-000001/weights.safetensors", random.Random(0))
    verified(checkpoints.write(state, Progress(1)))


def failing(place: int) -> Callable[..., None]:
    """`os.fsync`, whose call number `place` finds no room."""
    calls: list[int] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == place:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    return fsync


@pytest.mark.parametrize("place", range(1, 8))
def test_a_write_that_fails_leaves_the_one_before(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, state = written(tmp_path, 1, keep=1), small_state()
    take_step(state)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", failing(place))
        with pytest.raises(CheckpointError, match=r"could not be written: .*No space left") as error:
            checkpoints.write(state, Progress(2))
    assert "--resume auto" in str(error.value)
    verified(tmp_path / "step-000001")
    assert not list(tmp_path.glob(".step-*"))
    for step in (2, 3):
        verified(checkpoints.write(state, Progress(step)))
    assert [path.name for path in checkpoints.all()] == ["step-000003"]


def test_an_interrupted_write_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = written(tmp_path, 1, keep=1)

    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("angle_llm.train.checkpoint.sync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.write(small_state(), Progress(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    verified(tmp_path / "step-000001")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KB, for those who may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_and_a_read_only_one(small_disk: Path) -> None:
    checkpoints, state = written(small_disk / "checkpoints", 2, keep=2), small_state()
    whole = {path: (path / MANIFEST).read_bytes() for path in checkpoints.all()}
    rest = shutil.disk_usage(small_disk).free
    for left in (0, 1, 2, 3, 5, 8):  # pages: each ends in another file
        filler = small_disk / "filler"
        filler.write_bytes(b"x" * max(rest - 4096 * left, 0))
        with pytest.raises(CheckpointError, match="step-000003 could not be written"):
            checkpoints.write(state, Progress(3))
        filler.unlink()
        assert {path: (path / MANIFEST).read_bytes() for path in checkpoints.all()} == whole
        assert not list(checkpoints.folder.glob(".step-*"))
        assert checkpoints.find("auto") == checkpoints.folder / "step-000002"
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match=r"Read-only file system.*Make the folder writable.*step-000002 is kept"):
        checkpoints.write(state, Progress(3))
    with pytest.raises(CheckpointError, match="No checkpoint is there yet"):
        Checkpoints(small_disk / "others", 2).write(state, Progress(3))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_closed_folder(tmp_path: Path) -> None:
    checkpoints, state = written(tmp_path / "checkpoints", 1), small_state()
    checkpoints.folder.chmod(0o555)
    try:
        with pytest.raises(CheckpointError, match=r"Permission denied.*Make the folder writable"):
            checkpoints.write(state, Progress(2))
    finally:
        checkpoints.folder.chmod(0o755)
    verified(tmp_path / "checkpoints/step-000001")


def test_slow_writes_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, 1)
    assert capsys.readouterr().out == ""
    clock = iter([0.0, 2.0 * SLOW_SECONDS])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    Checkpoints(tmp_path, 2).write(small_state(), Progress(7))
    assert "checkpoint of step 7 took 20 seconds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ({"a": torch.ones(2, 3)}, "b is missing or too many"),
        ({"a": torch.ones(2, 3), "b": torch.ones(2), "c": torch.ones(1)}, "c is missing or too many"),
        ({"a": torch.ones(3, 2), "b": torch.ones(2)}, r"a was to be \(2, 3\), got \(3, 2\)"),
        ({"a": torch.ones(2, 3), "b": torch.ones(0)}, r"b was to be \(2,\), got \(0,\)"),
        ({"a": torch.ones(2, 3), "b": torch.zeros(2)}, "b is not as it is in memory"),
    ],
)
def test_saved_weights_are_compared_with_those_in_memory(
    saved: dict[str, torch.Tensor], told: str, tmp_path: Path
) -> None:
    expected = {"a": torch.ones(2, 3), "b": torch.ones(2)}
    save_file(expected, tmp_path / "x.safetensors")
    check_saved(tmp_path / "x.safetensors", expected)
    save_file(saved, tmp_path / "x.safetensors")
    with pytest.raises(SavedWeightsError, match=told):
        check_saved(tmp_path / "x.safetensors", expected)

"""Resumable folders: kills at any write, refusal of other settings, detection of damage."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from kills import check_resumes_after_any_kill, contents, flushed_before_renamed, in_a_fork

from angle_llm import io
from angle_llm.io import FolderError, write_json, write_text
from angle_llm.resumable_folder import ResumableFolder, lock_folder

SAME = {"input": {"rows": 5, "name": "a"}, "seed": 1}
flat_and_nested = pytest.mark.parametrize("flat", [True, False], ids=["flat", "nested"])


def opened(path: Path, flat: bool = True, identity: dict[str, Any] = SAME, **options: Any) -> ResumableFolder:
    return ResumableFolder(path, identity, option="--output", index="index.json" if flat else None, **options)


def fill_with(text: str, folder: Path) -> None:
    for name in ("left", "right"):
        (folder / f"{text}.{name}").write_text(f"{text} {name}")


def work(path: Path, *, flat: bool = True, parts: int = 3) -> list[str]:
    """Write the incomplete parts; returns their names."""
    made = []
    with opened(path, flat) as folder:
        for number in range(parts):
            if not folder.is_whole(name := f"part-{number}"):
                folder.write(name, lambda place, name=name: fill_with(name, place), {"number": number})
                made.append(name)
        if flat:
            folder.finish({"total": parts})
    return made


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("flat", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["nested", "flat"])
def test_killed_before_any_write_it_resumes_to_the_same_files(flat: bool, step: int, tmp_path: Path) -> None:
    kills = check_resumes_after_any_kill(lambda place: work(place / "out", flat=flat), tmp_path, step)
    assert kills > 20 // step
    assert not list((tmp_path / "undisturbed").rglob("*.tmp"))


@pytest.mark.parametrize("skipped", ["nothing", "files", "folders"])
@flat_and_nested
def test_parts_are_flushed_before_their_manifest(
    flat: bool, skipped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = io.sync

    def sync(path: Path) -> None:
        if skipped != ("folders" if path.is_dir() else "files"):
            real(path)

    monkeypatch.setattr(io, "sync", sync)
    records = (".part-0.json", ".part-1.json", "index.json")
    with flushed_before_renamed(lambda target: target.name in records) as faults:
        work(tmp_path / "out", flat=flat, parts=2)
    assert bool(faults) == (skipped != "nothing"), faults


@flat_and_nested
def test_only_damaged_parts_are_written_again(flat: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert work(out, flat=flat) == ["part-0", "part-1", "part-2"]
    due = contents(out)
    assert work(out, flat=flat) == []
    inside = "" if flat else "part-1/"
    (out / f"{inside}part-1.left").write_text("part-1 lost")
    with opened(out, flat) as folder, pytest.raises(FolderError, match=r"part-1\.left"):
        folder.check("part-1")
    assert work(out, flat=flat) == ["part-1"]
    assert contents(out) == due
    if not flat:
        manifest = out / "part-2" / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"number": 2', '"number": 3'))
        assert work(out, flat=flat) == ["part-2"], "values are protected too"
        with opened(out, flat) as folder:
            folder.remove("part-0")
            assert folder.names() == ["part-1", "part-2"]
            assert folder.check("part-2") == {"number": 2}


@flat_and_nested
def test_other_settings_are_refused_with_the_fields_that_differ(flat: bool, tmp_path: Path) -> None:
    out, other = tmp_path / "out", {"input": {"rows": 6, "name": "a"}, "seed": 2}
    with opened(out, flat) as folder:
        folder.write("part-0", lambda place: fill_with("part-0", place))
    before = contents(out)
    with pytest.raises(FolderError, match=r"--output.*input\.rows.*seed"):
        opened(out, flat, other).__enter__()
    assert contents(out) == before


def test_a_part_that_was_killed_before_its_rename_is_no_part(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with opened(out, flat=False) as folder:
        folder.write("part-0", lambda place: fill_with("part-0", place))
        (out / "part-0").rename(out / ".part-0.tmp")
        assert folder.names() == []
    with opened(out, flat=False, identity={**SAME, "seed": 2}):  # not refused
        pass


def test_parts_of_other_settings_are_never_used(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with opened(out):
        pass
    with opened(out, identity={**SAME, "seed": 2}) as folder:  # no part exists: no reason to refuse
        folder.write("part-0", lambda place: fill_with("part-0", place))
    shutil.copy(out / ".part-0.json", tmp_path / "foreign.json")
    shutil.rmtree(out)
    with opened(out) as folder:
        fill_with("part-0", out)
        shutil.copy(tmp_path / "foreign.json", out / ".part-0.json")
        assert not folder.is_whole("part-0")


def test_other_files_are_not_changed(tmp_path: Path) -> None:
    write_text(tmp_path / "mine" / "diary.txt", "dear")
    with pytest.raises(FolderError, match=r"--output \S*mine contains other files .*diary\.txt"):
        opened(tmp_path / "mine").__enter__()
    with pytest.raises(FolderError, match=r"--output .*diary\.txt"):
        opened(tmp_path / "mine" / "diary.txt").__enter__()
    assert contents(tmp_path) == {"mine/diary.txt": b"dear"}


def test_an_index_of_the_user_is_not_overwritten(tmp_path: Path) -> None:
    for content in ({"doc1": [0.5]}, {"model": "x", "data": []}, {"parts": [1, 2]}):
        write_json(tmp_path / "data/index.json", content)
        with pytest.raises(FolderError, match=r"--output \S*data contains other files"):
            ResumableFolder(tmp_path / "data", {"model": 3}, option="--output", index="index.json").__enter__()
        assert json.loads((tmp_path / "data/index.json").read_text()) == content


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_used_without_a_lock(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock that filelock uses there is a file, which would remain after a kill and refuse the next command."""
    fcntl = pytest.importorskip("fcntl")

    def missing(*_: object) -> None:
        raise OSError(number, "flock")

    monkeypatch.setattr(fcntl, "flock", missing)
    with opened(tmp_path / "out") as folder:
        assert not list(folder.path.glob(".lock*"))
    (tmp_path / ".lock-00000").touch()  # of an earlier version
    assert lock_folder(tmp_path) is None


def test_one_process_of_a_rank_writes_and_its_lock_ends_with_it(tmp_path: Path) -> None:
    def second() -> None:
        with pytest.raises(FolderError, match="another process writes"):
            opened(tmp_path / "out").__enter__()
        with opened(tmp_path / "out", rank=1):
            pass

    def killed() -> None:
        opened(tmp_path / "out").__enter__()

    with opened(tmp_path / "out"):
        assert in_a_fork(second, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert in_a_fork(killed, tmp_path / "log") == 0
    with opened(tmp_path / "out"):
        pass

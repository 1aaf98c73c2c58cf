"""Files written completely or not at all, JSON, checksums, and progress of long commands."""

import errno
import gzip
import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

import pytest
from kills import contents, flushed_before_renamed

from angle_llm import io
from angle_llm.io import (
    FolderError,
    check_files,
    checksums,
    json_text,
    log,
    plain,
    progress_bar,
    read_object,
    remove_folder,
    restore_folder,
    write_file,
    write_folder,
    write_json,
    write_json_lines,
    write_text,
)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    write_text(path, "old")
    for error, shown in ((KeyboardInterrupt(), "^"), (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), str(path))):

        def breaks(file: BinaryIO, error: BaseException = error) -> None:
            file.write(b"half")
            raise error

        with pytest.raises(type(error), match=shown):
            write_file(path, breaks)
        assert contents(path.parent) == {"a.txt": b"old"}


def test_a_fixed_writer_overwrites_what_a_killed_one_left(tmp_path: Path) -> None:
    (tmp_path / ".a.txt.tmp").write_text("half")
    write_text(tmp_path / "a.txt", "whole", writer="")
    (tmp_path / ".b.tmp" / "old").mkdir(parents=True)
    write_folder(tmp_path / "b", lambda folder: (folder / "file").write_text("whole"), writer="")
    assert contents(tmp_path) == {"a.txt": b"whole", "b/file": b"whole"}


def test_a_link_keeps_its_target_and_a_pipe_is_written_directly(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "a.txt").symlink_to("there/a.txt")
    write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").is_symlink()
    assert (tmp_path / "there/a.txt").read_text() == "new"

    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_json(tmp_path / "pipe", {"a": 1})
    reader.join()
    assert json.loads(read[0]) == {"a": 1}


def test_replaced_files_and_folders_keep_their_permissions(tmp_path: Path) -> None:
    (tmp_path / "secret.json").touch(0o600)
    (tmp_path / "private").mkdir(0o700)
    write_json(tmp_path / "secret.json", {})
    write_folder(tmp_path / "private", lambda folder: (folder / "file").touch())
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("secret.json", "private")]
    assert modes == [0o600, 0o700]


@pytest.mark.parametrize("mode", ["w", "a"])
def test_standard_output_that_is_a_file_is_continued(mode: str, tmp_path: Path) -> None:
    log = tmp_path / "all.log"
    log.write_text("earlier\n")
    imports = "from pathlib import Path; from angle_llm.io import write_json"
    code = f"{imports}; print('before'); write_json(Path('/dev/stdout'), 1); print('later')"
    with log.open(mode) as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert log.read_text().split() == [*(["earlier"] if mode == "a" else []), "before", "1", "later"]


def test_a_folder_replaces_another_only_when_it_is_complete(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "sub").mkdir()
        (folder / "sub" / "new").write_text("new")
        (folder / "sub" / "new").chmod(0o600)  # as safetensors creates its files

    def breaks(folder: Path) -> None:
        fill(folder)
        raise OSError(errno.ENOSPC, "full")

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").write_text("old")
    with pytest.raises(OSError, match="full"):
        write_folder(tmp_path / "a", breaks)
    assert contents(tmp_path) == {"a/old": b"old"}
    write_folder(tmp_path / "a", fill)
    assert contents(tmp_path) == {"a/sub/new": b"new"}
    (tmp_path / "plain").touch()
    modes = {path: path.stat().st_mode for path in (tmp_path / "a/sub/new", tmp_path / "plain")}
    assert len(set(modes.values())) == 1, "files have the mode of any new file"
    (tmp_path / "a").rename(tmp_path / ".a.old")  # killed between two renames
    (tmp_path / ".a.7.tmp").mkdir()
    restore_folder(tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "plain"]
    remove_folder(tmp_path / "a")
    assert list(contents(tmp_path)) == ["plain"]


def test_a_folder_that_cannot_be_renamed_is_refused_before_it_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for target in (Path(), tmp_path, Path("/")):
        with pytest.raises(FolderError, match="which cannot be replaced"):
            write_folder(target, lambda folder: pytest.fail("filled"))
    write_folder(Path("~/inside"), lambda folder: (folder / "file").touch())
    assert list(contents(tmp_path)) == ["inside/file"]


def test_folders_are_written_where_chmod_or_renames_of_folders_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system of another user, and on overlayfs, for a folder of the image of a container."""
    target, replace = tmp_path / "a", Path.replace

    def fails(path: Path, new: Path) -> Path:
        if path == target:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return replace(path, new)

    def forbidden(path: Path, mode: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "replace", fails)
    monkeypatch.setattr(Path, "chmod", forbidden)
    for content in ("old", "new"):
        write_folder(target, lambda folder, content=content: (folder / "file").write_text(content))
        assert contents(tmp_path) == {"a/file": content.encode()}
    remove_folder(target)
    assert not contents(tmp_path)


def test_writers_with_one_process_id_do_not_disturb_each_other(tmp_path: Path) -> None:
    """As of two containers with a common cache folder."""

    def outer(folder: Path) -> None:
        (folder / "file").write_text("outer")
        write_folder(tmp_path / "a", lambda inner: (inner / "file").write_text("inner"))

    write_folder(tmp_path / "a", outer)
    assert contents(tmp_path) == {"a/file": b"outer"}


@pytest.mark.parametrize("skipped", ["nothing", "files", "folders"])
def test_everything_is_flushed_before_it_is_renamed(
    skipped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a flush, a power failure leaves an empty file under the final name."""
    real = io.sync

    def sync(path: Path) -> None:
        if skipped != ("folders" if path.is_dir() else "files"):
            real(path)

    monkeypatch.setattr(io, "sync", sync)
    with flushed_before_renamed(lambda target: False) as faults:
        write_text(tmp_path / "a.txt", "text")
        write_folder(tmp_path / "b", lambda folder: (folder / "file").write_text("text"))
    assert bool(faults) == (skipped != "nothing"), faults


def test_files_are_compared_with_their_checksums(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name in ("a", "b/c"):
        write_text(folder / name, name * 100)
    listed = checksums(folder)
    assert [entry["name"] for entry in listed] == ["a", "b/c"]
    check_files(folder, listed)
    for damage in [
        lambda path: path.write_text("a" * 99),
        lambda path: path.write_text("b" * 100),
        Path.unlink,
        lambda path: path.symlink_to(tmp_path / "outside"),
    ]:
        write_text(tmp_path / "outside", "a" * 100)
        damage(folder / "a")
        with pytest.raises(FolderError, match="folder/a"):
            check_files(folder, listed)


def test_json_is_standard_and_damage_is_reported_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_text({"a": float("inf")})
    assert plain({"a": float("inf"), "b": (1.5, Path("c"))}) == {"a": None, "b": [1.5, "c"]}
    name = os.fsdecode(b"caf\xe9")  # a file name that is not UTF-8
    write_json(tmp_path / "a.json", {"a": name, "b": "é"})
    assert read_object(tmp_path / "a.json") == json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert read_object(tmp_path / "b.json") is None
    for content in ("{", "[1]"):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(FolderError, match=r"a\.json"):
            read_object(tmp_path / "a.json")


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


@pytest.fixture(autouse=True)
def _no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of notebooks in the same process may have imported ipykernel."""
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)


class Clock:
    """The clock of progress bars, set by the test."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("tqdm.std.time", found)
    monkeypatch.setattr(time, "time", found)
    return found


def test_a_log_gets_a_line_at_the_start_one_a_minute_and_one_at_the_end(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    with progress_bar("embed", 100, "row") as bar:
        for number in range(10):
            clock.now += io.LOG_EVERY_SECONDS / 3
            bar.set_postfix_str(f"loss {number}", refresh=False)
            bar.update(10)
    found = lines(capsys)
    assert [line.split()[2] for line in found] == ["0/100", "30/100", "60/100", "90/100", "100/100"]
    assert found[-1].startswith("embed: 100%")
    assert found[-1].endswith("loss 9]")


@pytest.mark.parametrize(("seconds", "shown"), [(1, False), (3, True)])
def test_a_transient_bar_appears_for_long_work_only(
    capsys: pytest.CaptureFixture[str], clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: int, shown: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("encode", 2, "text", transient=True) as bar:
        clock.now += seconds
        bar.update()
    assert ("encode" in capsys.readouterr().err) == shown


def test_earlier_work_is_excluded_from_the_rate(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with progress_bar("embed", 1000, "row", done=900) as bar:
        clock.now += 10.0
        bar.update(50)
    assert "950/1000 [00:10<00:10,  5.00row/s]" in lines(capsys)[-1]


def test_a_closed_pipe_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        closed = False

        def isatty(self) -> bool:
            return False

        def write(self, *_: object) -> None:
            raise BrokenPipeError

        flush = write

    shut = open(os.devnull, "w")  # noqa: PTH123, SIM115
    shut.close()
    for stream in (Gone(), None, shut):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        with progress_bar("train", 5, "step") as bar:
            bar.update(5)
        log("done")


def test_json_lines_in_gz_are_compressed_with_equal_bytes(tmp_path: Path) -> None:
    rows = [{"text": "é\ud800", "score": n} for n in range(3)]
    for name in ("one.jsonl.gz", "two.jsonl.gz", "plain.jsonl"):
        write_json_lines(tmp_path / name, rows)
    packed = (tmp_path / "one.jsonl.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "plain.jsonl").read_bytes()
    assert packed == (tmp_path / "two.jsonl.gz").read_bytes()  # neither name nor time is in the file
    assert len(gzip.decompress(packed).splitlines()) == 3

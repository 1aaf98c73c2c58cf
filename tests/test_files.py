"""Files that are there whole or not at all."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from angle_llm.files import json_text, plain, write_file, write_json, write_text


def test_what_breaks_on_the_way_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    write_text(path, "old")

    def breaks(file: BinaryIO) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(path, breaks)
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_writers_of_one_file_at_one_time_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    both = threading.Barrier(2)

    def fill(file: BinaryIO, content: bytes) -> None:
        file.write(content)
        both.wait(30)  # each has its file open

    writers = [
        threading.Thread(target=write_file, args=(path, lambda file, word=word: fill(file, word), word.decode()))
        for word in (b"one", b"two")
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert path.read_text() in ("one", "two")
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_written_over(tmp_path: Path) -> None:
    (tmp_path / ".a.txt.tmp").write_text("half")
    write_text(tmp_path / "a.txt", "whole", by="")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_link_goes_on_pointing_there(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/a.txt").write_text("old")
    (tmp_path / "a.txt").symlink_to("there/a.txt")
    write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").is_symlink()
    assert (tmp_path / "there/a.txt").read_text() == "new"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_json(tmp_path / "pipe", {"a": 1})
    reader.join()
    assert json.loads(read[0]) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_json_says_what_others_can_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text({"a": float("inf")})
    assert plain({"a": float("inf"), "b": (1.5, Path("c"))}) == {"a": None, "b": [1.5, "c"]}
    name = os.fsdecode(b"caf\xe9")  # a file's name that is not UTF-8
    write_json(tmp_path / "a.json", {"a": name, "b": "é"})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"a": name, "b": "é"}


def test_a_folder_that_cannot_be_synced_is_no_reason_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def refuses_folders(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            raise OSError(22, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", refuses_folders)
    write_text(tmp_path / "a.txt", "whole")
    assert (tmp_path / "a.txt").read_text() == "whole"

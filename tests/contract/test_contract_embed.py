"""`angle-llm embed` writes the same bytes after a kill and in two processes."""

import os
import signal
import time
from pathlib import Path

import programs
from commands import Files, command, free_port
from tiny_folders import contents, sentences

TEXTS = [*sentences(9, seed=2), 'She said "no" {0}.', "Zwei Hunde – 犬"]


def write_texts(folder: Path) -> Path:
    path = folder / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    return path


def test_a_killed_command_ends_with_the_same_bytes(files: Files, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("".join(f"{text} {n}\n" for n in range(20) for text in sentences(125, seed=n)))
    base = ["angle-llm", "embed", "--model", files.bert, "--input", tmp_path / "texts.txt", "--shard-rows", "125"]
    command(*base, "--output", tmp_path / "once")
    program = programs.start(*base, "--output", tmp_path / "out")
    end = time.monotonic() + 60
    while not list((tmp_path / "out").glob("shard-000002*")):
        assert time.monotonic() < end
        time.sleep(0.002)
    os.kill(program.process.pid or 0, signal.SIGKILL)
    assert program.wait(60).returncode == -signal.SIGKILL
    assert not (tmp_path / "out/embeddings.json").exists()
    kept, damaged = ((tmp_path / "out" / f"shard-00000{number}.parquet") for number in "01")
    stamp, whole = kept.stat().st_mtime_ns, damaged.read_bytes()
    damaged.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    command(*base, "--output", tmp_path / "out")
    assert kept.stat().st_mtime_ns == stamp, "finished shards are not recomputed"
    assert contents(tmp_path / "out") == contents(tmp_path / "once")


def test_two_processes_share_the_work(model: str, tmp_path: Path) -> None:
    path = write_texts(tmp_path)
    base = ["angle-llm", "embed", "--model", model, "--input", path, "--shard-rows", "2"]
    command(*base, "--output", tmp_path / "once")
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    each = [
        programs.start(
            *base, "--output", tmp_path / "out", environment={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank}
        )
        for rank in "01"
    ]
    done = [program.wait(120) for program in each]
    assert [one.returncode for one in done] == [0, 0], done
    assert contents(tmp_path / "out") == contents(tmp_path / "once")

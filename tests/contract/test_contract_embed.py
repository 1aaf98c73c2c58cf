"""`angle-llm embed` and `search`: every input and output format, the same bytes after a kill, the nearest rows."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
from commands import Files, command, free_port, names
from pyarrow import parquet
from tiny_folders import contents, sentences

from angle_llm import SentenceEncoder

TEXTS = [*sentences(9, seed=2), 'She said "no" {0}.', "Zwei Hunde – 犬"]


@pytest.fixture(scope="module")
def due(model: str) -> np.ndarray:
    return SentenceEncoder.from_pretrained(model).encode(TEXTS)


def write_texts(folder: Path, kind: str) -> Path:
    """The texts with an id each, as a file of the kind."""
    from datasets import Dataset

    path = folder / f"texts.{kind}"
    table = Dataset.from_dict({"text": TEXTS, "id": [f"n{number}" for number in range(len(TEXTS))]})
    if kind == "txt":
        path.write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    elif kind == "csv":
        table.to_csv(path, index=False)
    elif kind == "tsv":  # never quoted
        path.write_text("text\tid\n" + "".join(f"{text}\tn{number}\n" for number, text in enumerate(TEXTS)))
    elif kind == "parquet":
        table.to_parquet(path)
    else:
        table.to_json(path, force_ascii=False)
    return path


def table_of(folder: Path) -> dict[str, list[Any]]:
    """The columns of the Parquet shards in their order."""
    shards = [parquet.read_table(path).to_pydict() for path in sorted(folder.glob("*.parquet"))]
    return {name: [value for shard in shards for value in shard[name]] for name in shards[0]}


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "tsv", "parquet"])
def test_all_input_formats_give_the_same_rows(kind: str, model: str, due: np.ndarray, tmp_path: Path) -> None:
    words = ["--model", model, "--input", write_texts(tmp_path, kind), "--output", tmp_path / "rows.npy"]
    shown = command("angle-llm", "embed", *words, *([] if kind == "txt" else ["--column", "text"])).stdout
    names(shown, rf"\b{len(TEXTS)}\b", r"\b32\b")
    rows = np.load(tmp_path / "rows.npy", allow_pickle=False)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, due)


def test_shards_hold_ids_and_texts_and_an_index(model: str, due: np.ndarray, tmp_path: Path) -> None:
    words = ["--model", model, "--input", write_texts(tmp_path, "jsonl"), "--output", tmp_path / "out"]
    command("angle-llm", "embed", *words, "--id-column", "id", "--store-text", "--shard-rows", "4")
    index = json.loads((tmp_path / "out/embeddings.json").read_text())
    assert index["rows"] == len(TEXTS)
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 3
    table = table_of(tmp_path / "out")
    assert table["text"] == TEXTS
    assert table["id"] == [f"n{number}" for number in range(len(TEXTS))]
    np.testing.assert_allclose(np.array(table["embedding"], dtype=np.float32), due, rtol=1e-4, atol=1e-6)


def test_rows_are_cut_scaled_and_stored_as_the_flags_set(model: str, due: np.ndarray, tmp_path: Path) -> None:
    path = write_texts(tmp_path, "txt")

    def rows(*flags: str) -> np.ndarray:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.npy"
        command("angle-llm", "embed", "--model", model, "--input", path, "--output", out, *flags)
        return np.load(out, allow_pickle=False)

    cut = due[:, :8] / np.linalg.norm(due[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(rows("--dim", "8", "--normalize"), cut, atol=1e-6)
    np.testing.assert_array_equal(rows("--precision", "float16"), due.astype(np.float16))
    np.testing.assert_array_equal(rows("--precision", "binary"), np.packbits(due > 0, axis=1))
    complex_rows = rows("--complex")
    assert complex_rows.dtype == np.complex64
    np.testing.assert_array_equal(complex_rows, due[:, :16] + 1j * due[:, 16:])


def test_standard_input_is_read(model: str, due: np.ndarray, tmp_path: Path) -> None:
    words = ["--model", model, "--input", "-", "--output", tmp_path / "rows.npy"]
    command("angle-llm", "embed", *words, stdin="\n".join(TEXTS))
    np.testing.assert_array_equal(np.load(tmp_path / "rows.npy"), due)


def test_a_killed_command_ends_with_the_same_bytes(files: Files, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("".join(f"{text} {n}\n" for n in range(20) for text in sentences(250, seed=n)))
    base = ["angle-llm", "embed", "--model", files.bert, "--input", tmp_path / "texts.txt", "--shard-rows", "250"]
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
    path = write_texts(tmp_path, "txt")
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


def test_other_settings_in_the_same_folder_are_refused(model: str, tmp_path: Path) -> None:
    words = ["--model", model, "--input", write_texts(tmp_path, "txt"), "--output", tmp_path / "out"]
    command("angle-llm", "embed", *words)
    before = contents(tmp_path / "out")
    names(command("angle-llm", "embed", *words, "--normalize", code=2).stderr, "normalize", "--output")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/diary.txt").write_text("mine")
    words[-1] = tmp_path / "mine"
    names(command("angle-llm", "embed", *words, code=2).stderr, str(tmp_path / "mine"))
    assert contents(tmp_path / "out") == before
    assert contents(tmp_path / "mine") == {"diary.txt": b"mine"}


@pytest.mark.parametrize(
    ("content", "flags", "named"),
    [
        (b"a\n\nb\n", [], r"texts\.txt:2\b"),
        (b"a\ncaf\xe9\n", [], r"texts\.txt:2\b.*utf-8"),
        (None, [], r"texts\.txt"),
        (b"a\n", ["--output", "x.txt"], r"\.npy"),
        (b"", [], r"texts\.txt"),
    ],
)
def test_a_mistake_is_reported_before_the_model_is_loaded(
    content: bytes | None, flags: list[str], named: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "texts.txt").write_bytes(content)
    words = ["--model", "./nowhere", "--input", tmp_path / "texts.txt", "--output", tmp_path / "x.npy", *flags]
    names(command("angle-llm", "embed", *words, cwd=tmp_path, code=2).stderr, named)


def test_skipped_rows_are_listed(model: str, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a dog\n\na cat\n")
    words = ["--model", model, "--input", tmp_path / "texts.txt", "--output", tmp_path / "out", "--on-bad-row", "skip"]
    command("angle-llm", "embed", *words)
    assert len(table_of(tmp_path / "out")["embedding"]) == 2
    lists = [content for name, content in contents(tmp_path / "out").items() if name.endswith(".jsonl")]
    assert any(b"texts.txt" in content and b"2" in content for content in lists)


def test_search_shows_the_nearest_rows_in_order(model: str, due: np.ndarray, tmp_path: Path) -> None:
    words = ["--model", model, "--input", write_texts(tmp_path, "txt"), "--output", tmp_path / "out", "--store-text"]
    command("angle-llm", "embed", *words)
    query = SentenceEncoder.from_pretrained(model).encode(["a dog runs"])[0]
    cosines = due @ query / np.linalg.norm(due, axis=1) / np.linalg.norm(query)
    shown = command("angle-llm", "search", tmp_path / "out", "a dog runs", "--top", "3").stdout
    for before, after in zip((order := np.argsort(-cosines)[:3])[:-1], order[1:], strict=True):
        assert 0 <= shown.find(TEXTS[before]) < shown.find(TEXTS[after])
    names(shown, f"{cosines.max():.4f}")
    names(command("angle-llm", "search", tmp_path / "none", "a", code=2).stderr, "none")

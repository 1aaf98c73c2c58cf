"""A corpus becomes a folder of vectors: the same one whatever interrupts the work and however many share it."""

import copy
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import KEEPING, TEXTS, contents, in_a_fork, killed_before, table, vectors, work, write_lines
from tiny import tiny_encoder

from angle_llm.config import LoraSettings
from angle_llm.corpus.embed import fingerprint
from angle_llm.corpus.finished import read_index, read_pieces
from angle_llm.corpus.shards import Shards, ShardsError, Worker
from angle_llm.corpus.vectors import VectorForm
from angle_llm.data import DataError
from angle_llm.model.encoder import SentenceEncoder


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return tiny_encoder("bert")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "texts.txt")


@pytest.fixture
def once(encoder: SentenceEncoder, lines: Path, tmp_path: Path) -> dict[str, bytes]:
    """What an undisturbed run of one process leaves."""
    work(encoder, lines, tmp_path / "once")
    return contents(tmp_path / "once")


def test_shards_hold_the_vectors_in_order(encoder: SentenceEncoder, lines: Path, tmp_path: Path) -> None:
    assert work(encoder, lines, tmp_path / "out", replace(KEEPING, store_text=True)) == 13
    found = table(tmp_path / "out")
    assert list(found) == ["row", "text", "embedding"]
    assert found["row"] == list(range(13))
    assert found["text"] == TEXTS
    np.testing.assert_allclose(vectors(tmp_path / "out"), encoder.encode(TEXTS), atol=2e-6)  # other micro-batches
    index = json.loads((tmp_path / "out" / "embeddings.json").read_text())
    assert [(shard["first"], shard["rows"]) for shard in index["shards"]] == [(0, 4), (4, 4), (8, 4), (12, 1)]
    assert index["rows"] == 13
    assert index["model"]["prompt"]["template"] == "{text}"
    names = {"embeddings.json", *(f"shard-{number:06d}.parquet" for number in range(4))}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names


def test_npy_shards_have_the_rest_beside_them(encoder: SentenceEncoder, tmp_path: Path) -> None:
    rows = [json.dumps({"text": text, "id": f"no. {number}"}) for number, text in enumerate(TEXTS)]
    input = write_lines(tmp_path / "texts.jsonl", rows)
    work(encoder, input, tmp_path / "parquet", id_column="id", precision="int8")
    work(encoder, input, tmp_path / "npy", replace(KEEPING, format="npy"), id_column="id", precision="int8")
    left, right = table(tmp_path / "parquet"), table(tmp_path / "npy")
    matrices = [np.load(tmp_path / "npy" / f"shard-{number:06d}.npy") for number in range(4)]
    assert np.concatenate(matrices).tolist() == left.pop("embedding")
    assert left == right
    assert left["id"] == [f"no. {number}" for number in range(13)]
    assert set(left) == {"row", "id", "scale"}


def test_one_file_is_the_shards_together(encoder: SentenceEncoder, lines: Path, tmp_path: Path) -> None:
    work(encoder, lines, tmp_path / "out")
    assert work(encoder, lines, tmp_path / "x.npy.parts", target=tmp_path / "x.npy") == 13
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy", allow_pickle=False), vectors(tmp_path / "out"))
    np.save(tmp_path / "y.npy", vectors(tmp_path / "out"))
    assert (tmp_path / "x.npy").read_bytes() == (tmp_path / "y.npy").read_bytes()
    work(encoder, lines, tmp_path / "x.npy.parts", target=tmp_path / "x.npy", complex=True)
    halves = np.split(vectors(tmp_path / "out"), 2, axis=1)
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), halves[0] + 1j * halves[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts.txt", "x.npy", "y.npy"]


@pytest.mark.parametrize("format", ["parquet", "npy"])
@pytest.mark.parametrize(
    "form",
    [
        {"precision": "float16"},
        {"precision": "int8", "dim": 5},
        {"precision": "binary", "dim": 13},
        {"complex": True, "normalize": True},
    ],
    ids=str,
)
def test_what_is_read_back_is_what_was_stored(
    form: dict[str, object], format: str, encoder: SentenceEncoder, lines: Path, tmp_path: Path
) -> None:
    work(encoder, lines, tmp_path / "plain")
    work(encoder, lines, tmp_path / "out", replace(KEEPING, format=format), **form)  # type: ignore[arg-type]
    form_ = VectorForm(32, **form)  # type: ignore[arg-type]
    pieces = list(read_pieces(tmp_path / "out", read_index(tmp_path / "out"), form_))
    due = form_.restored(form_.stored(vectors(tmp_path / "plain")))
    np.testing.assert_array_equal(np.concatenate([piece.vectors for piece in pieces]), due)
    assert np.concatenate([piece.row for piece in pieces]).tolist() == list(range(13))


BAD = [*TEXTS[:2], "", *TEXTS[2:4], *["\t"] * 4, *TEXTS[4:], " "]
"""Rows 2, 5 to 8 and 18 are bad: a bit of block 0, all but one of block 1, the first of block 2."""


@pytest.mark.parametrize("one_file", [False, True])
def test_bad_rows_are_left_out_and_the_others_keep_their_numbers(
    one_file: bool, encoder: SentenceEncoder, tmp_path: Path
) -> None:
    input, out = write_lines(tmp_path / "texts.txt", BAD), tmp_path / "out"
    keeping = replace(KEEPING, skip_bad=True, store_text=not one_file, shard_rows=2)
    for _ in range(2):  # the second time all is there
        target = tmp_path / "x.npy" if one_file else None
        assert work(encoder, input, out, keeping, target=target) == 13
        lists = sorted(tmp_path.rglob("*.skipped.jsonl"))
        listed = [json.loads(line) for path in lists for line in path.read_text().splitlines()]
        assert [one["row"] for one in listed] == [2, 5, 6, 7, 8, 18]
        assert listed[0]["place"] == f"{input}:3"
        assert "empty" in listed[0]["reason"]
    if one_file:
        assert lists == [tmp_path / "x.skipped.jsonl"]
        assert np.load(tmp_path / "x.npy").shape == (13, 32)
    else:
        found = table(out)
        assert [BAD[row] for row in found["row"]] == found["text"] == TEXTS
        assert [path.name[6:12] for path in lists] == ["000001", "000002", "000003", "000004", "000009"]
        assert sum(shard["skipped"] for shard in read_index(out)["shards"]) == 6


def test_a_text_of_which_the_tokenizer_leaves_nothing_is_a_bad_row(encoder: SentenceEncoder, tmp_path: Path) -> None:
    input = write_lines(tmp_path / "texts.txt", [*TEXTS[:5], "\u200d", *TEXTS[5:]])
    with pytest.raises(DataError, match=r"texts\.txt:6: nothing of .* is left.*--on-bad-row skip"):
        work(encoder, input, tmp_path / "out")
    assert work(encoder, input, tmp_path / "skipped", replace(KEEPING, skip_bad=True)) == 13
    assert table(tmp_path / "skipped")["row"] == [0, 1, 2, 3, 4, *range(6, 14)]
    assert json.loads((tmp_path / "skipped" / "shard-000001.skipped.jsonl").read_text())["row"] == 5


def test_vectors_that_are_not_finite_are_refused_by_place(
    encoder: SentenceEncoder, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = encoder.encode

    def encode(texts: list[str], **_: object) -> np.ndarray:
        rows = real(texts)
        rows[[text == TEXTS[6] for text in texts], 3] = np.inf
        return rows

    monkeypatch.setattr(encoder, "encode", encode)
    with pytest.raises(DataError, match=r"texts\.txt:7: its vector is not finite"):
        work(encoder, lines, tmp_path / "out")


@pytest.mark.parametrize("one_file", [False, True])
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(
    one_file: bool, encoder: SentenceEncoder, lines: Path, tmp_path: Path
) -> None:
    lines = write_lines(lines, TEXTS[:5])  # two shards

    def begin(place: Path) -> None:
        place.mkdir(exist_ok=True)
        work(encoder, lines, place / "out", target=place / "x.npy" if one_file else None)

    counted, arm = killed_before(0)

    def count() -> None:
        arm()
        begin(tmp_path / "whole")
        (tmp_path / "calls").write_text(str(counted()))

    assert in_a_fork(count, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    calls = int((tmp_path / "calls").read_text())
    assert calls > 12
    due = contents(tmp_path / "whole")
    kills = 0
    for number in range(1, calls + 1):
        place = tmp_path / f"killed{number}"
        _, arm = killed_before(number)
        code = in_a_fork(lambda arm=arm, place=place: (arm(), begin(place)), tmp_path / "log")  # type: ignore[misc]
        assert code == -signal.SIGKILL, (tmp_path / "log").read_text()
        kills += 1
        begin(place)
        came = contents(place)
        assert came == due, f"killed before call {number}: {sorted(came)}, due {sorted(due)}"
        shutil.rmtree(place)
    assert kills == calls


def test_a_line_of_the_list_that_was_cut_is_not_believed(
    encoder: SentenceEncoder, lines: Path, once: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    work(encoder, lines, out, worker=Worker(1, 2))  # not the main one: it leaves its list
    listed = (out / ".done-00001.jsonl").read_bytes()
    assert listed.count(b"\n") == 2
    (out / ".done-00000.jsonl").write_bytes(listed[: len(listed) - 7])
    work(encoder, lines, out)
    assert contents(out) == once


def test_only_what_is_damaged_is_done_again(
    encoder: SentenceEncoder, lines: Path, once: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "once"
    size = (out / "shard-000001.parquet").stat().st_size
    (out / "shard-000001.parquet").write_bytes(b"x" * size)  # its length tells nothing
    (out / "shard-000003.parquet").unlink()
    encoded: list[str] = []
    real = encoder.encode
    monkeypatch.setattr(encoder, "encode", lambda texts, **named: (encoded.extend(texts), real(texts, **named))[1])
    work(encoder, lines, out)
    assert encoded == [*TEXTS[4:8], *TEXTS[12:]]
    assert contents(out) == once


def test_another_job_is_refused_with_both_sides(encoder: SentenceEncoder, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    work(encoder, lines, out, worker=Worker(1, 2))
    before = contents(out)
    for told, again in [
        ("vectors normalize false, not true", lambda: work(encoder, lines, out, normalize=True)),
        ("vectors dimensions 32, not 8", lambda: work(encoder, lines, out, dim=8)),
        ("layout rows 4, not 5", lambda: work(encoder, lines, out, replace(KEEPING, shard_rows=5))),
        ("model weights", lambda: work(tiny_encoder("bert", seed=1), lines, out)),
        ("input files", lambda: work(encoder, write_lines(tmp_path / "texts.txt", [*TEXTS[:-1], "Fin"]), out)),
    ]:
        with pytest.raises(ShardsError, match=f"was begun with {told}.*choose another --output"):
            again()
    assert contents(out) == before


def test_other_things_are_left_alone(encoder: SentenceEncoder, lines: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    write_lines(tmp_path / "mine" / "diary.txt")
    with pytest.raises(ShardsError, match="holds other things"):
        work(encoder, lines, tmp_path / "mine")
    assert list(contents(tmp_path / "mine")) == ["diary.txt"]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_several_processes_make_what_one_makes(
    count: int, encoder: SentenceEncoder, lines: Path, once: dict[str, bytes], tmp_path: Path
) -> None:
    for rank in reversed(range(count)):  # the main one last, for it waits for the others
        work(encoder, lines, tmp_path / "out", worker=Worker(rank, count))
    assert contents(tmp_path / "out") == once


def test_the_number_of_processes_may_change(
    encoder: SentenceEncoder, lines: Path, once: dict[str, bytes], tmp_path: Path
) -> None:
    for worker in (Worker(2, 3), Worker(1, 2), Worker(0, 1)):
        work(encoder, lines, tmp_path / "out", worker=worker)
    assert contents(tmp_path / "out") == once


def test_the_main_process_waits_for_the_others(
    encoder: SentenceEncoder, lines: Path, once: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        assert not (tmp_path / "out" / "embeddings.json").exists()
        waits.append(seconds)
        if len(waits) == 3:
            work(encoder, lines, tmp_path / "out", worker=Worker(1, 2))

    monkeypatch.setattr("time.sleep", sleep)
    work(encoder, lines, tmp_path / "out", worker=Worker(0, 2))
    assert len(waits) == 3
    assert contents(tmp_path / "out") == once


def test_a_folder_has_one_writer_of_a_number(tmp_path: Path) -> None:
    job = {"format_version": 1}
    with Shards(tmp_path / "out", "parquet", job, Worker()):
        with (
            pytest.raises(ShardsError, match="another process is writing"),
            Shards(tmp_path / "out", "parquet", job, Worker()),
        ):
            pass
        with Shards(tmp_path / "out", "parquet", job, Worker(1, 2)):
            pass


def test_input_that_changes_meanwhile_gets_no_index(
    encoder: SentenceEncoder, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = encoder.encode

    def encode(texts: list[str], **named: object) -> object:
        write_lines(lines, [*TEXTS, "late"])
        return real(texts, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(encoder, "encode", encode)
    with pytest.raises(DataError, match="was changed"):
        work(encoder, lines, tmp_path / "out")
    assert not (tmp_path / "out" / "embeddings.json").exists()


def test_memory_is_that_of_a_block(encoder: SentenceEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 MB of vectors, of a model that costs nothing, in a process that may grow by a third of that."""
    count, dimensions = 75_000, 1024
    input = write_lines(tmp_path / "texts.txt", [f"text {number}" for number in range(count)])
    draw = np.random.default_rng(0)
    monkeypatch.setattr(SentenceEncoder, "dimensions", dimensions)
    monkeypatch.setattr(encoder, "encode", lambda texts, **_: draw.random((len(texts), dimensions), dtype=np.float32))

    def memory(what: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
        return int(line.split()[1]) * 1024

    def body() -> None:
        before = memory("VmRSS")
        work(encoder, input, tmp_path / "out", replace(KEEPING, shard_rows=2048))
        (tmp_path / "grown").write_text(str(memory("VmHWM") - before))

    assert in_a_fork(body, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert read_index(tmp_path / "out")["rows"] == count
    assert int((tmp_path / "grown").read_text()) < count * dimensions * 4 / 3


def test_another_tokenizer_or_another_scale_of_the_adapter_is_another_encoder(encoder: SentenceEncoder) -> None:
    assert fingerprint(tiny_encoder("bert")) == fingerprint(encoder)
    encoder.encode(TEXTS[:2])
    assert fingerprint(tiny_encoder("bert")) == fingerprint(encoder), "what was encoded before does not count"
    other = tiny_encoder("bert")
    other.tokenizer = copy.deepcopy(other.tokenizer)  # tests share one
    other.tokenizer.backend_tokenizer.normalizer = None  # upper case now
    assert fingerprint(other) != fingerprint(encoder)

    def adapted(alpha: float) -> str:
        one = tiny_encoder("bert")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            one.add_lora(LoraSettings(rank=2, alpha=alpha))
        return fingerprint(one)

    assert adapted(4) == adapted(4) != adapted(8)

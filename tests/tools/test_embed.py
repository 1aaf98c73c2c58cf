"""`embed`: the same vectors after an interruption and for any number of processes."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import OPTIONS, TEXTS, embed, table, vectors, write_lines
from kills import check_resumes_after_any_kill, contents
from tiny import save_tiny_base, tiny_encoder

from angle_llm import cli
from angle_llm.data import DataError
from angle_llm.io import FolderError
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.vectors import VectorForm, fingerprint, read_index, read_vectors
from angle_llm.settings.commands import EmbedSettings
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import LoraSettings


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return tiny_encoder("bert")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "texts.txt")


@pytest.fixture
def once(encoder: SentenceEncoder, lines: Path, tmp_path: Path) -> dict[str, bytes]:
    """Files of an undisturbed run of one process."""
    embed(encoder, lines, tmp_path / "once")
    return contents(tmp_path / "once")


def test_shards_hold_the_vectors_in_order(encoder: SentenceEncoder, lines: Path, tmp_path: Path) -> None:
    assert embed(encoder, lines, tmp_path / "out", replace(OPTIONS, store_text=True)) == 13
    found = table(tmp_path / "out")
    assert list(found) == ["row", "text", "embedding"]
    assert (found["row"], found["text"]) == (list(range(13)), TEXTS)
    blocks = np.concatenate([encoder.encode(TEXTS[first : first + 4]) for first in range(0, 13, 4)])
    np.testing.assert_array_equal(vectors(tmp_path / "out"), blocks)
    index = read_index(tmp_path / "out")
    assert [(shard.values.first, shard.values.rows) for shard in index.parts] == [(0, 4), (4, 4), (8, 4), (12, 1)]
    assert index.model.prompt["template"] == "{text}"
    names = {"embeddings.json", *(f"shard-{number:06d}.parquet" for number in range(4))}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names


def test_npy_shards_have_a_file_of_the_other_columns(encoder: SentenceEncoder, tmp_path: Path) -> None:
    rows = [json.dumps({"text": text, "id": f"no. {number}"}) for number, text in enumerate(TEXTS)]
    input = write_lines(tmp_path / "texts.jsonl", rows)
    for format in ("parquet", "npy"):
        embed(encoder, input, tmp_path / format, replace(OPTIONS, format=format), id_column="id", precision="int8")
    left, right = table(tmp_path / "parquet"), table(tmp_path / "npy")
    matrices = [np.load(tmp_path / "npy" / f"shard-{number:06d}.npy") for number in range(4)]
    assert np.concatenate(matrices).tolist() == left.pop("embedding")
    assert left == right
    assert left["id"] == [f"no. {number}" for number in range(13)]
    assert set(left) == {"row", "id", "scale"}


def test_one_file_equals_the_concatenated_shards(encoder: SentenceEncoder, lines: Path, tmp_path: Path) -> None:
    embed(encoder, lines, tmp_path / "out")
    assert embed(encoder, lines, tmp_path / "x.npy.parts", target=tmp_path / "x.npy") == 13
    np.save(tmp_path / "y.npy", vectors(tmp_path / "out"))
    assert (tmp_path / "x.npy").read_bytes() == (tmp_path / "y.npy").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts.txt", "x.npy", "y.npy"]


@pytest.mark.parametrize("format", ["parquet", "npy"])
@pytest.mark.parametrize(
    "form",
    [
        {"precision": "float16"},
        {"precision": "int8", "dim": 5},
        {"precision": "binary", "dim": 13},
    ],
    ids=str,
)
def test_stored_vectors_are_read_back(
    form: dict[str, Any], format: Any, encoder: SentenceEncoder, lines: Path, tmp_path: Path
) -> None:
    embed(encoder, lines, tmp_path / "plain")
    embed(encoder, lines, tmp_path / "out", replace(OPTIONS, format=format), **form)
    pieces = list(read_vectors(tmp_path / "out", read_index(tmp_path / "out")))
    form_ = VectorForm(32, **form)
    due = form_.restored(form_.stored(vectors(tmp_path / "plain")))
    np.testing.assert_array_equal(np.concatenate([piece.vectors for piece in pieces]), due)
    assert np.concatenate([piece.row for piece in pieces]).tolist() == list(range(13))


def test_flags_set_the_form_of_the_vectors(tmp_path: Path) -> None:
    base, lines = save_tiny_base("bert", tmp_path / "base"), write_lines(tmp_path / "texts.txt")
    due = SentenceEncoder.from_pretrained(base, device="cpu").encode(TEXTS)

    def rows(name: str, *flags: str) -> np.ndarray:
        words = ["--model", base, "--input", lines, "--output", tmp_path / name, "--device", "cpu", *flags]
        cli.run(["embed", *map(str, words)])
        return np.load(tmp_path / name, allow_pickle=False)

    cut = due[:, :8] / np.linalg.norm(due[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(rows("cut.npy", "--dim", "8", "--normalize"), cut, atol=1e-6)
    np.testing.assert_array_equal(rows("float16.npy", "--precision", "float16"), due.astype(np.float16))
    np.testing.assert_array_equal(rows("binary.npy", "--precision", "binary"), np.packbits(due > 0, axis=1))


BAD = [*TEXTS[:2], "", *TEXTS[2:4], *["\t"] * 4, *TEXTS[4:], " "]
"""Rows 2, 5 to 8 and 18 are bad."""


@pytest.mark.parametrize("one_file", [False, True])
def test_bad_rows_are_skipped_and_the_others_keep_their_numbers(
    one_file: bool, encoder: SentenceEncoder, tmp_path: Path
) -> None:
    input, out = write_lines(tmp_path / "texts.txt", BAD), tmp_path / "out"
    options = replace(OPTIONS, skip_bad=True, store_text=not one_file, rows=2)
    for _ in range(2):  # on the second call all shards exist
        target = tmp_path / "x.npy" if one_file else None
        assert embed(encoder, input, out, options, target=target) == 13
        lists = sorted(tmp_path.rglob("*.skipped.jsonl"))
        listed = [json.loads(line) for path in lists for line in path.read_text().splitlines()]
        assert [one["row"] for one in listed] == [2, 5, 6, 7, 8, 18]
        assert listed[0]["place"] == f"{input}:3"
    if one_file:
        assert lists == [tmp_path / "x.skipped.jsonl"]
        assert np.load(tmp_path / "x.npy").shape == (13, 32)
    else:
        found = table(out)
        assert [BAD[row] for row in found["row"]] == found["text"] == TEXTS
        assert [path.name[6:12] for path in lists] == ["000001", "000002", "000003", "000004", "000009"]


def test_a_text_without_tokens_is_a_bad_row(encoder: SentenceEncoder, tmp_path: Path) -> None:
    input = write_lines(tmp_path / "texts.txt", [*TEXTS[:5], "\u200d", *TEXTS[5:]])
    with pytest.raises(DataError, match=r"texts\.txt:6.*--on-bad-row"):
        embed(encoder, input, tmp_path / "out")
    assert embed(encoder, input, tmp_path / "skipped", replace(OPTIONS, skip_bad=True)) == 13
    assert table(tmp_path / "skipped")["row"] == [0, 1, 2, 3, 4, *range(6, 14)]
    assert json.loads((tmp_path / "skipped" / "shard-000001.skipped.jsonl").read_text())["row"] == 5


def test_a_run_that_stopped_at_a_bad_row_continues_without_it(
    encoder: SentenceEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is bad for the tokenizer only, so that it is found when its shard is embedded."""
    tokenize = encoder.tokenize

    def refuse(texts: Any, *more: Any) -> Any:
        if "odd" in texts:
            raise ValueError("text 0: 'odd' adds no token to prompt 'plain'.")
        return tokenize(texts, *more)

    monkeypatch.setattr(encoder, "tokenize", refuse)
    input = write_lines(tmp_path / "texts.txt", [*TEXTS[:9], "odd", *TEXTS[9:]])
    skipping = replace(OPTIONS, skip_bad=True)
    with pytest.raises(DataError, match=r"texts\.txt:10.*--on-bad-row skip"):
        embed(encoder, input, tmp_path / "out")
    first = tmp_path / "out" / "shard-000000.parquet"
    before = first.stat().st_mtime_ns
    assert embed(encoder, input, tmp_path / "out", skipping) == 13
    assert first.stat().st_mtime_ns == before
    embed(encoder, input, tmp_path / "whole", skipping)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    with pytest.raises(DataError, match="skipped rows"):
        embed(encoder, input, tmp_path / "out")


def test_a_vector_that_is_not_finite_is_refused_with_its_line(
    encoder: SentenceEncoder, lines: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (row,) = encoder.encode([TEXTS[6]])

    def spoil(_: Any, __: Any, rows: torch.Tensor) -> None:
        rows[(rows - torch.from_numpy(row)).abs().amax(dim=1) < 1e-5] = torch.inf

    handle = encoder.model.register_forward_hook(spoil)
    request.addfinalizer(handle.remove)
    with pytest.raises(DataError, match=r"texts\.txt:7"):
        embed(encoder, lines, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("*.parquet")] == ["shard-000000.parquet"]


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("one_file", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_killed_before_any_write_it_resumes_to_the_same_bytes(
    one_file: bool, step: int, encoder: SentenceEncoder, lines: Path, tmp_path: Path
) -> None:
    write_lines(lines, [*TEXTS[:3], "", TEXTS[3]])  # two shards and a skipped row

    def work(place: Path) -> None:
        options = replace(OPTIONS, skip_bad=True)
        embed(encoder, lines, place / "out", options, target=place / "x.npy" if one_file else None)

    assert check_resumes_after_any_kill(work, tmp_path, step) > 20 // step


def test_other_settings_in_the_same_folder_are_refused(encoder: SentenceEncoder, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    embed(encoder, lines, out, rank=1, world_size=2)
    before = contents(out)

    def refused(field: str, one: SentenceEncoder = encoder, rows: int = 4, **form: Any) -> None:
        with pytest.raises(FolderError, match=f"--output.*{field}"):
            embed(one, lines, out, replace(OPTIONS, rows=rows), **form)

    refused(r"vectors\.normalize", normalize=True)
    refused(r"layout\.rows", rows=5)
    refused(r"model\.weights", tiny_encoder("bert", seed=1))
    refused(r"model\.normalize", tiny_encoder("bert", normalize=True))
    refused(r"model\.max_length", tiny_encoder("bert", max_length=9))
    write_lines(lines, [*TEXTS[:-1], "Fin"])
    refused(r"input\.files\.0\.sha256")
    assert contents(out) == before


@pytest.mark.parametrize(
    "ranks", [[(1, 2), (0, 2)], [(rank, 7) for rank in reversed(range(7))], [(2, 3), (1, 2), (0, 1)]], ids=str
)
def test_any_number_of_processes_writes_the_same_files(
    ranks: list[tuple[int, int]], encoder: SentenceEncoder, lines: Path, once: dict[str, bytes], tmp_path: Path
) -> None:
    """Rank 0 last, since it waits for the others; the number of processes can change."""
    for rank, world_size in ranks:
        embed(encoder, lines, tmp_path / "out", rank=rank, world_size=world_size)
    assert contents(tmp_path / "out") == once


def test_rank_0_waits_for_the_others(
    encoder: SentenceEncoder, lines: Path, once: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        assert not (tmp_path / "out" / "embeddings.json").exists()
        waits.append(seconds)
        if len(waits) == 3:
            embed(encoder, lines, tmp_path / "out", rank=1, world_size=2)

    monkeypatch.setattr("time.sleep", sleep)
    embed(encoder, lines, tmp_path / "out", world_size=2)
    assert len(waits) == 3
    assert contents(tmp_path / "out") == once


def test_input_that_changes_meanwhile_gets_no_index(
    encoder: SentenceEncoder, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = encoder.tokenize
    late = [*TEXTS, "late"]
    monkeypatch.setattr(encoder, "tokenize", lambda texts, **_: (write_lines(lines, late), real(texts))[1])
    with pytest.raises(DataError, match=r"texts\.txt"):
        embed(encoder, lines, tmp_path / "out")
    assert not (tmp_path / "out" / "embeddings.json").exists()
    assert not list((tmp_path / "out").glob("**/shard-*")), "no shard that a resumed run would keep"


def test_the_fingerprint_covers_tokenizer_and_adapter_scale(encoder: SentenceEncoder) -> None:
    assert fingerprint(tiny_encoder("bert")) == fingerprint(encoder)
    other = tiny_encoder("bert")
    other.tokenizer = copy.deepcopy(other.tokenizer)  # tests share one
    other.tokenizer.backend_tokenizer.normalizer = None
    assert fingerprint(other) != fingerprint(encoder)

    def adapted(alpha: float) -> str:
        one = tiny_encoder("bert")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            one.add_lora(LoraSettings(rank=2, alpha=alpha))
        return fingerprint(one)

    assert adapted(4) == adapted(4) != adapted(8)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"output": Path("x.npy"), "id_column": "id"}, "--id-column"),
        ({"output": Path("x.npy"), "store_text": True}, "--store-text"),
        ({"output": Path("x.npy"), "precision": "int8"}, "--precision int8"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(named: dict[str, Any], expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        EmbedSettings(**{"model": "m", "input": Path("texts.txt"), "output": Path("x"), **named})


def test_input_model_and_output_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, lines = save_tiny_base("bert", tmp_path / "base"), write_lines(tmp_path / "in.txt")

    def refused(error: type[Exception], match: str, *options: str, **given: object) -> None:
        words = {"model": "./nowhere", "input": lines, "output": tmp_path / "out", **given}
        with pytest.raises(error, match=match):
            cli.run(["embed", *(str(word) for name in words for word in (f"--{name}", words[name])), *options])

    refused(SettingsError, "--dim", "--dim", "33", model=base)
    refused(SettingsError, r"--output .* --input", input=tmp_path)
    monkeypatch.setenv("ANGLE_LLM_DATA", str(tmp_path.parent))
    refused(SettingsError, r"--output .* --input", input=tmp_path.name)
    refused(FolderError, "--output", output=tmp_path)
    refused(SettingsError, r"--output .*in\.txt.*expected a writable folder", output=lines / "out")
    (tmp_path / "folder.npy").mkdir()
    refused(
        SettingsError, r"--output must name the \.npy file .*folder\.npy is a folder", output=tmp_path / "folder.npy"
    )
    (tmp_path / "folder.npy").rmdir()
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(SettingsError, "--input -", input="-")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "in.txt"]

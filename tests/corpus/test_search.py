"""The nearest rows are those that a plain product over everything finds, and the command shows them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import KEEPING, TEXTS, work, write_lines
from tiny import save_tiny_base, tiny_encoder

from angle_llm import cli
from angle_llm.config import SettingsError
from angle_llm.corpus import EmbedSettings
from angle_llm.corpus.finished import read_index, read_pieces
from angle_llm.corpus.search import search
from angle_llm.corpus.shards import ShardsError
from angle_llm.corpus.vectors import VectorForm
from angle_llm.model.encoder import SentenceEncoder


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return tiny_encoder("bert")


QUERIES = ["A dog sleeps.", "Somebody eats.", "End"]


@pytest.mark.parametrize("format", ["parquet", "npy"])
@pytest.mark.parametrize(
    "form", [{}, {"precision": "int8", "dim": 9}, {"precision": "binary"}, {"complex": True}], ids=str
)
def test_the_nearest_are_those_of_a_product_over_everything(
    form: dict[str, Any], format: str, encoder: SentenceEncoder, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    work(encoder, write_lines(tmp_path / "texts.txt"), out, replace(KEEPING, format=format), **form)  # type: ignore[arg-type]
    index, form_ = read_index(out), VectorForm(32, **form)
    queries = encoder.encode(QUERIES)
    rows = np.concatenate([piece.vectors for piece in read_pieces(out, index, form_)]).astype(np.float64)
    cut = queries[:, : form_.kept].astype(np.float64)
    cosine = (cut / np.linalg.norm(cut, axis=1, keepdims=True)) @ (rows / np.linalg.norm(rows, axis=1, keepdims=True)).T
    for top in (1, 3, 20):
        for hits, due in zip(search(out, index, queries, top), cosine, strict=True):
            assert len(hits) == min(top, 13)
            np.testing.assert_allclose([hit.score for hit in hits], np.sort(due)[::-1][:top], atol=2e-6)
            np.testing.assert_allclose([due[hit.row] for hit in hits], [hit.score for hit in hits], atol=2e-6)


def test_of_equal_rows_the_earlier_comes_first(encoder: SentenceEncoder, tmp_path: Path) -> None:
    work(encoder, write_lines(tmp_path / "texts.txt", ["Other words.", *["A dog."] * 9]), tmp_path / "out")
    for top in (1, 3, 9):
        (hits,) = search(tmp_path / "out", read_index(tmp_path / "out"), encoder.encode(["A dog."]), top)
        assert [hit.row for hit in hits] == list(range(1, top + 1))
        assert {hit.score for hit in hits} == {hits[0].score}, "equal to the last bit"
        assert hits[0].score == pytest.approx(1, abs=1e-6)


def test_a_query_that_is_not_finite_is_told(encoder: SentenceEncoder, tmp_path: Path) -> None:
    work(encoder, write_lines(tmp_path / "texts.txt"), tmp_path / "out")
    with pytest.raises(ShardsError, match="of a query is not finite"):
        search(tmp_path / "out", read_index(tmp_path / "out"), np.full((1, 32), np.nan, dtype=np.float32), 1)


def test_a_damaged_or_unfinished_folder_is_told(encoder: SentenceEncoder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ShardsError, match="Name a folder that `angle-llm embed"):
        read_index(out)
    work(encoder, write_lines(tmp_path / "texts.txt"), out)
    index, queries = read_index(out), encoder.encode(QUERIES)
    with pytest.raises(ShardsError, match="of 32 dimensions, and this one has 7"):
        search(out, index, queries[:, :7], 1)
    (out / "shard-000002.parquet").unlink()
    with pytest.raises(ShardsError, match=r"shard-000002.parquet is missing or damaged. Run the same"):
        search(out, index, queries, 1)
    (out / "embeddings.json").rename(out / "job.json")
    with pytest.raises(ShardsError, match="begun and not ended"):
        read_index(out)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("bases")
    return [str(save_tiny_base("llama", folder / str(seed), seed=seed)) for seed in (0, 1)]


def test_the_commands_embed_and_search(bases: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["id\ttext", *(f"no. {number}\t{text}" for number, text in enumerate(TEXTS))]
    input, out = write_lines(tmp_path / "texts.tsv", rows), tmp_path / "out"
    arguments = ["--model", bases[0], "--input", str(input), "--output", str(out)]
    cli.run(["embed", *arguments, "--id-column", "id", "--shard-rows", "5", "--prompt", "prompteol", "--dim", "16"])
    assert "13 rows of 16 dimensions in" in capsys.readouterr().out
    cli.run(["search", str(out), "A dog eats.", "End", "--top", "2"])
    shown = capsys.readouterr()
    first, second = shown.out.strip().split("\n\n")
    assert first.splitlines()[0] == "A dog eats."
    assert first.splitlines()[1].split() == ["cosine", "id", "text"]
    assert first.splitlines()[2].split() == ["1.0000", "no.", "4", "A", "dog", "eats."]
    assert second.splitlines()[2].split() == ["1.0000", "no.", "12", "End"]
    assert len(first.splitlines()) == len(second.splitlines()) == 4
    assert "FAISS" in shown.err
    write_lines(input, [*rows, "new\trow"])  # what the rows were is not known any more
    cli.run(["search", str(out), "End", "--top", "1"])
    assert "1.0000  no. 12  (the text is not stored, and its file is gone or changed)" in capsys.readouterr().out
    with pytest.raises(ShardsError, match="different models cannot be compared"):
        cli.run(["search", str(out), "End", "--model", bases[1]])


def test_stored_texts_need_no_source(bases: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    input, out = write_lines(tmp_path / "texts.txt"), tmp_path / "out"
    cli.run(["embed", "--model", bases[0], "--input", str(input), "--output", str(out), "--store-text"])
    input.unlink()
    cli.run(["search", str(out), "A cat runs.", "--top", "1"])
    assert "1.0000  6  A cat runs." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"output": Path("x.npy"), "id_column": "id"}, "--id-column needs more than one .npy file"),
        ({"output": Path("x.npy"), "precision": "int8"}, "scale for each row, needs more than one"),
        ({"complex": True, "dim": 4}, "Choose one"),
        ({"complex": True, "precision": "int8"}, "float32 or float16, got int8"),
        ({"complex": True, "precision": "float16", "format": "npy"}, "no complex numbers of float16"),
        ({"shard_rows": 0}, "--shard-rows must be at least 1, got 0"),
    ],
)
def test_settings_that_do_not_go_together_are_told(named: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        EmbedSettings(**{"model": "m", "input": Path("texts.txt"), "output": Path("x"), **named})


def test_what_does_not_fit_model_or_place_is_told(bases: list[str], tmp_path: Path) -> None:
    input = write_lines(tmp_path / "texts.txt")
    with pytest.raises(SettingsError, match="--dim 33 is more than the 32 dimensions"):
        cli.run(["embed", "--model", bases[0], "--input", str(input), "--output", str(tmp_path / "out"), "--dim", "33"])
    with pytest.raises(SettingsError, match="lies in --input"):
        cli.run(["embed", "--model", bases[0], "--input", str(tmp_path), "--output", str(tmp_path / "out")])
    assert [path.name for path in tmp_path.iterdir()] == ["texts.txt"]


def test_standard_input_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match="for one process"):
        cli.run(["embed", "--model", "./nowhere", "--input", "-", "--output", "x"])

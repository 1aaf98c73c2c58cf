"""Search equals brute force to the last bit; `angle-llm search` prints its results."""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import OPTIONS, TEXTS, embed, write_lines
from hub_server import open_hub
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import save_tiny_base, tiny_encoder

from angle_llm import cli
from angle_llm.data import DataError
from angle_llm.io import FolderError
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.vectors import read_index, read_vectors
from angle_llm.settings.commands import SearchSettings
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import LoraSettings
from angle_llm.tools.search import (
    VectorSearch,
    cosine_matrix,
    cosines,
    grid_blocks,
    nearest,
    on_grid,
    search_folder,
)


def brute_force(anchors: np.ndarray, candidates: np.ndarray, top: int) -> tuple[list[list[int]], list[list[float]]]:
    """One dot product at a time, sorted by cosine, then by index."""
    left, right = on_grid(anchors), on_grid(candidates)
    places, scores = [], []
    for anchor in left:
        found = [float(sum(a * b for a, b in zip(anchor, candidate, strict=True)) / 2**52) for candidate in right]
        order = sorted(range(len(found)), key=lambda place: (-found[place], place))[:top]
        places.append(order)
        scores.append([found[place] for place in order])
    return places, scores


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    queries=st.integers(1, 7),
    candidates=st.integers(1, 40),
    dimensions=st.integers(1, 33),
    block=st.integers(1, 45),
    repeats=st.booleans(),
    data=st.data(),
)
def test_blocks_of_any_size_equal_brute_force(
    seed: int, queries: int, candidates: int, dimensions: int, block: int, repeats: bool, data: st.DataObject
) -> None:
    draw = np.random.default_rng(seed)
    vectors = draw.standard_normal((queries + candidates, dimensions)).astype(np.float32)
    if repeats:  # equal vectors: the earlier candidate comes first
        vectors = vectors[draw.integers(0, max(1, len(vectors) // 3), len(vectors))]
    top, rows = data.draw(st.integers(1, candidates)), np.arange(queries, queries + candidates)
    place, score = nearest(on_grid(vectors[:queries]), grid_blocks(vectors, rows, block), top)
    assert (place.tolist(), score.tolist()) == brute_force(vectors[:queries], vectors[queries:], top)


def test_cosines_are_exact_sums_of_the_rounded_vectors() -> None:
    rows = on_grid(np.random.default_rng(1).standard_normal((2, 4096)))
    exact = sum(Fraction(int(a)) * int(b) for a, b in zip(*rows, strict=True)) / 2**52
    assert Fraction(float(cosines(rows[:1], rows[1:])[0])) == exact
    assert Fraction(float(cosine_matrix(rows[:1], rows[1:])[0, 0])) == exact


def test_rounding_changes_a_cosine_less_than_float32_does() -> None:
    vectors = np.random.default_rng(2).standard_normal((50, 384))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    # Each of 384 parts is off by 2^-27 at most, weighted by a vector of length 1, on both sides: 2 * sqrt(384) * 2^-27.
    assert np.abs(cosines(on_grid(vectors[:25]), on_grid(vectors[25:])) - (unit[:25] * unit[25:]).sum(1)).max() < 3e-7


def test_equal_rows_have_equal_cosines_at_any_position() -> None:
    # A float32 product gives some of them other last digits.
    query, row = np.random.default_rng(4).standard_normal((2, 31)).astype(np.float32)
    for count in range(1, 51):
        assert len(np.unique(cosine_matrix(on_grid(query[None]), on_grid(np.repeat(row[None], count, axis=0))))) == 1


QUERIES = ["A dog sleeps.", "Somebody eats.", "End"]


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return tiny_encoder("bert")


@pytest.mark.parametrize("format", ["parquet", "npy"])
@pytest.mark.parametrize("form", [{}, {"precision": "int8", "dim": 9}, {"precision": "binary"}], ids=str)
def test_hits_are_the_largest_cosines_of_all_rows(
    form: dict[str, Any], format: Any, encoder: SentenceEncoder, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    embed(encoder, write_lines(tmp_path / "texts.txt"), out, replace(OPTIONS, format=format), **form)
    index, queries = read_index(out), encoder.encode(QUERIES)
    rows = np.concatenate([piece.vectors for piece in read_vectors(out, index)]).astype(np.float64)
    cut = queries[:, : index.vectors.kept].astype(np.float64)
    cosine = (cut / np.linalg.norm(cut, axis=1, keepdims=True)) @ (rows / np.linalg.norm(rows, axis=1, keepdims=True)).T
    for top in (1, 3, 20):
        for hits, due in zip(search_folder(out, index, queries, top), cosine, strict=True):
            assert len(hits) == min(top, 13)
            np.testing.assert_allclose([hit.cosine for hit in hits], np.sort(due)[::-1][:top], atol=2e-6)
            np.testing.assert_allclose([due[hit.row] for hit in hits], [hit.cosine for hit in hits], atol=2e-6)


def test_of_equal_rows_the_earlier_comes_first(encoder: SentenceEncoder, tmp_path: Path) -> None:
    texts = ["", "Other words.", *["A dog."] * 9]
    embed(encoder, write_lines(tmp_path / "texts.txt", texts), tmp_path / "out", replace(OPTIONS, skip_bad=True))
    for top in (1, 3, 9):
        (hits,) = search_folder(tmp_path / "out", read_index(tmp_path / "out"), encoder.encode(["A dog."]), top)
        assert [hit.row for hit in hits] == list(range(2, top + 2)), "skipped rows count"
        assert {hit.cosine for hit in hits} == {hits[0].cosine}, "equal to the last bit"


def test_damaged_and_unfinished_folders_and_bad_queries_are_refused(encoder: SentenceEncoder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(FolderError, match=r"out has no embeddings\.json"):
        read_index(out)
    embed(encoder, write_lines(tmp_path / "texts.txt"), out)
    index, queries = read_index(out), encoder.encode(QUERIES)
    with pytest.raises(FolderError, match="query"):
        search_folder(out, index, queries * np.nan, 1)
    (out / "shard-000002.parquet").unlink()
    with pytest.raises(FolderError, match=r"shard-000002\.parquet"):
        search_folder(out, index, queries, 1)
    content = (out / "embeddings.json").read_text()
    (out / "embeddings.json").write_text(content.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(FolderError, match="of another version than 1: format_version"):
        read_index(out)
    (out / "embeddings.json").write_text(content.replace('"rows": 13', '"rows": true'))
    with pytest.raises(FolderError, match=r"embeddings\.json.*rows"):
        read_index(out)
    (out / "embeddings.json").rename(out / "identity.json")
    with pytest.raises(FolderError, match=r"has no embeddings\.json"):
        read_index(out)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("bases")
    return [str(save_tiny_base("llama", folder / str(seed), seed=seed)) for seed in (0, 1)]


def test_the_commands_embed_and_search(bases: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["id;text", *(f"no. {number};{text}" for number, text in enumerate(TEXTS))]
    input, out = write_lines(tmp_path / "texts.csv", rows), tmp_path / "out"
    arguments = ["--model", bases[0], "--input", str(input), "--output", str(out)]
    cli.run(["embed", *arguments, "--id-column", "id", "--shard-rows", "5", "--prompt", "prompteol", "--dim", "16"])
    capsys.readouterr()
    cli.run(["search", str(out), "A dog eats.", "End", "--top", "2"])
    shown = capsys.readouterr()
    first, second = shown.out.strip().split("\n\n")
    assert first.splitlines()[0] == "A dog eats."
    assert first.splitlines()[2].split() == ["1.0000", "no.", "4", "A", "dog", "eats."]
    assert second.splitlines()[2].split() == ["1.0000", "no.", "12", "End"]
    assert len(first.splitlines()) == len(second.splitlines()) == 4
    write_lines(input, [*rows, "new;row"])  # the rows may have changed
    cli.run(["search", str(out), "End", "--top", "1"])
    assert "1.0000  no. 12  (text not available; embed with --store-text)" in capsys.readouterr().out
    with pytest.raises(FolderError, match="--model"):
        cli.run(["search", str(out), "End", "--model", bases[1]])
    again = ["--model", bases[0], "--input", str(input), "--column", "text", "--output", str(tmp_path / "stored")]
    cli.run(["embed", *again, "--store-text"])
    input.unlink()
    cli.run(["search", str(tmp_path / "stored"), "A cat runs.", "--top", "1"])
    assert "1.0000  6    A cat runs." in capsys.readouterr().out, "stored texts need no source"


def test_a_column_without_a_file_is_refused() -> None:
    with pytest.raises(SettingsError, match="--column belongs to --file"):
        SearchSettings(Path("vectors"), ("a man",), column="text")


def test_two_prompts_embed_and_search_each_its_side(
    bases: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = {"query": "plain", "document": "prompteol"}
    encoder = SentenceEncoder.from_pretrained(bases[0], prompt=prompts, device="cpu")
    encoder.save_pretrained(tmp_path / "model")
    input, out = write_lines(tmp_path / "texts.txt"), tmp_path / "documents"
    arguments = ["embed", "--model", str(tmp_path / "model"), "--input", str(input), "--output"]
    with pytest.raises(SettingsError, match="--as"):
        cli.run([*arguments, str(out)])
    cli.run([*arguments, str(out), "--as", "document"])
    index = read_index(out)
    assert (index.model.side, index.model.prompt["name"], index.model.side_prompts) == (
        "document", "prompteol", encoder.prompts,
    )  # fmt: skip
    (rows,) = (piece.vectors for piece in read_vectors(out, index))
    np.testing.assert_array_equal(rows, encoder.encode_document(TEXTS))
    capsys.readouterr()
    due = cosines(on_grid(encoder.encode_query(["A dog."])), on_grid(encoder.encode_document(["A dog eats."])))[0]
    for side in ([], ["--as", "query"]):
        cli.run(["search", str(out), "A dog.", "--top", "13", *side])
        assert f"{due:.4f}  4    A dog eats." in capsys.readouterr().out
    cli.run(["search", str(out), "A dog eats.", "--top", "1", "--as", "document"])
    assert "1.0000  4    A dog eats." in capsys.readouterr().out


def test_a_search_loads_the_revision_and_dtype_of_the_vectors(
    bases: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = open_hub(tmp_path / "cache", monkeypatch)
    commit = hub.put("org/base", Path(bases[0]))
    write_lines(tmp_path / "texts.txt")
    arguments = ["--model", "org/base", "--input", str(tmp_path / "texts.txt"), "--output", str(tmp_path / "out")]
    cli.run(["embed", *arguments, "--dtype", "bfloat16", "--device", "cpu"])
    hub.put("org/base", Path(bases[1]))
    index = read_index(tmp_path / "out")
    assert (index.model.revision, index.model.dtype) == (commit, "bfloat16")
    (rows,) = (piece.vectors for piece in read_vectors(tmp_path / "out", index))
    due = SentenceEncoder.from_pretrained(bases[0], dtype="bfloat16", device="cpu").encode(TEXTS)
    np.testing.assert_array_equal(rows, due)
    capsys.readouterr()
    # The texts together, as they were embedded. With queries in float32, cosines would be 6e-5 to 2e-4 below 1.
    cli.run(["search", str(tmp_path / "out"), *TEXTS, "--top", "1", "--json"])
    hits = [json.loads(line)["hits"][0] for line in capsys.readouterr().out.splitlines()]
    assert [hit["row"] for hit in hits] == list(range(13))
    assert [hit["cosine"] for hit in hits] == pytest.approx([1] * 13, abs=1e-6)


def test_an_index_names_the_commit_of_an_adapter_on_the_hub(
    bases: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = open_hub(tmp_path / "cache", monkeypatch)
    hub.put("org/base", Path(bases[0]))
    encoder = SentenceEncoder.from_pretrained("org/base", device="cpu")
    encoder.add_lora(LoraSettings(rank=2))
    encoder.save_pretrained(tmp_path / "adapter")
    commit = hub.put("org/adapter", tmp_path / "adapter")
    write_lines(tmp_path / "texts.txt")
    arguments = ["--model", "org/adapter", "--input", str(tmp_path / "texts.txt"), "--output", str(tmp_path / "out")]
    cli.run(["embed", *arguments, "--device", "cpu"])
    model = read_index(tmp_path / "out").model
    assert (model.name, model.revision) == ("org/adapter", commit)


def test_queries_come_from_a_file_and_hits_go_out_as_json(
    encoder: SentenceEncoder, bases: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "texts.txt")
    given = ["--model", bases[0], "--input", str(tmp_path / "texts.txt"), "--output", str(tmp_path / "out")]
    cli.run(["embed", *given, "--shard-rows", "5", "--device", "cpu"])
    (tmp_path / "queries.csv").write_text(f"id,question\n1,{TEXTS[2]}\n2,{TEXTS[4]}\n")
    capsys.readouterr()
    asked = ["--file", str(tmp_path / "queries.csv"), "--column", "question", "--top", "2", "--json"]
    cli.run(["search", str(tmp_path / "out"), TEXTS[0], *asked])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["query"] for one in found] == [TEXTS[0], TEXTS[2], TEXTS[4]]
    assert [one["hits"][0]["text"] for one in found] == [TEXTS[0], TEXTS[2], TEXTS[4]]
    assert all(one["hits"][0]["cosine"] >= one["hits"][1]["cosine"] for one in found)
    for in_memory in (True, False):
        search = VectorSearch(str(tmp_path / "out"), in_memory=in_memory)
        hits = search([TEXTS[0], TEXTS[2], TEXTS[4]], top=2)
        assert [[hit._asdict() for hit in own] for own in hits] == [one["hits"] for one in found]
        for shard in (tmp_path / "out").glob("shard-*"):
            shard.rename(tmp_path / shard.name)
        if in_memory:  # also the ids and texts
            assert search([TEXTS[0], TEXTS[2], TEXTS[4]], top=2) == hits
        else:
            with pytest.raises(FolderError, match="missing"):
                search(["A dog."])
        for shard in tmp_path.glob("shard-*"):
            shard.rename(tmp_path / "out" / shard.name)
    with pytest.raises(DataError, match="id, question"):
        cli.run(["search", str(tmp_path / "out"), "--file", str(tmp_path / "queries.csv")])

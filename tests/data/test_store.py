"""Sources that do not fit memory: read once, then looked up on disk, with the same examples and the same report."""

import gzip
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import one_in

from angle_llm.data import DataError, Example, Group, PositivePair, ScoredPair, Triple, store
from angle_llm.data.examples import load_examples
from angle_llm.data.store import StoredExamples, digest_of, write_store
from angle_llm.settings.encoder import CommandSource
from angle_llm.settings.train import DataSource

ROWS = 4_000


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSource:
    """Triples of texts of all lengths, and rows that `where` drops; with a small memory limit."""
    monkeypatch.setattr(store, "MEMORY_LIMIT", 100_000)
    generator = random.Random(0)
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt", encoding="utf-8") as file:
        for number in range(ROWS):
            names = ("anchor", "positive", "negative")
            row = {name: f"{name} {number} " + "ä" * generator.randrange(20) for name in names} | {"keep": number % 3}
            file.write(json.dumps(row) + "\n")
    return CommandSource(path=str(tmp_path / "rows.jsonl.gz"), where={"keep": 1})


@pytest.mark.parametrize("more", [{}, {"limit": 100}, {"shuffle_seed": 3}, {"shuffle_seed": 3, "limit": 100}])
def test_store_equals_a_list(source: DataSource, more: dict[str, int], tmp_path: Path) -> None:
    source = replace(source, **more)
    plain = load_examples(source)
    assert isinstance(plain.examples, list)
    for _ in ("cold", "warm"):
        stored = load_examples(source, tmp_path / "cache")
        assert isinstance(stored.examples, StoredExamples)
        assert list(stored.examples) == plain.examples
        assert stored.examples[-1] == plain.examples[-1]
        assert stored.report == plain.report
    if not more:  # the digest of a selection does not read the rows
        assert digest_of(stored.examples) == digest_of(plain.examples)
    with pytest.raises(IndexError):
        stored.examples[len(plain.examples)]


def test_small_sources_are_not_written(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"query": "a", "answer": "b"}\n')
    loaded = load_examples(DataSource(path=str(tmp_path / "rows.jsonl")), tmp_path / "cache")
    assert loaded.examples == [PositivePair("a", "b")]
    assert not (tmp_path / "cache").exists()


def test_warm_store_does_not_read_the_source(
    source: DataSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_examples(source, tmp_path / "cache")
    monkeypatch.setattr("angle_llm.data.examples.open_examples", lambda _: pytest.fail("it was read again"))
    other = replace(source, limit=10)
    assert list(load_examples(other, tmp_path / "cache").examples) == list(first.examples)[:10]


def test_changed_file_and_other_settings_are_read_again(source: DataSource, tmp_path: Path) -> None:
    load_examples(source, tmp_path / "cache")
    other = replace(source, where={"keep": 2})
    assert list(load_examples(other, tmp_path / "cache").examples) == load_examples(other).examples
    assert len(list((tmp_path / "cache" / "examples").iterdir())) == 2
    content = gzip.decompress(Path(source.path).read_bytes()).replace(b"anchor 1 ", b"anker 1 ")
    Path(source.path).write_bytes(gzip.compress(content))
    anchors = [example.anchor for example in load_examples(source, tmp_path / "cache").examples]
    assert any("anker 1 " in anchor for anchor in anchors)


@one_in(2, "name, damage", ["examples.arrow", "account.json"], ["cut", "missing", "noise"])
def test_damaged_store_is_written_again(name: str, damage: str, source: DataSource, tmp_path: Path) -> None:
    expected = load_examples(source, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob(f"examples/*/{name}")
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"noise" * 100)
    again = load_examples(source, tmp_path / "cache")
    assert list(again.examples) == load_examples(source).examples
    assert again.report == expected.report
    assert name != "account.json" or path.read_bytes() == content


def test_unreadable_source_leaves_no_files(source: DataSource, tmp_path: Path) -> None:
    content = Path(source.path).read_bytes()
    Path(source.path).write_bytes(content + gzip.compress(b'{"anchor": "a", "keep": 1}\n'))
    with pytest.raises(DataError, match=rf"rows\.jsonl\.gz:{ROWS + 1}: "):
        load_examples(source, tmp_path / "cache")
    Path(source.path).write_bytes(content[:-200])
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz"):
        load_examples(source, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("examples/*"))


@pytest.mark.parametrize(
    "examples",
    [
        [ScoredPair("a", "b", 0.1 + 0.2)],
        [PositivePair("a\n", "𝄞")],
        [Triple("a", "b", "c" * 5_000_000)] * 9,
        [Group("a", ("b", "c"), ("d",), (1.0, 0.1 + 0.2, -3.0)), Group("é", ("b",))],
    ],
)
def test_all_types_of_examples_are_stored_exactly(examples: list[Example], tmp_path: Path) -> None:
    stored = write_store(tmp_path / "store", examples, lambda: {"some": 1})
    assert list(stored) == examples
    assert stored.account == {"some": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_large_file_is_read_in_little_memory(tmp_path: Path) -> None:
    """30 MB of rows; lists of them take several times that. Measured in a separate process."""
    path = tmp_path / "rows.jsonl"
    rows = ({"query": f"{n} " + "x" * 150, "answer": f"{n} " + "y" * 150} for n in range(100_000))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = (
        "import resource, sys; from pathlib import Path; from angle_llm.data import store\n"
        "from angle_llm.data.examples import DataSource, load_examples\n"
        "import pyarrow.parquet, numpy\n"
        "store.MEMORY_LIMIT = 5_000_000\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "loaded = load_examples(DataSource(path=sys.argv[1]), Path(sys.argv[2]))\n"
        "print(len(loaded.examples), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "cache")], capture_output=True, text=True, check=True
    )
    count, mebibytes = map(int, done.stdout.splitlines()[-1].split())
    assert count == 100_000
    assert mebibytes < 70  # as lists: 125 and more


def test_a_store_that_another_process_has_written_meanwhile_is_kept(tmp_path: Path) -> None:
    """It may be mapped by this process."""
    example = Triple("a", "b", "c")

    def account() -> dict[str, Any]:
        write_store(tmp_path / "store", [example], dict)
        return {"other": True}

    assert list(write_store(tmp_path / "store", [example], account)) == [example]
    assert "other" not in (tmp_path / "store" / "account.json").read_text()

"""Sources that do not fit memory: read once, then looked up on disk, with the same examples and the same report."""

import gzip
import json
import os
import random
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from cases import one_in
from pyarrow import parquet

from angle_llm.config import DataSource
from angle_llm.data import DataError, Example, Group, PositivePair, ScoredPair, Triple, store
from angle_llm.data.examples import load_examples
from angle_llm.data.store import StoredExamples, digest_of, open_store, write_store
from angle_llm.settings_io import SettingsError

ROWS = 10_000


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSource:
    """Triples of texts of all lengths, a bad row, and rows that `where` drops; with a small memory limit."""
    monkeypatch.setattr(store, "MEMORY_LIMIT", 100_000)
    generator = random.Random(0)
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt", encoding="utf-8") as file:
        for number in range(ROWS):
            names = ("anchor", "positive", "negative")
            row = {name: f"{name} {number} " + "ä" * generator.randrange(20) for name in names} | {"keep": number % 3}
            file.write(json.dumps(row | ({"negative": None} if number == 7 else {})) + "\n")
    return DataSource(path=str(tmp_path / "rows.jsonl.gz"), where={"keep": 1}, on_bad_row="skip")


@pytest.mark.parametrize("more", [{}, {"limit": 100}, {"shuffle_seed": 3}, {"shuffle_seed": 3, "limit": 100}])
def test_store_equals_a_list(source: DataSource, more: dict[str, int], tmp_path: Path) -> None:
    source = replace(source, **more)  # type: ignore[arg-type]
    plain = load_examples(source)
    assert isinstance(plain.examples, list)
    for _ in ("cold", "warm"):
        stored = load_examples(source, tmp_path / "cache")
        assert isinstance(stored.examples, StoredExamples)
        assert list(stored.examples) == plain.examples
        assert stored.examples[-1] == plain.examples[-1]
        assert stored.examples[5:50:7] == plain.examples[5:50:7]
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
    other = replace(source, limit=10, max_bad_ratio=0.2)
    assert list(load_examples(other, tmp_path / "cache").examples) == first.examples[:10]
    for wrong, reason in (({"limit": -5}, "limit"), ({"max_bad_ratio": 7.0}, "max_bad_ratio")):
        with pytest.raises(SettingsError, match=reason):
            replace(source, **wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"1 of 10,000 rows are bad"):
        load_examples(replace(source, max_bad_ratio=0), tmp_path / "cache")


def test_changed_file_and_other_settings_are_read_again(source: DataSource, tmp_path: Path) -> None:
    load_examples(source, tmp_path / "cache")
    other = replace(source, where={"keep": 2})
    assert list(load_examples(other, tmp_path / "cache").examples) == load_examples(other).examples
    assert len(list((tmp_path / "cache" / "examples").iterdir())) == 2
    content = gzip.decompress(Path(source.path).read_bytes()).replace(b"anchor 1 ", b"anker 1 ")
    Path(source.path).write_bytes(gzip.compress(content))
    anchors = [example.anchor for example in load_examples(source, tmp_path / "cache").examples]  # type: ignore[union-attr]
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


@pytest.mark.parametrize("other", [{"rows_out": 3}, {"rejected": None}, {"rejected": [["file", 7]]}], ids=str)
def test_report_with_other_fields_is_written_again(
    other: dict[str, object], source: DataSource, tmp_path: Path
) -> None:
    expected = load_examples(source, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("examples/*/account.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"account": content["account"] | other}))
    assert load_examples(source, tmp_path / "cache").report == expected.report
    assert json.loads(path.read_text()) == content


def test_undamaged_store_that_the_system_cannot_open_is_kept(source: DataSource, tmp_path: Path) -> None:
    examples = list(load_examples(source, tmp_path / "cache").examples)
    (folder,) = (tmp_path / "cache" / "examples").iterdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(DataError, match=r"cannot be opened: .*Too many open files"):
            open_store(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert list(open_store(folder) or []) == examples


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="limits the file size in place of a full disk")
def test_full_disk_is_an_error_and_leaves_no_files(tmp_path: Path) -> None:
    """In a separate process that can write files of 200 kB."""
    code = (
        "import resource, signal, sys; from pathlib import Path; from angle_llm.data import PositivePair\n"
        "from angle_llm.data.store import write_store; import pyarrow\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "write_store(Path(sys.argv[1]) / 'store', (PositivePair(f'{n} a text', 'b') for n in range(20_000)), dict)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "ANGLE_LLM_CACHE" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_incomplete_folders_of_killed_processes_are_removed_after_a_day(source: DataSource, tmp_path: Path) -> None:
    place = tmp_path / "cache" / "examples"
    for name, age in ((".old.1.tmp", 2 * 86_400), (".new.2.tmp", 60)):
        (place / name).mkdir(parents=True)
        os.utime(place / name, (time.time() - age,) * 2)
    load_examples(source, tmp_path / "cache")
    assert sorted(path.name for path in place.iterdir() if path.name.startswith(".")) == [".new.2.tmp"]


def test_unreadable_source_leaves_no_files(source: DataSource, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz:8"):
        load_examples(DataSource(path=source.path), tmp_path / "cache")
    Path(source.path).write_bytes(Path(source.path).read_bytes()[:-200])
    with pytest.raises(DataError, match="truncated"):
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


def test_nli_triples_are_stored(source: DataSource, tmp_path: Path) -> None:
    rows = [
        json.dumps({"premise": f"premise {number} " + "x" * 100, "hypothesis": f"{label} {number}", "label": label})
        for number in range(1_000)
        for label in ("entailment", "contradiction")
    ]
    (tmp_path / "nli.jsonl").write_text("\n".join(rows))
    nli = DataSource(path=str(tmp_path / "nli.jsonl"), format="nli_triples")
    stored = load_examples(nli, tmp_path / "cache")
    assert isinstance(stored.examples, StoredExamples)
    assert list(stored.examples) == load_examples(nli).examples
    assert stored.report.rows_used == 2_000


@pytest.mark.parametrize(
    "kind", ["jsonl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("csv", "parquet"))]
)
def test_large_file_is_read_in_little_memory(kind: str, tmp_path: Path) -> None:
    """60 MB of rows; lists of them take several times that. Measured in a separate process."""
    path = tmp_path / f"rows.{kind}"
    rows = [{"query": f"{n} " + "x" * 150, "answer": f"{n} " + "y" * 150} for n in range(200_000)]
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "csv":
        path.write_text("query,answer\n" + "".join(f"{row['query']},{row['answer']}\n" for row in rows))
    else:
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
    assert count == 200_000
    assert mebibytes < 120  # as lists: 250 and more

"""Sources too large for memory: read once, then looked up on disk; the same examples and the same account either way."""

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

import pytest

from angle_llm.data import DataError, DataSource, PositivePair, ScoredPair, Triple, load_examples, store
from angle_llm.data.store import ExampleStore, Selected, StoreWriter, digest_of, open_store

ROWS = 10_000


@pytest.fixture
def source(tmp_path: Path) -> DataSource:
    """Triples with texts of all lengths, a bad row, and rows that `where` leaves out."""
    generator = random.Random(0)
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt", encoding="utf-8") as file:
        for number in range(ROWS):
            texts = [f"{word} {number} " + "ä" * generator.randrange(20) for word in ("anchor", "positive", "negative")]
            row = dict(zip(("anchor", "positive", "negative"), texts, strict=True)) | {"keep": number % 3}
            file.write(json.dumps(row | ({"negative": None} if number == 7 else {})) + "\n")
    return DataSource(str(tmp_path / "rows.jsonl.gz"), where={"keep": 1}, on_bad_row="skip")


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MEMORY_LIMIT", 100_000)


@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize("more", [{}, {"limit": 100}, {"shuffle_seed": 3}, {"shuffle_seed": 3, "limit": 100}])
def test_a_store_holds_what_a_list_would(source: DataSource, more: dict[str, int], tmp_path: Path) -> None:
    source = DataSource(source.path, where=source.where, on_bad_row="skip", **more)  # type: ignore[arg-type]
    plain = load_examples(source)
    for _ in ("cold", "warm"):
        stored = load_examples(source, tmp_path / "cache")
        assert isinstance(stored.examples, ExampleStore | Selected)
        assert list(stored.examples) == plain.examples
        assert stored.examples[-1] == plain.examples[-1]
        assert stored.examples[5:50:7] == plain.examples[5:50:7]
        assert stored.report == plain.report
    if not more:  # a choice of stored examples is known by the store and the choice: no row is read for it
        assert digest_of(stored.examples) == digest_of(plain.examples)
    with pytest.raises(IndexError):
        stored.examples[len(plain.examples)]


def test_small_sources_are_written_nowhere(source: DataSource, tmp_path: Path) -> None:
    assert isinstance(load_examples(source, tmp_path / "cache").examples, list)
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("small_memory")
def test_a_warm_store_does_not_read_the_source(
    source: DataSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_examples(source, tmp_path / "cache")
    monkeypatch.setattr("angle_llm.data.sources.open_source", lambda _: pytest.fail("it was read again"))
    other_choice = DataSource(source.path, where=source.where, on_bad_row="skip", limit=10, max_bad_ratio=0.2)
    assert list(load_examples(other_choice, tmp_path / "cache").examples) == first.examples[:10]


@pytest.mark.usefixtures("small_memory")
def test_a_file_that_has_changed_is_read_again(source: DataSource, tmp_path: Path) -> None:
    load_examples(source, tmp_path / "cache")
    content = gzip.decompress(Path(source.path).read_bytes()).replace(b"anchor 1 ", b"anker 1 ")
    Path(source.path).write_bytes(gzip.compress(content))
    assert any("anker 1 " in example.anchor for example in load_examples(source, tmp_path / "cache").examples)  # type: ignore[union-attr]


@pytest.mark.usefixtures("small_memory")
def test_other_settings_are_another_store(source: DataSource, tmp_path: Path) -> None:
    load_examples(source, tmp_path / "cache")
    other = DataSource(source.path, where={"keep": 2}, on_bad_row="skip")
    assert list(load_examples(other, tmp_path / "cache").examples) == load_examples(other).examples
    assert len(list((tmp_path / "cache" / "examples").iterdir())) == 2


@pytest.mark.usefixtures("small_memory")
def test_a_wrong_choice_is_told_of_a_store_too(source: DataSource, tmp_path: Path) -> None:
    load_examples(source, tmp_path / "cache")
    for wrong, message in (({"limit": -5}, "limit must be"), ({"max_bad_ratio": 7.0}, "max_bad_ratio is a share")):
        with pytest.raises(DataError, match=message):
            load_examples(replace(source, **wrong), tmp_path / "cache")  # type: ignore[arg-type]


@pytest.mark.usefixtures("small_memory")
def test_an_account_of_another_version_is_made_anew(source: DataSource, tmp_path: Path) -> None:
    expected = load_examples(source, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("examples/*/account.json")
    told = json.loads(path.read_text())
    told["account"]["more"] = 1
    path.write_text(json.dumps(told))
    assert load_examples(source, tmp_path / "cache").report == expected.report
    assert "more" not in json.loads(path.read_text())["account"]


@pytest.mark.usefixtures("small_memory")
def test_scores_beside_an_sts_file_are_a_part_of_it(tmp_path: Path) -> None:
    lines = "".join(f"left {number} {'x' * 50}\tright {number}\n" for number in range(1_000))
    (tmp_path / "STS.input.a.txt").write_text(lines)
    (tmp_path / "STS.gs.a.txt").write_text("1\n" * 1_000)
    source = DataSource(str(tmp_path / "STS.input.a.txt"), score_range=(0, 5))
    assert load_examples(source, tmp_path / "cache").examples[0].score == 0.2  # type: ignore[union-attr]
    (tmp_path / "STS.gs.a.txt").write_text("2\n" * 1_000)
    assert load_examples(source, tmp_path / "cache").examples[0].score == 0.4  # type: ignore[union-attr]


def test_a_store_that_the_system_cannot_map_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow

    with StoreWriter(tmp_path / "store") as writer:
        writer.add(PositivePair("a", "b"))
        writer.finish({})

    def refuse(_: str) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(pyarrow, "memory_map", refuse)
        with pytest.raises(DataError, match="Cannot allocate memory"):
            open_store(tmp_path / "store")
    kept = open_store(tmp_path / "store")
    assert kept is not None
    assert list(kept) == [PositivePair("a", "b")]


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="the file size is limited in place of a full disk")
def test_a_full_disk_is_told_and_nothing_stays(tmp_path: Path) -> None:
    """In a process of its own, which may write files of 200 kB."""
    code = (
        "import resource, signal, sys; from pathlib import Path; from angle_llm.data import PositivePair\n"
        "from angle_llm.data.store import StoreWriter; import pyarrow\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "with StoreWriter(Path(sys.argv[1]) / 'store') as writer:\n"
        "    for number in range(20_000): writer.add(PositivePair(f'{number} a text', 'another text'))\n"
        "    writer.finish({})\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith(
        "angle_llm.data.formats.DataError: data of this size is kept on disk"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_memory")
def test_what_a_killed_process_has_left_goes_after_a_day(source: DataSource, tmp_path: Path) -> None:
    place = tmp_path / "cache" / "examples"
    for name, age in ((".filling-left-old", 2 * 86_400), (".filling-left-new", 60)):
        (place / name).mkdir(parents=True)
        os.utime(place / name, (time.time() - age,) * 2)
    load_examples(source, tmp_path / "cache")
    assert sorted(path.name for path in place.iterdir() if path.name.startswith(".")) == [".filling-left-new"]


@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize("name", ["examples.arrow", "account.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "noise"])
def test_a_damaged_store_is_made_anew(name: str, damage: str, source: DataSource, tmp_path: Path) -> None:
    expected = list(load_examples(source, tmp_path / "cache").examples)
    (path,) = (tmp_path / "cache").glob(f"examples/*/{name}")
    if damage == "gone":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"noise" * 100)
    assert list(load_examples(source, tmp_path / "cache").examples) == expected


@pytest.mark.usefixtures("small_memory")
def test_a_bad_source_leaves_nothing_behind(source: DataSource, tmp_path: Path) -> None:
    Path(source.path).write_bytes(Path(source.path).read_bytes()[:-200])
    with pytest.raises(DataError, match="truncated"):
        load_examples(source, tmp_path / "cache")
    strict = DataSource(source.path)
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz"):
        load_examples(strict, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("examples/*"))


@pytest.mark.usefixtures("small_memory")
def test_too_many_bad_rows_are_refused_warm_too(tmp_path: Path) -> None:
    rows = [
        json.dumps({"text1": "a" * 200, "text2": "b", "score": 2 if number % 4 == 0 else 1}) for number in range(2_000)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    skip = DataSource(str(tmp_path / "rows.jsonl"), on_bad_row="skip", max_bad_ratio=0.3)
    assert load_examples(skip, tmp_path / "cache").report.rows_used == 1_500
    with pytest.raises(DataError, match="500 of 2,000 rows are bad"):
        load_examples(DataSource(skip.path, on_bad_row="skip"), tmp_path / "cache")


@pytest.mark.parametrize(
    "examples", [[ScoredPair("a", "b", 0.1 + 0.2)], [PositivePair("a\n", "𝄞")], [Triple("a", "b", "c" * 5_000_000)] * 9]
)
def test_every_kind_comes_back_as_it_went(examples: list[Triple], tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store") as writer:
        for example in examples:
            writer.add(example)
        kept = writer.finish({"some": 1})
    assert list(kept) == examples
    assert kept.account == {"some": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


@pytest.mark.usefixtures("small_memory")
def test_two_writers_at_once_leave_one_whole_store(source: DataSource, tmp_path: Path) -> None:
    place = tmp_path / "store"
    with StoreWriter(place) as one, StoreWriter(place) as two:
        for writer in (one, two):
            writer.add(PositivePair("a", "b"))
        assert list(one.finish({})) == list(two.finish({})) == [PositivePair("a", "b")]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "rows.jsonl.gz") == ["store"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.usefixtures("small_memory")
def test_a_cache_that_cannot_be_written_says_which_variable_names_another(source: DataSource, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(DataError, match="ANGLE_LLM_CACHE"):
        load_examples(source, tmp_path / "cache")


def test_nli_triples_which_look_at_all_rows_are_stored_too(tmp_path: Path, small_memory: None) -> None:
    rows = [
        json.dumps({"premise": f"premise {number} " + "x" * 100, "hypothesis": f"{label} {number}", "label": label})
        for number in range(1_000)
        for label in ("entailment", "contradiction")
    ]
    (tmp_path / "nli.jsonl").write_text("\n".join(rows))
    source = DataSource(str(tmp_path / "nli.jsonl"), format="nli_triples")
    stored = load_examples(source, tmp_path / "cache")
    assert isinstance(stored.examples, ExampleStore)
    assert list(stored.examples) == load_examples(source).examples
    assert stored.report.rows_used == 2_000


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet"])
def test_reading_a_large_file_takes_little_memory(kind: str, tmp_path: Path) -> None:
    """60 MB of rows; lists of them take several times that. Measured in a process of its own."""
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        numbers = [str(number) for number in range(200_000)]
        parquet.write_table(
            pyarrow.table(
                {"query": [f"{n} " + "x" * 150 for n in numbers], "answer": [f"{n} " + "y" * 150 for n in numbers]}
            ),
            path,
        )
    else:
        with path.open("w") as file:
            file.write({"csv": "query,answer\n", "tsv": "query\tanswer\n"}.get(kind, ""))
            for number in range(200_000):
                left, right = f"{number} " + "x" * 150, f"{number} " + "y" * 150
                row = (
                    json.dumps({"query": left, "answer": right})
                    if kind == "jsonl"
                    else {"csv": ",", "tsv": "\t"}[kind].join((left, right))
                )
                file.write(row + "\n")
    code = (
        "import resource, sys; from pathlib import Path; from angle_llm.data import DataSource, load_examples, store\n"
        "import pyarrow.parquet, numpy\n"
        "store.MEMORY_LIMIT = 5_000_000\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "loaded = load_examples(DataSource(sys.argv[1]), Path(sys.argv[2]))\n"
        "print(len(loaded.examples), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "cache")], capture_output=True, text=True, check=True
    )
    count, mebibytes = map(int, done.stdout.splitlines()[-1].split())
    assert count == 200_000
    assert mebibytes < 120  # as lists: 250 and more (a Parquet file's row group is decoded whole)

from __future__ import annotations

import csv
import gzip
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from angle_llm.data import DataError, DataSource, LoadedData, PositivePair, Rejected, ScoredPair, Triple, load_examples
from angle_llm.data.sources import DataReport

PAIRS = [
    {"text1": 'He said "no".', "text2": "é, tab-free", "score": 0.5},
    {"text1": "a\u2028b", "text2": " padded ", "score": 1.0},
]
EXAMPLES = [ScoredPair('He said "no".', "é, tab-free", 0.5), ScoredPair("a\u2028b", " padded ", 1.0)]


def jsonl(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def tsv(*rows: str) -> bytes:
    return "".join("\t".join(row.split("|")) + "\n" for row in rows).encode()


def as_csv(path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, ["text1", "text2", "score"])
        writer.writeheader()
        writer.writerows(PAIRS)


def as_parquet(path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(PAIRS), path)


WRITERS: dict[str, Callable[[Path], object]] = {
    ".jsonl": lambda path: path.write_bytes(jsonl(*PAIRS)),
    ".json": lambda path: path.write_text(json.dumps(PAIRS), encoding="utf-8"),
    ".csv": as_csv,
    ".tsv": lambda path: path.write_bytes(
        tsv("text1|text2|score", *(f"{row['text1']}|{row['text2']}|{row['score']}" for row in PAIRS))
    ),
    ".parquet": as_parquet,
}
TEXT_EXTENSIONS = [".jsonl", ".json", ".csv", ".tsv"]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*address: object) -> None:
        raise AssertionError(f"a test reached for the network: {address}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def load(path: Path | str, on_bad_row: Any = "raise", **settings: Any) -> LoadedData:
    return load_examples(DataSource(str(path), on_bad_row=on_bad_row, **settings))


# ------------------------------------------------------------------------------------------------ what can be read


@pytest.mark.parametrize(
    ("extension", "compressed", "bom"),
    [(".parquet", False, False)]
    + [(text, compressed, bom) for text in TEXT_EXTENSIONS for compressed in (False, True) for bom in (False, True)],
)
def test_every_kind_of_file_gives_the_same_examples(
    tmp_path: Path, extension: str, compressed: bool, bom: bool, offline: None
) -> None:
    path = tmp_path / f"rows{extension}"
    WRITERS[extension](path)
    if bom:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    if compressed:
        content, path = path.read_bytes(), tmp_path / f"rows{extension}.gz"
        path.write_bytes(gzip.compress(content, mtime=0))

    data = load(path)

    assert data.examples == EXAMPLES
    assert (data.report.rows_in, data.report.rows_used, data.report.dropped, data.report.rejected) == (2, 2, {}, [])
    assert (data.report.format, data.report.guessed) == ("scored_pair", True)


@pytest.mark.parametrize("extension", [".jsonl", ".csv", ".tsv"])
def test_windows_line_ends_and_blank_lines_are_no_part_of_the_data(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"rows{extension}"
    WRITERS[extension](path)
    path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") + b"\r\n\n")

    assert load(path).examples == EXAMPLES


def test_a_quoted_csv_field_may_span_lines_and_be_long(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('text1,text2\n"a\nb","say ""hi"""\n' + "x" * 200_000 + ",y\n", encoding="utf-8")

    assert load(path).examples == [PositivePair("a\nb", 'say "hi"'), PositivePair("x" * 200_000, "y")]


def test_a_folder_is_read_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "pairs"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(jsonl({**PAIRS[0], "score": 0.0}))
    (folder / "test.jsonl").write_bytes(jsonl(*PAIRS, {**PAIRS[0], "text1": ""}))

    assert len(load(folder).examples) == 1
    with pytest.raises(DataError, match="pairs row 3: text1 is empty"):
        load(folder, split="test")
    data = load(folder, "skip", max_bad_ratio=0.5, split="test")
    assert data.examples == EXAMPLES
    assert data.report.rejected == [Rejected(str(folder), 3, "text1 is empty")]
    with pytest.raises(DataError, match="could not load split 'dev'"):
        load(folder, split="dev")


def test_a_hub_id_goes_to_datasets_with_its_configuration_and_label_names(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        premise=datasets.Value("string"),
        hypothesis=datasets.Value("string"),
        label=datasets.ClassLabel(names=["contradiction", "entailment", "neutral"]),
    )
    rows = {"premise": ["p", "p", "p"], "hypothesis": ["e", "c", "n"], "label": [1, 0, 2]}
    asked: list[tuple[object, ...]] = []

    def load_dataset(path: str, name: str | None, *, split: str, revision: str | None) -> object:
        asked.append((path, name, split, revision))
        return datasets.Dataset.from_dict(rows, features=features)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load("org/all-nli", name="pair-class", split="dev", revision="v1")

    assert asked == [("org/all-nli", "pair-class", "dev", "v1")]
    # This dataset numbers its labels otherwise than SNLI does; its own names decide.
    assert data.examples == [ScoredPair("p", "e", 1.0), ScoredPair("p", "c", 0.0)]
    assert load("org/all-nli", format="nli_triples").examples == [Triple("p", "e", "c")]


def test_numbered_labels_are_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """RTE numbers entailment 0: read as a score it would turn the meaning round."""
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["entailment", "not_entailment"])
    text = datasets.Value("string")
    features = datasets.Features({"sentence1": text, "sentence2": text, "label": label})
    rows = {"sentence1": ["p"], "sentence2": ["e"], "label": [0]}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict(rows, features=features))
    with pytest.raises(DataError, match="not_entailment"):
        load("org/rte")


def test_a_hub_failure_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        DataError, match=r"org/nli: .*split 'train' of configuration 'x': no route.*It is no local path"
    ):
        load("org/nli", name="x")


@pytest.mark.parametrize(
    "path", ["data/trian.jsonl", "data/x.csv.gz", "./org/name", "/org/name", "name", "a/b/c", "../x"]
)
def test_only_a_hub_id_may_reach_the_network(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no such file or folder, and not a hub id"):
        load(path)


def test_the_starter_data_is_reached_by_name(offline: None) -> None:
    from angle_llm.data.starter import starter_path

    if not starter_path("nli_triples.jsonl.gz").exists():
        pytest.skip("the starter file is not built yet")
    data = load("starter:nli_triples.jsonl.gz")

    assert data.report.format == "triple"
    assert len(data.examples) == data.report.rows_in > 100
    with pytest.raises(DataError, match=r"starter:nothing.tsv: .*nli_triples.jsonl.gz"):
        load("starter:nothing.tsv")


# ------------------------------------------------------------------------------------------------ bad rows

GOOD = {"text1": "a", "text2": "b", "score": 1}
GOOD_PAIR = {"text1": "a", "text2": "b"}
HEADER = "text1|text2|score"
BAD_FILES = {
    "NaN score": (
        "x.jsonl",
        jsonl(GOOD, {**GOOD, "score": float("nan")}),
        2,
        "score is nan; a finite number is needed",
    ),
    "boolean score": ("x.jsonl", jsonl({**GOOD, "score": True}), 1, "score is True: a boolean is not a score"),
    "empty text": ("x.tsv", tsv(HEADER, "a|b|1", "a||1"), 3, "text2 is empty"),
    "lone surrogate": ("x.jsonl", jsonl(GOOD, {**GOOD, "text1": "\ud800"}), 2, "text1 holds a lone surrogate"),
    "NUL": ("x.jsonl", b"\n" + jsonl({**GOOD, "text1": "a\0"}), 2, "text1 holds a NUL character at position 1"),
    "NUL in TSV": ("x.tsv", tsv(HEADER, "a\0|b|1"), 2, "text1 holds a NUL character"),
    "text of another type": ("x.jsonl", jsonl({**GOOD, "text2": 7}), 1, "text2 is 7 (int); a text is needed"),
    "null": ("x.jsonl", jsonl({**GOOD, "text2": None}), 1, "text2 is null"),
    "missing key": ("x.jsonl", jsonl(GOOD, {"text1": "a", "text2": "b"}), 2, "score is missing"),
    "broken JSON": ("x.jsonl", jsonl(GOOD) + b'{"text1": "a",\n' + jsonl(GOOD), 2, "not a JSON object: "),
    "JSON of another type": ("x.jsonl", jsonl(GOOD, ["a", "b", 1]), 2, "a JSON object is needed; came list"),
    "fields in TSV": ("x.tsv", tsv(HEADER, "a|b|1", "a|b"), 3, "2 fields, but the header has 3"),
    "fields in CSV": ("x.csv", b'text1,text2,score\n"a\n\nb",b,1\na,b,c,1\n', 5, "4 fields, but the header has 3"),
    "quoting in CSV": ("x.csv", b'text1,text2,score\n"a"b,b,1\na,b,1\n', 2, "broken quoting"),
    "bytes in JSONL": ("x.jsonl", jsonl(GOOD) + '{"text1": "é"}\n'.encode("latin-1"), 2, "byte 0xe9 is not UTF-8"),
    "bytes in TSV": ("x.tsv", tsv(HEADER) + "é\tb\t1\n".encode("latin-1"), 2, "byte 0xe9 is not UTF-8"),
    "bytes in CSV": ("x.csv", b"text1,text2,score\na,b,1\n\xe9,b,1\na,b,1\n", 3, "byte 0xe9 is not UTF-8"),
    "label": (
        "x.jsonl",
        jsonl({"premise": "p", "hypothesis": "h", "label": 0}, {"premise": "p", "hypothesis": "h", "label": [0]}),
        2,
        "label is [0]; needed entailment, neutral, contradiction, or 0, 1, 2",
    ),
    "score scale": ("x.tsv", tsv(HEADER, "a|b|3.2"), 2, "score is 3.2, outside [0, 1]; set score_range"),
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, case: str, compressed: bool) -> None:
    name, content, line, reason = BAD_FILES[case]
    path = tmp_path / (name + ".gz" if compressed else name)
    path.write_bytes(gzip.compress(content, mtime=0) if compressed else content)

    with pytest.raises(DataError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:{line}: {reason}")
    assert "set on_bad_row to skip" in str(caught.value)


@pytest.mark.parametrize("case", BAD_FILES)
def test_skipping_loses_the_bad_row_and_nothing_else(tmp_path: Path, case: str) -> None:
    name, content, line, reason = BAD_FILES[case]
    path = tmp_path / name
    more = {".tsv": b"last\tb\t1\n", ".csv": b"last,b,1\n"}.get(path.suffix, jsonl({**GOOD, "text1": "last"}))
    if case == "label":
        more = jsonl({"premise": "last", "hypothesis": "b", "label": 0})
    path.write_bytes(content + more)

    data = load(path, "skip", max_bad_ratio=1)

    assert data.examples[-1] == ScoredPair("last", "b", 1.0)
    ((file, number, why),) = data.report.rejected
    assert (file, number) == (str(path), line)
    assert why.startswith(reason)
    assert data.report.rows_in == len(data.examples) + 1
    assert f"rejected: 1, first at {line}: {reason}" in data.report.summary()


def test_json_and_parquet_rows_are_named_by_their_number(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [PAIRS[0]] * 16 + [{**PAIRS[0], "score": 9.0}]
    (tmp_path / "x.json").write_text(json.dumps(rows), encoding="utf-8")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")

    for name in ("x.json", "x.parquet"):
        with pytest.raises(DataError, match=rf"{name} row 17: score is 9.0, outside"):
            load(tmp_path / name)


@pytest.mark.parametrize("on_bad_row", ["raise", "skip"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "x.jsonl.gz",
            gzip.compress(jsonl(*[GOOD] * 5), mtime=0)[:-9],
            r"x.jsonl.gz:\d: the gzip file is truncated or damaged",
        ),
        (
            "x.tsv.gz",
            gzip.compress(tsv(HEADER, "a|b|1"), mtime=0)[:-3],
            r"x.tsv.gz:3: the gzip file is truncated or damaged",
        ),
        ("x.json.gz", b"[]", r"x.json.gz:1: the gzip file is truncated or damaged"),
        ("x.csv", b'text1,text2\na,b\n"a,b\nc,d\n', "x.csv:3: a quoted field opens here and goes wrong on line 4"),
        ("x.csv", b"text1,text1\na,b\n", r"x.csv:1: the header names columns twice: \['text1'\]"),
        ("x.tsv", b"text1\tt\xe9xt2\na\tb\n", "x.tsv:1: byte 0xe9 is not UTF-8"),
        ("x.tsv", b"", "x.tsv:1: the file is empty; a header line is needed"),
        ("x.tsv", tsv(HEADER), "no example is left of this source. .*0 examples from 0 of 0 rows"),
        ("x.jsonl", b"\n", "x.jsonl: holds no usable row"),
        ("x.jsonl", b"\n[1\n", r"x.jsonl: holds no usable row: .*x.jsonl:2: not a JSON object"),
        ("x.json", b'[\n{"text1": }]', "x.json:2: not JSON: "),
        ("x.json", b'{"text1": "a"}', "x.json: needed a list of objects; came dict"),
        ("x.json", b'["\xe9"]', "x.json: not JSON: byte 0xe9 is not UTF-8"),
        ("x.parquet", b"PAR0", "x.parquet: cannot be read as Parquet"),
        ("x.parquet.gz", b"", "the extension says the kind of file; known: .jsonl, .json, .csv, .tsv, .parquet"),
        ("x.doc", b"a\n", "the extension says the kind of file"),
        ("x.tsv", tsv("text1|scores", "a|1"), r"x.tsv: .*columns \['text1', 'scores'\] fit no format"),
    ],
)
def test_damage_that_cannot_be_counted_always_raises(
    tmp_path: Path, name: str, content: bytes, message: str, on_bad_row: str
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(DataError, match=message):
        load(tmp_path / name, on_bad_row)


def test_a_key_that_only_later_rows_have_is_not_overlooked(tmp_path: Path) -> None:
    """The first row alone would read as a positive pair, and the negatives of all others would be lost."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(jsonl({"anchor": "a", "positive": "p"}, {"anchor": "a", "positive": "p", "negative": "n"}))

    with pytest.raises(DataError, match=r"x\.jsonl:1: negative is missing"):
        load(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit": 0}, "limit must be at least 1 example; came 0"),
        ({"score_range": (5, 5)}, r"score_range needs two different numbers, as in \[0, 5\]; came \[5, 5\]"),
        (
            {"format": "positive_pair", "score_range": (0, 5)},
            "score_range is set, but format positive_pair has no score",
        ),
        ({"where": {"scor": 1}}, "`where` asks for the column 'scor'.*nearest: 'score'"),
        ({"where": {"score": 0.7}}, "no example is left of this source.*2 filtered by where"),
        ({"split": "test"}, "`split`, `name` and `revision` choose within a folder or hub dataset; this is one file"),
        ({"columns": {"anchor": "txt"}}, "maps anchor to the column 'txt', which is not there"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(jsonl(*PAIRS))

    with pytest.raises(DataError, match=message):
        load(tmp_path / "x.jsonl", **settings)


def test_a_missing_file_is_answered_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(b"")

    with pytest.raises(DataError, match=r"trian.jsonl: no such file .* there are 1 entries; nearest: 'train.jsonl'"):
        load(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"The folder .*gone does not exist either"):
        load(tmp_path / "gone" / "x.jsonl")
    with pytest.raises(DataError, match="path of the data source is empty"):
        load("")


# ------------------------------------------------------------------------------------------------ choosing rows


@pytest.mark.parametrize(("cell", "wanted", "kept"), [
    (0, 0, True), (0, "0", True), ("0", 0, True), ("0", "0", True), (0.0, 0, True), ("a", "a", True),
    (True, "true", True), (0, 1, False), ("07", "7", False), ("a", 0, False), (None, 0, False),
    (False, 0, False), ([0], "0", False),
])  # fmt: skip
def test_where_compares_numbers_however_they_are_written(
    tmp_path: Path, cell: object, wanted: str | int, kept: bool
) -> None:
    path = tmp_path / "x.jsonl"
    always = {**GOOD, "flag": wanted}
    path.write_bytes(jsonl(always, {**GOOD, "flag": cell}))

    data = load(path, where={"flag": wanted})

    assert len(data.examples) == 1 + kept
    assert data.report.dropped == ({} if kept else {"filtered by where": 1})


def test_limit_takes_the_first_in_file_order_or_after_a_seeded_shuffle(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(jsonl(*({"text1": str(i), "text2": "b"} for i in range(30))))
    everything = load(path).examples

    first = load(path, limit=4)
    shuffled = load(path, shuffle_seed=1).examples

    assert first.examples == everything[:4]
    assert first.report.dropped == {"beyond limit": 26}
    assert sorted(shuffled, key=repr) == sorted(everything, key=repr)
    assert shuffled != everything
    assert shuffled[:4] == [PositivePair(str(i), "b") for i in [13, 20, 9, 26]]  # the same in every version
    assert load(path, shuffle_seed=1, limit=4).examples == shuffled[:4]
    assert load(path, shuffle_seed=2).examples != shuffled


labels = st.sampled_from(["entailment", "neutral", "contradiction", 0, 1, 2, -1, "maybe", None, True])
raw_rows = st.one_of(
    st.fixed_dictionaries(
        {
            "premise": st.sampled_from(["p", "q", ""]),
            "hypothesis": st.sampled_from(["h", "i", " ", None]),
            "label": labels,
        },
        optional={"keep": st.integers(0, 1)},
    ),
    st.sampled_from([["a"], "text", 5]),
)


@given(
    rows=st.lists(raw_rows, max_size=25),
    format=st.sampled_from(["nli_pairs", "nli_triples"]),
    where=st.sampled_from([{}, {"keep": 1}]),
    limit=st.none() | st.integers(1, 5),
    seed=st.none() | st.integers(0, 3),
)
def test_every_row_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[object],
    format: str,
    where: dict[str, str | int | float],
    limit: int | None,
    seed: int | None,
) -> None:
    path = tmp_path_factory.mktemp("rows") / "x.jsonl"
    sound = [{"premise": "s", "hypothesis": "h", "label": label, "keep": 1} for label in (0, 2)]
    path.write_bytes(jsonl(*rows, *sound))
    data = load(path, "skip", max_bad_ratio=1, format=format, where=where, limit=limit, shuffle_seed=seed)
    report = data.report

    assert report.rows_in == len(rows) + 2
    assert report.rows_in == report.rows_used + sum(report.dropped.values()) + len(report.rejected)
    assert report.examples == len(data.examples) == report.rows_used // (2 if format == "nli_triples" else 1)
    assert all(count > 0 for count in report.dropped.values())
    assert limit is None or len(data.examples) <= limit
    for _, line, _ in report.rejected:
        row = rows[line - 1]
        assert not (isinstance(row, dict) and row["label"] in ("neutral", 1) and row["label"] is not True)


def test_an_account_that_does_not_add_up_is_a_bug_not_a_report() -> None:
    with pytest.raises(RuntimeError, match="a bug in angle_llm: 2 of 3 rows accounted for"):
        DataReport(
            DataSource("x"),
            "triple",
            False,
            {},
            [],
            rows_in=3,
            rows_used=1,
            examples=1,
            dropped={"neutral": 1},
            rejected=[],
        )


def test_the_report_says_in_one_line_what_was_understood(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_bytes(tsv("premise|hypothesis|gold_label", "p|h|entailment", "p|i|neutral", "p|j|-"))

    assert load(path).report.summary() == (
        f"{path}: 1 examples from 1 of 3 rows as nli_pairs, guessed from the columns (premise, hypothesis, label = gold_label); "
        "dropped: 1 neutral, 1 no gold label"
    )


@pytest.mark.parametrize(
    ("settings", "unused"),
    [
        ({}, ["id", "rating", "split"]),
        ({"format": "positive_pair"}, ["id", "rating", "split"]),
        ({"where": {"split": "a"}}, ["id", "rating"]),
        ({"format": "scored_pair", "columns": {"score": "rating"}, "score_range": (0, 5)}, ["id", "split"]),
    ],
)
def test_columns_that_nobody_read_are_named(tmp_path: Path, settings: dict[str, Any], unused: list[str]) -> None:
    """A score column of an unknown name is dropped, and the rows become plain positive pairs: that must be seen."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        jsonl({"id": 7, "text1": "a", "text2": "b", "rating": 0}, {**GOOD_PAIR, "split": "a", "rating": 1})
    )

    report = load(path, **settings).report

    assert report.unused_columns == unused
    assert f"; columns not used: {', '.join(unused)}" in report.summary()


def test_a_summary_stays_a_line_however_many_columns_there_are(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("," + ",".join(f"c{n}" for n in range(30)) + ",text1,text2\n" + "0," * 31 + "a,b\n")

    summary = load(path).report.summary()

    assert "columns not used: '', c0, c1," in summary
    assert summary.endswith(", c10 and 19 more")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"text1": "a",', "it ends before it is complete (cut off?); each line holds one object"),
        ('{"text1": "a', "the text that opens at column 11 has no closing quote"),
        ("{'text1': 'a'}", "a single quote at column 2; JSON wants keys and texts in double quotes"),
        ('{"text1": a}', "a value is missing at column 11, or is a word without quotes"),
        ('{"text1" "a"}', "a colon is needed at column 10, between key and value"),
        ('{"text1": "a" "text2": "b"}', "at column 15 a comma or a closing bracket is needed"),
        ('{"text1": "a\tb"}', "a tab or another control character stands at column 13 inside a text"),
        ('{"text1": "a",}', "a comma has nothing after it at column 1"),
        (
            '{"text1": "a"} {"text1": "b"}',
            "it is complete before column 16, and more follows; each line holds one object",
        ),
        ('{"text1": "\\q"}', "at column 12"),
        ('[{"text1": "a"},', "it ends before it is complete (cut off?); each line holds one object"),
    ],
)
def test_a_broken_line_is_told_in_plain_words_and_shown(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(GOOD_PAIR) + "\n" + line + "\n", encoding="utf-8")

    with pytest.raises(DataError) as caught:
        load(path)

    message = str(caught.value)
    assert message.startswith(f"{path}:2: not a JSON object: ")
    assert told in message
    assert f"the line begins `{line}`".replace("\t", "�") in message
    assert ("a list of objects is a .json file" in message) == line.startswith("[")
    assert "Expecting" not in message
    assert "is column" not in message, "which column is which field does not help with an unreadable line"


def test_of_a_long_broken_line_the_start_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(GOOD_PAIR) + '\n{"text1": "' + "y" * 500, encoding="utf-8")

    with pytest.raises(DataError, match=r"the line begins `\{\"text1\": \"y{49}…`"):
        load(path)


def test_a_broken_json_file_is_told_in_plain_words(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('[\n{"text1": "a"},\n{"text1": }]', encoding="utf-8")

    with pytest.raises(
        DataError, match=r'x.json:3: not JSON: a value is missing at column 11.*begins `\{"text1": \}\]`'
    ):
        load(path)


# ------------------------------------------------------------------------------------------------ real data


def test_real_nli_triples(data_dir: Path) -> None:
    data = load(data_dir / "nli" / "nli_triplets.jsonl.gz", where={"sts_overlap": 0})

    assert data.report.format == "triple"
    assert len(data.examples) == 43_410
    assert data.report.dropped == {"filtered by where": 217}


def test_real_nli_rows_as_pairs_and_as_triples(data_dir: Path) -> None:
    path = data_dir / "nli" / "nli_pairs.jsonl.gz"
    pairs = load(path).report
    triples = load(path, format="nli_triples").report

    assert pairs.rows_in == triples.rows_in == 167_131
    assert pairs.dropped == {"neutral": triples.dropped["neutral"]}
    assert pairs.rows_used == triples.rows_used + triples.dropped["unpaired"]
    assert triples.examples == 43_768


def test_real_graded_pairs(data_dir: Path) -> None:
    data = load(data_dir / "stsb" / "dev.tsv", score_range=(0, 5))

    assert len(data.examples) == 1500
    assert data.examples[1] == ScoredPair("A young child is riding a horse.", "A child is riding a horse.", 0.95)

"""Whatever stands in a file: it is told with file and line, and no row is lost."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from angle_llm.data import DataError, DataSource, LoadedData, PositivePair, ScoredPair, load_examples

GOOD = b'{"text1": "a", "text2": "b", "score": 1}\n'


def load(path: Path, on_bad_row: Any = "raise", max_bad_ratio: float = 1, **more: Any) -> LoadedData:
    return load_examples(DataSource(str(path), on_bad_row=on_bad_row, max_bad_ratio=max_bad_ratio, **more))


# ------------------------------------------------------------------------------------------------ damage, one by one

BAD_ROWS: dict[str, tuple[str, bytes, str]] = {
    "broken JSON": ("x.jsonl", b'{"text1": "a", "text2"', "not a JSON object"),
    "latin-1": ("x.jsonl", b'{"text1": "caf\xe9", "text2": "b", "score": 1}', "byte 0xe9 is not UTF-8"),
    "lone surrogate": ("x.jsonl", b'{"text1": "\\ud800", "text2": "b", "score": 1}', "text1 holds a lone surrogate"),
    "NUL": ("x.jsonl", b'{"text1": "a\\u0000", "text2": "b", "score": 1}', "text1 holds a NUL"),
    "NaN": ("x.jsonl", b'{"text1": "a", "text2": "b", "score": NaN}', "score is nan; a finite number"),
    "infinity": ("x.jsonl", b'{"text1": "a", "text2": "b", "score": 1e999}', "score is inf; a finite number"),
    "boolean": ("x.jsonl", b'{"text1": "a", "text2": "b", "score": true}', "score is True: a boolean"),
    "no score": ("x.jsonl", b'{"text1": "a", "text2": "b"}', "score is missing"),
    "key twice": ("x.jsonl", b'{"text1": "a", "text1": "b", "text2": "b", "score": 1}', r"keys twice: \['text1'\]"),
    "list": ("x.jsonl", b'["a", "b", 1]', "a JSON object is needed; came list"),
    "many digits": ("x.jsonl", b'{"text1": "a", "text2": "b", "score": ' + b"9" * 5000 + b"}", "not a JSON object"),
    "nested": ("x.jsonl", b'{"text1": ' + b"[" * 200_000, "not a JSON object"),
    "too few": ("x.tsv", b"a\tb", "2 fields, but the header has 3"),
    "too many": ("x.csv", b"a,b,1,c", "4 fields, but the header has 3"),
    "null byte": ("x.tsv", b"a\0\tb\t1", "text1 holds a NUL"),
}


def file_with(path: Path, bad: bytes) -> None:
    header, good = {".tsv": (b"text1\ttext2\tscore\n", b"a\tb\t1\n"), ".csv": (b"text1,text2,score\n", b"a,b,1\n")}.get(
        path.suffix, (b"", GOOD)
    )
    path.write_bytes(header + good + bad + b"\n" + good)


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named_or_counted(tmp_path: Path, case: str) -> None:
    name, bad, reason = BAD_ROWS[case]
    path = tmp_path / name
    file_with(path, bad)
    line = 2 if path.suffix == ".jsonl" else 3

    with pytest.raises(DataError, match=rf"{name}:{line}: .*{reason}"):
        load(path)
    report = load(path, "skip").report
    assert (report.rows_in, report.rows_used) == (3, 2)
    assert [bad.line for bad in report.rejected] == [line]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.tsv.gz"])
def test_utf_16_is_told_for_the_file_not_for_each_row(tmp_path: Path, name: str, encoding: str) -> None:
    text = "text1\ttext2\na\tb\n" if "tsv" in name else '[{"text1": "a", "text2": "b"}]\n'
    content = text.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)

    with pytest.raises(DataError, match=rf"{name}:1: the file is written in UTF-16 or UTF-32, not in UTF-8"):
        load(tmp_path / name, "skip")


def test_keys_twice_in_a_list_of_objects_reject_that_object_alone(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"text1": "a", "text2": "b"}, {"text1": "a", "text2": "b", "text2": "c"}]')

    report = load(tmp_path / "x.json", "skip").report

    assert [(bad.line, bad.reason) for bad in report.rejected] == [(2, "the object has keys twice: ['text2']")]


def test_column_names_twice_in_parquet_are_refused(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    texts = pyarrow.array(["a"])
    table = pyarrow.Table.from_arrays([texts, texts, texts], names=["text1", "text2", "text1"])
    parquet.write_table(table, tmp_path / "x.parquet")

    with pytest.raises(DataError, match=r"x.parquet: .*text1"):
        load(tmp_path / "x.parquet")


def test_a_text_of_ten_megabytes_is_a_text(tmp_path: Path) -> None:
    long = "wörd " * 2_000_000
    (tmp_path / "x.csv").write_text(f'text1,text2\n"{long}",b\n', encoding="utf-8")
    (tmp_path / "x.jsonl").write_text(json.dumps({"text1": long, "text2": "b"}), encoding="utf-8")

    for name in ("x.csv", "x.jsonl"):
        assert load(tmp_path / name).examples == [PositivePair(long, "b")]


def test_rows_of_two_formats_in_one_file_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(GOOD.decode() + '{"text1": "a", "text2": "b"}\n')

    with pytest.raises(DataError, match=r"x.jsonl:2: score is missing"):
        load(tmp_path / "x.jsonl")


def test_a_column_name_that_is_half_a_character_can_be_told(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text1": "a", "text2": "b", "\\ud800": 1}\n')

    assert r"columns not used: \ud800" in load(tmp_path / "x.jsonl").report.summary()


@pytest.mark.parametrize(("bad", "ratio", "stops"), [(1, 0.1, False), (2, 0.1, True), (1, 0, True), (9, 0.9, False)])
def test_more_bad_rows_than_the_ratio_stop_a_run_that_skips(
    tmp_path: Path, bad: int, ratio: float, stops: bool
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(GOOD * (10 - bad) + b"{\n" * bad)

    if stops:
        with pytest.raises(DataError, match=rf"{bad} of 10 rows are bad, more than max_bad_ratio {ratio} .*x.jsonl:"):
            load(path, "skip", ratio)
    else:
        assert len(load(path, "skip", ratio).report.rejected) == bad


@pytest.mark.parametrize("ratio", [-0.1, 1.5, math.nan])
def test_a_ratio_is_a_share(tmp_path: Path, ratio: float) -> None:
    (tmp_path / "x.jsonl").write_bytes(GOOD)

    with pytest.raises(DataError, match="max_bad_ratio is a share of the rows, 0 to 1"):
        load(tmp_path / "x.jsonl", "skip", ratio)


# ------------------------------------------------------------------------------------------------ any rows, any damage

texts = st.text(st.characters(), max_size=12) | st.sampled_from(
    ["a", "b c", "", " ", "\0", "\ud800", '"', "\u2028", "\ufeff"]
)
values = texts | st.none() | st.booleans() | st.integers() | st.floats() | st.lists(texts, max_size=2)
scores = st.floats(0, 1) | st.sampled_from(["0.5", "1", "high", math.nan, True, None, 7])
sound = st.fixed_dictionaries({"text1": st.just("a"), "text2": st.just("b"), "score": st.just(1)})
rows = sound | st.fixed_dictionaries(
    {"text1": texts | values, "text2": texts, "score": scores}, optional={"id": values, "\ud800": values}
)
cell = st.text(st.characters(codec="utf-8", exclude_characters="\t\r\n"), max_size=12)


def written(kind: str, row_list: list[dict[str, Any]], cells: list[list[str]]) -> tuple[bytes, int]:
    """A file of the kind, and how many rows it has."""
    if kind == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in row_list).encode(), len(row_list)
    if kind == "json":
        return json.dumps(row_list).encode(), len(row_list)
    if kind == "csv":
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows([["text1", "text2", "score"], *cells])
        return stream.getvalue().encode(), len(cells)
    return "".join("\t".join(line) + "\n" for line in [["text1", "text2", "score"], *cells]).encode(), len(cells)


harm = st.tuples(st.sampled_from(["cut", "flip", "insert", "drop"]), st.floats(0, 1), st.binary(min_size=1, max_size=4))
damages = st.lists(harm, min_size=1, max_size=3)


def damaged(content: bytes, damage: list[tuple[str, float, bytes]]) -> bytes:
    for kind, place, new in damage:
        at = int(place * len(content))
        if kind == "cut":
            content = content[:at]
        elif kind == "flip":
            content = content[:at] + new[:1] + content[at + 1 :]
        elif kind == "insert":
            content = content[:at] + new + content[at:]
        else:
            content = content[:at] + content[at + len(new) :]
    return content


def cases(damage: st.SearchStrategy[list[tuple[str, float, bytes]]]) -> st.SearchStrategy[dict[str, Any]]:
    """Files of some rows, about half of them sound."""
    cells = st.tuples(cell, cell, st.sampled_from(["0", "1", "0.5", "x", ""])).map(list)
    return st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["jsonl", "tsv", "csv", "json"]),
            "rows": st.lists(rows, min_size=1, max_size=6),
            "cells": st.lists(st.just(["a", "b", "1"]) | cells, min_size=1, max_size=6),
            "damage": damage,
            "compressed": st.sampled_from([False, False, True]),
            "damage_compressed": st.booleans(),
        }
    )


def check_any_file(folder: Path, case: dict[str, Any]) -> None:
    """Either an error with the file's name, or an account that adds up; strict and skipping agree."""
    content, count = written(case["kind"], case["rows"], case["cells"])
    if case["compressed"] and case["damage_compressed"]:
        content = damaged(gzip.compress(content, mtime=0), case["damage"])
    else:
        content = damaged(content, case["damage"])
        content = gzip.compress(content, mtime=0) if case["compressed"] else content
    path = folder / f"x.{case['kind']}{'.gz' if case['compressed'] else ''}"
    path.write_bytes(content)

    try:
        data = load(path, "skip")
    except DataError as error:
        told = str(error)
    else:
        told = ""
    if told:
        assert path.name in told
        told.encode()  # can be printed
        with pytest.raises(DataError):
            load(path)
        # Without damage the rows themselves are to blame, or there are none.
        assert case["damage"] or "no example is left" in told or "no usable row" in told
        return
    report = data.report
    report.summary().encode()
    assert report.rows_in == report.rows_used + sum(report.dropped.values()) + len(report.rejected)
    assert len({bad.line for bad in report.rejected}) == len(report.rejected)
    for example in data.examples:
        assert isinstance(example, ScoredPair | PositivePair)
        assert example.left.strip()
        assert example.right.strip()
    lines = [line.decode(errors="surrogateescape") for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n")]
    if not case["compressed"] and case["kind"] == "jsonl":
        assert report.rows_in == sum(1 for line in lines if line.strip())
    if not case["compressed"] and case["kind"] == "tsv":
        assert report.rows_in == sum(1 for line in lines if line.strip("\r\n")) - 1
    if not case["damage"]:
        assert report.rows_in == count
        if case["kind"] in ("jsonl", "json"):
            bad = {bad.line for bad in report.rejected}
            kept = [json.loads(json.dumps(row)) for number, row in enumerate(case["rows"], 1) if number not in bad]
            assert [(each.left, each.right) for each in data.examples] == [(row["text1"], row["text2"]) for row in kept]
    if report.rejected:
        with pytest.raises(DataError) as caught:
            load(path)
        assert f"{path.name}:{report.rejected[0].line}: " in str(caught.value) or "row" in str(caught.value)
        str(caught.value).encode()
    else:
        assert load(path).examples == data.examples


no_checks = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=200, deadline=None, suppress_health_check=no_checks)
@given(case=cases(damages))
def test_any_damaged_file_is_read_or_explained(tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any]) -> None:
    check_any_file(tmp_path_factory.getbasetemp(), case)


@settings(max_examples=200, deadline=None, suppress_health_check=no_checks)
@given(case=cases(st.just([])))
def test_any_rows_are_read_or_explained(tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any]) -> None:
    check_any_file(tmp_path_factory.getbasetemp(), case)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, suppress_health_check=no_checks)
@given(case=cases(st.just([]) | damages))
def test_any_of_ten_thousand_files_is_read_or_explained(
    tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any]
) -> None:
    check_any_file(tmp_path_factory.getbasetemp(), case)

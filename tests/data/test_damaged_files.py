"""Any damage to a file is reported: each row is read, or listed as bad, or the file is refused."""

import codecs
import csv
import gzip
import io
import json
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from angle_llm.data.formats import DataError
from angle_llm.data.sources import BadRow, Row, resolve_source

UNWRITABLE = "\t\r\n" if sys.version_info >= (3, 11) else "\t\r\n\0"  # the csv module of Python 3.10 writes no NUL
cell = st.text(st.characters(codec="utf-8", exclude_characters=UNWRITABLE), max_size=12)
harm = st.tuples(st.sampled_from(["cut", "flip", "insert", "drop"]), st.floats(0, 1), st.binary(min_size=1, max_size=4))


def damaged(content: bytes, damage: list[tuple[str, float, bytes]]) -> bytes:
    for kind, place, new in damage:
        at = int(place * len(content))
        rest = {"cut": b"", "flip": new[:1] + content[at + 1 :], "insert": new + content[at:]}
        content = content[:at] + rest.get(kind, content[at + len(new) :])
    return content


@example("x.jsonl", [["", ""]], [("cut", 0.5, b"\x00"), ("flip", 0.5, b"\r")], "no")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(["x.jsonl", "x.json", "x.csv", "x.tsv", "x.txt"]),
    cells=st.lists(st.lists(cell, min_size=2, max_size=2), min_size=1, max_size=6),
    damage=st.lists(harm, max_size=3),
    packed=st.sampled_from(["no", "before", "after"]),
)
def test_any_damaged_file_is_read_or_explained(
    tmp_path_factory: pytest.TempPathFactory, name: str, cells: list[list[str]], damage: list[Any], packed: str
) -> None:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([["a", "b"], *cells])
    objects = [{"a": a, "b": b} for a, b in cells]
    content = {
        "x.jsonl": "".join(json.dumps(each) + "\n" for each in objects).encode(),
        "x.json": json.dumps(objects).encode(),
        "x.csv": stream.getvalue().encode(),
        "x.tsv": "".join("\t".join(line) + "\n" for line in [["a", "b"], *cells]).encode(),
        "x.txt": "".join(a + b + "\n" for a, b in cells).encode(),
    }[name]
    if packed == "before":
        content = damaged(gzip.compress(content, mtime=0), damage)
    else:
        content = damaged(content, damage)
        content = content if packed == "no" else gzip.compress(content, mtime=0)
    path = tmp_path_factory.getbasetemp() / (name + ("" if packed == "no" else ".gz"))
    path.write_bytes(content)
    error, rows = "", list[Row | BadRow]()
    try:
        rows += resolve_source(path).rows()
    except DataError as caught:
        error = str(caught).encode().decode()  # can be printed
    if error:
        assert path.name in error
        assert damage or not content
        return
    assert len({row.line for row in rows}) == len(rows)
    for row in rows:
        assert row.file == str(path)
        assert isinstance(row, Row) or row.reason.encode()
    if not damage and name in ("x.jsonl", "x.json"):
        assert [row[0] for row in rows] == objects
    # A file with the first one or two bytes of a byte order mark only has no rows: Python drops them.
    if packed == "no" and name in ("x.jsonl", "x.tsv") and not codecs.BOM_UTF8.startswith(content):
        separator = "\r" if b"\r" in content and b"\n" not in content else "\n"
        lines = content.decode(errors="surrogateescape").removeprefix("\ufeff").split(separator)
        blanks = None if name == "x.jsonl" else "\r\n"
        assert len(rows) == sum(1 for line in lines if line.strip(blanks)) - (name == "x.tsv")

"""Rows of every type of file and source, with file and line of each bad row; any damage is reported."""

import csv
import gzip
import io
import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest

from angle_llm.data import DataError, ScoredPair
from angle_llm.data.examples import load_examples
from angle_llm.data.files.in_memory import json_value
from angle_llm.data.sources import BadRow, Row, evaluation_source, find_path, resolve_source, source_in_memory
from angle_llm.settings.train import DataSource

ROWS = [
    {"text1": 'He said "no".', "text2": "é, tab-free; really", "score": 0.5},
    {"text1": "a\u2028b", "text2": " padded ", "score": 1.0},
]
TEXT_ROWS = [{name: str(value) for name, value in row.items()} for row in ROWS]


def jsonl(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table(delimiter: str = ",", quoted: bool = True) -> bytes:
    lines = [list(ROWS[0]), *(list(row.values()) for row in TEXT_ROWS)]
    if not quoted:
        return "".join(delimiter.join(cells) + "\n" for cells in lines).encode()
    stream = io.StringIO()
    csv.writer(stream, delimiter=delimiter, lineterminator="\n").writerows(lines)
    return stream.getvalue().encode()


def parquet(columns: list[list[Any]], names: list[str]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    stream = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_arrays([pyarrow.array(column) for column in columns], names), stream)
    return stream.getvalue()


def arrow(opened_by: str) -> bytes:
    """The file of a stream, as `save_to_disk` writes it, or the file format of Arrow, as polars writes it."""
    import pyarrow

    stream, content = io.BytesIO(), pyarrow.Table.from_pylist(ROWS)
    with getattr(pyarrow.ipc, opened_by)(stream, content.schema) as writer:
        writer.write_table(content)
    return stream.getvalue()


FILES = {
    "x.jsonl": jsonl(*ROWS),
    "x.json": json.dumps(ROWS).encode(),
    "x.csv": table(),
    "x.tsv": table("\t", quoted=False),
    "x.arrow": arrow("new_stream"),
    "y.arrow": arrow("new_file"),
    "x.parquet": parquet([[row[name] for row in ROWS] for name in ROWS[0]], list(ROWS[0])),
}


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def values(path: Path | str, **options: Any) -> list[dict[str, Any]]:
    return [row.values for row in resolve_source(path, tables=True, **options).good_rows()]


def columns_and_rows(path: Path) -> tuple[list[str], list[Row | BadRow]]:
    rows = resolve_source(path, tables=True)
    return rows.columns, list(rows.rows())


@pytest.mark.parametrize(("packed", "bom"), [("", b""), (".gz", b"\xef\xbb\xbf")])
@pytest.mark.parametrize("name", FILES)
def test_all_types_of_files_give_the_same_rows(tmp_path: Path, name: str, packed: str, bom: bytes) -> None:
    packed, bom = ("", b"") if name[2:] in ("parquet", "arrow") else (packed, bom)
    path = write(tmp_path / (name + packed), bom + FILES[name])
    rows = resolve_source(path, tables=True)
    assert rows.columns == ["text1", "text2", "score"]
    assert [row.values for row in rows.good_rows()] == (TEXT_ROWS if name[2:] in ("csv", "tsv") else ROWS)
    assert list(rows.rows()) == list(rows.rows())
    numbers = (2, 3) if name[2:] in ("csv", "tsv") else (1, 2)
    unit = " row " if name[2:] in ("json", "parquet", "arrow") else ":"
    assert [row.place for row in rows.rows()] == [f"{path}{unit}{number}" for number in numbers]


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.tsv"])
def test_windows_line_ends_and_blank_lines_are_not_rows(tmp_path: Path, name: str) -> None:
    content = FILES[name].replace(b"\n", b"\r\n") + b"\r\n\n"
    assert len(values(write(tmp_path / name, content))) == 2
    assert values(tmp_path / name)[0]["text1"] == ROWS[0]["text1"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.tsv"])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_a_lone_cr_does_not_end_a_row(tmp_path: Path, name: str, line_end: bytes) -> None:
    content = {
        "x.jsonl": b'{"text1": "a",\r"text2": "b"}\n',
        "x.csv": b'text1,text2\n"a\rb",c\n',
        "x.tsv": b'text1\ttext2\na\rb\tsay "c"\n',
    }[name]
    rows = values(write(tmp_path / name, content.replace(b"\n", line_end)))
    first = {"text1": "a", "text2": "b"} if name == "x.jsonl" else {"text1": "a\rb", "text2": "c"}
    assert rows == [first if name != "x.tsv" else first | {"text2": 'say "c"'}]


def test_line_ends_in_quoted_csv_fields_are_kept(tmp_path: Path) -> None:
    assert values(write(tmp_path / "x.csv", b'text1,text2\r\n"a\r\nb",c\r\n')) == [{"text1": "a\r\nb", "text2": "c"}]
    with pytest.raises(DataError, match=r"x\.csv:2: .*quote fields with a line end"):
        values(write(tmp_path / "x.csv", b"text1,text2\na\rb,c\n"))


def test_quoted_csv_field_may_span_lines_and_be_long(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", b'text1,text2\n"a\nb","say ""hi"""\n' + b"x" * 10_000_000 + b",y\n")
    first, second = resolve_source(path).rows()
    assert isinstance(first, Row)
    assert (first.values, first.line) == ({"text1": "a\nb", "text2": 'say "hi"'}, 2)
    assert (len(second[0]["text1"]), second.line) == (10_000_000, 4)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiter_is_detected(tmp_path: Path, delimiter: str) -> None:
    assert values(write(tmp_path / "x.csv", table(delimiter))) == TEXT_ROWS


@pytest.mark.parametrize(
    ("header", "row", "read"),
    [
        ("id;Frage (kurz, knapp);Antwort", "1;a;b", {"id": "1", "Frage (kurz, knapp)": "a", "Antwort": "b"}),
        ('"Frage\n(kurz)";Antwort', "a;b", {"Frage\n(kurz)": "a", "Antwort": "b"}),
        ("question,answer,,", "a,b,,", {"question": "a", "answer": "b", "": ""}),
        ("text", "a; b", {"text": "a; b"}),
        ('text1,text2,size (")', "a,b,c", {"text1": "a", "text2": "b", 'size (")': "c"}),
        ('Frage;Maß (")', "a, b, c;5", {"Frage": "a, b, c", 'Maß (")': "5"}),
        ("text1,text2,score (0|1|2|3|4)", "a,b,1", {"text1": "a", "text2": "b", "score (0|1|2|3|4)": "1"}),
        ('text1, "text2"', '"a, b", " c"', {"text1": "a, b", "text2": " c"}),
        ("text1,text2", "a, b", {"text1": "a", "text2": " b"}),
        ("Frage (kurz, knapp, genau);Antwort", "a;b", {"Frage (kurz, knapp, genau)": "a", "Antwort": "b"}),
    ],
)
def test_header_of_a_spreadsheet_is_read(tmp_path: Path, header: str, row: str, read: dict[str, str]) -> None:
    assert values(write(tmp_path / "x.csv", f"{header}\n{row}\n".encode())) == [read]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.tsv", "x.txt"])
@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_encoding_is_set(tmp_path: Path, name: str, encoding: str) -> None:
    row = {"text": "café – “x”"}
    text = {"x.jsonl": json.dumps(row, ensure_ascii=False), "x.json": json.dumps([row], ensure_ascii=False)}
    content = text.get(name, ("" if name == "x.txt" else "text\n") + row["text"] + "\n")
    path = write(tmp_path / name, content.encode(encoding))
    (read,) = resolve_source(path, encoding=encoding).rows()
    assert isinstance(read, Row)
    assert read.values == row


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.tsv.gz"])
def test_utf16_file_is_an_error_at_its_first_line(tmp_path: Path, name: str) -> None:
    text = '[{"text1": "a", "text2": "b"}]\n' if "json" in name else "text1\ttext2\na\tb\n"
    path = write(tmp_path / name, text.encode("utf-16"))
    with pytest.raises(DataError, match=rf"{name}.*the file is UTF-16; convert it with .*--encoding utf-16"):
        list(resolve_source(path).good_rows())


@pytest.mark.parametrize("name", ["notes.md", "notes.parquet.gz", "lines.txt"])
def test_types_without_columns_are_texts_or_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, b"single texts\n")
    if name == "notes.md":
        assert [row[0] for row in resolve_source(path).rows()] == [{"text": "single texts"}]
    with pytest.raises(DataError, match=name):
        resolve_source(path, tables=True)


HEADER = b"text1\ttext2\tscore\n"
BAD_ROWS: dict[str, tuple[str, bytes, int]] = {
    "cut JSON": ("x.jsonl", b'{"text1": "a",\n', 1),
    "list in JSONL": ("x.jsonl", b'[{"text1": "a"},\n', 1),
    "not an object": ("x.jsonl", b'["a", "b", 1]\n', 1),
    "too few fields": ("x.tsv", HEADER + b"a\tb\n", 2),
    "too many fields": ("x.csv", b'text1,text2\n"a\n\nb",b,1\n', 2),
    "bytes in JSONL": ("x.jsonl", b'{"text1": "\xe9"}\n', 1),
    "bytes in TSV": ("x.tsv", HEADER + b"\xe9\tb\t1\n", 2),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_row_has_file_line_and_reason_and_no_other_row_is_lost(tmp_path: Path, case: str) -> None:
    name, content, line = BAD_ROWS[case]
    good = {".jsonl": b'{"text1": "last"}\n', ".tsv": b"last\tb\t1\n", ".csv": b"last,b\n"}.get(Path(name).suffix, b"")
    path = write(tmp_path / name, content + good)
    bad, *rest = resolve_source(path, tables=True).rows()
    assert isinstance(bad, BadRow)
    assert bad[:2] == (str(path), line)
    assert [row[0]["text1"] for row in rest] == (["last"] if good else [])
    with pytest.raises(DataError) as caught:
        list(resolve_source(path, tables=True).good_rows())
    assert str(caught.value) == f"{bad.place}: {bad.reason}"


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("x.jsonl.gz", gzip.compress(jsonl(*ROWS), mtime=0)[:-9], r"x.jsonl.gz:\d"),
        ("x.tsv.gz", gzip.compress(HEADER + b"a\tb\t1\n", mtime=0)[:-3], "x.tsv.gz:3"),
        ("x.json.gz", b"[]", "x.json.gz:1"),
        ("x.csv", b'text1,text2\na,b\n"a,b\nc,d\n', "x.csv:3"),
        ("x.csv", b'text1,text2\n"a"b,b\nc,d\n', "x.csv:2"),
        ("x.csv", b"text1,text1\na,b\n", r"x.csv:1: .*different column names; more than once: text1"),
        ("x.tsv", b"text1\tt\xe9xt2\na\tb\n", "x.tsv:1"),
        ("x.tsv", b"", "x.tsv:1"),
        ("x.jsonl", b"\n", "x.jsonl"),
        ("x.jsonl", b"\n[1\n", "x.jsonl:2"),
        ("x.json", b'[\n{"text1": }]', "x.json:2"),
        ("x.json", b'["\xe9"]', "x.json"),
        ("x.json", b'{\n "data": [1]\n}', "x.json: expected a list of objects, or an object on each line"),
        ("x.jsonl", gzip.compress(jsonl(*ROWS)), "x.jsonl:1: the file is compressed with gzip: add .gz"),
        ("x.parquet", b"PAR0", "x.parquet"),
        ("x.parquet", parquet([["a"], ["a"]], ["text1"] * 2), r"x.parquet: .*different column names"),
        ("x.parquet", parquet([["a"], np.array(["20000-01-01"], "datetime64[us]")], ["a", "b"]), "x.parquet: .*date"),
    ],
)
def test_damage_that_hides_rows_is_an_error(tmp_path: Path, name: str, content: bytes, place: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=place):
        columns_and_rows(tmp_path / name)


def test_columns_of_json_files_are_those_of_all_rows(tmp_path: Path) -> None:
    rows = resolve_source(write(tmp_path / "x.jsonl", jsonl({"a": 1}, {"a": 1, "b": 2})))
    assert rows.columns == ["a", "b"]
    with pytest.raises(DataError, match=r"x\.jsonl.*c"):
        next(rows.good_rows(["a", "c"]))


def test_a_json_file_may_have_an_object_in_each_line(tmp_path: Path) -> None:
    assert values(write(tmp_path / "x.json", jsonl(*ROWS))) == ROWS


def test_folder_at_name_names_a_file_in_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "sts" / "dev.jsonl", jsonl(*ROWS))
    assert len(values(f"{tmp_path}/sts@dev")) == 2
    with pytest.raises(DataError, match=r"test.*dev\.jsonl"):
        resolve_source(f"{tmp_path}/sts@test", datasets=True)
    write(tmp_path / "sts" / "dev.tsv", HEADER)
    with pytest.raises(DataError, match=r"dev\.jsonl or dev\.tsv"):
        resolve_source(f"{tmp_path}/sts@dev")


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("trian.jsonl", {}, r"trian\.jsonl: no such file or folder.* Did you mean .*train\.jsonl\?"),
        ("gone/x.jsonl", {}, "gone does not exist"),
        ("", {}, "empty"),
    ],
)
def test_missing_file_is_reported(tmp_path: Path, name: str, options: dict[str, Any], reason: str) -> None:
    write(tmp_path / "train.jsonl", b"")
    with pytest.raises(DataError, match=reason):
        resolve_source(tmp_path / name if name else "", **options)


def test_fingerprint_and_stamps_change_with_the_content(tmp_path: Path) -> None:
    path, scores = write(tmp_path / "STS.input.a.txt", b"x\ty\n"), write(tmp_path / "STS.gs.a.txt", b"1\n")
    rows = resolve_source(path, tables=True)
    fingerprint, stamps = rows.fingerprint(), rows.stamps()
    assert (rows.fingerprint(), rows.stamps()) == (fingerprint, stamps)
    write(scores, b"12\n")
    assert rows.stamps() != stamps
    write(path, b"x\tz\n")
    assert rows.fingerprint() != fingerprint


def test_rows_in_memory_are_a_source() -> None:
    source = source_in_memory(ROWS, "rows")
    assert (source.kind, source.columns) == ("rows", ["text1", "text2", "score"])
    assert [row.values for row in source.good_rows()] == ROWS
    assert [row.place for row in source.rows()] == ["rows row 1", "rows row 2"]
    assert load_examples(DataSource(), source=source).examples[1] == ScoredPair("a\u2028b", " padded ", 1.0)
    assert source_in_memory(ROWS, "rows").identity == source.identity != source_in_memory(ROWS[:1], "rows").identity


def test_rows_with_objects_have_the_same_identity_in_a_list_and_from_a_function() -> None:
    class Thing:
        pass

    def rows() -> list[dict[str, Any]]:
        values = {"tags": {"x", "yy", "zzz"}, "thing": Thing(), "day": date(2026, 1, 2), "list": np.arange(2000)}
        return [{"text1": "a", "text2": "b", "score": Decimal("0.5"), **values}]

    identity = source_in_memory(rows(), "rows").identity
    assert source_in_memory(rows(), "rows").identity == identity, "no address in memory"
    streamed = source_in_memory(lambda: iter(rows()), "rows")
    assert streamed.identity == identity
    assert load_examples(DataSource(), source=streamed).examples == [ScoredPair("a", "b", 0.5)]
    other = [{**rows()[0], "list": np.arange(2000) // 2}]
    assert source_in_memory(other, "rows").identity != identity
    assert json_value({"b", "a"}) == {"set": "['a', 'b']"}


def test_the_index_of_a_data_frame_is_no_column() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS, index=pandas.Index([3, 4], name="label"))
    assert source_in_memory(frame, "rows").columns == ["text1", "text2", "score"]


def test_kind_and_folder_of_a_source(tmp_path: Path) -> None:
    (tmp_path / "beir/qrels").mkdir(parents=True)
    write(tmp_path / "beir/qrels/test.tsv", b"query-id\tcorpus-id\tscore\n")
    write(tmp_path / "x.jsonl", jsonl(*ROWS))
    for text, kind, folder in (
        (f"{tmp_path}/x.jsonl", "file", tmp_path),
        (f"{tmp_path}@x", "file", tmp_path),
        (f"{tmp_path}/beir", "beir", tmp_path),
        (f"{tmp_path}/beir@test", "beir", tmp_path),
        (f"{tmp_path}/beir/qrels/test.tsv", "beir", tmp_path),
        ("starter:graded_pairs.tsv", "starter", Path("starter")),
        ("mteb:STSBenchmark", "mteb", Path("mteb")),
    ):
        source = evaluation_source(text)
        assert (source.kind, source.folder, source.text) == (kind, folder, text)
        assert evaluation_source(source) is source
    with pytest.raises(DataError, match="expected a file or a BEIR folder"):
        evaluation_source(tmp_path)
    with pytest.raises(DataError, match="mteb:STSBenchmark"):
        load_examples(DataSource(path="mteb:STSBenchmark"))


def test_a_folder_with_files_of_two_types_is_not_read_in_part(tmp_path: Path) -> None:
    write(tmp_path / "data/a.jsonl", jsonl(*ROWS))
    write(tmp_path / "data/b.csv", b"text1,text2,score\nc,d,1\n")
    with pytest.raises(DataError, match=r"expected files of one type, got a\.jsonl, b\.csv"):
        resolve_source(str(tmp_path / "data"), tables=True, datasets=True)
    write(tmp_path / "data/README.md", b"---\ndataset_info:\n  features:\n  - {name: text1, dtype: string}\n---\n")
    with pytest.raises(DataError, match="expected files of one type"):  # the card names no files
        resolve_source(str(tmp_path / "data"), tables=True, datasets=True)
    (tmp_path / "data/b.csv").unlink()
    write(tmp_path / "data/a.quarantine.jsonl", b"")
    write(tmp_path / "data/README.md", b"Text.")
    assert len(load_examples(DataSource(path=str(tmp_path / "data"))).examples) == 2
    assert [str(file.path) for file in resolve_source(tmp_path / "data").files] == [str(tmp_path / "data/a.jsonl")]


def test_a_column_of_texts_is_a_source() -> None:
    pandas = pytest.importorskip("pandas")
    texts = ["one", "two", "three"]
    table = pyarrow.table({"text": texts})
    dataset = datasets.Dataset.from_dict({"text": texts})
    for column in (pandas.Series(texts, index=[2, 0, 1]), np.array(texts), table["text"], dataset["text"]):
        assert source_in_memory(column, "rows").identity == source_in_memory(texts, "rows").identity


def test_a_configuration_of_a_local_copy_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hf download ORG/NAME --local-dir ORG/NAME` makes such a folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("easy", "hard"):
        write(Path(f"org/set/{name}/train.jsonl"), jsonl({"text1": name, "text2": "b", "score": 1}))
    parts = [f"- config_name: {name}\n  data_dir: {name}\n  default: {name == 'easy'}\n" for name in ("easy", "hard")]
    write(Path("org/set/README.md"), ("---\nconfigs:\n" + "".join(parts) + "---\n").encode())
    for text, name in (("org/set", "easy"), ("org/set:hard", "hard")):
        (row,) = resolve_source(text, tables=True, datasets=True).good_rows()
        assert row.values["text1"] == name
    with pytest.raises(DataError, match="nonsense"):
        list(resolve_source("org/set:nonsense", tables=True, datasets=True).good_rows())
    with pytest.raises(DataError, match=r"--data\.limit"):
        resolve_source("org/set@train[:10]", tables=True, datasets=True)


def test_relative_paths_are_searched_here_and_then_in_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "both.jsonl").touch()
    (tmp_path / "there/one.jsonl").touch()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("ANGLE_LLM_DATA", str(tmp_path / "there"))
    assert find_path("both.jsonl") == Path("both.jsonl")
    assert find_path("one.jsonl") == tmp_path / "there/one.jsonl"

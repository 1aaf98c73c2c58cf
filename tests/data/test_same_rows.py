"""The same rows give the same examples, or the same refusal, however they are opened."""

import csv
import gzip
import json
import re
import shutil
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pytest
from json_lines import write_rows

from angle_llm.data import DataError, Group, PositivePair, ScoredPair, Triple
from angle_llm.data.corpus import Corpus
from angle_llm.data.examples import load_examples, open_examples
from angle_llm.data.files.reader import BadRow
from angle_llm.data.formats import Dropped
from angle_llm.data.sources import evaluation_source, resolve_source
from angle_llm.evaluate.sts_tasks import read_pairs
from angle_llm.settings.encoder import CommandSource
from angle_llm.settings.train import DataSource
from angle_llm.tools.quality import check_files, write_fixed

Rows = list[dict[str, Any]]


def write_table(path: Path, rows: Rows) -> None:
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    with path.open("w", encoding="utf-8", newline="") as stream:
        if path.suffix == ".csv":
            csv.writer(stream).writerows(lines)
        else:
            stream.writelines("\t".join(map(str, line)) + "\n" for line in lines)


def write_json(path: Path, rows: Rows) -> None:
    lines = [json.dumps(row, default=float) for row in rows]
    path.write_text("\n".join(lines) if path.suffix == ".jsonl" else f"[{', '.join(lines)}]", encoding="utf-8")


def write_parquet(path: Path, rows: Rows) -> None:
    dataset_of(rows).to_parquet(path)


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    ".csv": write_table, ".tsv": write_table, ".jsonl": write_json, ".json": write_json, ".parquet": write_parquet,
}  # fmt: skip
TABLES, LISTS = [".csv", ".tsv"], [".jsonl", ".json", ".parquet", ".arrow", "dict"]
FILE_TYPES = [*TABLES, *LISTS]
NAMES = ["entailment", "contradiction", "neutral"]  # super_glue/cb; the usual numbers of NLI have another order
CARD = """---
dataset_info:
  features:
  - {name: premise, dtype: string}
  - {name: hypothesis, dtype: string}
  - name: label
    dtype: {class_label: {names: {'0': entailment, '1': contradiction, '2': neutral}}}
---
"""


def dataset_of(rows: Rows) -> datasets.Dataset:
    dataset = datasets.Dataset.from_list(rows)
    return dataset.cast_column("label", datasets.ClassLabel(names=NAMES)) if "hypothesis" in rows[0] else dataset


def sources(folder: Path, file_type: str, rows: Rows, card: str = "") -> list[str]:
    """Write rows as a file of this type, and return everything that opens them."""
    folder.mkdir()
    if file_type == ".arrow":
        dataset_of(rows).save_to_disk(folder)
        return [str(folder), f"{folder}@train"]
    if file_type == "dict":
        datasets.DatasetDict({"test": dataset_of(rows[:1]), "train": dataset_of(rows)}).save_to_disk(folder)
        return [str(folder), f"{folder}@train"]
    WRITERS[file_type](folder / f"train{file_type}", rows)
    WRITERS[file_type](folder / f"test{file_type}", rows[:1])
    if card:
        (folder / "README.md").write_text(card)
    return [str(folder), f"{folder}@train", str(folder / f"train{file_type}")]


def meaning(source: str, **settings: Any) -> tuple[list[Any], list[str]]:
    """Return the examples, and the reasons of refused rows."""
    results = [result for _, result in open_examples(CommandSource(path=source, **settings)).outcomes()]
    refused = [result.reason for result in results if isinstance(result, BadRow)]
    return [result for result in results if not isinstance(result, BadRow | Dropped)], refused


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


NLI = [
    {"premise": "a", "hypothesis": "e", "label": 0},
    {"premise": "a", "hypothesis": "c", "label": 1},
    {"premise": "a", "hypothesis": "n", "label": 2},
]
PAIRS = [
    {"text1": 'He said "no".', "text2": "NA", "score": 1},
    {"text1": '"lone quote', "text2": '["sic"] he said [1]', "score": 0.25},
    {"text1": '"whole quote"', "text2": "2020-01-02", "score": Decimal("0.5")},
    {"text1": "12", "text2": "true", "score": 0},
]
FLOATS = [{**row, "score": float(row["score"])} for row in PAIRS]


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_label_names_decide_in_every_file_type(tmp_path: Path, file_type: str) -> None:
    due = [ScoredPair("a", "e", 1.0), ScoredPair("a", "c", 0.0)]
    for source in sources(tmp_path / "nli", file_type, NLI, "" if file_type == ".parquet" else CARD):
        assert meaning(source) == (due, []), source
        reader = open_examples(CommandSource(path=source))
        copied = [reader.named_values(row)["label"] for row, _ in reader.used_rows(reader.report())]
        assert copied == ["entailment", "contradiction"], source


@pytest.mark.parametrize("file_type", [".csv", ".jsonl"])
def test_label_numbers_of_pandas_are_named_too(tmp_path: Path, file_type: str) -> None:
    """Integers become floats if a value is missing."""
    floats = [{**row, "label": float(row["label"])} for row in (*NLI, {**NLI[0], "label": -1})]
    for source in sources(tmp_path / "nli", file_type, floats, CARD):
        assert meaning(source) == ([ScoredPair("a", "e", 1.0), ScoredPair("a", "c", 0.0)], []), source


def test_labels_whose_names_are_numbers_are_not_shifted(tmp_path: Path) -> None:
    card = CARD.replace("entailment", "'1'").replace("contradiction", "'2'").replace("neutral", "'3'")
    rows = [{"text": f"t{n}", "label": f"{n + 1}.0"} for n in range(3)]
    for source in sources(tmp_path / "stars", ".csv", rows, card):
        assert [example.label for example in meaning(source)[0]] == ["1", "2", "3"]
        assert [example.text for example in meaning(source, where={"label": "2.0"})[0]] == ["t1"]


@pytest.mark.parametrize("wanted", ["0", "entailment", 0])
def test_a_filter_of_named_labels_fits_the_copy_too(tmp_path: Path, wanted: str | int) -> None:
    (source, *_) = sources(tmp_path / "nli", ".csv", NLI, CARD)
    reader = open_examples(CommandSource(path=source, where={"label": wanted}))
    assert meaning(source, where={"label": wanted}) == ([ScoredPair("a", "e", 1.0)], [])
    if wanted != "entailment":
        with pytest.raises(DataError, match="expected one of entailment, contradiction, neutral"):
            [reader.named_values(row) for row, _ in reader.outcomes()]
        return
    copy = write_rows(tmp_path / "copy.jsonl", [reader.named_values(row) for row, _ in reader.outcomes()])
    assert meaning(str(copy), where={"label": wanted}) == ([ScoredPair("a", "e", 1.0)], [])


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_quotes_and_words_for_missing_values_are_texts(tmp_path: Path, file_type: str) -> None:
    due = [ScoredPair(row["text1"], row["text2"], row["score"]) for row in FLOATS]
    rows = PAIRS if file_type in TABLES else FLOATS
    for source in sources(tmp_path / "data", file_type, rows):
        assert meaning(source) == (due, []), source
        reader = open_examples(CommandSource(path=source))
        copies = [reader.named_values(row) for row, _ in reader.used_rows(reader.report())]
        assert [copy["text1"] for copy in copies] == [row["text1"] for row in rows]


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_boolean_is_no_label_and_no_score(tmp_path: Path, file_type: str) -> None:
    row, nli = {"text1": "a", "text2": "b", "score": True}, {"premise": "a", "other": "b", "class": True}
    columns = {"hypothesis": "other", "label": "class"}
    for source in sources(tmp_path / "pairs", file_type, [row, row]):
        with pytest.raises(DataError, match=r"score is '?True"):
            load_examples(CommandSource(path=source))
    for source in sources(tmp_path / "nli", file_type, [nli, nli]):
        with pytest.raises(DataError, match=r"class \(label\) is '?True"):
            load_examples(CommandSource(path=source, columns=columns))


LISTS_AS_TEXT = ["['a', 'b']", '["a", "it\\"s"]', "['a' 'b']", "[]", "[{'text': 'a'}]", " ['a',\u00a0None] "]
NO_LISTS = ["[1]", '["sic"] he said [1]', "[CLS] a", "['a'] or ['b']", "[note]", "['a]"]
FIELDS = {
    "positive_pair": ["text1", "text2"], "triple": ["anchor", "positive", "negative"], "text": ["text"],
    "scored_pair": ["text1", "text2", "score"], "nli_pairs": ["premise", "hypothesis", "label"],
}  # fmt: skip


@pytest.mark.parametrize("format", FIELDS)
@pytest.mark.parametrize("file_type", [".csv", ".tsv", ".jsonl"])
def test_cell_of_a_table_that_is_a_list_is_refused(tmp_path: Path, file_type: str, format: str) -> None:
    """In JSON lines and Parquet, which can contain lists, such a text is a text."""
    columns = FIELDS[format]
    column = columns[min(1, len(columns) - 1)]
    good = {name: f"the {name}" for name in columns} | {"score": 1, "label": 0}
    rows = [{name: {**good, column: text}[name] for name in columns} for text in [*LISTS_AS_TEXT, *NO_LISTS]]
    WRITERS[file_type](tmp_path / f"x{file_type}", rows)
    examples, refused = meaning(str(tmp_path / f"x{file_type}"), format=format)
    assert len(examples) == len(rows) - len(refused)
    assert len(refused) == (len(LISTS_AS_TEXT) if file_type in TABLES else 0)
    assert all(
        "a list that is written as text; write it as a list, in JSON lines or Parquet" in reason for reason in refused
    )
    corpus = list(Corpus.open(tmp_path / f"x{file_type}", column))
    assert [isinstance(row, BadRow) for row in corpus] == [file_type in TABLES] * len(LISTS_AS_TEXT) + [False] * 6


@pytest.mark.parametrize("file_type", LISTS)
def test_lists_objects_and_decimal_scores_are_read(tmp_path: Path, file_type: str) -> None:
    group = {
        "query": "q",
        "positives": ["p"],
        "negatives": ["n", "m"],
        "scores": [Decimal("0.5"), Decimal("0.25"), Decimal(0)],
    }
    passage = {
        "query": "q",
        "pos": [{"docid": "1", "title": "t", "text": "p"}],
        "neg": [{"docid": "2", "title": "", "text": "n"}],
    }
    for source in sources(tmp_path / "groups", file_type, [group, group]):
        assert meaning(source) == ([Group("q", ("p",), ("n", "m"), (0.5, 0.25, 0.0))] * 2, []), source
    for source in sources(tmp_path / "passages", file_type, [passage]):
        assert meaning(source) == ([Group("q", ("t p",), ("n",))], []), source


@pytest.mark.parametrize("text", ["['a', 'b']", "[{'text': 'a'}]"])
def test_list_in_a_column_of_lists_is_refused_in_every_file_type(tmp_path: Path, text: str) -> None:
    for file_type in [*TABLES, ".jsonl", ".json", ".parquet"]:
        path = tmp_path / f"x{file_type}"
        WRITERS[file_type](path, [{"query": "q", "pos": "p", "neg": text}])
        with pytest.raises(DataError, match=rf"{path.name}.*neg \(negatives\) is .*a list that is written as text"):
            load_examples(CommandSource(path=str(path)))


@pytest.mark.parametrize("columns", [["text1", "text2"], ["query", "positive", "negative"]])
@pytest.mark.parametrize("file_type", TABLES)
def test_repeated_header_is_refused(tmp_path: Path, file_type: str, columns: list[str]) -> None:
    rows = [
        dict(zip(columns, "abc", strict=False)),
        {name: name for name in columns},
        dict(zip(columns, "def", strict=False)),
    ]
    for source in sources(tmp_path / "joined", file_type, rows):
        (_, second), refused = meaning(source)
        assert second in (PositivePair("d", "e"), Triple("d", "e", "f"))
        assert refused == ["the line repeats the header, as in joined files; remove the line"]
        with pytest.raises(DataError, match=rf"train{file_type}:3: the line repeats the header"):
            load_examples(CommandSource(path=source))
    (tmp_path / f"one{file_type}").write_text("text\na\ntext\n")  # a list of words
    assert len(list(resolve_source(tmp_path / f"one{file_type}").good_rows())) == 2


@pytest.mark.parametrize("extra", ["", ".gz"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
def test_tsv_file_with_the_quoting_of_csv_is_refused_and_read_as_csv(tmp_path: Path, quoting: Any, extra: str) -> None:
    rows = [["text1", "text2", "score"], ["plain", "b", 0], ['He said "hello" to me.', "a\tb", 1], ["c", '"', 1]]
    rows = rows if quoting == csv.QUOTE_MINIMAL else rows[:2]
    path, renamed = tmp_path / f"x.tsv{extra}", tmp_path / f"x.csv{extra}"
    with (gzip.open if extra else open)(path, "wt", newline="") as stream:
        csv.writer(stream, delimiter="\t", quoting=quoting).writerows(rows)
    line = 3 if quoting == csv.QUOTE_MINIMAL else 1
    for read in (lambda: meaning(str(path), format="positive_pair"), lambda: list(Corpus.open(path, "text1"))):
        with pytest.raises(DataError, match=rf"x\.tsv{extra}:{line}: .*quoting of CSV.*rename the file to \.csv"):
            read()
    shutil.copy(path, renamed)
    assert meaning(str(renamed))[0] == [ScoredPair(*map(str, row[:2]), float(row[2])) for row in rows[1:]]  # type: ignore[arg-type, misc]


def test_tsv_file_with_quoted_line_ends_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    with path.open("w", newline="") as stream:
        csv.writer(stream, delimiter="\t").writerows([["text1", "text2"], ["a", "b"], ["c", "one\ntwo\n\nthree"]])
    with pytest.raises(DataError, match=r"x\.tsv:3: .*quoting of CSV"):
        meaning(str(path))


def test_quotes_of_a_tsv_file_that_are_not_those_of_csv_are_text(tmp_path: Path) -> None:
    """STS 2015 has doubled quotes for apostrophes, in whole cells in quotes, beside cells with a lone quote."""
    sts = [{"text1": '"the bulb""s path"', "text2": '"Hello"'}, {"text1": '"Yes," he said', "text2": "a"}]
    lone = [{"text1": "a", "text2": '"We won'}, {"text1": 'they said."', "text2": "b"}]
    whole = [{"text1": '"a"', "text2": "b"}, {"text1": '"c"', "text2": '""'}]
    for name, rows in (("sts", sts), ("lone", lone), ("whole", whole), ("open", lone[:1])):
        for source in sources(tmp_path / name, ".tsv", rows):
            assert meaning(source) == ([PositivePair(row["text1"], row["text2"]) for row in rows], [])
    (tmp_path / "x.tsv").write_text('text1\ttext2\n"a\tb"\tc\n')
    with pytest.raises(DataError, match=r"x\.tsv:2: 3 fields, expected 2"):
        load_examples(CommandSource(path=str(tmp_path / "x.tsv")))


@pytest.mark.parametrize("file_type", [".csv", ".tsv", ".jsonl", ".json"])
def test_lines_that_end_with_cr_are_lines(tmp_path: Path, file_type: str) -> None:
    path = tmp_path / f"x{file_type}"
    WRITERS[file_type](path, FLOATS)
    due = meaning(str(path))
    path.write_bytes(path.read_bytes().replace(b"\r\n", b"\r").replace(b"\n", b"\r"))
    assert meaning(str(path)) == due
    assert len(due[0]) == 4


@pytest.mark.parametrize("file_type", [".csv", ".jsonl", ".parquet"])
def test_files_of_a_split_keep_their_label_names_and_row_numbers(tmp_path: Path, file_type: str) -> None:
    """`data check --fix` removes the rows of the right file; the labels of each file have their own names."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, names in enumerate((NAMES, NAMES[::-1])):
        rows = [{**row, "premise": f"premise {number}", "label": NAMES[row["label"]]} for row in NLI]
        rows = [{"premise": " ", "hypothesis": "e", "label": "entailment"}, *rows, rows[0]]
        path = folder / f"train-{number}{file_type}"
        if file_type == ".parquet":
            labels = datasets.Dataset.from_list(rows).cast_column("label", datasets.ClassLabel(names=names))
            labels.to_parquet(path)
        else:
            WRITERS[file_type](path, rows)
    source = CommandSource(path=str(folder))
    (report,) = check_files([source], None, [])
    assert (report.rows_in, report.rows_used, report.rejected, report.unit) == (10, 6, 2, "row")
    assert [finding.places for finding in report.findings if finding.kind == "duplicate"] == [["5 and 2", "10 and 7"]]
    (rejected,) = [finding.text for finding in report.findings if finding.kind == "rejected"]
    assert re.search(rf"train-0{file_type}( row 1|:[12]) \(1 of [12]\): ", rejected)
    write_fixed([(source, report)], tmp_path, tmp_path)
    kept = [json.loads(line) for line in (tmp_path / "shards.jsonl").read_text().splitlines()]
    due = [(f"premise {number}", row["hypothesis"], NAMES[row["label"]]) for number in range(2) for row in NLI]
    assert [tuple(row.values()) for row in kept] == due


def test_labels_that_would_be_scores_are_refused(tmp_path: Path) -> None:
    row = {"sentence1": "a", "sentence2": "b", "label": 0}
    dataset = datasets.Dataset.from_list([row]).cast_column("label", datasets.ClassLabel(names=["same", "other"]))
    dataset.to_parquet(tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet: column 'label' .*the labels \['same', 'other'\]"):
        meaning(str(tmp_path / "x.parquet"))
    assert meaning(str(tmp_path / "x.parquet"), columns={"score": "label"})[0] == [ScoredPair("a", "b", 0.0)]
    with pytest.raises(DataError, match=r"the labels \['same', 'other'\]"):
        read_pairs(tmp_path / "x.parquet")
    group = {"query": "q", "positives": ["p"], "negatives": ["n"], "scores": [1, 0]}
    names = datasets.Sequence(datasets.ClassLabel(names=["same", "other"]))
    datasets.Dataset.from_list([group]).cast_column("scores", names).to_parquet(tmp_path / "y.parquet")
    with pytest.raises(DataError, match="column 'scores' would be read as a score"):
        meaning(str(tmp_path / "y.parquet"))


def test_dataset_card_with_two_orders_of_labels_or_broken_is_refused(tmp_path: Path) -> None:
    card = CARD.replace("  features:", "- config_name: a\n  features:")
    other = card.split("dataset_info:\n")[1].replace("_name: a", "_name: b").replace("'2'", "'3'").replace("'0'", "'2'")
    (source, *_) = sources(tmp_path / "nli", ".jsonl", NLI, card.removesuffix("---\n") + other.replace("'3'", "'0'"))
    with pytest.raises(DataError, match=r"README\.md has two orders of the labels of column 'label'.*train\.jsonl by"):
        meaning(source + "/train.jsonl")
    write_json(tmp_path / "nli" / "dev.jsonl", [{"text1": "a", "text2": "b"}])  # without labels
    assert meaning(f"{source}@dev")[0] == [PositivePair("a", "b")]
    (tmp_path / "nli" / "README.md").write_text("---\ndataset_info: [class_label: : x\n---\n")
    with pytest.raises(DataError, match=r"README\.md: label names cannot be read; correct the file"):
        meaning(source + "/train.jsonl")


def test_folder_of_save_to_disk_is_opened_by_every_command(tmp_path: Path) -> None:
    """The folder may contain other Arrow files: caches of `map`, and shards of an earlier dataset."""
    _, train = sources(tmp_path / "saved", "dict", [{"text": "a"}, {"text": "b"}])
    shutil.copy(
        tmp_path / "saved" / "train" / "data-00000-of-00001.arrow", tmp_path / "saved" / "train" / "cache-1.arrow"
    )
    for source, texts in ((train.partition("@")[0], ["a", "a", "b"]), (train, ["a", "b"])):
        corpus = Corpus.open(source)
        assert [row.text for row in corpus if not isinstance(row, BadRow)] == texts
        assert corpus.survey(skip_bad=False).rows == len(texts)
    assert [row.values for row in evaluation_source(train).rows()] == [{"text": "a"}, {"text": "b"}]
    with pytest.raises(DataError, match="expected a file or a BEIR folder"):
        evaluation_source(tmp_path / "saved")
    with pytest.raises(DataError, match=r"no split 'dev'; splits there: test, train"):
        resolve_source(f"{tmp_path}/saved@dev")
    with pytest.raises(DataError, match=r"no split 'test'; splits there: train"):
        resolve_source(f"{tmp_path}/saved/train@test")
    datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "empty")
    if next((tmp_path / "empty").glob("*.arrow"), None) is None:  # datasets 4.0 writes a file without rows
        with pytest.raises(DataError, match=r"empty: a split has no rows"):
            resolve_source(f"{tmp_path}/empty")
    (tmp_path / "x.arrow").write_bytes(b"ARROW1")
    with pytest.raises(DataError, match=r"x\.arrow: cannot be read as \.arrow"):
        resolve_source(tmp_path / "x.arrow").columns  # noqa: B018


@pytest.mark.parametrize("file_type", [".csv", ".jsonl"])
def test_label_numbers_are_those_of_the_card_or_refused(tmp_path: Path, file_type: str) -> None:
    """Not the usual order, also for digits between spaces; a number without a name has no meaning."""
    (tmp_path / "README.md").write_text(CARD)
    labels = ["0", " 1", " 2 ", "3", "-1"] if file_type == ".csv" else [0, " 1", 2, 3, -1]
    rows = [{"premise": "a", "hypothesis": f"b{number}", "label": label} for number, label in enumerate(labels)]
    path = tmp_path / f"x{file_type}"
    WRITERS[file_type](path, rows)
    examples, refused = meaning(str(path))
    assert examples == [ScoredPair("a", "b0", 1.0), ScoredPair("a", "b1", 0.0)]
    assert refused == ["label is 3, expected a number from 0 to 2: entailment, contradiction, neutral"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # datasets 4.0 leaves the file open
def test_options_of_a_dataset_card_are_used(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,b\nc,d\n")
    card = "configs:\n- config_name: default\n  data_files: train.csv\n  names: [text1, text2]\n  header: null\n"
    (tmp_path / "README.md").write_text(f"---\n{card}---\n")
    examples = load_examples(DataSource(path=str(tmp_path))).examples
    assert list(examples) == [PositivePair("a", "b"), PositivePair("c", "d")]


def test_a_folder_with_the_name_of_a_configuration_has_its_label_names(tmp_path: Path) -> None:
    infos = {}
    for name, names in (("rte", ["entailment", "contradiction"]), ("other", ["contradiction", "entailment"])):
        infos[name] = {"features": datasets.Features({"label": datasets.ClassLabel(names=names)}).to_dict()}
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "x.jsonl", [{"premise": "a", "hypothesis": "b", "label": 0}])
    (tmp_path / "dataset_infos.json").write_text(json.dumps(infos))
    scores = [meaning(str(tmp_path / name / "x.jsonl"))[0][0].score for name in infos]
    assert scores == [1.0, 0.0]


def test_a_list_in_a_cell_is_no_text_of_an_evaluation(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("sentence1,sentence2,score,tags\na,b,1,\"['x', 'y']\"\nc,\"['a', 'b']\",2,\n")
    with pytest.raises(DataError, match=r"x\.csv:3: sentence2 is .*a list that is written as text"):
        read_pairs(tmp_path / "x.csv")


def test_a_damaged_folder_of_save_to_disk_is_refused_by_name(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/state.json").write_text("{")
    with pytest.raises(DataError, match=r"saved: cannot be read as a dataset of save_to_disk, save it again"):
        resolve_source(str(tmp_path / "saved"))

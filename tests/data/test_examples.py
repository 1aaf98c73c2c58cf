"""Examples of a source: every row is used, dropped or rejected, and the report adds up."""

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow
import pytest
from evaluate_samples import parsed
from hypothesis import given
from hypothesis import strategies as st
from json_lines import read_rows
from pyarrow import parquet

from angle_llm.data.examples import LoadedData, load_examples, open_examples
from angle_llm.data.files.in_memory import DatasetReader
from angle_llm.data.files.reader import BadRow
from angle_llm.data.formats import DataError, Dropped, Group, LabelledText, PositivePair, ScoredPair, Triple
from angle_llm.settings.commands import CheckSettings
from angle_llm.settings.encoder import CommandSource
from angle_llm.settings.parsing import SettingsError
from angle_llm.tools.check import check_data

GOOD = {"text1": "a", "text2": "b", "score": 1}
PAIR = {"text1": "a", "text2": "b"}


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def load(path: Path | str, **settings: Any) -> LoadedData:
    return load_examples(CommandSource(path=str(path), **settings))


def outcomes(path: Path | str, **settings: Any) -> tuple[list[Any], list[BadRow]]:
    """Return the results of usable rows, dropped ones included, and the bad rows."""
    results = [result for _, result in open_examples(CommandSource(path=str(path), **settings)).outcomes()]
    return [result for result in results if not isinstance(result, BadRow)], [
        result for result in results if isinstance(result, BadRow)
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [({**GOOD, "score": 3.2}, "--score-range"), (PAIR, "score"), ([GOOD], "object")],
)
def test_bad_row_is_an_error_with_file_and_line_or_is_listed(tmp_path: Path, row: object, reason: str) -> None:
    path = write(tmp_path / "x.jsonl", GOOD, row, GOOD)
    with pytest.raises(DataError, match=rf"x\.jsonl:2: .*{reason}.*data check .*x\.jsonl --fix FOLDER"):
        load(path)
    examples, ((file, line, why, _),) = outcomes(path)
    assert examples == [ScoredPair("a", "b", 1.0)] * 2
    assert (file, line, reason in why) == (str(path), 2, True)


def test_nan_is_a_missing_value(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": math.nan}]
    assert outcomes(write(tmp_path / "x.jsonl", *rows)) == ([LabelledText("a", "x"), Dropped("no gold label")], [])
    many = {"query": "q", "positive": "p", "negative_1": "n", "negative_2": math.nan}
    assert outcomes(write(tmp_path / "y.jsonl", many)) == ([Group("q", ("p",), ("n",))], [])
    null, nan = (outcomes(write(tmp_path / "z.jsonl", {**GOOD, "score": score})) for score in (None, math.nan))
    assert null == nan
    assert len(null[1]) == 1


def test_the_repair_command_has_the_settings_of_the_run(tmp_path: Path) -> None:
    rows = [{"a": "x", "b": "y", "grade": grade} for grade in (5, 9)]
    path = write(tmp_path / "x.jsonl", *rows)
    settings = {"columns": {"text1": "a", "text2": "b", "score": "grade"}, "score_range": (0.0, 5.0)}
    with pytest.raises(DataError) as stopped:
        load(path, **settings)
    command = str(stopped.value).partition("bad rows: ")[2].replace("FOLDER", str(tmp_path / "fixed"))
    words = shlex.split(command)
    assert words[:3] == ["angle-llm", "data", "check"]
    check_data(parsed(CheckSettings, *words[3:], "--model", "none"))
    assert [row["grade"] for row in read_rows(tmp_path / "fixed" / "x.jsonl")] == [5]


@pytest.mark.parametrize("line", ["[" * 100_000, f'{{"text1": {"1" * 5000}}}'])
def test_json_that_python_cannot_read_is_a_bad_row(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(DataError, match=r"x\.jsonl:2: a JSON object that cannot be read"):
        load(path)
    (tmp_path / "x.json").write_text(line)
    with pytest.raises(DataError, match="cannot be read"):
        load(tmp_path / "x.json")


def test_row_of_a_json_list_or_parquet_file_has_its_number(tmp_path: Path) -> None:
    rows = [GOOD] * 16 + [{**GOOD, "score": 9}]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    for name in ("x.json", "x.parquet"):
        with pytest.raises(DataError, match=f"{name} row 17"):
            load(tmp_path / name)


def test_key_that_only_later_rows_have_counts(tmp_path: Path) -> None:
    """The first row alone would be a positive pair, and the negatives of all others would be lost."""
    pair = {"anchor": "a", "positive": "p"}
    with pytest.raises(DataError, match=r"x\.jsonl:1: negative"):
        load(write(tmp_path / "x.jsonl", pair, {**pair, "negative": "n"}))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"limit": 0}, "limit: .*greater than or equal to 1"),
        ({"score_range": (5, 5)}, "score-range: .*got 5 5"),
        ({"format": "positive_pair", "score_range": (0, 5)}, "score-range is set, .* positive_pair"),
        ({"format": "pairs"}, "format: .*'pairs'|'pairs'.*positive_pair"),
        ({"where": {"scor": 1}}, "--where scor: .*'scor'.*Did you mean 'score'"),
        ({"where": {"score": 0.7}}, "no usable example.*1 filtered by where"),
        ({"columns": {"anchor": "txt"}}, "anchor .*'txt'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises((DataError, SettingsError), match=reason):
        load(write(tmp_path / "x.jsonl", GOOD), **settings)


def test_split_of_a_folder_is_read_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "pairs" / "train.jsonl", GOOD)
    write(tmp_path / "pairs" / "test.jsonl", GOOD, GOOD, {**GOOD, "text1": ""})
    write(tmp_path / "pairs" / "validation-0.jsonl", GOOD, GOOD, {**GOOD, "text1": ""})
    folder = tmp_path / "pairs"
    assert len(load(folder).examples) == 1
    with pytest.raises(DataError, match=r"validation-0\.jsonl:3: text1 is empty"):
        load(f"{folder}@validation")
    examples, rejected = outcomes(f"{folder}@validation")
    assert examples == [ScoredPair("a", "b", 1.0)] * 2
    assert [(bad.file, bad.line) for bad in rejected] == [(str(folder / "validation-0.jsonl"), 3)]


def test_hub_dataset_is_loaded_with_its_configuration_and_label_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    text, label = datasets.Value("string"), datasets.ClassLabel(names=["contradiction", "entailment", "neutral"])
    features = datasets.Features(premise=text, hypothesis=text, label=label)
    rows = {"premise": ["p", "p", "p"], "hypothesis": ["e", "c", "n"], "label": [1, 0, 2]}
    builder = Mock(cache_dir=str(tmp_path), info=Mock(splits=dict.fromkeys(("train", "dev"))))
    builder.as_dataset.side_effect = lambda _: datasets.Dataset.from_dict(rows, features=features)
    load_builder = Mock(return_value=builder)
    monkeypatch.setattr(datasets, "load_dataset_builder", load_builder)
    data = load("org/all-nli:pair-class@dev")
    load_builder.assert_called_with("org/all-nli", "pair-class")
    builder.as_dataset.assert_called_with("dev")
    # The label names of the dataset decide, not the usual numbers of NLI.
    assert data.examples == [ScoredPair("p", "e", 1.0), ScoredPair("p", "c", 0.0)]
    assert load("org/all-nli@train", format="nli_triples").examples == [Triple("p", "e", "c")]
    load_builder.assert_called_with("org/all-nli", None)
    builder.as_dataset.assert_called_with("train")

    # RTE numbers entailment 0: read as a score, the meaning would be reversed.
    rows = {"sentence1": ["p"], "sentence2": ["e"], "label": [0]}
    label = datasets.ClassLabel(names=["entailment", "not_entailment"])
    features = datasets.Features(sentence1=text, sentence2=text, label=label)
    with pytest.raises(DataError, match="not_entailment"):
        load("org/rte")


def test_a_dataset_larger_than_the_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local folder in place of the hub, without and with sizes in its card."""
    datasets = pytest.importorskip("datasets")
    hub, cache = tmp_path / "hub", tmp_path / "cache"
    cache.mkdir()
    write(hub / "train-0.jsonl", *[GOOD] * 2000)
    write(hub / "train-1.jsonl", *[GOOD] * 2000)
    size = sum(path.stat().st_size for path in hub.iterdir())
    usage = Mock(return_value=Mock(free=size - 1))
    monkeypatch.setattr("shutil.disk_usage", usage)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    gigabytes = f"expected {size / 1e9:,.2f} GB of free space .* got {(size - 1) / 1e9:,.2f} GB. Set HF_HOME"
    with pytest.raises(DataError, match=gigabytes):
        DatasetReader(str(hub), None, "train")
    assert list(cache.rglob("*.arrow")) == []
    usage.return_value.free = size + 1
    assert len(list(DatasetReader(str(hub), None, "train").rows())) == 4000
    usage.return_value.free = 0  # the table is there: nothing is written
    assert len(list(DatasetReader(str(hub), None, "train").rows())) == 4000
    # A dataset of the hub: the files, and the table by the card.
    builder = Mock(
        cache_dir=str(cache / "none"), config=Mock(data_files={"train": ["hf://datasets/org/name@1/v@2/a.parquet"]})
    )
    builder.info = Mock(download_size=3e12, dataset_size=5e12, splits=None)
    monkeypatch.setattr(datasets, "load_dataset_builder", Mock(return_value=builder))
    usage.return_value.free = 7.9e12
    with pytest.raises(DataError, match=r"org/name: expected 8,000\.00 GB .* got 7,900\.00 GB"):
        load("org/name")
    # A file of an interrupted download is in the cache.
    (tmp_path / "a.parquet").write_bytes(bytes(2 * 10**6))
    cached = Mock(return_value=str(tmp_path / "a.parquet"))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    with pytest.raises(DataError, match=r"expected 8,000\.00 GB"):
        load("org/name")
    cached.assert_called_with("org/name", "v@2/a.parquet", revision="1", repo_type="dataset")
    usage.return_value.free = 8e12 - 10**6
    builder.as_dataset.return_value = datasets.Dataset.from_dict({"text1": ["a"], "text2": ["b"], "score": [1.0]})
    load("org/name")
    builder.download_and_prepare.assert_called_once()


@pytest.mark.parametrize("path", ["data/trian.jsonl", "d/x.csv.gz", "./org/name", "/org/name", "name", "a/b/c", "../x"])
def test_only_a_hub_id_uses_the_network(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"{re.escape(path)}: no such file or folder"):
        load(path)


@pytest.mark.parametrize(("cell", "wanted", "kept"), [
    (0, 0, True), (0, "0", True), ("0", 0, True), ("0", "0", True), (0.0, 0, True), ("0.0", "0", True), ("a", "a", True),
    (True, "true", True), (0, 1, False), ("07", "7", False), ("a", 0, False), (None, 0, False),
    (False, 0, False), ([0], "0", False), (True, True, True), ("True", True, True), (False, True, False), (1, True, False),
])  # fmt: skip
def test_where_compares_numbers_as_text_or_number(tmp_path: Path, cell: object, wanted: str | int, kept: bool) -> None:
    data = load(write(tmp_path / "x.jsonl", {**GOOD, "flag": wanted}, {**GOOD, "flag": cell}), where={"flag": wanted})
    assert len(data.examples) == 1 + kept
    assert data.report.dropped == ({} if kept else {"filtered by where": 1})


@pytest.mark.parametrize(("text", "kept"), [
    ("\u200b", False), ("\u0301", False), ("\ufeff \u00ad", False), ("\x1b", False),
    ("\ufffd \ufffd", False), ("\uf0b7", False), ("\uf0b7 a", True),
    ("\U0001fae9", True), ("1\ufe0f\u20e3", True), ("e\u0301", True), ("?", True),
])  # fmt: skip
def test_a_text_of_invisible_characters_is_a_bad_row(tmp_path: Path, text: str, kept: bool) -> None:
    """A character of a newer Unicode than Python's is visible; one of private use has no meaning alone."""
    pairs = [{"text1": "A man eats.", "text2": other} for other in ("He eats.", text)]
    examples, rejected = outcomes(write(tmp_path / "x.jsonl", *pairs))
    assert len(examples) == 1 + kept
    assert ["x.jsonl:2: text2 is" in f"{bad.place}: {bad.reason}" for bad in rejected] == [True] * (not kept)


def test_limit_applies_to_file_order_or_after_a_seeded_shuffle(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", *({"text1": str(i), "text2": "b"} for i in range(30)))
    everything = load(path).examples
    first, shuffled = load(path, limit=4), load(path, shuffle_seed=1).examples
    assert first.examples == everything[:4]
    assert first.report.dropped == {"beyond limit": 26}
    assert sorted(shuffled, key=repr) == sorted(everything, key=repr)
    assert shuffled[:4] == [PositivePair(str(i), "b") for i in [13, 20, 9, 26]]  # the same in every version
    assert load(path, shuffle_seed=1, limit=4).examples == shuffled[:4]
    assert load(path, shuffle_seed=2).examples != shuffled


rows = st.fixed_dictionaries(
    {
        "premise": st.sampled_from(["p", "q", ""]),
        "hypothesis": st.sampled_from(["h", "i", " ", None]),
        "label": st.sampled_from(["entailment", "neutral", "contradiction", 0, 1, 2, -1, "maybe", None, True]),
    },
    optional={"keep": st.integers(0, 1)},
) | st.sampled_from([["a"], "text", 5])


@given(
    rows=st.lists(rows, max_size=25),
    format=st.sampled_from(["nli_pairs", "nli_triples"]),
    where=st.sampled_from([{}, {"keep": 1}]),
    limit=st.none() | st.integers(1, 5),
    seed=st.none() | st.integers(0, 3),
)
def test_every_row_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], format: str, where: Any, limit: int, seed: int
) -> None:
    good = [{"premise": "s", "hypothesis": "h", "label": label, "keep": 1} for label in (0, 2)]
    folder = tmp_path_factory.mktemp("rows")
    usable, rejected = outcomes(write(folder / "all.jsonl", *rows, *good), format=format, where=where)
    assert len(usable) + len(rejected) == len(rows) + 2
    bad_lines = {bad.line for bad in rejected}
    readable = [row for line, row in enumerate(rows, 1) if line not in bad_lines]
    path = write(folder / "x.jsonl", *readable, *good)
    data = load(path, format=format, where=where, limit=limit, shuffle_seed=seed)
    report = data.report
    assert report.rows_in == len(usable) == report.rows_used + sum(report.dropped.values())
    assert report.examples == len(data.examples) == report.rows_used // (2 if format == "nli_triples" else 1)
    assert all(count > 0 for count in report.dropped.values())
    assert limit is None or len(data.examples) <= limit
    for bad in rejected:
        row = rows[bad.line - 1]
        assert not (isinstance(row, dict) and row["label"] in ("neutral", 1) and row["label"] is not True)


@pytest.mark.parametrize(
    ("settings", "unused"),
    [
        ({}, ["id", "rating", "split"]),
        ({"where": {"split": "a"}}, ["id", "rating"]),
        ({"format": "scored_pair", "columns": {"score": "rating"}, "score_range": (0, 5)}, ["id", "split"]),
    ],
)
def test_unused_columns_are_listed(tmp_path: Path, settings: dict[str, Any], unused: list[str]) -> None:
    """A score column with an unknown name is not used, and the rows become plain positive pairs: that must be visible."""
    path = write(tmp_path / "x.jsonl", {"id": 7, **PAIR, "rating": 0}, {**PAIR, "split": "a", "rating": 1})
    report = load(path, **settings).report
    assert report.unused_columns == unused
    assert f"; columns not used: {', '.join(unused)}" in report.summary()


@pytest.mark.slow
def test_real_files_give_the_known_counts(data_dir: Path) -> None:
    triplets = load(data_dir / "nli" / "nli_triplets.jsonl.gz", where={"sts_overlap": 0})
    assert (triplets.report.format, len(triplets.examples)) == ("triple", 43_410)
    assert triplets.report.dropped == {"filtered by where": 217}
    path = data_dir / "nli" / "nli_pairs.jsonl.gz"
    pairs, triples = load(path).report, load(path, format="nli_triples").report
    assert (pairs.rows_in, triples.rows_in, triples.examples) == (167_131, 167_131, 43_768)
    assert pairs.rows_used == triples.rows_used + triples.dropped["unpaired"]
    dev = load(data_dir / "stsb" / "dev.tsv", score_range=(0, 5))
    assert len(dev.examples) == 1500
    assert dev.examples[1] == ScoredPair("A young child is riding a horse.", "A child is riding a horse.", 0.95)


def test_a_label_with_a_name_beside_it_is_no_score_unless_it_is_named(tmp_path: Path) -> None:
    """As in SetFit/rte, where 0 is entailment."""
    row = {"text1": "Who?", "text2": "He did.", "label": 0, "label_text": "entailment"}
    path = write(tmp_path / "x.jsonl", row)
    with pytest.raises(DataError, match=r"its numbers are the labels of label_text.*format nli_pairs"):
        load(path)
    with pytest.raises(DataError, match="its numbers are the labels of label_text") as error:  # as `eval sts`
        load(path, format="scored_pair")
    assert "format" not in str(error.value)
    data = load(path, columns={"score": "label"}, score_range=(1, 0))
    assert data.examples == [ScoredPair("Who?", "He did.", 1.0)]


def test_labels_beside_two_sentences_are_scores(tmp_path: Path) -> None:
    data = load(write(tmp_path / "x.jsonl", {"sentence1": "a", "sentence2": "b", "labels": 0}))
    assert data.examples == [ScoredPair("a", "b", 0.0)]


def test_a_list_of_labels_in_a_table_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("text,label\nA text,\"['joy', 'love']\"\n", encoding="utf-8")
    _, rejected = outcomes(path)
    assert len(rejected) == 1

"""`angle-llm data check`: findings, evaluation sets, tokens, exit codes, and the cleaned copies of `--fix`."""

import gzip
import json
import re
import shlex
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from evaluate_samples import parsed
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tiny import save_tiny_adapter, save_tiny_base

from angle_llm import cli
from angle_llm.data import DataError, ScoredPair
from angle_llm.data.examples import load_examples, open_examples
from angle_llm.data.formats import texts_of
from angle_llm.data.leakage import read_evaluation_sets
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.settings.commands import CheckSettings
from angle_llm.settings.encoder import CommandSource
from angle_llm.settings.parsing import SettingsError, load_settings, parse_settings
from angle_llm.settings.train import DataSource, ModelSettings, TrainSettings
from angle_llm.tools.quality import FileReport, check_files, open_tokens, write_fixed

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
PAIR = {"text1": "A man eats.", "text2": "Someone eats.", "score": 1}
OTHER = {"text1": "A dog runs.", "text2": "Nobody runs.", "score": 0}


def write(path: Path, *rows: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def checked(*paths: str, against: Sequence[str | Path] = (), **reading: Any) -> list[tuple[CommandSource, FileReport]]:
    sources = [CommandSource(path=path, **reading) for path in paths]
    reports = check_files(sources, None, read_evaluation_sets(against)[0] if against else [])
    return list(zip(sources, reports, strict=True))


def reports(*paths: str, **options: Any) -> list[FileReport]:
    return [report for _, report in checked(*paths, **options)]


def found(report: FileReport) -> dict[str, int]:
    """All findings but "short": many texts here are single letters."""
    return {finding.kind: finding.count for finding in report.findings if finding.kind != "short"}


def places(report: FileReport) -> list[str]:
    return [place for finding in report.findings for place in finding.places]


def text_of(report: FileReport) -> str:
    return "\n".join(f"{name}: {value}" for name, value in report.lines())


def data(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.run(["data", "check", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def printed_trainings(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    """The flags of the training commands that a check prints."""
    data(*arguments)
    return [shlex.split(flags) for flags in re.findall(r"to train +angle-llm train (.*)", capsys.readouterr().out)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_base("llama", tmp_path_factory.mktemp("base")))


def test_groups_are_compared(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"query": "q one", "pos": ["a b", "c d"], "neg": ["e"], "pos_scores": [1, 2], "neg_scores": [0]},
        {"query": "Q one!", "pos": ["c  D", "A b"], "neg": ["E."]},
        {"query": "q two", "pos": ["x y"], "neg": ["n", "X, y"]},
        {"query": "q three", "pos": ["u v"], "neg": []},
        {"query": "q four", "pos": [], "neg": ["n"]},
        {"query": "q four", "pos": ["w"], "neg": ["w"]},
        {"query": "q one", "pos": ["a b"], "neg": ["c d"]},
    ]
    ((_, report),) = files = checked(write(tmp_path / "g.jsonl", *rows))
    assert report.format == "group"
    # "X, y" is a positive of its row; "c d" is a positive of rows 1 and 2
    assert found(report) == {"rejected": 2, "contradiction": 4, "near duplicate": 1}
    assert report.removed == {1: "contradiction", 2: "contradiction", 3: "contradiction", 7: "contradiction"}
    (fixed,) = write_fixed(files, tmp_path, tmp_path)
    assert (fixed["kept"], fixed["quarantined"]) == (1, 6)
    (cleaned,) = reports(fixed["cleaned"])
    assert (cleaned.format, cleaned.rows_used, found(cleaned)) == ("group", 1, {})


def test_groups_repeat_each_other_in_any_order_of_their_texts(tmp_path: Path) -> None:
    group = {"query": "q", "positives": ["a", "b"], "negatives": ["c", "d"]}
    same = {**group, "positives": ["b", "a"], "negatives": ["d", "c"], "scores": [1, 2, 3, 4]}
    one = {**group, "negatives": ["c"]}
    (report,) = reports(write(tmp_path / "g.jsonl", group, same, one, {**one, "positives": ["a"]}))
    assert found(report) == {"duplicate": 1}
    triple = write(tmp_path / "t.jsonl", {"anchor": "q", "positive": "a", "negative": "c"})
    assert found(reports(str(tmp_path / "g.jsonl"), triple)[1]) == {"across files": 1}


QUERIES = [{"_id": "t1", "text": "How do I close a window?"}, {"_id": "t2", "text": "Crash"}]
CORPUS = [
    {"_id": "d1", "title": "Closing", "text": "press the red button in the corner"},
    {"_id": "d2", "title": "", "text": "the program stops when it starts"},
    {"_id": "d3", "title": "", "text": "nobody asks for this long text"},
]


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    folder = tmp_path / "sets" / "beir"
    write(folder / "queries.jsonl", *QUERIES)
    write(folder / "corpus.jsonl", *CORPUS)
    write(folder / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore", "t1\td1\t1", "t1\td2\t0")
    write(folder / "qrels" / "dev.tsv", "query-id\tcorpus-id\tscore", "t2\td2\t2")
    write(folder / "qrels" / "train.tsv", "query-id\tcorpus-id\tscore", "t2\td3\t2")
    return folder


def test_pairs_and_queries_of_a_beir_folder_are_found(tmp_path: Path, beir: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "1", "query": "how do I close a window", "positive": "Closing: press the red button in the corner."},
        {"id": "2", "query": "How do I close a window?", "positive": "some other text"},
        {"id": "3", "query": "my question", "positive": "the program stops when it starts"},
        {"id": "t1", "query": "edited question", "positive": "some other text again"},
        {"id": "5", "query": "Crash", "positive": "nobody asks for this long text"},
    ]
    path = write(tmp_path / "pairs.jsonl", *rows)
    (report,) = reports(path, against=[f"{beir}@test"])
    assert report.removed == {1: "its pair is in beir@test", 2: "its query is in beir@test"}
    assert sorted((finding.kind, finding.count) for finding in report.findings if finding.kind != "short") == [
        ("contamination", 1), ("contamination", 1), ("sentences", 1),
    ]  # fmt: skip
    for against, name in ((beir, "beir"), (beir.parent, "beir"), (beir / ".." / "..", "sets/beir")):
        sets, skipped = read_evaluation_sets([against])
        assert [each.name for each in sets if each.name != "pairs.jsonl"] == [f"{name}@dev", f"{name}@test"]
        assert f"{name}@train (because of its name)" in skipped
    (report,) = reports(path, against=[beir])
    assert report.removed[5] == "its query is in beir@dev", "a short query is compared too"
    assert reports(f"{beir}@train", against=[beir])[0].removed == {2: "its query is in beir@dev"}
    assert found(reports(f"{beir}@test", against=[f"{beir}@test"])[0]) == {}


def test_a_task_of_mteb_is_no_evaluation_set_for_a_comparison() -> None:
    with pytest.raises(DataError, match=r"mteb:STSBenchmark: a task of MTEB is only for --evaluation\.tasks"):
        read_evaluation_sets(["mteb:STSBenchmark"])


def test_evaluation_sets_with_one_name_are_all_compared(tmp_path: Path, beir: Path) -> None:
    other = tmp_path / "sets" / "second" / "beir"
    write(other / "queries.jsonl", {"_id": "t1", "text": "Where do I find the red lamp?"})
    write(other / "corpus.jsonl", *CORPUS)
    write(other / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore", "t1\td1\t1")
    rows = [
        {"query": QUERIES[0]["text"], "positive": "some other text"},
        {"query": "Where do I find the red lamp?", "positive": "another text again"},
    ]
    path = write(tmp_path / "pairs.jsonl", *rows)
    (report,) = reports(path, against=[tmp_path / "sets"])
    assert report.removed == {1: "its query is in beir@test", 2: "its query is in second/beir@test"}
    (report,) = reports(path, against=[f"{beir}@test", f"{other}@test"])
    assert found(report)["sentences"] == 2, "one text of each set"


def test_all_columns_of_evaluation_sets_are_compared(tmp_path: Path) -> None:
    rows = [{"text1": f"Wo ist die Datei {n}?", "text2": f"Im Ordner {n}."} for n in range(3)]
    sets = [
        write(tmp_path / "b.jsonl", {"query": "q", "positive": "p", "frage": rows[2]["text1"], "x": rows[2]["text2"]}),
        write(tmp_path / "nli.jsonl", {"P": rows[1]["text2"], "hypothesis": rows[1]["text1"], "label": 1}),
        write(tmp_path / "c.jsonl", {"question": rows[0]["text1"], "answer": rows[0]["text2"]}),
    ]
    (report,) = reports(write(tmp_path / "a.jsonl", *rows), against=sets)
    assert report.removed == {3: "its pair is in b.jsonl", 2: "its pair is in nli.jsonl", 1: "its pair is in c.jsonl"}
    with pytest.raises(DataError, match=r"--against: .*d\.jsonl: no usable row"):
        read_evaluation_sets([write(tmp_path / "d.jsonl", "{")])


def test_packed_and_damaged_beir_folders_are_not_passed_over(
    tmp_path: Path, beir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = beir / "qrels" / "test.tsv.gz"
    packed.write_bytes(gzip.compress((beir / "qrels" / "test.tsv").read_bytes()))
    (beir / "qrels" / "test.tsv").unlink()
    write(tmp_path / "sets" / "bad" / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore", "t1\td1\tx")
    monkeypatch.setenv("ANGLE_LLM_DATA", str(tmp_path))
    sets, skipped = read_evaluation_sets(["sets"])
    assert [each.name for each in sets] == ["beir@dev", "beir@test"]
    assert any(re.fullmatch(r"bad@test \(.*test\.tsv:2: score is 'x'.*\)", name) for name in skipped)
    assert [each.name for each in read_evaluation_sets(["sets/beir@test"])[0]] == ["beir@test"]


def test_groups_are_evaluation_sets(tmp_path: Path) -> None:
    row = {"query": "my query", "positives": ["x y", "one two"], "negatives": ["a bad text"]}
    against = write(tmp_path / "test.jsonl", row)
    pairs = [{"query": "My query", "answer": text} for text in ("One two!", "other", "a bad text")]
    (report,) = reports(write(tmp_path / "pairs.jsonl", *pairs), against=[against])
    assert set(report.removed) == {1, 3}


def test_bad_rows_are_counted_by_column_with_file_and_line(tmp_path: Path) -> None:
    """Numbers and values in a message are not different causes."""
    rows = [{"question": "How?", "answer": "So.", "grade": grade} for grade in (1, 0, 7, 8.5, "good", "bad", None)]
    path = write(tmp_path / "x.jsonl", *rows, {**rows[0], "answer": ""}, {**rows[0], "question": ""})
    columns = {"text1": "question", "text2": "answer", "score": "grade"}
    (report,) = reports(path, format="scored_pair", columns=columns, score_range=(0, 1))
    assert (report.trouble, report.rows_in, report.rows_used, report.rejected) == (True, 9, 2, 7)
    (text,) = (finding.text for finding in report.findings if finding.kind == "rejected")
    causes = re.findall(r"(\S+:\d+) \(1 of (\d)\): (\w+) \((\w+)\)", text)
    assert [cause[1:] for cause in causes[:2]] == [("2", "grade", "score")] * 2
    singles = {("1", "grade", "score"), ("1", "answer", "text2"), ("1", "question", "text1")}
    assert {cause[1:] for cause in causes[2:]} == singles
    assert {cause[0] for cause in causes} == {f"{path}:{line}" for line in (3, 5, 7, 8, 9)}


def test_a_copy_of_another_encoding_is_utf_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("wie", "Öffnen"), ("so", "schließen"), ("How?", "So.")]
    table = "".join(f"{question},{answer}\n" for question, answer in [("text1", "text2"), *rows])
    path = tmp_path / "x.csv"
    path.write_text(table, encoding="cp1252")
    fix = str(tmp_path / "out 2")
    assert data(str(path), "--model", "none") == 1
    assert "byte 0xd6 is not UTF-8" in capsys.readouterr().out
    data(str(path), "--model", "none", "--fix", fix, "--encoding", "cp1252")
    shown = capsys.readouterr().out
    (train,) = re.findall(r"angle-llm train (.*)", shown)
    reading = parse_settings(TrainSettings(), shlex.split(train), description="")
    examples = load_examples(DataSource(path=reading.data.path, format=reading.data.format)).examples
    assert [texts_of(each) for each in examples] == [list(row) for row in rows]
    assert f"{fix}/x.jsonl" in train


@pytest.mark.parametrize(
    ("name", "content"),
    [("x.jsonl", ""), ("x.tsv", "text\tcategory\na\t1\n"), ("x.tsv", "text1\ttext2\n"), ("x.csv.gz", "no gzip")],
)
def test_unreadable_file_is_trouble_and_other_files_are_still_checked(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    bad, good = reports(str(tmp_path / name), write(tmp_path / "good.jsonl", PAIR, OTHER))
    assert bad.trouble
    assert "unreadable" in found(bad)
    assert not good.trouble


def test_repeats_and_near_repeats_are_notes_with_the_earlier_row(tmp_path: Path) -> None:
    swapped = {"text1": PAIR["text2"], "text2": PAIR["text1"], "score": 1}
    first = write(tmp_path / "a.jsonl", PAIR, OTHER, PAIR, swapped, {**PAIR, "text1": "a MAN  eats ."})
    second = write(tmp_path / "b.jsonl", {**PAIR, "text1": "A man eats"}, {**OTHER, "text1": "A cat runs."})
    one, two = reports(first, second)
    assert (found(one), places(one)) == ({"duplicate": 2, "near duplicate": 1}, ["3 and 1", "4 and 1", "5 and 1"])
    assert (found(two), places(two)) == ({"across files": 1}, [f"1 and {first}:1"])
    assert not one.trouble
    _, again = reports(second, second)
    assert (found(again), places(again)) == ({"across files": 2}, [f"1 and {second}:1", f"2 and {second}:2"])


def test_pair_with_two_labels_is_trouble_in_any_order_and_file(tmp_path: Path) -> None:
    opposite = {"text1": "someone  eats", "text2": PAIR["text1"], "score": 0}
    first = write(tmp_path / "a.jsonl", PAIR, OTHER)
    second = write(tmp_path / "b.jsonl", OTHER | {"text1": "x y", "score": 1}, opposite)
    one, two = reports(first, second)
    assert found(one) == found(two) == {"contradiction": 1}
    assert (places(one), places(two)) == ([f"1 and {second}:2"], [f"2 and {first}:1"])
    assert f"(lines 1 and {second}:2)" in text_of(one)


TRIPLES = [
    {"anchor": "a dog", "positive": "an animal", "negative": "a cat"},
    {"anchor": "a dog", "positive": "a cat", "negative": "a car"},
    {"anchor": "a fish", "positive": "it swims", "negative": "It swims."},
    {"anchor": "a bird", "positive": "it flies", "negative": "A bird!"},
]


@pytest.mark.parametrize(
    ("rows", "findings", "shown"),
    [
        ([{**PAIR, "score": 0.9}, {**PAIR, "score": 0.5}, OTHER], {}, []),
        (TRIPLES, {"contradiction": 3, "unlike itself": 1}, ["1 and 2", "2 and 1", "3 and 3", "4"]),
        ([{**PAIR, "score": n % 2, "text2": str(n)} for n in range(20)] + [{**PAIR, "score": 99}], {"rejected": 1}, []),
    ],
)
def test_findings_of_labels(tmp_path: Path, rows: list[Any], findings: dict[str, int], shown: list[str]) -> None:
    (report,) = reports(write(tmp_path / "x.jsonl", *rows))
    assert (found(report), places(report)) == (findings, shown)
    assert report.trouble == bool(findings)


def test_rows_of_single_texts_are_trouble(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "x.jsonl", {"text": "A man eats."}, {"text": "A dog runs."})
    (report,) = reports(path, columns={"text1": "text", "text2": "text"})
    assert (report.trouble, found(report)) == (True, {"no pairs": 2})
    assert printed_trainings(capsys, path, "--columns", "text1", "text", "text2", "text", "--model", "none") == []
    both = write(tmp_path / "y.jsonl", {"text1": "A man eats.", "text2": "A man eats."}, {**PAIR, "score": None})
    assert not reports(both, format="positive_pair")[0].trouble


def test_pairs_with_one_low_score_are_trouble(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text1": f"a {n}", "text2": f"b {n}", "label": 0} for n in range(30)]
    path = write(tmp_path / "x.jsonl", *rows)
    (report,) = reports(path)
    assert (report.trouble, found(report)) == (True, {"no pairs": 30})
    assert printed_trainings(capsys, path, "--model", "none") == []
    assert not reports(path, score_range=(1, 0))[0].trouble


def test_the_printed_flags_read_the_same_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"q 1": "a", "text2": f"b {n}", "score": n % 6, "part": "xy"[n // 6]} for n in range(12)]
    path = write(tmp_path / "my rows.jsonl", *rows)
    reading = ["--columns", "text1", "q 1", "--where", "part", "x", "--score-range", "0", "5"]
    (flags,) = printed_trainings(capsys, path, *reading, "--model", "none")
    assert flags[:2] == ["--model.path", "MODEL"], "not the default model, which is large"
    source = parse_settings(TrainSettings(), flags).data
    assert source.score_range == (0, 5)
    assert len(load_examples(source).examples) == 6
    (report,) = reports(path, columns={"text1": "q 1"}, where={"part": "x"}, score_range=(0, 5))
    assert report.rows_used == 6


def test_files_that_commands_write_beside_their_output_are_no_evaluation_sets(tmp_path: Path) -> None:
    for name in ("test", "test.quarantine", "test.dropped"):
        write(tmp_path / f"{name}.jsonl", {"text1": "A man eats.", "text2": "He eats.", "score": 1})
    assert [tested.name for tested in read_evaluation_sets([tmp_path])[0]] == ["test.jsonl"]


def test_pair_of_an_evaluation_set_is_trouble_and_a_sentence_a_note(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    header = "sentence1\tsentence2\tscore"
    write(folder / "sts" / "sts12.test.tsv", header, "Someone eats .\ta man eats .\t4", "bad row")
    write(folder / "sts" / "sts12.train.tsv", header, "A dog runs.\tNobody runs.\t4")
    write(folder / "stsb" / "dev.jsonl", {"captions": ["the small dog runs home", "x"]})
    write(folder / "readme.txt", "a")
    long = {"text1": "The small dog runs home!", "text2": "y", "score": 0}
    (report,) = reports(write(tmp_path / "x.jsonl", PAIR, OTHER, long), against=[folder])
    assert found(report) == {"contamination": 1, "sentences": 1}
    assert "contamination: rows that contain a pair of sts/sts12.test.tsv: 1 (line 1)" in text_of(report)
    assert "also in evaluation sets: 1 in stsb/dev.jsonl" in text_of(report)
    (report,) = reports(write(tmp_path / "y.jsonl", PAIR, PAIR, OTHER), against=[folder])
    assert "rows that contain a pair of sts/sts12.test.tsv: 2 (lines 1, 2)" in text_of(report)
    sets, skipped = read_evaluation_sets([folder])
    assert [each.name for each in sets] == ["sts/sts12.test.tsv", "stsb/dev.jsonl"]
    for name, left_out in zip(("readme.txt", "sts/sts12.train.tsv", "sts/sts12.test.tsv"), skipped, strict=True):
        assert name in left_out


def test_file_is_not_compared_with_itself_and_missing_sets_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "rows" / "test.jsonl", PAIR, OTHER)
    for name in (path, f"{tmp_path}/rows@test"):
        assert found(reports(name, against=[path])[0]) == {}
    for name in ("valid", "held_out", "answers", "train"):
        write(tmp_path / "split" / f"{name}.jsonl", PAIR)
    assert [each.name for each in read_evaluation_sets([tmp_path / "split"])[0]] == ["held_out.jsonl", "valid.jsonl"]
    (tmp_path / "none").mkdir()
    for name in ("gone", "none"):
        with pytest.raises(DataError, match="--against"):
            read_evaluation_sets([tmp_path / name])


@pytest.mark.slow
def test_real_overlaps_are_the_published_ones(data_dir: Path) -> None:
    """STS-B train repeats 1,010, 1,864 and 1,107 test pairs of STS12, 14 and 15; SICK train 93 of its own test."""
    tests = [data_dir / "sts" / f"sts{year}.test.tsv" for year in (12, 14, 15)]
    (stsb,) = reports(str(data_dir / "stsb" / "train.tsv"), against=tests, score_range=(0, 5))
    (sick,) = reports(
        str(data_dir / "sick" / "train.tsv"), against=[data_dir / "sick" / "test.tsv"], score_range=(1, 5)
    )
    assert [each.count for each in stsb.findings if each.kind == "contamination"] == [1010, 1864, 1107]
    assert found(sick)["contamination"] == 93


def test_tokens_are_those_of_the_encoder(base: str, tmp_path: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(base, prompt="prompteol", max_length=60)
    encoder.save_pretrained(tmp_path / "saved")
    tokens = open_tokens(ModelSettings(path=str(tmp_path / "saved")))
    assert tokens.tokenizers.selected.prompt == encoder.prompt
    assert (tokens.encoder.pooling, tokens.encoder.max_length) == ("last", 60)
    assert tokens.tokenizers.selected(["A man eats."]) == encoder.tokenize(["A man eats."])
    (ids,) = encoder.tokenize(["A man eats."])
    shown = tokens.render("A man eats.").split("|")
    assert (len(shown), shown[-1]) == (len(ids), f"⟦{encoder.tokenizer.decode([ids[-1]])}⟧")


def test_lengths_and_truncation_are_those_of_the_encoder(base: str, tmp_path: Path) -> None:
    texts = ["word " * count + "end" for count in (1, 5, 60)]
    path = write(tmp_path / "x.jsonl", *({"text1": text, "text2": "one"} for text in texts))
    (report,) = check_files([DataSource(path=path)], open_tokens(ModelSettings(path=base, max_length=50)), [])
    whole = SentenceEncoder.from_pretrained(base, max_length=128)
    lengths = sorted(len(ids) for ids in whole.tokenize([*texts, "one"]))
    assert report.tokens["shortest"] == lengths[0]
    assert report.tokens["longest"] >= lengths[-1]
    assert (report.max_length, report.truncated) == (50, sum(length > 50 for length in lengths))
    assert len(report.examples) == 4


def test_printed_trainings_are_recommended_and_run(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoders on triples as in recipes/starter.yaml, and on graded pairs as in the README; a saved adapter keeps its own
    settings. test_guides.py has the pairs of the guide."""
    monkeypatch.chdir(tmp_path)
    triples, grades = "my triples.jsonl", "grades.jsonl"
    write(Path(triples), *({"anchor": f"a {n}", "positive": f"b {n}", "negative": f"c {n}"} for n in range(4)))
    write(Path(grades), *({"text1": f"a {n}", "text2": f"b {n}", "rating": n + 1} for n in range(5)))
    write(Path("ones.jsonl"), *({"text1": f"a {n}", "text2": f"b {n}", "score": 1} for n in range(3)))
    adapter = str(save_tiny_adapter(Path(base), tmp_path / "adapter"))
    graded = ["--format", "scored_pair", "--columns", "score", "rating", "--score-range", "1", "5"]
    (on_triples,) = printed_trainings(capsys, triples, "--model", base, "--max-length", "40")
    (on_grades,) = printed_trainings(
        capsys, grades, *graded, "--model", base, "--prompt", "query", "plain", "document", "prompteol"
    )
    (continued,) = printed_trainings(capsys, grades, *graded, "--model", adapter)
    (equal,) = printed_trainings(capsys, "ones.jsonl", "--model", base)
    assert not any("lora" in flag for flag in continued)
    starter = load_settings(TrainSettings, "starter")
    lines = re.findall(r"^angle-llm train ((?:.*\\\n)*.*)", README, re.MULTILINE)
    (line,) = (line for line in lines if "--objective.cosine-weight" in line)
    readme = parse_settings(TrainSettings(), shlex.split(line.replace("\\\n", " ")))
    for flags, expected in ((on_triples, starter), (on_grades, readme), (continued, readme), (equal, starter)):
        found = parse_settings(TrainSettings(), flags)
        assert found.objective == expected.objective
        assert found.optimizer == expected.optimizer
        assert flags is continued or found.lora == expected.lora
    for flags in (on_grades, continued):
        cli.run(["train", *flags, "--model.dtype", "float32", "--max-steps", "1", "--run-dir", f"run {len(flags)}"])
    found = parse_settings(TrainSettings(), on_grades)
    assert (found.data.score_range, found.data.columns) == ((1, 5), {"score": "rating"})
    assert found.model.prompt == {"query": "plain", "document": "prompteol"}
    assert parse_settings(TrainSettings(), on_triples).model.max_length == 40


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(24, (None, 16, 5e-4, 32)), (96, (4, 32, 1e-4, 128))],  # more than 1 and 4 billion weights
)
def test_settings_follow_the_size_of_a_decoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layers: int, expected: tuple[object, ...]
) -> None:
    folder = save_tiny_base("llama", tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": layers})
    )
    (flags,) = printed_trainings(capsys, write(tmp_path / "x.jsonl", PAIR, OTHER), "--model", str(folder))
    found = parse_settings(TrainSettings(), flags)
    assert (found.model.bits, found.lora.rank, found.optimizer.learning_rate, found.batch_size) == expected


def test_cleaned_rows_are_json(tmp_path: Path) -> None:
    """Times are texts; a number that is none is null."""
    table = {"text1": ["a", "a"], "text2": ["b", "b"], "at": [datetime(2026, 1, 2)] * 2, "size": [float("nan"), 1.0]}
    parquet.write_table(pyarrow.table(table), tmp_path / "x.parquet")
    assert data(str(tmp_path / "x.parquet"), "--model", "none", "--fix", str(tmp_path / "out")) == 0
    (line,) = (tmp_path / "out" / "x.jsonl").read_text().splitlines()
    assert line == '{"text1": "a", "text2": "b", "at": "2026-01-02 00:00:00", "size": null}'
    decimals = pyarrow.array([Decimal("0.50"), Decimal("1.00")])
    table = {"text1": ["a", "b"], "text2": ["c", "d"], "score": decimals}
    parquet.write_table(pyarrow.table(table), tmp_path / "y.parquet")
    assert data(str(tmp_path / "y.parquet"), "--fix", str(tmp_path / "copies")) == 0
    rows = (tmp_path / "copies" / "y.jsonl").read_text().splitlines()
    assert [json.loads(row)["score"] for row in rows] == [0.5, 1.0]


texts = st.sampled_from(["a", "A.", "b", "c d", "", " ", "\0", "\ud800", "🙂", "🙁", "é"])
rows = st.one_of(
    st.fixed_dictionaries({"text1": texts, "text2": texts, "score": st.sampled_from([0, 1, 0.4, 5, None, True])}),
    st.sampled_from(["{", "[]", '{"text1": 1, "text1": 2}']),
)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(rows, max_size=12))
def test_every_row_is_kept_or_quarantined(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("fix")
    files = checked(write(folder / "x.jsonl", PAIR, OTHER, *rows))
    report = files[0][1]
    (folder / "out").mkdir()
    (fixed,) = write_fixed(files, folder / "out", folder / "out")
    text_of(report).encode()
    assert report.rows_in == report.rows_used + sum(report.dropped.values()) + report.rejected == len(rows) + 2
    assert fixed["rows_in"] == fixed["kept"] + fixed["quarantined"] == report.rows_in
    assert len((folder / "out" / "x.jsonl").read_text().splitlines()) == fixed["kept"]
    assert len((folder / "out" / "x.quarantine.jsonl").read_text().splitlines()) == fixed["quarantined"]
    if fixed["kept"]:
        (again,) = reports(str(folder / "out" / "x.jsonl"))
        assert not {"rejected", "duplicate", "near duplicate", "contradiction", "unlike itself"} & set(found(again))


@pytest.mark.parametrize(
    "names",
    [
        ("a/x.jsonl", "b/x.jsonl", "c/x-2.jsonl", "d/x.quarantine.jsonl"),
        ("d/x.quarantine.jsonl", "c/x-3.jsonl", "a/x.jsonl", "b/x.jsonl"),
    ],
)
def test_files_with_one_name_do_not_overwrite_each_other(tmp_path: Path, names: Sequence[str]) -> None:
    rows = [{"text1": f"a man eats {number}", "text2": "b", "score": number / 4} for number in range(4)]
    paths = [write(tmp_path / name, row) for name, row in zip(names, rows, strict=True)]
    data(*paths, "--model", "none", "--fix", str(tmp_path / "out"))
    written = [path for path in (tmp_path / "out").glob("*.jsonl") if "reason" not in path.read_text("utf-8")]
    kept = [line for path in written for line in path.read_text("utf-8").splitlines()]
    assert sorted(json.loads(line)["text1"] for line in kept) == [row["text1"] for row in rows]


def test_numbers_that_are_read_as_numbers_stay_numbers(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    names = ClassLabel(names=["different", "equal"])
    features = Features(
        {"sentence1": Value("string"), "sentence2": Value("string"), "label": names, "topic": names, "kind": names}
    )
    rows = {"sentence1": ["a man eats", "a dog runs"], "sentence2": ["he starves", "it moves"], "label": [0, 1]}
    (tmp_path / "mrpc").mkdir()
    Dataset.from_dict(rows | {"topic": [1, 1], "kind": [0, 1]}, features=features).to_parquet(
        tmp_path / "mrpc" / "train.parquet"
    )
    reading = ("--columns", "score", "label", "--where", "topic", "equal")
    assert data(str(tmp_path / "mrpc"), "--model", "none", *reading, "--fix", str(tmp_path / "out")) == 0
    again: Any = {"columns": {"score": "label"}, "where": {"topic": "equal"}}
    examples = load_examples(DataSource(path=str(tmp_path / "out" / "mrpc.jsonl"), **again)).examples
    assert examples == [ScoredPair("a man eats", "he starves", 0.0), ScoredPair("a dog runs", "it moves", 1.0)]
    written = [json.loads(line) for line in (tmp_path / "out" / "mrpc.jsonl").read_text("utf-8").splitlines()]
    assert [row["kind"] for row in written] == ["different", "equal"], "a column that is not used"


def test_ambiguous_columns_of_an_evaluation_file_are_all_compared(tmp_path: Path) -> None:
    pair = {"text1": "how do I send the lamp back", "text2": "pack the lamp and send it to us"}
    path = write(tmp_path / "train.jsonl", pair, {"text1": "a", "text2": "a red book about cars and dogs"})
    ambiguous = {"question": pair["text1"], "answer": pair["text2"], "text": "another text of four words"}
    (report,) = reports(path, against=[write(tmp_path / "test.jsonl", ambiguous)])
    assert found(report) == {"contamination": 1, "sentences": 2}
    numbered = {"anchor": "x", "positive": "y", "negative": "z", "negative_2": "a red book about cars and dogs"}
    (report,) = reports(path, against=[write(tmp_path / "numbered.jsonl", numbered)])
    assert found(report) == {"sentences": 1}


def test_numbered_labels_keep_their_meaning(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    text, label = Value("string"), ClassLabel(names=["contradiction", "entailment"])
    order = Features({"premise": text, "hypothesis": text, "label": label})
    rows = {"premise": ["a man eats", "a dog runs"], "hypothesis": ["he starves", "it moves"], "label": [0, 1]}
    (tmp_path / "nli").mkdir()
    Dataset.from_dict(rows, features=order).to_parquet(tmp_path / "nli" / "train.parquet")
    assert data(str(tmp_path / "nli"), "--model", "none", "--fix", str(tmp_path / "out")) == 0
    examples = load_examples(DataSource(path=str(tmp_path / "out" / "nli.jsonl"))).examples
    assert examples == [ScoredPair("a man eats", "he starves", 0.0), ScoredPair("a dog runs", "it moves", 1.0)]


def test_single_texts_have_no_training_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row of the format text pairs a text with itself, which is no trouble."""
    (tmp_path / "texts.txt").write_text("A man eats.\nA dog runs fast, and a man eats slowly.\n")
    assert data(str(tmp_path / "texts.txt"), "--format", "text") == 0
    shown = capsys.readouterr().out
    assert "no trouble" in shown
    assert "to train" not in shown


def test_texts_that_are_probably_no_texts_are_counted(tmp_path: Path) -> None:
    answers = [
        "None",
        "None",
        "[deleted]",
        "n/a",
        "N/A",
        "-",
        "--",
        "<NA>",
        "#N/A",
        "?",
        "x y",
        "['a', 'b']",
        "None of them",
        "[1]",
    ]
    path = write(tmp_path / "a.jsonl", *({"text1": f"question {n}", "text2": text} for n, text in enumerate(answers)))
    (report,) = reports(path)
    assert {finding.kind: finding.count for finding in report.findings} == {"lists": 1, "short": 12}
    assert "texts that may stand for a missing text (remove their rows): 12; most often 'None': 2 ×, " in text_of(
        report
    )
    assert not report.trouble


def test_classes_are_counted_and_a_text_with_two_classes_is_a_contradiction(tmp_path: Path) -> None:
    rows = [{"text": f"Ticket {n}", "label": "ab"[n % 2]} for n in range(5)] + [{"text": "Ticket 9", "label": "c"}]
    path = write(
        tmp_path / "train.jsonl", *rows, {"text": "ticket 0!", "label": "b"}, {"text": "Ticket 1", "label": "b"}
    )
    other = write(tmp_path / "test.jsonl", {"text": "TICKET 3", "label": "b"}, {"text": "Ticket 9", "label": "a"})
    report, second = reports(path, other)
    assert (report.format, report.classes, report.scores) == ("labelled_text", {"b": 4, "a": 3, "c": 1}, {})
    assert found(report) == {"contradiction": 3, "duplicate": 1}
    assert found(second) == {"contradiction": 1, "across files": 1, "no pairs": 2}
    assert ("classes", "3: 'b': 4, 'a': 3, 'c': 1") in list(report.lines())
    assert found(reports(path, against=[other])[0])["contamination"] == 2, "an equal text, with any label"
    (one,) = reports(write(tmp_path / "one.jsonl", *rows[:5:2]))
    assert found(one) == {"no pairs": 3}
    assert not one.can_train
    (single,) = reports(write(tmp_path / "single.jsonl", *({"text": f"Ticket {n}", "label": n} for n in range(5))))
    assert found(single) == {"no pairs": 5}, "training stops, because no class has two texts"


def test_rows_with_different_instructions_neither_repeat_nor_contradict_each_other(tmp_path: Path) -> None:
    rows = [
        {"text1": "a text", "text2": "b text", "score": int(task == "topic"), "instruction": task}
        for task in ("topic", "style")
    ]
    assert found(reports(write(tmp_path / "two.jsonl", *rows))[0]) == {}
    rows += [rows[0], rows[1] | {"score": 1}]
    assert found(reports(write(tmp_path / "four.jsonl", *rows))[0]) == {"duplicate": 1, "contradiction": 2}
    classes = [{"text": f"text {n % 2}", "label": n, "instruction": "ab"[n // 2]} for n in range(4)]
    assert "contradiction" not in found(reports(write(tmp_path / "classes.jsonl", *classes))[0])


def test_texts_of_unknown_tokens_only_are_counted(tmp_path: Path) -> None:
    model = ModelSettings(path=str(save_tiny_base("bert", tmp_path / "base")))
    rows = [{"text1": "A man eats.", "text2": text} for text in ("👍", "🎉🎉", "Someone eats 👍")]
    (report,) = check_files([DataSource(path=write(tmp_path / "x.jsonl", *rows))], open_tokens(model), [])
    assert found(report)["unknown tokens"] == 2


def test_settings_of_a_model_need_a_model() -> None:
    with pytest.raises(SettingsError, match="belong to --model"):
        CheckSettings(files=("x.jsonl",), prompt="plain")


def test_labelled_texts_of_an_evaluation_set_are_found_also_with_numbers_as_labels(tmp_path: Path) -> None:
    columns = {"text": "body", "label": "category"}
    path = write(tmp_path / "train.jsonl", *({"body": f"Ticket {n}", "category": n % 2} for n in range(6)))
    other = write(tmp_path / "test.jsonl", {"body": "TICKET 3", "category": 1}, {"body": "ticket 9", "category": 1})
    sources = [CommandSource(path=path, columns=columns)]
    (report,) = check_files(sources, None, read_evaluation_sets([other], columns)[0])
    assert report.removed == {4: "its pair is in test.jsonl"}


@pytest.mark.parametrize(("rows", "expected"), [(639, (16, 3)), (640, (64, 1))])
def test_few_rows_get_small_batches_and_epochs(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: int, expected: tuple[int, int]
) -> None:
    path = write(tmp_path / "train.jsonl", *({"text1": f"a {n}", "text2": f"b {n}"} for n in range(rows)))
    (flags,) = printed_trainings(capsys, path, "--model", base)
    found = parse_settings(TrainSettings(), flags)
    assert (found.batch_size, found.epochs) == expected


@pytest.mark.parametrize(
    ("ratings", "is_noted"),
    [((0, 5, 4.5, 5, 0, 5), True), (("2", "3") * 3, True), (range(6), False), ((1, None, 1, 2, 1, 2), False)],
)
def test_numbers_beside_pairs_without_a_format_are_noted(
    tmp_path: Path, ratings: Sequence[object], is_noted: bool
) -> None:
    """Not a column of different numbers, such as an id, and not one with missing values."""
    rows = [{"text1": f"a dog {n}", "text2": f"b cat {n}", "rating": rating} for n, rating in enumerate(ratings)]
    path = write(tmp_path / "x.jsonl", *rows)
    (report,) = reports(path)
    assert ("not used" in found(report)) == is_noted
    if is_noted:
        (flags,) = re.findall(r"add (--format .*)", text_of(report))
        again: Any = parsed(CheckSettings, path, *shlex.split(flags))
        assert open_examples(again.source_of(path)).format == "scored_pair"


def test_recommended_command_learns_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "train.jsonl", *({"text": f"Ticket {n}", "label": "ab"[n % 2]} for n in range(5)))
    (flags,) = printed_trainings(capsys, path)
    objective = parse_settings(TrainSettings(), flags).objective
    assert (objective.class_weight, objective.in_batch_weight) == (1, 0)

"""`angle-llm data check`: findings, evaluation sets, tokens, exit codes, and the cleaned copies of `--fix`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import save_tiny_base

from angle_llm import cli
from angle_llm.check import CheckSettings, check_files, open_tokens
from angle_llm.config import DataSource, ModelSettings, TrainSettings, parse_settings
from angle_llm.data import ScoredPair
from angle_llm.data.examples import load_examples
from angle_llm.data.leakage import EvaluationSet, read_evaluation_sets
from angle_llm.data.quality import FileReport, write_fixed
from angle_llm.model.encoder import SentenceEncoder

PAIR = {"text1": "A man eats.", "text2": "Someone eats.", "score": 1}
OTHER = {"text1": "A dog runs.", "text2": "Nobody runs.", "score": 0}


def write(path: Path, *rows: object) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return str(path)


def checked(*paths: str, against: Sequence[str] = (), **reading: Any) -> list[FileReport]:
    sets = read_evaluation_sets(against)[0] if against else []
    return check_files(CheckSettings(paths, **reading), None, sets)[0]


def found(report: FileReport) -> dict[str, int]:
    return {finding.kind: finding.count for finding in report.findings}


def data(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.run(["data", "check", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def text_of(report: FileReport) -> str:
    return "\n".join(f"{name}: {value}" for name, value in report.lines())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_base("llama", tmp_path_factory.mktemp("base")))


# ------------------------------------------------------------------------------------------------ findings, one by one


def test_sound_rows_are_no_trouble(tmp_path: Path) -> None:
    (report,) = checked(write(tmp_path / "x.jsonl", {**PAIR, "id": 7}, {**OTHER, "id": 8}))
    assert not report.trouble
    assert report.findings == []
    assert (report.format, report.guessed, report.unused_columns) == ("scored_pair", True, ["id"])
    assert (report.rows_in, report.rows_used, report.dropped, report.rejected) == (2, 2, {}, 0)
    assert report.scores == {"0": 1, "1": 1}
    assert report.distinct_texts == 4


def test_bad_rows_are_trouble_with_their_places(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", PAIR, "{broken", {**PAIR, "score": True}, OTHER)
    (report,) = checked(path)
    assert (report.trouble, report.rows_in, report.rows_used, report.rejected) == (True, 4, 2, 2)
    (finding,) = report.findings
    assert finding.kind == "rejected"
    assert f"{path}:2: not a JSON object" in finding.text
    assert f"{path}:3: score is True" in finding.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", "", "no usable row"),
        ("x.tsv", "text\tlabel\na\t1\n", "single texts, as of a classification task"),
        ("x.tsv", "text1\ttext2\n", "no example is left"),
        ("x.doc", "a\n", "unknown file name extension"),
        ("x.csv.gz", "no gzip", "truncated or damaged"),
    ],
)
def test_what_cannot_be_read_is_trouble_and_the_other_files_are_still_checked(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    bad, good = checked(str(tmp_path / name), write(tmp_path / "good.jsonl", PAIR, OTHER))
    assert bad.trouble
    assert "unreadable" in found(bad)
    assert message in text_of(bad)
    assert not good.trouble


def test_repeated_rows_are_told_apart_from_near_repeats(tmp_path: Path) -> None:
    swapped = {"text1": PAIR["text2"], "text2": PAIR["text1"], "score": 1}
    spaced = {**PAIR, "text1": "a MAN  eats ."}
    first = write(tmp_path / "a.jsonl", PAIR, OTHER, PAIR, swapped, spaced)
    second = write(tmp_path / "b.jsonl", {**PAIR, "text1": "A man eats"}, {**OTHER, "text1": "A cat runs."})
    one, two = checked(first, second)
    assert found(one) == {"duplicate": 2, "near duplicate": 1}
    assert one.findings[0].places == ["3 and 1", "4 and 1"]
    assert found(two) == {"across files": 1}
    assert two.findings[0].places == [f"1 and {first}:1"]
    assert not one.trouble


def test_a_pair_labelled_both_ways_is_trouble_in_whatever_order_and_file(tmp_path: Path) -> None:
    opposite = {"text1": "someone  eats", "text2": PAIR["text1"], "score": 0}
    first = write(tmp_path / "a.jsonl", PAIR, OTHER)
    second = write(tmp_path / "b.jsonl", OTHER | {"text1": "x y", "score": 1}, opposite)
    one, two = checked(first, second)
    assert found(one) == {"contradiction": 1}
    assert one.findings[0].places == [f"1 and {second}:2"]
    assert found(two) == {"contradiction": 1}
    assert two.findings[0].places == [f"2 and {first}:1"]


def test_grades_that_differ_a_little_are_a_note(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {**PAIR, "score": 0.9}, {**PAIR, "score": 0.5}, OTHER)
    (report,) = checked(path)
    assert found(report) == {"other label": 2}
    assert not report.trouble


def test_a_text_that_is_positive_and_negative_of_one_anchor_is_trouble(tmp_path: Path) -> None:
    rows = [
        {"anchor": "a dog", "positive": "an animal", "negative": "a cat"},
        {"anchor": "a dog", "positive": "a cat", "negative": "a car"},
        {"anchor": "a fish", "positive": "it swims", "negative": "It swims."},
        {"anchor": "a bird", "positive": "it flies", "negative": "A bird!"},
    ]
    (report,) = checked(write(tmp_path / "x.jsonl", *rows))
    assert found(report) == {"contradiction": 3, "unlike itself": 1}
    assert report.findings[0].places == ["1 and 2", "2 and 1", "3 and 3"]
    assert report.findings[1].places == ["4"]


def test_a_neutral_row_that_another_row_calls_entailed_is_a_note(tmp_path: Path) -> None:
    nli = [{"premise": "a", "hypothesis": "b", "label": label} for label in (0, 1)]
    (report,) = checked(write(tmp_path / "x.jsonl", *nli, {"premise": "c", "hypothesis": "d", "label": 2}))
    assert found(report) == {"other label": 1}
    assert (report.rows_in, report.rows_used, report.dropped) == (3, 2, {"neutral": 1})


def test_scores_are_read_on_the_usual_scale_they_fit_and_the_scale_is_told(tmp_path: Path) -> None:
    for low, scale in ((0, (0, 5)), (1, (1, 5))):
        rows = [{**PAIR, "text2": f"text {n}", "score": score} for n, score in enumerate([low, 2.5, 4.8] * 5)]
        (report,) = checked(write(tmp_path / "x.jsonl", *rows))
        assert report.score_range == scale
        assert not report.trouble
        assert f"--data.score-range {low} 5" in report.train


def test_one_wild_score_does_not_change_the_scale(tmp_path: Path) -> None:
    rows = [{**PAIR, "text2": f"text {n}", "score": n % 2} for n in range(20)]
    (report,) = checked(write(tmp_path / "x.jsonl", *rows, {**PAIR, "score": 99}))
    assert (report.score_range, report.rejected) == (None, 1)


def test_three_classes_in_a_score_column_are_trouble(tmp_path: Path) -> None:
    rows = [{"sentence1": "a", "sentence2": f"b {n}", "label": n % 3} for n in range(6)]
    (report,) = checked(write(tmp_path / "x.jsonl", *rows))
    assert report.trouble
    assert "set --format nli_pairs" in text_of(report)


def test_a_label_column_of_an_unknown_name_is_noticed(tmp_path: Path) -> None:
    rows = [{"text1": "a", "text2": f"b {n}", "rating": n % 2, "id": n} for n in range(9)]
    (report,) = checked(write(tmp_path / "x.jsonl", *rows))
    assert report.format == "positive_pair"
    assert found(report) == {"label not read": 9}
    assert "--format scored_pair --columns score rating" in text_of(report)


def test_scores_that_are_all_the_same_are_noted(tmp_path: Path) -> None:
    (report,) = checked(write(tmp_path / "x.jsonl", PAIR, {**OTHER, "score": 1}))
    assert found(report) == {"one label": 2}


def test_the_flags_it_proposes_read_the_same_rows(tmp_path: Path) -> None:

    rows = [{"q 1": "a", "text2": f"b {n}", "score": n, "part": "x"} for n in range(6)]
    path = write(tmp_path / "my rows.jsonl", *rows)
    (report,) = checked(path, columns={"text1": "q 1"}, where={"part": "x"})

    source = parse_settings(TrainSettings(), shlex.split(report.train)).data
    assert source.score_range == (0, 5)
    assert len(load_examples(source).examples) == report.rows_used == 6


# ------------------------------------------------------------------------------------------------ evaluation sets


def sets_in(folder: Path) -> tuple[list[EvaluationSet], list[str]]:
    (folder / "sts").mkdir(parents=True)
    (folder / "stsb").mkdir()
    (folder / "sts" / "sts12.test.tsv").write_text(
        "sentence1\tsentence2\tscore\nSomeone eats .\ta man eats .\t4\nbad row\n", encoding="utf-8"
    )
    (folder / "sts" / "sts12.train.tsv").write_text("sentence1\tsentence2\tscore\nA dog runs.\tNobody runs.\t4\n")
    write(folder / "stsb" / "dev.jsonl", {"captions": ["the small dog runs home", "x"]})
    (folder / "readme.txt").write_text("a")
    return read_evaluation_sets([folder])


def test_a_pair_of_an_evaluation_set_is_trouble_and_a_sentence_a_note(tmp_path: Path) -> None:
    sets_in(tmp_path / "data")
    long = {"text1": "The small dog runs home!", "text2": "y", "score": 0}
    path = write(tmp_path / "x.jsonl", PAIR, OTHER, long)
    (report,) = checked(path, against=[str(tmp_path / "data")])
    assert found(report) == {"contamination": 1, "sentences": 1}
    assert "1 rows hold a pair of sts/sts12.test.tsv (lines 1)" in text_of(report)
    assert "occur in stsb/dev.jsonl 1" in text_of(report)


def test_training_files_of_a_folder_are_skipped_and_reported(tmp_path: Path) -> None:
    sets, skipped = sets_in(tmp_path / "data")
    assert [each.name for each in sets] == ["sts/sts12.test.tsv", "stsb/dev.jsonl"]
    assert skipped == ["readme.txt", "sts/sts12.train.tsv", "1 unreadable rows of sts/sts12.test.tsv"]


def test_a_file_is_not_held_against_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "test.jsonl", PAIR, OTHER)
    assert found(checked(path, against=[path])[0]) == {}


def test_evaluation_sets_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gone"):
        read_evaluation_sets([tmp_path / "gone"])
    with pytest.raises(ValueError, match="no evaluation set found"):
        read_evaluation_sets([tmp_path])


# ------------------------------------------------------------------------------------------------ what the model sees


def test_texts_are_shown_token_by_token_with_the_pooled_one_marked(base: str) -> None:
    tokens = open_tokens(ModelSettings(path=base))
    encoder = SentenceEncoder.from_pretrained(base)
    (ids,) = encoder.tokenize(["A man eats."])
    shown = tokens.render("A man eats.").split("|")
    assert len(shown) == len(ids)
    assert shown[-1] == f"⟦{encoder.tokenizer.decode([ids[-1]])}⟧"
    assert "\n" not in tokens.render("A\nman")


def test_a_saved_encoder_is_worded_by_its_card(base: str, tmp_path: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(base, prompt="prompteol", max_length=60)
    encoder.save_pretrained(tmp_path / "saved")
    tokens = open_tokens(ModelSettings(path=str(tmp_path / "saved")))
    assert (tokens.tokenize.prompt, tokens.pooling, tokens.max_length) == (encoder.prompt, "last", 60)
    assert tokens.tokenize(["A man eats."]) == encoder.tokenize(["A man eats."])


def test_lengths_and_truncation_are_those_of_the_encoder(base: str, tmp_path: Path) -> None:
    texts = ["word " * count + "end" for count in (1, 5, 60)]
    path = write(tmp_path / "x.jsonl", *({"text1": text, "text2": "one"} for text in texts))
    tokens = open_tokens(ModelSettings(path=base, max_length=50))
    (report,) = check_files(CheckSettings((path,)), tokens, [])[0]

    whole = SentenceEncoder.from_pretrained(base, max_length=128)
    lengths = sorted(len(ids) for ids in whole.tokenize([*texts, "one"]))
    assert report.tokens["shortest"] == lengths[0]
    assert report.tokens["longest"] >= lengths[-1]
    assert (report.max_length, report.truncated) == (50, sum(length > 50 for length in lengths))
    assert found(report)["truncated"] == report.truncated
    assert len(report.examples) == 4


# ------------------------------------------------------------------------------------------------ the command


def test_the_exit_code_is_1_for_trouble_and_0_for_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "good.jsonl", PAIR, OTHER, OTHER)
    bad = write(tmp_path / "bad.jsonl", PAIR, "{", OTHER)
    assert data(good, "--model", "none") == 0
    assert "no trouble" in capsys.readouterr().out
    assert data(good, bad, "--model", "none") == 1
    assert "trouble in 1 of 2 files" in capsys.readouterr().out


def test_json_holds_what_the_text_says(tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = data(write(tmp_path / "x.jsonl", PAIR, OTHER, PAIR), "--model", base, "--json")

    content = json.loads(capsys.readouterr().out)
    (file,) = content["files"]
    assert (code, content["trouble"], file["rows_in"], file["format"]) == (0, False, 3, "scored_pair")
    assert file["findings"][0]["kind"] == "duplicate"
    assert all("⟦" in example for example in file["examples"])


def test_without_a_model_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("angle_llm.check.USUAL_MODEL", "package:no_such_package/x.gguf")
    assert data(write(tmp_path / "x.jsonl", PAIR, OTHER)) == 0
    assert "no tokens are counted" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ real data


@pytest.mark.slow
def test_real_overlaps_are_the_published_ones(data_dir: Path) -> None:
    """STS-B train repeats 1,010, 1,864 and 1,107 test pairs of STS12, 14 and 15; SICK train 93 of its own test."""
    tests = [data_dir / "sts" / f"sts{year}.test.tsv" for year in (12, 14, 15)]
    (stsb,) = checked(str(data_dir / "stsb" / "train.tsv"), against=[str(path) for path in tests])
    (sick,) = checked(str(data_dir / "sick" / "train.tsv"), against=[str(data_dir / "sick" / "test.tsv")])
    assert [each.count for each in stsb.findings if each.kind == "contamination"] == [1010, 1864, 1107]
    assert found(sick)["contamination"] == 93


# ------------------------------------------------------------------------------------------------ cleaned copies


def test_fix_writes_what_is_sound_and_what_is_not_with_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nli = [{"premise": "a", "hypothesis": f"b {n}", "label": n % 3, "id": n} for n in range(6)]
    path = write(tmp_path / "nli.jsonl", *nli, nli[0], {**nli[2], "label": 0}, "{", {**nli[3], "hypothesis": "\ud800"})
    out = tmp_path / "out"
    assert data(path, "--model", "none", "--fix", str(out)) == 1
    kept = [json.loads(line) for line in (out / "nli.jsonl").read_text().splitlines()]
    gone = [json.loads(line) for line in (out / "nli.quarantine.jsonl").read_text().splitlines()]
    assert kept == [nli[0], nli[1], nli[3], nli[4], nli[5]]  # neutral rows stay
    assert [(row["line"], row["reason"].split(" ")[0]) for row in gone] == [
        (3, "contradiction"),
        (7, "duplicate"),
        (8, "contradiction"),
        (9, "not"),
        (10, "hypothesis"),
    ]
    assert gone[2]["row"] == {**nli[2], "label": 0}
    assert gone[3]["row"] is None
    assert "10 rows = 5 kept in" in capsys.readouterr().out
    assert data(str(out / "nli.jsonl"), "--model", "none") == 0


def test_fix_takes_contaminated_rows_out(tmp_path: Path) -> None:
    test = write(tmp_path / "test.jsonl", PAIR)
    path = write(tmp_path / "x.jsonl", PAIR, OTHER)
    data(path, "--model", "none", "--against", test, "--fix", str(tmp_path / "out"))
    assert (tmp_path / "out" / "x.jsonl").read_text() == json.dumps(OTHER) + "\n"
    assert "its pair is in test.jsonl" in (tmp_path / "out" / "x.quarantine.jsonl").read_text()


def test_fix_leaves_a_folder_that_holds_something_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")

    with pytest.raises(ValueError, match="--fix"):
        cli.run(["data", "check", write(tmp_path / "x.jsonl", PAIR), "--fix", str(tmp_path / "out"), "--model", "none"])


texts = st.sampled_from(["a", "A.", "b", "c d", "", " ", "\0", "\ud800", "🙂", "🙁", "é"])
rows = st.one_of(
    st.fixed_dictionaries({"text1": texts, "text2": texts, "score": st.sampled_from([0, 1, 0.4, 5, None, True])}),
    st.sampled_from(["{", "[]", '{"text1": 1, "text1": 2}']),
)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(rows, max_size=12))
def test_every_row_is_kept_or_quarantined(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("fix")
    path = write(folder / "x.jsonl", PAIR, OTHER, *rows)
    settings = CheckSettings((path,))
    reports, sources = check_files(settings, None, [])
    (report,) = reports
    (folder / "out").mkdir()
    (fixed,) = write_fixed([(sources[0], report)], folder / "out", folder / "out")

    text_of(report).encode()
    assert report.rows_in == report.rows_used + sum(report.dropped.values()) + report.rejected == len(rows) + 2
    assert fixed["rows_in"] == fixed["kept"] + fixed["quarantined"] == report.rows_in
    assert len((folder / "out" / "x.jsonl").read_text().splitlines()) == fixed["kept"]
    assert len((folder / "out" / "x.quarantine.jsonl").read_text().splitlines()) == fixed["quarantined"]
    if fixed["kept"]:
        range_kept = report.score_range
        again = checked(str(folder / "out" / "x.jsonl"), score_range=range_kept)[0]
        assert not {"rejected", "duplicate", "near duplicate", "contradiction", "unlike itself"} & set(found(again))


def test_files_of_one_name_do_not_write_over_each_other(tmp_path: Path) -> None:
    paths = []
    for number, name in enumerate(("a/x.jsonl", "b/x.jsonl", "c/x-2.jsonl", "d/x.quarantine.jsonl")):
        (tmp_path / name).parent.mkdir()
        row = {"text1": f"a man eats {number}", "text2": "b", "score": number / 4}
        paths.append(write(tmp_path / name, row))
    data(*paths, "--model", "none", "--fix", str(tmp_path / "out"))
    written = [path for path in (tmp_path / "out").glob("*.jsonl") if "reason" not in path.read_text("utf-8")]
    kept = [line for path in written for line in path.read_text("utf-8").splitlines()]
    assert sorted(json.loads(line)["text1"] for line in kept) == [f"a man eats {number}" for number in range(4)]


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


def test_a_label_in_the_middle_contradicts_neither_end(tmp_path: Path) -> None:
    rows = [{"text1": "a man eats", "text2": "he has lunch", "score": score} for score in (1.0, 0.5, 0.2)]
    path = write(tmp_path / "x.jsonl", *rows)
    assert data(path, "--model", "none", "--fix", str(tmp_path / "out")) == 1
    (kept,) = (tmp_path / "out" / "x.jsonl").read_text("utf-8").splitlines()
    assert json.loads(kept)["score"] == 0.5


def test_test_files_of_a_senteval_download_are_evaluation_sets_and_training_files_are_not(tmp_path: Path) -> None:
    files = {
        "STS/STS12-en-test/STS.input.MSRpar.txt": "a man eats .\tsomeone eats .\ntwo\tthree\nred\tblue\textra\n",
        "STS/STS12-en-test/STS.gs.MSRpar.txt": "4.5\n\n0\n",
        "STS/STSBenchmark/sts-train.csv": "main-news\tx\t2013\t0002\t1.2\tOne.\tTwo.\n",
        "STS/STSBenchmark/sts-test.csv": "main-news\tx\t2013\t0002\t1.2\tOne test.\tTwo tests.\n",
        "SICK/SICK_train.txt": "pair_ID\tsentence_A\tsentence_B\trelatedness_score\n1\tA dog.\tA cat.\t3\n",
        "LICENSE.txt": "words\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    sets, skipped = read_evaluation_sets([tmp_path])
    assert [(each.name, len(each.pairs)) for each in sets] == [
        ("STS/STS12-en-test/STS.input.MSRpar.txt", 2),
        ("STS/STSBenchmark/sts-test.csv", 1),
    ]
    assert {"STS/STSBenchmark/sts-train.csv", "SICK/SICK_train.txt", "LICENSE.txt"} <= set(skipped)

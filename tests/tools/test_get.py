"""`data get`: every public set from the local hub, with small files of the same schema, and every refusal."""

import errno
import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hub_server import Hub, open_hub
from huggingface_hub import constants

from angle_llm import cli
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import DataError
from angle_llm.evaluate.retrieval_tasks import read_beir
from angle_llm.evaluate.sts_tasks import PUBLISHED_TASKS, StsPair, data_file, read_pairs, select_tasks
from angle_llm.settings.commands import GetSettings
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import DataSource
from angle_llm.tools.public_data import get
from angle_llm.tools.public_data.get import check_file, get_main, read_table

YEARS = {
    12: ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"),
    13: ("FNWN", "headlines", "OnWN"),
    14: ("deft-forum", "deft-news", "headlines", "OnWN", "images", "tweet-news"),
    15: ("answers-forums", "answers-students", "belief", "headlines", "images"),
    16: ("answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
}
SENTEVAL = "princeton-nlp/datasets-for-simcse"


def senteval_files() -> dict[str, str]:
    files = {}
    for year, subtasks in YEARS.items():
        for subtask in subtasks:  # the first pair has no score, as in 2015 and 2016
            files[f"STS/STS{year}-en-test/STS.input.{subtask}.txt"] = (
                f'not .\tscored .\nthe {subtask.lower()} .\t" of {year} .\n'
            )
            files[f"STS/STS{year}-en-test/STS.gs.{subtask}.txt"] = f"\n{year / 5}\n"
    for split in ("dev", "test"):
        files[f"STS/STSBenchmark/sts-{split}.csv"] = f"main-news\tf\t2012\t1\t2.500\ta {split} .\tb .\n"
    header = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"
    for name in ("train", "trial", "test_annotated"):
        files[f"SICK/SICK_{name}.txt"] = f"{header}1\tA {name} text .\tB\t3.5\tNEUTRAL\n"
    return files


def archive(files: dict[str, str], folder: str = "./senteval/") -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name, text in files.items():
            data = text.encode("latin-1")
            member = tarfile.TarInfo(folder + name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return content.getvalue()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), content)
    return content.getvalue()


def json_lines(rows: list[dict[str, Any]]) -> bytes:
    return gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())


def pair(text: str, score: float) -> dict[str, Any]:
    return {"genre": "main-news", "sid": "1", "score": score, "sentence1": f"{text} ", "sentence2": 'It is "quoted".'}


@cache
def sick() -> bytes:
    """All rows of SICK; scores are the numbers of the rows."""
    return json_lines([pair(f"Text {n}", n) for n in range(9927)])


def sources() -> dict[str, dict[str, bytes]]:
    """Repository → file → content: one to three rows with the columns of the real files."""
    triple = {"anchor": "NA", "positive": "Another 'dev' text, of STS-B .", "negative": "c"}
    simcse = 'sent0,sent1,hard_neg\n"a, ""b""",c,d\nAnother,text,here\n'
    files = {
        SENTEVAL: {"senteval.tar": archive(senteval_files()), "nli_for_simcse.csv": simcse.encode()},
        "mteb/stsbenchmark-sts": {
            f"{split}.jsonl.gz": json_lines([pair(f"Another {split} text of STS-B", 2.2)] * 2)
            for split in ("train", "validation", "test")
        },
        "mteb/sickr-sts": {"test.jsonl.gz": sick()},
        "sentence-transformers/all-nli": {
            f"triplet/{split}-00000-of-00001.parquet": parquet([triple | {"positive": f"Another {s} text of STS-B"}
                for s in ("validation", "train", "other", split)]) for split in ("train", "dev", "test")
        },
        "WhereIsAI/github-issue-similarity": {
            f"data/{split}-00000-of-00001.parquet": parquet([{"text1": split, "text2": "b", "label": 1}])
            for split in ("train", "valid", "test")
        },
    }  # fmt: skip
    for repo in (file.repo for file in read_table()["nanobeir"].files):
        files[repo] = {
            "corpus/train-00000-of-00001.parquet": parquet(
                [{"_id": f"d{n}", "text": f"document {n}"} for n in range(3)]
            ),
            "queries/train-00000-of-00001.parquet": parquet([{"_id": "q", "text": "question"}]),
            "qrels/train-00000-of-00001.parquet": parquet([{"query-id": "q", "corpus-id": f"d{n}"} for n in range(2)]),
        }
    return files


def digest(*values: str) -> str:
    return hashlib.sha256("\n".join(values).encode()).hexdigest()[:16]


def expectations() -> dict[str, list[Any]]:
    """Path → rows and fingerprint of the small files (SICK: scores), without code of the package."""
    expected: dict[str, list[Any]] = {
        f"sts_senteval_tok/sts{year}.test.jsonl": [len(names), digest(*[f"{year / 5:.6f}"] * len(names))]
        for year, names in YEARS.items()
    }
    expected |= {f"stsb_senteval_tok/{split}.jsonl": [1, digest("2.500000")] for split in ("dev", "test")}
    expected |= {f"stsb/{split}.jsonl": [2, digest("2.200000", "2.200000")] for split in ("train", "dev", "test")}
    expected["sick_senteval_tok/test.jsonl"] = [1, digest("3.500000")]
    ranges = {"train": range(4500), "trial": range(4500, 5000), "test": range(5000, 9927)}
    expected |= {f"sick/{split}.jsonl": [f"{n}.000000" for n in numbers] for split, numbers in ranges.items()}
    expected |= {f"all_nli/{split}.jsonl.gz": [4] for split in ("train", "dev", "test")}
    expected |= {f"gis/{split}.parquet": [1] for split in ("train", "valid", "test")}
    return expected | {"nli_simcse/train.jsonl.gz": [2]}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The table of the package with rows and fingerprints of the small files, except the ranges and rows of SICK."""
    values = yaml.safe_load(get.TABLE.read_text())
    expected = expectations()
    for entry in values["sets"].values():
        for file in entry.get("files", ()):
            file[2:] = [file[2], digest(*expected[file[0]])] if file[0].startswith("sick/") else expected[file[0]]
        for task in entry.get("tasks", ()):
            task[2:] = [3, 1, 2]
    path = tmp_path / "table.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    monkeypatch.setattr(get, "TABLE", path)
    return path


@pytest.fixture
def hub(tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The local hub with all repositories at the commits of the table."""
    server = open_hub(tmp_path / "cache", monkeypatch)
    commits = {file.repo: file.commit for entry in read_table().values() for file in entry.files}
    for repo, files in sources().items():
        server.put(f"datasets/{repo}", {})
        server.repos[f"datasets/{repo}"].commits[commits[repo]] = files
    return server


def replace_file(hub: Hub, repo: str, name: str, content: bytes) -> None:
    [files] = [files for files in hub.repos[f"datasets/{repo}"].commits.values() if name in files]
    files[name] = content


def test_every_set_is_written_in_a_layout_that_evaluations_read(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation_texts = Mock(wraps=get.evaluation_texts)
    monkeypatch.setattr(get, "evaluation_texts", evaluation_texts)
    data = tmp_path / "data"
    cli.run(["data", "get", "sts", "all-nli", "nli-simcse", "gis", "nanobeir", "--to", str(data)])
    printed = capsys.readouterr().out
    written = {path.relative_to(data).as_posix() for path in data.rglob("*") if path.is_file()}
    assert written == {file.path for entry in read_table().values() for file in entry.files}
    assert "sick: SICK-R train, trial and test, raw text. Download: 0.2 MB. License: CC BY-NC-SA 3.0" in printed
    assert printed.index("License") < printed.index("files are missing") < printed.index("sts12.test.jsonl: 5 rows")

    # STS, with all published tasks in SentEval's text
    tasks = {task.name: task for task in select_tasks((), data, "auto")}
    assert {name: task.variant for name, task in tasks.items()} == dict.fromkeys(PUBLISHED_TASKS, "senteval")
    assert tasks["sts13"].pairs[1] == StsPair("the headlines .", '" of 13 .', 2.6, "headlines")
    trial = read_pairs(data / "sick/trial.jsonl").pairs
    assert (trial[0], len(trial)) == (StsPair("Text 4500 ", 'It is "quoted".', 4500, "main-news"), 500)
    assert {task.name for task in select_tasks((), data, "raw")} == {"stsb", "sickr"}

    # Retrieval
    task = read_beir(data / "retrieval/NanoNQ")
    assert (task.name, task.queries, len(task.candidates), len(task.relevant[0])) == ("NanoNQ", ("question",), 3, 2)

    # Training data: sentences of evaluation sets are marked, those of STS-B train are not
    lines = gzip.decompress((data / "all_nli/train.jsonl.gz").read_bytes()).decode().splitlines()
    assert [json.loads(line)["sts_overlap"] for line in lines] == [1, 0, 0, 0]
    assert evaluation_texts.call_count == 1  # for four files of training data
    for path, rows in (("all_nli/dev.jsonl.gz", 3), ("nli_simcse/train.jsonl.gz", 2)):
        source = DataSource(path=str(data / path), format="triple", where={"sts_overlap": 0})
        examples = load_examples(source).examples
        assert len(examples) == rows
    assert (examples[0].anchor, examples[0].positive, examples[0].negative) == ('a, "b"', "c", "d")
    assert len(load_examples(DataSource(path=f"{data}/gis@valid")).examples) == 1


def test_training_data_get_the_evaluation_sets_and_a_repetition_gets_nothing(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = GetSettings(names=("nli-simcse",), to=tmp_path / "data")
    get_main(settings)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*.jsonl*")}
    assert len(files) == 5 + 3 + 6 + 1  # years, SentEval's STS-B and SICK, raw STS-B and SICK, triples
    (tmp_path / "data/stsb/dev.jsonl").unlink()
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    get_main(settings)  # from the cache
    assert "1 files are missing\n" in capsys.readouterr().out
    assert hub.requests == []
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*.jsonl*")}
    assert {path for path in files if after[path] != files[path]} == {tmp_path / "data/stsb/dev.jsonl"}


def test_a_file_with_other_rows_or_scores_is_refused_and_not_written(hub: Hub, tmp_path: Path) -> None:
    settings = GetSettings(names=("stsb", "sick"), to=tmp_path / "data")
    rows = [pair("Another test text of STS-B", 2.2)] * 2
    wrong = {
        "expected 2 rows with the fingerprint .* of score, got 1 rows": rows[:1],
        "expected 2 rows with the fingerprint (.*) of score, got 2 rows with the fingerprint (?!\\1)": [
            rows[0],
            pair("a", 1),
        ],
        "columns: sentence1, sentence2": [{"sentence1": "a", "sentence2": "b"}] * 2,
    }
    for message, lines in wrong.items():
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        replace_file(hub, "mteb/stsbenchmark-sts", "test.jsonl.gz", json_lines(lines))
        with pytest.raises(DataError, match=message):
            get_main(settings)
        assert not (tmp_path / "data/stsb/test.jsonl").exists()
    assert (tmp_path / "data/stsb/dev.jsonl").is_file()  # complete files are kept
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "data/sick/test.jsonl").unlink(missing_ok=True)
    replace_file(hub, "mteb/stsbenchmark-sts", "test.jsonl.gz", json_lines(rows))
    replace_file(hub, "mteb/sickr-sts", "test.jsonl.gz", json_lines([pair("Text", n) for n in range(9928)]))
    with pytest.raises(DataError, match=r", read as sick/test.jsonl: expected 4,927 rows .*Remove"):
        get_main(settings)


def test_a_set_without_gold_values_is_checked_by_its_rows(hub: Hub, tmp_path: Path) -> None:
    rows = [{"text1": "a", "text2": "b", "label": 1}] * 2
    name = "data/test-00000-of-00001.parquet"
    replace_file(hub, "WhereIsAI/github-issue-similarity", name, parquet(rows))
    with pytest.raises(DataError, match=r"read as gis/test.parquet: expected 1 rows, got 2 rows. It is"):
        get_main(GetSettings(names=("gis",), to=tmp_path / "data"))
    assert {path.name for path in (tmp_path / "data/gis").iterdir()} == {"train.parquet", "valid.parquet"}


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ("1", " expected 2 rows .*, got 1 rows .* Remove it"),
        ("None", "2: score is 'None', expected a finite number"),
    ],
)
def test_a_stale_file_in_the_data_directory_is_refused_and_not_replaced(
    score: str, message: str, hub: Hub, tmp_path: Path
) -> None:
    stale = tmp_path / "data/stsb/test.tsv"  # another format that evaluations read
    stale.parent.mkdir(parents=True)
    stale.write_text(f"sentence1\tsentence2\tscore\nA.\tB.\t{score}\n")
    with pytest.raises(DataError, match=f"stsb/test.tsv:{message}"):
        get_main(GetSettings(names=("stsb",), to=tmp_path / "data"))
    assert stale.read_text().endswith(f"A.\tB.\t{score}\n")
    assert hub.fetched() == set()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("offline", r"^mteb/stsbenchmark-sts/train.jsonl.gz: run the same command again; .*cannot find the requested"),
        ("repository", "Repository Not Found"),
    ],
)
def test_a_refusal_of_the_hub_writes_no_file(
    case: str, message: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        del hub.repos["datasets/mteb/stsbenchmark-sts"]
    with pytest.raises(OSError, match=message):
        get_main(GetSettings(names=("stsb",), to=tmp_path / "data"))
    assert not (tmp_path / "data").exists()


def test_an_interrupted_download_leaves_no_file_and_is_repeated(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = GetSettings(names=("stsb",), to=tmp_path / "data")
    hub.breaks_off = True
    monkeypatch.setattr("time.sleep", lambda _: None)  # of the retries of huggingface_hub
    with pytest.raises(ConnectionError, match=r"train.jsonl.gz: run the same command again"):
        get_main(settings)
    assert not (tmp_path / "data").exists()
    hub.breaks_off = False
    get_main(settings)
    assert len(read_pairs(tmp_path / "data/stsb/test.jsonl").pairs) == 2


def test_a_full_disk_is_not_reported_as_an_error_of_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def move(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.file_download._chmod_and_move", move)
    with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device$"):
        get_main(GetSettings(names=("stsb",), to=tmp_path / "data"))


def test_an_archive_cannot_write_outside_of_its_folder(hub: Hub, tmp_path: Path) -> None:
    evil = archive({"../../../outside.txt": "x"}, folder="")
    replace_file(hub, SENTEVAL, "senteval.tar", evil)
    with pytest.raises(tarfile.TarError, match=r"outside.txt.* would be extracted to .* outside the destination"):
        get_main(GetSettings(names=("sts12",), to=tmp_path / "data"))
    assert not list(tmp_path.rglob("outside.txt"))


def test_the_list_and_wrong_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cli.run(["data", "get"])
    printed = capsys.readouterr().out
    assert "sick          0.2 MB         SICK-R train, trial and test, raw text. License: CC BY-NC-SA 3.0" in printed
    assert all(f"\n{name} " in f"\n{printed}" for name in read_table())
    for arguments, message in (
        (["sts"], "--to: expected a folder"),
        (["--to", "x"], "--to: expected a data set"),
    ):
        with pytest.raises(SystemExit):
            cli.run(["data", "get", *arguments])
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    with pytest.raises(SettingsError, match=r"unknown data set 'sts17'. Did you mean 'sts1\d'\?"):
        cli.run(["data", "get", "sts17", "--to", "x"])


def test_the_table_describes_the_real_files(data_dir: Path) -> None:
    found = set()
    for name, entry in read_table().items():
        for file in entry.files:
            path = data_file(data_dir / file.path)
            if path.is_file():
                check_file(path, file, name)
                found.add(name)
    assert found >= {"sts12", "sts14", "sts15", "stsb-senteval", "stsb", "sick"}


def test_the_totals_of_sts12_to_sts16_agree_with_their_subtasks(data_dir: Path) -> None:
    if not (path := data_dir / "gold_fingerprints.json").is_file():
        pytest.skip("the data directory has no gold_fingerprints.json")
    published, sets = json.loads(path.read_text()), read_table()
    for name in (f"sts{year}" for year in YEARS):
        [file] = sets[name].files
        assert sum(rows for _, rows, _ in published[name]) == file.rows, name
        task = data_file(data_dir / file.path)
        if task.is_file():  # whose scores have the fingerprint of the table
            scores: dict[str, list[str]] = {}
            for pair in read_pairs(task).pairs:
                scores.setdefault(pair.subtask, []).append(f"{pair.score:.6f}")
            subtasks = [[name, len(values), digest(*values)] for name, values in scores.items()]
            assert sorted(subtasks) == sorted(published[name]), name

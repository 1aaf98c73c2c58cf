"""Transfer tasks: both layouts give the same examples, and errors name the file and line."""

import io
import tarfile
from pathlib import Path

import pytest
import senteval
from evaluate_samples import write as write_file
from hub_server import open_hub
from transfer_tasks import PUBLISHED_TRANSFER, TRANSFER_TASKS, available_transfer_tasks, read_transfer_task

MRPC = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
SPLITS = {"mr": ("all",), "cr": ("all",), "mpqa": ("all",), "subj": ("all",), "sst2": ("train", "dev", "test")}


def write(path: Path, *lines: str, encoding: str = "utf-8") -> None:
    write_file(path, "".join(f"{line}\n" for line in lines), encoding)


@pytest.mark.parametrize(
    ("name", "own", "theirs", "examples"),
    [
        *(
            (
                name,
                {f"transfer/{name}.tsv": ["text\tlabel", 'so  "good"\t1', "bad , café\t0"]},
                {f"{stem}{one}": ['so "good"', ""], f"{stem}{other}": ["bad , café", "  "]},
                [("bad , café", "0", ""), ('so "good"', "1", "")],
            )
            for name, stem, one, other in (
                ("mr", "MR/rt-polarity", ".pos", ".neg"),
                ("cr", "CR/custrev", ".pos", ".neg"),
                ("mpqa", "MPQA/mpqa", ".pos", ".neg"),
                ("subj", "SUBJ/subj", ".objective", ".subjective"),
            )
        ),
        (
            "sst2",
            {f"transfer/sst2.{split}.tsv": ["text\tlabel", "is fine\t1", "no\t0"] for split in SPLITS["sst2"]},
            {f"SST/binary/sentiment-{split}": ["is fine\t1", "no\t0"] for split in SPLITS["sst2"]},
            [("is fine", "1", ""), ("no", "0", "")],
        ),
        (
            "trec",
            {
                f"transfer/trec.{split}.tsv": ["text\tcoarse\tfine", "How far : ?\tNUM\tx"]
                for split in ("train", "test")
            },
            {f"TREC/{file}.label": ["NUM:dist How far : ?"] for file in ("train_5500", "TREC_10")},
            [("How far : ?", "NUM", "")],
        ),
        (
            "mrpc",
            {f"mrpc/{split}.tsv": ["sentence1\tsentence2\tlabel", 'A " b\tB a\t1'] for split in ("train", "test")},
            {f"MRPC/msr_paraphrase_{split}.txt": [MRPC, '1\t7\t8\tA " b\tB a'] for split in ("train", "test")},
            [('A " b', "1", "B a")],
        ),
    ],
)
def test_both_layouts_give_the_same_examples(
    tmp_path: Path,
    name: str,
    own: dict[str, list[str]],
    theirs: dict[str, list[str]],
    examples: list[tuple[str, str, str]],
) -> None:
    encoding = "utf-8" if name in ("sst2", "mrpc") else "latin-1"
    for file, lines in own.items():
        write(tmp_path / "own" / file, *lines)
    for file, lines in theirs.items():
        write(tmp_path / "theirs" / "downstream" / file, *lines, encoding=encoding)
    for folder in ("own", "theirs"):
        task = read_transfer_task(tmp_path / folder, name)
        assert tuple(task.splits) == SPLITS.get(name, ("train", "test"))
        assert all(sorted(rows) == examples for rows in task.splits.values())
        assert task.positive == ("1" if name == "mrpc" else None)
    texts = [text for text, _, second in examples for text in (text, second) if text]
    assert sorted(texts * len(task.splits)) == sorted(task.texts())


def test_a_task_with_a_missing_file_is_not_available(tmp_path: Path) -> None:
    write(tmp_path / "transfer" / "trec.train.tsv", "text\tcoarse", "Who ?\tHUM")
    write(tmp_path / "transfer" / "cr.tsv", "text\tlabel", "fine\t1")
    assert available_transfer_tasks(tmp_path) == ["cr"]
    with pytest.raises(FileNotFoundError, match=r"trec\.test\.tsv.*TREC_10\.label"):
        read_transfer_task(tmp_path, "trec")
    with pytest.raises(ValueError, match=r"'sst'.*'sst2'"):
        read_transfer_task(tmp_path, "sst")
    assert available_transfer_tasks(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("file", "lines", "message"),
    [
        ("SST/binary/sentiment-dev", ["no class here"], r"sentiment-dev:1"),
        ("SST/binary/sentiment-dev", ["three\t2"], r"sentiment-dev:1"),
        ("TREC/TREC_10.label", ["NUM"], r"TREC_10\.label:1"),
        ("MRPC/msr_paraphrase_test.txt", [MRPC, "1\t7\tonly"], r"msr_paraphrase_test\.txt:2.*3"),
        ("transfer/cr.tsv", ["text\tlabel", "fine\t1", " \t0"], r"cr\.tsv:3.*text"),
        ("transfer/cr.tsv", ["text\tlabel", "fine\t"], r"cr\.tsv:2.*label"),
        ("transfer/cr.tsv", ["text\tlabel"], r"cr\.tsv: no examples"),
    ],
)
def test_a_bad_line_is_reported_with_its_number(tmp_path: Path, file: str, lines: list[str], message: str) -> None:
    for split in ("train", "dev", "test"):
        write(tmp_path / "SST" / "binary" / f"sentiment-{split}", "fine\t1")
    write(tmp_path / "TREC" / "train_5500.label", "NUM:dist How far ?")
    write(tmp_path / "MRPC" / "msr_paraphrase_train.txt", MRPC, "1\t7\t8\ta\tb")
    write(tmp_path / file, *lines)
    with pytest.raises(ValueError, match=message):
        read_transfer_task(tmp_path, {"S": "sst2", "T": "trec", "M": "mrpc", "t": "cr"}[file[0]])


def test_the_real_files_have_the_published_sizes(data_dir: Path) -> None:
    for name in available_transfer_tasks(data_dir):
        task = read_transfer_task(data_dir, name)
        # SentEval counts blank lines of CR and MPQA as examples.
        assert sum(map(len, task.splits.values())) == (task.official or 0) - {"cr": 4, "mpqa": 3}.get(name, 0), name


def test_published_averages_are_the_means_of_their_rows() -> None:
    for row in PUBLISHED_TRANSFER:
        assert tuple(row.scores) == TRANSFER_TASKS
        assert sum(row.scores.values()) / 7 == pytest.approx(row.average, abs=0.006)


@pytest.mark.parametrize("around", ["./senteval/", "./", ""])
def test_downloaded_files_are_read(around: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = open_hub(tmp_path / "cache", monkeypatch)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for ending in ("pos", "neg"):
            member = tarfile.TarInfo(f"{around}CR/custrev.{ending}")
            member.size = 5
            tar.addfile(member, io.BytesIO(b"text\n"))
    hub.put(f"datasets/{senteval.REPOSITORY}", {})
    hub.repos[f"datasets/{senteval.REPOSITORY}"].commits[senteval.COMMIT] = {"senteval.tar": content.getvalue()}
    senteval.download(tmp_path)
    assert (tmp_path / "senteval/CR/custrev.pos").is_file()
    assert available_transfer_tasks(tmp_path) == ["cr"]
    assert [row.label for row in read_transfer_task(tmp_path, "cr").splits["all"]] == ["1", "0"]

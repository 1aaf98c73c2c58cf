"""Transfer tasks: both layouts give the same examples, and what is wrong in a file is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from evaluate_samples import write as write_file

from angle_llm.evaluate.transfer_tasks import (
    LabelledText,
    TransferTask,
    available_transfer_tasks,
    read_transfer_task,
)

BINARY = {"mr": "MR/rt-polarity", "cr": "CR/custrev", "mpqa": "MPQA/mpqa"}
MRPC = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"


def write(path: Path, *lines: str, encoding: str = "utf-8") -> None:
    write_file(path, "".join(f"{line}\n" for line in lines), encoding)


def examples(task: TransferTask) -> dict[str, list[LabelledText]]:
    return {split: sorted(rows) for split, rows in task.splits.items()}


@pytest.mark.parametrize("name", BINARY)
def test_both_layouts_give_the_same_examples_of_two_classes(tmp_path: Path, name: str) -> None:
    write(tmp_path / "own" / "transfer" / f"{name}.tsv", "text\tlabel", 'so  "good"\t1', "bad , café\t0")
    write(tmp_path / "theirs" / f"{BINARY[name]}.pos", 'so "good"', "", encoding="latin-1")
    write(tmp_path / "theirs" / f"{BINARY[name]}.neg", "bad , café", "  ", encoding="latin-1")
    own, theirs = (read_transfer_task(tmp_path / layout, name) for layout in ("own", "theirs"))
    assert examples(own) == examples(theirs) == {"all": [("bad , café", "0", ""), ('so "good"', "1", "")]}
    assert own.protocol == "cross_validation"


def test_subj_has_the_objective_sentences_as_class_one(tmp_path: Path) -> None:
    write(tmp_path / "SUBJ" / "subj.objective", "he  walks .")
    write(tmp_path / "SUBJ" / "subj.subjective", "he is dull .")
    assert read_transfer_task(tmp_path, "subj").splits["all"] == (("he walks .", "1", ""), ("he is dull .", "0", ""))


def test_both_layouts_give_the_same_splits_of_sst2(tmp_path: Path) -> None:
    for split in ("train", "dev", "test"):
        write(tmp_path / "downstream" / "SST" / "binary" / f"sentiment-{split}", f"{split} is fine\t1", "no\t0")
        write(tmp_path / "own" / "transfer" / f"sst2.{split}.tsv", "text\tlabel", f"{split} is fine\t1", "no\t0")
    packed = tmp_path / "own" / "transfer" / "sst2.train.jsonl.gz"
    (tmp_path / "own" / "transfer" / "sst2.train.tsv").unlink()
    rows = [{"text": "train is fine", "label": 1}, {"text": "no", "label": 0}]
    packed.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    own, theirs = read_transfer_task(tmp_path / "own", "sst2"), read_transfer_task(tmp_path, "sst2")
    assert examples(own) == examples(theirs)
    assert list(own.splits) == ["train", "dev", "test"]


def test_both_layouts_give_the_same_questions(tmp_path: Path) -> None:
    for split, file in {"train": "train_5500.label", "test": "TREC_10.label"}.items():
        write(tmp_path / "TREC" / file, f"NUM:dist How far is {split} : here ?", encoding="latin-1")
        write(
            tmp_path / "own/transfer" / f"trec.{split}.tsv",
            "text\tcoarse\tfine",
            f"How far is {split} : here ?\tNUM\tx",
        )
    assert examples(read_transfer_task(tmp_path, "trec")) == examples(read_transfer_task(tmp_path / "own", "trec"))


def test_both_layouts_give_the_same_paraphrases(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / "MRPC" / f"msr_paraphrase_{split}.txt", f"\ufeff{MRPC}", '1\t7\t8\tA " b\tB a')
        write(tmp_path / "own" / "mrpc" / f"{split}.tsv", "sentence1\tsentence2\tlabel", 'A " b\tB a\t1')
    own, theirs = read_transfer_task(tmp_path / "own", "mrpc"), read_transfer_task(tmp_path, "mrpc")
    assert examples(own) == examples(theirs)
    assert own.splits["test"] == (LabelledText('A " b', "1", "B a"),)
    assert own.positive == "1"
    assert list(own.texts())[:2] == ['A " b', "B a"]


def test_a_task_with_one_file_missing_is_not_there(tmp_path: Path) -> None:
    write(tmp_path / "transfer" / "trec.train.tsv", "text\tcoarse", "Who ?\tHUM")
    write(tmp_path / "transfer" / "cr.tsv", "text\tlabel", "fine\t1")
    assert available_transfer_tasks(tmp_path) == ["cr"]
    with pytest.raises(FileNotFoundError, match=r"trec\.test\.tsv.*TREC_10\.label.*: cr\."):
        read_transfer_task(tmp_path, "trec")
    with pytest.raises(ValueError, match=r"'sst'.*'sst2'"):
        read_transfer_task(tmp_path, "sst")
    with pytest.raises(FileNotFoundError, match=r"--data-dir.*nowhere"):
        available_transfer_tasks(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("SST/binary/sentiment-dev", "no class here", r"sentiment-dev:1"),
        ("SST/binary/sentiment-dev", "three\t2", r"sentiment-dev:1"),
        ("TREC/TREC_10.label", "NUM", r"TREC_10\.label:1"),
        ("MRPC/msr_paraphrase_test.txt", f"{MRPC}\n1\t7\tonly", r"msr_paraphrase_test\.txt:2.*3"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, file: str, line: str, message: str) -> None:
    for split in ("train", "dev", "test"):
        write(tmp_path / "SST" / "binary" / f"sentiment-{split}", "fine\t1")
    write(tmp_path / "TREC" / "train_5500.label", "NUM:dist How far ?")
    write(tmp_path / "MRPC" / "msr_paraphrase_train.txt", MRPC, "1\t7\t8\ta\tb")
    write(tmp_path / file, line)
    with pytest.raises(ValueError, match=message):
        read_transfer_task(tmp_path, {"S": "sst2", "T": "trec", "M": "mrpc"}[file[0]])


def test_an_empty_text_or_class_is_named(tmp_path: Path) -> None:
    write(tmp_path / "transfer" / "cr.tsv", "text\tlabel", "fine\t1", " \t0")
    with pytest.raises(ValueError, match=r"cr\.tsv:3.*text"):
        read_transfer_task(tmp_path, "cr")
    write(tmp_path / "transfer" / "cr.tsv", "text\tlabel", "fine\t")
    with pytest.raises(ValueError, match=r"cr\.tsv:2.*label"):
        read_transfer_task(tmp_path, "cr")


def test_the_real_files_have_the_published_sizes(data_dir: Path) -> None:
    for name in available_transfer_tasks(data_dir):
        task = read_transfer_task(data_dir, name)
        # SentEval counts blank lines of CR and MPQA as examples.
        assert sum(map(len, task.splits.values())) == (task.official or 0) - {"cr": 4, "mpqa": 3}.get(name, 0), name

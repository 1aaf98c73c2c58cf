"""`eval/llm_supervision.py` with tiny local models and a server on 127.0.0.1 with OpenAI's chat completions API."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from answer_pairs import FILTERS, Pair, drop_repeats, drop_surplus, why_dropped
from fake_server import Reply, Writer
from hypothesis import example, given
from hypothesis import strategies as st
from llm_supervision import generate, load_prompts, message
from programs import run
from tiny import save_tiny_base, tiny_causal_lm
from tiny_tokenizers import TOKENIZERS

from angle_llm import SentenceEncoder
from angle_llm.data import DataError
from angle_llm.data.examples import load_examples
from angle_llm.evaluate import spearman
from angle_llm.io import FolderError
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import DataSource
from angle_llm.tools import language_models
from angle_llm.tools.language_models import Journal, LlmRequest, Row
from angle_llm.tools.replies import read_answer

pytest.importorskip("openai", reason="pip install 'angle_llm[questions]'")
ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "eval/llm_supervision.py"

KEY = "sk-a-secret-that-is-never-printed"
SENTENCES = """A man is eating a piece of bread.
Two dogs run over the wet grass.
The company reported a large loss.
Nobody came to the meeting on Friday.
A woman is cutting some onions.
The plane landed in the small town."""


def usual(text: str, times: int) -> str:
    """Two sentences that differ between the sides."""
    words = text.partition("Input sentence: ")[2].partition(". Output:")[0].split()
    first, last = ("Once", "today") if "same-meaning" in text else ("Never", "tomorrow")
    return f"Sure! Here are 2:\n1. {' '.join([first, *words[1:]])}.\n2. {' '.join([*words, last])}."


class ChatServer(Writer):
    """Answers by `rule(message, number of earlier requests with it)`: a text, or a reply."""

    def __init__(self, rule: Callable[[str, int], str | Reply | None] = usual) -> None:
        super().__init__(rule)
        self.messages = Counter[str]()

    def answer(self, message: str) -> str | Reply | None:
        self.messages[message] += 1
        return self.rule(message, self.messages[message] - 1)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with ChatServer() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sentences.txt").write_text(SENTENCES)
    return tmp_path


def make(folder: Path, *names: str, flags: str = "", out: str = "pairs.jsonl") -> int:
    """Run `generate`; returns the exit code."""
    arguments = f"--sentences {folder / 'sentences.txt'} --out {folder / out} --size 2 --retries 1 {flags}"
    with pytest.raises(SystemExit) as ended:
        generate([*arguments.split(), "--llm", *names])
    return int(ended.value.code or 0)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers_in(journal: Path) -> list[list[Any]]:
    return [values for row in rows_of(journal) for _, *values in row["answers"]]


def report_of(folder: Path, name: str = "pairs") -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / f"{name}.report.json").read_text())
    return report


# ------------------------------------------------------------------------------------------------- a server


def test_the_pairs_train_and_the_report_covers_every_line(server: ChatServer, folder: Path) -> None:
    assert make(folder, server.name, flags="--limit 5") == 0
    rows = rows_of(folder / "pairs.jsonl")
    assert [row["row"] for row in rows] == [row for row in range(5) for _ in range(4)]
    assert {row["side"]: row["score"] for row in rows} == {"synonym": 1, "antonym": 0}
    assert len(load_examples(DataSource(path=str(folder / "pairs.jsonl"))).examples) == 20
    report = report_of(folder)
    assert report["rows"] == {"used": 5, "beyond the limit": 1, "repeated": 0}
    assert report["requests"] == {"answered": 10, "failed": 0, "not sent": 0}
    assert report["lines"][f"synonym by {server.name}"] == {"remark": 5, "kept": 10}
    body = json.loads(server.requests[0].body)
    expected = {"model": "tiny", "max_tokens": 128, "temperature": 0.7, "top_p": 0.9}
    assert {name: body.get(name) for name in expected} == expected
    assert len({json.loads(request.body)["seed"] for request in server.requests}) == 10
    assert any("generate 2 synonymous sentences" in text and "A man is eating" in text for text in server.messages)


def test_no_request_is_repeated(server: ChatServer, folder: Path) -> None:
    make(folder, server.name)
    before = (folder / "pairs.jsonl").read_bytes()
    make(folder, server.name)
    assert (len(server.requests), (folder / "pairs.jsonl").read_bytes()) == (12, before)
    make(folder, server.name, flags="--temperature 0.2")
    make(folder, server.name)
    assert len(server.requests) == 24, "other sampling needs new answers, and the old ones stay"
    journal = folder / "pairs.journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:7]) + lines[7][:30])
    make(folder, server.name)
    assert (len(server.requests), (folder / "pairs.jsonl").read_bytes()) == (29, before)
    make(folder, server.name, flags="--concurrency 1", out="alone.jsonl")
    assert (folder / "alone.jsonl").read_bytes() == before
    with Journal(journal), pytest.raises(FolderError, match="another process"):
        make(folder, server.name)


def test_a_slow_disk_delays_requests(server: ChatServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unwritten, append = list[int](), Journal.append

    def append_slowly(journal: Journal, *rows: Row) -> None:
        time.sleep(0.05)
        unwritten.append(len(server.requests) - len(journal.rows))
        append(journal, *rows)

    monkeypatch.setattr(Journal, "append", append_slowly)
    assert make(folder, server.name, flags="--concurrency 2") == 0
    assert max(unwritten) == 2, "a kill loses as many answers"


def test_a_damaged_line_of_a_journal_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:1"):
        Journal(tmp_path / "rows.jsonl")


def test_errors_of_the_server_are_reported(
    server: ChatServer, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Reply({"error": {"message": "out of order"}}, 500)
    server.rule = lambda text, times: broken if "Two dogs" in text or times == 0 else usual(text, times)
    assert make(folder, server.name, flags="--limit 3") == 1
    assert report_of(folder)["requests"] == {"answered": 4, "failed": 2, "not sent": 0}
    assert "out of order" in capsys.readouterr().out
    server.rule, sent = usual, len(server.requests)
    assert make(folder, server.name, flags="--limit 3") == 0
    assert len(server.requests) == sent + 2
    server.rule = lambda text, times: broken
    monkeypatch.setattr(language_models, "MAX_FAILURES", 3)
    with pytest.raises(DataError, match=r"out of order.*same command"):
        make(folder, server.name, flags="--retries 0 --concurrency 1")
    assert len(server.requests) <= sent + 2 + 4


@pytest.mark.parametrize("content", [b"{}", b'{"choices": []}', b'{"choices": [{"message": null}]}', b"[1]", b"hi"])
def test_an_answer_that_is_not_a_completion_is_an_error(server: ChatServer, folder: Path, content: bytes) -> None:
    server.rule = lambda text, times: Reply(content)
    assert make(folder, server.name, flags="--limit 1") == 1
    assert report_of(folder)["requests"] == {"answered": 0, "failed": 2, "not sent": 0}


def test_the_key_is_in_no_file_and_no_output(
    server: ChatServer, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    monkeypatch.setattr(language_models, "MAX_FAILURES", 3)
    server.rule = lambda text, times: Reply({"error": {"message": f"wrong key: {KEY}"}}, 401)
    assert make(folder, server.name, flags="--api-key-variable MY_KEY --limit 1") == 1
    assert {request.headers["authorization"] for request in server.requests} == {f"Bearer {KEY}"}
    assert "***" in (folder / "pairs.report.json").read_text()
    with pytest.raises(DataError, match=r"\*\*\*") as refused:
        make(folder, server.name, flags="--api-key-variable MY_KEY")
    shown = [*capfd.readouterr(), str(refused.value), *(path.read_text() for path in folder.iterdir())]
    assert not [text for text in shown if KEY in text]


def test_budgets_hold_for_all_runs_together(server: ChatServer, folder: Path) -> None:
    for _ in range(2):
        assert make(folder, server.name, flags="--max-requests 5") == 1
    assert (len(server.requests), report_of(folder)["requests"]["not sent"]) == (5, 7)
    assert make(folder, server.name, flags="--max-requests 12") == 0
    # A request costs 120 millionths, and at most about 450.
    prices = "--prices.input 1 --prices.output 1 --max-cost 0.001"
    assert make(folder, server.name, flags=f"--seed 1 {prices}", out="new.jsonl") == 1
    report = report_of(folder, "new")
    assert report["cost"] == pytest.approx(120e-6 * report["requests"]["answered"])
    assert 2 <= report["requests"]["answered"] <= 8
    server.rule = lambda text, times: None
    sent = len(server.requests)
    assert make(folder, server.name, flags=f"--seed 2 {prices} --concurrency 1", out="empty.jsonl") == 1
    report = report_of(folder, "empty")
    assert report["failures"] == {"the answer has no text (finish reason: stop)": len(server.requests) - sent}
    assert report["cost"] == pytest.approx(120e-6 * (len(server.requests) - sent))
    sent = len(server.requests)
    assert make(folder, server.name, flags=f"--seed 2 {prices} --concurrency 1", out="empty.jsonl") == 1
    assert len(server.requests) == sent, "answers without a text have used up the cost"


def test_requests_stay_below_the_rate_limit(server: ChatServer, folder: Path) -> None:
    started = time.monotonic()
    make(folder, server.name, flags="--requests-per-minute 600 --limit 3")
    assert time.monotonic() - started > 0.49


def test_several_generators_and_a_judge(server: ChatServer, folder: Path) -> None:
    with ChatServer(lambda text, times: usual(text, times).replace("Once", "Then")) as second:
        both = (server.name, second.name)
        assert make(folder, *both) == 0
        assert {row["generator"] for row in rows_of(folder / "pairs.jsonl")} == {*both, " + ".join(both)}
        two_prompts: Any = {"query": "query", "document": "passage"}
        base = save_tiny_base("bert", folder / "base")
        SentenceEncoder.from_pretrained(base, device="cpu", prompt=two_prompts).save_pretrained(folder / "judge")
        judge = f"--judge {folder / 'judge'} --min-synonym-cosine 2 --device cpu"
        assert make(folder, *both, flags=judge) == 0
        assert all(row["side"] == "antonym" and abs(row["cosine"]) <= 1 for row in rows_of(folder / "pairs.jsonl"))
        lines = report_of(folder)["lines"][f"synonym by {server.name}"]
        assert lines == {"remark": 6, "judge": 12}
        assert len(server.requests) == len(second.requests) == 12


def test_rows_without_a_sentence_and_larger_limits(server: ChatServer, folder: Path) -> None:
    first = SENTENCES.splitlines()
    texts = [*first[:3], first[0].upper(), "Never mind the second one.", "A last sentence, beyond it.", " "]
    (folder / "sentences.txt").unlink()
    (folder / "rows.jsonl").write_text("".join(json.dumps({"said": text}) + "\n" for text in texts))
    flags = f"--sentences {folder / 'rows.jsonl'} --column said --shuffle-seed 1"
    with pytest.raises(DataError, match=r"rows\.jsonl:7"):
        make(folder, server.name, flags=flags)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"said": text}) + "\n" for text in texts[:-1]))
    make(folder, server.name, flags=f"{flags} --limit 3")
    rows = {row["row"] for row in rows_of(folder / "pairs.jsonl")}
    make(folder, server.name, flags=f"{flags} --limit 4")
    assert report_of(folder)["rows"] == {"used": 4, "beyond the limit": 1, "repeated": 1}
    assert rows < {row["row"] for row in rows_of(folder / "pairs.jsonl")}
    assert len(server.requests) == 8


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("", "--llm"),
        ("--llm http://127.0.0.1:1/v1", "--llm"),
        ("--llm ftp://127.0.0.1/v1#m", "--llm"),
        ("--llm http://me:secret@127.0.0.1/v1#m", "--llm"),
        ("--llm http://127.0.0.1/v1?key=secret#m", "--llm"),
        ("--llm http://far.example/v1#m", "OPENAI_API_KEY.*unencrypted"),
        ("--llm https://one.example/v1#a https://two.example/v1#b", "OPENAI_API_KEY.*several hosts"),
        ("--llm local:a --out pairs.csv", "--out"),
        ("--llm local:a --out sentences.txt/pairs.jsonl", "--out"),
        ("--llm local:a --size 0", "--size"),
        ("--llm local:a --top-p 2", "--top-p"),
        ("--llm local:a local:b local:a", "--llm.*once"),
        ("--llm local:a --prompt papr", "--prompt.*'paper'"),
        ("--llm local:a --max-cost 3", "--max-cost"),
        ("--llm local:a --judge nowhere", "nowhere"),
    ],
)
def test_a_refusal_names_the_flag(
    flags: str, named: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.chdir(folder)
    with pytest.raises((SettingsError, FileNotFoundError, SystemExit)) as refused:
        generate(["--sentences", "sentences.txt", *flags.split()])
    shown = f"{refused.value}{capsys.readouterr().err}"
    assert re.search(named, shown)
    assert "secret" not in shown
    (folder / "mine.jsonl").write_text("mine")
    with pytest.raises(SettingsError, match=r"--out: mine\.jsonl"):
        generate(["--sentences", "sentences.txt", "--llm", "local:a", "--out", "mine.jsonl"])


# ------------------------------------------------------------------------------------------------- a local model


def test_a_local_model_resumes_to_the_same_pairs(folder: Path) -> None:
    tiny_causal_lm("llama-tied").save_pretrained(folder / "model")
    TOKENIZERS["smollm2"]().save_pretrained(folder / "model")
    (folder / "short.yaml").write_text("{synonym: 'same {size}: {text}', antonym: 'not {size}: {text}'}")
    (folder / "sentences.txt").write_text(f"A man is eating.\nTwo dogs run.\n{'A plane lands. ' * 9}\nA cat sleeps.\n")
    flags = f"--prompt {folder / 'short.yaml'} --max-new-tokens 30 --batch-size 3 --device cpu"
    name = f"local:{folder / 'model'}"
    assert make(folder, name, flags=flags) == 0
    journal = folder / "pairs.journal.jsonl"
    whole = journal.read_bytes()
    answers = answers_in(journal)
    assert len({text for text, *_ in answers}) == 8
    assert all(0 < new <= 30 and read > 5 for _, _, read, new in answers)
    lengths = [read for _, _, read, _ in answers]
    assert len(set(lengths)) > 1
    for lines in (1, 2):
        journal.write_bytes(b"".join(whole.splitlines(keepends=True)[:lines]) + b'{"answers')
        make(folder, name, flags=flags)
        assert journal.read_bytes() == whole, "a batch is in the journal whole or not at all"
    make(folder, name, flags=f"{flags} --temperature 0 --seed 2", out="cold.jsonl")
    make(folder, name, flags=f"{flags} --temperature 0 --seed 3", out="other.jsonl")
    cold, other = (answers_in(folder / f"{each}.journal.jsonl") for each in ("cold", "other"))
    assert cold == other, "the most likely tokens, whatever the seed"


# ------------------------------------------------------------------------------------------------- lines, filters, pairs

MEN = ["A man eats.", "Someone is eating bread.", "It's Tom's meal"]
SHAPES = [
    "1. {}\n2. {}\n3. {}",
    "(1) {}\n(2) {}\n(3) {}",
    "a) {}\nb) {}\nc) {}",
    "  • {}\n\n  • {}\n\n  • {}",
    '1. "{}"\n2. **{}**\n3. “{}”,',
    "Sentence 1: {}\n**Synonym 2:** {}\nOutput: {}",
    "{}\n{}\n{}",
    "Sure! Here are three sentences:\n\n1. {}\r\n2. {}\r\n3. {}\n\nI hope this helps!",
    "Certainly, here they are:\n{}\n{}\n{}",
    "```\n1. {}\n2. {}\n3. {}\n```",
    "<think>\nOne:\n1. A draft.\n</think>\n\n1. {}\n2. {}\n3. {}\n\nDone.",
    '```json\n[\n"{}",\n"{}",\n"{}"\n```',
]


def sentences(answer: str, *, finished: bool = True) -> list[str]:
    return [line.text for line in read_answer(answer, finished=finished) if line.dropped is None]


def test_sentences_are_parsed_from_every_answer_format() -> None:
    assert {shape: sentences(shape.format(*MEN)) for shape in SHAPES} == dict.fromkeys(SHAPES, MEN)
    for text in ("3.5 men eat.", '"Yes" and "no" were said.', "'Tis the season", "1990 was good", "The answer is no."):
        assert sentences(f"1. {text}\n2. Other words.") == [text, "Other words."]
    assert sentences("1. A man eats.\n2. Someone is ea\n\n", finished=False) == ["A man eats."]
    assert sentences('{"many": [\n "A man eats.",\n "Someone is ea', finished=False) == ["A man eats."]
    assert sentences("404: page not found\nThe page is missing.") == ["404: page not found", "The page is missing."]


MARKS = ["1.", "2)", "- ", "```", '"', "**", "\n", ":", "Sure", "[", "]", "{", ",", " ", "'", "\u2028", "a", "<think>"]


@given(st.one_of(st.text(), st.lists(st.sampled_from(MARKS)).map("".join)), st.booleans())
@example("[" * 5000, True)
@example("\n\n", True)
def test_every_line_of_any_answer_has_a_reason(answer: str, finished: bool) -> None:
    lines = read_answer(answer, finished=finished)
    assert all(line.text.strip() == line.text != "" for line in lines if line.dropped is None)
    assert len(lines) >= max(1, len(answer.splitlines()))


@pytest.mark.parametrize("unit", ["Output ", "``` \n", "1. ", "**", "<think>", '"', "“'"])
def test_any_answer_takes_linear_time(unit: str) -> None:
    started = time.monotonic()
    read_answer(unit * (100_000 // len(unit)) + "x")
    assert time.monotonic() - started < 5  # quadratic time would be minutes


SOURCE = "A man is slowly eating a large piece of bread."
DROPPED = {
    "no words": "-" * 30,
    "refusal": "I'm sorry, but as an AI I do not eat a piece of bread.",
    "prompt words": "You are a highly smart man with a piece of bread.",
    "talk": "Both sentences say that bread is eaten.",
    "copy": "a man is slowly eating a large piece of bread",
    "too short": "A man eats.",
    "too long": "A man is slowly eating a large piece of bread " * 3,
    "other script": "Мужчина медленно ест большой кусок хлеба.",
}
KEPT = {
    "Somebody eats a big slice of bread without haste.": SOURCE,
    "I am sorry that I was late today.": "I'm sorry for being late today.",
    "The language model is not large.": "The language model is large.",
    "The judge gave a short sentence.": "The judge gave a long sentence.",
    "東京は日本の首都ではない。": "東京は日本の首都である。",
    "The café in Αθήνα is closed today.": "The café in Αθήνα is open today.",
}


def why(sentence: str, source: str) -> str | None:
    return why_dropped(sentence, source, load_prompts("paper")["synonym"])


def test_each_filter_drops_what_no_other_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {reason: why(sentence, SOURCE) for reason, sentence in DROPPED.items()} == {name: name for name in FILTERS}
    assert {sentence: why(sentence, source) for sentence, source in KEPT.items()} == dict.fromkeys(KEPT)
    for reason, sentence in DROPPED.items():
        with monkeypatch.context() as context:
            context.delitem(FILTERS, reason)
            assert why(sentence, SOURCE) is None


def chosen(*texts: tuple[str, str], size: int = 9) -> list[str | None]:
    """Why (generator and side, sentence) are dropped."""
    pairs = [
        Pair(LlmRequest(0, SOURCE, where[1:], where[0], "", 0, where), text, None, [where[0]]) for where, text in texts
    ]
    drop_repeats(pairs)
    drop_surplus(pairs, size)
    return [pair.dropped for pair in pairs]


def test_conflicting_pairs_are_dropped() -> None:
    eats, bread = "Someone eats bread.", "Bread is eaten."
    assert chosen(("1same", eats), ("1same", eats.upper()), ("1same", bread)) == [None, "repeat", None]
    assert chosen(("1same", eats), ("2not", eats), ("1not", bread)) == ["contradiction", "contradiction", None]
    assert chosen(("1same", eats), ("1same", bread), ("2same", eats)) == [None, None, "repeat"]
    assert chosen(("1same", eats), ("1same", bread), ("2same", "He eats."), size=1) == [None, "surplus", None]


@given(st.text())
def test_a_sentence_is_inserted_literally(text: str) -> None:
    assert message("{size} unlike {text}", text, 2) == f"2 unlike {text}"
    assert message("{size} {text}. Output", "{text} {size}.", 2) == "2 {text} {size}. Output"


@pytest.mark.parametrize("side", [{}, {"synonym": "like {text}"}, {"synonym": "{size} {text} {text}"}, {"synonym": 3}])
def test_a_template_needs_both_placeholders_once(tmp_path: Path, side: Mapping[str, object]) -> None:
    (tmp_path / "mine.yaml").write_text(json.dumps({"antonym": "{size} {text}", **side}))
    with pytest.raises(SettingsError, match=r"--prompt.*mine\.yaml.*synonym"):
        load_prompts(str(tmp_path / "mine.yaml"))
    assert all(len(load_prompts(name)) == 2 for name in ("paper", "plain", "examples"))


# ------------------------------------------------------------------------------------------------- training


def test_generated_pairs_are_trained_on_and_measured_on_test_pairs(tmp_path: Path) -> None:
    save_tiny_base("bert", tmp_path / "tiny")
    who, what = ("man", "woman", "dog", "child"), ("eats", "runs", "sleeps", "sings", "talks")
    for name, count, top in (("generated", 7, 1), ("test", 12, 5)):
        texts = [(f"A {who[n % 4]} {what[n % 5]}.", f"The {who[n % 3]} {what[n % 4]}.") for n in range(count)]
        rows = [{"text1": one, "text2": other, "score": n % 3 / 2 * top} for n, (one, other) in enumerate(texts)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = (
        "--model.path tiny --data.path generated.jsonl --test.path test.jsonl --run-dir out "
        "--batch-size 7 --epochs 1 --optimizer.learning-rate 0.01"
    )
    config = ("--config", ROOT / "eval/llm_supervision.yaml")
    done = run("python", ROOT / "recipes/sts_finetune.py", *config, *flags.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = dict(re.findall(r"^  (before|after) +(-?\d+\.\d\d)", done.stdout, re.MULTILINE))
    rows = rows_of(tmp_path / "test.jsonl")
    for name, place in [("before", "tiny"), ("after", "out/model")]:
        encode = SentenceEncoder.from_pretrained(tmp_path / place, prompt="plain", pooling="mean", device="cpu").encode
        left, right = (torch.from_numpy(encode([row[side] for row in rows])).double() for side in ("text1", "text2"))
        expected = 100 * spearman(torch.cosine_similarity(left, right).numpy(), [row["score"] for row in rows])
        assert float(figures.pop(name)) == pytest.approx(expected, abs=0.005)
    assert figures == {}


def test_help_and_the_missing_library_are_named(tmp_path: Path) -> None:
    assert "LLM supervision" in run("python", PROGRAM, "--help").stdout
    code = f"import runpy, sys; sys.modules['openai'] = None; sys.path.insert(0, {str(PROGRAM.parent)!r})"
    (tmp_path / "without.py").write_text(f"{code}\nrunpy.run_path({str(PROGRAM)!r}, run_name='__main__')")
    flags = ["--sentences", "x", "--llm", "http://127.0.0.1:1/v1#m"]
    done = run("python", tmp_path / "without.py", *flags, cwd=tmp_path)
    assert (done.returncode, "pip install 'angle_llm[questions]'" in done.stderr) == (2, True)

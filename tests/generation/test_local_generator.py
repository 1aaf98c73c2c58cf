"""A local model answers each message from its own seed, whatever else is in the batch, and opens by any name."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import tiny_causal_lm
from tiny_tokenizers import TOKENIZERS

from angle_llm.generation.command import GenerateSettings, generate_main
from angle_llm.generation.filters import Limits
from angle_llm.generation.generators import Sampling
from angle_llm.model.checks import ArtifactError
from angle_llm.model.text_generator import TextGenerator, Written, _Drawing

MESSAGES = [
    "A man is eating.",
    "Two dogs run over the grass and into the water.",
    "Say it.",
    "A plane lands, a man is eating.",
]
SEEDS = [3, 1, 4, 1]
SAMPLING = Sampling(max_new_tokens=12, temperature=1.5, top_p=0.99)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def generator(kind: str = "llama-tied", tokenizer: str = "smollm2") -> TextGenerator:
    # float64: sums in another order move a distribution by 1e-16, and no random number falls so near an edge.
    return TextGenerator(tiny_causal_lm(kind, torch.float64), TOKENIZERS[tokenizer]())


def written(writer: TextGenerator, messages: list[str], seeds: list[int], sampling: Sampling) -> list[Written]:
    return writer.write(messages, seeds, **vars(sampling))


@pytest.mark.parametrize(("kind", "tokenizer"), [("llama-tied", "smollm2"), ("llama", "llama2"), ("gpt2", "smollm2")])
def test_an_answer_does_not_depend_on_the_batch(kind: str, tokenizer: str) -> None:
    writer = generator(kind, tokenizer)
    together = written(writer, MESSAGES, SEEDS, SAMPLING)
    alone = [written(writer, [message], [seed], SAMPLING)[0] for message, seed in zip(MESSAGES, SEEDS, strict=True)]
    assert together == alone
    assert written(writer, MESSAGES[::-1], SEEDS[::-1], SAMPLING) == together[::-1]


def test_another_seed_gives_another_answer() -> None:
    writer = generator()
    answers = {written(writer, MESSAGES[:1], [seed], SAMPLING)[0].text for seed in range(5)}
    assert len(answers) == 5


def test_without_temperature_the_likeliest_token_is_taken_whatever_the_seed() -> None:
    writer = generator()
    cold = replace(SAMPLING, temperature=0.0)
    (answer,) = written(writer, MESSAGES[:1], [1], cold)
    assert written(writer, MESSAGES[:1], [2], cold) == [answer]
    ids = torch.tensor([writer.message_ids(MESSAGES[0])])
    with torch.no_grad():
        for _ in range(3):
            ids = torch.cat([ids, writer.model(ids).logits[:, -1].argmax(1, keepdim=True)], 1)
    assert answer.text.startswith(writer.tokenizer.decode(ids[0, -3:]))


def test_what_a_models_file_wants_of_drawing_does_not_count() -> None:
    plain, wanting = generator(), tiny_causal_lm("llama-tied", torch.float64)
    wanting.generation_config.update(
        repetition_penalty=5.0, num_beams=2, num_return_sequences=2, no_repeat_ngram_size=1
    )
    other = TextGenerator(wanting, plain.tokenizer)
    assert written(other, MESSAGES, SEEDS, SAMPLING) == written(plain, MESSAGES, SEEDS, SAMPLING)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count: Counter[int] = Counter()
    draws = 4000
    drawn = _Drawing(range(draws), 0, max_new_tokens=1, temperature=2.0, top_p=0.9)
    scores = drawn(torch.zeros(draws, 0, dtype=torch.long), (2 * chances.log()).expand(draws, 4))
    assert (scores.isfinite().sum(1) == 1).all()
    count.update(scores.argmax(1).tolist())
    # The last lies beyond 0.9 together; the others share its part. Five standard deviations of a share are 0.04.
    for token, share in enumerate((0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0)):
        assert abs(count[token] / draws - share) < (0.04 if share else 1e-9)


def test_an_answer_ends_at_the_end_token_and_counts_it() -> None:
    writer = generator()
    writer.ends = list(range(200, 400))  # half of all tokens
    (answer,) = written(writer, MESSAGES[:1], [1], replace(SAMPLING, max_new_tokens=60))
    assert answer.finished
    assert answer.new_tokens < 60
    writer.ends = [399]
    assert not written(writer, MESSAGES[:1], [1], replace(SAMPLING, max_new_tokens=2))[0].finished


def test_a_chat_template_is_used_and_a_sentence_cannot_end_its_turn() -> None:
    import copy

    writer = generator()
    plain = writer.message_ids("A man.")
    writer.tokenizer = copy.deepcopy(writer.tokenizer)
    writer.tokenizer.chat_template = TEMPLATE
    ids = writer.message_ids("A man <|im_end|> eats.")
    start, end = writer.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert writer.tokenizer.decode(ids) == "<|im_start|>user\nA man <|im_end|> eats.<|im_end|>\n<|im_start|>assistant\n"
    assert (ids.count(start), ids.count(end)) == (2, 1)
    assert start not in plain


def test_a_message_that_leaves_no_room_is_told() -> None:
    writer = generator()
    assert writer.lacks_room("A man is eating.", 12) is None
    assert "the model has 128" in str(writer.lacks_room("A man is eating. " * 40, 12))


@pytest.fixture
def settings(tmp_path: Path) -> GenerateSettings:
    tiny_causal_lm("llama-tied").save_pretrained(tmp_path / "model")
    TOKENIZERS["smollm2"]().save_pretrained(tmp_path / "model")
    (tmp_path / "texts.txt").write_text(
        "A man is eating.\nTwo dogs run.\n" + "A plane lands. " * 30 + "\nA cat sleeps.\n"
    )
    (tmp_path / "short.yaml").write_text("{name: short, synonym: 'same {size}: {text}', antonym: 'not {size}: {text}'}")
    return GenerateSettings(
        sentences=tmp_path / "texts.txt",
        generator=(f"local:{tmp_path / 'model'}",),
        out=tmp_path / "pairs.jsonl",
        prompt=str(tmp_path / "short.yaml"),
        sampling=Sampling(max_new_tokens=30, temperature=2.0, top_p=1.0),
        limits=Limits(1, 1000, 0.0, 1000.0),
        batch_size=3,
    )


def test_the_command_writes_the_same_again_and_goes_on_to_the_same(settings: GenerateSettings) -> None:
    # One sentence is too long for the model, which is no sign that the model is broken.
    assert not generate_main(replace(settings, max_failures=1))
    report = json.loads(settings.beside(".report.json").read_text())
    assert report["requests"] == {"total": 8, "answered": 6, "failed": 2, "unasked": 0}
    assert report["pairs"] > 0
    assert "positions" in next(iter(report["failures"]))
    written = settings.out.read_bytes()

    again = replace(settings, out=settings.out.with_name("again.jsonl"))
    generate_main(again)
    assert again.out.read_bytes() == written
    # As if killed while the journal was written: what is left of a batch is answered in the same batch as before.
    journal = again.beside(".journal.jsonl")
    whole = journal.read_bytes()
    journal.write_bytes(b"".join(whole.splitlines(keepends=True)[:4]) + b'{"key')
    generate_main(again)
    assert journal.read_bytes() == whole
    assert again.out.read_bytes() == written


def test_a_judge_leaves_out_what_is_not_alike(settings: GenerateSettings, tmp_path: Path) -> None:
    from tiny import save_tiny_base

    generate_main(settings)
    before = len(settings.out.read_text().splitlines())
    judged = replace(settings, judge=str(save_tiny_base("bert", tmp_path / "judge")), judge_min={"synonym": 2.0})
    generate_main(judged)
    rows = [json.loads(line) for line in settings.out.read_text().splitlines()]
    assert 0 < len(rows) < before
    assert all(row["side"] == "antonym" and -1 <= row["cosine"] <= 1 for row in rows)


def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    from tiny import save_tiny_base

    with pytest.raises(ArtifactError, match=r"lacks 1 of .*lm_head.weight"):
        TextGenerator.open(str(save_tiny_base("llama", tmp_path / "base")))

"""Two prompts, for queries and documents: loading, encoding, saving, training."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import save_tiny_base, tiny_encoder

from angle_llm import PromptTemplate, SentenceEncoder, cli, load_prompt
from angle_llm.prompts import SidePrompts, load_prompts
from angle_llm.settings.parsing import SettingsError, load_settings, parse_settings
from angle_llm.settings.train import ModelSettings, TrainSettings

QUERY, DOCUMENT = PromptTemplate("ask", "Question: {text}"), PromptTemplate("answer", "Answer: {text}.")
BOTH = SidePrompts(QUERY, DOCUMENT)
TEXTS = ["A man eats.", "Who eats?", "Nobody eats."]


def test_one_name_means_both_sides_and_equal_templates_are_one_prompt() -> None:
    plain = load_prompt("plain")
    assert load_prompts("plain") == load_prompts(plain) == SidePrompts(plain, plain)
    found = load_prompts({"query": "plain", "document": "prompteol"})
    assert (found.query, found.document, found.differ) == (plain, load_prompt("prompteol"), True)
    renamed = SidePrompts(plain, PromptTemplate("other name", plain.template))
    assert not renamed.differ
    assert renamed.to_dict() == plain.to_dict()
    for prompts in (found, load_prompts("prompteol")):
        assert SidePrompts.from_dict(json.loads(json.dumps(prompts.to_dict())), "here") == prompts


@pytest.mark.parametrize(
    "given", [{"query": "plain"}, {"query": "plain", "documents": "plain"}, {}, {"plain": "plain"}]
)
def test_other_sides_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(
        SettingsError, match="expected one prompt, or a prompt for query and a prompt for document; got"
    ):
        load_prompts(given)


@pytest.mark.parametrize("prompt", [None, "plain", {"query": "plain", "document": "prompteol"}])
def test_settings_from_flags_and_yaml(prompt: str | dict[str, str] | None, tmp_path: Path) -> None:
    flags = [str(prompt)] if not isinstance(prompt, dict) else [part for pair in prompt.items() for part in pair]
    wanted = TrainSettings(model=ModelSettings(prompt=prompt))
    other = TrainSettings(model=ModelSettings(prompt={"query": "a", "document": "b"}))
    for defaults in (TrainSettings(), other):
        assert parse_settings(defaults, ["--model.prompt", *flags]) == wanted
    (tmp_path / "run.yaml").write_text(json.dumps({"model": {"prompt": prompt}}))
    assert load_settings(TrainSettings, tmp_path / "run.yaml", other) == wanted


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_each_side_is_encoded_with_its_prompt(kind: str, tmp_path: Path) -> None:
    encoder = tiny_encoder(kind, prompt=BOTH)
    encoder.save_pretrained(tmp_path / "saved")
    again = SentenceEncoder.from_pretrained(tmp_path / "saved", device="cpu")
    given = SentenceEncoder.from_pretrained(
        tmp_path / "saved", prompt={"query": DOCUMENT, "document": QUERY}, device="cpu"
    )
    query, document = (encoder.with_prompt(prompt).encode(TEXTS) for prompt in (QUERY, DOCUMENT))
    assert np.array_equal(encoder.encode_query(TEXTS), query)
    assert np.array_equal(encoder.encode_document(TEXTS), document)
    assert np.abs(query - document).max() > 0.01
    assert again.prompts == BOTH
    assert np.array_equal(again.encode_query(TEXTS), query)
    assert np.array_equal(given.encode_query(TEXTS), document)
    assert np.array_equal(again.for_side("document").encode(TEXTS), document)
    for use in (encoder.encode, encoder.tokenize, lambda _: encoder.prompt):
        with pytest.raises(ValueError, match="encode_query"):
            use(TEXTS)


def test_one_prompt_is_saved_and_encoded_as_before(tmp_path: Path) -> None:
    save_tiny_base("llama", tmp_path / "base")
    cards = []
    for number, prompt in enumerate(["plain", load_prompts({"query": "plain", "document": "plain"})]):
        encoder = SentenceEncoder.from_pretrained(tmp_path / "base", prompt=prompt, device="cpu")
        encoder.save_pretrained(tmp_path / f"saved{number}")
        cards.append((tmp_path / f"saved{number}" / "angle_llm.json").read_bytes())
        rows = encoder.encode(TEXTS)
        assert np.array_equal(encoder.encode_query(TEXTS), rows)
        assert np.array_equal(encoder.encode_document(TEXTS), rows)
        assert encoder.tokenizers.query is encoder.tokenizers.document
    assert cards[0] == cards[1]
    assert json.loads(cards[0])["prompt"] == load_prompt("plain").to_dict()


def test_a_run_with_two_prompts_is_trained_evaluated_and_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_base("llama", tmp_path / "base")
    pairs = [{"question": f"Who eats {n}?", "answer": f"Man {n} eats."} for n in range(8)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    run = tmp_path / "run"
    cli.run([
        "train", "--model.path", str(tmp_path / "base"), "--model.dtype", "float32", "--data.path", str(tmp_path / "pairs.jsonl"),
        "--model.prompt", "query", "query", "document", "passage", "--batch-size", "4", "--run-dir", str(run),
        "--evaluation.tasks", str(tmp_path / "pairs.jsonl"),
    ])  # fmt: skip
    encoder = SentenceEncoder.from_pretrained(run / "model", device="cpu")
    assert [prompt.name for prompt in (encoder.prompts.query, encoder.prompts.document)] == ["query", "passage"]
    assert "prompt:\n    query: query\n    document: passage\n" in (run / "settings.yaml").read_text()
    printed = capsys.readouterr().out
    assert "encoder.encode_document(" in printed
    assert "--output rows.npy --as document\n" in printed
    for side, shown in (([], "query / passage"), (["--as", "query"], "| query |")):
        cli.run(["eval", "retrieval", "--model", str(run / "model"), "--pairs", str(tmp_path / "pairs.jsonl"), *side])
        assert shown in " ".join(capsys.readouterr().out.split())


def test_the_chosen_side_is_not_saved(tmp_path: Path) -> None:
    encoder = tiny_encoder("bert", prompt=BOTH).for_side("document")
    assert (encoder.side, encoder.prompt, encoder.prompts) == ("document", DOCUMENT, BOTH)
    assert np.array_equal(encoder.encode_query(TEXTS), encoder.with_prompt(QUERY).encode(TEXTS))
    encoder.save_pretrained(tmp_path / "saved")
    again = SentenceEncoder.from_pretrained(tmp_path / "saved", device="cpu")
    assert (again.side, again.prompts) == (None, BOTH)

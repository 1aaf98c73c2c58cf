"""Instructions of rows: from a data file to token ids, rows of a batch, loss and gradient."""

import json
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from runs import float64_forward, largest_difference
from tiny import tiny_encoder
from tiny_tokenizers import TOKENIZERS
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from angle_llm import PromptTemplate, SentenceEncoder
from angle_llm.data.batch import TextBatch
from angle_llm.data.examples import DataReport, load_examples
from angle_llm.data.formats import DataError, Example, Group, PositivePair, ScoredPair, Triple
from angle_llm.data.mixture import LoadedSet, Mixture
from angle_llm.data.store import StoredExamples, digest_of, write_store
from angle_llm.losses import AngleObjective
from angle_llm.model.source.tokenizer import SentenceTokenizer
from angle_llm.prompts import SidePrompts, load_prompt
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import DataSource
from angle_llm.train.batches import BatchPlanner
from angle_llm.train.step import group_step, relations
from angle_llm.train.token_budget import TokenBudget

E5 = PromptTemplate("e5", "Instruct: {instruction}\nQuery: {text}", instruction="Find passages")
BOTH = SidePrompts(E5, PromptTemplate("plain", "{text}"))
TITLES, LAWS = "Find titles", "Find laws about {text}"
EXAMPLES: list[Example] = [
    PositivePair("Who eats?", "A man eats.", instruction=TITLES),
    PositivePair("Who eats?", "Law 3.", instruction=LAWS),  # the text of the first row, with another instruction
    PositivePair("Who eats?", "He eats."),
    Triple("A man eats.", "Someone has food.", "Nobody eats.", instruction=TITLES),
    Group("Nobody eats.", ("Law 4.", "They do not eat."), ("Who eats?",), instruction=LAWS),
    ScoredPair("He eats.", "Shares rose.", 0.1),
]


def planner(encoder: SentenceEncoder, sets: list[LoadedSet], **weights: float) -> BatchPlanner:
    return BatchPlanner(encoder, Mixture(sets), [AngleObjective(**weights)] * len(sets), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [E5, BOTH], ids=["one prompt", "two prompts"])
def test_the_step_equals_the_slow_formulas_in_float64(
    prompt: PromptTemplate | SidePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every string is written out, tokenized by the tokenizer alone, and encoded alone."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", float64_forward)
    encoder = tiny_encoder("llama", torch.float64, prompt=prompt)
    made = planner(encoder, [LoadedSet("a", EXAMPLES)], in_batch_weight=2.0, cosine_weight=0.5)
    ((_, (group,)),) = made.steps(iter([(0, [list(range(len(EXAMPLES)))])]), TokenBudget(60, 10**9))
    result = group_step(encoder.model, group.plan, group.batches, graph_tokens=10**9)
    gradients = {name: p.grad.clone() for name, p in encoder.model.named_parameters() if p.grad is not None}

    rows: dict[tuple[str, str], int] = {}  # string with its prompt, bare text → row
    pairs = []
    for example in EXAMPLES:
        head = f"Instruct: {example.instruction or 'Find passages'}\nQuery: "
        for left, right, score in reference_pairs(example):
            keys = [(head + left, left), (right if prompt is BOTH else head + right, right)]
            pairs.append((*(rows.setdefault(key, len(rows)) for key in keys), score))
    vectors = []
    for string, _ in rows:
        ids = torch.tensor([encoder.tokenizer(string)["input_ids"]])
        vectors.append(encoder.model.backbone(input_ids=ids, use_cache=False).last_hidden_state[0, -1])
    texts = [text for _, text in rows]
    embeddings = reference.rows_of(torch.stack(vectors))
    cosines = [reference.cosine(embeddings[left], embeddings[right]) for left, right, _ in pairs]
    numbers = [texts.index(text) for text in texts]
    in_batch = reference.CONTRASTIVE_FORMS["symmetric"](embeddings, pairs, 0.05, 0.5, numbers)
    loss = 2 * in_batch + 0.5 * reference.ranking_loss(cosines, [score for _, _, score in pairs], 0.05)
    encoder.model.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]

    assert len(group.batches[0].batch) == len(rows) > len(set(texts))
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    slow = {name: p.grad for name, p in encoder.model.named_parameters() if p.grad is not None}
    # Sums of a few hundred float64 terms in another order.
    assert largest_difference(slow, gradients) < 1e-10
    # The trie computes an instruction once.
    whole = sum(map(len, made.tokenize(group.batches[0].batch)))
    assert group.plan.layout == "trie"
    assert group.plan.computed_tokens < 0.7 * whole


def reference_pairs(example: Any) -> list[tuple[str, str, float]]:
    if isinstance(example, Group):
        texts = [(text, 1.0) for text in example.positives] + [(text, 0.0) for text in example.negatives]
        return [(example.query, text, score) for text, score in texts]
    if isinstance(example, Triple):
        return [(example.anchor, example.positive, 1.0), (example.anchor, example.negative, 0.0)]
    return [(example.left, example.right, getattr(example, "score", 1.0))]


def test_texts_with_another_instruction_are_other_rows_and_no_negatives_of_each_other() -> None:
    made = planner(tiny_encoder("llama", prompt=BOTH), [LoadedSet("a", EXAMPLES)])
    ((_, (group,)),) = made.steps(iter([(0, [[0, 1, 2]])]), TokenBudget(60, 10**9))
    ((_, relation),) = relations(group.plan, group.batches)
    batch = group.batches[0].batch
    keys = list(zip(batch.texts, batch.instructions, strict=True))
    assert keys == [
        ("Who eats?", TITLES), ("A man eats.", None), ("Who eats?", LAWS), ("Law 3.", None), ("Who eats?", None),
        ("He eats.", None),
    ]  # fmt: skip
    assert relation.text is not None
    first, second, third = relation.text[relation.left].tolist()
    assert first == second == third
    assert len(set(relation.left.tolist())) == 3
    whole = TextBatch.from_examples(
        [
            ScoredPair("a", "b", 0.5, instruction="i"),
            ScoredPair("a", "b", 0.5, instruction="i", document_instruction="d"),
        ]
    )
    assert whole.instructions == ["i", "i", "d"], "with one prompt, an instruction is used for both texts"


def test_instructions_without_a_place_are_a_warning_and_change_nothing() -> None:
    encoder = tiny_encoder("llama", prompt="plain")
    made = planner(encoder, [LoadedSet("mine", EXAMPLES[:3])])
    (warning,) = made.warnings
    assert warning.startswith("mine: its instructions are not used, because prompt 'plain' has no {instruction}")
    batch = made.batch([0, 1])
    assert made.tokenize(batch) == encoder.tokenize(batch.texts)
    plain = planner(encoder, [LoadedSet("mine", [PositivePair("Who eats?", "A man eats.")])])
    assert plain.warnings == []
    report = DataReport(DataSource("x"), "positive_pair", {"text1": "a", "text2": "b"}, [])
    made = planner(encoder, [LoadedSet("mine", EXAMPLES[:3], report=report)])
    assert made.warnings == [], "no column is an instruction, so the examples are not read"


def test_an_instruction_that_leaves_no_token_is_named_before_training() -> None:
    encoder = tiny_encoder("llama", prompt=BOTH, max_length=40)
    long = PositivePair("Who runs?", "He runs.", instruction="Find " * 40)
    expected = r"mine: instruction 'Find .* of the query 'Who runs\?': max_length 40 is too small for a text"
    with pytest.raises(DataError, match=expected):
        planner(encoder, [LoadedSet("mine", [*EXAMPLES[:2], long])])


# ------------------------------------------------------------------------------------------------------ token ids


TEXTS = ["Who eats?", "Say {text} or {instruction}", 'a "quote"', "</s> end", "naïve 😀 日本語"]


@pytest.mark.parametrize("kind", ["llama2", "smollm2", "bert"])
@pytest.mark.parametrize("name", ["e5_mistral_query", "bge_icl_query"])
@pytest.mark.parametrize("tokenization", ["joined", "segments"])
def test_ids_are_those_of_a_prompt_with_the_instruction_written_out(kind: str, name: str, tokenization: str) -> None:
    values = {**load_prompt(name).to_dict(), "tokenization": tokenization, "append": None}
    prompt = PromptTemplate.from_dict(values, "here")
    instructions = ["Find titles", None, "Find laws about {text}", "Find </s> names", "Find titles"]
    sentences = SentenceTokenizer(TOKENIZERS[kind](), prompt, 300)
    for text, instruction, ids in zip(TEXTS, instructions, sentences(TEXTS, 0, instructions), strict=True):
        head = prompt.template.partition("{text}")[0].replace("{instruction}", instruction or prompt.instruction)
        if "{text}" in head:
            assert ids == sentences.with_instruction(str(instruction))([text])[0]
            continue
        written = PromptTemplate("w", head + "{text}" + prompt.tail, tokenization=prompt.tokenization)
        assert ids == SentenceTokenizer(TOKENIZERS[kind](), written, 300)([text])[0]
        if tokenization == "joined" and "</s>" not in head + text:
            assert ids == TOKENIZERS[kind]()(head + text + prompt.tail)["input_ids"]


def test_bundled_templates_are_the_published_strings() -> None:
    task = "Given a web search query, retrieve relevant passages that answer the query"
    heads = {
        "qwen3_embedding_query": f"Instruct: {task}\nQuery:",
        "e5_mistral_query": f"Instruct: {task}\nQuery: ",
        "bge_icl_query": f"<instruct>{task}.\n<query>",
    }
    for name, head in heads.items():
        prompt = load_prompt(name)
        assert (prompt.head, prompt.tail) == (head, "\n<response>" if name.startswith("bge") else "")
        assert prompt.with_instruction("Do {text}").head == head.replace(prompt.instruction, "Do {text}")
        assert PromptTemplate.from_dict(json.loads(json.dumps(prompt.to_dict())), "here") == prompt
        assert prompt.with_instruction("other").fingerprint != prompt.fingerprint


@pytest.mark.parametrize(
    ("template", "instruction"),
    [
        ("{text} {instruction}", "a"),
        ("{instruction} {instruction} {text}", "a"),
        ("{text}", "a"),
        ("{instruction} {text}", " "),
    ],
)
def test_instructions_and_places_that_do_not_fit_are_refused(template: str, instruction: str) -> None:
    with pytest.raises(SettingsError, match="instruction"):
        PromptTemplate("x", template, instruction=instruction)
    with pytest.raises(SettingsError, match=r"'plain' has no \{instruction\} for the instruction 'a'"):
        load_prompt("plain").with_instruction("a")


@pytest.mark.parametrize("tokenization", ["joined", "segments"])
def test_a_long_text_keeps_instruction_and_tail(tokenization: str) -> None:
    prompt = PromptTemplate(
        "x", "Task: {instruction}\nText: {text}\nIn one word:", tokenization=tokenization, instruction="sum"
    )  # type: ignore[arg-type]
    sentences = SentenceTokenizer(TOKENIZERS["smollm2"](), prompt, 60)
    _, long = sentences(["one", "one two " * 50], 0, ["find the topic of this text", "find the topic of this text"])
    assert len(long) == 60
    tokenizer: Any = TOKENIZERS["smollm2"]()
    assert tokenizer.decode(long).startswith("Task: find the topic of this text\nText: one two one")
    assert tokenizer.decode(long).endswith("\nIn one word:" if tokenization == "segments" else "In one word:")
    with pytest.raises(ValueError, match=r"text 8: instruction 'find.*too small"):
        sentences(["one", "two"], 7, [None, "find " * 60])


def test_special_tokens_in_a_template_are_refused() -> None:
    prompt = PromptTemplate("x", "<s>{instruction}\n{text}", instruction="a")
    with pytest.raises(ValueError, match="prompt 'x' has special tokens of the tokenizer, <s>, which"):
        SentenceTokenizer(TOKENIZERS["llama2"](), prompt, 60)


# ------------------------------------------------------------------------------------------------------ data files


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_instructions_are_read_from_usual_columns(tmp_path: Path) -> None:
    flag = {"query": "q", "pos": ["p"], "neg": ["n"], "prompt": "Find it", "type": "normal"}
    loaded = load_examples(DataSource(write(tmp_path / "flag.jsonl", flag, {**flag, "prompt": " "})))
    assert loaded.examples == [Group("q", ("p",), ("n",), instruction="Find it"), Group("q", ("p",), ("n",))]
    assert "instruction = prompt" in loaded.report.summary()
    assert loaded.report.unused_columns == ["type"]
    other = {"query": "q", "positives": ["p"], "negatives": ["n"], "prompt": 3}
    unused = load_examples(DataSource(write(tmp_path / "other.jsonl", other)))
    assert (unused.examples, unused.report.unused_columns) == ([Group("q", ("p",), ("n",))], ["prompt"])
    row = {"anchor": "a", "positive": "b", "instruction": "i", "document_instruction": "d", "prompt": "no"}
    pairs = load_examples(DataSource(write(tmp_path / "pairs.jsonl", row, {**row, "instruction": None})))
    first, second = pairs.examples
    assert first == PositivePair("a", "b", instruction="i", document_instruction="d")
    assert second == PositivePair("a", "b", document_instruction="d")
    assert pairs.report.unused_columns == ["prompt"]
    # A mapped column is no instruction; `instruction` can be mapped too.
    alpaca = write(tmp_path / "alpaca.jsonl", {"instruction": "a", "output": "b", "task": "t"})
    columns = {"text1": "instruction", "text2": "output"}
    assert load_examples(DataSource(alpaca, columns=columns)).examples == [PositivePair("a", "b")]
    both = load_examples(DataSource(alpaca, columns={**columns, "instruction": "task"})).examples
    assert both == [PositivePair("a", "b", instruction="t")]
    bad = write(tmp_path / "bad.jsonl", {**row, "instruction": 3})
    with pytest.raises(DataError, match=r"bad.jsonl:1: instruction is 3 \(int\), expected a text"):
        load_examples(DataSource(bad))


def test_nli_triples_do_not_mix_instructions(tmp_path: Path) -> None:
    rows = [("p", "e", 0, "i"), ("p", "c", 2, "j"), ("p", "e2", 0, "j")]
    names = ("premise", "hypothesis", "label", "instruction")
    path = write(tmp_path / "nli.jsonl", *(dict(zip(names, row, strict=True)) for row in rows))
    loaded = load_examples(DataSource(path, format="nli_triples"))
    assert loaded.examples == [Triple("p", "e2", "c", instruction="j")]
    assert loaded.report.dropped == {"unpaired": 1}


def test_stored_examples_and_digests_keep_instructions(tmp_path: Path) -> None:
    groups = [Group("q", ("p",), ("n",), (1.0, 0.5)), Group("q", ("p",), (), instruction="i", document_instruction="d")]
    stored = write_store(tmp_path / "store", groups, dict)
    assert [stored[0], stored[1]] == groups
    assert isinstance(stored, StoredExamples)
    assert stored.digest == digest_of(groups) != digest_of([groups[0], Group("q", ("p",), ())])
    assert repr(groups[0]) == "Group(query='q', positives=('p',), negatives=('n',), scores=(1.0, 0.5))", "as before"

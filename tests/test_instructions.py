"""Instructions of texts in `encode`, evaluation, mining, `embed`, `serve` and the saved encoder."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tiny import TOKENIZERS, save_tiny_base, tiny_encoder

from angle_llm import PromptTemplate, SentenceEncoder, cli, load_prompt
from angle_llm.data.formats import DataError
from angle_llm.evaluate.encoding import encode_functions
from angle_llm.evaluate.held_out import held_out_evaluation
from angle_llm.evaluate.retrieval import evaluate_retrieval
from angle_llm.evaluate.retrieval_tasks import read_answers
from angle_llm.evaluate.sts import evaluate
from angle_llm.evaluate.sts_tasks import read_pairs
from angle_llm.export.formats.gguf_file import export_gguf
from angle_llm.export.verify import VerifyOptions, verify
from angle_llm.model.text_vectors import SidedText, _check_tokens
from angle_llm.prompts import SidePrompts
from angle_llm.serve.mistakes import _mistakes
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.serve import ServeSettings
from angle_llm.settings.train import DataSource, EvaluationSettings

E5 = PromptTemplate("e5", "Instruct: {instruction}\nQuery: {text}", instruction="Find passages")
PLAIN = PromptTemplate("plain", "{text}")
BOTH = SidePrompts(E5, PLAIN)
TITLES, LAWS = "Find titles", "Find laws"
TEXTS = ["Who eats?", "A man eats.", "Who eats?", "Nobody eats."]
PER_TEXT = [TITLES, None, LAWS, LAWS]


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def written_out(encoder: SentenceEncoder, texts: list[str], instructions: list[str | None]) -> Any:
    """Vectors of the whole strings, with the plain prompt."""
    strings = [
        f"Instruct: {one or 'Find passages'}\nQuery: {text}" for text, one in zip(texts, instructions, strict=True)
    ]
    return encoder.with_prompt(PLAIN).encode(strings)


def test_an_instruction_that_is_too_long_is_named_before_texts_are_embedded() -> None:
    encoder = tiny_encoder("llama", prompt=BOTH, max_length=60)
    texts = [SidedText(("Who eats?", instruction), "query") for instruction in (TITLES, LAWS * 30)]
    with pytest.raises(DataError, match="Find lawsFind laws"):
        _check_tokens(encoder, texts)
    _check_tokens(encoder, [text._replace(side="document") for text in texts])  # its prompt has no instruction


def test_encode_takes_one_instruction_or_one_per_text(tmp_path: Path) -> None:
    encoder = tiny_encoder("llama", prompt=BOTH)
    expected = written_out(encoder, TEXTS, PER_TEXT)
    np.testing.assert_allclose(encoder.encode_query(TEXTS, instruction=PER_TEXT), expected, atol=1e-6)  # float32
    single = encoder.with_prompt(E5)
    np.testing.assert_allclose(
        single.encode(TEXTS, instruction=LAWS), written_out(encoder, TEXTS, [LAWS] * 4), atol=1e-6
    )
    assert np.abs(expected[0] - expected[2]).max() > 1e-3, "one text with two instructions"
    with pytest.raises(ValueError, match=r"text 0: instruction 'Find laws': prompt 'plain' has no \{instruction\}"):
        encoder.encode_document(TEXTS, instruction=LAWS)
    with pytest.raises(ValueError, match="instruction: expected one per text, 4, got 1"):
        encoder.encode_query(TEXTS, instruction=[LAWS])
    missing: Any = ["", float("nan"), " ", pd.NA]
    assert np.array_equal(encoder.encode_query(TEXTS, instruction=missing), encoder.encode_query(TEXTS))
    # The saved encoder keeps template and default; the instruction of a caller replaces the default.
    encoder.save_pretrained(tmp_path / "saved")
    again = SentenceEncoder.from_pretrained(tmp_path / "saved", device="cpu")
    assert again.prompts == BOTH
    changed = SentenceEncoder.from_pretrained(tmp_path / "saved", device="cpu", instruction=LAWS)
    assert (changed.prompts.query.instruction, changed.prompts.document) == (LAWS, PLAIN)
    np.testing.assert_allclose(changed.encode_query(TEXTS), written_out(encoder, TEXTS, [LAWS] * 4), atol=1e-6)
    with pytest.raises(SettingsError, match="has no"):
        SentenceEncoder.from_pretrained(tmp_path / "saved", device="cpu", prompt="plain", instruction=LAWS)


@pytest.mark.needs("sentence_transformers")
@pytest.mark.parametrize("name", ["e5_mistral_query", "qwen3_embedding_query"])
def test_vectors_equal_those_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    base = save_tiny_base("qwen2", tmp_path / "base")
    tokenizer = TOKENIZERS["smollm2"]()
    modules: Any = [Transformer(str(base), max_seq_length=100), Pooling(32, "lasttoken")]
    theirs = SentenceTransformer(modules=modules, device="cpu")
    ours = SentenceEncoder.from_pretrained(base, prompt=name, pooling="last", max_length=100, device="cpu")
    space = " " if name.startswith("e5") else ""
    append = (
        tokenizer.eos_token if ours.prompt.append and tokenizer.eos_token_id not in tokenizer("a")["input_ids"] else ""
    )
    for instruction in (TITLES, "Find laws\nand titles"):
        texts = [text + append for text in TEXTS]
        expected = theirs.encode(texts, prompt=f"Instruct: {instruction}\nQuery:{space}")
        rows = ours.encode(TEXTS, instruction=instruction)
        assert np.abs(rows - expected).max() <= 1e-6 * np.abs(expected).max()  # float32


def test_retrieval_takes_the_instruction_of_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"query": "Who eats?", "positive": "A man eats.", "instruction": TITLES},
        {"query": "Who eats?", "positive": "Law 3.", "instruction": LAWS},
        {"query": "Who eats?", "positive": "He eats."},
    ]
    task = read_answers(DataSource(write(tmp_path / "pairs.jsonl", *rows)))
    assert task.queries == (("Who eats?", TITLES), ("Who eats?", LAWS), "Who eats?")
    encoder = tiny_encoder("llama", prompt=BOTH)
    encode, encode_document = encode_functions(encoder, show_progress=False)
    result = evaluate_retrieval(encode, [task], encode_document=encode_document, resamples=0).tasks["pairs"]
    queries = written_out(encoder, ["Who eats?"] * 3, [TITLES, LAWS, None])
    documents = encoder.encode_document(list(task.candidates))
    order = (-SentenceEncoder.similarity(queries, documents)).argsort(axis=1)
    assert result.ranks == tuple((int(order[row].tolist().index(row)) + 1,) for row in range(3))
    held_out = held_out_evaluation(EvaluationSettings(tasks=[str(tmp_path / "pairs.jsonl")]))
    assert held_out is not None
    assert held_out(encoder)["pairs/nDCG@10"] == pytest.approx(result.metrics["nDCG@10"].value)
    capsys.readouterr()
    encode, _ = encode_functions(encoder.with_prompt(PLAIN), show_progress=False)
    evaluate_retrieval(encode, [task], resamples=0)
    assert "warning: prompt 'plain' has no {instruction}, so the instructions" in "".join(capsys.readouterr())


@pytest.mark.parametrize("prompt", [E5, BOTH], ids=["one prompt", "two prompts"])
def test_sts_takes_the_instruction_of_a_row(prompt: Any, tmp_path: Path) -> None:
    values = [
        ("Who eats?", "A man eats.", 3, TITLES),
        ("Who eats?", "Law 3.", 1, LAWS),
        ("Two dogs.", "A dog.", 2, None),
    ]
    names = ("sentence1", "sentence2", "score", "instruction")
    task = read_pairs(write(tmp_path / "sts.jsonl", *(dict(zip(names, row, strict=True)) for row in values)))
    encoder = tiny_encoder("llama", prompt=prompt)
    encode, encode_document = encode_functions(encoder, show_progress=False)
    cosines = evaluate(encode, [task], encode_document=encode_document).tasks["sts"].scores.cosine
    instructions = [row[3] for row in values]
    left = written_out(encoder, [row[0] for row in values], instructions)
    seconds = [row[1] for row in values]
    right = encoder.encode_document(seconds) if prompt is BOTH else written_out(encoder, seconds, instructions)
    np.testing.assert_allclose(cosines, SentenceEncoder.similarity(left, right).diagonal(), atol=1e-6)
    if prompt is E5:  # the method of an encoder takes instructions, too
        np.testing.assert_array_equal(evaluate(encoder.encode, [task]).tasks["sts"].scores.cosine, cosines)
    held_out = held_out_evaluation(EvaluationSettings(tasks=[str(tmp_path / "sts.jsonl")]))
    assert held_out is not None
    assert np.isfinite(held_out(encoder)["sts/alignment"])


def test_a_column_of_texts_is_no_instruction_of_pairs(tmp_path: Path) -> None:
    row = {"instruction": "Name a dog.", "output": "Rex", "score": 1}
    columns = {"text1": "instruction", "text2": "output"}
    (pair,) = read_pairs(write(tmp_path / "sts.jsonl", row), columns).pairs
    assert (pair.sentence1, pair.instruction) == ("Name a dog.", "")


def test_forms_and_cards_show_the_prompt_with_its_instruction(tmp_path: Path) -> None:
    tiny_encoder("llama", prompt=BOTH, max_length=60).save_pretrained(tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "gguf", check=False)
    readme = (tmp_path / "gguf" / "README.md").read_text()
    assert readme.count("\n    Instruct: Find passages\n    Query: {text}\n") == 2
    assert "{instruction}" not in readme
    encoder = SentenceEncoder.from_pretrained(tmp_path / "model", device="cpu")
    names = [name for name, _ in _mistakes(encoder)]
    assert {"the prompt is dropped", "the prompt after the text is dropped", "the prompt is added twice"} < set(names)
    other = encoder.with_prompt(BOTH.with_instruction(LAWS))
    other.save_pretrained(tmp_path / "other")
    (comparison,) = verify([tmp_path / "model", tmp_path / "other"], VerifyOptions(device="cpu")).comparisons
    assert f"prompt 'Instruct: {LAWS}" in comparison.problems[0]


def test_mined_groups_keep_instructions_and_their_queries(tmp_path: Path) -> None:
    tiny_encoder("llama", prompt=BOTH).save_pretrained(tmp_path / "model")
    rows = [
        {"query": f"Who is number {n % 4}?", "pos": [f"Number {n}."], "neg": [], "prompt": TITLES if n < 4 else LAWS}
        for n in range(8)
    ]
    pairs, out = write(tmp_path / "pairs.jsonl", *rows), tmp_path / "mined.jsonl"
    flags = ["--model", str(tmp_path / "model"), "--out", str(out), "--negatives", "2", "--device", "cpu"]
    cli.run(["data", "mine", pairs, *flags, "--ranks", "1", "8"])
    groups = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(group["query"], group["instruction"]) for group in groups] == [
        (row["query"], row["prompt"]) for row in rows
    ]
    encoder = SentenceEncoder.from_pretrained(tmp_path / "model", device="cpu")
    for group, row in zip(groups, rows, strict=True):
        texts = [*group["positives"], *group["negatives"]]
        assert group["positives"] == row["pos"]
        shared = [other["pos"][0] for other in rows if other["query"] == row["query"]]
        assert not set(shared) & set(group["negatives"]), "a positive with another instruction is no negative"
        query = written_out(encoder, [row["query"]], [row["prompt"]])
        np.testing.assert_allclose(
            group["scores"], SentenceEncoder.similarity(query, encoder.encode_document(texts))[0], atol=2e-6
        )


def test_embed_takes_an_instruction(tmp_path: Path) -> None:
    encoder = tiny_encoder("llama", prompt=BOTH)
    encoder.save_pretrained(tmp_path / "model")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    flags = ["--input", str(tmp_path / "texts.txt"), "--as", "query", "--device", "cpu", "--instruction", LAWS]
    cli.run(["embed", "--model", str(tmp_path / "model"), "--output", str(tmp_path / "rows.npy"), *flags])
    rows = np.load(tmp_path / "rows.npy")
    np.testing.assert_allclose(rows, written_out(encoder, TEXTS, [LAWS] * 4), atol=1e-6)


@pytest.mark.filterwarnings("ignore:The anyio.abc.BlockingPortal alias")  # starlette below 1.0
@pytest.mark.needs("fastapi", "httpx", "prometheus_client")
def test_serve_takes_an_instruction_with_a_request() -> None:
    from fastapi.testclient import TestClient

    from angle_llm.serve.app import make_app

    encoder = tiny_encoder("llama", prompt=BOTH)
    client = TestClient(make_app(encoder, ServeSettings(model="runs/tiny")))
    for path, body in (
        ("/embed", {"inputs": TEXTS, "prompt_name": "query"}),
        ("/v1/embeddings", {"input": TEXTS, "side": "query"}),
    ):
        for instruction in (None, LAWS):
            answer = client.post(path, json={**body, "instruction": instruction, "normalize": False}).json()
            rows = answer if path == "/embed" else [item["embedding"] for item in answer["data"]]
            np.testing.assert_allclose(rows, written_out(encoder, TEXTS, [instruction] * 4), atol=1e-6)
    refused = client.post("/embed", json={"inputs": TEXTS, "prompt_name": "document", "instruction": LAWS})
    assert (refused.status_code, "has no {instruction}" in refused.text) == (400, True)
    refused = client.post("/embed", json={"inputs": TEXTS, "prompt_name": "query", "prompt": "Instruct: x\nQuery: "})
    assert (refused.status_code, "send prompt_name, or an instruction" in refused.text) == (422, True)


def test_the_guide_trains_and_encodes_with_the_instructions_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (Path(__file__).parents[1] / "docs" / "prompts.md").read_text(encoding="utf-8")
    section = guide.partition("\n## Instructions\n")[2].partition("\n## ")[0].replace("\\\n", "")
    (rows,) = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
    (command,) = re.findall(r"^    angle-llm (train .*)$", section, re.MULTILINE)
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    base = save_tiny_base("llama-tied", tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(rows, encoding="utf-8")
    more = ["--model.path", str(base), "--batch-size", "2", "--max-steps", "2", "--epochs", "2", "--lora.rank", "2"]
    cli.run([*shlex.split(command), *more, "--run-dir", "run"])
    printed = "".join(capsys.readouterr())
    assert "instruction = prompt" in printed
    assert "its instructions are not used" not in printed
    encoder = SentenceEncoder.from_pretrained("run/model", device="cpu")
    values: dict[str, Any] = {"encoder": encoder}
    exec(code, values)  # the code of the guide
    texts = ["Who eats?", "Two dogs run."]
    default = encoder.prompts.query.instruction
    strings = [f"Instruct: {one}\nQuery: {text}" for text, one in zip(texts, ("Find the answer", default), strict=True)]
    np.testing.assert_allclose(values["rows"], encoder.encode_document(strings), atol=1e-6)  # plain_eos
    table = re.findall(r"^\| `(\w+)` \| `(.*?)` \| `(\w+)`", section, re.MULTILINE)
    assert len(table) == 3
    for name in table:
        assert (load_prompt(name[0]).template, load_prompt(name[2]).template) == (
            name[1].replace("\\n", "\n"),
            "{text}",
        )

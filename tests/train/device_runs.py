"""Training and encoding on the device of `separate_device`, beside the CPU; prints one JSON line per run.

    python tests/train/device_runs.py

A program of its own: torch registers a device for the whole process.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from separate_device import DeviceTensor, DeviceWork, gpu, move, separate_device
from tiny import tiny_backbone, tiny_encoder, train_a_little
from torch import Tensor, distributed, nn
from torch.nn.functional import scaled_dot_product_attention

from angle_llm import AngleObjective, SentenceEncoder, TextBatch, device
from angle_llm.data.examples import load_examples
from angle_llm.losses import FalseNegatives, NestedObjective
from angle_llm.model.layers import low_memory_layers
from angle_llm.model.layers.replacements import replaced_layers
from angle_llm.model.layout import attention, flex
from angle_llm.model.layout.flex import flex_call
from angle_llm.model.layout.micro_batches import LayoutSupport
from angle_llm.settings.train import DataSource, LoraSettings, OptimizerSettings
from angle_llm.train.batches import PlannedBatch
from angle_llm.train.distributed import Processes
from angle_llm.train.step import group_step
from angle_llm.train.strategies import DataParallelStrategy

EXAMPLES = load_examples(DataSource(limit=8)).examples
OBJECTIVES = {
    "all terms": AngleObjective(cosine_weight=1, angle_weight=1, regression_weight=1),
    "nested": NestedObjective(AngleObjective(cosine_weight=1), dimensions=[8], layers=[]),
    "guided and taught": AngleObjective(
        contrastive_form="forward",
        false_negatives=FalseNegatives(margin=0.1, guided=True),
        hardness_strength=5.0,
        kl_weight=1,
        margin_mse_weight=1,
        teacher_vector_weight=1,
        teacher_similarity_weight=1,
    ),
}
BUDGET = 250


def main() -> None:
    gpu()  # before the first backward pass: torch makes its threads then
    device.GPU_TYPES.add("gpu")  # code for a GPU runs: fused norms and AdamW, pinned copies, FlexAttention
    Tensor.pin_memory = lambda tensor: tensor  # type: ignore[method-assign, assignment]
    with kernels_of_a_gpu():
        all_runs()


def all_runs() -> None:
    for kind, layout in (("llama", "trie"), ("bert", "packed"), ("bert", "padded")):
        for graph_tokens in (10**6, 0):
            step(kind, layout, graph_tokens)
    step("llama", "padded", 10**6)
    step("llama", "trie", 10**6, "nested")
    step("llama", "trie", 10**6, "guided and taught")
    for kind in ("llama", "qwen2"):
        step(kind, "trie", 10**6, kernel="flex")
    step("bert", "packed", 10**6, kernel="flex")
    for kind in ("llama", "bert"):
        encoding(kind)
    norms()
    several_processes()


@contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """Replace FlexAttention by plain attention that refuses tensors of the host."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, score_mod: None, block_mask: Any, *, scale: float, **named: Any
    ) -> Tensor:
        tensors = [query, key, value, *(one for one in block_mask.as_tuple() if isinstance(one, Tensor))]
        assert all(isinstance(tensor, DeviceTensor) for tensor in tensors)
        node_T = torch.arange(query.shape[2], device=query.device)
        visible_TT = block_mask.mask_mod(None, None, node_T[:, None], node_T)
        return scaled_dot_product_attention(query, key, value, visible_TT, scale=scale, enable_gqa=named["enable_gqa"])

    before = flex.flex_attention, attention.compiled_flex
    flex.flex_attention = attend  # type: ignore[assignment]
    attention.compiled_flex = lambda: flex_call  # type: ignore[assignment]
    yield
    flex.flex_attention, attention.compiled_flex = before


def encoder_of(kind: str, layout: str, dropout: float = 0.0) -> SentenceEncoder:
    encoder = tiny_encoder(kind)
    encoder.add_lora(LoraSettings(rank=4, alpha=4, dropout=dropout))
    train_a_little(encoder.model)
    if layout == "padded":
        encoder.layouts = LayoutSupport("padded", "off")
    return encoder


def batches(objective: str) -> list[PlannedBatch]:
    """Two accumulated batches, which share texts."""
    made = []
    for some in (EXAMPLES[:5], EXAMPLES[3:]):
        batch = TextBatch.from_examples(some)
        batch.teacher = torch.linspace(0, 1, len(batch.left))
        vectors = torch.linspace(-1, 1, 5 * len(batch)).reshape(len(batch), 5).sin()
        made.append(PlannedBatch(batch, OBJECTIVES[objective], {}, {"guide": vectors, "teacher_vectors": vectors}))
    return made


def step(kind: str, layout: str, graph_tokens: int, objective: str = "all terms", kernel: str = "gathered") -> None:
    """A step of accumulated batches: losses and gradients must be those of the CPU."""
    encoder = encoder_of(kind, layout, dropout=0.1)
    for module in encoder.model.modules() if kernel == "flex" else ():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # only `gathered` has dropout
    given = batches(objective)
    plan = encoder.plan([text for each in given for text in each.batch.texts], BUDGET)

    def run() -> tuple[float, dict[str, Tensor]]:
        torch.manual_seed(0)  # dropout draws from the generator of the CPU on both devices
        encoder.model.train().zero_grad()
        loss = group_step(encoder.model, plan, given, graph_tokens=graph_tokens).loss
        return loss, gradients(encoder)

    loss, expected = run()
    move(encoder.model)
    encoder.model = encoder.model.changed(attention_kernel=kernel)
    if kernel == "flex":  # masks are made with the plan
        encoder.layouts = replace(encoder.layouts, uses_flex=True)
        plan = encoder.plan([text for each in given for text in each.batch.texts], BUDGET).prepared(0)
    with separate_device() as work:
        loss_there, found = run()
    assert found.keys() == expected.keys()
    report(
        work,
        run="step",
        kind=kind,
        layout=plan.layout,
        kernel=kernel,
        cached=not graph_tokens,
        objective=objective,
        micro_batches=len(plan.groups),
        batches=len(given),
        loss=abs(loss_there - loss) / abs(loss),
        gradient=max(float((found[name] - one).abs().max() / one.abs().max()) for name, one in expected.items()),
    )


def gradients(encoder: SentenceEncoder) -> dict[str, Tensor]:
    named = {name: one.grad for name, one in encoder.model.named_parameters() if one.grad is not None}
    return {name: one.held if isinstance(one, DeviceTensor) else one.clone() for name, one in named.items()}


def encoding(kind: str) -> None:
    encoder = encoder_of(kind, "")
    texts = TextBatch.from_examples(EXAMPLES).texts
    expected = encoder.encode(texts, micro_batch_tokens=BUDGET)
    move(encoder.model)
    with separate_device() as work:
        found = encoder.encode(texts, micro_batch_tokens=BUDGET)
    plan = encoder.plan(texts, BUDGET)
    report(work, run="encode", kind=kind, micro_batches=len(plan.groups), rows=float(abs(found - expected).max()))


def norms() -> None:
    """Layers that are replaced on the device, with the norm of a GPU and with wrong ones."""

    right = low_memory_layers._fused_norm
    kernels: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
        "right": right,
        "another scale": lambda x, weight, epsilon: right(x, weight, epsilon) * (1 + 1e-5),
        "another epsilon": lambda x, weight, _: right(x, weight, 1e-3),
        "no weight": lambda x, weight, epsilon: right(x, torch.ones_like(weight), epsilon),
        "half a gradient": lambda x, weight, epsilon: (
            (right(x, weight, epsilon) + right(x.detach(), weight, epsilon)) / 2
        ),
        "NaN": lambda x, weight, epsilon: right(x, weight, epsilon) * torch.nan,
        "error": lambda *_: torch.empty(0).view(3),
    }
    for name, kernel in kernels.items():
        backbone = tiny_backbone("llama")
        move(backbone)
        low_memory_layers._fused_norm = kernel
        with separate_device() as work:
            low_memory_layers.use_low_memory_layers(backbone)
        report(work, run="norm", kernel=name, replaced=replaced_layers(backbone))
    low_memory_layers._fused_norm = right


def several_processes() -> None:
    """Run the steps of rank 0 of 2; collectives fail for CPU tensors, as with NCCL."""
    exchanged: list[str] = []

    def checked(name: str) -> Callable[..., None]:
        def exchange(tensor: Tensor, *_: object, **__: object) -> None:
            assert isinstance(tensor, DeviceTensor), f"{name} of a tensor of the host, {tuple(tensor.shape)}"
            assert tensor.is_contiguous(), f"{name} of a tensor that is not contiguous, {tuple(tensor.shape)}"
            exchanged.append(name)

        return exchange

    def gathered(values: list[Any], value: Any) -> None:
        values[:] = [value] * len(values)

    for name in ("all_reduce", "broadcast"):
        setattr(distributed, name, checked(name))
    distributed.all_gather_object = gathered
    distributed.broadcast_object_list = lambda values, src: None
    encoder = encoder_of("llama", "")
    move(encoder.model)
    with separate_device() as work:
        processes = Processes(0, 2, gpu())
        strategy = DataParallelStrategy(encoder.model, OptimizerSettings(), processes)
        given = batches("all terms")
        # Rank 0 has the whole plan: there is no other process with rows.
        plan = encoder.plan([text for each in given for text in each.batch.texts], BUDGET)
        strategy.model.train()
        for graph_tokens in (10**6, 0):
            group_step(strategy.model, plan, given, graph_tokens=graph_tokens, strategy=strategy)
            assert strategy.update(1e-3) > 0
        strategy.check_replicas()
        strategy.load_state(
            processes.broadcast({name: one.detach().cpu() for name, one in strategy.weights.items()}),
            processes.broadcast(strategy.optimizer_state()),
        )
        assert processes.max(3) == 3
        processes.check_equal("number", 1)
    report(work, run="processes", exchanged={name: exchanged.count(name) for name in exchanged})


def report(work: DeviceWork, **values: Any) -> None:
    counts = {"kernels": work.kernels.total(), "copies": dict(work.copies), "waits": dict(work.waits)}
    counts["launched_before_waits"] = work.launched_before_waits
    print(json.dumps({**values, **counts}), flush=True)


if __name__ == "__main__":
    main()

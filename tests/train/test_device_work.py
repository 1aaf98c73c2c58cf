"""What training does on a GPU, found without one: operations per layer, waits for the device, shapes of attention,
tensors on the wrong device.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run
from tiny import KINDS, tiny_encoder
from torch.nn import functional
from transformers import BertConfig, LlamaConfig

from angle_llm import SentenceEncoder, TextBatch
from angle_llm.config import DataSource, LoraSettings
from angle_llm.data.examples import load_examples
from angle_llm.model import outline
from angle_llm.model.pooling import EmbeddingModel
from angle_llm.model.step_memory import META, FusedKernels, MemoryLedger

LLAMA_7B = LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_attention_heads=32)
BERT_BASE = BertConfig(attention_probs_dropout_prob=0.0)
NO_KERNEL = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view", "aten::lift_fresh", "aten::alias")
VALUES = ("aten::_local_scalar_dense", "aten::nonzero", "aten::_unique", "aten::unique", "aten::masked_select")


class Work(MemoryLedger):
    """Counts operations that compute, and reads of values, on the meta device."""

    def __init__(self, model: EmbeddingModel) -> None:
        super().__init__([*model.parameters(), *model.buffers()])
        self.kernels: Counter[str] = Counter()
        self.values: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if name.startswith(VALUES):
            self.values[name] += 1
        elif not (view or name.startswith(NO_KERNEL)):
            self.kernels[name] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


class Attention(FusedKernels):
    """Counts calls of attention by the shapes of queries and keys."""

    def __init__(self) -> None:
        super().__init__(on_gpu=True)
        self.shapes: Counter[tuple[Any, Any]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            self.shapes[tuple(args[0].shape), tuple(args[1].shape)] += 1
        return super().__torch_function__(func, types, args, kwargs)


def put_on_meta(kind: str, config: Any, kernel: str | None) -> tuple[SentenceEncoder, EmbeddingModel]:
    """Return an encoder that plans, and the model of a configuration without weights."""
    twin = tiny_encoder(kind)
    model = outline.put_in(twin.model, outline.backbone_outline(config, torch.bfloat16, LoraSettings()))
    model.attention_kernel = kernel
    return twin, model


def counted(config: Any, kernel: str | None, layers: int) -> tuple[Work, Attention]:
    """Return the work of forward and backward passes of a micro-batch with LoRA."""
    deep = type(config)(**{**config.to_dict(), "num_hidden_layers": layers})
    twin, model = put_on_meta(config.model_type, deep, kernel)
    batch = TextBatch.from_examples(load_examples(DataSource(limit=64)).examples)
    micro = twin.plan(batch.texts, 2048).groups[0].make()
    work, attention = Work(model), Attention()
    with work, attention:
        rows_RD = model(**micro.inputs(META))
        torch.autograd.backward((rows_RD * torch.empty_like(rows_RD)).sum())
    return work, attention


# Measured: 194, 307 and 112 operations a layer in both passes, 1 and up to 12 calls of attention.
@pytest.mark.parametrize(
    ("config", "kernel", "operations", "attention_calls"),
    [(LLAMA_7B, "flex", 200, 1), (LLAMA_7B, "gathered", 320, 8), (BERT_BASE, "flex", 120, 1)],
    ids=["LLaMA-7B flex", "LLaMA-7B gathered", "BERT flex"],
)
def test_a_layer_takes_few_operations_and_reads_no_value(
    config: Any, kernel: str, operations: int, attention_calls: int
) -> None:
    (shallow, few), (deep, many) = (counted(config, kernel, layers) for layers in (2, 4))
    assert (deep.kernels.total() - shallow.kernels.total()) / 2 <= operations, deep.kernels - shallow.kernels
    assert (many.shapes.total() - few.shapes.total()) / 2 <= attention_calls
    assert not deep.values, "the host would wait for the device"


def test_attention_has_few_shapes_in_100_batches() -> None:
    """FlexAttention is compiled once for all lengths; a kernel that plans for each shape needs few of them."""
    examples = load_examples(DataSource(limit=1600)).examples
    config = type(LLAMA_7B)(**{**KINDS["llama"].config().to_dict(), "num_hidden_layers": 1})
    twin, model = put_on_meta("llama", config, "flex")
    with torch.no_grad(), MemoryLedger(), Attention() as attention:
        for first in range(0, 1600, 16):
            texts = TextBatch.from_examples(examples[first : first + 16]).texts
            for micro in twin.plan(texts, 2048).micro_batches:
                model(**micro.inputs(META))
    assert attention.shapes.total() >= 100
    assert len(attention.shapes) <= 16, "multiples of 128 up to the token budget"


@pytest.fixture(scope="module")
def device_runs() -> list[dict[str, Any]]:
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this version of torch has no devices written in Python")
    done = run("python", Path(__file__).with_name("device_runs.py"), seconds=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_step_on_another_device_has_the_losses_and_gradients_of_the_cpu(device_runs: list[dict[str, Any]]) -> None:
    """No tensor of the host is among those of the device; kernels of a GPU are replaced by plain ones."""
    steps = [each for each in device_runs if each["run"] == "step"]
    layouts = {(each["layout"], each["kernel"], each["cached"]) for each in steps}
    assert layouts >= {(layout, None, cached) for layout in ("trie", "packed", "padded") for cached in (False, True)}
    assert layouts >= {(layout, kernel, False) for layout in ("trie", "packed") for kernel in ("flex", "varlen")}
    for each in steps:
        # float32 with sums in another order
        assert each["loss"] < 1e-6, each
        assert each["gradient"] < 1e-5, each


def test_the_host_waits_once_a_step(device_runs: list[dict[str, Any]]) -> None:
    """It waits for the losses, which are checked before the backward pass. Padded texts: transformers reads each mask."""
    for each in device_runs:
        if each["run"] == "step":
            passes = each["micro_batches"] * (2 if each["cached"] else 1) * (each["layout"] == "padded")
            assert sum(each["waits"].values()) <= 1 + passes, each
        elif each["run"] == "encode":
            assert sum(each["waits"].values()) == 1, "all rows are copied at once"


def test_copies_to_the_device_do_not_grow_with_layers_or_texts(device_runs: list[dict[str, Any]]) -> None:
    for each in device_runs:
        if each["run"] == "step" and each["kernel"] == "flex":
            # Measured: 88 for 6 micro-batches of a trie, 91 for 5 of packed texts, losses of two batches included.
            assert sum(each["copies"].values()) <= 15 * each["micro_batches"] + 24, each


def test_several_processes_exchange_tensors_of_the_device_only(device_runs: list[dict[str, Any]]) -> None:
    """NCCL refuses others; the run fails on the first one."""
    (processes,) = (each for each in device_runs if each["run"] == "processes")
    assert processes["exchanged"]["all_reduce"] >= 2 * 2, "rows and gradients of two steps"
    assert processes["exchanged"]["broadcast"] > 0

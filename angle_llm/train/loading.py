"""Load the encoder of a training run; with ZeRO-3 or FSDP, only rank 0 reads the weights.

The strategy sends every weight from rank 0 when it partitions the model, so other ranks need shapes only. Otherwise a
machine with 8 GPUs would hold the base model 8 times in its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch

from angle_llm.data.formats import Example, texts_of
from angle_llm.device import emulates_bfloat16
from angle_llm.io import log
from angle_llm.model import meta_model
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layers.compiled_rotary import use_compiled_rotary
from angle_llm.model.layers.fingerprint import ORIGINAL, weights_fingerprint
from angle_llm.model.layers.lora import count_parameters, is_adapted, make_trainable
from angle_llm.model.layers.quantized_layers import bits_text
from angle_llm.model.layers.replacements import replaced_layers
from angle_llm.model.layout.support import probe_layouts
from angle_llm.model.source.backbone import empty_backbone, load_config
from angle_llm.model.source.resolve import ModelSource
from angle_llm.model.source.tokenizer import plain_ids
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import TrainSettings
from angle_llm.train.distributed import Processes
from angle_llm.train.objectives import task_of

LARGE_ON_CPU = 3 * 10**9
"""Number of weights above which training on a CPU needs `allow_cpu`."""


_SAMPLED_EXAMPLES = 1000
"""Maximum number of examples whose texts `long_texts` counts."""


def check_cpu(source: ModelSource, settings: TrainSettings, processes: Processes) -> None:
    """Raise `SettingsError` for a model with more than `LARGE_ON_CPU` weights on a CPU, without `allow_cpu`."""
    if processes.device.type != "cpu" or settings.allow_cpu:
        return
    with torch.device("meta"):
        backbone = empty_backbone(load_config(source.backbone, source.backbone_revision), torch.float32)
    weights = sum(parameter.numel() for parameter in backbone.parameters())
    if weights > LARGE_ON_CPU:
        raise SettingsError(
            f"{source.path} has {weights / 1e9:.1f} billion weights, and torch finds no GPU. Training takes days to weeks on a "
            "CPU. Set --allow-cpu to train here, or use a smaller model."
        )


def with_supported_dtype(settings: TrainSettings, processes: Processes) -> TrainSettings:
    """Return settings without bfloat16 if the GPU only emulates it (T4, V100): float16, or float32 without a gradient scale.

    Gradients are not scaled with ZeRO, or if all weights are trained.
    """
    if settings.model.dtype != "bfloat16" or not emulates_bfloat16(processes.device):
        return settings
    model = replace(settings.model, dtype="float16" if settings.lora.rank and not processes.zero_stage else "float32")
    if processes.is_main:
        log(f"{torch.cuda.get_device_name(processes.device)} only emulates bfloat16: training in {model.dtype}")
    return replace(settings, model=model)


def check_partition(source: ModelSource, settings: TrainSettings, partition: Literal["ZeRO-3", "FSDP"] | None) -> None:
    """Raise `SettingsError` for a model or a task that cannot be trained with partitioned weights (ZeRO-3 or FSDP)."""
    if partition is None:
        return
    path = settings.model.path
    bits = settings.model.bits
    card = source.card
    problem = task_of(settings).partition_problem
    if source.adapter is not None:
        problem = (
            f"continue training the adapter in {path}. Use ZeRO-2, or merge the adapter (angle-llm merge) and train the "
            "merged model"
        )
    elif bits is not None:
        problem = f"partition a base quantised to {bits_text(bits)}. Use ZeRO-2, or --model.bits None"
    elif card is not None and (card.dimensions or card.layers):
        problem = f"train {path}, which uses only some layers or dimensions of its base model. Use ZeRO-2"
    elif source.dense:
        problem = f"train {path}, which has Dense modules. Use ZeRO-2"
    elif partition == "FSDP" and not settings.lora.rank:
        problem = "train all weights (--lora.rank 0). Use ZeRO-3, or train an adapter"
    if problem is not None:
        raise SettingsError(f"{partition} cannot {problem}.")


def load_encoder(
    source: ModelSource, settings: TrainSettings, processes: Processes
) -> tuple[SentenceEncoder, list[str]]:
    """Load the encoder of a training run, with its adapter, layouts and head; return it and lines for the log.

    All ranks get the same layouts. With ZeRO-3 or FSDP, the weights are on the CPU of rank 0, and on the meta device of all
    other ranks; the strategy fills them.

    Raises:
        RemoteRankError: with ZeRO-3 or FSDP, if another rank failed.
        SettingsError: if the model cannot be trained with the task of the settings.
        ArtifactError, SettingsError, QuantizationError, ValueError, FileNotFoundError: see `SentenceEncoder.from_pretrained`.
    """
    encoder = _with_equal_layouts(_with_weights(source, settings, processes), processes)
    path = settings.model.path
    lora = settings.lora
    on_gpu = processes.device.type == "cuda"
    report = []
    # Dtypes.
    if settings.autocasts:
        report.append("all weights are trained: weights are float32, and matrix products are computed in bfloat16")
    elif encoder.dtype == torch.float32 and on_gpu:
        report.append("float32 matrix products are computed in TF32; NVIDIA_TF32_OVERRIDE=0 prevents this")
    dtype = str(encoder.dtype).removeprefix("torch.")
    if lora.rank and source.card is not None and source.card.dtype != dtype:
        report.append(
            f"{path} was trained in {source.card.dtype} and is loaded in {dtype}: its vectors change; "
            "--model.dtype auto keeps its dtype"
        )
    # Adapter.
    if is_adapted(encoder.model.backbone):
        make_trainable(encoder.model.backbone)
        encoder.model.dense.requires_grad_(lora.train_dense)
        report.append(f"training continues from the adapter in {path} (rank {lora.rank})")
    elif lora.rank:
        encoder.add_lora(lora)
    # Head, after the adapter, which may replace the output projection of an OPT model.
    head = task_of(settings).head(encoder, source)
    encoder = encoder.changed(model=encoder.model.changed(head, autocasts=settings.autocasts))
    # Layout of texts, and the attention that computes it.
    layouts = encoder.layouts
    if layouts.layout == "padded":
        kernel = "attention of the library"
    else:
        kernel = "FlexAttention" if on_gpu else "gathered keys"
        use_compiled_rotary(encoder.model)
    reason = f" ({layouts.reason})" if layouts.reason else ""
    report.append(f"texts: {layouts.layout}{reason}; {kernel}; replaced layers: {replaced_layers(encoder.model)}")
    trainable, total = count_parameters(encoder.model)
    report.append(f"training {trainable:,} of {total:,} parameters ({trainable / total:.2%})")
    return encoder, report


def long_texts(encoder: SentenceEncoder, data: Sequence[Example]) -> Iterator[str]:
    """Yield a line for the log if `max_length` cuts 1 % or more of the texts of a sample; the prompt is not counted."""
    sample = range(0, len(data), len(data) // _SAMPLED_EXAMPLES + 1)
    texts = [text for index in sample for text in texts_of(data[index])]
    count = sum(len(ids) > encoder.max_length for ids in plain_ids(encoder.tokenizer, texts, encoder.max_length + 1))
    if count * 100 >= len(texts):
        yield (
            f"{count:,} of {len(texts):,} sampled texts have more than {encoder.max_length} tokens (--model.max-length): the "
            "rest of these texts is not read"
        )


def _with_weights(source: ModelSource, settings: TrainSettings, processes: Processes) -> SentenceEncoder:
    """Load an encoder; with ZeRO-3 or FSDP, ranks other than 0 get one whose weights are on the meta device."""
    model = settings.loaded_model
    partitioned = processes.partition is not None
    # The strategy fills the weights of the other ranks from rank 0, and `_with_equal_layouts` copies its layouts.
    if partitioned and not processes.is_main:
        encoder, config = meta_model.tiny_encoder_copy(source, model)
        backbone = meta_model.meta_backbone(config, meta_model.stored_dtype(config, model.dtype))
        return encoder.changed(model=meta_model.put_in(encoder.model, backbone))
    # `from_pretrained` would probe on `load_device` and for encoding. A layout must be probed on the device, in the dtype and
    # with the dropout of training, and partitioned weights are on the CPU until they are partitioned.
    probe_later = settings.layout == "auto" and (partitioned or processes.device.type == "cuda")
    encoder = SentenceEncoder.from_pretrained(
        source,
        prompt=model.prompt,
        pooling=model.pooling,
        max_length=model.max_length,
        dtype=model.dtype,
        bits=model.bits,
        device=processes.load_device,
        layout="padded" if probe_later else settings.layout,  # padded: without a probe
    )
    if not probe_later:
        return encoder
    layouts = probe_layouts(
        encoder.model.backbone,
        encoder.pooling,
        causal=encoder.model.options.causal,
        device=processes.device,
        autocasts=settings.autocasts,
        trains=True,
    )
    return encoder.changed(layouts=layouts)


def _with_equal_layouts(encoder: SentenceEncoder, processes: Processes) -> SentenceEncoder:
    """Return an encoder with the same layouts on all ranks; with ZeRO-3 or FSDP, also with the base of rank 0."""
    if processes.partition and processes.world_size > 1:
        base, base_revision, layouts, fingerprint = processes.from_main(
            lambda: (encoder.base, encoder.base_revision, encoder.layouts, weights_fingerprint(encoder.model.backbone))
        )
        setattr(encoder.model.backbone, ORIGINAL, fingerprint)
        return encoder.changed(base=base, base_revision=base_revision, layouts=layouts)
    # If a rank needs padded texts, all ranks pad, with equal reasons, because ranks compare their layouts later.
    padded = [layouts for layouts in processes.gather(encoder.layouts) if layouts.layout == "padded"]
    return encoder.changed(layouts=padded[0]) if padded else encoder

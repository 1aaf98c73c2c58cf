"""Load the encoder of a training run; with ZeRO-3, only rank 0 reads the weights.

DeepSpeed sends every weight from rank 0 when it partitions the model, so other ranks need shapes only. Otherwise a
machine with 8 GPUs would hold the base model 8 times in its memory.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from angle_llm.model import meta_model
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layers.fingerprint import ORIGINAL, weights_fingerprint
from angle_llm.model.layers.lora import without_adapter
from angle_llm.model.masked_tokens import TokenMasker, token_prediction
from angle_llm.model.source.backbone import empty_backbone, load_config
from angle_llm.model.source.resolve import ModelSource
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import TrainSettings
from angle_llm.train.distributed import Processes

LARGE_ON_CPU = 3 * 10**9
"""Number of weights above which training on a CPU needs `allow_cpu`."""


def check_cpu(source: ModelSource, settings: TrainSettings, processes: Processes) -> None:
    """Raise `SettingsError` for a model with more than `LARGE_ON_CPU` weights on a CPU, without `allow_cpu`."""
    if processes.device.type != "cpu" or settings.allow_cpu:
        return
    with torch.device("meta"):
        backbone = empty_backbone(load_config(source.backbone, source.backbone_revision), torch.float32)
    weights = sum(parameter.numel() for parameter in backbone.parameters())
    if weights > LARGE_ON_CPU:
        raise SettingsError(
            f"{source.path} has {weights / 1e9:.1f} billion weights, and there is no GPU. Training takes days to weeks on a "
            "CPU. Set --allow-cpu to train here, or use a smaller model."
        )


def check_zero_3(source: ModelSource, settings: TrainSettings, zero_stage: int) -> None:
    """Raise `SettingsError` for a model, or a pretraining task, that cannot be trained with ZeRO-3."""
    if zero_stage != 3:
        return
    path, bits, task, card = settings.model.path, settings.model.bits, settings.pretraining.task, source.card
    for refused, problem in (
        (
            source.adapter is not None,
            f"continue training the adapter in {path}. Use ZeRO-2, or merge the adapter (angle-llm merge) and train the merged "
            "model",
        ),
        (bits is not None, f"partition a base quantised to {bits} bits. Use ZeRO-2, or --model.bits None"),
        (
            card is not None and bool(card.dimensions or card.layers),
            f"train {path}, which uses only some layers or dimensions of its base model. Use ZeRO-2",
        ),
        (bool(source.dense), f"train {path}, which has Dense modules. Use ZeRO-2"),
        (task is not None, f"train with --pretraining.task {task}. Use ZeRO-2"),
    ):
        if refused:
            raise SettingsError(f"ZeRO-3 cannot {problem}.")


def load_encoder(source: ModelSource, train: TrainSettings, processes: Processes) -> SentenceEncoder:
    """Load the encoder of a training run; all ranks get the same layouts of texts.

    With ZeRO-3, the weights are on the CPU of rank 0, and on the meta device of the other ranks; `ZeroStrategy` fills
    them.

    Raises:
        RemoteRankError: if the layers of the ranks differ. If rank 0 cannot load the weights, it ends, and the other
            ranks report a lost process (`ProcessWatch`).
        ArtifactError, PromptError, QuantizationError, ValueError, FileNotFoundError: see
            `SentenceEncoder.from_pretrained`.
    """
    settings = train.loaded_model
    partitioned = processes.zero_stage == 3
    without_weights = partitioned and not processes.is_main
    if without_weights:
        encoder, config = meta_model.tiny_encoder_copy(source, settings)
        backbone = meta_model.meta_backbone(config, meta_model.stored_dtype(config, settings.dtype))
        encoder.model = meta_model.put_in(encoder.model, backbone)
    else:
        encoder = SentenceEncoder.from_pretrained(
            source,
            prompt=settings.prompt,
            pooling=settings.pooling,
            max_length=settings.max_length,
            dtype=settings.dtype,
            bits=settings.bits,
            device=processes.load_device,
            layout=train.layout,
        )
    encoder.model.autocasts = train.autocasts
    # Partitioned weights are on the CPU until DeepSpeed partitions them.
    probes_again = partitioned or (train.autocasts and processes.device.type == "cuda")
    if train.layout == "auto" and probes_again and not without_weights:
        encoder.probe_layouts(processes.device)
    if partitioned and processes.world_size > 1:
        encoder.base, encoder.base_revision, encoder.layouts, fingerprint = processes.from_main(
            lambda: (encoder.base, encoder.base_revision, encoder.layouts, weights_fingerprint(encoder.model.backbone))
        )
        setattr(encoder.model.backbone, ORIGINAL, fingerprint)
        processes.check_equal("layers of the model", _layers(encoder))
    else:  # if a rank needs padded texts, all ranks pad, with equal reasons, because ranks compare their layouts later
        found = processes.gather(encoder.layouts)
        encoder.layouts = next((each for each in found if each.layout == "padded"), encoder.layouts)
    return encoder


def _layers(encoder: SentenceEncoder) -> str:
    """Return a hash of the model without weight values: weight names, shapes and dtypes, pooling and layouts.

    The hash must be equal on all ranks.
    """
    model = encoder.model
    tensors = [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]
    found = (encoder.pooling, model.causal, encoder.layouts, encoder.max_length)
    described = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    return hashlib.sha256(repr((found, described)).encode()).hexdigest()[:16]


def check_bidirectional(encoder: SentenceEncoder) -> None:
    """Check that the encoder can be trained with MNTP.

    Raises:
        SettingsError: for causal attention.
    """
    if encoder.model.causal:
        raise SettingsError(
            "--pretraining.task mntp: expected bidirectional attention, got causal attention. Set --model.attention "
            "bidirectional."
        )


def prepare_pretraining(encoder: SentenceEncoder, source: ModelSource, train: TrainSettings) -> None:
    """Set up the model and the token masker for `train.pretraining.task`; do nothing if it is None.

    `source` is the model that the encoder was loaded from.

    Raises:
        SettingsError: for MNTP with causal attention, or a model whose output layer is not supported; for SimCSE without
            dropout.
    """
    model, settings = encoder.model, train.pretraining
    if settings.task == "mntp":
        check_bidirectional(encoder)
        model.dense.requires_grad_(False)  # not used
        model.prediction = token_prediction(source, without_adapter(model.backbone))
        vocabulary = model.prediction.vocabulary
        encoder.masker = TokenMasker.of(encoder.tokenizer, vocabulary, settings.mask_fraction, train.seed)
    elif settings.task == "simcse":
        if not any(module.p for module in model.modules() if isinstance(module, nn.Dropout)):
            raise SettingsError(
                "--pretraining.task simcse: expected dropout above 0, got 0: both embeddings of a text would be equal. Set "
                "--lora.dropout 0.1 with --lora.rank above 0."
            )
        model.two_views = True

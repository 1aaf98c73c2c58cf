"""Load the encoder of a training run; with ZeRO-3, only rank 0 reads the weights.

DeepSpeed sends every weight from rank 0 when it partitions the model, so other ranks need shapes only. Otherwise a
machine with 8 GPUs would hold the base model 8 times in its memory.
"""

from __future__ import annotations

import hashlib

from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.memory import meta_model
from angle_llm.model.source.backbone import weights_fingerprint
from angle_llm.model.source.quantization import ORIGINAL
from angle_llm.model.source.resolve import ModelSource
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import ModelSettings
from angle_llm.train.distributed import Processes


def load_encoder(source: ModelSource, settings: ModelSettings, processes: Processes) -> SentenceEncoder:
    """Load the encoder of a training run.

    With ZeRO-3, the weights are on the CPU of rank 0, and on the meta device of the other ranks; `ZeroStrategy` fills
    them. Quantized models are loaded in full on every rank.

    Raises:
        SettingsError: with ZeRO-3, for a saved adapter, or a model with fewer layers or dimensions than its base model.
        RemoteRankError: if the layers of the ranks differ. If rank 0 cannot load the weights, it ends, and the other
            ranks report a lost process (`ProcessWatch`).
        ArtifactError, PromptError, QuantizationError, ValueError, FileNotFoundError: see
            `SentenceEncoder.from_pretrained`.
    """
    if processes.zero_stage == 3 and source.adapter is not None:
        raise SettingsError(
            f"ZeRO-3 cannot continue training the adapter in {settings.path}. Use ZeRO-2, or merge the adapter (angle-llm "
            "merge) and train the merged model."
        )
    partitioned = processes.zero_stage == 3 and settings.bits is None
    if partitioned and source.card is not None and (source.card.dimensions or source.card.layers):
        raise SettingsError(
            f"ZeRO-3 cannot train {settings.path}, which uses only some layers or dimensions of its base model. Use ZeRO-2."
        )
    if partitioned and not processes.is_main:
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
            device=processes.load_device(settings.bits),
        )
        if partitioned:  # the weights are on the CPU until DeepSpeed partitions them
            encoder.probe_layouts(processes.device)
    if partitioned and processes.world_size > 1:
        encoder.base, encoder.base_revision, encoder.layouts, fingerprint = processes.from_main(
            lambda: (encoder.base, encoder.base_revision, encoder.layouts, weights_fingerprint(encoder.model.backbone))
        )
        setattr(encoder.model.backbone, ORIGINAL, fingerprint)
        processes.check_equal("layers of the model", _layers(encoder))
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

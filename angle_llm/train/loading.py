"""Load the encoder of a run; under ZeRO-3, rank 0 alone reads the weights.

DeepSpeed sends each weight from rank 0 when it partitions it, so other ranks need shapes only. Otherwise a machine with
8 GPUs would hold the base 8 times in its memory.
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
    """Load the encoder of a run.

    Under ZeRO-3, unless quantized, the weights of all ranks but 0 are on the meta device; `ZeroStrategy` fills them.

    Raises:
        SettingsError: for a saved adapter, or a model with fewer dimensions, under ZeRO-3.
        RemoteRankError: if the layers of the ranks differ. If rank 0 cannot load the weights, it ends, and the other
            ranks report a lost process (`ProcessWatch`).
        ArtifactError, PromptError, QuantizationError, ValueError, FileNotFoundError: see
            `SentenceEncoder.from_pretrained`.
    """
    if processes.zero_stage == 3 and source.adapter is not None:
        raise SettingsError(
            f"ZeRO-3 does not continue the adapter in {settings.path}. Use ZeRO-2, or merge the adapter (angle-llm merge) and "
            "train the merged model."
        )
    partitioned = processes.zero_stage == 3 and settings.bits is None
    if partitioned and source.card is not None and (source.card.dimensions or source.card.layers):
        raise SettingsError(f"ZeRO-3 does not train {settings.path}, which is cut to some layers or dimensions.")
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
    """Return a hash of names, shapes and dtypes of the weights and of the probe results, equal on all ranks."""
    model = encoder.model
    tensors = [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]
    found = (encoder.pooling, model.causal, encoder.layouts, encoder.max_length)
    described = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    return hashlib.sha256(repr((found, described)).encode()).hexdigest()[:16]

"""Load the encoder of a run; under ZeRO-3, rank 0 alone reads the weights.

DeepSpeed sends each weight from rank 0 when it partitions it, so other ranks need shapes only. Otherwise a machine with
8 GPUs would hold the base 8 times in its memory.
"""

from __future__ import annotations

import hashlib

from angle_llm.config import ModelSettings
from angle_llm.model import hub, outline
from angle_llm.model.artifact import EncoderCard
from angle_llm.model.backbone import weights_fingerprint
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.quantization import ORIGINAL
from angle_llm.model.saved_lora import adapter_folder
from angle_llm.model.sharing import sharing_on
from angle_llm.settings_io import SettingsError
from angle_llm.train.distributed import Processes


def load_encoder(settings: ModelSettings, processes: Processes) -> SentenceEncoder:
    """Load the encoder. Under ZeRO-3, without bits, other ranks than 0 get one whose weights are on the meta device;
    `ZeroStrategy` fills them.

    Raises:
        SettingsError: for a saved adapter, or a model with fewer dimensions, under ZeRO-3.
        RemoteRankError: if the layers of the ranks differ. If rank 0 cannot load the weights, it ends, and the other
            ranks report a lost process (`ProcessWatch`).
        ArtifactError, PromptError, QuantizationError, ValueError, FileNotFoundError: see
            `SentenceEncoder.from_pretrained`.
    """
    if processes.zero_stage == 3 and adapter_folder(settings.path, settings.revision) is not None:
        raise SettingsError(
            f"ZeRO-3 does not continue the adapter in {settings.path}. Use ZeRO-2, or merge the adapter (angle-llm merge) and "
            "train the merged model."
        )
    partitioned = processes.zero_stage == 3 and settings.bits is None
    if partitioned and (folder := hub.find(settings.path, settings.revision).folder) is not None:
        card = EncoderCard.read(folder)
        if card.dimensions is not None or card.layers is not None:
            raise SettingsError(f"ZeRO-3 does not train {settings.path}, which is cut to some layers or dimensions.")
    if partitioned and not processes.is_main:
        encoder, config = outline.encoder_twin(settings)
        backbone = outline.backbone_outline(config, outline.stored_dtype(config, settings.dtype))
        encoder.model = outline.put_in(encoder.model, backbone)
    else:
        encoder = SentenceEncoder.from_pretrained(
            settings.path,
            prompt=settings.prompt,
            pooling=settings.pooling,
            max_length=settings.max_length,
            dtype=settings.dtype,
            revision=settings.revision,
            bits=settings.bits,
            device=processes.load_device(settings.bits),
        )
        if partitioned:  # the weights are on the CPU until DeepSpeed partitions them
            encoder.sharing = sharing_on(encoder, processes.device)
    if partitioned and processes.world_size > 1:
        encoder.base, encoder.base_revision, encoder.sharing, fingerprint = processes.from_main(
            lambda: (encoder.base, encoder.base_revision, encoder.sharing, weights_fingerprint(encoder.model.backbone))
        )
        setattr(encoder.model.backbone, ORIGINAL, fingerprint)
        processes.check_equal("layers of the model", _layers(encoder))
    return encoder


def _layers(encoder: SentenceEncoder) -> str:
    """Return a hash of what all ranks must have in common to exchange weights: names, shapes, dtypes, and findings of
    the probes."""
    model = encoder.model
    tensors = [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]
    found = (encoder.pooling, model.causal, encoder.sharing, encoder.max_length, model._last_layer is None)
    described = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    return hashlib.sha256(repr((found, described)).encode()).hexdigest()[:16]

"""LoRA through peft: added to a backbone, loaded onto it, described."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from angle_llm.settings import LoraSettings


def add_lora(backbone: nn.Module, settings: LoraSettings) -> nn.Module:
    """Wraps the backbone; only the adapter trains, in float32 whatever the base's dtype.

    Raises:
        ValueError: if no layer of the backbone bears a target's name.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        task_type=TaskType.FEATURE_EXTRACTION,
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules="all-linear" if settings.targets == ["all-linear"] else list(settings.targets),
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        bias="none",
    )
    adapted: nn.Module = get_peft_model(backbone, config)
    adapted.base_model.model.config.use_cache = False  # type: ignore[union-attr]
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    return adapted


def load_lora(backbone: nn.Module, folder: Path, *, trainable: bool = False) -> nn.Module:
    """Puts a saved adapter on the backbone it was trained on."""
    from peft import PeftModel

    adapted: nn.Module = PeftModel.from_pretrained(backbone, str(folder), is_trainable=trainable)
    return adapted


def is_adapted(model: nn.Module) -> bool:
    """Whether peft has wrapped the model."""
    return hasattr(model, "peft_config")


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(trainable, all) parameters."""
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return trainable, sum(parameter.numel() for parameter in model.parameters())

"""What cannot work together, known before any weight is loaded.

A row of the table is a case, why it cannot work, and the nearest thing that does. Everything else is let through: LoRA,
DoRA, bases in 4 or 8 bits, kept and cached graphs under one process, data parallel and every ZeRO stage compute the same
(tests/training/spreads.py). Settings that contradict each other whatever the launch are refused in `settings`; what needs
the loaded model to tell (a kind that cannot be held in bits, activation checkpointing under a prefix trie), where it shows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

from angle_llm.config import SettingsError, TrainSettings
from angle_llm.train.launch import Launch


class Refusal(NamedTuple):
    """A case that cannot work."""

    holds: Callable[[TrainSettings, Launch], bool]
    why: str
    instead: str


TABLE: list[Refusal] = [
    Refusal(
        lambda settings, launch: settings.model.bits is not None and importlib.util.find_spec("bitsandbytes") is None,
        "model.bits needs the package bitsandbytes, which is not installed",
        "pip install 'angle_llm[quantization]', or leave model.bits out",
    ),
    Refusal(
        lambda settings, launch: launch.other_strategy is not None,
        "the launcher asks for FSDP, Megatron-LM or another way of dividing a model, and this would be data parallel without "
        "a word",
        "divide weights with ZeRO-3, as in accelerate launch --config_file deepspeed_configs/zero3.yaml",
    ),
    Refusal(
        lambda settings, launch: launch.compiles,
        "the launcher asks for torch.compile, and micro-batches of every shape would be compiled one by one",
        "launch with --dynamo_backend no",
    ),
    Refusal(
        lambda settings, launch: launch.casts,
        "the DeepSpeed config enables bf16 or fp16, which would round the adapter and its optimizer state too",
        "take that section out: model.dtype is the dtype of the base, and the adapter stays float32",
    ),
    Refusal(
        lambda settings, launch: launch.splits_layers,
        "the DeepSpeed config asks for tensor, pipeline or sequence parallelism, under which processes do not hold texts of "
        "their own",
        "take that section out: ZeRO-3 divides weights, and gradient caching bounds the activations",
    ),
]


def check_can_work(settings: TrainSettings, launch: Launch) -> None:
    """Refuses settings that cannot work the way the run was launched.

    Raises:
        SettingsError: with the reason, and the nearest thing that works.
    """
    for refusal in TABLE:
        if refusal.holds(settings, launch):
            raise SettingsError(f"{refusal.why}. Instead: {refusal.instead}.")

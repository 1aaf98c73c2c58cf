"""What cannot work together, known before any weight is loaded.

A row of the table is a case, why it cannot work, and the nearest thing that does. What needs the loaded model to tell (a
prefix trie under activation checkpointing, a fingerprint that differs) is refused where it shows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

from angle_llm.settings import SettingsError, TrainSettings
from angle_llm.training.launch import Launch


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
        lambda settings, launch: settings.model.bits is not None and launch.zero_stage == 3,
        "ZeRO-3 divides weights among processes, and the packed weights of model.bits cannot be put together again from "
        "their parts",
        "use ZeRO-2, where each process holds the whole base (in 4 bits a quarter of the memory of bfloat16), or leave "
        "model.bits out",
    ),
    Refusal(
        lambda settings, launch: settings.lora.dora and launch.zero_stage == 3,
        "DoRA reads the base weights of a layer outside its forward pass, and under ZeRO-3 they are not there then",
        "use ZeRO-2, or plain LoRA (lora.dora False)",
    ),
    Refusal(
        lambda settings, launch: settings.model.dtype == "float16" and launch.zero_stage > 0,
        "a float16 base needs loss scaling under DeepSpeed, which is switched off here",
        "use model.dtype bfloat16 or float32, or leave DeepSpeed out",
    ),
    Refusal(
        lambda settings, launch: launch.compiles,
        "the launcher asks for torch.compile, and micro-batches of every shape would be compiled one by one",
        "launch with --dynamo_backend no",
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

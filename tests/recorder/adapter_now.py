"""Access to internals that the recorder needs, in the current tree."""

from collections.abc import Iterator
from pathlib import Path

from angle_llm import SentenceEncoder, TextBatch, TrainSettings
from angle_llm.cli import main as command_line
from angle_llm.data.mixture import load_mixture
from angle_llm.settings_io import load_settings
from angle_llm.train.batches import BatchPlanner, make_losses
from angle_llm.train.memory import TokenBudget
from angle_llm.train.schedule import StepSchedule

__all__ = ["command_line"]
STS_COMMAND = ["eval", "sts"]
SETTINGS = ".yaml"
"""End of the names of the settings files, which have the setting names of the tree."""
METRICS = {"layout": "way"}
"""Names in metrics.jsonl that differ from those at the tag: {name here: name at the tag}."""


def token_ids(encoder: SentenceEncoder, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, prompt and special tokens included."""
    return encoder.tokenize(texts)


def batches(config: Path, encoder: SentenceEncoder) -> Iterator[tuple[int, list[list[int]], list[TextBatch]]]:
    """For each optimizer step: the epoch, the examples of its batches, and the batches."""
    settings = load_settings(TrainSettings, config)
    data = load_mixture(settings.data, Path("cache"))
    planner = BatchPlanner(encoder, data, make_losses(settings), 1, TokenBudget(8192, 0))
    for epoch, together in StepSchedule(data.draws, settings).after(0):
        yield epoch, together, [planner.batch(indices) for indices in together]

"""Access to internals that the recorder needs, in the tree of the tag `before-redesign`."""

from collections.abc import Iterator
from importlib import import_module  # these modules are not in the current tree, where linters look for them
from pathlib import Path

from angle_llm import SentenceEncoder, TextBatch, TrainSettings

command_line = import_module("angle_llm.cli").main
load_mixture = import_module("angle_llm.data.mixture").load_mixture
load_settings = import_module("angle_llm.settings").load_settings
BatchPlan = import_module("angle_llm.training.schedule").BatchPlan
Wordings = import_module("angle_llm.training.sets").Wordings

STS_COMMAND = ["eval"]
SETTINGS = ".before.yaml"
"""End of the names of the settings files, which have the setting names of the tree."""
METRICS: dict[str, str] = {}


def token_ids(encoder: SentenceEncoder, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, prompt and special tokens included."""
    return encoder.sentences(texts)


def batches(config: Path, encoder: SentenceEncoder) -> Iterator[tuple[int, list[list[int]], list[TextBatch]]]:
    """For each optimizer step: the epoch, the examples of its batches, and the batches."""
    settings = load_settings(TrainSettings, config)
    data = load_mixture(settings.data, Path("cache"))
    wordings = Wordings(encoder, data)
    for epoch, together in BatchPlan(data.draws, settings).after(0):
        yield epoch, together, [wordings.batch(data, indices) for indices in together]

"""Experiment trackers of a run: those of accelerate, which write the numbers of metrics.jsonl elsewhere too."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from angle_llm.io import log
from angle_llm.settings_io import SettingsError

PROJECT = "angle_llm"
"""Project (mlflow: experiment) of all runs; the run has the name of its directory."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise `SettingsError` for a tracker that is not installed; accelerate would omit it without a message."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # without a file: a folder of the name in the working directory
            raise SettingsError(
                f"--report-to: {name} is not installed. Install it with pip install {name}, or omit it."
            )


class Trackers:
    """The trackers of a run. One that fails is reported and off from then on; the run continues."""

    def __init__(self, names: Sequence[str], folder: Path, step: int | None, settings: Mapping[str, Any]) -> None:
        """Start the trackers. `step` is that of the checkpoint to resume from, None without one.

        TensorBoard continues in `folder`/tensorboard and hides later values; a run that starts again hides all. In the
        others a resumed run is a new one, named after its first step.
        """
        self._trackers: dict[str, Any] = {}
        for name in names:
            self._attempt(name, lambda name=name: self._start(name, folder.resolve(), step, settings))

    def _start(self, name: str, folder: Path, step: int | None, settings: Mapping[str, Any]) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        kind: Any = LOGGER_TYPE_TO_CLASS[name]
        title = folder.name if step is None else f"{folder.name} from step {step + 1}"
        if name == "tensorboard":
            tracker = kind("tensorboard", folder, purge_step=0 if step is None else step + 1)
        elif name == "mlflow":
            tracker = kind(PROJECT, run_name=title)
        else:
            tracker = kind(PROJECT, name=title)
        tracker.start()
        self._trackers[name] = tracker
        if name != "tensorboard":  # which would write them as a run of its own
            tracker.store_init_configuration(flat(settings))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers of a step. Characters that some trackers refuse become underscores in names."""
        cleaned = {re.sub(r"[^-/\w.]", "_", name): value for name, value in values.items()}
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, lambda tracker=tracker: tracker.log(cleaned, step=step))

    def close(self) -> None:
        """End the trackers."""
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, tracker.finish)

    def _attempt(self, name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:  # of a library or its server
            self._trackers.pop(name, None)
            log(f"warning: the tracker {name} failed and is off from here on ({type(error).__name__}: {error})")


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted name, lists as text."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, bool | int | float | str) else str(value)
    return found

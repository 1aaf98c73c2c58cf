"""Log the metrics of a run to metrics.jsonl and to experiment trackers, and compute rates and utilisation of a step.

`Metrics` writes the file and the trackers (`Trackers`). `StepMeter` computes counts, rates and utilisation of a step.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from angle_llm.io import log
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.source.weights import FlopsPerToken
from angle_llm.settings.parsing import SettingsError, settings_to_dict
from angle_llm.settings.train import TrainSettings
from angle_llm.train.step import StepResult

PROJECT = "angle_llm"
"""Name of the project (in mlflow: experiment) of all runs. The name of a run is the name of its directory."""


def check_trackers(names: Sequence[str]) -> None:
    """Check that trackers are installed, because accelerate omits a missing tracker without a message.

    Raises:
        SettingsError: for a tracker that is not installed.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        # A package without a file is a folder with this name in the working directory.
        if spec is None or spec.origin is None:
            raise SettingsError(
                f"--report-to: {name} is not installed. Install it with pip install {name}, or omit it."
            )


class Trackers:
    """The experiment trackers of a run. A tracker that fails is disabled with a warning, and the run continues."""

    def __init__(self, names: Sequence[str], folder: Path, step: int | None, settings: Mapping[str, Any]) -> None:
        """Start the trackers.

        TensorBoard writes to `folder`/tensorboard; when a run resumes, values after the checkpoint are hidden. In other
        trackers, a resumed run is a new run, whose name contains its first step.

        Args:
            names: names of the trackers in accelerate.
            folder: the run directory.
            step: step of the checkpoint to resume from; None for a new run.
            settings: settings of the run, which the trackers store.
        """
        self._trackers: dict[str, Any] = {}
        for name in names:
            self._attempt(name, lambda name=name: self._start(name, folder.resolve(), step, settings))

    def _start(self, name: str, folder: Path, step: int | None, settings: Mapping[str, Any]) -> None:
        """Start a tracker and store the settings in it; arguments as in the constructor."""
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
        if name != "tensorboard":  # TensorBoard would write the settings as a separate run
            tracker.store_init_configuration(flat(settings))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write the numbers of a step; characters in names that some trackers refuse become underscores."""
        cleaned = {re.sub(r"[^-/\w.]", "_", name): value for name, value in values.items()}
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, lambda tracker=tracker: tracker.log(cleaned, step=step))

    def close(self) -> None:
        """Close all trackers."""
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, tracker.finish)

    def _attempt(self, name: str, call: Any) -> None:
        """Call a function of a tracker; disable the tracker with a warning if the function fails."""
        try:
            call()
        except Exception as error:  # a library or its server can fail in any way
            self._trackers.pop(name, None)
            log(
                f"warning: the tracker {name} failed and is disabled for the rest of the run ({type(error).__name__}: {error})"
            )


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as a flat dictionary with dotted names; values that are no numbers become text."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


class Metrics:
    """Context manager that writes metrics.jsonl, a JSON object per line, and the same numbers to trackers.

    Args:
        settings: settings of the run.
        kept_bytes: length of metrics.jsonl at the checkpoint to resume from; later lines are removed. 0 for a new run.
        step: step of the checkpoint to resume from.
        enabled: whether this process writes; only the main process does.
    """

    def __init__(self, settings: TrainSettings, kept_bytes: int = 0, step: int = 0, *, enabled: bool = True) -> None:
        self._settings, self._path = settings, settings.run_path / "metrics.jsonl"
        self._kept_bytes, self._step, self._enabled = kept_bytes, step, enabled
        self._file: IO[str] | None = None
        self._trackers: Trackers | None = None

    def __enter__(self) -> Metrics:
        if self._enabled:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
            size = os.fstat(self._file.fileno()).st_size
            if size < self._kept_bytes:
                log(f"warning: {self._path} is shorter than when the checkpoint was written: lines are lost")
            self._file.truncate(min(size, self._kept_bytes))
            step = self._step if self._kept_bytes else None  # None: a new run
            values = settings_to_dict(self._settings)
            self._trackers = Trackers(self._settings.report_to, self._path.parent, step, values)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._trackers is not None:
            self._trackers.close()

    def bytes_on_disk(self) -> int:
        """Flush metrics.jsonl to disk, and return its length in bytes; 0 if this process does not write."""
        if self._file is None:
            return 0
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def log(self, values: dict[str, float], notes: dict[str, str] | None = None) -> None:
        """Write a line with the numbers in `values`, which include `step`, and the texts in `notes`.

        Trackers get the numbers only, with `step` as x axis.
        """
        if self._file is None or self._trackers is None:
            return
        self._file.write(json.dumps({**values, **(notes or {})}) + "\n")
        self._file.flush()
        numbers = {name: value for name, value in values.items() if name != "step"}
        self._trackers.log(numbers, int(values["step"]))

    def log_step(
        self, step: int, epoch: int, results: Sequence[StepResult], rate: float, norm: float, counts: dict[str, float]
    ) -> None:
        """Log an optimizer step: loss, loss parts, learning rate, gradient norm, counts, and layout.

        The loss is the mean over the batches of the step, and a loss part is the mean over the batches that have it.
        `layout` is the layout of the first group of batches that are encoded together.

        Args:
            results: results of the groups of batches.
            rate: learning rate.
            norm: norm of the gradient before clipping.
            counts: numbers from `StepMeter.counts`.
        """
        batches = [batch for result in results for batch in result.losses]
        names = dict.fromkeys(name for batch in batches for name in batch.parts)
        parts = {name: [batch.parts[name] for batch in batches if name in batch.parts] for name in names}
        values = {
            "step": step,
            "epoch": epoch,
            "loss": mean_loss(results),
            **{f"loss/{name}": sum(values) / len(values) for name, values in parts.items()},
            "learning_rate": rate,
            "gradient_norm": norm,
            **counts,
        }
        self.log(values, notes={"layout": results[0].plan.layout, "reason": results[0].plan.reason})


def mean_loss(results: Sequence[StepResult]) -> float:
    """Return the loss of an optimizer step: the mean loss of its batches."""
    losses = [batch.loss for result in results for batch in result.losses]
    return sum(losses) / len(losses)


class StepMeter:
    """Computes counts, rates and utilisation from the results of an optimizer step."""

    def __init__(self, encoder: SentenceEncoder, peak: float, devices: int = 1) -> None:
        """Prepare the meter for an encoder on `devices` devices with `peak` operations per second (see `peak_flops`)."""
        self._flops = FlopsPerToken.of(encoder.model.backbone)
        self._peak, self._devices = peak, devices

    def counts(self, results: Sequence[StepResult], seconds: float) -> dict[str, float]:
        """Return counts and rates of an optimizer step that took `seconds`.

        `logical_tokens` are the tokens of all texts, and `computed_tokens` the tokens that the model computed.
        `utilisation` is the fraction of the peak operations of all devices. `imbalance` is the number of tokens of the
        rank with the most tokens, relative to the mean over ranks.
        """
        computed = sum(result.plan.computed_tokens for result in results)
        twice = sum(result.plan.computed_tokens for result in results if result.cached)
        pairs = sum(result.pairs for result in results)
        flops = computed * (self._flops.forward + self._flops.backward) + twice * self._flops.forward
        return {
            "texts": sum(result.texts for result in results),
            "pairs": pairs,
            "logical_tokens": sum(result.plan.logical_tokens for result in results),
            "computed_tokens": computed,
            "pairs_per_second": pairs / seconds,
            "computed_tokens_per_second": computed / seconds,
            "utilisation": flops / seconds / (self._peak * self._devices),
            "imbalance": sum(result.plan.largest_share for result in results) * self._devices / computed,
            "seconds": seconds,
        }


DATASHEET_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12}
"""Peak operations per second of dense 16-bit matrix products by GPU name, from data sheets (SXM variants)."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak floating-point operations per second of a device: from its data sheet, or measured in 0.1 s."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        name = torch.cuda.get_device_name(device)
        for key, flops in DATASHEET_FLOPS.items():
            if re.search(rf"\b{key}\b", name):
                return flops
    size = 1024 if device.type == "cpu" else 8192
    left = torch.ones(size, size, device=device, dtype=dtype)
    best = 0.0
    for _ in range(4):  # the first product is slower
        started = time.perf_counter()
        float((left @ left)[0, 0])  # reading a value waits for the device
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best

"""Training metrics: written to metrics.jsonl and experiment trackers, with throughput and utilisation of every step.

`Metrics` writes the file and calls the trackers (`Trackers`). `StepMeter` computes throughput and utilisation.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
"""Name of the project (mlflow: experiment) of all runs in trackers. A run has the name of its directory."""


def check_trackers(names: Sequence[str]) -> None:
    """Check that experiment trackers are installed, so that the run stops before data and model are read.

    A tracker that fails later is disabled with a warning.

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
    """Experiment trackers of a run. If a tracker fails, it is disabled with a warning and the run continues."""

    def __init__(self, names: Sequence[str], folder: Path, step: int | None, settings: Mapping[str, Any]) -> None:
        """Start the trackers and store the settings of the run.

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
        """Start an experiment tracker, such as `wandb`, and store the settings of the run in it.

        The arguments are described at `Trackers.__init__`.
        """
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        tracker_class: Any = LOGGER_TYPE_TO_CLASS[name]
        title = folder.name if step is None else f"{folder.name} from step {step + 1}"
        if name == "tensorboard":
            tracker = tracker_class("tensorboard", folder, purge_step=0 if step is None else step + 1)
        elif name == "mlflow":
            tracker = tracker_class(PROJECT, run_name=title)
        else:
            tracker = tracker_class(PROJECT, name=title)
        tracker.start()
        self._trackers[name] = tracker
        if name != "tensorboard":  # TensorBoard would write the settings as a separate run
            tracker.store_init_configuration(flat(settings))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send named numbers of an optimizer step to all trackers; characters that a tracker may refuse become `_`."""
        cleaned = {re.sub(r"[^-/\w.]", "_", name): value for name, value in values.items()}
        for name, tracker in list(self._trackers.items()):
            # A store of mlflow in files has no metric `loss` beside `loss/cosine`.
            totals = ("loss", "evaluation") if name == "mlflow" else ()
            of_tracker = {f"{key}/total" if key in totals else key: value for key, value in cleaned.items()}
            self._attempt(name, lambda tracker=tracker, values=of_tracker: tracker.log(values, step=step))

    def close(self) -> None:
        """Close all trackers."""
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, tracker.finish)

    def _attempt(self, name: str, call: Any) -> None:
        """Call `call`; if it raises an exception, log a warning and disable the tracker `name`."""
        try:
            call()
        except Exception as error:  # a library or its server can fail in any way
            self._trackers.pop(name, None)
            log(
                f"warning: the tracker {name} failed and is disabled for the rest of the run ({type(error).__name__}: {error})"
            )


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names; values other than numbers, booleans and strings become strings."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[prefix + key] = value if isinstance(value, bool | int | float | str) else str(value)
    return values


class Metrics:
    """Context manager that writes metrics.jsonl, a JSON object per line, and the same numbers to trackers.

    Args:
        settings: settings of the run.
        kept_bytes: length of metrics.jsonl at the checkpoint to resume from; later lines are removed. 0 for a new run.
        step: step of the checkpoint to resume from; 0 for a new run.
        enabled: whether this process writes; False on all ranks but 0.
    """

    def __init__(self, settings: TrainSettings, kept_bytes: int = 0, step: int = 0, *, enabled: bool = True) -> None:
        self._settings = settings
        self._path = settings.run_path / "metrics.jsonl"
        self._kept_bytes, self._step, self._enabled = kept_bytes, step, enabled
        self._file: IO[str] | None = None
        self._trackers: Trackers | None = None
        self.last: dict[str, Any] | None = None
        """The last line of metrics.jsonl."""

    def __enter__(self) -> Metrics:
        if self._enabled:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
            size = os.fstat(self._file.fileno()).st_size
            if size < self._kept_bytes:
                log(f"warning: {self._path} is shorter than when the checkpoint was written: lines are lost")
            kept = self._path.read_bytes()[: self._kept_bytes]
            self._file.truncate(kept.rfind(b"\n") + 1)
            lines = self._path.read_text("utf-8").splitlines()
            self.last = json.loads(lines[-1]) if lines else None
            step = self._step if self._kept_bytes else None  # None: a new run
            values = settings_to_dict(self._settings)
            self._trackers = Trackers(self._settings.report_to, self._path.parent, step, values)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # `log` has raised it
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
        """Write a line to metrics.jsonl with the numbers in `values`, which include `step`, and the texts in `notes`.

        Trackers get the numbers only, with `step` as x axis. Nothing is written if this process does not write.
        """
        if self._file is None or self._trackers is None:
            return
        self.last = {**values, **(notes or {})}
        try:
            self._file.write(json.dumps(self.last) + "\n")
            self._file.flush()
        except OSError as error:  # the system names no file
            raise OSError(
                f"{self._path} could not be written: {error}. Free disk space, and set --resume auto (in Python: resume='auto')."
            ) from error
        numbers = {name: value for name, value in values.items() if name != "step"}
        self._trackers.log(numbers, int(values["step"]))

    def log_step(
        self, step: int, epoch: int, results: Sequence[StepResult], rate: float, counts: dict[str, float]
    ) -> None:
        """Log an optimizer step: loss, terms of the loss, mean cosines, learning rate, counts and text layout.

        The loss is the mean over the batches of the step. A term or cosine is the mean over the batches that have it. The
        text layout (`trie`, `packed` or `padded`) is taken from the first result.

        Args:
            results: one result per group of batches that were encoded together.
            rate: learning rate.
            counts: more numbers to log: the gradient norm before clipping, and numbers from `StepMeter.counts`.
        """
        batches = [batch for result in results for batch in result.losses]
        parts: dict[str, list[float]] = {}
        for batch in batches:
            for prefix, numbers in (("loss", batch.parts), ("cosine", batch.cosines)):
                for name, value in numbers.items():
                    parts.setdefault(f"{prefix}/{name}", []).append(value)
        numbers_of_step = {
            "step": step,
            "epoch": epoch,
            "loss": mean_loss(results),
            **{name: sum(values) / len(values) for name, values in parts.items()},
            "learning_rate": rate,
            **counts,
        }
        self.log(numbers_of_step, notes={"layout": results[0].plan.layout, "reason": results[0].plan.reason})


def mean_loss(results: Sequence[StepResult]) -> float:
    """Return the loss of an optimizer step, the mean over all batches; `results` has groups of batches."""
    losses = [batch.loss for result in results for batch in result.losses]
    return sum(losses) / len(losses)


class StepMeter:
    """Computes counts, throughput and hardware utilisation of optimizer steps."""

    def __init__(self, encoder: SentenceEncoder, peak: float | None, devices: int = 1) -> None:
        """Set the encoder, the peak operations per second of a device (None: unknown), and the number of devices."""
        self._flops = FlopsPerToken.of(encoder.model.backbone, encoder.model.head.passes)
        self._peak, self._devices = peak, devices

    def counts(self, results: Sequence[StepResult], seconds: float, *, checkpointing: bool = False) -> dict[str, float]:
        """Return counts, throughput and utilisation of an optimizer step that took `seconds`.

        `logical_tokens` is the number of tokens of all texts. `computed_tokens` is the number of tokens that the model
        computed, padding included and shared prefixes counted once. `utilisation` is the fraction of the peak
        operations of all devices, if the peak is known; forward passes that gradient caching and activation checkpointing
        repeat are counted.
        `imbalance` is the maximum over ranks of the computed tokens, divided by the mean over ranks.
        """
        computed = sum(result.plan.computed_tokens for result in results)
        repeated = sum(result.plan.computed_tokens for result in results if result.cached)
        repeated += computed if checkpointing else 0
        pairs = sum(result.pairs for result in results)
        flops = computed * (self._flops.forward + self._flops.backward) + repeated * self._flops.forward
        utilisation = {"utilisation": flops / seconds / (self._peak * self._devices)} if self._peak else {}
        return utilisation | {
            "texts": sum(result.texts for result in results),
            "pairs": pairs,
            "logical_tokens": sum(result.plan.logical_tokens for result in results),
            "computed_tokens": computed,
            "pairs_per_second": pairs / seconds,
            "computed_tokens_per_second": computed / seconds,
            "imbalance": sum(result.plan.largest_share for result in results) * self._devices / computed,
            "seconds": seconds,
        }


DATASHEET_FLOPS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200 NVL": 835e12, "H200": 989e12, "A100": 312e12,
    "L40S": 362e12, "L4": 121e12, "A10": 125e12,
}  # fmt: skip
"""Peak operations per second of dense 16-bit matrix products by GPU name, from data sheets; the first match counts."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak operations per second of a known GPU for 16-bit matrix products; None for other devices and dtypes."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in DATASHEET_FLOPS.items() if re.search(rf"\b{key}\b", name)), None)

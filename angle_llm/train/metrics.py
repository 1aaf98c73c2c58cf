"""Metrics of a run: metrics.jsonl, trackers, and the counts, rates and utilisation of a step."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from typing import IO

import torch

from angle_llm.config import TrainSettings
from angle_llm.io import log
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.weights import FlopsPerToken
from angle_llm.settings_io import settings_to_dict
from angle_llm.train.step import StepResult
from angle_llm.train.trackers import Trackers


class Metrics:
    """Writes metrics.jsonl, one JSON object per line, and the same numbers to trackers; on the main process only.

    Args:
        settings: those of the run, with its directory.
        kept_bytes: length of metrics.jsonl at the checkpoint; later lines are removed.
        step: the step of the checkpoint.
        enabled: whether this process writes.
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
        """Return the length of metrics.jsonl after all lines are flushed to disk."""
        if self._file is None:
            return 0
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def log(self, values: dict[str, float], notes: dict[str, str] | None = None) -> None:
        """Write one line. `step` is the x axis of trackers, which get the numbers only."""
        if self._file is None or self._trackers is None:
            return
        self._file.write(json.dumps({**values, **(notes or {})}) + "\n")
        self._file.flush()
        numbers = {name: value for name, value in values.items() if name != "step"}
        self._trackers.log(numbers, int(values["step"]))

    def log_step(
        self, step: int, epoch: int, results: Sequence[StepResult], rate: float, norm: float, counts: dict[str, float]
    ) -> None:
        """Log an optimizer step: means over its batches of the loss and its parts (of a part, over the batches that
        have it), the counts, and the layout of the first group of batches."""
        batches = [each for result in results for each in result.losses]
        names = dict.fromkeys(name for each in batches for name in each.parts)
        parts = {name: [each.parts[name] for each in batches if name in each.parts] for name in names}
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
    """Return the loss of an optimizer step: the mean over its batches."""
    batches = [each.loss for result in results for each in result.losses]
    return sum(batches) / len(batches)


class StepMeter:
    """Computes rates and utilisation from the results of a step."""

    def __init__(self, encoder: SentenceEncoder, peak: float, devices: int = 1) -> None:
        """`peak` is that of a device, as from `peak_flops`."""
        self._flops = FlopsPerToken.of(encoder.model.backbone)
        self._peak, self._devices = peak, devices

    def counts(self, results: Sequence[StepResult], seconds: float) -> dict[str, float]:
        """Return the sums and rates of an optimizer step.

        `logical_tokens` are the tokens of the texts, `computed_tokens` those that the model computes. `utilisation` is
        the share of the devices' peak that the computed tokens needed. `imbalance` is the largest share of a rank,
        relative to the mean.
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
"""Peak of dense 16-bit matrix products per second, from data sheets (SXM variants), by device name."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak floating-point operations per second: from the data sheet, or measured in 0.1 s."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        name = torch.cuda.get_device_name(device)
        for key, flops in DATASHEET_FLOPS.items():
            if re.search(rf"\b{key}\b", name):
                return flops
    size = 1024 if device.type == "cpu" else 8192
    left = torch.ones(size, size, device=device, dtype=dtype)
    best = 0.0
    for _ in range(4):  # the first is slower
        started = time.perf_counter()
        float((left @ left)[0, 0])  # reading a value waits for the device
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best

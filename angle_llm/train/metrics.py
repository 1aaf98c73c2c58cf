"""What a run leaves on disk while it goes: metrics line by line, and the best encoder so far."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from tqdm import tqdm

from angle_llm.model.backbone import FlopsPerToken
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.lora import is_adapted
from angle_llm.train.checkpoint import Progress, SavedWeightsError, check_saved
from angle_llm.train.distributed import Processes
from angle_llm.train.step import StepResult
from angle_llm.train.strategies import Strategy

Evaluate = Callable[[SentenceEncoder], float]
"""From an encoder to one number, the larger the better."""


class Metrics:
    """metrics.jsonl, one object a line, and the same numbers for TensorBoard; the main process writes them."""

    def __init__(self, path: Path, accelerator: Any, kept_bytes: int = 0, *, writes: bool = True) -> None:
        """A run that goes on keeps the lines up to its checkpoint."""
        self._path = path if writes else Path(os.devnull)
        self._accelerator = accelerator
        self._kept_bytes = kept_bytes if writes else 0
        self._file: IO[str] | None = None

    def __enter__(self) -> Metrics:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", encoding="utf-8")
        size = os.fstat(self._file.fileno()).st_size
        if size < self._kept_bytes:
            tqdm.write(f"warning: {self._path} has {size} bytes, {self._kept_bytes} at the checkpoint: lines are lost")
        if self._path.is_file():
            self._file.truncate(min(size, self._kept_bytes))
        return self

    def __exit__(self, *_: object) -> None:
        assert self._file is not None
        self._file.close()

    def bytes_on_disk(self) -> int:
        """Its length, once every line is on disk."""
        assert self._file is not None
        self._file.flush()
        if self._path.is_file():
            os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def log(self, values: dict[str, float], notes: dict[str, str] | None = None) -> None:
        """Writes one line; `step` places it on TensorBoard's axis, which takes numbers only."""
        assert self._file is not None
        self._file.write(json.dumps({**values, **(notes or {})}) + "\n")
        self._file.flush()
        self._accelerator.log({key: value for key, value in values.items() if key != "step"}, step=values["step"])

    def log_step(
        self,
        step: int,
        epoch: int,
        results: Sequence[StepResult],
        *,
        rate: float,
        norm: float,
        counts: dict[str, float],
    ) -> None:
        """One optimizer step: means over its batches of loss and parts (of a part, over the batches that have it), what was
        computed, and why that way (told of the first batch)."""
        self.log(
            {
                "step": step,
                "epoch": epoch,
                "loss": mean_loss(results),
                **{f"loss/{name}": part for name, part in _mean_parts(results).items()},
                "learning_rate": rate,
                "gradient_norm": norm,
                **counts,
            },
            notes={"layout": results[0].layout, "reason": results[0].reason},
        )


def _mean_parts(results: Sequence[StepResult]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for result in results:
        for name, part in result.parts.items():
            values.setdefault(name, []).append(part)
    return {name: sum(parts) / len(parts) for name, parts in values.items()}


def mean_loss(results: Sequence[StepResult]) -> float:
    """The loss of an optimizer step: the mean over its batches."""
    return sum(result.loss for result in results) / len(results)


class BestKeeper:
    """Measures the encoder now and then and keeps the best one in `folder`; without a measure, the last one.

    All processes measure; the main one's score counts, and it alone writes.
    """

    def __init__(self, encoder: SentenceEncoder, evaluate: Evaluate | None, folder: Path, strategy: Strategy) -> None:
        self._encoder = encoder
        self._evaluate = evaluate
        self._strategy = strategy
        self.folder = folder
        self.measured: int | None = None
        self.start: float | None = None
        self.best: float | None = None

    def resume(self, came: Progress) -> None:
        """With the scores of a checkpoint, from what a kill has left of `folder`."""
        self.measured, self.start = came.measured, came.start
        self.best = self._strategy.processes.from_main(lambda: self._put_back(came.best))

    def _put_back(self, best: float | None) -> float | None:
        """`artifact.write_directory` fills a hidden folder beside the target and, while it takes the place, has the old
        one aside."""
        target = self.folder.resolve()
        for aside in target.parent.glob(f".{target.name}.*.old"):
            if not target.exists():
                aside.replace(target)
        for left in target.parent.glob(f".{target.name}.*"):
            shutil.rmtree(left, ignore_errors=True)
        if best is not None and not target.exists():
            tqdm.write(f"warning: {target}, the best model so far, is gone; the best one from here on is kept")
            return None
        return best

    def measure(self, step: int, metrics: Metrics) -> None:
        """Once after a step. Step 0 is the untrained model: measured for comparison, not kept."""
        if self._evaluate is None or self.measured == step:
            return
        mine = self._evaluate(self._encoder)
        score = self._strategy.processes.from_main(lambda: mine)
        metrics.log({"step": step, "evaluation": score})
        if self._strategy.processes.is_main:
            tqdm.write(f"step {step}: evaluation {score:.2f}")
        if step == 0:
            self.start = score
        elif self.best is None or score > self.best:
            self._save()
            self.best = score
        self.measured = step

    def finish(self) -> None:
        """The end of a run that does not measure."""
        if self._evaluate is None:
            self._save()

    def _save(self) -> None:
        self._strategy.check_replicas()
        with self._strategy.gather_params():
            self._strategy.processes.from_main(self._write)

    def _write(self) -> None:
        self._encoder.save_pretrained(self.folder, self._check_written)

    def _check_written(self, folder: Path) -> None:
        """An adapter that is empty, or has learnt nothing, would be no use to anybody; it does not replace the last one.

        Raises:
            SavedWeightsError: naming what is wrong with the file.
        """
        if not is_adapted(self._encoder.model.backbone):
            return
        path = folder / "adapter_model.safetensors"
        weights = {_saved_name(name): p for name, p in self._encoder.model.named_parameters() if p.requires_grad}
        check_saved(path, weights)
        ups = [tensor for name, tensor in weights.items() if "lora_B" in name]
        if ups and not any(tensor.detach().any() for tensor in ups):
            raise SavedWeightsError(
                f"{path}: every lora_B is zero, as before the first step: no gradient reached the adapter. Look at the data "
                "and the weights of the objective."
            )

    def rescue(self) -> None:
        """A run that breaks leaves its weights, if they are whole and numbers, in `interrupted/` beside the best."""
        trained = [parameter for parameter in self._encoder.model.parameters() if parameter.requires_grad]
        whole = all(parameter.numel() for parameter in trained)  # those divided among processes cannot be put together
        if not (self._strategy.processes.is_main and whole):
            return
        if not all(math.isfinite(float(parameter.detach().sum())) for parameter in trained):
            return
        folder = self.folder.with_name("interrupted")
        try:
            self._encoder.save_pretrained(folder)
        except Exception as error:  # what broke the run is the news, and a full disk may have been it
            tqdm.write(f"the run ended early; its last weights could not be saved in {folder}: {error}")
        else:
            tqdm.write(f"the run ended early; its last weights are in {folder}")

    @property
    def what_is_kept(self) -> str:
        """For the message of a run that stops."""
        return "No model was kept yet." if self.best is None else f"The best model so far is in {self.folder}."


def _saved_name(name: str) -> str:
    """What peft calls a parameter of `EmbeddingModel` in a file."""
    name = name.removeprefix("backbone.").replace(".default", "")
    return name.removesuffix(".weight") if name.endswith("lora_magnitude_vector.weight") else name


@dataclass(frozen=True)
class StepMeter:
    """Turns what steps computed into rates and utilisation."""

    flops: FlopsPerToken
    peak: float
    """Operations a second a device can do."""
    devices: int = 1

    @classmethod
    def of(cls, encoder: SentenceEncoder, processes: Processes) -> StepMeter:
        """Counts the encoder's layers and asks the device."""
        peak = peak_flops(processes.device, encoder.dtype)
        return cls(FlopsPerToken.of(encoder.model.backbone), peak, processes.count)

    def counts(self, results: Sequence[StepResult], seconds: float) -> dict[str, float]:
        """What an optimizer step did: sums over its batches, and rates.

        `logical_tokens` are those of the batch's texts, `computed_tokens` went through the model; utilisation is the share
        of the devices' operations that the computed tokens needed. `imbalance` is how many times its even share the process
        with most tokens computed.
        """
        computed = sum(result.computed_tokens for result in results)
        twice = sum(result.computed_tokens for result in results if result.cached)
        pairs = sum(result.pairs for result in results)
        flops = computed * (self.flops.forward + self.flops.backward) + twice * self.flops.forward
        return {
            "texts": sum(result.texts for result in results),
            "pairs": pairs,
            "logical_tokens": sum(result.logical_tokens for result in results),
            "computed_tokens": computed,
            "pairs_per_second": pairs / seconds,
            "computed_tokens_per_second": computed / seconds,
            "utilisation": flops / seconds / (self.peak * self.devices),
            "imbalance": sum(result.largest_share for result in results) * self.devices / computed,
            "seconds": seconds,
        }

    @staticmethod
    def shown(counts: dict[str, float]) -> str:
        """For the progress bar."""
        share = counts["computed_tokens"] / counts["logical_tokens"]
        return f"{counts['pairs_per_second']:.1f} pairs/s, {share:.0%} of tokens computed, {counts['utilisation']:.0%} utilised"


DATASHEET_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12}
"""Dense 16-bit matrix products a second, from the makers' data sheets (SXM form where there are several), by a word of the
device's name."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second the device can do: its data sheet's figure, or what a large product reaches here (0.1 s)."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        name = torch.cuda.get_device_name(device)
        for key, flops in DATASHEET_FLOPS.items():
            if re.search(rf"\b{key}\b", name):
                return flops
    size = 1024 if device.type == "cpu" else 8192
    left = torch.ones(size, size, device=device, dtype=dtype)
    best = 0.0
    for _ in range(4):  # the first is slower: threads and memory wake up
        started = time.perf_counter()
        float((left @ left)[0, 0])  # reading a value waits for the device
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best

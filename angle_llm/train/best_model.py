"""The model of a run: evaluated between steps, the best one kept in `model/`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from angle_llm.io import log, restore_folder
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.lora import is_adapted
from angle_llm.train.checkpoint import Progress, SavedWeightsError, check_saved
from angle_llm.train.metrics import Metrics
from angle_llm.train.rng import random_state, set_random_state
from angle_llm.train.strategies import DataParallelStrategy

Evaluate = Callable[[SentenceEncoder], Mapping[str, float]]
"""Map an encoder to metrics by name. The first one decides which model is best; a larger number is better."""
RESCUE_FOLDER = "interrupted"
"""Folder of the run directory with the weights of a run that failed; removed when the run is finished."""


def deciding(metrics: Mapping[str, float] | None) -> float | None:
    """Return the metric that decides which model is best, None without metrics."""
    return None if metrics is None else next(iter(metrics.values()))


class BestModel:
    """Evaluates the encoder and keeps the best one in `folder`; without an evaluation, the last one.

    All ranks evaluate; only the metrics of rank 0 are used, and only rank 0 writes.
    """

    def __init__(
        self,
        encoder: SentenceEncoder,
        evaluate: Evaluate | None,
        folder: Path,
        strategy: DataParallelStrategy,
        patience: int | None = None,
    ) -> None:
        self._encoder, self._evaluate, self._strategy = encoder, evaluate, strategy
        self.folder, self._patience = folder, patience
        self.evaluated: int | None = None
        """The step of the last evaluation."""
        self.start: dict[str, float] | None = None
        """Metrics before the first step."""
        self.best: dict[str, float] | None = None
        """Metrics of the best evaluation after it, those of `folder`."""
        self.waited = 0
        """Number of evaluations since the best one."""

    @property
    def has_stalled(self) -> bool:
        """Whether `patience` evaluations in a row gave no new best model."""
        return self._patience is not None and self.waited >= self._patience

    def resume(self, progress: Progress) -> None:
        """Continue with the scores of a checkpoint, and restore `folder` after a kill in the middle of a save."""
        self.start = progress.start
        self.best = self._strategy.processes.from_main(lambda: self._restore(progress.best))
        if self.best is not None or progress.best is None:
            self.evaluated, self.waited = progress.evaluated, progress.waited

    def _restore(self, best: dict[str, float] | None) -> dict[str, float] | None:
        target = self.folder.resolve()
        restore_folder(target)
        if best is not None and not target.exists():
            log(f"warning: {target}, the best model so far, is missing; the best one from here on is kept")
            return None
        return best

    def evaluate(self, step: int, metrics: Metrics) -> None:
        """Evaluate once after a step. Step 0 is the untrained model: evaluated for comparison, not kept.

        Raises:
            RankMemoryError: on every rank, if one has not enough memory for a single text.
        """
        evaluate = self._evaluate
        if evaluate is None or self.evaluated == step:
            return
        device = self._strategy.processes.device
        state = random_state(device)  # a task may set seeds, as mteb does
        own = self._strategy.guard_oom(lambda: evaluate(self._encoder))
        set_random_state(state, device)
        values = self._strategy.processes.from_main(lambda: dict(own))
        name, score = next(iter(values.items()))
        logged = {f"evaluation/{name}": value for name, value in values.items()}
        metrics.log({"step": step, "evaluation": score, **logged})
        if self._strategy.processes.is_main:
            log(f"step {step}: evaluation {name} {score:.2f}")
        best = deciding(self.best)
        if step == 0:
            self.start = values
        elif best is None or score > best or (math.isnan(best) and not math.isnan(score)):
            self._save()
            self.best, self.waited = values, 0
        else:
            self.waited += 1
        self.evaluated = step

    def finish(self) -> None:
        """Keep the last model if there is no evaluation."""
        if self._evaluate is None:
            self._save()

    def _save(self) -> None:
        self._strategy.check_replicas()
        with self._strategy.gather_params():
            self._strategy.processes.from_main(lambda: self._encoder.save_pretrained(self.folder, self._check_written))

    def _check_written(self, folder: Path) -> None:
        """Read a saved adapter again. One that is damaged or all zero does not replace the last one.

        Raises:
            SavedWeightsError: names the file and the weight.
        """
        if not is_adapted(self._encoder.model.backbone):
            return
        path, weights = folder / "adapter_model.safetensors", {}
        for name, parameter in self._strategy.weights.items():
            if not name.startswith("backbone."):  # the projection to a teacher is not saved
                continue
            saved_name = name.removeprefix("backbone.").replace(".default", "")  # as peft names it
            if saved_name.endswith("lora_magnitude_vector.weight"):
                saved_name = saved_name.removesuffix(".weight")
            weights[saved_name] = parameter
        check_saved(path, weights)
        ups = [tensor for name, tensor in weights.items() if "lora_B" in name]
        if ups and not any(tensor.detach().any() for tensor in ups):
            raise SavedWeightsError(
                f"{path}: every lora_B is zero, as before the first step: no gradient reached the adapter. Check the data and "
                "the weights of the objective."
            )

    def rescue(self) -> None:
        """Save the current weights in `interrupted/` when a run fails, if they are complete and finite."""
        weights = [parameter.detach() for parameter in self._strategy.weights.values()]
        complete = all(weight.numel() for weight in weights)  # ZeRO-3 needs all ranks to gather them
        if not (self._strategy.processes.is_main and complete):
            return
        folder = self.folder.with_name(RESCUE_FOLDER)
        try:
            if not all(math.isfinite(float(weight.sum())) for weight in weights):
                return
            self._encoder.save_pretrained(folder)
        except Exception as error:  # the first error matters more; a full disk or the device may have caused it
            log(f"the run failed; its last weights could not be saved in {folder}: {error}")
        else:
            log(f"the run failed; its last weights are in {folder}")

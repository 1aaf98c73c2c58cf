"""Evaluate the encoder between training steps, and save the best model in `model/` of the run directory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from angle_llm.io import json_text, log, plain, read_object, restore_folder, write_file, write_json
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.train.checkpoint import Progress, random_state, set_random_state
from angle_llm.train.metrics import Metrics
from angle_llm.train.strategies import DataParallelStrategy

Evaluate = Callable[[SentenceEncoder], Mapping[str, float]]
"""Function that returns the metrics of an encoder by name. The first metric decides which model is best: higher is
better. Its attributes `items` and `verdict`, if it has them, are described at `HeldOutEvaluation`."""
ITEMS = "evaluation.npz"
"""File in the run directory with the values of each pair or query, before training and of the best encoder: an array
`start/TASK` and `best/TASK` for each task."""
BEST_METRICS = "best.json"
"""File in the run directory with the metrics of the encoder in `model/`, written before the encoder is saved."""
RESCUE_FOLDER = "interrupted"
"""Folder in the run directory for the last encoder of a run that failed; removed when a resumed run finishes."""


def deciding_metric(metrics: Mapping[str, float] | None) -> float | None:
    """Return the value of the first metric, which decides which model is best; None without metrics."""
    return None if metrics is None else next(iter(metrics.values()))


class BestModel:
    """Evaluates the encoder during training and saves the best encoder in `folder`.

    Without evaluation, the last encoder is saved.

    All ranks evaluate. Only the metrics of rank 0 are used, and only rank 0 writes files.
    """

    def __init__(
        self, encoder: SentenceEncoder, evaluate: Evaluate | None, folder: Path, strategy: DataParallelStrategy
    ) -> None:
        self._encoder, self._evaluate, self._strategy = encoder, evaluate, strategy
        self.folder = folder
        # `Progress` describes these attributes.
        self.evaluated: int | None = None
        self.start: dict[str, float] | None = None
        self.best: dict[str, float] | None = None

    def resume(self, progress: Progress) -> None:
        """Continue with the metrics of a checkpoint; restore the saved best encoder if a kill interrupted a save."""
        self.start = progress.start
        self.best, self.evaluated = self._strategy.processes.from_main(lambda: self._restore(progress))

    def _restore(self, progress: Progress) -> tuple[dict[str, float] | None, int | None]:
        """Restore the saved best encoder after an interrupted save; return `best` and `evaluated` of the checkpoint.

        If the encoder is missing, log a warning and return (None, None), so that the current encoder is evaluated again.
        If the encoder may be from after the checkpoint, log a warning and return None for `best`, so that the next
        evaluation saves the encoder.
        """
        target = self.folder.resolve()
        saved = read_object(self.folder.with_name(BEST_METRICS))
        restore_folder(target)
        if progress.best is None:
            return None, progress.evaluated
        if not target.exists():
            log(f"warning: {target}, the best model so far, is missing; the best model from now on is saved")
            return None, None
        if saved is not None and json_text(saved) != json_text(plain(progress.best)):  # NaN is null in JSON
            log(f"warning: {target} may be newer than the checkpoint; the best model from now on is saved")
            return None, progress.evaluated
        return progress.best, progress.evaluated

    def evaluate(self, step: int, metrics: Metrics) -> bool:
        """Evaluate the encoder after an optimizer step, log the metrics, and save the encoder if it is the best so far.

        Step 0 is the model before training, which is evaluated but not saved. A repeated call for a step does nothing.
        Returns whether the encoder was evaluated.

        Raises:
            RankMemoryError: on every rank, if a rank does not have enough memory for a single text.
        """
        # Evaluate on all ranks; the values of rank 0 count.
        evaluate = self._evaluate
        if evaluate is None or self.evaluated == step:
            return False
        processes = self._strategy.processes
        device = processes.device
        state = random_state(device)  # an evaluation task can set seeds, as mteb does
        try:
            with self._strategy.guard_ranks():
                rank_values = evaluate(self._encoder)
        finally:
            set_random_state(state, device)
        values = processes.from_main(lambda: dict(rank_values))
        # Log.
        name, score = next(iter(values.items()))
        logged = {f"evaluation/{name}": value for name, value in values.items()}
        metrics.log({"step": step, "evaluation": score, **logged})
        if processes.is_main:
            log(f"step {step}: evaluation {name} {score:.2f}")
        # Keep the model if it is the best so far.
        best = deciding_metric(self.best)
        if step == 0:
            self.start = values
            self._keep_items("start")
        elif best is None or score > best or (math.isnan(best) and not math.isnan(score)):
            path = self.folder.with_name(BEST_METRICS)
            processes.from_main(lambda: write_json(path, plain(values), writer=""))
            self._save()
            self.best = values
            self._keep_items("best")
        self.evaluated = step
        return True

    def _keep_items(self, name: str) -> None:
        """Add the values of each pair or query in the last evaluation to the file `ITEMS`, as `name`, on rank 0.

        `name` is `start` (a new file) or `best`. Nothing is written if the evaluation has no such values.
        """
        items = getattr(self._evaluate, "items", {})
        path = self.folder.with_name(ITEMS)
        if items and self._strategy.processes.is_main:
            kept = {f"start/{task}": values for task, values in self._items("start").items()} if name != "start" else {}
            arrays = kept | {f"{name}/{task}": values for task, values in items.items()}
            write_file(path, lambda file: np.savez(file, **arrays), writer="")

    def _items(self, name: str) -> dict[str, Any]:
        """Return the arrays of `start` or `best` in `ITEMS` by task; empty without the file."""
        path = self.folder.with_name(ITEMS)
        arrays = dict(np.load(path, allow_pickle=False)) if path.is_file() else {}
        return {key.split("/", 1)[1]: values for key, values in arrays.items() if key.startswith(f"{name}/")}

    def verdict(self) -> str | None:
        """Return whether the best encoder is better than before training, with intervals; None if it is not known."""
        verdict = getattr(self._evaluate, "verdict", None)
        return None if verdict is None else verdict(self._items("best"), self._items("start"))

    def finish(self) -> None:
        """Save the encoder at the end of a run without evaluation; otherwise, the best encoder is already saved."""
        if self._evaluate is None:
            self._save()

    def _save(self) -> None:
        """Save the encoder as the best encoder; all ranks must call this method."""
        self._strategy.check_replicas()
        with self._strategy.gather_params():
            self._strategy.processes.from_main(lambda: self._encoder.save_pretrained(self.folder))

    def rescue(self) -> None:
        """Save the current encoder in `interrupted/` after a failure of the run, on rank 0.

        The encoder is not saved if weights are not finite, or are partitioned (ZeRO-3). An error is logged only.
        """
        weights = [parameter.detach() for parameter in self._strategy.weights.values()]
        complete = all(weight.numel() for weight in weights)  # ZeRO-3 needs all ranks to gather them
        if not (self._strategy.processes.is_main and complete):
            return
        folder = self.folder.with_name(RESCUE_FOLDER)
        try:
            if not all(math.isfinite(float(weight.sum())) for weight in weights):
                log("the run failed; its last weights are not finite, so they are not saved")
                return
            self._encoder.save_pretrained(folder)
        except Exception as error:  # the error of the run matters more, and can be the cause (disk, device)
            log(f"the run failed; its last weights could not be saved in {folder}: {error}")
        else:
            log(f"the run failed; its last weights are in {folder}")

"""The start of a run: its processes, and the checks of its run directory before anything is loaded.

settings.yaml     starts the same run again
metrics.jsonl     one line per optimizer step and evaluation, also in tensorboard/
model/            the encoder to use
checkpoints/      states to resume from
vectors/          vectors of the training texts by a guide or teacher
rejected.jsonl    bad rows that were skipped
interrupted/      weights of a run that failed, until it is finished
result.json       written last: number of steps, whether the model is better than before, scores and all metrics, prompt, pooling,
                  length, token budget
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from angle_llm.config import TrainSettings
from angle_llm.data.mixture import Mixture
from angle_llm.io import log, plain, write_json
from angle_llm.model.checks import is_saved_encoder
from angle_llm.settings_io import SettingsError, changed_settings, load_settings, save_settings, settings_to_dict
from angle_llm.train.best_model import RESCUE_FOLDER, deciding
from angle_llm.train.checkpoint import FOLDER, checkpoint_names, named_checkpoint
from angle_llm.train.distributed import Processes
from angle_llm.train.memory import TokenBudget
from angle_llm.train.process_loss import ProcessWatch

RESULT = "result.json"


@dataclass(frozen=True)
class TrainResult:
    """Result of a run."""

    model_dir: Path
    """The encoder to use: the best one if the run evaluates, else the last one."""
    steps: int
    best: dict[str, float] | None
    """Metrics of the best evaluation, the deciding one first; None without one."""
    start: dict[str, float] | None
    """Metrics of the evaluation before the first step, None without one."""
    budget: TokenBudget
    """The token budget at the end: as set or chosen, and halved where memory ran out."""
    encoder: dict[str, Any]
    """Prompt, pooling and maximum length."""

    @property
    def better(self) -> bool | None:
        """Whether the main metric is higher than before training; None without an evaluation."""
        if self.best is None or self.start is None:
            return None
        return next(iter(self.best.values())) > next(iter(self.start.values()))

    def report(self) -> list[str]:
        """Return lines with the metrics before training and of the best model, and what they depend on."""
        if self.best is None or self.start is None:
            return []
        used = f"prompt {self.encoder['prompt']}, pooling {self.encoder['pooling']}, at most {self.encoder['max_length']} tokens"
        width = max(map(len, self.best))
        rows = [f"{name:{width}} {self.start[name]:7.2f} {value:7.2f}" for name, value in self.best.items()]
        return [f"evaluation before training and of the saved model ({used}):", *rows]


class Run:
    """The processes and the directory of a training run."""

    def __init__(self, settings: TrainSettings, processes: Processes) -> None:
        self.settings, self.processes = settings, processes
        self.folder = settings.run_path
        self.starts_over = processes.from_main(self._check)
        """Whether the run starts at step 1."""

    @classmethod
    @contextmanager
    def start(cls, settings: TrainSettings) -> Iterator[Run]:
        """Connect the processes, check the run directory, and watch the other processes until the end of the context:
        if one is lost, this one ends with a message.

        Raises:
            SettingsError: if the launch is not supported; if the directory belongs to another run or to a finished one,
                or does not have the checkpoint that `resume` names.
        """
        run = cls(settings, Processes.start())
        run.log(str(run.processes))
        with ProcessWatch(run.processes):
            yield run

    def log(self, line: str) -> None:
        """Print a line on the main process."""
        if self.processes.is_main:
            log(line)

    def _check(self) -> bool:
        """Check the run directory; return whether the run starts at step 1."""
        settings, before = self.settings, self._identity_before()
        if before != settings.identity:
            other = changed_settings(settings_to_dict(before), settings_to_dict(settings.identity))
            raise SettingsError(
                f"{self.folder} contains a run with other settings ({', '.join(other)}). Choose another --run-dir, or remove "
                "that directory."
            )
        checkpoints = self.folder / FOLDER
        if settings.resume not in ("auto", "never"):
            named_checkpoint(checkpoints, settings.resume)
        starts_over = settings.resume == "never" or not checkpoint_names(checkpoints)
        if starts_over and (self.folder / RESULT).exists() and not settings.overwrite:
            raise SettingsError(
                f"{self.folder} contains a finished run. Choose another --run-dir, or --overwrite to remove its model and train "
                "again."
            )
        return starts_over

    def _identity_before(self) -> TrainSettings:
        """Return the identity of the run in the directory, or of this run if there is none."""
        path = self.folder / "settings.yaml"
        try:
            return (load_settings(TrainSettings, path) if path.exists() else self.settings).identity
        except SettingsError as error:
            if self.settings.overwrite and self.settings.resume == "never":
                return self.settings.identity
            raise SettingsError(
                f"{self.folder} contains a run with settings that this version does not read ({error}). Choose another "
                "--run-dir, remove that directory, or --overwrite to train again in it."
            ) from error

    def prepare(self, data: Mixture) -> None:
        """Write settings.yaml and rejected.jsonl on the main process. With `overwrite`, remove a finished model."""
        self.processes.from_main(lambda: self._prepare(data))

    def _prepare(self, data: Mixture) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / RESULT).unlink(missing_ok=True)
        if self.settings.overwrite and self.starts_over:
            self._remove_encoder("model")
        defaults = TrainSettings()
        saved = replace(self.settings, resume=defaults.resume, overwrite=defaults.overwrite)
        save_settings(saved, self.folder / "settings.yaml")
        rejected = [bad for each in data.sets if each.report is not None for bad in each.report.rejected]
        if rejected:
            lines = [json.dumps(bad._asdict(), ensure_ascii=False) for bad in rejected]
            (self.folder / "rejected.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def finish(self, result: TrainResult) -> None:
        """Mark the run as finished, on the main process."""
        if self.processes.is_main:
            self._remove_encoder(RESCUE_FOLDER)
            metrics = {"start": result.start, "best": result.best}
            scores = {name: deciding(found) for name, found in metrics.items()}
            content = {
                "steps": result.steps,
                "better": result.better,
                **scores,
                "metrics": metrics,
                "encoder": result.encoder,
            }
            write_json(self.folder / RESULT, plain({**content, "budget": result.budget}))

    def _remove_encoder(self, name: str) -> None:
        if is_saved_encoder(self.folder / name):
            shutil.rmtree(self.folder / name)

"""Start a training run: connect its processes, and check its run directory before data and model are loaded.

Files in a run directory:

settings.yaml     settings, with which the same run can be started again
metrics.jsonl     a line per optimizer step and evaluation; the same numbers are in tensorboard/ and other trackers
best.json         metrics of the encoder to use
evaluation.npz    values of each pair or query of the held-out tasks, before training and of the encoder to use
model/            the encoder to use
checkpoints/      states to resume from
vectors/          embeddings of the training texts by a guide or teacher
interrupted/      encoder with the last weights of a run that failed, until the run finishes
result.json       written last: number of steps, whether the model is better than before training (verdict: with
                  interval), scores, all metrics, prompt, pooling, maximum length, token budget
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from angle_llm.io import differences, log, plain, write_json
from angle_llm.model.source.checks import is_saved_encoder
from angle_llm.settings.parsing import SettingsError, load_settings, save_settings, settings_to_dict
from angle_llm.settings.train import TrainSettings
from angle_llm.train.best_model import RESCUE_FOLDER, deciding_metric
from angle_llm.train.checkpoint import FOLDER, checkpoint_names, named_checkpoint
from angle_llm.train.distributed import Processes, ProcessWatch
from angle_llm.train.token_budget import TokenBudget

RESULT = "result.json"
"""Name of the file in a run directory that marks the run as finished."""


@dataclass(frozen=True)
class TrainResult:
    """Result of a training run: folder of the encoder, number of steps, metrics, and token budget."""

    model_dir: Path
    """Folder of the encoder to use: the best encoder if the run evaluates, else the last encoder."""
    steps: int
    """Number of optimizer steps of the run."""
    best: dict[str, float] | None
    """Metrics of the encoder in `model_dir`, None without evaluation. The first metric decides which encoder is best."""
    start: dict[str, float] | None
    """Metrics of the encoder before training; None without evaluation."""
    budget: TokenBudget
    """Token budget of a process at the end of the run; lower than at the start if memory ran out."""
    encoder: dict[str, Any]
    """Settings of the encoder by name: `prompt`, `pooling` and `max_length` in tokens."""
    verdict: str | None = None
    """Whether the encoder is better than before training, with the 95 % interval; None if it is not known."""

    @property
    def higher(self) -> bool | None:
        """Whether the first metric of the best encoder is higher than before training; None without evaluation."""
        if self.best is None or self.start is None:
            return None
        return next(iter(self.best.values())) > next(iter(self.start.values()))

    def report(self) -> list[str]:
        """Return a table, as lines, of the metrics before training and of the best model; empty without evaluation."""
        if self.best is None or self.start is None:
            return []
        used = f"prompt {self.encoder['prompt']}, pooling {self.encoder['pooling']}, at most {self.encoder['max_length']} tokens"
        width = max(map(len, self.best))
        rows = [f"{name:{width}} {self.start[name]:7.2f} {value:7.2f}" for name, value in self.best.items()]
        verdict = [] if self.verdict is None else [self.verdict]
        return [f"evaluation ({used}):", f"{'':{width}} {'before':>7} {'saved':>7}", *rows, *verdict]


class Run:
    """Processes and directory of a training run: checks the directory, and writes settings and result."""

    def __init__(self, settings: TrainSettings, processes: Processes) -> None:
        """Check the run directory; raise `SettingsError` if the run must not write to it (see `start`)."""
        self.settings, self.processes = settings, processes
        self.folder = settings.run_path
        self.starts_over = processes.from_main(self._check)
        """Whether the run starts at step 1, not from a checkpoint."""

    @classmethod
    @contextmanager
    def start(cls, settings: TrainSettings) -> Iterator[Run]:
        """Context manager that connects the processes of a run, checks the run directory, and detects lost processes.

        If a process is killed or stops responding, all other processes end with a message (see `ProcessWatch`).

        Raises:
            SettingsError: if the launch is not supported, the directory belongs to another or a finished run, the directory
                has checkpoints and `resume` is None, or the checkpoint that `resume` names does not exist.
        """
        run = cls(settings, Processes.start())
        run.log(str(run.processes))
        with ProcessWatch(run.processes):
            yield run

    def log(self, line: str) -> None:
        """Log a line, on the main process only."""
        if self.processes.is_main:
            log(line)

    def _check(self) -> bool:
        """Check that the run directory is new or belongs to this run, and return whether the run starts at step 1.

        Raises:
            SettingsError: if the directory belongs to another or a finished run, it has checkpoints and `resume` is None, or
                the checkpoint that `resume` names does not exist.
        """
        settings = self.settings
        path = self.folder / "settings.yaml"
        before = (load_settings(TrainSettings, path) if path.exists() else settings).identity
        if before != settings.identity:
            changed = differences(settings_to_dict(before), settings_to_dict(settings.identity))
            raise SettingsError(
                f"{self.folder} contains a run with other settings ({', '.join(changed)}). Choose another --run-dir, or remove "
                "that directory."
            )
        checkpoints = self.folder / FOLDER
        names = checkpoint_names(checkpoints)
        if settings.resume not in ("auto", "never", None):
            named_checkpoint(checkpoints, settings.resume)
        starts_over = settings.resume in ("never", None) or not names
        if starts_over and (self.folder / RESULT).exists():
            raise SettingsError(
                f"{self.folder} contains a finished run. Choose another --run-dir, or remove that directory."
            )
        if settings.resume is None and names:
            raise SettingsError(
                f"{self.folder} contains a run that is not finished, with the checkpoint {names[-1]}. Set --resume auto to "
                "continue it, or --resume never to remove its checkpoints and start again."
            )
        return starts_over

    def prepare(self) -> None:
        """Create the run directory and write settings.yaml, on the main process."""
        self.processes.from_main(self._prepare)

    def _prepare(self) -> None:
        """Create the run directory, remove an earlier result.json, and write settings.yaml."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / RESULT).unlink(missing_ok=True)
        save_settings(replace(self.settings, resume=TrainSettings.resume), self.folder / "settings.yaml")

    def finish(self, result: TrainResult) -> None:
        """Write result.json, which marks the run as finished, and remove `interrupted/`; only on the main process."""
        if self.processes.is_main:
            if is_saved_encoder(self.folder / RESCUE_FOLDER):
                shutil.rmtree(self.folder / RESCUE_FOLDER)
            metrics = {"start": result.start, "best": result.best}
            scores = {name: deciding_metric(values) for name, values in metrics.items()}
            content = {
                "steps": result.steps,
                "higher": result.higher,
                "verdict": result.verdict,
                **scores,
                "metrics": metrics,
                "encoder": result.encoder,
            }
            write_json(self.folder / RESULT, plain({**content, "budget": result.budget}), writer="")

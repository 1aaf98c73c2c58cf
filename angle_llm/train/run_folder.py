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

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from angle_llm.device import unused_gpu
from angle_llm.io import differences, log, plain, write_json
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.source.checks import is_saved_encoder
from angle_llm.resumable_folder import lock_folder, unlock_folder
from angle_llm.settings.parsing import SettingsError, load_settings, need_library, save_settings, settings_to_dict
from angle_llm.settings.train import TrainSettings
from angle_llm.train.best_model import RESCUE_FOLDER, deciding_metric
from angle_llm.train.callbacks import DECIDES, read_metrics
from angle_llm.train.checkpoint import FOLDER, checkpoint_names, named_checkpoint
from angle_llm.train.distributed import Processes, ProcessWatch, RemoteRankError
from angle_llm.train.token_budget import TokenBudget

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULT = "result.json"
"""Name of the file in a run directory that marks the run as finished."""


@dataclass(frozen=True)
class FineTuned:
    """Result of a training run: the encoder, its folder, number of steps, metrics, and token budget."""

    folder: Path
    """Folder of the encoder to use: the best encoder after a step if the run evaluates, else the last encoder. The model
    before training is never saved, even if it is better (`higher`)."""
    steps: int
    """Number of optimizer steps of the run."""
    best: dict[str, float] | None
    """Metrics of the encoder in `folder`, None without evaluation. The first metric decides which encoder is best."""
    start: dict[str, float] | None
    """Metrics of the encoder before training; None without evaluation."""
    budget: TokenBudget
    """Token budget of a process at the end of the run; lower than at the start if memory ran out."""
    used: dict[str, Any]
    """Settings of the encoder by name: `prompt`, `pooling` and `max_length` in tokens."""
    verdict: str | None = None
    """Whether the encoder is better than before training, with the 95 % interval; None if it is not known, as for your own
    evaluation functions."""
    stopped: str | None = None
    """Reason why a callback stopped the run before its last step; None if it was not stopped."""

    @cached_property
    def encoder(self) -> SentenceEncoder:
        """The encoder to use, loaded from `folder` when it is first read."""
        return SentenceEncoder.from_pretrained(self.folder)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Numbers of all steps and evaluations in order, as in metrics.jsonl, for example for a `pandas.DataFrame`.

        A step has `step`, `epoch` (from 0), `loss`, `loss/TERM`, `cosine/…`, `learning_rate`, `gradient_norm` and counts. If
        float16 overflows, it has `overflow` in place of `gradient_norm`. An evaluation has `step`, `evaluation` (the metric
        that selects the best model) and `evaluation/TASK/METRIC`.
        """
        return read_metrics(self.folder.parent)

    def plot(self) -> Figure:
        """Return a figure of the run by optimizer step: loss, metric that selects the best model, and mean cosines.

        Needs matplotlib.
        """
        need_library("matplotlib", "FineTuned.plot", "report")
        from matplotlib import pyplot

        metrics = self.metrics
        cosines = sorted({name for numbers in metrics for name in numbers if name.startswith("cosine/")})
        panels = {"loss": ["loss"], "evaluation": [DECIDES], "cosine": cosines}
        if self.best is None:
            del panels["evaluation"]
        figure, all_axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3), layout="constrained")
        for axes, (title, names) in zip(all_axes, panels.items(), strict=True):
            for name in names:
                rows = [numbers for numbers in metrics if name in numbers]
                steps = [numbers["step"] for numbers in rows]
                values = [numbers[name] for numbers in rows]
                axes.plot(steps, values, marker="o" if name == DECIDES else "", label=name.removeprefix("cosine/"))
            axes.set_xlabel("step")
            axes.set_ylabel(next(iter(self.best)) if title == "evaluation" and self.best else title)
        figure.legend(handles=axes.get_lines(), loc="outside right upper")  # the curves of the last panel, the cosines
        pyplot.close(figure)  # a notebook would show it twice
        return figure

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
        used = f"prompt {self.used['prompt']}, pooling {self.used['pooling']}, at most {self.used['max_length']} tokens"
        width = max(map(len, self.best))
        rows = [
            f"{name:{width}} {self.start.get(name, math.nan):7.2f} {value:7.2f}" for name, value in self.best.items()
        ]
        verdict = [] if self.verdict is None else [self.verdict]
        return [f"evaluation ({used}):", f"{'':{width}} {'before':>7} {'saved':>7}", *rows, *verdict]


class Run:
    """Processes and directory of a training run: checks the directory, and writes settings and result."""

    def __init__(self, settings: TrainSettings, processes: Processes) -> None:
        """Check the run directory; raise `SettingsError` if the run must not write to it (see `start`)."""
        self.settings, self.processes = settings, processes
        self.folder = settings.run_path
        self._lock: FileLock | None = None
        self._is_new = False
        self.starts_over = processes.from_main(self._check)
        """Whether the run starts at step 1, not from a checkpoint."""

    @classmethod
    @contextmanager
    def start(cls, settings: TrainSettings) -> Iterator[Run]:
        """Context manager that connects the processes of a run, checks the run directory, and detects lost processes.

        If a process is killed or stops responding, all other processes end with a message (see `ProcessWatch`).

        Raises:
            RemoteRankError: on every rank, if settings or rows in memory differ between ranks.
            FolderError: if another process trains in the directory.
            SettingsError: if the launch is not supported, the directory belongs to another or a finished run, the directory
                has checkpoints and `resume` is None, or the checkpoint that `resume` names does not exist.
        """
        processes = Processes.start()
        of_main, *of_others = map(settings_to_dict, processes.gather(settings))
        for rank, values in enumerate(of_others, 1):
            if changed := differences(of_main, values, removed=True):
                raise RemoteRankError(
                    f"rank 0 and rank {rank} (now) have different settings or data: {', '.join(changed)}. Rows that "
                    "are passed in Python are named memory:…. Use the same settings and data on every rank."
                )
        run = cls(settings, processes)
        run.log(str(run.processes))
        if processes.device.type == "cpu" and (problem := unused_gpu()):
            run.log(f"warning: {problem}")
        try:
            with ProcessWatch(run.processes):
                yield run
        finally:
            run.unlock()

    def log(self, line: str) -> None:
        """Log a line, on the main process only."""
        if self.processes.is_main:
            log(line)

    def _check(self) -> bool:
        """Check that the run directory is new or belongs to this run, lock it, and return whether the run starts at step 1.

        Raises:
            FolderError: if another process trains in the directory.
            SettingsError: if the directory belongs to another or a finished run, it has checkpoints and `resume` is None, or
                the checkpoint that `resume` names does not exist.
        """
        settings = self.settings
        path = self.folder / "settings.yaml"
        stored = (load_settings(TrainSettings, path) if path.exists() else settings).identity
        if stored != settings.identity:
            changed = differences(settings_to_dict(stored), settings_to_dict(settings.identity), removed=True)
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
                f"{self.folder} contains a finished run. Choose another --run-dir (in Python: run_dir), or remove that "
                "directory."
            )
        if settings.resume is None and names:
            raise SettingsError(
                f"{self.folder} contains a run that is not finished, with the checkpoint {names[-1]}. Set --resume auto (in "
                "Python: resume='auto') to continue it, or --resume never to remove its checkpoints and start again."
            )
        self._is_new = not self.folder.exists()
        self._lock = lock_folder(self.folder)
        return starts_over

    def unlock(self) -> None:
        """Release the lock of the run directory, and remove the directory if the run created it and wrote nothing to it."""
        if self._lock is not None:
            unlock_folder(self._lock)
            if self._is_new:
                with suppress(OSError):  # not empty
                    self.folder.rmdir()

    def prepare(self, passed: str = "") -> None:
        """Create the run directory, remove an earlier result.json, and write settings.yaml, on the main process.

        `passed` names the loss and the callbacks that a program passed, for a comment in settings.yaml.
        """

        def write() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / RESULT).unlink(missing_ok=True)
            save_settings(replace(self.settings, resume=TrainSettings.resume), self.folder / "settings.yaml", passed)

        self.processes.from_main(write)

    def finish(self, result: FineTuned) -> None:
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
                "stopped": result.stopped,
                **scores,
                "metrics": metrics,
                "encoder": result.used,
                "budget": result.budget,
            }
            write_json(self.folder / RESULT, plain(content), writer="")

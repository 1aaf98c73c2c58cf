"""Fine-tuning in Python: `fine_tune` with own data, evaluation, loss and callbacks.

from angle_llm import fine_tune

result = fine_tune(
    model={"path": "Qwen/Qwen3-0.6B-Base", "max_length": 128},
    data=dataset,                       # a datasets.Dataset with the columns query and answer
    evaluation=held_out,
    run_dir="runs/own",
)
rows = result.encoder.encode(["Who eats?"])
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from angle_llm.run import PythonObjects, run_training
from angle_llm.settings.parsing import (
    SettingsError,
    load_settings,
    merged_settings,
    settings_from_dict,
    settings_to_dict,
)
from angle_llm.settings.train import DataSettings, EvaluationSettings, TrainSettings

if TYPE_CHECKING:
    from angle_llm.data.sources import Source
    from angle_llm.evaluate.held_out import EvaluationFunction
    from angle_llm.losses.terms import Loss
    from angle_llm.train.callbacks import Callback
    from angle_llm.train.run_folder import FineTuned


def fine_tune(
    settings: TrainSettings | str | Path | None = None,
    *,
    data: Any = None,
    evaluation: Any = None,
    loss: Loss | None = None,
    callbacks: Sequence[Callback] = (),
    **overrides: Any,
) -> FineTuned:
    """Fine-tune a language model into a text-embedding model, and return the encoder with the results of the run.

    Args:
        settings: Settings, the path of a YAML file, or the name of a bundled recipe. None: the defaults of the command
            `angle-llm train`.
        data: Training data in place of those of `settings`: a path, hub id or `starter:NAME`; a list of dictionaries; a
            `datasets.Dataset`, `IterableDataset` or `DatasetDict` (split `train`); a data frame of pandas or polars; or
            a function that returns an iterator of dictionaries, for data larger than memory. Columns are recognised by
            their names, such as `anchor` and `positive` (list above). Or a dictionary of settings, whose paths may be these
            objects: `{"path": dataset, "columns": {"text1": "title", "text2": "body"}}`, or a mixture
            `{"sets": [{"path": dataset, "weight": 2}, …]}`.
        evaluation: Held-out tasks in place of `settings.evaluation.tasks`: scored pairs, questions and answers, or texts with
            a class, of the same kinds as `data`; a function that takes the encoder and returns a number or a dictionary of
            numbers; a list of these; a dictionary NAME → task; or a dictionary of settings, as in `{"tasks": {"dev":
            dataset}, "every_steps": 100}`. Metrics are named TASK/METRIC, where TASK is the name in the dictionary or of the
            function or file, else `evaluation` (in a list `evaluation1`, …), and METRIC is `score` if a function returns a
            number. The first metric selects the best model; higher is better.
        loss: A function `(embeddings, relation) -> scalar` of float32 embeddings (N, D), one row per unique text, and
            their `Relation`; a `Term`; an `Objective`; or a list of these, which are added. It replaces
            `settings.objective`: to add a term to the default loss, pass `[AngleObjective(), term]`.
        callbacks: Objects with methods that are called between steps, such as `EarlyStopping`.
        overrides: Fields of `TrainSettings`, which replace `settings`, with a dictionary for a group:
            `batch_size=32, lora={"rank": 16}, optimizer={"learning_rate": 1e-4}`. `model` may be a path.

    If a launcher starts several processes, every process calls this function with equal arguments. A difference is an
    error that names the argument.

    With `resume="auto"`, the same call continues an interrupted run from its last checkpoint, and returns the result of a
    finished run with checkpoints. Its rows, loss and callbacks must be equal. Ctrl-C, SIGTERM and SIGHUP write a checkpoint;
    other exceptions, also of a callback, do not: set `checkpoint={"every_steps": 100}`. To train an encoder further, start a
    new run with `model=result.folder`.

    Raises:
        SettingsError: for settings that cannot be used, such as a run directory that belongs to another run.
        DataError: for data without rows, with a bad row (its number is in the message), or of an unknown format.
        TrainingError: if the training cannot start, or has to stop.
        FolderError: if the checkpoints belong to a run with other rows, loss or callbacks.
        Interrupted: a `SystemExit`, after Ctrl-C, SIGTERM or SIGHUP, when a checkpoint is written.
        ArtifactError, FileNotFoundError: if a model cannot be read.
    """
    from angle_llm.losses.terms import as_objective
    from angle_llm.train.callbacks import check_callbacks

    check_callbacks(callbacks)
    top_level = fields(TrainSettings)
    for name in overrides.keys() - {item.name for item in top_level}:
        groups = [item.name for item in top_level if name in getattr(item.default_factory, "__dataclass_fields__", ())]
        if groups:
            raise SettingsError(f"unknown setting {name!r}. Did you mean {groups[0]}={{{name!r}: …}}?")
    if not isinstance(settings, TrainSettings):
        settings = TrainSettings() if settings is None else load_settings(TrainSettings, settings)
    rows: dict[str, Source] = {}
    tasks: dict[str, Source | EvaluationFunction] = {}
    task_names: dict[str, str] = {}
    if isinstance(overrides.get("model"), str | Path):
        overrides["model"] = {"path": str(overrides["model"])}
    if data is not None:
        overrides["data"] = _data_settings(data, rows)
    if evaluation is not None:
        overrides["evaluation"] = _evaluation_settings(evaluation, tasks, task_names)
    values = merged_settings(settings_to_dict(settings), settings_to_dict(overrides))
    objects = PythonObjects(rows, tasks, task_names, None if loss is None else as_objective(loss), callbacks)
    try:
        return run_training(settings_from_dict(TrainSettings, values, "fine_tune"), objects)
    except SystemExit as error:  # a notebook keeps it, and with its frames the model and the optimizer
        traceback.clear_frames(error.__traceback__)
        raise


def _data_settings(data: Any, rows: dict[str, Source]) -> dict[str, Any]:
    """Return the settings of training data; the sources of Python objects are added to `rows`, by path."""
    if isinstance(data, DataSettings):
        return settings_to_dict(data)
    values = dict(data) if _is_settings_dict(data, DataSettings) else {"path": data}
    if values.keys() & {"path", "sets"}:  # other data, not a change of the data in the settings
        values = settings_to_dict(DataSettings()) | values
        values["path"] = _text_of(values["path"], "data", rows)
        values["sets"] = [
            {**dataset, "path": _text_of(dataset["path"], f"data{number}", rows)} if "path" in dataset else dataset
            for number, dataset in enumerate(values["sets"], 1)
        ]
    return values


def _evaluation_settings(
    evaluation: Any, objects: dict[str, Source | EvaluationFunction], names: dict[str, str]
) -> dict[str, Any]:
    """Return the settings of an evaluation.

    The sources of Python objects, and functions, are added to `objects`, and names in a dictionary of tasks to `names`, by
    their entry in `evaluation.tasks`.
    """
    from angle_llm.evaluate.held_out import FUNCTION

    def text_of(task: Any, name: str | None = None, number: str = "") -> str:
        is_data = hasattr(task, "column_names") or hasattr(task, "__arrow_c_stream__")
        is_function = isinstance(task, FunctionType | MethodType)
        is_data = is_data or (is_function and not inspect.signature(task).parameters)
        if is_data or not callable(task):
            return _text_of(task, name or f"evaluation{number}", objects)
        text = f"{FUNCTION}{name or getattr(task, '__name__', type(task).__name__)}"
        objects[text] = task
        return text

    if isinstance(evaluation, EvaluationSettings):
        return settings_to_dict(evaluation)
    # Tasks without settings: the settings that describe the earlier tasks are reset.
    values = settings_to_dict(EvaluationSettings()) | {"tasks": evaluation}
    del values["every_steps"]
    if _is_settings_dict(evaluation, EvaluationSettings):
        values = dict(evaluation)
    tasks = values.get("tasks")
    if isinstance(tasks, Mapping) and not hasattr(tasks, "column_names"):  # a DatasetDict has column names
        values["tasks"] = [text_of(task, name) for name, task in tasks.items()]
        names.update(zip(values["tasks"], tasks, strict=True))
    elif isinstance(tasks, list | tuple) and not (tasks and all(type(row) is dict for row in tasks)):
        values["tasks"] = [text_of(task, number=str(number)) for number, task in enumerate(tasks, 1)]
    elif tasks is not None:  # also a list of dictionaries, which is one dataset
        values["tasks"] = [text_of(tasks)]
    return values


def _text_of(value: Any, name: str, sources: dict[str, Any]) -> str:
    """Return a path unchanged; for other data, add their source to `sources`, and return its text `memory:NAME-DIGEST`."""
    from angle_llm.data.sources import source_in_memory

    if isinstance(value, str | Path):
        return str(value)
    source = source_in_memory(value, name)
    sources[source.text] = source
    return source.text


def _is_settings_dict(value: Any, settings_type: type) -> bool:
    """Return whether a value is a dictionary whose keys are settings of a class."""
    names = {item.name for item in fields(settings_type)}
    return type(value) is dict and bool(value) and value.keys() <= names

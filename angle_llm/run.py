"""Fine-tuning, from settings and objects of a program to a saved encoder: the main code path of the package.

from angle_llm import fine_tune

result = fine_tune(
    model={"path": "Qwen/Qwen3-0.6B-Base", "max_length": 128},
    data=dataset,                       # a datasets.Dataset with the columns query and answer
    evaluation=held_out,
    run_dir="runs/own",
)
rows = result.encoder.encode(["Who eats?"])
"""

import inspect
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from accelerate.utils import set_seed

from angle_llm.data.mixture import Mixture, load_mixture, sets_of
from angle_llm.data.sources import Source, source_in_memory
from angle_llm.data.store import cache_folder
from angle_llm.evaluate.held_out import FUNCTION, EvaluationFunction, held_out_evaluation
from angle_llm.losses import Objective
from angle_llm.losses.terms import Loss, as_objective, described
from angle_llm.memory.budget import choose_budget
from angle_llm.model.pooling import pooling_named
from angle_llm.model.saved_lora import lora_of_run
from angle_llm.model.source.resolve import ModelSource, resolve_model
from angle_llm.model.text_vectors import precompute_vectors
from angle_llm.prompts import load_prompts
from angle_llm.settings.parsing import (
    SettingsError,
    load_settings,
    merged_settings,
    need_library,
    settings_from_dict,
    settings_to_dict,
)
from angle_llm.settings.train import DataSettings, EvaluationSettings, ObjectiveSettings, TrainSettings
from angle_llm.train.callbacks import Callback, EarlyStopping, check_callbacks, names_of
from angle_llm.train.distributed import Processes
from angle_llm.train.loading import check_cpu, check_partition, load_encoder, long_texts, with_supported_dtype
from angle_llm.train.metrics import check_trackers
from angle_llm.train.objectives import checked_data, make_losses
from angle_llm.train.run_folder import FineTuned, Run
from angle_llm.train.strategies import check_optimizer
from angle_llm.train.token_budget import check_checkpointing
from angle_llm.train.trainer import Trainer


@dataclass(frozen=True)
class PythonObjects:
    """Objects that a Python program adds to the settings of a training run."""

    data: Mapping[str, Source] = field(default_factory=dict)
    """Path in `settings.data` → rows in memory."""
    tasks: Mapping[str, Source | EvaluationFunction] = field(default_factory=dict)
    """Entry of `settings.evaluation.tasks` → rows in memory, or a function that measures an encoder."""
    task_names: Mapping[str, str] = field(default_factory=dict)
    """Entry of `settings.evaluation.tasks` → name of the task in results, if not the name of the file."""
    loss: Objective | None = None
    """Loss in place of `settings.objective`."""
    callbacks: Sequence[Callback] = ()

    def names(self) -> str:
        """Return the terms of the loss and the classes of the callbacks, which are not in the settings; empty without."""
        loss = [] if self.loss is None else [f"loss {type(self.loss).__qualname__}"]
        terms = [f"loss {term.name}" for term in getattr(self.loss, "terms", ())]
        return ", ".join([*(terms or loss), *(type(callback).__qualname__ for callback in self.callbacks)])

    def identity(self) -> dict[str, str]:
        """Return names of the loss and the callbacks, which must not change when a run resumes."""
        return {"callbacks": names_of(self.callbacks), "loss": "" if self.loss is None else described(self.loss)}


def run_training(settings: TrainSettings, objects: PythonObjects | None = None) -> FineTuned:
    """Fine-tune a language model into a text-embedding model, and save the encoder.

    The encoder is the best encoder if the settings have an evaluation, else the last encoder. Names, paths, the run
    directory and the evaluation tasks are checked first, then the data are read, and then the weights are loaded. If a
    launcher starts several processes, every process calls this function. `train.run_folder` lists the files of the run
    directory.

    Raises:
        SettingsError: if the run directory belongs to another or a finished run, it has checkpoints and `resume` is None,
            the checkpoint to resume from does not exist, or the launch is not supported.
        Interrupted: a `SystemExit`, after SIGINT, SIGTERM or SIGHUP; start again with `resume="auto"` to continue the run.
        ValueError: for an unknown pooling or dtype.
        TrainingError: if the training cannot start or has to stop, for example for a loss that is not finite.
        ArtifactError, DataError, SettingsError, FileNotFoundError: if a model, dataset or prompt cannot be read.
    """
    objects = objects or PythonObjects()
    passed = objects.names()
    stopping = settings.early_stopping
    if stopping.patience is not None:
        stop = EarlyStopping(stopping.patience, stopping.metric, stopping.min_delta)
        objects = replace(objects, callbacks=[*objects.callbacks, stop])
    stops_early = any(isinstance(callback, EarlyStopping) for callback in objects.callbacks)
    if stops_early and not settings.evaluation.every_steps:
        raise SettingsError(
            "early stopping counts evaluations: expected evaluation.tasks, and evaluation.every_steps above 0. Set them, such as "
            "--evaluation.every-steps 100; in Python: evaluation={'tasks': …, 'every_steps': 100}."
        )
    with Run.start(settings) as run:
        # 1. Settings, the evaluation tasks (read once, here) and the models: what can be checked before training data.
        check_trackers(settings.report_to)
        losses = make_losses(settings, objects.loss)
        evaluate = held_out_evaluation(
            settings.evaluation, settings.micro_batch_tokens, objects.tasks, objects.task_names
        )
        for callback in objects.callbacks:
            if evaluate is not None and isinstance(callback, EarlyStopping):
                evaluate.check_metric("early_stopping.metric", callback.metric)
        source, others = resolve_models(settings)
        check_cpu(source, settings, run.processes)
        settings = with_supported_dtype(settings, run.processes)
        check_partition(source, settings, run.processes.partition)
        check_optimizer(settings.optimizer, run.processes)
        settings = replace(settings, lora=lora_of_run(source, settings.model, settings.lora))

        # 2. The examples.
        data = checked_data(losses, load_data(settings.data, run.processes, objects.data))
        for line in data.summary():
            run.log(line)
        if evaluate is not None and run.starts_over and run.processes.is_main:
            for line in (*evaluate.overlap_with(data), *evaluate.reversed_scores(settings)):
                run.log(line)

        # 3. Vectors of the texts from a guide or teacher encoder, before the weights of the model need memory.
        from_main, device = run.processes.from_main, run.processes.device
        vectors = precompute_vectors(others, data, run.folder, device, from_main, resumes=not run.starts_over)

        # 4. The encoder: base model, prompt, pooling, adapter, head.
        set_seed(settings.seed)
        run.log(f"loading {settings.model.path}")
        encoder, report = load_encoder(source, settings, run.processes)
        for line in (*report, *(long_texts(encoder, data) if run.processes.is_main else ())):
            run.log(line)
        losses[0].check_width(encoder.dimensions)
        if settings.activation_checkpointing == "always":
            check_checkpointing(encoder)

        # 5. Token budget that fits the memory of the device; a resumed run uses the budget of its checkpoint.
        budget = choose_budget(settings, encoder, data, losses, run.processes) if run.starts_over else None

        # 6. Train, and keep the best model.
        trainer = Trainer(
            run,
            encoder,
            data,
            losses,
            evaluate,
            settings,
            budget=budget,
            vectors=vectors,
            callbacks=objects.callbacks,
            more_identity=objects.identity() | ({} if evaluate is None else {"evaluation files": evaluate.digest}),
        )
        result = trainer.fit(lambda: run.prepare(passed))
        for line in result.report():
            run.log(line)
        return result


def resolve_models(settings: TrainSettings) -> tuple[ModelSource, dict[str, ModelSource]]:
    """Return the sources of the model and of the guide and teacher encoders; check names without loading weights.

    A source is what a path or hub id refers to. The second result has the keys `guide` (filters false negatives) and
    `teacher_vectors` (encoder whose vectors are learned), if the settings name these encoders. The check covers all
    paths, the pooling and the prompts.

    Raises:
        SettingsError: if the model to train is the output of this run.
        ValueError, FileNotFoundError, ArtifactError: for a name or path that is not valid.
        MissingLibraryError: if the settings quantize the model and bitsandbytes is not installed.
    """
    model, objective = settings.model, settings.objective
    if model.bits not in (None, "fp8"):
        need_library("bitsandbytes", "--model.bits (omit it to train without quantisation)", "quantization")
    if model.pooling is not None:
        pooling_named(model.pooling)
    for prompt in (model.prompt, *(dataset.prompt for dataset in sets_of(settings.data))):
        if prompt is not None:
            load_prompts(prompt)
    source = resolve_model(model.path, attention=model.attention)
    model_dir = settings.run_path / "model"
    if source.location.is_local and Path(source.location.name).resolve() == model_dir.resolve():
        raise SettingsError(
            f"--model.path {model.path} is the output folder of this run, which would be replaced. Choose another --run-dir."
        )
    source.read_library(None if model.prompt is None else load_prompts(model.prompt))  # raises for unsupported settings
    paths = {"guide": objective.false_negatives.guide, "teacher_vectors": objective.teacher}
    others = {name: resolve_model(path) for name, path in paths.items() if path is not None}
    for encoder_source in (source, *others.values()):
        _ = encoder_source.backbone  # raises if the base of an adapter is missing
    return source, others


def load_data(settings: DataSettings, processes: Processes, in_memory: Mapping[str, Source]) -> Mixture:
    """Read the training data on every process; `in_memory` has the sources of paths that name rows in memory.

    The first process of a machine reads first and caches large datasets, so that all other processes read the cache.
    """
    first: list[Mixture] = []
    processes.from_main(lambda: first.append(load_mixture(settings, cache_folder(), in_memory)), each_machine=True)
    return first[0] if first else load_mixture(settings, cache_folder(), in_memory)


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
            a class, of the same kinds as `data` (of a `DatasetDict`, one split); a function that takes the encoder and
            returns a number or a dictionary of numbers; a list of these; a dictionary NAME → task; or a dictionary of
            settings, as in `{"tasks": {"dev": dataset}, "every_steps": 100}`. Metrics are named TASK/METRIC, where TASK is
            the name in the dictionary or of the function or file, else `evaluation` (in a list `evaluation1`, …), and METRIC
            is `score` if a function returns a number. The first metric selects the best model; higher is better.
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
    if loss is not None and not (settings.objective.teacher or settings.objective.false_negatives.guide):
        settings = replace(settings, objective=ObjectiveSettings())
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

    def text_of(task: Any, name: str | None = None, number: str = "") -> str:
        if isinstance(task, Mapping) and hasattr(task, "column_names"):  # a DatasetDict
            raise SettingsError(
                f"evaluation: expected one of the splits {', '.join(task)}, such as data['…'], got all."
            )
        is_data = hasattr(task, "column_names") or hasattr(task, "__arrow_c_stream__")
        is_function = isinstance(task, FunctionType | MethodType)
        is_data = is_data or (is_function and not inspect.signature(task).parameters)
        if is_data or not callable(task):
            return _text_of(task, name or f"evaluation{number}", objects)
        text = f"{FUNCTION}{name or getattr(task, '__name__', type(task).__name__)}"
        if text in objects:
            name = text.removeprefix(FUNCTION)
            raise SettingsError(f"evaluation: two functions have the name {name}; pass a dictionary NAME → function.")
        objects[text] = task
        return text

    if isinstance(evaluation, EvaluationSettings):
        return settings_to_dict(evaluation)
    # Tasks without settings: the settings that describe the earlier tasks are reset.
    values = settings_to_dict(EvaluationSettings()) | {"tasks": evaluation}
    if not isinstance(evaluation, list | tuple | dict) or evaluation:
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
    if isinstance(value, str | Path):
        return str(value)
    source = source_in_memory(value, name)
    sources[source.text] = source
    return source.text


def _is_settings_dict(value: Any, settings_type: type) -> bool:
    """Return whether a value is a dictionary whose keys are settings of a class."""
    names = {item.name for item in fields(settings_type)}
    return type(value) is dict and bool(value) and value.keys() <= names

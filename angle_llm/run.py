"""Fine-tuning, from settings to a saved encoder: the main code path of the package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from angle_llm.settings.parsing import SettingsError, need_library
from angle_llm.settings.train import DataSettings, TrainSettings

if TYPE_CHECKING:
    from angle_llm.data.mixture import Mixture
    from angle_llm.data.sources import Source
    from angle_llm.evaluate.held_out import EvaluationFunction
    from angle_llm.losses import Objective
    from angle_llm.model.source.resolve import ModelSource
    from angle_llm.train.callbacks import Callback
    from angle_llm.train.distributed import Processes
    from angle_llm.train.run_folder import FineTuned


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
        terms = [f"loss {term.name}" for term in getattr(self.loss, "terms", ())]
        return ", ".join([*terms, *(type(callback).__qualname__ for callback in self.callbacks)])

    def identity(self) -> dict[str, str]:
        """Return names of the loss and the callbacks, which must not change when a run resumes."""
        from angle_llm.losses.terms import described
        from angle_llm.train.callbacks import names_of

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
    from accelerate.utils import set_seed

    from angle_llm.evaluate.held_out import held_out_evaluation
    from angle_llm.memory.budget import choose_budget
    from angle_llm.model.saved_lora import lora_of_run
    from angle_llm.model.text_vectors import precompute_vectors
    from angle_llm.train.callbacks import EarlyStopping
    from angle_llm.train.loading import check_cpu, check_partition, load_encoder, long_texts, with_supported_dtype
    from angle_llm.train.metrics import check_trackers
    from angle_llm.train.objectives import checked_data, make_losses
    from angle_llm.train.run_folder import Run
    from angle_llm.train.strategies import check_optimizer
    from angle_llm.train.trainer import Trainer

    objects = objects or PythonObjects()
    passed = objects.names()
    stopping = settings.early_stopping
    if stopping.patience is not None:
        stop = EarlyStopping(stopping.patience, stopping.metric, stopping.least)
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
        vectors = precompute_vectors(others, data, run.folder, run.processes.device, run.processes.from_main)

        # 4. The encoder: base model, prompt, pooling, adapter, head.
        set_seed(settings.seed)
        run.log(f"loading {settings.model.path}")
        encoder, report = load_encoder(source, settings, run.processes)
        for line in (*report, *(long_texts(encoder, data) if run.processes.is_main else ())):
            run.log(line)
        losses[0].check_width(encoder.dimensions)

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
    from angle_llm.data.mixture import sets_of
    from angle_llm.model.pooling import pooling_named
    from angle_llm.model.source.resolve import resolve_model
    from angle_llm.prompts import load_prompts

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
    from angle_llm.data.mixture import load_mixture
    from angle_llm.data.store import cache_folder

    first: list[Mixture] = []
    processes.from_main(lambda: first.append(load_mixture(settings, cache_folder(), in_memory)), each_machine=True)
    return first[0] if first else load_mixture(settings, cache_folder(), in_memory)

"""A whole fine-tuning run, from settings to a directory: what the recipes and `angle-llm train` call."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from angle_llm.config import (
    DataSettings,
    ModelSettings,
    SettingsError,
    TrainSettings,
    changed_settings,
    load_settings,
    save_settings,
    settings_to_dict,
)
from angle_llm.model.artifact import EncoderCard
from angle_llm.model.checks import is_saved_encoder
from angle_llm.prompts import load_prompt

if TYPE_CHECKING:
    from angle_llm.data.mixture import Mixture
    from angle_llm.train.distributed import Launch, Processes


def fine_tune(settings: TrainSettings) -> Path:
    """Turns a language model into a sentence encoder; returns the directory of the model to use.

    What is cheap to check is checked first: names and places, how it was launched, then the pairs to evaluate on, then the
    data, and only then weights are loaded. Under a launcher of several processes each of them calls this.

    The run directory holds settings.yaml (starts the same run again), metrics.jsonl, tensorboard/, model/, and
    rejected.jsonl if bad rows were left out, checkpoints/ if any were written.

    Raises:
        SettingsError: if the run directory holds a run with other settings, or not the checkpoint to go on from, or the
            settings cannot work the way the run was launched.
        Interrupted: a `SystemExit`, after SIGINT or SIGTERM; `resume="auto"` goes on from there.
        ValueError: for a pooling or dtype that is not known.
        ArtifactError, DataError, PromptError, TrainingError, FileNotFoundError: see the modules that do the work.
    """
    from angle_llm.train.distributed import Launch
    from angle_llm.train.process_loss import ProcessWatch

    launch = Launch.join(settings.run_path)
    with ProcessWatch(launch.processes):
        return _fine_tune(settings, launch)


def _fine_tune(settings: TrainSettings, launch: Launch) -> Path:
    from accelerate.utils import set_seed

    from angle_llm.evaluate.sts import sts_score
    from angle_llm.losses import NestedObjective
    from angle_llm.model.encoder import SentenceEncoder
    from angle_llm.model.lora import count_parameters
    from angle_llm.train.batches import objectives_of
    from angle_llm.train.distributed import check_can_work
    from angle_llm.train.trainer import train

    processes = launch.processes
    log: Callable[[str], None] = print if processes.is_main else lambda _: None

    # 1. Names and places, how it is spread, how it is measured, what to learn from: mistakes show before weights load,
    #    cheap ones first.
    processes.from_main(lambda: _check_run_directory(settings))
    check_can_work(settings, launch)
    _check_model(settings.model)
    for each in settings.data.sets:
        if each.prompt is not None:
            load_prompt(each.prompt)
    objectives = objectives_of(settings)
    evaluate = None
    if settings.evaluation.pairs:
        evaluate = sts_score(settings.evaluation.pairs, micro_batch_tokens=settings.micro_batch_tokens)
    log(str(launch))
    data = _read(settings.data, processes)
    for line in data.summary():
        log(line)

    # 2. The encoder: a backbone, the prompt, the pooling, an adapter.
    set_seed(settings.seed)
    model = settings.model
    log(f"loading {model.path}")
    encoder = SentenceEncoder.from_pretrained(
        model.path,
        prompt=model.prompt,
        pooling=model.pooling,
        max_length=model.max_length,
        dtype=model.dtype,
        revision=model.revision,
        bits=model.bits,
        device=launch.loads_on(model.bits),
    )
    if isinstance(objectives[0], NestedObjective):
        objectives[0].check_width(encoder.dimensions)
        encoder.model.read_layers(settings.nested.layers)
    if settings.lora.rank:
        encoder.add_lora(settings.lora)
    trainable, total = count_parameters(encoder.model)
    log(f"training {trainable:,} of {total:,} parameters ({trainable / total:.2%})")

    # 3. The run directory knows how to start this run again.
    processes.from_main(lambda: _prepare_run_directory(settings, data))

    # 4. Train, keep the best.
    result = train(encoder, data, objectives, settings, evaluate, launch)
    if result.best_score is not None:
        scores = f"{result.start_score:.2f} before, {result.best_score:.2f} after"
        log(f"evaluation: {scores} (Spearman × 100 on {settings.evaluation.pairs})")
    return result.model_dir


def _read(settings: DataSettings, processes: Processes) -> Mixture:
    """The first process of a machine reads first; the others find on disk what is too large for memory."""
    from angle_llm.data.mixture import load_mixture
    from angle_llm.data.store import cache_folder

    first: list[Mixture] = []
    processes.once_a_machine(lambda: first.append(load_mixture(settings, cache_folder())))
    return first[0] if first else load_mixture(settings, cache_folder())


def _prepare_run_directory(settings: TrainSettings, data: Mixture) -> None:
    settings.run_path.mkdir(parents=True, exist_ok=True)
    save_settings(replace(settings, resume=TrainSettings.resume), settings.run_path / "settings.yaml")
    _save_rejected(data, settings.run_path / "rejected.jsonl")


def _check_run_directory(settings: TrainSettings) -> None:
    """A directory is one run's: another run's settings beside this run's weights would be a lie."""
    from angle_llm.train.checkpoint import Checkpoints

    path = settings.run_path / "settings.yaml"
    there = load_settings(TrainSettings, path).identity if path.exists() else settings.identity
    if there != settings.identity:
        other = changed_settings(settings_to_dict(there), settings_to_dict(settings.identity))
        raise SettingsError(
            f"{settings.run_path} holds a run with other settings ({', '.join(other)}). Choose another --run-dir, or remove that "
            "directory."
        )
    Checkpoints.of(settings).check_named(settings.resume)


def _check_model(model: ModelSettings) -> None:
    """Refuses names that opening the model would stumble over, without opening it; a hub id is not looked up."""
    from angle_llm.model.backbone import locate, torch_dtype
    from angle_llm.model.pooling import pooling_named

    if is_saved_encoder(model.path):
        EncoderCard.read(Path(model.path).expanduser())
    else:
        locate(model.path)
    if model.pooling is not None:
        pooling_named(model.pooling)
    if model.dtype != "auto":
        torch_dtype(model.dtype)
    if model.prompt is not None:
        load_prompt(model.prompt)


def _save_rejected(data: Mixture, path: Path) -> None:
    """Every bad row that was left out, with its place and the reason."""
    rejected = [bad for each in data.sets if each.report is not None for bad in each.report.rejected]
    if rejected:
        lines = [json.dumps(bad._asdict(), ensure_ascii=False) for bad in rejected]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

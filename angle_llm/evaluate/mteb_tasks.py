"""MTEB evaluation: run tasks of MTEB with the package `mteb`, and report their main scores."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from angle_llm.evaluate.encoding import EncoderFacts, open_encoder, write_results
from angle_llm.evaluate.results import report, table
from angle_llm.settings.commands import MtebSettings
from angle_llm.settings.parsing import need_library

if TYPE_CHECKING:
    from angle_llm.evaluate.mteb_encoder import MtebEncoder

METRIC = "main score of mteb × 100"


def mteb_main(settings: MtebSettings) -> list[dict[str, Any]]:
    """Run `angle-llm eval mteb`: evaluate the model on tasks of MTEB, print the table of scores, write the files.

    Task names are checked before the model is opened. If a task fails, the scores of earlier tasks are printed and written.

    Raises:
        MissingLibraryError: if mteb is not installed.
        ValueError: for an unknown task.
    """
    need_library("mteb", "tasks of MTEB", "mteb")
    from angle_llm.evaluate.mteb_encoder import MtebEncoder
    from angle_llm.model.source.resolve import split_revision

    tasks = [mteb_task(name) for name in settings.tasks]
    name = settings.name or named_after(settings.model)
    encoder = open_encoder(settings, settings.model)
    # The revision is the revision of the base, so it does not apply to an adapter.
    revision = encoder.base_revision if encoder.base == split_revision(settings.model)[0] else None
    model = MtebEncoder(encoder, name=name, revision=revision, prompts=settings.prompts)
    facts = EncoderFacts.of(encoder)
    scores: list[dict[str, Any]] = []

    def write() -> None:
        header = ["task", "type", "split", "subset", "main score", name]
        rows = [list(score.values()) for score in scores]
        prompts = [f"`{use}`: prompt {prompt}." for use, prompt in settings.prompts.items()]
        text = report(settings.model, [table(header, rows, words=5)], [str(facts), *prompts, f"{METRIC}."])
        write_results(settings, METRIC, text, {"scores": scores}, facts)

    try:
        for task in tasks:
            scores += evaluate_mteb(model, [task], settings.output)
    except Exception:  # not on Ctrl-C: a program that resumes must not take incomplete results for complete ones
        if scores:
            write()
        raise
    write()
    return scores


def evaluate_mteb(model: MtebEncoder, tasks: Sequence[Any], output: Path | None = None) -> list[dict[str, Any]]:
    """Evaluate a model on task objects of mteb, and return the main score × 100 of each split and subset.

    A score is a dictionary with the keys task, type (such as STS), split, subset, metric (name of the main score), score.
    `output` is the folder for mteb's result files; None: no files. All tasks are computed again: mteb would also reuse
    stored results of another model with the same name.
    """
    import mteb

    results = mteb.evaluate(
        model,
        tasks,
        cache=None if output is None else mteb.ResultCache(output),
        overwrite_strategy="always",
        show_progress_bar=sys.stderr.isatty(),
        co2_tracker=False,
    )
    metadata_of = {task.metadata.name: task.metadata for task in tasks}
    return [
        {
            "task": result.task_name,
            "type": metadata_of[result.task_name].type,
            "split": split,
            "subset": score["hf_subset"],
            "metric": metadata_of[result.task_name].main_score,
            "score": 100 * float(score["main_score"]),
        }
        for result in results.task_results
        for split, subsets in result.scores.items()
        for score in subsets
    ]


def named_after(model: str) -> str:
    """Return the model name ORGANISATION/MODEL for mteb's results.

    The name is the hub id without revision; for a local model, `local/` and the name of its folder, or of the run directory.
    """
    from angle_llm.model.source.resolve import is_hub_id, split_revision

    model, _ = split_revision(model)
    if "/" in model and is_hub_id(model):
        return model
    folder = Path(model).expanduser().resolve()
    if folder.name == "model" and (folder.parent / "settings.yaml").is_file():
        folder = folder.parent
    return f"local/{folder.name}"


def mteb_task(name: str, flag: str = "--tasks") -> Any:
    """Return the task object of mteb with the given name.

    Raises:
        ValueError: for an unknown task. The message names the command-line `flag` that gave the name.
    """
    import mteb

    try:
        return mteb.get_task(name)
    except KeyError as error:
        raise ValueError(f"{flag}: mteb has no task {name!r}: {error.args[0]}") from error

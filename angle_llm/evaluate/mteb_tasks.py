"""Evaluation on tasks of MTEB, run by mteb."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from angle_llm.evaluate.encoding import Encode, EvalSettings, OpenEncoder, evaluated, finish
from angle_llm.evaluate.results import report, table
from angle_llm.settings_io import need_library, settings_class

if TYPE_CHECKING:
    from angle_llm.evaluate.mteb_encoder import MtebEncoder
    from angle_llm.model.encoder import SentenceEncoder

METRIC = "main score of mteb × 100"


@settings_class
class MtebSettings(EvalSettings):
    """Tasks of MTEB, run by mteb, which downloads their data from the Hugging Face hub."""

    tasks: tuple[str, ...]
    """Names of MTEB's tasks, such as STSBenchmark, Banking77Classification, NFCorpus."""

    prompts: dict[str, str] = field(default_factory=dict)
    """Use → prompt name or YAML file. A use is Retrieval-query, Retrieval-document, STS, Classification, the name of a
    task, … Without a match: --prompt, or the prompt saved with the model."""

    name: str | None = None
    """ORGANISATION/MODEL in result files. None: the hub id, or local/ and the name of the folder."""

    output: Path | None = None
    """Folder for mteb's result files, in the format of its leaderboard. None: none are written."""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("--tasks: expected at least one task of MTEB, such as STSBenchmark, got none.")


@dataclass(frozen=True)
class MtebScore:
    """The main score of a split and subset, × 100."""

    task: str
    type: str
    split: str
    subset: str
    metric: str
    score: float


def mteb_main(settings: MtebSettings, open_encoder: OpenEncoder) -> list[MtebScore]:
    """Look up the tasks, open the encoder, run mteb, print the table, write the files.

    Raises:
        MissingLibraryError: without mteb.
        ValueError: for an unknown task.
    """
    need_library("mteb", "tasks of MTEB", "mteb")
    tasks = [mteb_task(name) for name in settings.tasks]
    name = settings.name or named_after(settings.model)

    def run(encoder: SentenceEncoder, _: Encode, __: Encode | None) -> list[MtebScore]:
        from angle_llm.evaluate.mteb_encoder import MtebEncoder

        tokens = settings.micro_batch_tokens
        model = MtebEncoder(
            encoder, name=name, revision=settings.revision, prompts=settings.prompts, micro_batch_tokens=tokens
        )
        return evaluate_mteb(model, tasks, settings.output)

    scores, used = evaluated(settings, open_encoder, run)
    header = ["task", "type", "split", "subset", "main score", name]
    rows = [[s.task, s.type, s.split, s.subset, s.metric, s.score] for s in scores]
    prompts = [f"`{use}`: prompt {prompt}." for use, prompt in settings.prompts.items()]
    shown = report(settings.model, [table(header, rows, words=5)], [str(used), *prompts, f"{METRIC}."])
    finish(settings, METRIC, shown, {"scores": [asdict(score) for score in scores]}, used)
    return scores


def evaluate_mteb(model: MtebEncoder, tasks: Sequence[Any], output: Path | None = None) -> list[MtebScore]:
    """Return the main scores of mteb's task objects.

    Stored results are not used: mteb would use those of another model with the same name.
    """
    import mteb

    found = mteb.evaluate(
        model,
        tasks,
        cache=None if output is None else mteb.ResultCache(output),
        overwrite_strategy="always",
        show_progress_bar=sys.stderr.isatty(),
        co2_tracker=False,
    )
    described = {task.metadata.name: task.metadata for task in tasks}
    return [
        MtebScore(
            task=result.task_name,
            type=described[result.task_name].type,
            split=split,
            subset=score["hf_subset"],
            metric=described[result.task_name].main_score,
            score=100 * float(score["main_score"]),
        )
        for result in found.task_results
        for split, subsets in result.scores.items()
        for score in subsets
    ]


def named_after(model: str) -> str:
    """Return ORGANISATION/MODEL of a model: a hub id unchanged, else local/ and the last part of the path."""
    is_hub_id = model.count("/") == 1 and not model.startswith((".", "/", "~", "package:")) and not Path(model).exists()
    return model if is_hub_id else f"local/{Path(model).expanduser().resolve().name}"


def mteb_task(name: str, flag: str = "--tasks") -> Any:
    """Return mteb's object of a task; `flag` is named in the error for an unknown one."""
    import mteb

    try:
        return mteb.get_task(name)
    except KeyError as error:
        raise ValueError(f"{flag}: mteb has no task {name!r}: {error.args[0]}") from error

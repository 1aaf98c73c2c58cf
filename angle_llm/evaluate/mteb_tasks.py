"""The MTEB command: settings, and what happens between them and the printed table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from angle_llm.evaluate.encoding import EncoderSettings, OpenEncoder, check_library, open_from, remark_on, used_by
from angle_llm.evaluate.results import markdown_table, number
from angle_llm.io import plain, write_json


@dataclass(frozen=True, kw_only=True)
class MtebSettings(EncoderSettings):
    """Any task of MTEB, measured by mteb itself. mteb fetches a task's data from the Hugging Face hub when it runs."""

    tasks: tuple[str, ...]
    """Names of MTEB's tasks, such as STSBenchmark, Banking77Classification, NFCorpus."""

    prompts: dict[str, str] = field(default_factory=dict)
    """What texts are for → prompt name or YAML file: Retrieval-query, Retrieval-document, STS, Classification, a task's
    name, … Where none fits: --prompt, or the one saved with the model."""

    name: str | None = None
    """ORGANISATION/MODEL under which results are filed. None: the hub id, or local/ and the name of the folder."""

    output: Path | None = None
    """Folder for MTEB's own result files, as its leaderboard takes them. None: none are kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tasks:
            raise ValueError("--tasks needs at least one task of MTEB, such as STSBenchmark.")


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
    """Look the tasks up, open the encoder, let mteb measure, print the table and write the files that are asked for.

    Raises `MissingLibraryError` without mteb, `ValueError` for a task it does not know.
    """
    get_task = _mteb()
    tasks = [get_task(name) for name in settings.tasks]
    if settings.json is not None:
        settings.json.parent.mkdir(parents=True, exist_ok=True)
    encoder: Any = open_from(settings, open_encoder)
    name = settings.name or named_after(settings.model)
    scores = evaluate_mteb(
        encoder,
        tasks,
        name=name,
        revision=settings.revision,
        prompts=settings.prompts,
        micro_batch_tokens=settings.micro_batch_tokens,
        output=settings.output,
    )
    print(
        mteb_report(
            scores, name, [remark_on(encoder), *(f"`{use}`: prompt {p}." for use, p in settings.prompts.items())]
        )
    )
    if settings.json is not None:
        content = {
            "model": settings.model,
            "scores": [asdict(score) for score in scores],
            "encoder": used_by(encoder),
            "settings": asdict(settings),
        }
        write_json(settings.json, {key: plain(value) for key, value in content.items()})
    return scores


def evaluate_mteb(
    encoder: Any,
    tasks: Sequence[Any],
    *,
    name: str,
    revision: str | None = None,
    prompts: Mapping[str, str] | None = None,
    micro_batch_tokens: int | None = None,
    output: Path | None = None,
) -> list[MtebScore]:
    """Main scores of mteb's task objects for an encoder that has `dimensions` and `with_prompt`, such as
    `SentenceEncoder`.

    Everything is measured anew: mteb would else take up results of another model that once had this name.
    """
    import mteb

    from angle_llm.evaluate.mteb_encoder import MtebEncoder

    model = MtebEncoder(encoder, name=name, revision=revision, prompts=prompts, micro_batch_tokens=micro_batch_tokens)
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


def mteb_report(scores: Sequence[MtebScore], model: str, remarks: Sequence[str] = ()) -> str:
    """A Markdown table of main scores × 100, and notes."""
    header = ["task", "type", "split", "subset", "main score", model]
    rows = [[s.task, s.type, s.split, s.subset, s.metric, number(s.score)] for s in scores]
    notes = "\n".join(f"- {note}" for note in (*remarks, "Measured by mteb; main scores × 100."))
    return f"{markdown_table(header, rows, words=5)}\n\n{notes}"


def named_after(model: str) -> str:
    """ORGANISATION/MODEL for a model: a hub id as it is, anything else as local/ and its last part."""
    is_hub_id = model.count("/") == 1 and not model.startswith((".", "/", "~", "package:")) and not Path(model).exists()
    return model if is_hub_id else f"local/{Path(model).expanduser().resolve().name}"


def _mteb() -> Callable[[str], Any]:
    """A function from a task's name to mteb's object."""
    check_library("mteb", "tasks of MTEB", "mteb")
    import mteb

    def get_task(name: str) -> Any:
        try:
            return mteb.get_task(name)
        except KeyError as error:
            raise ValueError(f"mteb does not know the task {name!r}: {error.args[0]}") from error

    return get_task

"""The STS command: settings, and what happens between them and the printed table.

`eval/sts.py` and `angle-llm eval` are the same few lines: read `StsEvalSettings` from the command line and hand them to
`sts_main` with a way to open an encoder. This room never imports one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from angle_llm.evaluation.report import markdown_report, results_dict, write_json
from angle_llm.evaluation.sts import Encoder, StsResults, evaluate
from angle_llm.evaluation.tasks import (
    PUBLISHED_TASKS,
    STARTER,
    StsTask,
    TextVariant,
    available_tasks,
    read_pairs,
    read_task,
)


@dataclass(frozen=True, kw_only=True)
class StsEvalSettings:
    """Spearman and Pearson correlation on the STS tasks, beside the published figures."""

    model: str
    """The encoder: a saved directory, a hub id, a .gguf file, or package:NAME/path/inside."""

    revision: str | None = None
    """Commit, tag or branch of a hub id."""

    data_dir: Path | None = None
    """Directory with sts/, stsb/, sick/ (and their *_senteval_tok twins). None: the Hugging Face hub."""

    tasks: tuple[str, ...] = ()
    """sts12 … sts16, stsb, stsb-dev, sickr (test split), sickr-all, starter:graded_pairs.tsv, or TSV files with columns
    sentence1, sentence2, score. Empty: every published task that is there."""

    variant: TextVariant = "raw"
    """Text of the sentences: raw (as released; MTEB) or senteval (tokenised, lower-cased; the published tables)."""

    prompt: str | None = None
    """Prompt name or YAML file. None: the one saved with the model."""

    pooling: str | None = None
    """How token states become a vector: last, mean, cls, … None: the one saved with the model."""

    max_length: int | None = None
    """Longest input in tokens, prompt included. None: the one saved with the model."""

    micro_batch_tokens: int | None = None
    """Tokens computed at once, padding included: memory and speed, not figures."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number type of the weights."""

    device: str | None = None
    """Where to compute, such as cpu or cuda:0. None: the best there is."""

    json: Path | None = None
    """Also write model, settings and figures to this file."""

    def __post_init__(self) -> None:
        for flag, value in (("--max-length", self.max_length), ("--micro-batch-tokens", self.micro_batch_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{flag} must be at least 1 token, found {value}.")
        if self.variant == "senteval" and self.data_dir is None:
            raise ValueError("--variant senteval needs --data-dir: the hub holds raw text only.")


class OpenedEncoder(Encoder, Protocol):
    """An encoder that knows how it words, pools and cuts; a figure is told together with that."""

    @property
    def prompt(self) -> Any:
        """A dataclass with a `name`."""

    @property
    def pooling(self) -> str:
        """Name of the pooling."""

    @property
    def max_length(self) -> int:
        """Tokens of the longest input."""


class OpenEncoder(Protocol):
    """What opens it, such as `SentenceEncoder.from_pretrained`."""

    def __call__(
        self,
        path_or_id: str,
        /,
        *,
        prompt: str | None = None,
        pooling: str | None = None,
        max_length: int | None = None,
        dtype: str = "auto",
        device: str | None = None,
        revision: str | None = None,
    ) -> OpenedEncoder:
        """The encoder at `path_or_id`; None means as it was saved."""
        ...


def sts_main(settings: StsEvalSettings, open_encoder: OpenEncoder) -> StsResults:
    """Read the tasks, open the encoder, evaluate, print the report and write the JSON file where one is asked for.

    Data and output are checked before the model is opened, so that a typing mistake costs no waiting.
    """
    tasks = select_tasks(settings.tasks, settings.data_dir, settings.variant)
    if settings.json is not None:
        settings.json.parent.mkdir(parents=True, exist_ok=True)
    encoder = open_encoder(
        settings.model,
        prompt=settings.prompt,
        pooling=settings.pooling,
        max_length=settings.max_length,
        dtype=settings.dtype,
        device=settings.device,
        revision=settings.revision,
    )

    def encode(sentences: list[str]) -> NDArray[np.floating[Any]]:
        return encoder.encode(
            sentences, micro_batch_tokens=settings.micro_batch_tokens, show_progress=sys.stderr.isatty()
        )

    results = evaluate(encode, tasks)
    remark = f"Prompt {encoder.prompt.name}, pooling {encoder.pooling}, at most {encoder.max_length} tokens."
    print(markdown_report(results, settings.model, [remark]), end="")
    if settings.json is not None:
        used = {"prompt": asdict(encoder.prompt), "pooling": encoder.pooling, "max_length": encoder.max_length}
        write_json(settings.json, results_dict(results, settings.model, settings=asdict(settings), encoder=used))
    return results


def select_tasks(names: Sequence[str], data_dir: Path | None, variant: TextVariant) -> list[StsTask]:
    """The tasks called `names`: task names, or paths of pair files. No names: every published task there is.

    On the hub SICK comes with all its splits, so `sickr-all` stands for `sickr` there.
    """
    if not names:
        present = available_tasks(data_dir, variant)
        names = [name for name in PUBLISHED_TASKS if name in present]
        if data_dir is None:
            names = [*names, "sickr-all"]
        if not names:
            raise FileNotFoundError(
                f"no STS task on {variant} text below {data_dir}. Needed: one of sts/stsNN.test.tsv, stsb/test.tsv, "
                "sick/test.tsv (folders end in _senteval_tok for senteval text); or name tasks or files with --tasks."
            )
    return [read_pairs(name) if _is_path(name) else read_task(data_dir, name, variant) for name in names]


def _is_path(name: str) -> bool:
    return name.startswith(STARTER) or name.endswith(".tsv") or len(Path(name).parts) > 1

"""`angle-llm data score`: teacher scores of pairs, the cosines of an encoder.

NAME.jsonl             the groups, one for each query or for each positive, with scores
NAME.report.json       what they depend on, and quantiles of the scores; written last
NAME.jsonl.parts/      while scoring: the vectors; the same command resumes after a kill
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from angle_llm.data.positives import Material, gather
from angle_llm.data.row_settings import RowSettings
from angle_llm.hard_negatives import group_lines, group_row, own_cosines
from angle_llm.io import plain, remove_folder, write_file, write_json
from angle_llm.mine import GroupsOutput, log_replaced_scores
from angle_llm.mining_report import describe_groups, format_quantiles
from angle_llm.model.encoder_settings import EncoderOptions
from angle_llm.resumable import ResumableFolder
from angle_llm.settings_io import Finite, Positive, SettingsError, settings_class
from angle_llm.text_vectors import TextVectors, vectors_of
from angle_llm.vectors import encoder_identity

FORMAT_VERSION = 1
_TOGETHER = 1024


@dataclass(frozen=True)
class ScoreFiles:
    """Examples, teacher and output of scoring."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Examples of any format, as for training. With two prompts, their first texts are queries, the others documents."""
    teacher: str
    """The encoder: a saved directory, a model folder, a hub id, a .gguf file, or package:NAME/path/inside."""
    out: Path
    """The .jsonl file of groups. The same command resumes after a kill."""

    limit: Positive | None = None
    """Score at most this many examples."""
    shuffle_seed: int | None = None
    """Shuffle the examples with this seed before the limit is applied. None: file order."""
    positive_above: Finite = 0.8
    """Scored pairs above this score (rescaled to 0..1) are positives, the others negatives of their first text."""
    split_positives: bool = False
    """Write a group for each positive, all with the negatives of their query, instead of one for each query."""

    shard_rows: Positive = 8192
    """Texts embedded at a time; at most this many are embedded again after a kill.
    It may change the last digit of a score."""


@settings_class
class ScoreSettings(RowSettings, EncoderOptions, ScoreFiles):
    """Score the pairs of a data file by an encoder."""

    def __post_init__(self) -> None:
        if self.out.suffix != ".jsonl":
            raise SettingsError(f"--out must name the file of groups, NAME.jsonl; got {self.out}.")


def score_main(settings: ScoreSettings) -> None:
    """Write one group for each query, with the cosines of the teacher, or resume, and print quantiles.

    Data, settings and the output are checked before a model is loaded.

    Raises:
        DataError: for examples that cannot be used, or have no positive pair.
        FolderError: for an output of other settings, or of another program.
    """
    from angle_llm.data.examples import load_examples
    from angle_llm.model.encoder import SentenceEncoder

    output = GroupsOutput(settings.out.expanduser())
    output.check_free()
    source = settings.source_of(settings.file, limit=settings.limit, shuffle_seed=settings.shuffle_seed)
    loaded = load_examples(source)
    print(loaded.report.summary())
    log_replaced_scores(loaded.examples)
    material = gather(loaded.examples, None, settings.positive_above, lower=True)
    print(material.summary(), flush=True)
    encoder = SentenceEncoder.from_pretrained(settings.teacher, **settings.options())
    identity: dict[str, Any] = plain({
        "format_version": FORMAT_VERSION,
        "material": {"sha256": material.digest(), **material.counts()},
        "model": encoder_identity(encoder),
        "settings": {name: getattr(settings, name) for name in ("positive_above", "shard_rows")}
        | {"split_positives": settings.split_positives or None},  # None: as in older files
    })  # fmt: skip
    report = output.finished(identity)
    if report is not None:
        print(f"{settings.out} exists already, from the same examples, encoder and settings", file=sys.stderr)
    else:
        with ResumableFolder(output.folder, identity, option="--out", flat=True):
            vectors = vectors_of(material, encoder, settings.teacher, output.folder, settings.shard_rows)
            lines = group_lines(_groups(material, vectors), settings.split_positives)
            write_file(output.out, lambda file: file.writelines(lines), writer="")
            named = {"file": settings.file, "teacher": settings.teacher}
            report = plain(
                {
                    "format_version": FORMAT_VERSION,
                    "identity": identity,
                    "named": named,
                    **describe_groups(output.out),
                }
            )
            write_json(output.report, report, writer="")
            remove_folder(output.folder)
    groups = report["groups"]
    print(
        f"{groups['rows']:,} groups with {groups['positives']:,} positives and {groups['own_negatives']:,} negatives, scored"
    )
    print("\n".join(format_quantiles(report["quantiles"])))
    print(f"\n{settings.out}")


def _groups(material: Material, vectors: TextVectors) -> Iterator[dict[str, Any]]:
    for first in range(0, len(material.queries), _TOGETHER):
        some = material.queries[first : first + _TOGETHER]
        for query, found in zip(some, own_cosines(some, vectors), strict=True):
            yield group_row(material, query, found)

"""`angle-llm data score`: score the pairs of a data file with the cosines of an encoder, for training with a teacher.

The output of `--out NAME.jsonl`:

    NAME.jsonl             groups with scores: one for each query, or one for each positive
    NAME.report.json       settings, and quantiles of the scores; written last
    NAME.jsonl.parts/      while scoring: the vectors; the same command resumes after a kill
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from angle_llm.data.positives import MiningData, collect_pairs
from angle_llm.io import ResumableFolder, plain
from angle_llm.model.text_vectors import TextVectors, vectors_of
from angle_llm.model.vectors import encoder_identity
from angle_llm.settings.commands import ScoreSettings
from angle_llm.tools.hard_negatives import group_lines, group_row, own_cosines
from angle_llm.tools.mine import GroupsOutput, format_quantiles, log_replaced_scores

FORMAT_VERSION = 1
_BLOCK_QUERIES = 1024
"""Number of queries scored at a time."""


def score_main(settings: ScoreSettings) -> None:
    """Write each query with its positives, negatives and cosines, or resume; then print quantiles of the cosines.

    Data, settings and output are checked before the encoder is loaded.

    Raises:
        DataError: if the examples cannot be used, or contain no positive pair.
        FolderError: if the output was written with other settings, or by another program.
    """
    from angle_llm.data.examples import load_examples
    from angle_llm.model.encoder import SentenceEncoder

    # Examples, and their distinct texts.
    output = GroupsOutput(settings.out.expanduser())
    loaded = load_examples(settings.source_of(settings.file))
    print(loaded.report.summary())
    log_replaced_scores(loaded.examples)
    material = collect_pairs(loaded.examples, None, settings.positive_above, lower=True)
    print(material.summary(), flush=True)
    # Teacher, and the identity of the result.
    encoder = SentenceEncoder.from_pretrained(settings.teacher, **settings.options())
    identity: dict[str, Any] = plain({
        "format_version": FORMAT_VERSION,
        "material": {"sha256": material.digest(), **material.counts()},
        "model": encoder_identity(encoder),
        "settings": {
            "positive_above": settings.positive_above,
            "split_positives": settings.split_positives or None,  # None: equals the reports of older versions
        },
    })  # fmt: skip
    # Scores, unless the file has them.
    report = output.finished(identity)
    if report is not None:
        print(f"{settings.out} exists already, from the same examples, encoder and settings", file=sys.stderr)
    else:
        with ResumableFolder(output.folder, identity, option="--out"):
            vectors = vectors_of(material, encoder, output.folder)
            lines = group_lines(_groups(material, vectors), settings.split_positives)
            report = output.finish(lines, identity, {"file": settings.file, "teacher": settings.teacher}, {})
    # Summary.
    groups = report["groups"]
    positives, negatives = groups["positives"], groups["own_negatives"]
    print(f"{groups['rows']:,} groups with {positives:,} positives and {negatives:,} negatives, scored")
    print("\n".join(format_quantiles(report["quantiles"])))
    print(f"\n{settings.out}")


def _groups(material: MiningData, vectors: TextVectors) -> Iterator[dict[str, Any]]:
    """Yield a row of format group for each query, with the cosines of its positives and negatives as scores."""
    for first in range(0, len(material.queries), _BLOCK_QUERIES):
        some = material.queries[first : first + _BLOCK_QUERIES]
        for query, cosines in zip(some, own_cosines(some, vectors), strict=True):
            yield group_row(material, query, cosines)

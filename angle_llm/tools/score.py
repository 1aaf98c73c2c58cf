"""`angle-llm data score`: score the pairs of a data file with the cosines of an encoder, for training with a teacher.

The output of `--out NAME.jsonl`:

    NAME.jsonl             groups with scores: one for each query, or one for each positive
    NAME.report.json       settings, counts, and median scores; written last
    NAME.jsonl.parts/      while scoring: the vectors; the same command resumes after a kill
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from angle_llm.data.positives import MiningData, collect_pairs
from angle_llm.io import plain
from angle_llm.model.text_vectors import TextVectors, vectors_of
from angle_llm.model.vectors import encoder_identity
from angle_llm.resumable_folder import ResumableFolder
from angle_llm.settings.commands import ScoreSettings
from angle_llm.tools.hard_negatives import group_lines, group_row, own_cosines
from angle_llm.tools.mine import finish, is_finished, parts_folder

FORMAT_VERSION = 1
_BLOCK_QUERIES = 1024
"""Number of queries scored at a time."""


def score_main(settings: ScoreSettings) -> None:
    """Write each query with its positives, negatives and cosines, or resume; then print the report.

    Raises:
        DataError: if the examples cannot be used, or contain no positive pair.
        FolderError: if the output was written with other settings, or by another program.
    """
    from angle_llm.data.examples import load_examples
    from angle_llm.model.encoder import SentenceEncoder

    # Examples, and their distinct texts.
    loaded = load_examples(settings.source_of(settings.file))
    print(loaded.report.summary())
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
    out = settings.out.expanduser()
    if is_finished(out, identity):
        return
    with ResumableFolder(parts_folder(out), identity, option="--out") as work:
        lines = group_lines(_groups(material, vectors_of(material, encoder, work.path)), settings.split_positives)
        finish(settings, lines, identity, {})


def _groups(material: MiningData, vectors: TextVectors) -> Iterator[dict[str, Any]]:
    """Yield a row of format group for each query, with the cosines of its positives and negatives as scores."""
    for first in range(0, len(material.queries), _BLOCK_QUERIES):
        some = material.queries[first : first + _BLOCK_QUERIES]
        for query, cosines in zip(some, own_cosines(some, vectors), strict=True):
            yield group_row(material, query, cosines)

"""`angle-llm data score`: score the pairs of a data file by an encoder or a reranker, for training with a teacher.

The output of `--out NAME.jsonl`:

    NAME.jsonl             groups with scores: one for each query, or one for each positive
    NAME.report.json       settings, counts, and median scores; written last
    NAME.jsonl.parts/      while scoring: finished parts of the groups, and vectors; the same command resumes after a kill
"""

from __future__ import annotations

from typing import Any

from angle_llm.data.positives import collect_pairs
from angle_llm.io import plain
from angle_llm.model.reranker import Reranker, is_reranker, scorer_identity
from angle_llm.resumable_folder import ResumableFolder
from angle_llm.settings.commands import ScoreSettings
from angle_llm.settings.parsing import SettingsError
from angle_llm.tools.hard_negatives import MinedPart, group_row, own_scores, pair_scores
from angle_llm.tools.mine import finish, is_finished, parts_folder, write_parts

FORMAT_VERSION = 1


def score_main(settings: ScoreSettings) -> None:
    """Write each query with its positives, negatives and scores, or resume; then print the report.

    Raises:
        DataError: if the examples cannot be used, or contain no positive pair.
        SettingsError: for a reranker as `--teacher`.
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
    model: SentenceEncoder | Reranker
    if settings.teacher is None:
        options = {name: getattr(settings, name) for name in ("max_length", "dtype", "device")}
        model = Reranker(str(settings.reranker), **options)
    elif is_reranker(settings.teacher):
        raise SettingsError(f"--teacher {settings.teacher} is a reranker, which has no vectors. Use --reranker.")
    else:
        model = SentenceEncoder.from_pretrained(settings.teacher, **settings.options())
    identity: dict[str, Any] = plain({
        "format_version": FORMAT_VERSION,
        "material": {"sha256": material.digest(), **material.counts()},
        "model": scorer_identity(model),
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
        scores = pair_scores(model, material, work.path)
        starts = range(0, len(material.queries), scores.queries_at_once)

        def part(number: int) -> MinedPart:
            queries = material.queries[starts[number] : starts[number] + starts.step]
            rows = zip(queries, own_scores(queries, scores), strict=True)
            return MinedPart([group_row(material, *row) for row in rows], {})

        _, lines = write_parts(work, part, starts, settings.split_positives)
        finish(settings, lines, identity, {})

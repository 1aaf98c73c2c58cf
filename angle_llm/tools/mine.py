"""`angle-llm data mine` and `data score`: add hard negatives to positive pairs, and score pairs as a teacher.

`mine`: an encoder embeds all texts. For each query, the nearest candidates that pass the rules of `hard_negatives` become
its negatives. `score`: an encoder or a reranker scores each query with its positives and negatives. The output of both:

    NAME.jsonl             groups (query, positives, negatives, scores): one for each query, or one for each positive
    NAME.report.json       settings, counts of queries and candidates, median scores; written last
    NAME.jsonl.parts/      while it runs: finished parts of the groups, and the vectors unless `--vectors` is set

After a kill, the same command resumes from the finished parts.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from angle_llm.data.corpus import corpus_texts
from angle_llm.data.examples import DataReport, load_examples
from angle_llm.data.files.beir import is_judged
from angle_llm.data.positives import collect_pairs
from angle_llm.data.sources import find_path
from angle_llm.io import (
    FolderError,
    differences,
    log,
    plain,
    progress_bar,
    read_object,
    remove_folder,
    write_file,
    write_json,
    write_json_lines,
)
from angle_llm.model.reranker import Reranker, is_reranker, scorer_identity
from angle_llm.model.text_vectors import vectors_of
from angle_llm.resumable_folder import IDENTITY, ResumableFolder
from angle_llm.settings.commands import MineSettings, NegativeRules, ScoreSettings
from angle_llm.settings.parsing import SettingsError
from angle_llm.tools.hard_negatives import (
    REASONS,
    MinedPart,
    Miner,
    check_candidates,
    group_row,
    input_scores,
    pair_scores,
    split_positives,
)

MINE_VERSION, SCORE_VERSION = 4, 2
"""Versions of the groups of both commands; an unfinished output resumes only with an equal version."""
_IDENTITY = (*(rule.name for rule in fields(NegativeRules)), "positive_above", "split_positives")
"""Names of settings that change the mined groups. An unfinished output resumes only with equal values."""
_GROUPS_NAME = "groups.jsonl"
"""Name of the file with groups in the folder of a part."""


def mine_main(settings: MineSettings) -> None:
    """Mine hard negatives, or resume mining; write groups (a query, positives, negatives), and print the report.

    Settings and pairs are checked before a model is loaded.

    Raises:
        DataError: for pairs or a corpus that cannot be used.
        SettingsError: for more ranks than candidates.
        FolderError: if the output was written with other settings, or by another program.
    """
    from angle_llm.model.encoder import SentenceEncoder

    # Pairs and candidates.
    for input in filter(None, (settings.pairs, settings.corpus)):
        check_output(settings.out, str(input))
    source = settings.source_of(settings.pairs, shuffle_seed=settings.shuffle_seed)
    loaded = load_examples(source)
    print_summary(loaded.report)
    corpus = None if settings.corpus is None else corpus_texts(settings.corpus, settings.column)
    material = collect_pairs(loaded.examples, corpus, settings.positive_above)
    material = replace(material, queries=material.queries[: settings.limit])
    print(material.summary(), flush=True)
    check_candidates(settings, len(material.candidates_C))
    # Encoders, and everything that changes the groups.
    encoder = SentenceEncoder.from_pretrained(settings.model, **settings.options())
    judge = None
    if settings.judge is not None:
        open_judge = Reranker if is_reranker(settings.judge) else SentenceEncoder.from_pretrained
        judge = open_judge(settings.judge, device=settings.device)
    identity: dict[str, Any] = plain({
        "format_version": MINE_VERSION,
        "material": {"sha256": material.digest(), **material.counts()},
        "model": scorer_identity(encoder),
        "judge": None if judge is None else scorer_identity(judge),
        "settings": {name: getattr(settings, name) for name in _IDENTITY},
    })  # fmt: skip
    out = settings.out.expanduser()
    if is_finished(out, identity):
        return
    with ResumableFolder(parts_folder(out), identity, option="--out") as work:
        # Groups, part by part; finished parts of an earlier run are kept.
        vectors_folder = work.path if settings.vectors is None else settings.vectors.expanduser()
        vectors = vectors_of(material, encoder, vectors_folder)
        judge_scorer = None if judge is None else pair_scores(judge, material, vectors_folder)
        miner = Miner(material, settings, vectors, judge_scorer)
        starts = range(0, len(material.queries), miner.queries_at_once)
        counts, lines = write_parts(work, miner.part, starts, settings.split_positives)
        # Report and file of groups.
        queries = {"in": len(material.queries)} | {name: counts[name] for name in ("mined", "short", "without")}
        dropped = counts["short"] + counts["without"] if settings.short == "drop" else 0
        refused = {reason: counts[reason] for reason in REASONS}
        finish(settings, lines, identity, {"queries": {**queries, "dropped": dropped}, "refused": refused})


def score_main(settings: ScoreSettings) -> None:
    """Write each query with its positives, negatives and scores, or resume; then print the report.

    Raises:
        DataError: if the examples cannot be used, or contain no positive pair.
        SettingsError: for a reranker as `--teacher`.
        FolderError: if the output was written with other settings, or by another program.
    """
    from angle_llm.model.encoder import SentenceEncoder

    # Examples, and their distinct texts.
    check_output(settings.out, settings.file)
    loaded = load_examples(settings.source_of(settings.file))
    print_summary(loaded.report)
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
        "format_version": SCORE_VERSION,
        "material": {"sha256": material.digest(), **material.counts()},
        "model": scorer_identity(model),
        "settings": {name: getattr(settings, name) for name in ("positive_above", "split_positives")},
    })  # fmt: skip
    # Scores, unless the file has them.
    out = settings.out.expanduser()
    if is_finished(out, identity):
        return
    with ResumableFolder(parts_folder(out), identity, option="--out") as work:
        scorer = pair_scores(model, material, work.path)
        starts = range(0, len(material.queries), scorer.queries_at_once)

        def part(number: int) -> MinedPart:
            queries = material.queries[starts[number] : starts[number] + starts.step]
            rows = zip(queries, input_scores(queries, scorer), strict=True)
            return MinedPart([group_row(material, *row) for row in rows], {})

        _, lines = write_parts(work, part, starts, settings.split_positives)
        finish(settings, lines, identity, {})


# --- output of `data mine` and `data score` ---------------------------------------------------------------------------


def check_output(out: Path, source: str) -> None:
    """Raise `SettingsError` if an output is the input, or in an input folder, whose files are all read."""
    output, input = out.expanduser().resolve(), find_path(source).resolve()
    if output == input or (input in output.parents and not is_judged(input)):
        raise SettingsError(f"--out: expected a file that is not part of the input {source}, got {out}.")


def print_summary(report: DataReport) -> None:
    """Print how many rows are used, and a warning if groups lose a column."""
    print(report.summary())
    if "document_instruction" in report.columns:
        log(
            "warning: the groups do not keep document_instruction: documents get the default instruction of the prompt, here "
            "and in training on the groups"
        )


def write_parts(
    work: ResumableFolder, part: Callable[[int], MinedPart], starts: range, split: bool
) -> tuple[Counter[str], Iterator[bytes]]:
    """Write the groups of each part, except finished parts; return the counts and the lines of all groups.

    `part` maps the number of a part to its groups; `starts` has the number of the first query of each part.
    """
    names = [f"queries-{starts.step}-{first:09d}" for first in starts]
    counts = Counter[str]()
    with progress_bar("groups", len(names), "part") as bar:
        for number, name in enumerate(names):
            if not work.is_whole(name):
                result = part(number)
                rows = [row for group in result.rows for row in split_positives(group)] if split else result.rows
                work.write(name, partial(_write_groups, rows), result.counts)
            counts.update(work.manifest(name)["values"])
            bar.update()
    return counts, ((work.path / name / _GROUPS_NAME).read_bytes() for name in names)


def _write_groups(rows: Iterable[dict[str, Any]], folder: Path) -> None:
    """Write the groups of a part to its folder."""
    write_json_lines(folder / _GROUPS_NAME, rows, writer="")


def parts_folder(out: Path) -> Path:
    """Return the working folder of a file of groups."""
    return out.with_name(f"{out.name}.parts")


def report_path(out: Path) -> Path:
    """Return the path of the report of a file of groups."""
    return out.with_suffix(".report.json")


def is_finished(out: Path, identity: dict[str, Any]) -> bool:
    """Return whether the file of groups was written with the same `identity`, and print that it exists.

    Raises:
        FolderError: if other settings, inputs or programs made the file.
    """
    work, report = parts_folder(out), read_object(report_path(out))
    if not out.exists() or (report is None and (work / IDENTITY).exists()):
        return False
    if changed := differences((report or {}).get("identity", {}), identity):
        raise FolderError(
            f"{out} was made with {'; '.join(changed[:5])}. Choose another --out, or remove it and {report_path(out).name}."
        )
    if not work.exists() or read_object(work / IDENTITY) == identity:
        remove_folder(work)  # a process was killed while it removed the folder
    print(f"{out} exists already, from the same data, encoder and settings", file=sys.stderr)
    return True


def finish(
    settings: MineSettings | ScoreSettings, lines: Iterable[bytes], identity: dict[str, Any], counts: dict[str, Any]
) -> None:
    """Write the file of groups, then its report, and remove the working folder; print the report.

    The report has `identity` (settings and hashes that determine the groups), all settings, `counts`, the numbers of groups
    and texts, and the median scores of the queries with their texts.
    """
    out = settings.out.expanduser()
    write_file(out, lambda file: file.writelines(lines), writer="")
    # Scores of all texts in the file. `scores` of a row: positives, then negatives. Rank None: a negative of the data.
    rows = 0
    scores: dict[str, list[float]] = {"positives": [], "own_negatives": [], "mined_negatives": []}
    with out.open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            rows += 1
            count = len(row["positives"])
            scores["positives"] += row["scores"][:count]
            ranks = row.get("ranks") or [None] * len(row["negatives"])
            for score, rank in zip(row["scores"][count:], ranks, strict=True):
                scores["own_negatives" if rank is None else "mined_negatives"].append(score)
    # Report.
    measure = "score" if "reranker" in identity["model"] else "cosine"
    shown = {
        **counts,
        "groups": {"rows": rows, **{name: len(values) for name, values in scores.items()}},
        f"median_{measure}": {name: round(float(np.median(values)), 6) for name, values in scores.items() if values},
    }
    used = {name: value for name, value in asdict(settings).items() if name != "out"}
    write_json(report_path(out), plain({"identity": identity, "settings": used, **shown}), writer="")
    remove_folder(parts_folder(out))
    print(f"{yaml.safe_dump(shown, sort_keys=False)}\nwritten to {out}")

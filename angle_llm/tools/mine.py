"""`angle-llm data mine`: add hard negatives, mined by an encoder, to the queries of positive pairs.

An encoder embeds all texts. For each query, the nearest candidates that pass the rules of `hard_negatives` become its
negatives. The output of `--out NAME.jsonl`:

    NAME.jsonl             groups (query, positives, negatives): one for each query, or one for each positive
    NAME.report.json       settings, counts of queries and candidates, quantiles of cosines; written last
    NAME.jsonl.parts/      while mining: finished parts of the groups, and the vectors unless `--vectors` is set

After a kill, the same command resumes from the finished parts.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from angle_llm.data.corpus import corpus_texts
from angle_llm.data.formats import Example, Group
from angle_llm.data.positives import MiningData, collect_pairs
from angle_llm.io import (
    IDENTITY,
    FolderError,
    ResumableFolder,
    check_resumable,
    differences,
    log,
    plain,
    progress_bar,
    read_object,
    remove_folder,
    sha256_of,
    write_file,
    write_json,
)
from angle_llm.model.text_vectors import vectors_of
from angle_llm.model.vectors import encoder_identity
from angle_llm.settings.commands import MineSettings, NegativeRules
from angle_llm.settings.parsing import SettingsError, need_library
from angle_llm.tools.hard_negatives import (
    CANDIDATES_AT_ONCE,
    QUERIES_AT_ONCE,
    REASONS,
    Miner,
    check_candidates,
    group_lines,
)
from angle_llm.tools.search import searcher

FORMAT_VERSION = 3
_IDENTITY = (*(rule.name for rule in fields(NegativeRules)), "positive_above", "index")
"""Names of settings that change the mined groups. An unfinished output resumes only with equal values."""
_GROUPS_NAME = "groups.jsonl"
"""Name of the file with groups in the folder of a part."""
_NAMED = (
    "pairs", "format", "columns", "score_range", "where", "limit", "shuffle_seed", "corpus", "column",
    "model", "judge",
)  # fmt: skip
"""Names of settings that name the pairs, corpus and encoders. The report lists their values. To resume, hashes of the
content are compared instead."""


def mine_main(settings: MineSettings) -> None:
    """Mine hard negatives, or resume mining, and print the report.

    Libraries, settings, pairs and output are checked before a model is loaded.

    Raises:
        DataError: for pairs or a corpus that cannot be used.
        SettingsError: for more ranks than candidates.
        MissingLibraryError: for `--index faiss` without faiss.
        FolderError: if the output was written with other settings, or by another program.
    """
    from angle_llm.data.examples import load_examples

    if settings.index == "faiss":
        need_library("faiss", "--index faiss (--index exact needs no library)", "mining")
    output = GroupsOutput(settings.out.expanduser())
    source = settings.source_of(settings.pairs, where=settings.where, shuffle_seed=settings.shuffle_seed)
    loaded = load_examples(source)
    print(loaded.report.summary())
    corpus = None if settings.corpus is None else corpus_texts(settings.corpus, settings.column)
    log_replaced_scores(loaded.examples)
    material = collect_pairs(loaded.examples, corpus, settings.positive_above)
    material = replace(material, queries=material.queries[: settings.limit])
    warning = check_candidates(settings, len(material.candidates_C))
    print(material.summary(), flush=True)
    if warning is not None:
        log(warning)
    print(format_report(mine(settings, material, output)))
    print(f"\nwritten to {settings.out}")


def log_replaced_scores(examples: Iterable[Example]) -> None:
    """Log a warning with the number of groups whose scores the output replaces by cosines of the encoder."""
    if count := sum(isinstance(example, Group) and example.scores is not None for example in examples):
        log(f"warning: {count:,} groups have scores; in the output they are replaced by cosines of the encoder")


def mine(settings: MineSettings, material: MiningData, output: GroupsOutput) -> dict[str, Any]:
    """Mine hard negatives, write the groups (a query with its positives and negatives), and return the report.

    If the output is complete already, only its report is read.
    """
    from angle_llm.model.encoder import SentenceEncoder

    # Encoders, and the identity of the result.
    encoder = SentenceEncoder.from_pretrained(settings.model, **settings.options())
    judge = None if settings.judge is None else SentenceEncoder.from_pretrained(settings.judge, device=settings.device)
    identity: dict[str, Any] = plain({  # everything that changes the groups
        "format_version": FORMAT_VERSION,
        "material": {"sha256": material.digest(), **material.counts()},
        "model": encoder_identity(encoder),
        "judge": None if judge is None else encoder_identity(judge),
        "settings": {name: getattr(settings, name) for name in _IDENTITY}
        | {"split_positives": settings.split_positives or None},  # None: equals the reports of older versions
    })  # fmt: skip
    if (finished := output.finished(identity)) is not None:
        print(f"{settings.out} exists already, from the same pairs, encoder and settings", file=sys.stderr)
        return finished
    with ResumableFolder(output.folder, identity, option="--out") as work:
        # Vectors, and the search in them.
        kept = output.folder if settings.vectors is None else settings.vectors.expanduser()
        vectors = vectors_of(material, encoder, kept)
        judge_vectors = None if judge is None else vectors_of(material, judge, kept)
        rows = vectors.document_row_T[material.candidates_C]
        search = searcher(vectors.vectors_KD, rows, block=CANDIDATES_AT_ONCE, faiss=settings.index == "faiss")
        miner = Miner(material, settings, vectors, search, judge_vectors)
        # Groups, part by part; finished parts of an earlier run are kept.
        names = [f"part-{QUERIES_AT_ONCE}-{number:06d}" for number in range(miner.parts)]
        with progress_bar("mine", miner.parts, "part") as bar:
            for number, name in enumerate(names):
                if not work.is_whole(name):
                    part = miner.part(number)
                    content = b"".join(group_lines(part.rows, settings.split_positives))
                    fill = partial(_write_groups, content=content)
                    work.write(name, fill, {"counts": part.counts, "refused": part.refused})
                bar.update()
        # Report and file of groups.
        counts = count_outcomes([work.manifest(name)["values"] for name in names], len(material.queries))
        named = {name: getattr(settings, name) for name in _NAMED}
        content_of_parts = ((output.folder / name / _GROUPS_NAME).read_bytes() for name in names)
        return output.finish(content_of_parts, identity, named, counts)


def _write_groups(folder: Path, content: bytes) -> None:
    """Write the groups of a part to its folder."""
    (folder / _GROUPS_NAME).write_bytes(content)


# --- output -----------------------------------------------------------------------------------------------------------


class GroupsOutput:
    """Output of `data mine` and `data score`: the file of groups, its report NAME.report.json, and a working folder."""

    def __init__(self, out: Path) -> None:
        """Check that the output files can be written, or that an unfinished output can resume.

        Raises:
            SettingsError: for another file name extension than .jsonl.
            FolderError: if files of another program, or an incomplete output, exist at its paths.
        """
        if out.suffix != ".jsonl":
            raise SettingsError(f"--out must name the file of groups, NAME.jsonl; got {out}.")
        self.out = out
        self.report = out.with_name(out.stem + ".report.json")
        self.folder = out.with_name(out.name + ".parts")
        existing = [path for path in (self.out, self.report) if path.exists()]
        if len(existing) == 1 and not (self.folder / IDENTITY).exists():
            raise FolderError(
                f"{existing[0]} exists without {self.report.name if existing[0] == self.out else self.out.name}, so it "
                "cannot be resumed. Choose another --out, or remove it."
            )
        if not existing:
            check_resumable(self.folder, "--out")

    def finished(self, identity: dict[str, Any]) -> dict[str, Any] | None:
        """Return the report if the output is complete, else None; remove the working folder of a complete output.

        Raises:
            FolderError: if other settings or inputs made the output, or the groups were changed since.
        """
        report = read_object(self.report)
        if report is None or not self.out.exists():
            return None
        then = report.get("identity")
        if changed := differences(then if isinstance(then, dict) else {}, identity):
            raise FolderError(
                f"{self.out} was made with {'; '.join(changed[:5])}. Choose another --out, or remove it "
                f"and {self.report.name}."
            )
        if report.get("groups", {}).get("sha256") != sha256_of(self.out):
            raise FolderError(
                f"{self.out} was changed since it was written. Choose another --out, or remove both files."
            )
        if not self.folder.exists() or read_object(self.folder / IDENTITY) == identity:
            remove_folder(self.folder)  # left by a process that was killed while it removed the folder
        return report

    def finish(
        self, content: Iterable[bytes], identity: dict[str, Any], named: dict[str, Any], counts: dict[str, Any]
    ) -> dict[str, Any]:
        """Write the file of groups, then the report, and remove the working folder; return the report.

        `content` are the bytes of the file of groups. The report contains `identity` (settings and hashes that
        determine the groups), `named` (settings that name the input), `counts`, and the result of `describe_groups`.
        """
        write_file(self.out, lambda file: file.writelines(content), writer="")
        head = {"format_version": identity["format_version"], "identity": identity, "named": named}
        report: dict[str, Any] = plain({**head, **counts, **describe_groups(self.out)})
        write_json(self.report, report, writer="")
        remove_folder(self.folder)
        return report


# --- report -----------------------------------------------------------------------------------------------------------

_QUANTILES = {0: "minimum", 5: "5 %", 25: "25 %", 50: "median", 75: "75 %", 95: "95 %", 100: "maximum"}


def count_outcomes(parts: Sequence[dict[str, Any]], queries: int) -> dict[str, Any]:
    """Return the number of queries by outcome, and the number of refused candidate negatives by reason.

    `parts` are the counts of all blocks of queries, `queries` is the total number of queries.

    Raises:
        RuntimeError: if the counts do not add up to `queries`, which is a bug.
    """
    counts = Counter[str]()
    refused = Counter(dict.fromkeys(REASONS, 0))
    for part in parts:
        counts.update(part["counts"])
        refused.update(part["refused"])
    if queries != (counted := counts["full"] + counts["short"] + counts["without"]):
        raise RuntimeError(f"a bug in angle_llm: {counted} of {queries} queries accounted for.")
    outcomes = {name: counts[name] for name in ("short", "without", "dropped")}
    return {"queries": {"in": queries, "mined": counts["full"], **outcomes}, "refused": dict(refused)}


def describe_groups(out: Path) -> dict[str, Any]:
    """Return the number of rows and texts in an output file of groups, and the quantiles of its cosines and ranks."""
    # Cosines and ranks of all texts.
    figures: dict[str, list[float]] = {
        "positive_cosine": [], "own_negative_cosine": [], "negative_cosine": [], "rank": [],
    }  # fmt: skip
    rows = 0
    with out.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            rows += 1
            count = len(row["positives"])
            ranks = row.get("ranks") or [None] * len(row["negatives"])
            figures["positive_cosine"] += row["scores"][:count]
            for cosine, rank in zip(row["scores"][count:], ranks, strict=True):
                figures["own_negative_cosine" if rank is None else "negative_cosine"].append(cosine)
            figures["rank"] += [rank for rank in ranks if rank is not None]
    # Quantiles and counts.
    quantiles = {
        name: dict(zip(map(str, _QUANTILES), np.percentile(values, list(_QUANTILES)).round(6).tolist(), strict=True))
        for name, values in figures.items()
        if values
    }
    return {
        "groups": {
            "rows": rows,
            "positives": len(figures["positive_cosine"]),
            "own_negatives": len(figures["own_negative_cosine"]),
            "mined_negatives": len(figures["negative_cosine"]),
            "sha256": sha256_of(out),
        },
        "quantiles": quantiles,
    }


def format_report(report: dict[str, Any]) -> str:
    """Return the report of mining as text: counts of queries, refused candidates, and quantiles."""
    queries, groups, rules = report["queries"], report["groups"], report["identity"]["settings"]
    fewer = f" + {queries['short']:,} with fewer" if rules["negatives"] > 1 else ""
    kept = "kept" if rules["short"] == "keep" else "dropped"
    lines = [
        f"{queries['in']:,} queries = {queries['mined']:,} with {rules['negatives']} negative{'s' * (rules['negatives'] > 1)}"
        f"{fewer} + {queries['without']:,} without any ({kept}); {groups['rows']:,} groups",
        "",
        "candidates that cannot be negatives, by the first reason",
        *(f"  {reason:28}{count:12,}" for reason, count in report["refused"].items() if count),
    ]
    lines += format_quantiles(report["quantiles"])
    medians = [report["quantiles"].get(f"{name}_cosine", {}).get("50") for name in ("positive", "negative")]
    if None not in medians:
        lines += ["", f"median cosine with the query: positives {medians[0]:.3f}, mined negatives {medians[1]:.3f}"]
    return "\n".join(lines)


def format_quantiles(quantiles: dict[str, dict[str, float]]) -> list[str]:
    """Return a table of the quantiles of cosines and ranks, as lines of text."""
    if not quantiles:
        return []
    lines = ["", f"  {'in the groups':20}" + "".join(name.rjust(9) for name in _QUANTILES.values())]
    for name, values in quantiles.items():
        digits = 0 if name == "rank" else 3
        lines.append(f"  {name:20}" + "".join(f"{value:9.{digits}f}" for value in values.values()))
    return lines

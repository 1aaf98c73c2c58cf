"""`angle-llm data mine`: groups with hard negatives for the queries of positive pairs, found by an encoder.

NAME.jsonl             the groups, one for each query, or for each positive
NAME.report.json       what they depend on, and an account of every query and candidate; written last
NAME.jsonl.parts/      while mining: parts of groups, and the vectors unless --vectors is set; see `resumable`
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from angle_llm.config import DataSource
from angle_llm.data.corpus import corpus_texts
from angle_llm.data.formats import Example, Group
from angle_llm.data.positives import Material, gather
from angle_llm.data.row_settings import RowSettings
from angle_llm.hard_negatives import Miner, NegativeRules, group_lines
from angle_llm.io import (
    FolderError,
    log,
    plain,
    progress_bar,
    read_object,
    remove_folder,
    sha256_of,
    write_file,
    write_json,
)
from angle_llm.mining_report import account, format_report
from angle_llm.model.encoder_settings import EncoderName, EncoderOptions
from angle_llm.resumable import IDENTITY, ResumableFolder, check_resumable, differences
from angle_llm.search import searcher
from angle_llm.settings_io import Finite, Positive, SettingsError, need_library, settings_class
from angle_llm.text_vectors import vectors_of
from angle_llm.vectors import encoder_identity

FORMAT_VERSION = 2
_IDENTITY = (
    *(rule.name for rule in fields(NegativeRules) if not rule.name.startswith("block_")), "positive_above", "index", "shard_rows",
)  # fmt: skip
"""Settings that the groups depend on. Of the sizes of blocks, `shard_rows` does: texts that are embedded together
affect the last digits of a vector."""
_NAMED = (
    "pairs", "format", "columns", "delimiter", "encoding", "score_range", "where", "limit", "shuffle_seed", "corpus", "column",
    "model", "judge",
)  # fmt: skip
"""Settings that name the material; its content is in the identity."""


@dataclass(frozen=True)
class MineFiles(EncoderName):
    """Encoder, pairs, corpus and output of mining."""

    pairs: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PAIRS")]
    """Positive pairs, scored pairs, triples or groups: a file, dataset folder or hub id, as for training.
    With two prompts, their first texts are queries, and candidates are documents."""
    out: Path
    """The .jsonl file of groups; the report is written beside it, NAME.report.json.
    The same command resumes after a kill."""

    limit: Positive | None = None
    """Mine for at most this many queries. All examples are read and all candidates embedded, so that no positive becomes
    a negative."""
    shuffle_seed: int | None = None
    """Shuffle the examples with this seed. None: file order."""
    positive_above: Finite = 0.8
    """Scored pairs above this score (rescaled to 0..1) are positive pairs."""
    split_positives: bool = False
    """Write a group for each positive, all with the negatives of their query, instead of one for each query. Each
    positive is then an example of its own in training."""

    corpus: Path | None = None
    """Candidates (UTF-8): text, .jsonl, .csv, .tsv, .parquet, a folder of them, or a BEIR folder (title and text). None: the
    positives of all pairs."""
    column: str | None = None
    """Column of the corpus that contains the text. None: `text`, `sentence`, or the only one."""
    judge: str | None = None
    """A second encoder: by its cosines too, a negative must be farther from the query than the positives."""

    index: Literal["exact", "faiss"] = "exact"
    """exact: compare with every candidate. faiss: faiss finds the nearest in float32, which are then ranked exactly."""
    vectors: Path | None = None
    """A folder that keeps the vectors, for other rules with the same texts.
    None: removed when the groups are written."""
    shard_rows: Positive = 8192
    """Texts embedded at a time; at most this many are embedded again after a kill.
    It may change the last digit of a cosine."""


@settings_class
class MineSettings(NegativeRules, RowSettings, EncoderOptions, MineFiles):
    """Files and rules of `angle-llm data mine`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        vectors = self.vectors and self.vectors.expanduser()
        for wrong, message in (
            (self.out.suffix != ".jsonl", f"--out must name the file of groups, NAME.jsonl; got {self.out}."),
            (
                self.column and not self.corpus,
                "--column belongs to --corpus, which is not set. For the pairs: --columns.",
            ),
            (vectors and vectors.is_file(), f"--vectors must name a folder; {self.vectors} is a file."),
        ):
            if wrong:
                raise SettingsError(message)

    @property
    def source(self) -> DataSource:
        """The pairs as training reads them."""
        return self.source_of(self.pairs, shuffle_seed=self.shuffle_seed)


def mine_main(settings: MineSettings) -> None:
    """Mine hard negatives, or resume, and print the account.

    Libraries, settings, pairs and the output are checked before a model is loaded.

    Raises:
        DataError: for pairs or a corpus that cannot be used.
        SettingsError: for more ranks than candidates.
        MissingLibraryError: for `--index faiss` without faiss.
        FolderError: for an output of other settings, or of another program.
    """
    from angle_llm.data.examples import load_examples

    if settings.index == "faiss":
        need_library("faiss", "--index faiss (--index exact needs no library)", "mining")
    output = GroupsOutput(settings.out.expanduser())
    output.check_free()
    loaded = load_examples(settings.source)
    print(loaded.report.summary())
    corpus = None if settings.corpus is None else corpus_texts(settings.corpus, settings.column)
    log_replaced_scores(loaded.examples)
    material = gather(loaded.examples, corpus, settings.positive_above)
    material = replace(material, queries=material.queries[: settings.limit])
    warning = settings.check_candidates(len(material.candidates_C))
    print(material.summary(), flush=True)
    if warning is not None:
        log(warning)
    print(format_report(mine(settings, material, output)))
    print(f"\nwritten to {settings.out}")


def log_replaced_scores(examples: Iterable[Example]) -> None:
    """Log how many groups have scores, which are not written: the new ones are cosines."""
    if count := sum(isinstance(each, Group) and each.scores is not None for each in examples):
        log(f"warning: {count:,} groups have scores; in the output they are replaced by cosines of the encoder")


def mine(settings: MineSettings, material: Material, output: GroupsOutput) -> dict[str, Any]:
    """Write groups and report, and return the report; read it if both are there already."""
    from angle_llm.model.encoder import SentenceEncoder

    encoder = SentenceEncoder.from_pretrained(settings.model, **settings.options())
    judge = None if settings.judge is None else SentenceEncoder.from_pretrained(settings.judge, device=settings.device)
    identity: dict[str, Any] = plain({  # what the groups depend on
        "format_version": FORMAT_VERSION,
        "material": {"sha256": material.digest(), **material.counts()},
        "model": encoder_identity(encoder),
        "judge": None if judge is None else encoder_identity(judge),
        "settings": {name: getattr(settings, name) for name in _IDENTITY}
        | {"split_positives": settings.split_positives or None},  # None: as in older files
    })  # fmt: skip
    if (finished := output.finished(identity)) is not None:
        print(f"{settings.out} exists already, from the same pairs, encoder and settings", file=sys.stderr)
        return finished
    with ResumableFolder(output.folder, identity, option="--out", flat=True) as work:
        kept = output.folder if settings.vectors is None else settings.vectors.expanduser()
        vectors = vectors_of(material, encoder, settings.model, kept, settings.shard_rows)
        judge_vectors = None
        if judge is not None:
            judge_vectors = vectors_of(material, judge, str(settings.judge), kept, settings.shard_rows)
        rows = vectors.document_rows(material.candidates_C)
        search = searcher(vectors.document_ED, rows, block=settings.block_candidates, faiss=settings.index == "faiss")
        miner = Miner(material, settings, vectors, search, judge_vectors)
        names = [f"part-{settings.block_queries}-{number:06d}" for number in range(miner.parts)]
        with progress_bar("mine", miner.parts, "part") as bar:
            for number, name in enumerate(names):
                if not work.is_whole(name):
                    part = miner.part(number)
                    content = b"".join(group_lines(part.rows, settings.split_positives))
                    fill = partial(_write_bytes, name=f"{name}.jsonl", content=content)
                    work.write(name, fill, {"counts": part.counts, "refused": part.refused})
                bar.update()
        files = [output.folder / f"{name}.jsonl" for name in names]
        write_file(output.out, lambda file: file.writelines(path.read_bytes() for path in files), writer="")
        named = {name: getattr(settings, name) for name in _NAMED}
        found = account([work.manifest(name)["values"] for name in names], output.out, len(material.queries))
        report: dict[str, Any] = plain(
            {"format_version": FORMAT_VERSION, "identity": identity, "named": named, **found}
        )
        write_json(output.report, report, writer="")
        remove_folder(output.folder)
    return report


def _write_bytes(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)


class GroupsOutput:
    """The file of groups `out`, its report NAME.report.json, and the folder of the work, NAME.jsonl.parts."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.report = out.with_name(out.stem + ".report.json")
        self.folder = out.with_name(out.name + ".parts")

    def check_free(self) -> None:
        """Refuse to overwrite files of something else.

        Raises:
            FolderError: if there are such files.
        """
        existing = [path for path in (self.out, self.report) if path.exists()]
        if len(existing) == 1 and not (self.folder / IDENTITY).exists():
            raise FolderError(
                f"{existing[0]} exists without {self.report.name if existing[0] == self.out else self.out.name}, so it "
                "cannot be resumed. Choose another --out, or remove it."
            )
        if not existing:
            check_resumable(self.folder, "--out")

    def finished(self, identity: dict[str, Any]) -> dict[str, Any] | None:
        """Return the report if everything is written.

        Raises:
            FolderError: if it has another identity, or the groups were changed since.
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
            remove_folder(self.folder)  # a process killed at the end left it, or half of it under its hidden name
        return report

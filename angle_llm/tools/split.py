"""`angle-llm data split`: split a data file into parts that share no text, for training, model selection and evaluation.

The output of `--out FOLDER`; rows keep all their columns:

    FOLDER/train.jsonl             the rows to train on
    FOLDER/valid.jsonl, …          all further parts
    FOLDER/corpus.jsonl            the distinct second texts of all rows (answers, documents), to search in
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from angle_llm.data.formats import DataError, pairs_of, texts_of
from angle_llm.data.keys import key, normalized
from angle_llm.data.positives import components
from angle_llm.io import log, write_folder
from angle_llm.settings.commands import CORPUS, REST, SplitSettings

SHARES = {"valid": 0.15, "held_out": 0.15}
_MANY_ROWS = 10
"""Smallest number of linked rows for a warning; they must also be more than a fifth of the part."""


def split_main(settings: SplitSettings) -> None:
    """Split a data file; write the parts and the corpus (distinct second texts), and print their sizes.

    All rows are held in memory.

    Raises:
        DataError: if the file cannot be used, a row is bad, or a part would have no rows.
    """
    from angle_llm.data.examples import open_examples
    from angle_llm.tools.quality import json_row

    # Read the rows.
    reading = open_examples(settings.source_of(settings.file))
    texts: list[list[str]] = []
    lines: list[str] = []
    corpus: dict[str, None] = {}
    report = reading.report()
    for row, example in reading.used_rows(report):
        texts.append(texts_of(example))
        lines.append(json_row(reading.named_values(row)))
        corpus |= dict.fromkeys(right for _, right, _ in pairs_of(example))
    if not texts:
        raise DataError(f"{settings.file}: no usable row. {report.summary()}")
    # Divide the rows.
    shares = settings.parts or SHARES
    *parts, rest = split_rows(texts, [round(share * len(texts)) for share in shares.values()])
    rows_of_part = {REST: rest, **dict(zip(shares, parts, strict=True))}
    if empty := [name for name, rows in rows_of_part.items() if not rows]:
        raise DataError(
            f"{settings.file}: no rows are left for {', '.join(empty)}, of {len(texts):,} rows. Rows that share a text stay "
            "together. Remove placeholders such as N/A, set other --parts, or use more data"
        )

    def fill(folder: Path) -> None:
        content = {name: (lines[row] for row in sorted(rows)) for name, rows in rows_of_part.items()}
        content[CORPUS] = (json_row({"text": text}) for text in corpus)
        for name, part in content.items():
            with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(part)

    # Write the parts, and print their sizes.
    write_folder(settings.out, fill)
    counts = " + ".join(f"{len(rows):,} in {name}.jsonl" for name, rows in rows_of_part.items())
    dropped = f" + {report.rows_in - len(texts):,} dropped" if report.rows_in > len(texts) else ""
    print(f"{settings.file}: {report.rows_in:,} rows = {counts}{dropped}; {len(corpus):,} texts in {CORPUS}.jsonl")
    print(f"written to {settings.out}")


def split_rows(texts: Sequence[Sequence[str]], counts: Sequence[int]) -> list[list[int]]:
    """Return the row numbers of each part: at most `counts[p]` rows in part p, and all remaining rows in a last part.

    `texts` are the texts of each row. Rows that share a text, directly or through other rows, form a group. Groups
    are sorted by a hash of their first text; a group goes to the first part with enough space.
    """
    parts: list[list[int]] = [[] for _ in [*counts, None]]
    groups = _linked(texts)
    for rows in sorted(groups, key=lambda rows: hashlib.sha256(normalized(texts[rows[0]][0]).encode()).digest()):
        part = next((p for p, count in enumerate(counts) if len(parts[p]) + len(rows) <= count), len(counts))
        parts[part] += rows
        if part < len(counts) and len(rows) >= _MANY_ROWS and 5 * len(rows) > counts[part]:
            shared, _ = Counter(text for row in rows for text in texts[row]).most_common(1)[0]
            log(
                f"warning: {len(rows):,} of at most {counts[part]:,} rows of a part are linked by equal texts, such as "
                f"{shared!r:.60}, so its scores depend on them. Remove repeated texts before the split"
            )
    return parts


def _linked(texts: Sequence[Sequence[str]]) -> list[list[int]]:
    """Return the row numbers in groups, such that rows that share a text are in the same group.

    Texts that differ only in case, spacing and punctuation count as equal.
    """
    number_of: dict[int, int] = {}
    links = [
        (row, len(texts) + number_of.setdefault(key(normalized(text)), len(number_of)))
        for row, texts_of_row in enumerate(texts)
        for text in texts_of_row
    ]
    if not links:
        return []
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for row, group in enumerate(components(len(texts) + len(number_of), links)[: len(texts)].tolist()):
        groups[group].append(row)
    return list(groups.values())

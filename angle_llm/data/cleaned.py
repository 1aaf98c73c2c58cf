"""Cleaned copies of checked data files, and the removed rows with the reason."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from angle_llm.config import DataSource
from angle_llm.data.examples import label_word, open_examples
from angle_llm.data.keys import sound
from angle_llm.data.quality import CheckedFile
from angle_llm.data.readers import BadRow, Row
from angle_llm.io import plain


def write_fixed(files: Sequence[CheckedFile], folder: Path, out: Path) -> list[dict[str, Any]]:
    """Write NAME.jsonl and NAME.quarantine.jsonl for each file into a folder; `out` is its final name.

    Kept rows keep all their columns; dropped rows (neutral labels) are kept, as readers drop them again. A quarantined
    row has its file, line and reason; `row` is null if it could not be read. Rows in = kept + quarantined.
    """
    fixed: list[dict[str, Any]] = []
    for source, report in files:
        whole = Path(source.path.removeprefix("starter:")).name.removesuffix(".gz")
        stem = whole.rpartition(".")[0] or whole
        names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        taken = {path.name for path in folder.iterdir()}
        name = next(name for name in names if not {f"{name}.jsonl", f"{name}.quarantine.jsonl"} & taken)
        kept, quarantined = _write_fixed(source, report.removed, folder, name)
        counts = {"rows_in": kept + quarantined, "kept": kept, "quarantined": quarantined}
        written = {"cleaned": str(out / f"{name}.jsonl"), "quarantine": str(out / f"{name}.quarantine.jsonl")}
        fixed.append({"path": source.path, **written, **counts})
    return fixed


def _write_fixed(source: DataSource, removed: Mapping[int, str], folder: Path, name: str) -> tuple[int, int]:
    kept = quarantined = 0
    reading = open_examples(source)
    labels = reading.rows.files[0].label_names
    with (
        (folder / f"{name}.jsonl").open("w", encoding="utf-8") as cleaned,
        (folder / f"{name}.quarantine.jsonl").open("w", encoding="utf-8") as quarantine,
    ):
        for row, result in reading.outcomes():
            values = row.values if isinstance(row, Row) else None
            reason = result.reason if isinstance(result, BadRow) else removed.get(row.line)
            if reason is None and values is not None:
                kept += 1
                cleaned.write(json_row(values, labels))
            else:
                quarantined += 1
                content = {"file": source.path, "line": row.line, "reason": reason, "row": values}
                quarantine.write(_json_line(content))
    return kept, quarantined


def json_row(values: Mapping[str, Any], labels: Mapping[str, list[str]]) -> str:
    """Return a row as a JSON line. A dataset numbers its labels in its own order; a plain file must name them."""
    return _json_line({**values, **{name: label_word(values[name], labels[name]) for name in labels if name in values}})


def _json_line(row: object) -> str:
    # A lone surrogate cannot be encoded in UTF-8; its ASCII escape can, and is read back unchanged.
    text = json.dumps(plain(row), ensure_ascii=False, default=str)
    return (text if text == sound(text) else json.dumps(plain(row), default=str)) + "\n"

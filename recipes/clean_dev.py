"""Build a development set of scored pairs that shares no sentence with test sets or training data.

    python recipes/clean_dev.py sts/sts12.train.tsv stsb/train.jsonl stsb/dev.jsonl --against sts/sts12.test.tsv \\
        sts/sts14.test.tsv sts/sts15.test.tsv stsb/test.jsonl sick/test.jsonl nli/nli_triplets.jsonl.gz --out clean_dev.tsv

The pairs of STS-B were collected from the tests of SemEval: 1,028 of the 1,500 pairs of its development set are in STS12,
STS14 and STS15. Settings that are chosen on them are chosen on the test. A pair is removed if one of its sentences occurs
in a file of --against, without case, spacing and punctuation, or if the pair is repeated. All files must have one scale
of scores; docs/evaluation.md names their sources. The column `subtask` has the subtask or genre of a pair, or the name of
its file. Choose settings by the column `mean` of `angle-llm eval sts`: a correlation over all pairs also depends on how
the sources differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import tyro

from angle_llm.cli import run_cli
from angle_llm.data.keys import normalized
from angle_llm.data.sources import resolve_source
from angle_llm.evaluate.sts_tasks import COLUMNS, read_pairs
from angle_llm.io import write_text
from angle_llm.settings.parsing import SettingsError, parse_settings, settings_class


@settings_class
class CleanDevSettings:
    """Files of scored pairs, and the files whose sentences must not occur in them."""

    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE [FILE …]")] = ()
    """Files of scored pairs (sentence1, sentence2, score)."""
    against: tuple[str, ...] = ()
    """Test sets and training data: files or folders. All texts in them count."""
    out: Path = Path("clean_dev.tsv")
    """The table to write."""


def main(settings: CleanDevSettings) -> None:
    """Write the pairs without a sentence of --against, and print their number for each file."""
    if not settings.files or not settings.against:
        raise SettingsError("expected files of scored pairs, and --against.")
    used = {
        normalized(text)
        for path in settings.against
        for row in resolve_source(path, tables=True).good_rows()
        for text in texts_in(row.values.values())
    }
    lines, seen = ["\t".join(["subtask", *COLUMNS])], set[tuple[str, ...]]()
    for path in settings.files:
        task, before = read_pairs(path), len(lines)
        for pair in task.pairs:
            texts = pair.sentence1, pair.sentence2
            key = tuple(sorted(map(normalized, texts)))
            if not used.intersection(key) and key not in seen:
                seen.add(key)
                cells = pair.subtask or task.name, *(" ".join(text.split()) for text in texts), f"{pair.score:g}"
                lines.append("\t".join(cells))
        print(f"{path}: {len(lines) - before:,} of {len(task.pairs):,} pairs")
    write_text(settings.out, "\n".join(lines) + "\n", writer="")
    print(f"{len(lines) - 1:,} pairs written to {settings.out}")


def texts_in(values: Iterable[Any]) -> Iterator[str]:
    """Yield the texts in the values of a row, and in lists and objects."""
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | dict):
            yield from texts_in(value.values() if isinstance(value, dict) else value)


if __name__ == "__main__":
    run_cli(lambda: main(parse_settings(CleanDevSettings, description=__doc__ or "")))

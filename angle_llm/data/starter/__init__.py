"""Starter data: two small committed files, so that a first training run and evaluation need no download.

`nli_triples.jsonl.gz`: one JSON object a line with `anchor`, `positive`, `negative` and `kind`. `graded_pairs.tsv`: scored
sentence pairs. README.md beside this file describes both and how they were made.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent


def starter_path(name: str) -> Path:
    """Return the path of a starter file. Raises ValueError for an unknown name and lists the known ones."""
    known = sorted(path.name for path in _FOLDER.iterdir() if path.suffix in (".gz", ".tsv"))
    if name not in known:
        raise ValueError(f"no starter file is named {name!r}. Known: {', '.join(known)}.")
    return _FOLDER / name

"""Starter data: a small committed set of triples, written by us, so that a first training run needs no download.

`nli_triples.jsonl.gz` holds one JSON object per line: `anchor`, `positive` (entailed by the anchor), `negative`
(contradicts it) and `kind` ("domain/relation of the positive/relation of the negative"). It is the output of
`python -m angle_llm.data.starter.generator`; edit the lexicon, never the file.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent


def starter_path(name: str) -> Path:
    """Return the path of a committed starter file; an unknown name raises ValueError listing the known ones."""
    known = sorted(path.name for path in _FOLDER.iterdir() if path.suffix in (".gz", ".tsv"))
    if name not in known:
        raise ValueError(f"there is no starter file named {name!r}; the known ones are: {', '.join(known)}")
    return _FOLDER / name

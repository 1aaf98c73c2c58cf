"""What is kept of an experiment: one JSON file, small enough to be committed, from which tables and plots are made."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from angle_llm.io import plain, write_json

FORMAT_VERSION = 1
COMPARISONS = "comparisons.json"
"""Beside the results of a grid: see `comparisons`."""


class ResultError(ValueError):
    """A result file that cannot be used."""


@dataclass(frozen=True)
class Result:
    """An experiment that was run: what it was, what came out, and how to run it again."""

    grid: str
    row: str
    label: str
    seed: int
    command: str
    """Repeats it; DATA stands for the data directory."""
    date: str
    machine: str
    versions: dict[str, str]
    settings: dict[str, Any]
    """Of the training run, paths below the data directory as DATA/…; of a row without training, of its model alone, and of one
    that measures another grid's model what its training was (`trained`)."""
    train: dict[str, Any] | None
    """steps, seconds, first and last loss, computed tokens; None without training."""
    measures: dict[str, Any] = field(default_factory=dict)
    """Kind (sts, pairs, transfer, retrieval) → figures. What is asked for later is added to the file."""

    @property
    def name(self) -> str:
        """Its file's name without the ending."""
        return f"{self.row}-seed{self.seed}" if self.train is not None else self.row

    def write(self, folder: Path) -> Path:
        """Writes the file whole or not at all."""
        path = folder / self.grid / f"{self.name}.json"
        write_json(path, {"format_version": FORMAT_VERSION, **plain(self)})
        return path

    @classmethod
    def read(cls, path: Path) -> Result:
        """Reads a file that `write` made.

        Raises:
            ResultError: for one that is damaged, or of another version.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("format_version") != FORMAT_VERSION:
                raise ResultError(f"{path} is of another version. Remove it, and run its experiment again.")
            return cls(**values)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ResultError(f"{path} is damaged ({error!r}). Remove it, and run its experiment again.") from error


def load_results(folder: Path, grid: str) -> list[Result]:
    """All results of a grid, by file name."""
    return [Result.read(path) for path in sorted((folder / grid).glob("*.json")) if path.name != COMPARISONS]

"""One command's output: begun, gone on with, finished; never mixed with another's.

    NAME.jsonl             the triples, written last but one
    NAME.report.json       what they follow from and what was counted, written last
    NAME.jsonl.parts/      while the work goes on: job.json, parts of triples, and the vectors unless they have a folder

Each file is written whole or not at all, so that whatever moment a process is killed at, the same command goes on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from angle_llm.io import json_text, plain, sha256_of, sync, write_file, write_json
from angle_llm.mining.selection import Part

FORMAT_VERSION = 1
_JOB = "job.json"


class MiningError(ValueError):
    """Triples that cannot be mined as asked; the message says what to do."""


@dataclass(frozen=True)
class Output:
    """Where triples go, and what they follow from."""

    out: Path
    job: dict[str, Any]
    """All that their bytes follow from, as plain JSON values."""

    @property
    def report(self) -> Path:
        """The report's file."""
        return self.out.with_name(self.out.stem + ".report.json")

    @property
    def folder(self) -> Path:
        """Where parts lie."""
        return self.out.with_name(self.out.name + ".parts")

    @property
    def _retired(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.old")

    def begin(self) -> dict[str, Any] | None:
        """The report, if all is done; else makes ready to begin, or to go on.

        Raises:
            MiningError: if there is something else, or what other settings made or began.
        """
        shutil.rmtree(self._retired, ignore_errors=True)
        finished = _read(self.report)
        begun = _read(self.folder / _JOB)
        if finished is not None and self.out.exists():
            self._check(finished.get("job"), f"{self.out} was made")
            self._check_unchanged(finished)
            if begun == self.job:  # killed when all was written
                self._clear()
            return finished
        if begun is not None:
            self._check(begun, f"{self.folder} was begun")
        elif self.out.exists() or self.report.exists():
            there = self.out if self.out.exists() else self.report
            raise MiningError(
                f"{there} exists, and nothing says that it is of this command. Choose another --out, or remove it."
            )
        elif self.folder.exists() and any(not path.name.startswith(".") for path in self.folder.iterdir()):
            raise MiningError(f"{self.folder} is needed for the work and holds other things. Choose another --out.")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / _JOB, self.job)
        return None

    def parts(self, count: int, size: int, mine: Callable[[int], Part]) -> Iterable[Part]:
        """Every part in order: read if it is there, else mined and kept."""
        for number in range(count):
            path = self.folder / f"part-{size}-{number:06d}.json"
            part = _read(path)
            if part is None:
                part = mine(number)
                write_json(path, part)
            yield part

    def finish(self, lines: Iterable[bytes], report: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Writes the triples, then the report, which is made when all lines are written; removes what the work needed."""
        self._place(self.out, lambda file: file.writelines(lines))
        written = {"format_version": FORMAT_VERSION, "job": self.job} | report()
        self._place(self.report, lambda file: file.write(json_text(plain(written)).encode()))
        self._clear()
        return written

    def _place(self, target: Path, fill: Callable[[BinaryIO], object]) -> None:
        """Writes a file whole or not at all; what a killed process leaves of it goes with the folder."""
        write_file(self.folder / target.name, fill)
        (self.folder / target.name).replace(target)
        sync(target.parent)

    def _clear(self) -> None:
        if self.folder.exists():
            self.folder.replace(self._retired)  # out of sight at once: half a folder is none
            shutil.rmtree(self._retired)

    def _check(self, then: object, what: str) -> None:
        if then != self.job:
            where = _difference(then, self.job) if isinstance(then, dict) else "other settings"
            raise MiningError(f"{what} with {where}. Choose another --out, or remove it.")

    def _check_unchanged(self, finished: dict[str, Any]) -> None:
        with self.out.open("rb") as file:
            if sha256_of(file) != finished["triples"]["sha256"]:
                raise MiningError(
                    f"{self.out} was changed since it was mined. Choose another --out, or remove both files."
                )


def _difference(then: dict[str, Any], now: dict[str, Any], above: str = "") -> str:
    """The first thing two jobs differ in, in words."""
    for key in dict.fromkeys([*now, *then]):
        left, right = then.get(key), now.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            if found := _difference(left, right, f"{above}{key} "):
                return found
        elif left != right:
            return f"{above}{key} {json.dumps(left)[:100]}, not {json.dumps(right)[:100]}"
    return ""


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object that this command wrote; None if there is no file."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise MiningError(f"{path} is damaged: it is no JSON object. Remove it, and run the command again.")
    return values

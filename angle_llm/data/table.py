"""What every kind of file becomes: columns, and rows with their places."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from angle_llm.data.formats import DataError, Row, RowError


@dataclass(frozen=True)
class Again:
    """Rows that are read anew each time they are gone through, so that a file of any size is never in memory."""

    read: Callable[[], Iterator[tuple[int, Row | RowError]]]

    def __iter__(self) -> Iterator[tuple[int, Row | RowError]]:
        return self.read()


@dataclass(frozen=True)
class Table:
    """Columns and rows of a source."""

    name: str
    columns: list[str]
    rows: Iterable[tuple[int, Row | RowError]]
    """(line or row number counted from 1, the row or what is wrong with it)."""
    unit: Literal["line", "row"] = "line"
    label_names: Mapping[str, list[str]] = field(default_factory=dict)
    identity: str | None = None
    """Of a data set: tells states of it apart."""

    def place(self, number: int) -> str:
        return f"{self.name}:{number}" if self.unit == "line" else f"{self.name} row {number}"


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line with its end). Bytes that are not UTF-8 become lone surrogates: see `refuse_bad_bytes`."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if number == 1:
                    _refuse_wide_characters(path, line)
                bare = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                yield number, bare.decode(errors="surrogateescape")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path}:{number + 1}: the gzip file is truncated or damaged here ({error}); fetch it again, or unpack "
            "what is left of it"
        ) from None


def _refuse_wide_characters(path: Path, line: bytes) -> None:
    """UTF-16 and UTF-32: cut at line ends they make no row, and no row of them would say why."""
    beginning = line[:64]
    wide = beginning.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff"))
    if wide or beginning.count(0) * 3 > len(beginning) > 1:  # without a mark: of English, every second byte is 0
        raise DataError(
            f"{path}:1: the file is written in UTF-16 or UTF-32, not in UTF-8 (it begins with {line[:4].hex(' ')}); convert "
            "it, as in `iconv -f utf-16 -t utf-8`"
        )


def refuse_bad_bytes(text: str) -> None:
    """Raises `RowError` for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) - 0xDC00
        raise RowError(f"byte 0x{byte:02x} is not UTF-8; convert the file, as in `iconv -f latin1 -t utf-8`") from None

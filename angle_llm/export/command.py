"""The commands `angle-llm merge`, `export` and `verify`: their settings, and what is printed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from angle_llm.config import SettingsError
from angle_llm.export.merge import REPORT_NAME, merge
from angle_llm.export.to_sentence_transformers import export_sentence_transformers
from angle_llm.export.verify import Score, VerificationError, verify
from angle_llm.io import write_json


@dataclass(frozen=True)
class MergeSettings:
    """What `angle-llm merge` reads and writes."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The saved adapter: a directory with angle_llm.json, such as runs/nli/model."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The directory to write. A saved encoder that lies there is replaced; anything else is left alone."""
    base: Literal["dequantised", "original"] = "dequantised"
    """dequantised: onto the values the adapter was trained on (rounded to the dtype of training; out of 4 or 8 bits).
    original: onto the base's weights as they are stored, where an adapter from 4 bits is not quite what was trained."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What is stored. The merge is computed in float32 and rounded once; 1 - cos is about 1e-12 in float32, 1e-4 in
    bfloat16, which takes half the space."""
    shard_gigabytes: float = 4.0
    """Size of a weights file; so much memory the merge takes, and a layer more."""
    verify: bool = True
    """Compare the result with the adapter before it is kept. Loads each of them whole, in float32."""
    device: str | None = None
    """Where to compare, such as cpu or cuda:0. None: the best there is."""

    def __post_init__(self) -> None:
        if not self.shard_gigabytes > 0:
            raise SettingsError(f"--shard-gigabytes must be positive, got {self.shard_gigabytes}.")


@dataclass(frozen=True)
class ExportSettings:
    """What `angle-llm export` reads and writes."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The saved encoder: an adapter, which is merged first, or a whole model."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The directory to write. It must not exist, or be empty."""
    to: Literal["sentence-transformers"] = "sentence-transformers"
    """sentence-transformers: a folder whose SentenceTransformer(OUT).encode(texts) gives the same vectors, prompt included."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """What an adapter's merge is stored in; a whole model stays as it is. None: float32."""
    verify: bool = True
    """Compare the result with RUN before it is kept, through sentence-transformers itself, which has to be installed."""
    device: str | None = None
    """Where to compare, such as cpu or cuda:0. None: the best there is."""


@dataclass(frozen=True)
class VerifySettings:
    """What `angle-llm verify` compares."""

    forms: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="A B [C …]")]
    """Two or more: saved directories (adapter or whole), sentence-transformers folders (through that library), or plain
    backbones; each is compared with the first. A backbone is used with the prompt, pooling and length of the first."""
    texts: Path | None = None
    """A UTF-8 file with one text a line. None: the built-in sentences."""
    pairs: str | None = None
    """A TSV of graded pairs (sentence1, sentence2, score), or starter:graded_pairs.tsv: compare Spearman too."""
    tolerance: float | None = None
    """How large 1 - cos may be. None: 1e-5 where weights are stored in float32, 1e-3 in bfloat16 and float16, and every
    stored number must be that of the adapter's merge, computed in float32 and rounded once. With a tolerance of your own
    such numbers are counted and do not decide."""
    json: Path | None = None
    """Also write the report to this file."""
    device: str | None = None
    """Where to compute, such as cpu or cuda:0. None: the best there is."""

    def __post_init__(self) -> None:
        if len(self.forms) < 2:
            raise SettingsError(f"verify compares two forms or more, got {len(self.forms)}. Name another one.")
        if self.tolerance is not None and not self.tolerance > 0:
            raise SettingsError(f"--tolerance must be positive, got {self.tolerance}.")


def merge_main(settings: MergeSettings) -> None:
    """Merges and says what came of it; exit code 1 if the result was not the adapter's encoder."""
    try:
        found = merge(
            settings.run,
            settings.out,
            base=settings.base,
            dtype=settings.dtype,
            shard_bytes=int(settings.shard_gigabytes * 1e9),
            check=settings.verify,
            device=settings.device,
        )
    except VerificationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    if found is None:
        print(f"NOT verified, as asked. To do it later: angle-llm verify {settings.run} {settings.out}")
    else:
        print(found.text())
    print(f"\nThe merged encoder lies in {settings.out}; {REPORT_NAME} in it holds this report.")


def export_main(settings: ExportSettings) -> None:
    """Exports and says what came of it; exit code 1 if the result was not the encoder's."""
    try:
        found = export_sentence_transformers(
            settings.run, settings.out, dtype=settings.dtype, check=settings.verify, device=settings.device
        )
    except VerificationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    if found is None:
        print(f"NOT verified, as asked. To do it later: angle-llm verify {settings.run} {settings.out}")
    else:
        print(found.text())
    print(
        f"\nThe folder for {settings.to} is {settings.out}. To use it:\n\n"
        "    from sentence_transformers import SentenceTransformer\n"
        f"    rows = SentenceTransformer({settings.out!r}).encode(texts)"
    )


def verify_main(settings: VerifySettings, score_on: Callable[[str], Score]) -> None:
    """Compares and prints the verdict; exit code 1 if the forms are not one encoder. `score_on` makes a score of pairs."""
    score = None if settings.pairs is None else score_on(settings.pairs)
    texts = None if settings.texts is None else _read_texts(settings.texts)
    found = verify(settings.forms, texts=texts, score=score, tolerance=settings.tolerance, device=settings.device)
    if settings.json is not None:
        write_json(settings.json, found.to_dict())
    print(found.text())
    sys.exit(0 if found.holds else 1)


def _read_texts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--texts needs a UTF-8 file with one text a line; {path} is not ({error}).") from None
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise SettingsError(f"--texts needs a file with one text a line; {path} holds none.")
    return texts

"""The saved directory of an encoder: weights or adapter, tokenizer, and a card with everything needed to use it the way
it was trained. Nobody is asked for prompt, pooling or length again.

    adapter_model.safetensors + adapter_config.json     an adapter, on the base the card names
    model.safetensors + config.json                     or a whole backbone
    tokenizer.json …                                    the tokenizer
    angle_llm.json                                      the card
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from angle_llm.errors import raised_here, unknown
from angle_llm.files import json_text, sync
from angle_llm.prompts import PromptTemplate

CARD_NAME = "angle_llm.json"
EXPORT_NAME = "angle_llm_export.json"
"""In a folder made for another library: what was put in. Such a folder words texts itself."""

FORMAT_VERSION = 1
LARGEST_JSON = 1 << 28
"""Bytes; the largest there are, tokenizers, take a tenth of it."""


class ArtifactError(ValueError):
    """A saved directory that cannot be used, with what is wrong in it."""


@dataclass(frozen=True)
class EncoderCard:
    """How a saved encoder wants to be used."""

    prompt: PromptTemplate
    """How sentences are worded and tokenised."""
    pooling: str
    """Which states make the embedding."""
    max_length: int
    """Tokens of a worded sentence, prompt and special tokens included."""
    dtype: str
    """Dtype the base weights had in training."""
    base: str | None
    """The backbone an adapter belongs on, as `locate` reads it; None when the directory holds the whole backbone."""
    base_revision: str | None = None
    """Revision of the base, for a hub id."""
    base_fingerprint: str | None = None
    """`weights_fingerprint` of the base before it was quantised: an adapter put on other weights is refused."""
    bits: int | None = None
    """Bits the base was held in while the adapter trained: 4 (NF4), 8 (int8), None if it was not quantised."""
    dimensions: int | None = None
    """How many dimensions of a vector are kept, the first ones; None: all."""
    layers: int | None = None
    """How many layers of the base the adapter is for, the first ones; None: all that are there."""

    def write(self, folder: Path) -> None:
        """Writes the card into a folder."""
        values = {item.name: getattr(self, item.name) for item in fields(self)} | {"prompt": self.prompt.to_dict()}
        (folder / CARD_NAME).write_text(json_text({"format_version": FORMAT_VERSION, **values}), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> EncoderCard:
        """Reads the card of a folder.

        Raises:
            ArtifactError: for a missing, malformed or newer card.
            PromptError: for a prompt in it that cannot be used.
        """
        path = folder / CARD_NAME
        try:
            values = read_json(path)
        except FileNotFoundError as error:
            raise ArtifactError(f"{folder} has no {CARD_NAME}, so it is not a saved encoder.") from error
        if values.pop("format_version", None) != FORMAT_VERSION:
            raise ArtifactError(
                f"{path}: this version of angle_llm reads format_version {FORMAT_VERSION}. Upgrade angle_llm, or save "
                "the encoder again with this version."
            )
        return cls(**_checked(values, path))


_CARD_TYPES: dict[str, tuple[type, ...]] = {
    "prompt": (dict,),
    "pooling": (str,),
    "max_length": (int,),
    "dtype": (str,),
    "base": (str, type(None)),
    "base_revision": (str, type(None)),
    "base_fingerprint": (str, type(None)),
    "bits": (int, type(None)),
    "dimensions": (int, type(None)),
    "layers": (int, type(None)),
}
_SINCE_THEN = {"bits": None, "dimensions": None, "layers": None}
"""Keys that cards of earlier versions lack, and what they mean by it."""


def _checked(values: dict[str, Any], path: Path) -> dict[str, Any]:
    values = _SINCE_THEN | values
    for key in values:
        if key not in _CARD_TYPES:
            raise ArtifactError(f"{path}: {unknown('key', key, _CARD_TYPES)}")
    for key, kinds in _CARD_TYPES.items():
        if key not in values:
            raise ArtifactError(f"{path}: `{key}` is missing. Save the encoder again.")
        if type(values[key]) not in kinds:  # not isinstance: true is no number
            raise ArtifactError(
                f"{path}: `{key}` must be {' or '.join(k.__name__ for k in kinds)}, got {values[key]!r}."
            )
    if values["bits"] not in (None, 4, 8):
        raise ArtifactError(f"{path}: `bits` must be 4, 8 or null, got {values['bits']}.")
    for key in ("dimensions", "layers"):
        if values[key] is not None and values[key] < 1:
            raise ArtifactError(f"{path}: `{key}` must be 1 or more, or null, got {values[key]}.")
    return values | {"prompt": PromptTemplate.from_dict(values["prompt"], where=str(path))}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file that anybody may have written.

    Raises:
        FileNotFoundError: if there is no file.
        ArtifactError: for anything but an object in UTF-8 of a size and depth that JSON files have.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")  # a pipe would be waited for
        if path.stat().st_size > LARGEST_JSON:
            raise ValueError(f"it has more than {LARGEST_JSON} bytes")
        values: Any = json.loads(path.read_bytes().decode())
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not valid JSON ({error}). Fetch or save it again.") from error
    return values


def check_files(folder: Path) -> None:
    """Refuses a folder with a link that leads out of it: what is read as an encoder's would be something else.

    The folder itself may be a link, and in the hub's cache files are links to the blobs beside the snapshots.

    Raises:
        ArtifactError: naming the link.
    """
    real = Path(os.path.realpath(folder))
    rooms = [real, real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [real]
    for path in sorted(real.rglob("*")):
        target = Path(os.path.realpath(path))
        if path.is_symlink() and not any(target.is_relative_to(room) for room in rooms):
            raise ArtifactError(
                f"{path} is a link that leads out of its folder, to {target}. Put the file itself there."
            )


@contextmanager
def told_as_damage(place: object) -> Iterator[None]:
    """What a library raises over the files of a folder becomes an `ArtifactError` that names the folder and the reason.

    Libraries raise anything over a damaged file: a KeyError, a TypeError, a Rust panic. This package's own errors pass as
    they are, and so does what the machine lacks: memory, a permission, a working GPU. A package that a folder asks for and
    that is not installed is told as that.
    """
    try:
        yield
    except ImportError as error:
        raise ArtifactError(f"{place} cannot be opened without another package: {error}") from error
    except BaseException as error:
        kind = type(error).__name__
        foreign = isinstance(error, Exception) or kind == "PanicException"
        if not foreign or _is_of_the_machine(error) or _is_own(error):
            raise
        reason = " ".join(str(error).split())
        raise ArtifactError(
            f"{place} cannot be opened: {kind}: {reason if len(reason) < 400 else reason[:400] + '…'}. A file in it is damaged, "
            "or not of a kind that is read here; fetch or save it again."
        ) from error


def _is_of_the_machine(error: BaseException) -> bool:
    # torch says in words alone that memory or the GPU failed.
    told = isinstance(error, RuntimeError) and any(words in str(error) for words in ("allocate memory", "CUDA"))
    return told or isinstance(error, (MemoryError, PermissionError)) or type(error).__name__ == "OutOfMemoryError"


def _is_own(error: BaseException) -> bool:
    return type(error).__module__.startswith("angle_llm.") or (
        isinstance(error, (ValueError, OSError, TypeError)) and raised_here(error)
    )


def is_saved_encoder(path: str | Path) -> bool:
    """Whether a path is a directory that holds a card."""
    return (Path(path).expanduser() / CARD_NAME).is_file()


def check_writable(target: Path) -> None:
    """Refuses a target that `write_directory` would leave alone; asked before hours of work, not after.

    Raises:
        ArtifactError: if `target` holds something that is not a saved encoder.
    """
    if target.exists() and not (target.is_dir() and (is_saved_encoder(target) or not any(target.iterdir()))):
        raise ArtifactError(
            f"{target} exists and is not a saved encoder, so it is left alone. Choose another directory."
        )


def write_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Writes a directory whole or not at all: `fill` gets a temporary folder beside it, renamed into place at the end.

    An existing directory is replaced, with all that is in it, if it is a saved encoder; any other must be empty.

    Raises:
        ArtifactError: if `target` holds something that is not a saved encoder.
    """
    target = target.expanduser().resolve()  # a link goes on pointing there
    check_writable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        fill(temporary)
        temporary.chmod(0o755)
        for path in temporary.rglob("*"):
            if path.is_file():
                sync(path)
        if target.exists():
            retired = temporary.with_name(temporary.name + ".old")
            target.replace(retired)
            try:
                temporary.replace(target)
            except BaseException:
                retired.replace(target)
                raise
            shutil.rmtree(retired)
        else:
            temporary.replace(target)
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

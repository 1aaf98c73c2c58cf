"""`resolve_model`: what a model path refers to, decided once."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from angle_llm.model.source.backbone import BackboneLocation
from angle_llm.model.source.checks import CARD_NAME, EXPORT_NAME, ArtifactError, check_links, is_saved_encoder
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.hub import fetch_files
from angle_llm.model.source.sentence_transformers_folder import (
    SentenceTransformersFolder,
    find_sentence_transformers,
)
from angle_llm.prompts import SidePrompts

PACKAGE_SCHEME = "package:"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_FILE_ENDINGS = {".gguf", ".safetensors", ".bin", ".pt", ".json", ".yaml"}


@dataclass(frozen=True)
class ModelSource:
    """A saved encoder, a model of sentence-transformers, or a bare backbone: a folder, a GGUF file or a hub id."""

    path: str
    """The path or hub id as given."""
    location: BackboneLocation
    """Tokenizer and configuration; the weights too, unless the source is an adapter."""
    revision: str | None = None
    """Commit on the hub, or the requested revision."""
    card: EncoderCard | None = None
    """Card of a saved encoder; None for other models."""
    library: Path | None = None
    """Folder with the files that describe a sentence-transformers model; None for other models."""

    @property
    def adapter(self) -> Path | None:
        """Folder of a saved adapter; None for other models."""
        return Path(self.location.name) if self.card is not None and self.card.base is not None else None

    @property
    def backbone(self) -> BackboneLocation:
        """Location of the weights of the backbone. Raises `FileNotFoundError` if the base of an adapter is missing."""
        if self.card is None or self.card.base is None:
            return self.location
        try:
            return locate(self.card.base)
        except FileNotFoundError as error:
            card = Path(self.location.name) / CARD_NAME
            raise FileNotFoundError(f"{error} It is the `base` in {card}; if it moved, change it there.") from error

    @property
    def backbone_revision(self) -> str | None:
        """Revision of the backbone on the hub."""
        return self.revision if self.card is None else self.card.base_revision

    def read_library(self, prompt: SidePrompts | None) -> SentenceTransformersFolder | None:
        """Read the description of a sentence-transformers model; None for other models. Raises `ArtifactError`."""
        return None if self.library is None else SentenceTransformersFolder.read(self.library, prompt)


def resolve_model(path_or_id: str, revision: str | None = None) -> ModelSource:
    """Return the source of a model; fetch the files of an encoder on the hub that are not in the cache.

    `ID@REVISION` is a commit, branch or tag of a model on the hub.

    Raises:
        FileNotFoundError: if the path is neither on this machine nor a hub id, or the hub does not answer.
        ArtifactError: for a folder or repository that is neither encoder nor backbone, or a damaged card.
        OSError: if the hub refuses the request.
        ValueError: for two different revisions.
    """
    if is_saved_encoder(path_or_id):
        folder = Path(path_or_id).expanduser()
        check_links(folder)
        return ModelSource(path_or_id, BackboneLocation(str(folder)), card=EncoderCard.read(folder))
    path_or_id, pinned = split_revision(path_or_id)
    if pinned is not None:
        if revision not in (None, pinned):
            raise ValueError(f"{path_or_id}: expected one revision, got @{pinned} and revision={revision!r}.")
        revision = pinned
    location = locate(path_or_id)
    if location.is_local:
        library = None if location.gguf_file else find_sentence_transformers(location.name)
        return ModelSource(path_or_id, location, revision, library=library)
    found = fetch_files(path_or_id, revision)
    if found.folder is not None and is_saved_encoder(found.folder):
        return ModelSource(
            path_or_id, BackboneLocation(str(found.folder)), found.commit, card=EncoderCard.read(found.folder)
        )
    return ModelSource(path_or_id, location, found.commit or revision, library=found.folder)


def split_revision(path_or_id: str) -> tuple[str, str | None]:
    """Split `ID@REVISION` of a hub id into id and revision; the revision of any other path is None."""
    name, _, pinned = path_or_id.partition("@")
    if pinned and _HUB_ID.fullmatch(name) and not Path(path_or_id).exists():
        return name, pinned
    return path_or_id, None


def locate(path_or_id: str) -> BackboneLocation:
    """Find a backbone: a folder, a `.gguf` file, a hub id, or `package:NAME/path/inside` of a Python package.

    Raises:
        FileNotFoundError: if there is none.
        ArtifactError: for a folder that was exported for another library.
    """
    path = _inside_package(path_or_id) if path_or_id.startswith(PACKAGE_SCHEME) else Path(path_or_id).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return BackboneLocation(str(path.parent), path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            inside = path / "model"  # of a run directory
            is_run = is_saved_encoder(inside) or (inside / "config.json").is_file()
            raise FileNotFoundError(
                f"{path} has no config.json, so it is not a model folder. Give a folder written by save_pretrained, or the "
                "path of a .gguf file." + (f" Did you mean {inside}?" if is_run else "")
            )
        if (path / EXPORT_NAME).is_file():
            raise ArtifactError(
                f"{path} was exported for another library (see {EXPORT_NAME}); its tokenizer may apply the prompt itself. Open "
                "it with that library, or open the encoder it was made from."
            )
        return BackboneLocation(str(path))
    looks_local = "/" in path_or_id and path.parent.is_dir()  # runs/typo, in a folder runs
    if _HUB_ID.fullmatch(path_or_id) and path.suffix not in _FILE_ENDINGS and not looks_local:
        return BackboneLocation(path_or_id)
    raise FileNotFoundError(
        f"no model at {path}. Give a folder with a config.json, a .gguf file, a hub id such as NousResearch/Llama-2-7b-hf, or "
        "package:NAME/path/inside."
    )


def _inside_package(reference: str) -> Path:
    package, _, inside = reference.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{reference}: the Python package {package!r} is not installed. Install it with pip.")
    return Path(next(iter(spec.submodule_search_locations))) / inside

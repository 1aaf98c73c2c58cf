"""Find what kind of model a path or hub id refers to, and where its files are (`resolve_model`)."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from angle_llm.model.source.backbone import BackboneLocation
from angle_llm.model.source.checks import (
    CARD_NAME,
    EXPORT_NAME,
    ArtifactError,
    is_saved_encoder,
    model_inside,
    read_json,
)
from angle_llm.model.source.dense import dense_folders
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.hub import fetch_files
from angle_llm.model.source.saved_adapter import CONFIG_NAME, check_adapter_prompt
from angle_llm.model.source.sentence_transformers_folder import (
    SentenceTransformersFolder,
    find_sentence_transformers,
    read_modules,
)
from angle_llm.prompts import SidePrompts
from angle_llm.settings.parsing import similar_paths

_BASE_KEY = "base_model_name_or_path"
PACKAGE_SCHEME = "package:"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_FORMS = (
    "Give a folder with a config.json, a .gguf file, a hub id such as NousResearch/Llama-2-7b-hf, or "
    "package:NAME/path/inside."
)
_FILE_ENDINGS = {".gguf", ".safetensors", ".bin", ".pt", ".json", ".yaml"}


@dataclass(frozen=True)
class ModelSource:
    """What a model path refers to, and its files: a saved encoder, a sentence-transformers model, a backbone or an adapter."""

    path: str
    """Path or hub id as the user gave it, without `@REVISION`."""
    location: BackboneLocation
    """Location of tokenizer and configuration. The weights are in the same place, except the base weights of an adapter."""
    revision: str | None = None
    """Commit of the fetched files on the hub, else the requested revision; None if neither is known."""
    card: EncoderCard | None = None
    """Contents of `angle_llm.json` in a saved encoder; None for other models."""
    library: Path | None = None
    """Folder with the configuration files of a sentence-transformers model; None for other models."""
    attention: Literal["bidirectional"] | None = None
    """Attention of a decoder-only model: bidirectional, or None for the attention of the architecture."""
    peft_base: tuple[str, str | None] | None = None
    """Base model of an adapter that peft saved, and its revision on the hub; None for other models."""

    @property
    def base(self) -> tuple[str, str | None] | None:
        """Path or hub id of the base model of an adapter, and its revision on the hub; None for other models."""
        if self.card is not None and self.card.base is not None:
            return self.card.base, self.card.base_revision
        return self.peft_base

    @property
    def adapter(self) -> Path | None:
        """Folder of the model if it is an adapter; None for other models."""
        return None if self.base is None else Path(self.location.name)

    @property
    def backbone(self) -> BackboneLocation:
        """Location of the backbone weights. Raises `FileNotFoundError` if the base of a saved adapter is missing."""
        bidirectional = self.attention is not None
        if self.base is None:
            return replace(self.location, bidirectional=bidirectional)
        try:
            return replace(locate(*self.base), bidirectional=bidirectional)
        except FileNotFoundError as error:
            card = Path(self.location.name) / CARD_NAME
            raise FileNotFoundError(f"{error} It is the `base` in {card}. If it moved, change `base` there.") from error

    @property
    def backbone_revision(self) -> str | None:
        """Revision (commit, branch or tag) of the backbone on the hub; None for a local or unspecified revision."""
        return self.revision if self.base is None else self.base[1]

    @property
    def tokenizer(self) -> tuple[BackboneLocation, str | None]:
        """Location of the tokenizer and its revision on the hub. A peft adapter without one has the tokenizer of its base."""
        if self.peft_base is not None and not (Path(self.location.name) / "tokenizer_config.json").is_file():
            return self.backbone, self.backbone_revision
        return self.location, self.revision

    @property
    def dense(self) -> list[Path]:
        """Folders of the Dense modules, in the order of their application."""
        if self.card is not None:
            return dense_folders(Path(self.location.name), self.card.dense)
        return [] if self.library is None else read_modules(self.library)[1]

    def read_library(self, prompt: SidePrompts | None) -> SentenceTransformersFolder | None:
        """Read prompts, pooling and lengths of a sentence-transformers model; return None for other models.

        `prompt` replaces the prompts of the model. Raises the errors of `SentenceTransformersFolder.read`, and `ValueError`
        for a peft adapter without prompts.
        """
        if self.peft_base is not None and self.library != Path(self.location.name):  # prompts of the base do not count
            check_adapter_prompt(Path(self.location.name), prompt)
        return None if self.library is None else SentenceTransformersFolder.read(self.library, prompt)


def resolve_model(
    path_or_id: str, revision: str | None = None, attention: Literal["bidirectional"] | None = None
) -> ModelSource:
    """Find the kind and the files of the model at a path or hub id.

    For a hub id, the files of a saved encoder that are not in the cache are fetched. `ID@REVISION` selects a commit,
    branch or tag on the hub. `attention` None: as saved with the model, else as the architecture.

    Raises:
        FileNotFoundError: if the path is neither on this machine nor a hub id, or the hub does not answer.
        ArtifactError: for a folder or repository that is neither an encoder nor a backbone, or a damaged
            `angle_llm.json`. Also for a saved adapter that was not trained with `attention`.
        OSError: if the hub refuses the request.
        ValueError: if `ID@REVISION` and `revision` are two different revisions.
    """
    source = _find_model(path_or_id, revision)
    saved = None if source.card is None else source.card.attention
    if attention is not None and source.card is not None and source.adapter is not None and saved is None:
        raise ArtifactError(
            f"{path_or_id} is an adapter that was trained with causal attention, so attention {attention} would give other "
            "vectors. Omit it; or merge the adapter (angle-llm merge), and train the merged model."
        )
    return replace(source, attention=attention or saved)


def _find_model(path_or_id: str, revision: str | None) -> ModelSource:
    """Find the kind and the files of a model. Arguments and errors as in `resolve_model`."""
    if not path_or_id:
        raise FileNotFoundError(f"no model is named (training: --model.path). {_FORMS}")
    path_or_id, pinned = split_revision(path_or_id)
    if pinned is not None:
        if revision not in (None, pinned):
            raise ValueError(f"{path_or_id}: expected one revision, got @{pinned} and revision={revision!r}.")
        revision = pinned
    # The files that show what kind of model it is.
    folder, commit = _local_path(path_or_id), None  # of a hub id, no folder exists
    location = BackboneLocation(str(folder))
    if not (is_saved_encoder(folder) or _is_adapter(folder)):
        location = locate(path_or_id, revision)
        if not location.is_local:
            folder, commit = fetch_files(path_or_id, revision)
    # Kind of model.
    if is_saved_encoder(folder):
        return ModelSource(path_or_id, BackboneLocation(str(folder)), commit, card=EncoderCard.read(folder))
    if _is_adapter(folder):
        return _peft_source(path_or_id, folder, commit)
    return ModelSource(path_or_id, location, commit or revision, library=find_sentence_transformers(folder))


def _is_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter of peft, and no model beside it."""
    return (folder / CONFIG_NAME).is_file() and not any(folder.glob("model*.safetensors*"))


def _peft_source(path_or_id: str, folder: Path, commit: str | None = None) -> ModelSource:
    """Return the source of an adapter that peft or sentence-transformers saved in a folder, with the base that it names.

    A local path of the base is relative to the current folder, as in peft, to the adapter, or to the folder around it.
    Raises the errors of `resolve_model`.
    """
    config_path = folder / CONFIG_NAME
    config = read_json(config_path)
    name, revision = config.get(_BASE_KEY), config.get("revision")
    if not (isinstance(name, str) and name and isinstance(revision, str | None)):
        raise ArtifactError(
            f"{config_path}: `{_BASE_KEY}` is {name!r:.80}, so the base of the adapter is unknown. Write its path or hub id "
            "there, or open it by from_pretrained(BASE, adapter=FOLDER, prompt=…)."
        )
    candidates = (start / Path(name).expanduser() for start in (Path(), folder, folder.parent))
    # The folder of the adapter can have the name of the base, such as gpt2.
    base = next((str(path) for path in candidates if path.exists() and path.resolve() != folder.resolve()), "")
    if not base:  # on the hub
        base, pinned = split_revision(name)
        revision = pinned or revision
        if Path(base).resolve() == folder.resolve():
            raise ArtifactError(
                f"{folder} has the name of its base {base} on the hub, and is found in its place here. Rename the folder, or run "
                "this in another folder."
            )
    try:
        base_folder = _local_path(base)  # for a GGUF file, the file
        if not locate(base, revision).is_local:
            base_folder, revision = fetch_files(base, revision)
            if _is_adapter(base_folder):
                raise ArtifactError(f"{config_path}: the base {base} is an adapter, too. First merge it into its base.")
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error} It is the base of the adapter {folder}: `{_BASE_KEY}` in {config_path}. If it moved, change it there."
        ) from error
    library = find_sentence_transformers(folder)
    if library is None:
        if is_saved_encoder(base_folder):
            raise ArtifactError(
                f"{config_path}: the base {base} is a saved encoder, whose prompt and pooling an adapter of peft does not "
                "have. Train the adapter with this package."
            )
        library = find_sentence_transformers(base_folder)
    return ModelSource(path_or_id, BackboneLocation(str(folder)), commit, library=library, peft_base=(base, revision))


def is_hub_id(name: str | None) -> bool:
    """Return whether a model name has the form of a hub id (MODEL or USER/MODEL) and is not an existing local path."""
    return name is not None and _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def split_revision(path_or_id: str) -> tuple[str, str | None]:
    """Split `ID@REVISION` into hub id and revision; return any other path unchanged, with revision None."""
    name, _, pinned = path_or_id.partition("@")
    if pinned and _HUB_ID.fullmatch(name) and not Path(path_or_id).exists():
        return name, pinned
    return path_or_id, None


def locate(path_or_id: str, revision: str | None = None) -> BackboneLocation:
    """Return the location of the model at a path or hub id, for `transformers`; a hub id is not looked up.

    A path is a folder, a `.gguf` file, or `package:NAME/path/inside` for a file in the Python package NAME. A name with a
    revision is a hub id, unless the path exists; `runs/typo` in a folder with `runs` is a path.

    Raises:
        FileNotFoundError: if the path is neither a model on this machine nor a valid hub id.
        ArtifactError: for a folder that was exported for another library.
    """
    path = _local_path(path_or_id)
    if path.suffix.lower() == ".gguf" and path.is_file():
        return BackboneLocation(str(path.parent), path.name)
    if path.is_file() and (path.suffix.lower() in _FILE_ENDINGS or not _HUB_ID.fullmatch(path_or_id)):
        raise FileNotFoundError(f"{path} is a file, not a model. Give its folder, {path.parent}, or a .gguf file.")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"{path} has no config.json, so it is not a model folder. Give a folder written by save_pretrained, or the "
                f"path of a .gguf file.{model_inside(path)}"
            )
        if (path / EXPORT_NAME).is_file():
            raise ArtifactError(
                f"{path} was exported for another library (see {EXPORT_NAME}); its tokenizer may apply the prompt itself. Open "
                "it with that library, or open the encoder it was made from."
            )
        return BackboneLocation(str(path))
    if path.name == "model" and (path.parent / "settings.yaml").is_file():
        raise FileNotFoundError(
            f"{path.parent} is the directory of a run that is not finished, without a saved encoder. Continue the run with "
            "the same command and --resume auto."
        )
    looks_local = revision is None and "/" in path_or_id and path.parent.is_dir()
    is_id = _HUB_ID.fullmatch(path_or_id) and path.suffix.lower() not in _FILE_ENDINGS
    if is_id and not looks_local:
        return BackboneLocation(path_or_id)
    advice = (
        f" For the model of the hub, write {path_or_id}@main, because a folder {path.parent} exists." if is_id else ""
    )
    raise FileNotFoundError(f"no model at {path}. {similar_paths(path)} {_FORMS}{advice}")


def _local_path(reference: str) -> Path:
    """Return the path that a model path refers to on this machine; `package:NAME/path/inside` is in the package NAME.

    Raises:
        FileNotFoundError: if the package is not installed.
    """
    if not reference.startswith(PACKAGE_SCHEME):
        return Path(reference).expanduser()
    package, _, inside = reference.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{reference}: the Python package {package!r} is not installed. Install it with pip.")
    return Path(next(iter(spec.submodule_search_locations))) / inside

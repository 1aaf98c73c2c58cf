"""Fetch files of models on the hub into the local cache.

A repository with `angle_llm.json`, the card, is a saved encoder: an adapter or a whole model. Only card, safetensors
files and tokenizer are fetched, all from one commit; from an adapter of peft, its files. From a sentence-transformers
repository, those that give prompts, pooling and maximum length are fetched. Any other repository is a backbone, fetched
later by `transformers`. Without an answer from the hub, or with HF_HUB_OFFLINE=1, only the cache is read.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

from angle_llm.model.source.checks import (
    CARD_NAME,
    EXPORT_NAME,
    MERGE_NAME,
    TOKENIZER_FILES,
    ArtifactError,
    check_links,
    read_json,
)
from angle_llm.model.source.dense import DENSE_FILES
from angle_llm.model.source.sentence_transformers_folder import MODULES_NAME, USAGE_FILES

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
WHOLE_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors")


class HubFiles(NamedTuple):
    """Files of a hub repository in the local cache."""

    folder: Path | None
    """Folder in the cache of a saved encoder or an adapter (weights included), or of a sentence-transformers model (without).

    None for a bare backbone, whose files `transformers` fetches.
    """
    commit: str | None
    """Commit of the files; None for a bare backbone without config.json."""


def fetch_files(repo: str, revision: str | None = None) -> HubFiles:
    """Fetch the files of a model on the hub into the cache, except the weights of a backbone.

    These are all files of a saved encoder or an adapter, or the files of a sentence-transformers model that give prompts,
    pooling and maximum length. `revision` is a commit, branch or tag.

    Raises:
        FileNotFoundError: if the hub does not answer and the cache has no file of the repository.
        ArtifactError: for a repository that is neither an encoder nor a backbone, or a damaged `angle_llm.json`.
        OSError: if the hub refuses the request.
    """
    from huggingface_hub import HfApi

    # Files that show what the repository contains.
    offline = _offline_reason(repo, revision)
    names = (CARD_NAME, EXPORT_NAME, ADAPTER_FILES[0], MODULES_NAME, "config.json")
    files = {name: file for name in names if (file := _fetch(repo, name, revision, cache_only=bool(offline)))}
    if offline and not files:
        raise FileNotFoundError(
            f"the model {_name(repo, revision)} is not on this machine, and the hub does not answer ({offline}). "
            "Check the path of a folder, a .gguf file or package:NAME/path; for a hub id, connect to the network."
        )
    # Encoder, export, adapter, or sentence-transformers folder.
    if CARD_NAME in files:
        weights = WHOLE_FILES if read_json(files[CARD_NAME]).get("base") is None else ADAPTER_FILES
        names = (CARD_NAME, MERGE_NAME, *weights, *TOKENIZER_FILES, *DENSE_FILES)
        return _snapshot(repo, files[CARD_NAME], list(names), bool(offline))
    if EXPORT_NAME in files:
        raise ArtifactError(
            f"{repo} on the hub was exported for another library ({EXPORT_NAME}). Open it with that library."
        )
    if ADAPTER_FILES[0] in files:
        if not offline and any(HfApi().file_exists(repo, name, revision=revision) for name in WHOLE_FILES[1:3]):
            raise ArtifactError(f"{repo} on the hub contains an adapter and a model. Download one of them to a folder.")
        patterns = [*ADAPTER_FILES, *TOKENIZER_FILES, *USAGE_FILES]
        return _snapshot(repo, files[ADAPTER_FILES[0]], patterns, bool(offline))
    if MODULES_NAME in files:
        return _snapshot(repo, files[MODULES_NAME], list(USAGE_FILES), bool(offline))
    return HubFiles(None, files["config.json"].parent.name if "config.json" in files else None)


def _snapshot(repo: str, file: Path, patterns: list[str], cache_only: bool) -> HubFiles:
    """Fetch the files of a hub repository that match `patterns`, from the commit of the cached file `file`.

    Raises:
        ArtifactError: if a fetched file is a link out of the cache.
    """
    from huggingface_hub import snapshot_download

    commit = file.parent.name
    folder = snapshot_download(repo, revision=commit, allow_patterns=patterns, local_files_only=cache_only)
    check_links(Path(folder))
    return HubFiles(Path(folder), commit)


def _offline_reason(repo: str, revision: str | None) -> str:
    """Return the reason why the hub does not answer, or "" if the hub answers.

    One request decides, because otherwise the request of every file would time out.

    Raises:
        OSError: if the hub refuses the request.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(repo, revision=revision, timeout=10)
    except Exception as error:  # no connection: each HTTP library has its own errors
        if is_refusal(error):
            raise refused(repo, revision, error) from error
        return reason(error)
    return ""


def _fetch(repo: str, name: str, revision: str | None, *, cache_only: bool) -> Path | None:
    """Fetch a small file of a hub repository and return its path in the cache; None if the file does not exist.

    `name` can be a file that marks a saved encoder or a sentence-transformers model. With `cache_only`, a warning is issued
    if the cache contains the repository, but no record of whether this file exists.

    Raises:
        OSError: if the hub refuses the request.
    """
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo, name, revision=revision, local_files_only=cache_only))
    except LocalEntryNotFoundError:  # also an EntryNotFoundError
        in_cache = isinstance(try_to_load_from_cache(repo, "config.json", revision=revision), str)
        known = try_to_load_from_cache(repo, name, revision=revision) is _CACHED_NO_EXIST
        kinds = {CARD_NAME: "a saved encoder", MODULES_NAME: "a sentence-transformers model"}
        if name in kinds and in_cache and not known:
            warnings.warn(
                f"without the hub, it is unknown whether {repo} is {kinds[name]}, so it is loaded as a bare backbone. Load "
                "it once with a connection.",
                UserWarning,
                stacklevel=4,
            )
        return None
    except EntryNotFoundError:
        return None
    except HfHubHTTPError as error:
        raise refused(repo, revision, error) from error


def is_refusal(error: Exception) -> bool:
    """Return whether an error is a refusal of the hub, and not a missing connection or a busy hub."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    code = getattr(error.response, "status_code", 400) if isinstance(error, HfHubHTTPError) else 503
    return isinstance(error, HFValidationError) or (code < 500 and code != 429)


def reason(error: Exception) -> str:
    """Return the message of an error on one line, or its class name if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def refused(repo: str, revision: str | None, error: Exception) -> OSError:
    """Return the error for a repository that the hub refuses, because of a wrong name or missing access rights."""
    return OSError(
        f"the hub refuses {_name(repo, revision)}: {reason(error)} Check the name; log in for a private or gated "
        "repository (`hf auth login`)."
    )


def _name(repo: str, revision: str | None) -> str:
    """Return a hub id with its revision, for error messages."""
    return repo if revision is None else f"{repo} at revision {revision}"

"""Saved encoders on the hub: recognised by their card, fetched into the local cache, and opened from there.

A repository with `angle_llm.json` is a saved encoder, adapter or whole; any other is a backbone, which `transformers`
fetches. Of a saved encoder, only card, safetensors and tokenizer are fetched, all from one commit. Of a repository of
sentence-transformers, the files that describe its use are fetched too.
Without an answer from the hub, or with HF_HUB_OFFLINE=1, only the cache is read.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

from angle_llm.model.source.checks import (
    CARD_NAME,
    EXPORT_NAME,
    TOKENIZER_FILES,
    ArtifactError,
    check_links,
    read_json,
)
from angle_llm.model.source.sentence_transformers_folder import MODULES_NAME, USAGE_FILES

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
WHOLE_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
_NOT_A_BACKBONE = {
    EXPORT_NAME: "it was exported for another library, and its tokenizer may apply the prompt. Open it with that library.",
    "adapter_config.json": "it is an adapter without a card. Fetch it (`hf download`), and open it as "
    "from_pretrained(BASE, adapter=FOLDER, prompt=…).",
}


class HubFiles(NamedTuple):
    """Files of a repository in the local cache."""

    folder: Path | None
    """The folder of a saved encoder or of a sentence-transformers model, without weights; None for a bare backbone."""
    commit: str | None
    """The commit of the files; None if the repository has no config.json."""


def fetch_files(repo: str, revision: str | None = None) -> HubFiles:
    """Fetch the files of a saved encoder, or the files that describe a sentence-transformers model.

    Raises:
        FileNotFoundError: if the hub does not answer and the cache has no file.
        ArtifactError: for a repository that is neither encoder nor backbone, or a damaged card.
        OSError: if the hub refuses the request.
    """
    offline = _offline_reason(repo, revision)
    names = (CARD_NAME, *_NOT_A_BACKBONE, MODULES_NAME, "config.json")
    files = {name: file for name in names if (file := _fetch(repo, name, revision, cache_only=bool(offline)))}
    if offline and not files:
        raise FileNotFoundError(
            f"the model {_name(repo, revision)} is not on this machine, and the hub does not answer ({offline}). "
            "Check the path of a folder, a .gguf file or package:NAME/path; for a hub id, connect to the network."
        )
    if CARD_NAME in files:
        weights = WHOLE_FILES if read_json(files[CARD_NAME]).get("base") is None else ADAPTER_FILES
        return _snapshot(repo, files[CARD_NAME], [CARD_NAME, *weights, *TOKENIZER_FILES], bool(offline))
    for name, hint in _NOT_A_BACKBONE.items():
        if name in files:
            raise ArtifactError(f"{repo} on the hub contains {name}: {hint}")
    if MODULES_NAME in files:
        return _snapshot(repo, files[MODULES_NAME], list(USAGE_FILES), bool(offline))
    return HubFiles(None, files["config.json"].parent.name if "config.json" in files else None)


def _snapshot(repo: str, file: Path, patterns: list[str], cache_only: bool) -> HubFiles:
    """Fetch the files that match `patterns`, from the commit of an already fetched file."""
    from huggingface_hub import snapshot_download

    commit = file.parent.name
    folder = snapshot_download(repo, revision=commit, allow_patterns=patterns, local_files_only=cache_only)
    check_links(Path(folder))
    return HubFiles(Path(folder), commit)


def _offline_reason(repo: str, revision: str | None) -> str:
    """Return the reason why the hub does not answer, "" if it does. One request: otherwise each file would time out."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().model_info(repo, revision=revision, timeout=10)
    except Exception as error:  # no connection: each HTTP library has its own errors
        code = getattr(error.response, "status_code", 400) if isinstance(error, HfHubHTTPError) else 503
        if isinstance(error, HFValidationError) or (code < 500 and code != 429):
            raise _refused(repo, revision, error) from error
        return _reason(error)
    return ""


def _fetch(repo: str, name: str, revision: str | None, *, cache_only: bool) -> Path | None:
    """Return a small file of a repository, in the cache; None if it does not exist.

    Warns if the cache has the repository, but not whether it has a card.
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
                f"without the hub, it is unknown whether {repo} is {kinds[name]}: it is read as a bare backbone. Load it "
                "once with a connection.",
                UserWarning,
                stacklevel=4,
            )
        return None
    except EntryNotFoundError:
        return None
    except HfHubHTTPError as error:
        raise _refused(repo, revision, error) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _refused(repo: str, revision: str | None, error: Exception) -> OSError:
    return OSError(
        f"the hub refuses {_name(repo, revision)}: {_reason(error)} Check the name; log in for a private or gated "
        "repository (`hf auth login`)."
    )


def _name(repo: str, revision: str | None) -> str:
    return repo if revision is None else f"{repo} at revision {revision}"

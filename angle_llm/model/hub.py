"""Saved encoders on the hub: recognised by their card, fetched into the local cache, and opened from there.

A repository with `angle_llm.json` is a saved encoder, adapter or whole; any other is a backbone, which `transformers`
fetches. Of a saved encoder, only card, safetensors and tokenizer are fetched, all from one commit. Of a repository of
sentence-transformers, the files that describe its use are fetched too (`library_folder`).
Without an answer from the hub, or with HF_HUB_OFFLINE=1, only the cache is read.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

from angle_llm.model.backbone import locate
from angle_llm.model.checks import (
    CARD_NAME,
    EXPORT_NAME,
    TOKENIZER_FILES,
    ArtifactError,
    check_links,
    is_saved_encoder,
    read_json,
)
from angle_llm.model.library_folder import MODULES_NAME, USAGE_FILES, library_folder

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
WHOLE_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
_NOT_A_BACKBONE = {
    EXPORT_NAME: "it was exported for another library, and its tokenizer may apply the prompt. Open it with that library.",
    "adapter_config.json": "it is an adapter without a card. Fetch it (`hf download`), and open it as "
    "from_pretrained(BASE, adapter=FOLDER, prompt=…).",
}


class Found(NamedTuple):
    """What a name refers to."""

    folder: Path | None
    """The folder of a saved encoder on this machine; None for a bare backbone."""
    commit: str | None = None
    """The commit of a repository on the hub."""
    library: Path | None = None
    """A folder of sentence-transformers, or its files that `LibraryFolder.read` reads, on this machine."""


def find(path_or_id: str, revision: str | None = None) -> Found:
    """Resolve a name; fetch the files of a saved encoder that is on the hub and not in the cache.

    Raises:
        FileNotFoundError: if the name is neither on this machine nor a hub id, or the hub does not answer.
        ArtifactError: for a repository that is neither encoder nor backbone, or a damaged card.
        OSError: if the hub refuses the request.
    """
    if is_saved_encoder(path_or_id):
        folder = Path(path_or_id).expanduser()
        check_links(folder)
        return Found(folder)
    location = locate(path_or_id)
    if location.is_local:
        return Found(None, library=None if location.gguf_file else library_folder(location.name))
    offline = _offline_reason(path_or_id, revision)
    names = (CARD_NAME, *_NOT_A_BACKBONE, MODULES_NAME, "config.json")
    files = {name: file for name in names if (file := _fetch(path_or_id, name, revision, cache_only=bool(offline)))}
    if offline and not files:
        raise FileNotFoundError(
            f"the model {_name(path_or_id, revision)} is not on this machine, and the hub does not answer ({offline}). "
            "Check the path of a folder, a .gguf file or package:NAME/path; for a hub id, connect to the network."
        )
    if CARD_NAME in files:
        weights = WHOLE_FILES if read_json(files[CARD_NAME]).get("base") is None else ADAPTER_FILES
        folder, commit = _snapshot(path_or_id, files[CARD_NAME], [CARD_NAME, *weights, *TOKENIZER_FILES], bool(offline))
        return Found(folder, commit)
    for name, hint in _NOT_A_BACKBONE.items():
        if name in files:
            raise ArtifactError(f"{path_or_id} on the hub contains {name}: {hint}")
    if MODULES_NAME in files:
        folder, commit = _snapshot(path_or_id, files[MODULES_NAME], list(USAGE_FILES), bool(offline))
        return Found(None, commit, folder)
    return Found(None, files["config.json"].parent.name if "config.json" in files else None)


def _snapshot(repo: str, file: Path, patterns: list[str], cache_only: bool) -> tuple[Path, str]:
    """Fetch files of the commit of a fetched file; return their folder and the commit."""
    from huggingface_hub import snapshot_download

    commit = file.parent.name
    folder = snapshot_download(repo, revision=commit, allow_patterns=patterns, local_files_only=cache_only)
    check_links(Path(folder))
    return Path(folder), commit


def _offline_reason(repo: str, revision: str | None) -> str:
    """Return why the hub does not answer; empty if it does.
    One request, since otherwise each file would wait for a timeout."""
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

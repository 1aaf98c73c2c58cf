"""Fetch files of models on the hub into the local cache.

A repository with `angle_llm.json`, the card, is a saved encoder: an adapter or a whole model. Only card, safetensors
files and tokenizer are fetched, all from one commit; from an adapter of peft, its files. From a sentence-transformers
repository, those that give prompts, pooling and maximum length are fetched. Any other repository is a backbone, fetched
later by `transformers`. Without an answer from the hub, or with HF_HUB_OFFLINE=1, only the cache is read.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from angle_llm.model.source.checks import (
    CARD_NAME,
    EXPORT_NAME,
    MERGE_NAME,
    TOKENIZER_FILES,
    ArtifactError,
    read_json,
)
from angle_llm.model.source.dense import DENSE_FILES
from angle_llm.model.source.sentence_transformers_folder import MODULES_NAME, USAGE_FILES

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
WHOLE_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors")


def fetch_files(repo: str, revision: str | None = None) -> tuple[Path, str]:
    """Fetch the files of a model on the hub, except the weights of a backbone; return the folder in the cache and the commit.

    These are all files of a saved encoder or an adapter, or the files of a sentence-transformers model that give prompts,
    pooling and maximum length. `revision` is a commit, branch or tag.

    Raises:
        FileNotFoundError: if neither the hub nor the cache has a file of the model.
        ArtifactError: for a repository that is neither an encoder nor a backbone, or a damaged `angle_llm.json`.
        OSError: if the hub refuses the request.
    """
    from huggingface_hub import snapshot_download

    # Files that show what the repository contains.
    names = (CARD_NAME, EXPORT_NAME, ADAPTER_FILES[0], MODULES_NAME, "config.json")
    problems: list[str] = []
    files = {name: file for name in names if (file := _fetch(repo, name, revision, problems))}
    if not files and not problems:
        raise FileNotFoundError(
            f"{_name(repo, revision)} on the hub has no config.json and no adapter. To use a GGUF repository, download "
            "the .gguf file and give its path."
        )
    if not files:
        raise FileNotFoundError(
            f"the model {_name(repo, revision)} is not on this machine, and the hub does not answer or has no model "
            f"there{f' ({problems[0]:.300})' if problems else ''}. "
            "Check the path of a folder, a .gguf file or package:NAME/path; for a hub id, connect to the network, and unset "
            "HF_HUB_OFFLINE."
        )
    # Encoder, export, adapter, or sentence-transformers folder.
    patterns: tuple[str, ...] = ()  # none for a backbone, which `transformers` fetches
    if CARD_NAME in files:
        weights = WHOLE_FILES if read_json(files[CARD_NAME]).get("base") is None else ADAPTER_FILES
        patterns = (CARD_NAME, MERGE_NAME, *weights, *TOKENIZER_FILES, "tekken.json", *DENSE_FILES)
    elif EXPORT_NAME in files:
        raise ArtifactError(
            f"{repo} on the hub was exported for another library ({EXPORT_NAME}). Open it with that library."
        )
    elif ADAPTER_FILES[0] in files:
        patterns = (*ADAPTER_FILES, *TOKENIZER_FILES, *USAGE_FILES)
    elif MODULES_NAME in files:
        patterns = USAGE_FILES
    folder = next(iter(files.values())).parent  # all are in the folder of one commit
    if patterns:
        arguments: dict[str, Any] = {"revision": folder.name, "allow_patterns": list(patterns)}
        try:
            snapshot_download(repo, **arguments)
        except OSError:
            raise
        except Exception as error:  # as in `_fetch`
            raise _lost(repo, revision, error) from error
    return folder, folder.name


def _fetch(repo: str, name: str, revision: str | None, problems: list[str]) -> Path | None:
    """Fetch a small file of a hub repository and return its path in the cache; None if the file does not exist.

    If the hub does not answer, its error is appended to `problems`.

    A warning is issued if the hub does not answer, and the cache contains the repository, but no record of whether it has
    the file that marks a saved encoder or a sentence-transformers model.

    Raises:
        OSError: if the hub refuses the request, or the connection is lost and the file is not in the cache.
    """
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo, name, revision=revision, local_files_only=bool(problems)))
    except LocalEntryNotFoundError as error:  # also an EntryNotFoundError
        cause = error.__cause__ or error
        problems.append(f"{type(cause).__name__}: {cause}")
        in_cache = isinstance(try_to_load_from_cache(repo, "config.json", revision=revision), str)
        known_missing = try_to_load_from_cache(repo, name, revision=revision) is _CACHED_NO_EXIST
        if name in (CARD_NAME, MODULES_NAME) and in_cache and not known_missing:
            warnings.warn(
                f"without the hub, it is unknown whether {repo} has {name}, so it is loaded as a bare backbone. Load it once "
                "with a connection.",
                UserWarning,
                stacklevel=4,
            )
        return None
    except EntryNotFoundError:
        return None
    except HfHubHTTPError as error:
        raise OSError(
            f"the hub refuses {_name(repo, revision)}: {' '.join(str(error).split())} Check the name; log in for a private or "
            "gated repository (`hf auth login`)."
        ) from error
    except OSError:
        raise
    except Exception as error:  # a lost connection has a class of the HTTP library
        cached = try_to_load_from_cache(repo, name, revision=revision)
        if cached is not None:
            return Path(cached) if isinstance(cached, str) else None
        raise _lost(repo, revision, error) from error


def _lost(repo: str, revision: str | None, error: Exception) -> ConnectionError:
    """Return the error for a lost connection to the hub."""
    return ConnectionError(
        f"{_name(repo, revision)}: the connection to the hub failed ({type(error).__name__}: {error}). Check the network and "
        "proxy, and start again; HF_HUB_OFFLINE=1 reads the cache only."
    )


def _name(repo: str, revision: str | None) -> str:
    """Return a hub id with its revision, for error messages."""
    return repo if revision is None else f"{repo} at revision {revision}"

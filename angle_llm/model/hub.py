"""Saved encoders on the hub: known by their card, fetched into the local cache, and opened as the folder they are there.

A repository with `angle_llm.json` is a saved encoder, adapter or whole; any other is a bare backbone, which `transformers`
fetches. Of a saved encoder only what is read is fetched: card, weights in safetensors, tokenizer. Everything comes from one
commit, whatever happens to the repository meanwhile. If the hub cannot be reached, or with HF_HUB_OFFLINE=1, the cache alone
is asked; where it does not know whether there is a card, a warning says so.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from angle_llm.model.backbone import locate
from angle_llm.model.checks import CARD_NAME, EXPORT_NAME, ArtifactError, check_files, is_saved_encoder, read_json

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
WHOLE_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors")


@dataclass(frozen=True)
class Found:
    """What a name stands for."""

    folder: Path | None
    """Of a saved encoder, on this machine; None for a bare backbone."""
    commit: str | None = None
    """Of a repository on the hub."""


def find(path_or_id: str, revision: str | None = None) -> Found:
    """Looks a name up, and fetches the files of a saved encoder that is on the hub and not in the cache.

    Raises:
        FileNotFoundError: if there is nothing of that name on this machine, and it is no hub id, or the hub cannot be asked.
        ArtifactError: for a repository that is neither encoder nor backbone, or a damaged card.
        OSError: if the hub refuses.
    """
    if is_saved_encoder(path_or_id):
        folder = Path(path_or_id).expanduser()
        check_files(folder)
        return Found(folder)
    location = locate(path_or_id)
    if location.is_local:
        return Found(None)
    asked = _Repository.of(path_or_id, revision)
    if asked.silence and not any(map(asked.is_cached, (CARD_NAME, "config.json", *_NO_BACKBONE))):
        raise FileNotFoundError(
            f"the model {_named(path_or_id, revision)} is not on this machine, and the hub gives no answer ({asked.silence}). "
            "Connect, or name a model that is here: a folder, a .gguf file, package:NAME/path."
        )
    card = asked.file(CARD_NAME)
    if card is not None:
        folder = asked.encoder(card.parent.name, read_json(card))
        check_files(folder)
        return Found(folder, card.parent.name)
    config = asked.file("config.json")
    for name, hint in _NO_BACKBONE.items():
        if asked.file(name) is not None:
            raise ArtifactError(f"{path_or_id} on the hub holds {name}: {hint}")
    return Found(None, None if config is None else config.parent.name)


_NO_BACKBONE = {
    EXPORT_NAME: "it was exported for another library, and its tokenizer words texts, so here they would be worded twice. "
    "Open it with that library.",
    "adapter_config.json": "it is an adapter without a card. Fetch it (`hf download`), and open it as "
    "from_pretrained(BASE, adapter=FOLDER, prompt=…).",
}


@dataclass(frozen=True)
class _Repository:
    """A repository of the hub, or what the cache has of it."""

    name: str
    revision: str | None
    silence: str = ""
    """Why the hub gives no answer; the cache alone is asked then."""

    @property
    def cache_only(self) -> bool:
        """Whether the hub is not asked."""
        return bool(self.silence)

    @classmethod
    def of(cls, name: str, revision: str | None) -> _Repository:
        """Asks the hub for it once, to know whether it can be reached: each file would be asked for again and again."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            HfApi().model_info(name, revision=revision, timeout=10)
        except HfHubHTTPError as error:
            busy = error.response is not None and (
                error.response.status_code >= 500 or error.response.status_code == 429
            )
            if not busy:
                raise _refused(name, revision, error) from error
            return cls(name, revision, _reason(error))
        except HFValidationError as error:
            raise _refused(name, revision, error) from error
        except Exception as error:  # no connection: each HTTP library has errors of its own
            return cls(name, revision, _reason(error))
        return cls(name, revision)

    def is_cached(self, name: str) -> bool:
        """Whether the cache has this file of it."""
        from huggingface_hub import try_to_load_from_cache

        return isinstance(try_to_load_from_cache(self.name, name, revision=self.revision), str)

    def encoder(self, commit: str, card: dict[str, Any]) -> Path:
        """The folder of a saved encoder's files."""
        from huggingface_hub import snapshot_download

        weights = WHOLE_FILES if card.get("base") is None else ADAPTER_FILES
        patterns = [CARD_NAME, *weights, *TOKENIZER_FILES]
        kept = self.cache_only
        return Path(snapshot_download(self.name, revision=commit, allow_patterns=patterns, local_files_only=kept))

    def file(self, name: str) -> Path | None:
        """A small file of it, in the cache; None if the repository, or the cache where it alone is asked, does not have it.

        Warns if the hub could not be asked for a card, and never was.
        """
        from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

        try:
            return Path(hf_hub_download(self.name, name, revision=self.revision, local_files_only=self.cache_only))
        except LocalEntryNotFoundError:  # an EntryNotFoundError too, but nobody said that there is none
            known = try_to_load_from_cache(self.name, name, revision=self.revision)
            if name == CARD_NAME and known is not _CACHED_NO_EXIST:
                warnings.warn(
                    f"the hub could not be asked whether {self.name} is a saved encoder, and the cache does not know; it is read "
                    "as a bare backbone. Connect once when you can, to know.",
                    UserWarning,
                    stacklevel=4,
                )
            return None
        except EntryNotFoundError:
            return None
        except HfHubHTTPError as error:
            raise _refused(self.name, self.revision, error) from error


def _named(repo: str, revision: str | None) -> str:
    return repo if revision is None else f"{repo} at revision {revision}"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _refused(repo: str, revision: str | None, error: Exception) -> OSError:
    return OSError(
        f"the hub does not give {_named(repo, revision)}: {_reason(error)} Look at the name; "
        "of a private or gated repository, log in (`hf auth login`)."
    )

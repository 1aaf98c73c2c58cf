"""Upload a saved encoder to the hub: an adapter, a whole or merged model, or a sentence-transformers folder.

    folder ──► complete, verified, no pickles, no local paths? ──► card ──► one commit

One commit holds everything; the folder itself is not changed. In the repository, files of kinds that a push writes
(weights, configurations, tokenizer, cards: `is_ours`) are replaced, and deleted if this push has none of that name;
other files are kept. The token is that of `hf auth login` or HF_TOKEN; it is no argument and is never printed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Any

import yaml

from angle_llm.export.card import SETTINGS_PATH_KEYS, CardFacts, is_on_hub, model_card, read_scores, without_paths
from angle_llm.export.commands import PushSettings
from angle_llm.export.library import MODULES_NAME, ExportFacts
from angle_llm.export.merge import REPORT_NAME
from angle_llm.export.verify import MERGE_NAME
from angle_llm.model.artifact import EncoderCard
from angle_llm.model.checks import (
    CARD_NAME,
    EXPORT_NAME,
    TOKENIZER_FILES,
    ArtifactError,
    check_links,
    check_model_files,
    is_saved_encoder,
    read_json,
)
from angle_llm.model.hub import ADAPTER_FILES, WHOLE_FILES

_PUSHED = {".json", ".safetensors", ".txt", ".model"}
_LARGE_JSON = {"tokenizer.json", "vocab.json", "model.safetensors.index.json"}
"""Files without paths, uploaded unchanged."""
_HUBS_OWN = {".gitattributes", "README.md"}
_OURS = (
    CARD_NAME, EXPORT_NAME, MERGE_NAME, REPORT_NAME, *ADAPTER_FILES, *WHOLE_FILES, *TOKENIZER_FILES, MODULES_NAME,
    "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json",
)  # fmt: skip
"""Files of all forms of an encoder: patterns of paths in a repository."""


class PushError(RuntimeError):
    """The upload failed; no file was changed on the hub. A new repository may exist, empty."""


@dataclass(frozen=True)
class Parcel:
    """Files and card of an upload."""

    files: dict[str, Path | bytes]
    """Path in the repository → file or content."""
    skipped: tuple[str, ...]
    facts: CardFacts


def push(settings: PushSettings) -> str:
    """Upload the encoder; return what to print: its address, or with `dry_run` its files and card.

    Raises:
        ArtifactError, ValueError: see `pack`.
        PushError: if the repository holds something else, or the hub refuses or is not reachable.
    """
    parcel = pack(settings)
    skipped = f"skipped: {', '.join(parcel.skipped)}\n" if parcel.skipped else ""
    if settings.dry_run:
        files = "\n".join(sorted([*parcel.files, "README.md"]))
        replaced = f"Files of an earlier push with these names are deleted if this push has none: {', '.join(_OURS)}"
        return f"{skipped}{files}\n\n{replaced}\n\n{model_card(parcel.facts)}\nNothing was uploaded: --dry-run."
    url = send(parcel, settings.repo, private=not settings.public)
    library = (
        "SentenceTransformer" if parcel.facts.form == "sentence-transformers" else "SentenceEncoder.from_pretrained"
    )
    return f"{skipped}Uploaded to {url}. To use it: {library}({settings.repo!r})"


def pack(settings: PushSettings) -> Parcel:
    """Collect the files of an upload; reads local files only.

    Raises:
        ArtifactError: for a folder that is not a complete encoder, an adapter on a local base, or one that was not
        verified. ValueError: for a name other than USER/NAME, or results that cannot be read.
    """
    folder = settings.folder.expanduser()
    if settings.repo.count("/") != 1 or not all(settings.repo.split("/")):
        raise ValueError(f"push: expected a repository USER/NAME, got {settings.repo!r}.")
    facts = _facts(folder, settings)
    check_links(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sent, skipped = {}, []
    for path in paths:
        name = path.relative_to(folder).as_posix()
        hidden = any(part.startswith(".") for part in PurePath(name).parts)
        if path.suffix in _PUSHED and not hidden and path.name != REPORT_NAME:
            sent[name] = _content(path, facts)
        elif path.name not in (REPORT_NAME, "README.md"):
            skipped.append(name)
    return Parcel(sent, tuple(skipped), facts)


def _content(path: Path, facts: CardFacts) -> Path | bytes:
    """A file as it is uploaded: with the base name of the card and without local paths."""
    if path.suffix != ".json" or path.name in _LARGE_JSON:
        return path
    try:
        values: Any = json.loads(path.read_bytes())
    except ValueError as error:
        raise ArtifactError(f"{path} is not valid JSON ({error}). Save the encoder again.") from error
    cleaned = without_paths(values)
    if path.name == "adapter_config.json" and facts.base is not None:
        cleaned |= {"base_model_name_or_path": facts.base, "revision": facts.base_revision}
    if cleaned == values:
        return path
    return (json.dumps(cleaned, indent=2, ensure_ascii=False) + "\n").encode()


def _facts(folder: Path, settings: PushSettings) -> CardFacts:
    run = _run_of(folder) if settings.run is None else settings.run
    given: dict[str, Any] = {"settings": None, "scores": ()}
    if run is not None:
        given = {"settings": _settings_of(run), "scores": _scores_of_run(run)}
    if settings.results is not None:
        given["scores"] = read_scores(settings.results)
    exported = ExportFacts.read(folder)
    if exported is None and not is_saved_encoder(folder):
        inside = folder / "model"
        hint = f" {inside} is one." if is_saved_encoder(inside) else ""
        raise ArtifactError(
            f"{folder} is neither a saved encoder ({CARD_NAME}) nor an exported one ({EXPORT_NAME}).{hint}"
        )
    merged = read_json(folder / MERGE_NAME) if (folder / MERGE_NAME).is_file() else {}
    report = read_json(folder / REPORT_NAME) if (folder / REPORT_NAME).is_file() else None
    if (merged or exported) and not settings.unverified and (report is None or report.get("holds") is not True):
        raise ArtifactError(
            f"{folder} was not verified against its origin. Make it again without --no-verify, or push it with "
            "--unverified."
        )
    base, revision = merged.get("base"), merged.get("base_revision")
    given["origin"] = merged or None
    if exported is not None:
        check_model_files(folder)
        return CardFacts("sentence-transformers", settings.repo, exported.prompt, exported.pooling, exported.max_length, base,
            revision, verification=report, license=None, **given)  # fmt: skip
    card = EncoderCard.read(folder)
    usage: dict[str, Any] = {
        "prompt": card.prompt, "pooling": card.pooling, "max_length": card.max_length, "dimensions": card.dimensions,
        "layers": card.layers, "verification": report,
    }  # fmt: skip
    if card.base is None:
        check_model_files(folder)
        return CardFacts("whole", settings.repo, base=base, base_revision=revision, **usage, **given)
    if PurePath(card.base).is_absolute() or Path(card.base).expanduser().exists():
        raise ArtifactError(
            f"the base of the adapter in {folder} is {card.base}, a path on this machine. Merge it and push the whole model "
            f"(angle-llm merge {settings.folder} OUT), or train on a base from the hub."
        )
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise ArtifactError(f"{folder} holds no {name}. Save the encoder again.")
    return CardFacts("adapter", settings.repo, base=card.base, base_revision=card.base_revision, **usage, **given)


def _run_of(folder: Path) -> Path | None:
    parent = folder.resolve().parent
    return parent if (parent / "settings.yaml").is_file() else None


def _settings_of(run: Path) -> dict[str, Any] | None:
    try:
        values = yaml.safe_load((run / "settings.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"--run: expected a run directory with settings.yaml, got {run} ({error}).") from error
    return dict(without_paths(values, SETTINGS_PATH_KEYS)) if isinstance(values, dict) else None


def _scores_of_run(run: Path) -> tuple[tuple[str, float], ...]:
    """The evaluation before the first step, and the best one after, which is that of the saved model."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return ()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    measured = [(line["step"], float(line["evaluation"])) for line in lines if "evaluation" in line]
    before = [("evaluation during training, before the first step", score) for step, score in measured if step == 0]
    after = [score for step, score in measured if step > 0]
    return (*before[:1], *([("evaluation during training, of the saved model", max(after))] if after else []))


def is_ours(name: str) -> bool:
    """Whether a push writes files with this path, so that a later push may delete it."""
    return any(name.count("/") == pattern.count("/") and fnmatch(name, pattern) for pattern in _OURS)


def send(parcel: Parcel, repo: str, *, private: bool) -> str:
    """Create the repository if needed, upload everything in one commit, and return its address.

    Files of an earlier push that this one does not have are deleted (`is_ours`); other files are kept.

    Raises:
        PushError: if the repository holds something else, or the hub refuses or is not reachable.
    """
    from dataclasses import replace

    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi(library_name="angle_llm")
    made = ""
    try:
        api.whoami()
        there = set(api.list_repo_files(repo)) if api.repo_exists(repo) else None
        if there and not there <= _HUBS_OWN and not there & {CARD_NAME, EXPORT_NAME}:
            some = ", ".join(sorted(there - _HUBS_OWN)[:3])
            raise PushError(f"{repo} holds other files ({some} …). Choose another name.")
        readme = model_card(replace(parcel.facts, license=_license(api, parcel.facts.base)))
        if there is None:
            api.create_repo(repo, private=private)
            made = f" The repository {repo} was created and is empty."
        add = [CommitOperationAdd(name, content) for name, content in sorted(parcel.files.items())]
        gone = [CommitOperationDelete(name) for name in sorted((there or set()) - parcel.files.keys()) if is_ours(name)]
        done = api.create_commit(
            repo,
            [*add, CommitOperationAdd("README.md", readme.encode()), *gone],
            commit_message=f"Sentence encoder ({parcel.facts.form}) by angle_llm",
        )
    except PushError:
        raise
    except LocalTokenNotFoundError as error:
        raise PushError("push needs a hub token: log in (`hf auth login`), or set HF_TOKEN.") from error
    except OfflineModeIsEnabled as error:
        raise PushError("HF_HUB_OFFLINE is set. Unset it to push.") from error
    except Exception as error:  # HTTP and connection errors of the libraries have no common class
        status = getattr(getattr(error, "response", None), "status_code", 0)
        reason = " ".join(f"{error} {error.__cause__ or ''}".split())
        hint = _HINTS.get(status, "" if 0 < status < 500 else "Try again when the hub is reachable.")
        raise PushError(f"{repo} was not uploaded: {reason} {hint} No local file was changed.{made}") from error
    return str(done.commit_url)


_HINTS = {
    401: "The token is missing or not valid: log in (`hf auth login`), or set HF_TOKEN.",
    403: "The token has no write access: create one that has, or name one of your repositories.",
}


def _license(api: Any, base: str | None) -> str | None:
    """The license on the card of the base; None if it has none, or is not on the hub."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if base is None or not is_on_hub(base) or "/" not in base:
        return None
    try:
        data = api.model_info(base).card_data
    except (HfHubHTTPError, HFValidationError):
        return None
    found = None if data is None else data.get("license")
    return found if isinstance(found, str) else None

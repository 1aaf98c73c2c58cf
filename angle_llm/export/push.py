"""A saved encoder put on the hub, in any of its forms: an adapter, a whole or merged model, a sentence-transformers folder.

    folder ──► is it whole, verified, free of pickles and of this machine's paths? ──► card ──► one commit

One commit holds everything, or no file is changed; what lies in the folder is never written to. In the repository, files of
kinds that a push writes (weights, configurations, tokenizer, cards: see `is_ours`) are replaced, and deleted where this push
has none of that name; all others stay. The token is the one of
`hf auth login` or HF_TOKEN: it is no argument, is not read here, and is not told.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Annotated, Any

import tyro
import yaml

from angle_llm.export.hub_card import SETTINGS_PLACES, CardFacts, hub_card, is_on_hub, scores_of, without_places
from angle_llm.export.library import MODULES_NAME, ExportFacts
from angle_llm.export.merge import REPORT_NAME
from angle_llm.export.verify import MERGE_NAME
from angle_llm.model.artifact import EncoderCard
from angle_llm.model.checks import (
    CARD_NAME,
    EXPORT_NAME,
    ArtifactError,
    check_files,
    check_model_files,
    is_saved_encoder,
    read_json,
)
from angle_llm.model.hub import ADAPTER_FILES, TOKENIZER_FILES, WHOLE_FILES

_PUSHED = {".json", ".safetensors", ".txt", ".model"}
_LARGE_JSON = {"tokenizer.json", "vocab.json", "model.safetensors.index.json"}
"""Of these no value is a path, and they go as they are."""
_HUBS_OWN = {".gitattributes", "README.md"}
_OURS = (
    CARD_NAME, EXPORT_NAME, MERGE_NAME, REPORT_NAME, *ADAPTER_FILES, *WHOLE_FILES, *TOKENIZER_FILES, MODULES_NAME,
    "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json",
)  # fmt: skip
"""What the forms of an encoder consist of: patterns of paths in a repository."""


class PushError(RuntimeError):
    """The hub did not take it; no file was changed there, nothing is lost here. A new repository may be there, empty."""


@dataclass(frozen=True)
class PushSettings:
    """What `angle-llm push` sends, and where."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """A saved encoder: the model directory of a run, a merged model, or what `angle-llm export` wrote."""
    repo: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="USER/NAME")]
    """The repository on the hub. It is made if it is not there, and must hold an encoder of ours if it is, whose files are
    replaced; others stay."""
    run: Path | None = None
    """The run directory whose settings and scores go into the card. None: the one the folder lies in, if it does."""
    results: Path | None = None
    """A file that `angle-llm eval --json` wrote; its figures go into the card."""
    public: bool = False
    """Make a new repository public. Else it is private."""
    unverified: bool = False
    """Push a merged or exported folder even if it was not compared with what it was made from."""
    dry_run: bool = False
    """Show the files and the card. Nothing reaches the network."""


@dataclass(frozen=True)
class Parcel:
    """What would be pushed."""

    files: dict[str, Path | bytes]
    """By their path in the repository."""
    left_out: tuple[str, ...]
    facts: CardFacts


def push_main(settings: PushSettings) -> None:
    """Pushes, and says where it lies."""
    parcel = pack(settings)
    if parcel.left_out:
        print(f"left out: {', '.join(parcel.left_out)}")
    if settings.dry_run:
        print("\n".join(sorted([*parcel.files, "README.md"])))
        print(
            "\nOf an encoder that is there already, files of these names go where this push has none: "
            + ", ".join(_OURS)
        )
        print(f"\n{hub_card(parcel.facts)}\nNothing was pushed: --dry-run.")
        return
    url = send(parcel, settings.repo, private=not settings.public)
    print(f"The encoder lies at {url}. To use it: SentenceEncoder.from_pretrained({settings.repo!r})"
          if parcel.facts.form != "sentence-transformers"
          else f"The encoder lies at {url}. To use it: SentenceTransformer({settings.repo!r})")  # fmt: skip


def pack(settings: PushSettings) -> Parcel:
    """Looks through the folder, and gathers what is to be sent; reads nothing but files of this machine.

    Raises:
        ArtifactError: for a folder that is no sound encoder, an adapter whose base nobody else has, or one not verified.
        ValueError: for a name that is no USER/NAME, or results that cannot be read.
    """
    folder = settings.folder.expanduser()
    if settings.repo.count("/") != 1 or not all(settings.repo.split("/")):
        raise ValueError(f"push needs a repository as USER/NAME, got {settings.repo!r}.")
    facts = _facts(folder, settings)
    check_files(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sent, left_out = {}, []
    for path in paths:
        name = path.relative_to(folder).as_posix()
        hidden = any(part.startswith(".") for part in PurePath(name).parts)
        if path.suffix in _PUSHED and not hidden and path.name != REPORT_NAME:
            sent[name] = _content(path, facts)
        elif path.name not in (REPORT_NAME, "README.md"):
            left_out.append(name)
    return Parcel(sent, tuple(left_out), facts)


def _content(path: Path, facts: CardFacts) -> Path | bytes:
    """A file as it is sent: the base by the name the card has for it, and no place on this machine."""
    if path.suffix != ".json" or path.name in _LARGE_JSON:
        return path
    try:
        values: Any = json.loads(path.read_bytes())
    except ValueError as error:
        raise ArtifactError(f"{path} is not valid JSON ({error}). Save the encoder again.") from error
    cleaned = without_places(values)
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
        given["scores"] = scores_of(settings.results)
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
            f"{folder} was not compared with what it was made from, so nobody knows that it is the same encoder. Make it again "
            "without --no-verify, or push it --unverified."
        )
    base, revision = merged.get("base"), merged.get("base_revision")
    if exported is not None:
        check_model_files(folder)
        return CardFacts("sentence-transformers", settings.repo, exported.prompt, exported.pooling, exported.max_length, base,
            revision, verification=report, licence=None, **given)  # fmt: skip
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
            f"the adapter in {folder} goes on {card.base}, a place on this machine, where nobody else finds it. Merge it and "
            f"push the whole model (angle-llm merge {settings.folder} OUT), or train on a base from the hub."
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
        raise ValueError(f"--run needs a run directory with settings.yaml; {run} is none ({error}).") from error
    return dict(without_places(values, SETTINGS_PLACES)) if isinstance(values, dict) else None


def _scores_of_run(run: Path) -> tuple[tuple[str, float], ...]:
    """The evaluation before the first step, and the best one after: that of the model which is kept."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return ()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    measured = [(line["step"], float(line["evaluation"])) for line in lines if "evaluation" in line]
    before = [("evaluation during training, before the first step", score) for step, score in measured if step == 0]
    after = [score for step, score in measured if step > 0]
    return (*before[:1], *([("evaluation during training, of the model kept", max(after))] if after else []))


def is_ours(name: str) -> bool:
    """Whether a path in a repository is of a kind that a push writes, so that a later push may delete it."""
    return any(name.count("/") == pattern.count("/") and fnmatch(name, pattern) for pattern in _OURS)


def send(parcel: Parcel, repo: str, *, private: bool) -> str:
    """Makes the repository if need be, and everything in it one commit; returns its address.

    What an earlier push wrote and this one does not is deleted (`is_ours`); everything else in the repository stays.

    Raises:
        PushError: if the repository holds something else, or the hub refuses or is not there.
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
            raise PushError(f"{repo} holds something else ({some} …), which is left alone. Choose another name.")
        readme = hub_card(replace(parcel.facts, licence=_licence(api, parcel.facts.base)))
        if there is None:
            api.create_repo(repo, private=private)
            made = f" The repository {repo} was made, and is empty."
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
        raise PushError("pushing needs a token of the hub: log in (`hf auth login`), or set HF_TOKEN.") from error
    except OfflineModeIsEnabled as error:
        raise PushError("HF_HUB_OFFLINE is set, so nothing reaches the hub. Unset it to push.") from error
    except Exception as error:  # of the libraries below: HTTP and connection errors have no common class
        status = getattr(getattr(error, "response", None), "status_code", 0)
        reason = " ".join(f"{error} {error.__cause__ or ''}".split())
        hint = _HINTS.get(status, "" if 0 < status < 500 else "Try again when the hub can be reached.")
        raise PushError(f"{repo} was not pushed: {reason} {hint} Nothing here was changed.{made}") from error
    return str(done.commit_url)


_HINTS = {
    401: "The token is missing or not valid: log in (`hf auth login`), or set HF_TOKEN.",
    403: "The token may not write there: make one that may, or name a repository of yours.",
}


def _licence(api: Any, base: str | None) -> str | None:
    """The licence on the base's own card; None if it has none, or is not on the hub."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if base is None or not is_on_hub(base) or "/" not in base:
        return None
    try:
        data = api.model_info(base).card_data
    except (HfHubHTTPError, HFValidationError):
        return None
    found = None if data is None else data.get("license")
    return found if isinstance(found, str) else None

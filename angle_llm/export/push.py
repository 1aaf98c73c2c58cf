"""Upload a saved encoder to the hub: an adapter, a whole or merged model, or an exported folder.

    folder ──► complete, verified, no pickles, no local paths? ──► model card ──► one commit

The upload is one commit, and the local folder is not changed. A push uploads the files of an encoder (`_ENCODER_FILES`),
and deletes such files of an earlier push if the new encoder does not have them. It keeps all other files of the
repository. The token comes from `hf auth login` or HF_TOKEN; it is not an argument and is never printed.
"""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from angle_llm.export.card import REPORT_NAME, CardFacts, file_name, model_card
from angle_llm.export.exported_folder import LIBRARY
from angle_llm.export.formats.llama_cpp import GGUF_NAME, USAGE_NAME
from angle_llm.export.formats.onnx_folder import GRAPH_NAME
from angle_llm.model.source.checks import (
    CARD_NAME,
    EXPORT_NAME,
    MERGE_NAME,
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    ArtifactError,
    as_artifact_error,
    check_links,
    check_model_files,
    read_json,
)
from angle_llm.model.source.dense import DENSE_FILES
from angle_llm.model.source.hub import ADAPTER_FILES, WHOLE_FILES
from angle_llm.model.source.resolve import PACKAGE_SCHEME, is_hub_id, split_revision
from angle_llm.model.source.sentence_transformers_folder import MODULES_NAME
from angle_llm.settings.export import PushSettings
from angle_llm.settings.parsing import PASSED

_ENCODER_FILES = (
    CARD_NAME, EXPORT_NAME, MERGE_NAME, REPORT_NAME, *ADAPTER_FILES, *WHOLE_FILES, *PROCESSOR_FILES, *TOKENIZER_FILES,
    MODULES_NAME, "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json", *DENSE_FILES,
    f"{GRAPH_NAME}*", GGUF_NAME, USAGE_NAME, "tekken.json",
)  # fmt: skip
"""Patterns of the paths of an encoder's files in its folder and in a repository."""
_PATH_KEYS = frozenset({
    "_name_or_path", "name_or_path", "base_model_name_or_path", "base", "folder", "path", "name", "tokenizer_file",
    "vocab_file", "merges_file", "special_tokens_map_file",
})  # fmt: skip
"""Keys in JSON files whose value can be a local path."""


class PushError(RuntimeError):
    """Error for a failed upload. No file on the hub changed, but a new, empty repository can exist."""


def push(settings: PushSettings) -> str:
    """Upload a saved or exported encoder to the hub, and return the text to print.

    The text has the address of the upload; with `dry_run` it has the file names and the model card, and nothing is
    uploaded.

    Raises:
        ArtifactError: for an incomplete encoder, an adapter on a local base, or a folder that was not verified.
        ValueError: for a repository name other than USER/NAME, or a run directory or results file that cannot be read.
        PushError: if the repository contains other files, or the hub refuses or is not reachable.
    """
    # Facts for the model card.
    folder, repo = settings.folder.expanduser(), settings.repo
    if repo.count("/") != 1 or not all(repo.split("/")):
        raise ValueError(f"push: expected a repository USER/NAME, got {repo!r}.")
    facts = CardFacts.read(folder)
    base_path, card_arguments = _training(settings, folder, facts)
    if facts.base is None and base_path:
        base, revision = split_revision(base_path)
        facts = replace(facts, base=base, revision=revision)
    _check(facts, folder)
    # Files to upload.
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    for name in (REPORT_NAME, "README.md"):
        paths.pop(name, None)
    files = {name: _content(path, facts) for name, path in paths.items() if _is_encoder_file(name)}
    skipped = ", ".join(name for name in paths if name not in files)
    lines = [f"skipped: {skipped}"] if skipped else []
    # Upload, or a list of the files.
    if settings.dry_run:
        lines += [*sorted([*files, "README.md"]), "", model_card(facts, repo, **card_arguments)]
        lines.append("Nothing was uploaded: --dry-run.")
        return "\n".join(lines)
    url = _upload(files, facts, repo, card_arguments, private=not settings.public)
    return "\n".join([*lines, f"Uploaded to {url}. Its model card shows how to use it."])


def _check(facts: CardFacts, folder: Path) -> None:
    """Check that other users can open the encoder in `folder`, and that a merged or exported encoder was verified.

    Verified means that the encoder was compared with the encoder that it was made from.

    Raises:
        ArtifactError: if a check fails.
    """
    check_links(folder)
    if facts.form in ("whole", LIBRARY):
        check_model_files(folder)
    is_made = facts.form != "adapter" and (facts.origin or facts.form != "whole")
    if is_made and facts.report.get("holds") is not True:
        raise ArtifactError(
            f"{folder} was not compared with the encoder it was made from. Write it again without --no-verify."
        )
    if facts.form != "adapter":
        return
    if not (is_hub_id(facts.base) or (facts.base or "").startswith(PACKAGE_SCHEME)):
        raise ArtifactError(
            f"the base of the adapter in {folder} is {facts.base}, a path on this machine. Merge it and push the whole "
            f"model (angle-llm merge {folder} OUT), or train on a base from the hub."
        )
    for name in ADAPTER_FILES:
        if not (folder / name).is_file():
            raise ArtifactError(f"{folder} has no {name}. Save the encoder again.")


def _content(path: Path, facts: CardFacts) -> Path | bytes:
    """Return the content of a file for the upload: the path of an unchanged file, or bytes without local paths.

    In `adapter_config.json`, the base model becomes the base in the encoder card (`facts`).
    """
    if path.suffix != ".json" or path.name == MODULES_NAME:
        return path
    values = read_json(path)
    cleaned = _without_paths(values, _PATH_KEYS)
    if path.name == "adapter_config.json":
        cleaned |= {"base_model_name_or_path": facts.base, "revision": facts.revision}
    if cleaned == values:
        return path
    # Infinity and lone surrogates are kept, as transformers writes and reads them.
    return json.dumps(cleaned, indent=2, ensure_ascii=False).encode(errors="backslashreplace")


def _without_paths(value: Any, keys: Container[str] | None = None, key: str = "") -> Any:
    """Return a copy of a JSON value in which absolute local paths are shortened to their last part.

    `keys` are the keys whose strings can be paths; None: all keys. With `keys`, objects under `prompt` and `prompts` are
    kept, because a prompt can look like a path. `key` is the key of `value`. A string can be a list of paths: `data.path`.
    """
    if isinstance(value, dict) and (keys is None or key not in ("prompt", "prompts")):
        return {name: _without_paths(item, keys, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item, keys) for item in value]
    if not isinstance(value, str) or (keys is not None and key not in keys):
        return value
    return ",".join(file_name(part.strip()) for part in value.split(",")) if keys is None else file_name(value)


def _training(settings: PushSettings, folder: Path, facts: CardFacts) -> tuple[str | None, dict[str, Any]]:
    """Return the base of the run, and the arguments `settings` and `scores` of `model_card`.

    The run directory is `--run`, or the parent of `folder` if it has settings.yaml and metrics.jsonl. The results file is
    `--results`. The scores in a run directory belong to its `model` and what was made from it alone, not to other encoders.

    Raises:
        ValueError: if the run directory or the results file cannot be read.
    """
    run = None if settings.run is None else settings.run.expanduser()
    parent = folder.resolve().parent
    if run is None and all((parent / name).is_file() for name in ("settings.yaml", "metrics.jsonl")):
        run = parent
    base: str | None = None
    card_arguments: dict[str, Any] = {}
    if run is not None:
        with as_artifact_error(f"--run {run}"):
            text = (run / "settings.yaml").read_text(encoding="utf-8")
            stored = yaml.safe_load(text) or {}
            base = stored.get("model", {}).get("path")
            first = text.partition("\n")[0]
            passed = {"passed_in_python": first.removeprefix(PASSED)} if first.startswith(PASSED) else {}
            card_arguments["settings"] = passed | _without_paths(stored)
        best = read_json(run / "best.json") if (run / "best.json").is_file() else {}
        is_made = facts.origin or facts.form not in ("adapter", "whole")
        is_other = parent == run.resolve() and folder.resolve().name != "model" and not is_made
        if best and not (is_other or facts.origin.get("parts")):
            name, score = next(iter(best.items()))  # the first metric selects the best model
            task, _, metric = name.rpartition("/")
            tasks = (stored.get("evaluation") or {}).get("tasks") or ()
            if f"function:{task}" not in tasks:  # its value has an unknown scale
                card_arguments["scores"] = [(f"{task} during training, of the saved model", metric, float(score))]
    if settings.results is not None:
        card_arguments["scores"] = _read_scores(settings.results.expanduser())
    return base, card_arguments


def _read_scores(path: Path) -> list[tuple[str, str, float]]:
    """Read scores (task, metric, value) from a JSON file of `eval sts --json` or `eval retrieval --json`.

    STS: Spearman of each task. Retrieval: the main metric of each task.

    Raises:
        ValueError: if the file cannot be read or has other content.
    """
    scores: list[tuple[str, str, float]] = []
    with as_artifact_error(f"--results {path}"):
        for name, task in read_json(path)["tasks"].items():
            if "metrics" in task:
                metric, values = next(iter(task["metrics"].items()))
                scores.append((name, metric, float(values["value"])))
            elif task["spearman"] is not None:
                scores.append((f"{name} ({task['variant']})", "spearman", float(task["spearman"])))
    return scores


def _is_encoder_file(name: str) -> bool:
    """Return whether a path, relative to the folder or repository, is the path of an encoder's file."""
    return any(name.count("/") == pattern.count("/") and fnmatch(name, pattern) for pattern in _ENCODER_FILES)


def _upload(
    files: dict[str, Path | bytes], facts: CardFacts, repo: str, card_arguments: dict[str, Any], *, private: bool
) -> str:
    """Upload files and model card to the hub in one commit, and return the address of the commit.

    `files` maps repository paths to local paths or contents; `card_arguments` are more arguments of `model_card`. The repository
    `repo` is created if needed. The files of an earlier encoder that are not replaced are deleted; other files are kept.

    Raises:
        PushError: if the repository contains other files, or the hub refuses or is not reachable.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(library_name="angle_llm")
    try:
        api.whoami()
        existing = set(api.list_repo_files(repo)) if api.repo_exists(repo) else set()
        # The hub creates two files in a new repository.
        foreign = sorted(existing - {".gitattributes", "README.md"})
        if foreign and existing.isdisjoint([CARD_NAME, EXPORT_NAME, USAGE_NAME]):
            raise PushError(f"{repo} contains other files ({', '.join(foreign[:3])} …). Choose another name.")
        readme = model_card(facts, repo, license=_license(api, facts.base), **card_arguments)
        if not existing:
            api.create_repo(repo, private=private, exist_ok=True)
        deleted = sorted(name for name in existing - files.keys() if _is_encoder_file(name))
        commit = api.create_commit(
            repo,
            [
                *(CommitOperationAdd(name, content) for name, content in files.items()),
                CommitOperationAdd("README.md", readme.encode()),
                *map(CommitOperationDelete, deleted),
            ],
            commit_message=f"Sentence encoder ({facts.form}) by angle_llm",
        )
    except PushError:
        raise
    except Exception as error:  # HTTP and connection errors of the libraries have no common class
        raise PushError(
            f"{repo} was not uploaded: {error} {error.__cause__ or ''}\nA push needs a connection, and a token with write access "
            "(`hf auth login`, or HF_TOKEN). No local file was changed."
        ) from error
    return str(commit.commit_url)


def _license(api: Any, base: str | None) -> str | None:
    """Return the license that the hub's model card of a base model names; None if it is unknown."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if base is None or not is_hub_id(base):
        return None
    try:
        return getattr(api.model_info(base).card_data, "license", None)
    except (HfHubHTTPError, HFValidationError):
        return None

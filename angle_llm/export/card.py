"""The README.md of a saved encoder in any form: usage, prompt, results, training settings, verification, license.

Written by `merge` and `export`, and with results and settings by `push`. A value that is not known is reported as
missing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

import yaml

from angle_llm import __version__
from angle_llm.prompts import PromptTemplate

Form = Literal["adapter", "whole", "sentence-transformers"]

PATH_KEYS = frozenset({
    "_name_or_path", "name_or_path", "base_model_name_or_path", "base", "folder", "path", "name", "tokenizer_file",
    "vocab_file", "merges_file", "special_tokens_map_file",
})  # fmt: skip
"""Keys of JSON files that may hold a path of the machine that wrote them."""
SETTINGS_PATH_KEYS = PATH_KEYS | {"run_dir", "prompt", "pairs", "resume", "config"}
"""The same for settings.yaml, where a prompt is a name or a file."""

_POOLED = {
    "last": "states[0, -1]", "cls": "states[0, 0]", "mean": "states[0].mean(0)", "last-avg": "states[0].mean(0)",
    "last-max": "states[0].amax(0)", "cls-last-avg": "(states[0, 0] + states[0].mean(0)) / 2",
}  # fmt: skip


@dataclass(frozen=True)
class CardFacts:
    """Everything that the card of an encoder reports; None is unknown."""

    form: Form
    repo: str
    """Repository or folder name."""
    prompt: PromptTemplate
    pooling: str
    max_length: int
    base: str | None
    base_revision: str | None
    dimensions: int | None = None
    """Leading dimensions that are kept; None: all."""
    layers: int | None = None
    """Leading layers that are computed; None: all."""
    license: str | None = None
    """License of the base, from its card on the hub."""
    verification: dict[str, Any] | None = None
    """verification.json of the folder."""
    settings: dict[str, Any] | None = None
    """settings.yaml of the run."""
    scores: tuple[tuple[str, float], ...] = ()
    """Name and Spearman × 100 of each evaluation."""
    origin: dict[str, Any] | None = None
    """merge.json of the folder."""
    plain_names: tuple[str, ...] = ()
    """Added tokens that the exported tokenizer reads as plain characters."""


def model_card(facts: CardFacts) -> str:
    """Markdown with the metadata that the hub reads, evaluation results included."""
    from huggingface_hub import EvalResult, ModelCardData

    name = facts.repo.rpartition("/")[2]
    results = [
        EvalResult("sentence-similarity", task, task, "spearman", score, metric_name="Spearman x 100")
        for task, score in facts.scores
    ]
    data = ModelCardData(
        library_name="sentence-transformers" if facts.form == "sentence-transformers" else "angle_llm",
        pipeline_tag="sentence-similarity",
        tags=["sentence-embeddings", "angle_llm"],
        base_model=facts.base if is_on_hub(facts.base) else None,
        license=facts.license,
        model_name=name,
        eval_results=results or None,
    )
    if not results:
        data.model_name = None
    base = "an unknown base" if facts.base is None else f"`{_file_name(facts.base)}`"
    base += f" (revision `{facts.base_revision}`)" if facts.base_revision else ""
    kind = {
        "adapter": f"A LoRA adapter for {base}",
        "whole": f"A whole model, made from {base}",
        "sentence-transformers": f"A sentence-transformers folder, made from {base}",
    }[facts.form]
    license_text = (
        f"The card of the base names the license `{facts.license}`; its terms apply here too."
        if facts.license
        else "**To be filled in.** The license of the base is unknown to the program that wrote this page; it applies here."
    )
    sections = {
        "Use": "\n\n".join(f"### {library}\n\n{text}" for library, text in _usage(facts).items()),
        "Prompt, pooling, length": _prompt(facts),
        "Results": _results(facts),
        "Training": _training(facts),
        "Verification": _verification(facts),
        "License": license_text,
    }
    head = f"---\n{data.to_yaml()}\n---\n\n# {name}\n\nA text-embedding model. {kind}. Made by angle_llm {__version__}."
    body = "".join(f"\n\n## {title}\n\n{text}" for title, text in sections.items())
    return f"{head} Compare vectors by cosine; they are not normalised.{body}\n"


def _usage(facts: CardFacts) -> dict[str, str]:
    """Code for each library."""
    texts = '["A man is eating.", "Someone eats."]'
    ours = f"from angle_llm import SentenceEncoder\n\nencoder = SentenceEncoder.from_pretrained({facts.repo!r})\n"
    theirs = f"from sentence_transformers import SentenceTransformer\n\nmodel = SentenceTransformer({facts.repo!r})\n"
    if facts.form == "sentence-transformers":
        return {
            "angle_llm": "Opens the original encoder, not this folder, whose tokenizer adds the prompt itself.",
            "sentence-transformers": _python(f"{theirs}rows = model.encode({texts})")
            + "\n\nPass bare texts and no `prompt`: the tokenizer adds it.",
            "transformers": _in_transformers(facts),
        }
    return {
        "angle_llm": _python(f"{ours}rows = encoder.encode({texts})  # one float32 row per text"),
        "sentence-transformers": f"`hf download {facts.repo} --local-dir here` and "
        "`angle-llm export here there --to sentence-transformers` write a folder for it, with equal vectors.",
        "transformers": _in_transformers(facts),
    }


def _in_transformers(facts: CardFacts) -> str:
    no_base = facts.form == "adapter" and (facts.base is None or ":" in facts.base)
    inside = facts.form == "sentence-transformers"
    by_hand = facts.prompt.tokenization != "joined" or facts.prompt.edits
    if no_base or facts.pooling not in _POOLED or facts.layers or (by_hand and not inside):
        return "Not possible in a few lines: use one of the libraries above."
    tokenizer = "PreTrainedTokenizerFast" if inside else "AutoTokenizer"
    lines = ["import torch", f"from transformers import AutoModel, {tokenizer}", ""]
    lines += [f"tokenizer = {tokenizer}.from_pretrained({facts.repo!r})"]
    if facts.form == "adapter":
        lines.insert(1, "from peft import PeftModel")
        revision = f", revision={facts.base_revision!r}" if facts.base_revision else ""
        lines += [
            f"base = AutoModel.from_pretrained({facts.base!r}{revision})",
            f"model = PeftModel.from_pretrained(base, {facts.repo!r}).eval()",
        ]
    else:
        lines += [f"model = AutoModel.from_pretrained({facts.repo!r}).eval()"]
    text = "text" if inside else f'{facts.prompt.template!r}.replace("{{text}}", text)'
    cut = f"[: {facts.dimensions}]" if facts.dimensions else ""
    lines += [
        "",
        "",
        "@torch.no_grad()",
        "def encode(text):",
        f'    inputs = tokenizer({text}, return_tensors="pt")',
        '    states = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state',
        f"    return {_POOLED[facts.pooling]}{cut}",
    ]
    limit = f"of at most {facts.max_length} tokens with its prompt, without names of special tokens."
    return f"{_python(chr(10).join(lines))}\n\nFor one text at a time, {limit}"


def _python(code: str) -> str:
    return f"```python\n{code}\n```"


def _prompt(facts: CardFacts) -> str:
    prompt = facts.prompt
    edits = f" The text is edited first: {', '.join(prompt.edits)}." if prompt.edits else ""
    segments = " Head, text and tail are tokenised separately." if prompt.tokenization == "segments" else ""
    kept = f"; the first {facts.dimensions} dimensions of a vector are kept" if facts.dimensions else ""
    kept += f"; the first {facts.layers} layers are computed" if facts.layers else ""
    plain = f" These names are plain characters in a text: {', '.join(facts.plain_names)}." if facts.plain_names else ""
    template = "    " + prompt.template.replace("\n", "\n    ")
    return (
        f"Every text is formatted with this prompt, with the text in place of `{{text}}`.{edits}{segments}\n\n{template}\n\n"
        f"Pooling `{facts.pooling}`; at most {facts.max_length} tokens, prompt included{kept}. A text that is too long is cut "
        f"at its end, the prompt never. Names of special tokens in a text are plain characters."
        f"{plain} Another prompt or pooling gives other vectors."
    )


def _results(facts: CardFacts) -> str:
    if not facts.scores:
        return (
            "None. `angle-llm eval sts --model … --json results.json` evaluates; `angle-llm push … --results results.json` adds "
            "the results."
        )
    rows = [f"| {name} | {score:.2f} |" for name, score in facts.scores]
    return "\n".join(["| evaluation | Spearman × 100 |", "|---|---:|", *rows])


def _training(facts: CardFacts) -> str:
    parts = []
    if facts.origin is not None:
        adapter = facts.origin["adapter"]
        kind = ("rs" if adapter["use_rslora"] else "") + ("DoRA" if adapter["use_dora"] else "LoRA")
        parts.append(
            f"A {kind} adapter (rank {adapter['r']}, alpha {adapter['lora_alpha']}, SHA-256 `{facts.origin['adapter_sha256']}`) "
            f"merged into its base (fingerprint `{facts.origin['base_fingerprint']}`, {facts.origin['base_weights']} weights)."
        )
    if facts.settings is None:
        parts.append("The training settings are not recorded.")
    else:
        shown = yaml.safe_dump(facts.settings, sort_keys=False, allow_unicode=True)
        parts.append(f"Settings of the run:\n\n```yaml\n{shown}```")
    return "\n\n".join(parts)


def _verification(facts: CardFacts) -> str:
    if facts.form == "adapter":
        return "The adapter as it was trained."
    found = facts.verification
    if found is None or found.get("holds") is not True:
        return "Not compared with its origin. `angle-llm verify ORIGIN FOLDER` compares them."
    largest = max((float(one["largest_difference"]) for one in found.get("comparisons", [])), default=None)
    shown = "" if largest is None else f" 1 − cosine is at most {largest:.1e}."
    notes = "".join(f" {note}" for note in found.get("notes", []))
    return f"Compared with its origin on {found.get('texts')} texts: the same encoder.{shown}{notes}"


def is_on_hub(base: str | None) -> bool:
    """Whether a base name is a hub id and not a path or a file in a package."""
    if not base or ":" in base or base.startswith(("~", ".")) or base.count("/") > 1:
        return False
    return not (PurePath(base).is_absolute() or Path(base).exists())


def without_paths(value: Any, keys: frozenset[str] = PATH_KEYS) -> Any:
    """A JSON value without paths of this machine: an absolute path under one of the keys is replaced by its last part.

    Other texts may be a prompt or a token that looks like a path, and are kept; so is everything under `prompt`.
    """
    if isinstance(value, list | tuple):
        return [without_paths(item, keys) for item in value]
    if not isinstance(value, dict):
        return value
    cleaned = {}
    for key, item in value.items():
        if isinstance(item, str):
            cleaned[key] = _file_name(item) if key in keys else item
        else:
            cleaned[key] = item if key in ("prompt", "prompts") else without_paths(item, keys)
    return cleaned


def _file_name(name: str) -> str:
    return PurePath(name).name if name.startswith("~") or PurePath(name).is_absolute() else name


def read_scores(path: Path) -> tuple[tuple[str, float], ...]:
    """Scores of a JSON file of `angle-llm eval sts --json`: the tasks and their average.

    Raises:
        ValueError: for another file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        variant = content["variant"]
        tasks = [(f"{name} ({variant})", task["spearman"]) for name, task in content["tasks"].items()]
        average = content["average"]
        if isinstance(average, dict) and average.get("spearman") is not None:
            tasks.append((f"average of {len(average['tasks'])}", average["spearman"]))
        return tuple((name, float(score)) for name, score in tasks if score is not None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"--results: expected a file of `angle-llm eval sts --json`, got {path} ({error}).") from error

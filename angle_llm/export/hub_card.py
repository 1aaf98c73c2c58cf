"""The README.md of an encoder on the hub: what it is, how three libraries use it, how good it is, where it comes from.

Nothing is made up: a figure, a licence or a setting that is not known is said to be missing.
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

PLACES = frozenset({
    "_name_or_path", "name_or_path", "base_model_name_or_path", "base", "folder", "path", "name", "tokenizer_file",
    "vocab_file", "merges_file", "special_tokens_map_file",
})  # fmt: skip
"""Keys of JSON files that may hold a place on the machine that wrote them."""
SETTINGS_PLACES = PLACES | {"run_dir", "prompt", "pairs", "resume", "config"}
"""And of a run's settings, where a prompt is a name or a file."""
_WORDINGS = ("prompt", "prompts")


@dataclass(frozen=True)
class CardFacts:
    """What is known of an encoder that is to be pushed."""

    form: Form
    repo: str
    prompt: PromptTemplate
    pooling: str
    max_length: int
    base: str | None
    """What it was made from, as its own files name it; None if that is not known."""
    base_revision: str | None
    dimensions: int | None = None
    """If vectors are cut: how many numbers are kept."""
    layers: int | None = None
    """If layers are left out: how many are computed."""
    licence: str | None = None
    """Of the base, as its own card on the hub tells; None if it does not."""
    verification: dict[str, Any] | None = None
    """verification.json of the folder."""
    settings: dict[str, Any] | None = None
    """settings.yaml of the run."""
    scores: tuple[tuple[str, float], ...] = ()
    """What was measured, and the figure."""


def hub_card(facts: CardFacts) -> str:
    """Markdown with the front matter that the hub reads."""
    head = {
        "library_name": "sentence-transformers" if facts.form == "sentence-transformers" else "angle_llm",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-embeddings", "angle_llm"],
        **({"base_model": facts.base} if is_on_hub(facts.base) else {}),
        **({"license": facts.licence} if facts.licence else {}),
    }
    licence = (
        f"The base's card names the licence `{facts.licence}`; its terms apply here too."
        if facts.licence
        else "**To be filled in**: the licence of the base, whose terms apply here too, is not known to the program that wrote "
        "this page."
    )
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n# {facts.repo.rpartition('/')[2]}",
        _what_it_is(facts),
        f"## Use\n\n{_use(facts)}",
        f"## Prompt, pooling, length\n\n{_wording(facts)}",
        f"## Results\n\n{_results(facts)}",
        f"## Training\n\n{_training(facts)}",
        f"## Checked\n\n{_checked(facts)}",
        f"## Licence\n\n{licence}",
    ]
    return "\n\n".join(parts) + "\n"


def _what_it_is(facts: CardFacts) -> str:
    base = "a base that is not named here" if facts.base is None else f"`{_without_folders(facts.base)}`"
    revision = f" (revision `{facts.base_revision}`)" if facts.base_revision else ""
    sort = {
        "adapter": f"a LoRA adapter on {base}{revision}",
        "whole": f"a whole model, made from {base}{revision}",
        "sentence-transformers": f"a sentence-transformers folder, made from {base}{revision}",
    }[facts.form]
    return f"A sentence encoder: {sort}. Made by angle_llm {__version__}. Compare its vectors by their cosine."


def _use(facts: CardFacts) -> str:
    blocks = [f"### {name}\n\n{text}" for name, text in (
        ("angle_llm", _in_angle_llm(facts)),
        ("sentence-transformers", _in_sentence_transformers(facts)),
        ("transformers", _in_transformers(facts)),
    )]  # fmt: skip
    return "\n\n".join(blocks)


def _in_angle_llm(facts: CardFacts) -> str:
    if facts.form == "sentence-transformers":
        return "It opens the encoder this was made from, not this folder, whose tokenizer words texts itself."
    return _python(
        "from angle_llm import SentenceEncoder\n\n"
        f"encoder = SentenceEncoder.from_pretrained({facts.repo!r})\n"
        'rows = encoder.encode(["A man is eating.", "Someone eats."])  # one float32 row per text'
    )


def _in_sentence_transformers(facts: CardFacts) -> str:
    if facts.form != "sentence-transformers":
        return (
            "A folder for it is made, and compared with this encoder, by `hf download "
            f"{facts.repo} --local-dir here` and `angle-llm export here there --to sentence-transformers`."
        )
    return (
        _python(
            "from sentence_transformers import SentenceTransformer\n\n"
            f"model = SentenceTransformer({facts.repo!r})\n"
            'rows = model.encode(["A man is eating.", "Someone eats."])'
        )
        + "\n\nGive the bare texts and no `prompt`: the tokenizer words them."
    )


_POOLED = {
    "last": "states[0, -1]", "cls": "states[0, 0]", "mean": "states[0].mean(0)", "last-avg": "states[0].mean(0)",
    "last-max": "states[0].amax(0)", "cls-last-avg": "(states[0, 0] + states[0].mean(0)) / 2",
}  # fmt: skip


def _in_transformers(facts: CardFacts) -> str:
    base_elsewhere = facts.form == "adapter" and (facts.base is None or ":" in facts.base)
    inside = facts.form == "sentence-transformers"
    worded_by_hand = facts.prompt.tokenization != "joined" or facts.prompt.edits
    if base_elsewhere or facts.pooling not in _POOLED or facts.layers or (worded_by_hand and not inside):
        return "Not in a few lines: take one of the libraries above, which know how texts are worded, tokenised and pooled."
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
    return _python("\n".join(lines)) + (
        f"\n\nFor one text at a time, of at most {facts.max_length} tokens with its prompt, without names of special tokens "
        "in it."
    )


def _python(code: str) -> str:
    return f"```python\n{code}\n```"


def _wording(facts: CardFacts) -> str:
    prompt = facts.prompt
    edits = f" The text is edited first: {', '.join(prompt.edits)}." if prompt.edits else ""
    apart = " Head, text and tail are tokenised apart." if prompt.tokenization == "segments" else ""
    kept = [f"the first {facts.dimensions} numbers of a vector are kept"] if facts.dimensions else []
    kept += [f"the first {facts.layers} layers are computed"] if facts.layers else []
    indented = "    " + prompt.template.replace("\n", "\n    ")
    return (
        f"Every text is worded as below, with the text in place of `{{text}}`.{edits}{apart}\n\n{indented}\n\n"
        f"Pooling `{facts.pooling}`; at most {facts.max_length} tokens, prompt included{''.join(f'; {item}' for item in kept)}. "
        "With another prompt or pooling the vectors are others."
    )


def _results(facts: CardFacts) -> str:
    if not facts.scores:
        return (
            "None were given. `angle-llm eval --model … --json results.json` measures; `angle-llm push … --results results.json` "
            "tells them here."
        )
    rows = [f"| {name} | {score:.2f} |" for name, score in facts.scores]
    return "\n".join(["| | Spearman × 100 |", "|---|---:|", *rows])


def _training(facts: CardFacts) -> str:
    if facts.settings is None:
        return "The settings of the run were not given."
    shown = yaml.safe_dump(facts.settings, sort_keys=False, allow_unicode=True)
    return f"The settings of the run, data included:\n\n```yaml\n{shown}```"


def _checked(facts: CardFacts) -> str:
    if facts.form == "adapter":
        return "An adapter as it was trained; nothing was put into another form."
    if facts.verification is None or facts.verification.get("holds") is not True:
        return "Not compared with what it was made from."
    largest = max((float(one["largest_difference"]) for one in facts.verification.get("comparisons", [])), default=None)
    told = "" if largest is None else f" 1 − cosine was {largest:.1e} at most."
    return f"Compared with what it was made from, on {facts.verification.get('texts')} texts: the same encoder.{told}"


def is_on_hub(base: str | None) -> bool:
    """Whether a base is named as the hub names it, and not as a place on this machine or in a package."""
    if not base or ":" in base or base.startswith(("~", ".")) or base.count("/") > 1:
        return False
    return not (PurePath(base).is_absolute() or Path(base).exists())


def without_places(value: Any, keys: frozenset[str] = PLACES) -> Any:
    """A JSON value without places on this machine: of an absolute path under one of the keys the last part is left.

    Any other text may be a prompt or a token that starts like a path, and stays; so does all of a prompt that is written out.
    """
    if isinstance(value, list | tuple):
        return [without_places(item, keys) for item in value]
    if not isinstance(value, dict):
        return value
    cleaned = {}
    for key, item in value.items():
        if isinstance(item, str):
            cleaned[key] = _without_folders(item) if key in keys else item
        else:
            cleaned[key] = item if key in _WORDINGS else without_places(item, keys)
    return cleaned


def _without_folders(name: str) -> str:
    return PurePath(name).name if name.startswith("~") or PurePath(name).is_absolute() else name


def scores_of(path: Path) -> tuple[tuple[str, float], ...]:
    """The figures in a file that `angle-llm eval --json` wrote: the tasks, and their average.

    Raises:
        ValueError: if it is no such file.
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
        raise ValueError(
            f"--results needs a file that `angle-llm eval --json` wrote; {path} is none ({error})."
        ) from error

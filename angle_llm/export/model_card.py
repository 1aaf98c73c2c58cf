"""The README.md of a merged model: what it is, how it wants to be used, how it was checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from angle_llm.export.report import Verification
from angle_llm.model.artifact import EncoderCard


def model_card(name: str, card: EncoderCard, provenance: dict[str, Any], found: Verification | None) -> str:
    """Markdown with the front matter the hub reads. A base that is a local folder is told by its name alone."""
    base = str(provenance["base"])
    local = Path(base).is_absolute()
    shown = Path(base).name if local else base
    on_hub = not local and ":" not in base
    revision = f", revision `{provenance['base_revision']}`" if provenance["base_revision"] else ""
    adapter = provenance["adapter"]
    sort = ("rs" if adapter["use_rslora"] else "") + ("DoRA" if adapter["use_dora"] else "LoRA")
    prompt = card.prompt.template.replace("\n", "\n    ")
    edits = f" The text is edited first: {', '.join(card.prompt.edits)}." if card.prompt.edits else ""
    apart = " Head, text and tail are tokenised apart." if card.prompt.tokenization == "segments" else ""
    return f"""---
library_name: angle_llm
pipeline_tag: sentence-similarity
{f"base_model: {base}" if on_hub else "tags: [sentence-embeddings]"}
---

# {name}

A sentence encoder: `{shown}`{revision} with a {sort} adapter (rank {adapter["r"]}, alpha {adapter["lora_alpha"]}) merged into
its weights, stored in {card.dtype}. The terms of the base model's licence apply.

## Use

    from angle_llm import SentenceEncoder

    encoder = SentenceEncoder.from_pretrained("{name}")
    rows = encoder.encode(["A man is eating.", "Someone eats."])    # one float32 row per text, in order

Compare rows by their cosine. Prompt, pooling and length below are applied by `encode`; nobody has to name them.

## Prompt, pooling, length

Every text is worded as below, with the text in place of `{{text}}`.{edits}{apart}

    {prompt}

Pooling `{card.pooling}`; at most {card.max_length} tokens, prompt included. A text that is too long loses its end, never the
prompt's. With another prompt or pooling, or another end cut off, the vectors are others.

## Where it comes from

* adapter: SHA-256 `{provenance["adapter_sha256"]}`
* base: fingerprint `{provenance["base_fingerprint"]}`, {_onto(provenance)}
* made by angle_llm {provenance["angle_llm"]}; `merge.json` holds the same for programs

## Checked

{_checked(found)}
"""


def _onto(provenance: dict[str, Any]) -> str:
    if provenance["base_weights"] == "original":
        return "its weights as they are stored"
    if provenance["bits"] is not None:
        return f"its weights as they come out of the {provenance['bits']} bits they had in training"
    return f"its weights in {provenance['base_dtype']}, as in training"


def _checked(found: Verification | None) -> str:
    if found is None:
        return "Not compared with the adapter: the merge was asked not to. `angle-llm verify` does it."
    (merged,) = found.comparisons
    lines = [
        f"On {found.texts} texts against the adapter on its base, in float32 arithmetic: 1 - cosine at most "
        f"{merged.largest_difference:.1e}, in the mean {merged.mean_difference:.1e}."
    ]
    if found.base_difference is not None:
        lines.append(f"The untouched base differs by {found.base_difference:.1e} in the mean.")
    lines += [f"Note: {note}" for note in found.notes]
    return "\n".join([*lines, "`verification.json` has the details."])

"""Programs that open an exported folder: where its vectors are known to be correct, and what users must do."""

from __future__ import annotations

from pathlib import Path

from angle_llm.export.exported_folder import ExportFacts
from angle_llm.model.source.checks import EXPORT_NAME, read_json
from angle_llm.prompts import SIDES

_MEASURED = {
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma4_text", "qwen3_5_text", "lfm2",
    "embedding_gemma2_text", "bert", "mpnet", "roberta", "modernbert",
}  # fmt: skip
_NEED_5 = {"gemma4_text", "qwen3_5_text", "embedding_gemma2_text"}
"""Model types that transformers 4 does not have."""
_PROGRAMS: dict[str, set[str]] = {
    "sentence-transformers 3.4.1 (transformers 4.48.3)": {"qwen3", "gemma3_text", "lfm2", *_NEED_5},
    "sentence-transformers 5.1.2 (transformers 4.57.1)": _NEED_5,
    "sentence-transformers 6.2.0 (transformers 5.23.0)": set(),
    "vLLM 0.32.0 (transformers 5.19.0)": {"mpnet", "qwen3_5_text", "embedding_gemma2_text"},
}
"""Programs that `make test-readers` checked with the model types in `_MEASURED`; values: types that a program cannot
open."""
_VLLM_BIDIRECTIONAL = {"llama", "mistral", "qwen2", "qwen3"}
"""Model types with bidirectional attention whose vectors are correct in vLLM 0.32. Mistral with a sliding window, Gemma-2,
Gemma-3 and Gemma-4 are wrong there without a message."""


def program_notes(folder: Path, facts: ExportFacts) -> list[str]:
    """Return notes for users of an exported folder: programs with known correct embeddings, limits of other programs.

    `facts` are the facts that the folder stores.
    """
    # Programs whose vectors were checked, and limits of the attention and the pooling.
    config = read_json(folder / "config.json")
    model_type = str(config.get("model_type"))
    is_bidirectional = config.get("is_causal") is False
    has_window = model_type == "mistral" and config.get("sliding_window")
    wrong_attention = is_bidirectional and (model_type not in _VLLM_BIDIRECTIONAL or has_window)
    in_vllm = facts.pooling in ("last", "cls", "mean") and not wrong_attention
    programs = [
        name
        for name, unreadable_types in _PROGRAMS.items()
        if model_type in _MEASURED - unreadable_types
        and (in_vllm or not name.startswith("vLLM"))
        and not (is_bidirectional and "transformers 4" in name)
    ]
    notes = [f"Vectors of model type {model_type} were not checked in other versions and programs."]
    if programs:
        notes = [
            f"Vectors of model type {model_type} were checked and are correct, in float32, in {', '.join(programs)}."
        ]
    if is_bidirectional:
        notes.append(
            "Attention is bidirectional, which needs transformers 5.2: version 4 refuses the folder, 5.0 and 5.1 compute "
            "causal attention. Text Embeddings Inference was not checked."
        )
    if not in_vllm:
        reason = f"other attention for {model_type}" if wrong_attention else f"another pooling than {facts.pooling!r}"
        notes.append(f"vLLM 0.32 computes {reason} without an error: do not use it for this folder.")
    if model_type == "lfm2" and in_vllm:
        notes.append(
            "vLLM 0.32 on a CPU rotates the queries of lfm2 wrongly without an error. Start it with --compilation-config "
            """'{"custom_ops": ["-rotary_embedding"]}'."""
        )
    # What other programs must do.
    if facts.dense:
        notes.append("Other programs must apply the Dense modules (2_Dense, 3_Dense, …) after the pooling.")
    if facts.prompt.differ:
        query, document = (facts.prompt.of(side).head for side in SIDES)
        notes.append(
            f"Other programs must send {query!r} before each query and {document!r} before each document. sentence-transformers "
            'before 5 has no encode_query: use encode(texts, prompt_name="query") and "document".'
        )
    elif facts.head:
        notes.append(f"Other programs must send {facts.head!r} before each text; sentence-transformers adds it.")
    if facts.as_llama:
        notes.append(
            "The Qwen2 model is stored as a LLaMA model with the same values, because transformers reads the tokenizer of a "
            "Qwen2 model without the prompt. Text Embeddings Inference drops its biases: do not use it for this folder."
        )
    # Texts with other vectors.
    notes.append("sentence-transformers before 6 removes white space at both ends of a text.")
    if facts.plain_names:
        shown = ", ".join(map(repr, facts.plain_names[:10]))
        notes.append(
            f"Texts with {shown} or other `plain_names` in {EXPORT_NAME} have other vectors than in angle_llm."
        )
    return notes

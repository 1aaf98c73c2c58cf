"""Read from a GGUF file what `transformers` does not read; refuse a file that it reads wrongly."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import numpy as np
import torch

from angle_llm.model.source.checks import ArtifactError

LLAMA_3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Scaling of the rotary embeddings of all published LLaMA 3 models, without the factor (8 or 32)."""
_WORDS_WITHOUT_MERGES = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
)  # fmt: skip
"""Names in `tokenizer.ggml.pre` of tokenizers as LLaMA 3 and tekken have them."""
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Names of splits that are those of GPT-2, after a split around each digit."""
_AS_GPT_2 = (
    "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "mellum", "a.x-4.0", "gigachat", "exaone4", "granite-docling",
)  # fmt: skip
"""Names of the split of GPT-2."""


@contextmanager
def header_read_once(gguf_file: str | None) -> Iterator[None]:
    """Make `gguf.GGUFReader` parse a GGUF file once inside this context, and map the names of its tensors once.

    `transformers` calls it for the configuration, the weights and the tokenizer, with a new memory map for each token of
    the vocabulary, and maps all names again for each module. SmolLM2 opens in 7 instead of 22 seconds of CPU time.

    Two names of the module `gguf` are replaced inside the context; `transformers` imports these names when it needs
    them. A nested context uses the header that the outer context has read. Not thread-safe.
    """
    if gguf_file is None:
        yield
        return
    import gguf

    if hasattr(gguf.GGUFReader, "cache_info"):  # replaced by an outer context
        yield
        return

    class Reader(gguf.GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            # A slice of a plain array is no new memory map.
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    module: Any = gguf
    originals = gguf.GGUFReader, gguf.get_tensor_name_map
    module.GGUFReader, module.get_tensor_name_map = functools.cache(Reader), functools.cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        module.GGUFReader, module.get_tensor_name_map = originals


def complete_tokenizer(tokenizer: Any, path: str) -> None:
    """Set what `transformers` 5.24 does not read from the tokenizer of a GGUF file, as llama.cpp does (`src/llama-vocab.cpp`).

    * SmolLM2 and others split a text around each digit. `transformers` uses the split of GPT-2 for names that it does not
      know.
    * In LLaMA 3 and Mistral's tekken, a word of the vocabulary is one token without merges, and the start token is added
      if the file does not say whether to add it, as older files of LLaMA 3 do not.

    Raises:
        ArtifactError: for an unknown split, or a version of `transformers` without the start token and most splits.
    """
    import gguf
    from packaging.version import Version
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    fields = gguf.GGUFReader(path).fields
    split, adds_bos = (
        fields[name].contents() if name in fields else None
        for name in ("tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token")
    )
    version = metadata.version("transformers")
    if Version(version) < Version("5.23") and (adds_bos or split not in ("gpt-2", "qwen2", "smollm")):
        raise ArtifactError(
            f"{path}: transformers {version} gives wrong token ids for a GGUF file with this tokenizer "
            f"({split or 'unnamed'}). Install transformers 5.23 or later (Python 3.11 or later), or use the model folder."
        )
    backend = tokenizer.backend_tokenizer
    if isinstance(backend.pre_tokenizer, ByteLevel):
        if split in _DIGITS_APART:
            backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
        elif split not in _AS_GPT_2:
            raise ArtifactError(
                f"{path}: transformers does not split words as this tokenizer does ({split or 'unnamed'}). Use the model "
                "folder."
            )
    if split in _WORDS_WITHOUT_MERGES:
        backend.model.ignore_merges = True
        if adds_bos is None:
            tokenizer.add_bos_token = True


def complete_config(config: Any, path: str) -> None:
    """Set what `transformers` 5.23 does not read from GGUF files of most families, such as LLaMA 3 and Gemma-3.

    These are the scaling of rotary embeddings, biases, bidirectional attention, and the scale of attention scores of Gemma. A
    file of LLaMA 3 has a divisor for each frequency; they are compared with the divisors of the published models.

    Raises:
        ArtifactError: for a scaling of another type.
    """
    import gguf
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    values = {name.partition(".")[2]: field for name, field in reader.fields.items()}  # without the architecture
    for tensor, option in (("attn_q", "attention_bias"), ("ffn_up", "mlp_bias")):
        if f"blk.0.{tensor}.bias" in tensors and hasattr(config, option):
            setattr(config, option, True)
    if "attention.causal" in values and not values["attention.causal"].contents():
        config.is_causal = False
    if hasattr(config, "query_pre_attn_scalar"):  # the size of a head, except in the models of 27B
        is_27b = (config.model_type, config.num_hidden_layers) in (("gemma2", 46), ("gemma3_text", 62))
        size = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
        config.query_pre_attn_scalar = size
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma-3 has parameters for each type of layer
    if not rope or rope.get("rope_type", "default") != "default":  # no rotary embeddings, or read by `transformers`
        return
    scaling = values["rope.scaling.type"].contents() if "rope.scaling.type" in values else "none"
    if "rope_factors_long.weight" in tensors or "rope.scale_linear" in values:  # Phi-3, files of 2023
        scaling = "longrope or scale_linear"
    divisors = tensors.get("rope_freqs.weight")
    if scaling == "linear" and "rope.scaling.factor" in values:
        rope |= {"rope_type": "linear", "factor": values["rope.scaling.factor"].contents()}
    elif divisors is not None and (divisors != 1).any():
        plain = rope["rope_theta"] ** -(torch.arange(len(divisors)) / len(divisors))
        rope |= LLAMA_3_SCALING | {"factor": round(float(divisors.max()), 3)}
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        scaling = "llama3" if np.allclose(plain / scaled, divisors, rtol=1e-4) else "of unknown parameters"
    if scaling not in ("none", "linear", "llama3"):
        raise ArtifactError(f"{path}: rotary scaling {scaling} of a GGUF file is not supported. Use the model folder.")


def check_layers(model: Any, path: str) -> None:
    """Check that a model has all weights that the layers of a GGUF file have: `transformers` drops unknown ones.

    Raises:
        ArtifactError: for other numbers of weights.
    """
    import gguf

    layers = [f"blk.{number}." for number in range(model.config.get_text_config().num_hidden_layers)]
    in_file = sum(
        int(tensor.n_elements) for tensor in gguf.GGUFReader(path).tensors if tensor.name.startswith(tuple(layers))
    )
    in_model = sum(
        weight.numel() for name, weight in model.base_model.named_parameters() if re.match(r"\w+\.\d+\.", name)
    )
    if in_file != in_model:
        raise ArtifactError(
            f"{path}: the layers have {in_file:,} weights, and the {type(model).__name__} of transformers {in_model:,}. Use "
            "the model folder."
        )

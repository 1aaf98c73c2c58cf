"""Export a saved encoder as a GGUF file with the same vectors in llama.cpp.

    adapter ──► merge ──┐
    whole model ────────┴─► encoder.gguf        weights, tokenizer, pooling, BOS and EOS flags
                            encoder.gguf.json   prompt, maximum length, normalisation (see `llama_cpp`)

Tensors are read and written one at a time. Names, shapes and units are those of llama.cpp:

* LLaMA: the rows of q and k are permuted, because llama.cpp rotates neighbouring dimensions. Factors of llama3 scaling
  are a tensor.
* Gemma-3: the weight of a norm is stored plus 1, and the norm of q includes `query_pre_attn_scalar`.
* The tokenizer is described, not stored: `tokenizer.ggml.pre` names a split that llama.cpp has. A tokenizer without such
  a name is refused.
* Special tokens have type UNUSED, so that their names in a text are plain characters, as in the encoder. llama.cpp
  makes names in `_FOUND_BY_NAME` special again; `special_names` in encoder.gguf.json lists them.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from angle_llm.export.formats.llama_cpp import GGUF_NAME, Usage
from angle_llm.export.merge import check_target, merge
from angle_llm.model.source.artifact import write_directory
from angle_llm.model.source.backbone import BackboneLocation, load_tokenizer
from angle_llm.model.source.checks import CARD_NAME, ArtifactError, is_saved_encoder
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.resolve import locate
from angle_llm.model.source.weights import BaseWeights, open_base
from angle_llm.model.tokenizer import SideTokenizers, Tokenizer
from angle_llm.prompts import Side, load_prompts
from angle_llm.settings.parsing import unknown_name

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
"""Architecture in llama.cpp by model type of transformers."""
GGUF_DTYPES = {"float32": "F32", "float16": "F16", "q8_0": "Q8_0"}
"""Type of the weight matrices in the file, by setting. Vectors stay in float32."""
_POOLINGS = {"last": "LAST", "mean": "MEAN", "cls": "CLS"}
_ACTIVATIONS = {"gemma3": "gelu_pytorch_tanh"}
_FOUND_BY_NAME = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[", "<|fim_prefix|>",
    "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>", "<|prefix|>",
    "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
    "<|suffix|>", "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
    "<|code_middle|>", "<|middle|>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>",
    "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>", "<|channel|>", "<|message|>",
    "<|start|>", "<|constrain|>",
}  # fmt: skip
"""Names that llama.cpp (2026-10) makes special tokens, whatever their type in the file is."""
_LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    (_LLAMA_3_SPLIT, True): "llama-bpe",
    (_LLAMA_3_SPLIT, False): "smaug-bpe",
    (_LLAMA_3_SPLIT.replace("{1,3}", ""), False): "qwen2",
}
"""`tokenizer.ggml.pre` by the split of a byte-level tokenizer, and by whether whole words skip the merges."""


def export_gguf(
    run: str | Path,
    out: str | Path,
    *,
    dtype: Literal["float32", "float16", "q8_0"] = "float32",
    side: Side | None = None,
    finish: Callable[[Path], object] | None = None,
) -> Usage:
    """Export a saved encoder to a folder with a GGUF file and its usage, and return the usage.

    Args:
        run: folder of the encoder: an adapter, which is merged in float32 first, or a whole model.
        out: folder to write.
        dtype: type of the weight matrices.
        side: use only the prompt of queries, or only the prompt of documents, for all texts.
        finish: called with the complete folder under its temporary name. If it raises an exception, nothing is written.

    Raises:
        FileNotFoundError: if there is no saved encoder at `run`, or its base is missing.
        ArtifactError: for a model, tokenizer or pooling that llama.cpp cannot hold, a damaged encoder, or a target that
            would overwrite its inputs.
    """
    source, target = Path(run).expanduser(), Path(out).expanduser()
    if not is_saved_encoder(source):
        raise FileNotFoundError(f"{source} is not a saved encoder. Give the model folder of a run, or a merged model.")
    if dtype not in GGUF_DTYPES:
        raise ValueError(unknown_name("dtype", dtype, GGUF_DTYPES))
    card = EncoderCard.read(source)
    if card.pooling not in _POOLINGS:
        raise ArtifactError(f"{source} has pooling {card.pooling!r}; a GGUF file supports {', '.join(_POOLINGS)}.")
    if card.dimensions is not None:
        raise ArtifactError(
            f"{source} keeps the first {card.dimensions} dimensions, which a GGUF file cannot store. Set `dimensions` to null "
            f"in {source / CARD_NAME}, export again, and cut the vectors of the server."
        )
    if target.is_dir() and any(target.iterdir()):
        raise ArtifactError(f"OUT {target} has files. Name a new folder.")
    check_target(source, locate(card.base or str(source)), target)
    prompts = card.prompt if side is None else load_prompts(card.prompt.of(side))
    tokenizer = load_tokenizer(BackboneLocation(str(source)))
    tokenizers = SideTokenizers.of(tokenizer, prompts, card.max_length)
    vocabulary = Vocabulary.of(tokenizers)
    usage = Usage.of(
        tokenizers,
        normalize=card.normalize,
        unicode="NFC" if vocabulary.nfc else None,
        special_names=vocabulary.special_names,
    )

    def fill(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.merged.", dir=folder.parent) as work:
            merged = source if card.base is None else Path(work) / "merged"
            if card.base is not None:
                merge(source, merged, dtype="float32", check=False)
            weights = open_base(BackboneLocation(str(merged)), dtype="float32")
            write_gguf(folder / GGUF_NAME, weights, vocabulary, card.pooling, dtype)
        usage.write(folder)
        if finish is not None:
            finish(folder)

    write_directory(target, fill)
    return usage


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as llama.cpp describes it."""

    model: Literal["gpt2", "llama"]
    """gpt2: byte-level BPE with merges. llama: BPE of sentencepiece, with a score for each token."""
    pre: str
    """Name of the split; `default` for sentencepiece, which has none."""
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    ids: Mapping[str, int]
    """Ids of bos, eos, unk and pad, if they exist."""
    add_bos: bool
    add_eos: bool
    add_space: bool
    """Whether a space is added before a text."""
    nfc: bool
    """Whether the tokenizer normalises a text to NFC, which llama.cpp does not."""
    special_names: list[str]
    """Names of special tokens that llama.cpp finds in a text."""

    @classmethod
    def of(cls, tokenizers: SideTokenizers) -> Vocabulary:
        """Describe the tokenizer of an encoder, with the special tokens that the ids of the encoder need.

        Raises:
            ArtifactError: for a tokenizer that llama.cpp does not have.
        """
        tokenizer = tokenizers.query.tokenizer
        spec = _spec(tokenizer)
        model = spec["model"]
        sentencepiece = bool(model.get("byte_fallback"))
        steps = _steps(spec["normalizer"])
        spaces = _spaces(spec, steps) if sentencepiece else False
        if spaces is None or (not sentencepiece and steps not in ([], [{"type": "NFC"}])):
            raise _unsupported("normalizer or pre-tokenizer", spec["normalizer"], spec["pre_tokenizer"])
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        tokens, types, special_names = _tokens(spec, sentencepiece)
        bos, eos = _around(tokenizers)
        ids = {"bos": bos, "eos": eos}
        ids = {name: getattr(tokenizer, f"{name}_token_id") if found is None else found for name, found in ids.items()}
        ids |= {name: getattr(tokenizer, f"{name}_token_id") for name in ("unk", "pad")}
        return cls(
            model="llama" if sentencepiece else "gpt2",
            pre="default" if sentencepiece else _split_name(spec),
            tokens=tokens,
            types=types,
            merges=[] if sentencepiece else merges,
            scores=_scores(tokens, model["merges"]) if sentencepiece else [],
            ids={name: number for name, number in ids.items() if number is not None},
            add_bos=bos is not None,
            add_eos=eos is not None,
            add_space=spaces,
            nfc=bool(steps) and not sentencepiece,
            special_names=special_names,
        )

    def padded(self, size: int) -> Vocabulary:
        """Return the vocabulary with a name for each of `size` rows of the token embeddings."""
        if len(self.tokens) > size:
            raise ArtifactError(f"The tokenizer has {len(self.tokens)} tokens, but the model has {size} embeddings.")
        extra = [f"[PAD{number}]" for number in range(len(self.tokens), size)]
        return replace(self, tokens=[*self.tokens, *extra], types=[*self.types, *[_type("UNUSED")] * len(extra)])

    def add_to(self, writer: Any) -> None:
        """Add the metadata of the tokenizer to a `GGUFWriter`."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.model == "gpt2":
            writer.add_token_merges(self.merges)
        else:
            low = min(self.scores, default=0.0) - 1
            writer.add_token_scores([*self.scores, *[low] * (len(self.tokens) - len(self.scores))])
        for name, number in self.ids.items():
            getattr(writer, f"add_{name}_token_id")(number)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        writer.add_add_space_prefix(self.add_space)


def write_gguf(file: Path, weights: BaseWeights, vocabulary: Vocabulary, pooling: str, dtype: str) -> None:
    """Write a GGUF file.

    Raises:
        ArtifactError: for a model that llama.cpp does not have, or weights that are not finite in `dtype`.
    """
    gguf: Any = importlib.import_module("gguf")
    config: Any = weights.skeleton.config
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise ArtifactError(
            f"llama.cpp files are written for {', '.join(ARCHITECTURES)}; this model has type {config.model_type!r}."
        )
    _check_config(config, architecture)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(file, architecture)
    try:
        writer.add_name("encoder")
        writer.add_file_type({"float32": 0, "float16": 1, "q8_0": 7}[dtype])
        writer.add_vocab_size(config.vocab_size)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
        writer.add_rope_dimension_count(head_size)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_pooling_type(gguf.PoolingType[_POOLINGS[pooling]])
        factors = _add_rope(writer, gguf, config, architecture, head_size)
        vocabulary.padded(config.vocab_size).add_to(writer)
        if dtype == "q8_0":
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        # The shapes come first in the file, then the values, one tensor at a time.
        sources = _sources(weights, gguf, architecture, config.num_hidden_layers)
        kinds = {
            name: _kind(gguf, weights.skeleton.state_dict()[source].shape, dtype) for name, source in sources.items()
        }
        for name, source in sources.items():
            shape = tuple(weights.skeleton.state_dict()[source].shape)
            block, size = gguf.GGML_QUANT_SIZES[kinds[name]]
            count = int(np.prod(shape))
            writer.add_tensor_info(name, shape, np.dtype(np.float32), count // block * size, raw_dtype=kinds[name])
        if factors is not None:
            writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, source in sources.items():
            values = _converted(source, weights.read(source).float(), config, architecture)
            writer.write_tensor_data(_stored(gguf, source, values, kinds[name]))
        if factors is not None:
            writer.write_tensor_data(factors)
    finally:
        writer.close()


def _sources(weights: BaseWeights, gguf: Any, architecture: str, layers: int) -> dict[str, str]:
    """Return the name of each tensor of the backbone, by its name in llama.cpp. Raises `ArtifactError`."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], layers)
    found: dict[str, str] = {}
    for source in weights.skeleton.state_dict():
        name = names.get_name(f"model.{source}", try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ArtifactError(f"llama.cpp has no tensor for {source} in its architecture {architecture}.")
        found[name] = source
    return found


def _kind(gguf: Any, shape: torch.Size, dtype: str) -> Any:
    """Return the stored type of a tensor: float32 for vectors, float16 for rows that Q8_0 cannot divide into blocks."""
    kind = gguf.GGMLQuantizationType[GGUF_DTYPES[dtype] if len(shape) > 1 else "F32"]
    return kind if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else gguf.GGMLQuantizationType.F16


def _converted(source: str, values: Tensor, config: Any, architecture: str) -> Tensor:
    """Return a tensor as llama.cpp computes with it."""
    if architecture == "gemma3" and source.endswith("norm.weight"):
        return (values + 1) * (_query_scale(config) if source.endswith("q_norm.weight") else 1)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    projection = source.split(".")[-2]
    if architecture == "llama" and projection in heads:
        # From the two halves of a head to neighbours that are rotated together.
        return values.reshape(heads[projection], 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    return values


def _query_scale(config: Any) -> float:
    """Return query_pre_attn_scalar of Gemma-3 as a factor of queries: llama.cpp takes the scalar from other sizes."""
    is_27b = config.num_hidden_layers == 62  # recognised by llama.cpp by the number of layers
    assumed = config.hidden_size / config.num_attention_heads if is_27b else config.head_dim
    return float((assumed / config.query_pre_attn_scalar) ** 0.5)


def _stored(gguf: Any, source: str, values: Tensor, kind: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the values of a tensor in the stored type. Raises `ArtifactError` if they are not finite."""
    with np.errstate(over="ignore"):
        stored: np.ndarray[Any, np.dtype[Any]] = gguf.quants.quantize(values.contiguous().numpy(), kind)
    if not bool(torch.isfinite(values).all()) or (stored.dtype == np.float16 and not np.isfinite(stored).all()):
        raise ArtifactError(f"{source} has values that are not finite in {kind.name}. Choose another --dtype.")
    return stored


def _check_config(config: Any, architecture: str) -> None:
    """Check the parts of a configuration that llama.cpp decides by the architecture.

    Raises:
        ArtifactError: for a part with another value.
    """
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    expected = _ACTIVATIONS.get(architecture, "silu")
    if architecture == "gemma3":
        activation = config.hidden_activation
    if activation != expected:
        raise ArtifactError(f"llama.cpp computes {architecture} with {expected}, but this model has {activation}.")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if architecture != "gemma3" and kinds != {"full_attention"}:
        raise ArtifactError(f"llama.cpp computes {architecture} without sliding windows, but this model has them.")
    if getattr(config, "use_bidirectional_attention", None):
        raise ArtifactError(f"llama.cpp computes {architecture} as a causal model, but this model is bidirectional.")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ArtifactError(f"llama.cpp computes {architecture} without attn_logit_softcapping, but this model has it.")


def _add_rope(
    writer: Any, gguf: Any, config: Any, architecture: str, head_size: int
) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """Add the rotary positions and sliding windows; return the factors of llama3 scaling, (head size / 2,).

    Raises:
        ArtifactError: for a scaling or a pattern of windows that llama.cpp does not have.
    """
    rope = config.rope_parameters
    if architecture == "gemma3":
        period = _window_period(config.layer_types)
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(period)
        local, rope = rope["sliding_attention"], rope["full_attention"]
        if local["rope_type"] != "default":
            raise ArtifactError(f"llama.cpp has no rope scaling {local['rope_type']!r} in sliding windows.")
        writer.add_rope_freq_base_swa(local["rope_theta"])
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope["rope_type"]
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ArtifactError(
            f"llama.cpp rotates all dimensions of {architecture}; this model has partial_rotary_factor."
        )
    if kind == "default":
        return None
    if kind == "llama3" and architecture == "llama":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = rope["rope_theta"] ** -(torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
        factors: np.ndarray[Any, np.dtype[np.float32]] = (plain / scaled).numpy().astype(np.float32)
        return factors
    scaling = {"linear": {"factor"}, "yarn": {"factor", "original_max_position_embeddings"}}
    extra = rope.keys() - {"rope_type", "rope_theta", "partial_rotary_factor"} - scaling.get(kind, set())
    extra = {key for key in extra if (key, rope[key]) not in (("beta_fast", 32), ("beta_slow", 1))}
    if kind not in scaling or extra:
        found = f"{kind} with {', '.join(sorted(extra))}" if extra and kind in scaling else kind
        raise ArtifactError(f"llama.cpp files of {architecture} cannot hold rope scaling {found}.")
    writer.add_rope_scaling_type(gguf.RopeScalingType[kind.upper()])
    writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    return None


def _window_period(layer_types: list[str]) -> int:
    """Return n if every n-th layer has full attention and all others have sliding windows. Raises `ArtifactError`."""
    full = [number for number, kind in enumerate(layer_types, 1) if kind == "full_attention"]
    period = full[0] if full else len(layer_types) + 1
    if full != list(range(period, len(layer_types) + 1, period)):
        raise ArtifactError(f"llama.cpp needs full attention in every n-th layer, this model has it in layers {full}.")
    return period


def _type(name: str) -> int:
    """Return a token type of llama.cpp."""
    return {"NORMAL": 1, "USER_DEFINED": 4, "UNUSED": 5, "BYTE": 6}[name]


def _spec(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of `tokenizer.json`. Raises `ArtifactError` for a tokenizer without BPE."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    spec: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
    if spec.get("model", {}).get("type") != "BPE":
        kind = spec.get("model", {}).get("type") or type(tokenizer).__name__
        raise ArtifactError(f"llama.cpp files are written with BPE tokenizers; this tokenizer is {kind}.")
    return spec


def _steps(part: Any) -> list[Any]:
    """Return the steps of a normalizer or pre-tokenizer."""
    if part is None:
        return []
    inside = part.get("normalizers", part.get("pretokenizers"))
    return [part] if inside is None else [step for each in inside for step in _steps(each)]


def _spaces(spec: dict[str, Any], steps: list[Any]) -> bool | None:
    """Return whether a sentencepiece tokenizer adds a space before a text; None for another tokenizer."""
    splits = _steps(spec["pre_tokenizer"])
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if not steps and len(splits) == 1 and splits[0]["type"] == "Metaspace" and not splits[0].get("split", True):
        return bool({"first": True, "never": False}[splits[0]["prepend_scheme"]])
    # A split at spaces, of which there are none after the normalizer, has no effect.
    none_left = all(step["type"] == "Split" and step["pattern"] == {"String": " "} for step in splits)
    if steps == [to_space] and none_left:
        return False
    if steps == [{"type": "Prepend", "prepend": "▁"}, to_space] and none_left:
        return True
    return None


def _unsupported(what: str, *parts: Any) -> ArtifactError:
    shown = ", ".join(json.dumps(part, ensure_ascii=False) for part in parts)
    return ArtifactError(f"llama.cpp does not have the {what} of this tokenizer: {shown:.400}")


def _split_name(spec: dict[str, Any]) -> str:
    """Return `tokenizer.ggml.pre` of a byte-level tokenizer. Raises `ArtifactError` for an unknown split."""
    *splits, last = _steps(spec["pre_tokenizer"]) or [{"type": None}]
    whole_words = bool(spec["model"].get("ignore_merges"))
    if last["type"] == "ByteLevel" and not last["add_prefix_space"]:
        if not splits and last["use_regex"] and not whole_words:
            return "gpt-2"
        if splits == [{"type": "Digits", "individual_digits": True}] and last["use_regex"] and not whole_words:
            return "smollm"
        if len(splits) == 1 and splits[0]["type"] == "Split" and not last["use_regex"]:
            split = splits[0]
            name = _SPLITS.get((split["pattern"].get("Regex", ""), whole_words))
            if name is not None and split["behavior"] == "Isolated" and not split["invert"]:
                return name
    raise _unsupported("pre-tokenizer", spec["pre_tokenizer"])


def _tokens(spec: dict[str, Any], sentencepiece: bool) -> tuple[list[str], list[int], list[str]]:
    """Return the names and types of all tokens by id, and the special names that llama.cpp finds in a text."""
    added = {token["id"]: token for token in spec["added_tokens"]}
    names = {number: name for name, number in spec["model"]["vocab"].items()} | {
        number: token["content"] for number, token in added.items()
    }
    byte_names = {f"<0x{byte:02X}>" for byte in range(256)} if sentencepiece else set()
    if missing := byte_names - set(names.values()):
        raise ArtifactError(f"The tokenizer has no token for {len(missing)} bytes, {min(missing)} first.")
    tokens, types, found = [], [], []
    for number in range(max(names) + 1):
        name = names.get(number, f"[PAD{number}]")
        if number not in names or (number in added and added[number]["special"]):
            kind = "UNUSED"
            if name in _FOUND_BY_NAME:
                found.append(name)
        else:
            kind = "USER_DEFINED" if number in added else "BYTE" if name in byte_names else "NORMAL"
        tokens.append(name)
        types.append(_type(kind))
    return tokens, types, found


def _scores(tokens: list[str], merges: list[Any]) -> list[float]:
    """Return the score of each token: sentencepiece joins the pair with the highest score, BPE the pair of lowest rank."""
    rank: dict[str, int] = {}
    for number, pair in enumerate(merges):
        rank.setdefault("".join(pair.split(" ") if isinstance(pair, str) else pair), number)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def _around(tokenizers: SideTokenizers) -> tuple[int | None, int | None]:
    """Return the ids of the special tokens that llama.cpp adds before and after all texts, None for no token.

    Raises:
        ArtifactError: if the ids of a side need several tokens, or the two sides differ.
    """
    pairs: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for sentences in tokenizers.distinct:
        special, eos = sentences.special_tokens, sentences.tokenizer.eos_token_id
        appended = [eos] if sentences.prompt.append == "eos" and eos not in special.after else []
        pairs.add(((*special.before,), (*appended, *special.after)))
    (before, after), *others = pairs
    if others or len(before) > 1 or len(after) > 1:
        raise ArtifactError(
            f"llama.cpp adds at most one token before and one after all texts; this encoder needs {sorted(pairs)}. With two "
            "prompts, export each side with --as."
        )
    return (before[0] if before else None), (after[0] if after else None)

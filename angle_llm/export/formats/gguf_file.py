"""Export a saved encoder as a GGUF file with the same vectors in llama.cpp.

    adapter ──► merge ──┐
    whole model ────────┴─► encoder.gguf        weights, tokenizer, pooling, BOS and EOS flags
                            encoder.gguf.json   prompt, maximum length, normalisation (see `llama_cpp`)

Tensors are read and written one at a time. Names, shapes and units follow llama.cpp:

* LLaMA: the rows of q and k are permuted, because llama.cpp rotates neighbouring dimensions. Factors of llama3 scaling
  are a tensor.
* Gemma-3: the weight of a norm is stored plus 1, and the norm of q includes `query_pre_attn_scalar`.
* The tokenizer is described, not stored: `tokenizer.ggml.pre` names a split that llama.cpp has. A tokenizer without such
  a name is refused.
* Special tokens have type UNUSED, so that most of their names in a text are plain characters, as in the encoder.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from torch import Tensor

from angle_llm.export.comparison import Verification
from angle_llm.export.formats.llama_cpp import FILE_TYPES, GGUF_NAME, Request, Usage
from angle_llm.export.merge import check_paths, merge
from angle_llm.export.verify import VerifyOptions, finish_folder
from angle_llm.model.source.artifact import write_directory
from angle_llm.model.source.backbone import BackboneLocation, load_tokenizer
from angle_llm.model.source.checks import CARD_NAME, MERGE_NAME, ArtifactError
from angle_llm.model.source.tokenizer import SideTokenizers
from angle_llm.model.source.weights import BaseWeights, open_base
from angle_llm.prompts import SIDES, Side, load_prompts
from angle_llm.settings.parsing import need_library

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
"""Architecture in llama.cpp by model type of transformers."""
_LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA_3, _QWEN_2 = (
    {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    for words in (_LLAMA_3_WORDS, _LLAMA_3_WORDS.replace("{1,3}", ""))
)
_SPLITS: dict[str, tuple[list[Any], bool, bool]] = {
    "gpt-2": ([], True, False),
    "smollm": ([{"type": "Digits", "individual_digits": True}], True, False),
    "llama-bpe": ([_LLAMA_3], False, True),
    "smaug-bpe": ([_LLAMA_3], False, False),
    "qwen2": ([_QWEN_2], False, False),
}
"""Split of a byte-level tokenizer by `tokenizer.ggml.pre`: steps, whether words are split too, whether whole words skip
the merges."""


def export_gguf(
    run: str | Path,
    out: str | Path,
    *,
    dtype: Literal["float32", "float16", "q8_0"] | None = None,
    side: Side | None = None,
    check: bool = True,
) -> Verification | None:
    """Export a saved encoder to a folder with a GGUF file and its usage; return the comparison of folder and encoder.

    Args:
        run: folder of the encoder: an adapter, which is merged in float32 first, or a whole model.
        out: folder to write.
        dtype: type of the weight matrices; vectors stay in float32. None: float32.
        side: use only the prompt of queries, or only the prompt of documents, for all texts.
        check: False skips the comparison, which needs xllamacpp; the result is then None.

    Raises:
        FileNotFoundError: if there is no saved encoder at `run`, or its base is missing.
        ArtifactError: for a model, tokenizer or pooling that llama.cpp cannot hold, a damaged encoder, or a target that
            would overwrite its inputs.
        MissingLibraryError: if xllamacpp is not installed and `check` is True.
        VerificationError: if the folder differs from the encoder; nothing is written.
    """
    # Checks before anything is written.
    if check:
        need_library("xllamacpp", "the comparison (--no-verify skips it)", "gguf")
    source, target, card = check_paths(run, out)
    unsupported = {
        f"pooling {card.pooling!r}": card.pooling not in ("last", "mean", "cls"),
        f"the first {card.dimensions} dimensions (`dimensions` in {CARD_NAME})": card.dimensions is not None,
        "Dense modules": card.dense > 0,
    }
    for feature, is_used in unsupported.items():
        if is_used:
            raise ArtifactError(f"--to gguf: {source} has {feature}, which a GGUF file cannot store.")
    # Tokenizer, and the usage that the folder stores.
    prompts = card.prompt if side is None else load_prompts(card.prompt.of(side))
    tokenizers = SideTokenizers.of(load_tokenizer(BackboneLocation(str(source))), prompts, card.max_length)
    vocabulary = Vocabulary(tokenizers)
    usage = Usage(
        prompt=prompts,
        pooling=card.pooling,
        dtype=dtype or "float32",
        max_length=card.max_length,
        normalize=card.normalize,
        unicode="NFC" if vocabulary.nfc else None,
        special_names=vocabulary.special_names,
        requests={side: Request.of(getattr(tokenizers, side), vocabulary.special_names) for side in SIDES},
    )

    def fill(folder: Path) -> Verification | None:
        with tempfile.TemporaryDirectory(prefix=".merged.", dir=folder) as work:
            merged = source if card.base is None else Path(work) / "merged"
            if card.base is not None:
                merge(source, merged, dtype="float32", check=False)
            weights = open_base(BackboneLocation(str(merged)), dtype="float32")
            write_gguf(folder / GGUF_NAME, weights, vocabulary, card.pooling, card.max_length, usage.dtype)
            if (merged / MERGE_NAME).is_file():
                shutil.copyfile(merged / MERGE_NAME, folder / MERGE_NAME)
        usage.write(folder)
        return finish_folder(folder, source, str(out), VerifyOptions(side=side) if check else None)

    return write_directory(target, fill, writer="")


# --- weights ----------------------------------------------------------------------------------------------------------


def write_gguf(
    file: Path, weights: BaseWeights, vocabulary: Vocabulary, pooling: str, max_length: int, dtype: str
) -> None:
    """Write the weights and the tokenizer of an encoder to a GGUF file; `dtype` is a key of `FILE_TYPES`.

    Raises:
        ArtifactError: for a model that llama.cpp does not have.
    """
    config: Any = weights.skeleton.config
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise ArtifactError(
            f"llama.cpp files are written for {', '.join(ARCHITECTURES)}; this model has type {config.model_type!r}."
        )
    _check_config(config, architecture)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    with closing(gguf.GGUFWriter(file, architecture)) as writer:
        writer.add_name("encoder")
        writer.add_file_type(FILE_TYPES[dtype])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_vocab_size(config.vocab_size)
        # The server of llama.cpp refuses a text that fills the context. No position is stored, so one more is free.
        writer.add_context_length(max(config.max_position_embeddings, max_length + 1))
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
        writer.add_rope_dimension_count(head_size)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_pooling_type(gguf.PoolingType[pooling.upper()])
        _add_positions(writer, config, architecture, head_size)
        vocabulary.add_to(writer, config.vocab_size)
        _add_tensors(writer, weights, architecture, dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _add_tensors(writer: gguf.GGUFWriter, weights: BaseWeights, architecture: str, dtype: str) -> None:
    """Add the tensors of a backbone, whose values are read when they are written.

    Vectors are stored in float32, and rows that Q8_0 cannot divide into blocks in float16.
    """
    config: Any = weights.skeleton.config
    gguf_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    types = gguf.GGMLQuantizationType
    matrix_type = {"float32": types.F32, "float16": types.F16, "q8_0": types.Q8_0}[dtype]
    lazy_tensor: Any = gguf.LazyNumpyTensor

    def read(name: str) -> Any:
        values = _converted(name, weights.read(name).float(), config, architecture)
        limit = torch.finfo(torch.float16 if dtype == "float16" else torch.float32).max
        if not float(values.abs().max()) <= limit:  # true for NaN too
            raise ArtifactError(f"{name} has values that are not finite in {dtype}. Choose another --dtype.")
        return values.contiguous().numpy()

    for name, parameter in weights.skeleton.state_dict().items():
        tensor_type = matrix_type if parameter.ndim > 1 else types.F32
        block_size, _ = gguf.GGML_QUANT_SIZES[tensor_type]
        if parameter.shape[-1] % block_size:
            tensor_type = types.F16
        meta = lazy_tensor.meta_with_dtype_and_shape(np.float32, tuple(parameter.shape))
        values = gguf.quants.quantize(lazy_tensor(meta=meta, args=(name,), func=read), tensor_type)
        gguf_name = gguf_names.get_name(f"model.{name}", try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        writer.add_tensor(gguf_name, values, raw_dtype=tensor_type)


def _converted(source: str, values: Tensor, config: Any, architecture: str) -> Tensor:
    """Convert the weight `source` of a backbone to the row order and scale that llama.cpp expects."""
    if architecture == "gemma3" and source.endswith("q_norm.weight"):
        # llama.cpp takes query_pre_attn_scalar from other sizes, in a model of 62 layers (27B) from all heads.
        size = config.hidden_size / config.num_attention_heads if config.num_hidden_layers == 62 else config.head_dim
        return (values + 1) * float((size / config.query_pre_attn_scalar) ** 0.5)
    if architecture == "gemma3" and source.endswith("norm.weight"):
        return values + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    projection = source.split(".")[-2]
    if architecture == "llama" and projection in heads:
        # From the two halves of a head to neighbours that are rotated together.
        return values.reshape(heads[projection], 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    return values


def _check_config(config: Any, architecture: str) -> None:
    """Raise `ArtifactError` for a model whose activation or attention llama.cpp does not compute for its architecture."""
    name, expected = ("hidden_activation", "gelu_pytorch_tanh") if architecture == "gemma3" else ("hidden_act", "silu")
    if (activation := getattr(config, name)) != expected:
        raise ArtifactError(
            f"llama.cpp computes {architecture} without activation {activation}, but this model has it."
        )
    if architecture != "gemma3" and "sliding_attention" in (getattr(config, "layer_types", None) or []):
        raise ArtifactError(f"llama.cpp computes {architecture} without sliding windows, but this model has them.")
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        raise ArtifactError(f"llama.cpp computes {architecture} with causal attention; this model is bidirectional.")


def _add_positions(writer: gguf.GGUFWriter, config: Any, architecture: str, head_size: int) -> None:
    """Add the rotary positions and sliding windows.

    Raises:
        ArtifactError: for a scaling or a pattern of windows that llama.cpp does not have.
    """
    # Sliding windows of Gemma.
    rope = config.rope_parameters
    if architecture == "gemma3":
        full = [number for number, layer_type in enumerate(config.layer_types, 1) if layer_type == "full_attention"]
        period = full[0] if full else len(config.layer_types) + 1
        if full != list(range(period, len(config.layer_types) + 1, period)):
            raise ArtifactError(
                f"llama.cpp needs full attention in every n-th layer, this model has it in layers {full}."
            )
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(period)
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    # Base frequency and scaling.
    writer.add_rope_freq_base(rope["rope_theta"])
    scaling = rope["rope_type"]
    if scaling == "llama3" and architecture == "llama":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = rope["rope_theta"] ** -(torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
        # llama.cpp divides each frequency by this factor.
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy().astype(np.float32))
    elif scaling == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif scaling != "default":
        raise ArtifactError(f"llama.cpp files of {architecture} cannot hold rope scaling {scaling}.")


# --- tokenizer --------------------------------------------------------------------------------------------------------


class Vocabulary:
    """Metadata of a tokenizer for a GGUF file: vocabulary, merges, split of words, and the BOS and EOS tokens to add."""

    def __init__(self, tokenizers: SideTokenizers) -> None:
        """Read the tokenizer.

        Raises:
            ArtifactError: for a tokenizer that llama.cpp does not have.
        """
        self.tokenizer = tokenizers.query.tokenizer
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        self.spec: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
        algorithm = self.spec.get("model", {}).get("type") or type(self.tokenizer).__name__
        if algorithm != "BPE":
            raise ArtifactError(f"llama.cpp files are written with BPE tokenizers; this tokenizer is {algorithm}.")
        self.sentencepiece = bool(self.spec["model"].get("byte_fallback"))
        """BPE of sentencepiece, with a score for each token; otherwise byte-level BPE with merges."""
        pre = "default" if self.sentencepiece else _split_name(self.spec)
        add_space = _adds_space(self.spec) if self.sentencepiece else False
        if pre is None or add_space is None:
            parts = json.dumps([self.spec["normalizer"], self.spec["pre_tokenizer"]], ensure_ascii=False)
            raise ArtifactError(
                f"llama.cpp does not have the normalizer or pre-tokenizer of this tokenizer: {parts:.400}"
            )
        self.pre, self.add_space = pre, add_space
        self.bos, self.eos = _added_tokens(tokenizers)
        self.nfc = bool(_steps(self.spec["normalizer"])) and not self.sentencepiece
        """Whether the tokenizer normalises a text to NFC, which llama.cpp does not."""
        self.special_names = [token["content"] for token in self.spec["added_tokens"] if token["special"]]

    def add_to(self, writer: gguf.GGUFWriter, size: int) -> None:
        """Add the metadata of the tokenizer, with a name for each of `size` rows of the token embeddings."""
        # Names and types of all token ids.
        ids = self.spec["model"]["vocab"]
        merges = self.spec["model"]["merges"]
        token_type = gguf.TokenType
        names = {number: name for name, number in ids.items()}
        types = dict.fromkeys(ids.values(), token_type.NORMAL)
        for token in self.spec["added_tokens"]:
            names[token["id"]] = token["content"]
            types[token["id"]] = token_type.UNUSED if token["special"] else token_type.USER_DEFINED
        tokens = [names.get(number, f"[PAD{number}]") for number in range(size)]
        # Vocabulary.
        writer.add_tokenizer_model("llama" if self.sentencepiece else "gpt2")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(tokens)
        writer.add_token_types([types.get(number, token_type.UNUSED) for number in range(size)])
        if self.sentencepiece:  # joins the pair with the highest score; BPE joins the pair of the lowest rank
            # Of several merges into one token, the first has the rank.
            rank = {"".join(pair): number for number, pair in reversed(list(enumerate(merges)))}
            writer.add_token_scores([-float(rank.get(token, len(merges))) for token in tokens])
        else:
            writer.add_token_merges([" ".join(pair) for pair in merges])
        # Special tokens.
        for name, added in (("bos", self.bos), ("eos", self.eos), ("unk", None), ("pad", None)):
            token_id = getattr(self.tokenizer, f"{name}_token_id") if added is None else added
            if token_id is not None:
                getattr(writer, f"add_{name}_token_id")(token_id)
        writer.add_add_bos_token(self.bos is not None)
        writer.add_add_eos_token(self.eos is not None)
        writer.add_add_space_prefix(self.add_space)


def _steps(part: Any) -> list[Any]:
    """Return the steps of a normalizer or pre-tokenizer."""
    if part is None:
        return []
    inside = part.get("normalizers", part.get("pretokenizers"))
    return [part] if inside is None else [step for child in inside for step in _steps(child)]


def _adds_space(spec: dict[str, Any]) -> bool | None:
    """Return whether a sentencepiece tokenizer adds a space before a text; None for another tokenizer."""
    steps, splits = _steps(spec["normalizer"]), _steps(spec["pre_tokenizer"])
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if not steps and len(splits) == 1 and splits[0]["type"] == "Metaspace" and not splits[0].get("split", True):
        return {"first": True, "never": False}.get(splits[0]["prepend_scheme"])
    # A split at spaces, of which there are none after the normalizer, has no effect.
    if not all(step["type"] == "Split" and step["pattern"] == {"String": " "} for step in splits):
        return None
    if steps == [to_space]:
        return False
    return True if steps == [{"type": "Prepend", "prepend": "▁"}, to_space] else None


def _split_name(spec: dict[str, Any]) -> str | None:
    """Return `tokenizer.ggml.pre` of a byte-level tokenizer; None for a split or normalizer that llama.cpp lacks."""
    *steps, last = _steps(spec["pre_tokenizer"]) or [{"type": None}]
    if (
        last["type"] != "ByteLevel"
        or last["add_prefix_space"]
        or _steps(spec["normalizer"]) not in ([], [{"type": "NFC"}])
    ):
        return None
    split = (steps, last["use_regex"], bool(spec["model"].get("ignore_merges")))
    return next((name for name, known in _SPLITS.items() if known == split), None)


def _added_tokens(tokenizers: SideTokenizers) -> tuple[int | None, int | None]:
    """Return the ids of the special tokens that llama.cpp adds before and after all texts, None for no token.

    Raises:
        ArtifactError: if the ids of a side need several tokens, or the two sides differ.
    """
    pairs: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for sentences in tokenizers.distinct:
        special = sentences.special_tokens
        eos = sentences.tokenizer.eos_token_id
        appended = [eos] if sentences.prompt.append == "eos" and eos not in special.after else []
        pairs.add(((*special.before,), (*appended, *special.after)))
    (before, after), *others = pairs
    if others or len(before) > 1 or len(after) > 1:
        raise ArtifactError(
            f"llama.cpp adds at most one token before and one after all texts; this encoder needs {sorted(pairs)}. With two "
            "prompts, export each side with --as."
        )
    return (before[0] if before else None), (after[0] if after else None)

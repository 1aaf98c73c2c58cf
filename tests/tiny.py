"""Tiny language models of every supported kind: random weights from a config and a seed.

Every parameter is random, also biases and norms, so that a state depends on every visible token and its position.
`tiny_backbone("llama")` returns the layers, `tiny_encoder("llama")` an encoder with the tokenizer of the kind.
"""

import atexit
import hashlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import pytest
import torch
from tiny_tokenizers import TOKENIZERS, VOCABULARY
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layers import lora
from angle_llm.model.layout.micro_batches import MicroBatch, Plan
from angle_llm.model.source.backbone import use_equal_states
from angle_llm.settings.parsing import settings_class
from angle_llm.settings.train import LoraSettings

POSITIONS = 128
"""Positions of every tiny model, without the two unused ones of RoBERTa."""
GGUF_AB = 300
"""Id of the token `ab` in `write_gguf`."""
WINDOW = 6
"""Tokens of a sliding window: fewer than any text with a prompt has."""

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # grouped-query attention
    "max_position_embeddings": POSITIONS,
}
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@dataclass(frozen=True)
class Kind:
    """A kind of language model."""

    config: Callable[[], PretrainedConfig]
    tokenizer: str
    causal: bool = True
    dimensions: int = 32


KINDS: dict[str, Kind] = {
    "llama": Kind(lambda: LlamaConfig(**_DECODER, tie_word_embeddings=False), "llama2"),
    "llama-tied": Kind(lambda: LlamaConfig(**_DECODER, tie_word_embeddings=True), "smollm2"),
    "mistral": Kind(lambda: MistralConfig(**_DECODER, sliding_window=WINDOW), "llama2"),
    "qwen2": Kind(lambda: Qwen2Config(**_DECODER), "smollm2"),
    "qwen3": Kind(lambda: Qwen3Config(**_DECODER, head_dim=16), "llama3"),
    "gemma2": Kind(lambda: Gemma2Config(**_DECODER, head_dim=8, sliding_window=WINDOW), "llama2"),
    "opt": Kind(
        lambda: OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=POSITIONS,
            word_embed_proj_dim=24,
            do_layer_norm_before=False,
            dropout=0.1,
        ),
        "roberta",
        dimensions=24,
    ),
    "gpt2": Kind(
        lambda: GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=POSITIONS,
            bos_token_id=2,
            eos_token_id=2,
        ),
        "smollm2",
    ),
    "bert": Kind(lambda: BertConfig(**_ENCODER, max_position_embeddings=POSITIONS), "bert", causal=False),
    "roberta": Kind(
        lambda: RobertaConfig(**_ENCODER, max_position_embeddings=POSITIONS + 2, pad_token_id=1),
        "roberta",
        causal=False,
    ),
}
LIKE_ANOTHER = {"llama-tied", "mistral", "qwen2", "qwen3", "roberta"}
"""Kinds with the layers of LLaMA or BERT."""
QUICK_KINDS = [pytest.param(kind, marks=[pytest.mark.slow] * (kind in LIKE_ANOTHER)) for kind in KINDS]
"""All kinds; those in `LIKE_ANOTHER` are slow tests."""
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA_2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2}
_CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"]}
HYBRID_VALUES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**_LINEAR, "head_dim": 8},
    "qwen3_5_moe_text": {**_LINEAR, **_EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16},
    "qwen3_next": {**_LINEAR, **_EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16},
    "olmo_hybrid": {**_LINEAR, "pad_token_id": 0},
    "minimax": {
        "layer_types": _LINEAR["layer_types"],
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,  # with one, its weight is always 1
        "block_size": 4,
    },
    "lfm2": _CONV,
    "lfm2_moe": {**_CONV, **_EXPERTS, "num_dense_layers": 1},
    "lfm3": {**_CONV, "pad_token_id": 0},
    "falcon_h1": {**_MAMBA_2, "head_dim": 8, "mamba_d_ssm": 64},
    "mamba": {"state_size": 4},
    "falcon_mamba": {"state_size": 4},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2},
    "jamba": {
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 4,
    },
    "bamba": {**_MAMBA_2, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MAMBA_2,
        "layer_types": _LINEAR["layer_types"],
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "adapter_rank": 4,
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 64},
    "rwkv": {"num_hidden_layers": 4, "attention_hidden_size": 32, "rescale_every": 2},
    "zaya": {},
}
"""Kinds with a convolution or a recurrent state, → values of their config; they are not in `KINDS`."""
NO_LORA = {"zamba2"}
"""Families whose layers share weights."""
FEW_TARGETS = {
    "qwen3_next": ("q_proj", "v_proj", "in_proj_qkvz", "out_proj"),
    "minimax": ("q_proj", "qkv_proj", "out_proj"),
}
"""Families whose expert weights peft would adapt with all linear layers, → other targets."""


def hybrid_config(kind: str) -> PretrainedConfig:
    """Return the config of a kind in `HYBRID_VALUES`; skip the test if this version of transformers does not have it."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers without {kind}")
    return CONFIG_MAPPING[kind](**{**_DECODER, "num_hidden_layers": 2, **HYBRID_VALUES[kind]})


HYBRID = {name: Kind(partial(hybrid_config, name), "qwen" if "qwen" in name else "smollm2") for name in HYBRID_VALUES}
_EVERY = KINDS | HYBRID
CAUSAL = [name for name, kind in KINDS.items() if kind.causal]
BIDIRECTIONAL = [name for name, kind in KINDS.items() if not kind.causal]


def tiny_backbone(kind: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, window: int | None = None) -> Any:
    """Return the layers of a kind, without head or pooler, in evaluation mode; `window` replaces its sliding window."""
    model = _seeded(AutoModel.from_config, kind, seed, **({} if window is None else {"sliding_window": window}))
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    use_equal_states(model)
    return _cast(model, dtype).eval()


def tiny_causal_lm(kind: str, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Any:
    """Return a kind with its language-model head, as published."""
    return _cast(_seeded(AutoModelForCausalLM.from_config, kind, seed), dtype).eval()


def tiny_encoder(kind: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **options: Any) -> SentenceEncoder:
    """Return an encoder of a kind; `options` as for `SentenceEncoder`."""
    return SentenceEncoder(tiny_backbone(kind, dtype, seed=seed), TOKENIZERS[_EVERY[kind].tokenizer](), **options)


def save_tiny_base(kind: str, folder: Path, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Path:
    """Write a model folder as published: weights, config, tokenizer, no card."""
    shutil.copytree(_saved_base(kind, dtype, seed), folder, dirs_exist_ok=True)
    return folder


@cache
def _saved_base(kind: str, dtype: torch.dtype, seed: int) -> Path:
    folder = _temporary_folder()
    tiny_backbone(kind, dtype, seed=seed).save_pretrained(folder)
    TOKENIZERS[_EVERY[kind].tokenizer]().save_pretrained(folder)
    return folder


def train_a_little(model: nn.Module) -> None:
    """Set lora_B, which is 0 before training, to random values."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


@settings_class
class PeftLora(LoraSettings):
    """An adapter with options of peft that training does not have."""

    rslora: bool = False
    dora: bool = False


def add_adapter(encoder: SentenceEncoder, settings: LoraSettings) -> None:
    """Add an adapter, with the options of `PeftLora` if it is one."""
    options = {}
    if isinstance(settings, PeftLora):
        options = {"use_rslora": settings.rslora, "use_dora": settings.dora}
    with patch.object(lora, "peft_model", partial(lora.peft_model, **options)):
        encoder.add_lora(settings)


def save_tiny_adapter(base: Path, folder: Path, settings: LoraSettings | None = None, **options: Any) -> Path:
    """Write an adapter with random updates on a model folder; `options` as for `from_pretrained`."""
    settings = settings or LoraSettings(rank=2, alpha=6)

    def make(path: Path) -> None:
        encoder = SentenceEncoder.from_pretrained(base, device="cpu", **options)
        add_adapter(encoder, settings)
        train_a_little(encoder.model)
        encoder.save_pretrained(path)

    return copy_of_adapter(base, folder, f"{settings!r} {options!r}", make)


_ADAPTERS: dict[str, tuple[Path, Path]] = {}


def copy_of_adapter(base: Path, folder: Path, key: str, make: Callable[[Path], object]) -> Path:
    """Copy the adapter that `make(path)` writes, once a session for a `key` and the files of a base, with its base replaced."""
    files = [(path.name, path.read_bytes()) for path in sorted(base.rglob("*")) if path.is_file()]
    key = hashlib.sha256(repr((key, files)).encode()).hexdigest()
    if key not in _ADAPTERS:
        kept = _temporary_folder() / "adapter"
        make(kept)
        _ADAPTERS[key] = kept, base.resolve()
    kept, first_base = _ADAPTERS[key]
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    for path in folder.iterdir():
        if path.suffix in (".json", ".md"):
            path.write_text(
                path.read_text(encoding="utf-8").replace(str(first_base), str(base.resolve())), encoding="utf-8"
            )
    return folder


def _temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def write_gguf(model: Any, path: Path, *, causal: bool = True, more: dict[str, torch.Tensor] | None = None) -> Path:
    """Write a tiny LLaMA like llama.cpp, in float32, with one token per ASCII character and two for pairs.

    `more` has tensors by their names in the file.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    if not causal:
        writer.add_causal_attention(False)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [chr(code) if 32 < code < 127 else f"<{code}>" for code in range(config.vocab_size)]
    tokens[GGUF_AB : GGUF_AB + 2] = "ab", "cd"
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b", "c d"])  # older versions of transformers split the letters of a single one
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        for projection, heads in {"q": config.num_attention_heads, "k": config.num_key_value_heads}.items():
            if f"{projection}_proj" in name:  # llama.cpp interleaves the two rotated halves
                tensor = tensor.view(heads, 2, -1, config.hidden_size).transpose(1, 2).reshape(tensor.shape)
        gguf_name = names.get_name(f"model.{name}", try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        writer.add_tensor(gguf_name, tensor.contiguous().numpy())
    for name, tensor in (more or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _cast(model: Any, dtype: torch.dtype) -> Any:
    """Only the weights, like `from_pretrained(dtype=…)`; `model.to(dtype)` would also round rotary frequencies."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _seeded(build: Callable[[PretrainedConfig], nn.Module], kind: str, seed: int, **changed: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = _EVERY[kind].config()
        config.update(changed)
        model = build(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def micro_batches_of(plan: Plan) -> list[MicroBatch]:
    """The tensors of all micro-batches of a plan."""
    return [group.make() for group in plan.groups]

"""Tiny random rerankers of the shapes that users have: BERT and XLM-RoBERTa classifiers, and a Qwen3 that answers yes or no."""

import copy
from pathlib import Path

import torch
from tiny_tokenizers import TOKENIZERS, VOCABULARY
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

RERANKERS = ("bert", "xlm-roberta", "qwen3")
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "<|im_end|><think></think>"
)
"""A chat template with the roles `query` and `document`."""
_SIZES = {"vocab_size": VOCABULARY + 10, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 2, "max_position_embeddings": 130}


def save_tiny_reranker(kind: str, folder: Path, *, seed: int = 0, labels: int = 1) -> Path:
    """Write a folder as on the hub: weights, config, tokenizer; scores differ clearly between pairs."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, tokenizer = _built(kind, labels)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.5)
    model.save_pretrained(folder)
    words = copy.deepcopy(TOKENIZERS[tokenizer]())
    words.model_max_length = 128
    if kind == "qwen3":
        words.add_tokens(["yes", "no"])
        words.chat_template = TEMPLATE
    words.save_pretrained(folder)
    return folder


def _built(kind: str, labels: int) -> tuple[PreTrainedModel, str]:
    """Return a model with its head, and the name of its tokenizer."""
    if kind == "bert":  # cross-encoder/ms-marco-MiniLM-L6-v2
        return BertForSequenceClassification(BertConfig(**_SIZES, **_HEADS, num_labels=labels)), "bert"
    if kind == "xlm-roberta":  # BAAI/bge-reranker-v2-m3
        config = XLMRobertaConfig(**_SIZES, **_HEADS, num_labels=labels, pad_token_id=1)
        return XLMRobertaForSequenceClassification(config), "roberta"
    config = Qwen3Config(**_SIZES, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    return Qwen3ForCausalLM(config), "qwen"

"""A tiny folder with the files of EmbeddingGemma 2: a composite model whose texts go through a chat template.

The image and video processors of the model need torchvision. `open_in_library` opens the folder in sentence-transformers
with a processor that has a tokenizer only, so that texts take the way of the whole processor.
"""

import copy
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from tiny_tokenizers import TOKENIZERS, VOCABULARY

PROMPTS = {
    "query": "task: search result | query: ",
    "document": "title: none | text: ",
    "STS": "task: sentence similarity | query: ",
}
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for item in message['content'] -%}{%- if item['type'] == 'text' -%}{{- item['text'] -}}{%- elif item['type'] == "
    "'image' -%}{{- '<|image|>' -}}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endfor -%}"
)
"""Joins the texts of all messages, without roles and BOS."""
DIMENSIONS, LAYERS = 48, 4
_FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 12, "sliding_window_pattern": 2,
    "hidden_size_per_layer_input": 16, "embedding_dim": DIMENSIONS, "global_head_dim": 16,
    "num_global_key_value_heads": 1, "max_position_embeddings": 8192,
}  # fmt: skip
_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "patch_size": 4, "position_embedding_size": 64, "pooling_kernel_size": 2,
}  # fmt: skip


def tokenizer() -> Any:
    """Gemma's kind, with BOS and EOS around a text."""
    made = copy.deepcopy(TOKENIZERS["gemma"]())
    made.add_eos_token = True
    made.chat_template = CHAT_TEMPLATE
    return made


def save_folder(folder: Path, *, towers: bool = False) -> Path:
    """Write the folder with random weights; `towers`: with a vision tower."""
    torch.manual_seed(0)
    vision = transformers.Gemma4VisionConfig(**_TOWER) if towers else None
    text = transformers.EmbeddingGemma2TextConfig(**_TEXT)
    config = transformers.EmbeddingGemma2Config(text_config=text, vision_config=vision, audio_config=None)
    model = transformers.AutoModel.from_config(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.05)
        for layer in model.language_model.layers:
            layer.layer_scalar.fill_(0.7)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    classes = (
        "base.modules.transformer.Transformer",
        "sentence_transformer.modules.pooling.Pooling",
        "base.modules.normalize.Normalize",
    )
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.{name}"}
        for number, (path, name) in enumerate(zip(("", "1_Pooling", "2_Normalize"), classes, strict=True))
    ]
    modalities = dict.fromkeys(("text", "image", "audio", "video"), _FORWARD)
    files: dict[str, Any] = {
        "modules.json": modules,
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": {**modalities, "message": {**_FORWARD, "format": "structured"}},
            "module_output_name": "token_embeddings",
        },
        "config_sentence_transformers.json": {
            "__version__": {"sentence_transformers": "6.1.0"},
            "default_prompt_name": None,
            "model_type": "SentenceTransformer",
            "prompts": PROMPTS,
            "requirements": {"sentence-transformers": ">=6.1.0"},
            "similarity_fn_name": "cosine",
        },
        "1_Pooling/config.json": {"embedding_dimension": DIMENSIONS, "pooling_mode": "mean", "include_prompt": True},
        "processor_config.json": {"processor_class": "EmbeddingGemma2Processor"},
    }
    for name, values in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(values))
    return folder


class TextProcessor(transformers.ProcessorMixin):
    """A processor for texts and messages of texts."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        super().__init__(tokenizer, chat_template=chat_template)


def open_in_library(folder: Path) -> Any:
    """Open the folder in sentence-transformers on a CPU."""
    from sentence_transformers import SentenceTransformer

    made = transformers.AutoTokenizer.from_pretrained(folder)
    processor = TextProcessor(made, chat_template=made.chat_template)
    with patch.object(transformers.AutoProcessor, "from_pretrained", return_value=processor):
        return SentenceTransformer(str(folder), device="cpu")

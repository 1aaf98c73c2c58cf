"""A GGUF file as the base: weights, configuration and tokenizer."""

from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny import GGUF_AB, tiny_backbone, write_gguf
from transformers import AutoModel

from angle_llm import SentenceEncoder
from angle_llm.model.source import backbone
from angle_llm.model.source.backbone import load_backbone, load_config, load_tokenizer
from angle_llm.model.source.checks import ArtifactError
from angle_llm.model.source.gguf_base import header_read_once
from angle_llm.model.source.resolve import locate


def assert_same_weights(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_a_gguf_file_has_the_same_weights_and_a_tokenizer(tmp_path: Path) -> None:
    published = tiny_backbone("llama-tied")
    location = locate(str(write_gguf(published, tmp_path / "tiny.gguf")))
    loaded = load_backbone(location)
    assert_same_weights(loaded, published)
    assert {parameter.dtype for parameter in load_backbone(location, dtype="bfloat16").parameters()} == {torch.bfloat16}
    assert load_tokenizer(location)("abba", add_special_tokens=False)["input_ids"] == [GGUF_AB, ord("b"), ord("a")]
    loaded.save_pretrained(tmp_path / "plain")  # refused for a model that is marked as quantized
    assert_same_weights(load_backbone(locate(str(tmp_path / "plain"))), published)


def test_biases_and_bidirectional_attention_of_a_gguf_file_are_read(tmp_path: Path) -> None:
    config = tiny_backbone("llama-tied").config
    config.mlp_bias = True
    published = AutoModel.from_config(config)
    for name, weight in published.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(weight)
    loaded = load_backbone(locate(str(write_gguf(published, tmp_path / "tiny.gguf", causal=False))))
    assert_same_weights(loaded, published)
    assert backbone.is_made_bidirectional(loaded)


def test_a_gguf_file_with_weights_that_transformers_drops_is_refused(tmp_path: Path) -> None:
    """Norms of queries, as in StableLM-2-12B."""
    more = {"blk.0.attn_q_norm.weight": torch.ones(16)}
    file = write_gguf(tiny_backbone("llama-tied"), tmp_path / "tiny.gguf", more=more)
    with pytest.raises(ArtifactError, match=r"layers have .* weights, and the LlamaModel"):
        load_backbone(locate(str(file)))


def test_gguf_reader_parses_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location = locate(str(write_gguf(tiny_backbone("llama-tied"), tmp_path / "tiny.gguf")))
    originals = gguf.GGUFReader, gguf.get_tensor_name_map
    read, build = [], gguf.GGUFReader._build_fields

    def counted(reader: gguf.GGUFReader, *given: Any) -> Any:
        read.append(type(reader.data))
        return build(reader, *given)

    monkeypatch.setattr(gguf.GGUFReader, "_build_fields", counted)

    for load in (
        partial(load_config, location),
        partial(load_tokenizer, location),
        partial(load_backbone, location, dtype="float32"),
        partial(SentenceEncoder.from_pretrained, tmp_path / "tiny.gguf", prompt="plain"),
    ):
        read.clear()
        load()
        assert read == [np.ndarray]
    with pytest.raises(KeyError), header_read_once(location.gguf_file), header_read_once(location.gguf_file):
        raise KeyError
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == originals

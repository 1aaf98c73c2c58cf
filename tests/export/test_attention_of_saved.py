"""Adapters, merged models and stored vectors of decoder-only models keep their attention."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import save_tiny_adapter, save_tiny_base

from angle_llm import SentenceEncoder
from angle_llm.export.card import CardFacts, model_card
from angle_llm.export.merge import merge
from angle_llm.export.verify import _base_rows
from angle_llm.io import FolderError
from angle_llm.model.source.checks import CARD_NAME, ArtifactError
from angle_llm.settings.commands import EmbedSettings
from angle_llm.settings.train import LoraSettings
from angle_llm.tools.embed import embed_main
from angle_llm.tools.search import VectorSearch

TEXTS = ["A man eats.", "A dog runs over the wet grass and barks at an old tree.", "Hi", "One two three four."]


def encode(path: Path, **options: Any) -> np.ndarray:
    return SentenceEncoder.from_pretrained(path, device="cpu", **options).encode(TEXTS)


@pytest.mark.parametrize(
    "bits",
    [
        None,
        pytest.param(4, marks=pytest.mark.needs("bitsandbytes")),
        pytest.param(8, marks=[pytest.mark.needs("bitsandbytes"), pytest.mark.slow]),
    ],
)
def test_adapter_and_merged_model_keep_the_attention(tmp_path: Path, bits: int | None) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    causal = save_tiny_adapter(base, tmp_path / "causal", prompt="plain", pooling="mean", bits=bits)
    adapter = save_tiny_adapter(base, tmp_path / "adapter", attention="bidirectional", bits=bits)
    encoder = SentenceEncoder.from_pretrained(adapter, device="cpu")
    assert (encoder.pooling, encoder.prompt.name, encoder.model.options.causal) == ("mean", "plain", False)
    assert json.loads((adapter / CARD_NAME).read_text())["attention"] == "bidirectional"
    rows_ND = encoder.encode(TEXTS)
    assert np.abs(rows_ND - encode(causal)).max() > 0.1
    np.testing.assert_array_equal(rows_ND, encode(adapter, attention="bidirectional"))
    with pytest.raises(ArtifactError, match="trained with causal attention"):
        encode(causal, attention="bidirectional")
    # In 8 bits, activations are rounded too.
    found = merge(adapter, tmp_path / "merged", device="cpu")
    assert found is not None
    assert found.holds
    np.testing.assert_allclose(encode(tmp_path / "merged"), rows_ND, atol={None: 1e-5, 4: 1e-3, 8: 0.05}[bits])
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert config["is_causal"] is False
    if bits:  # a merged model has no bits
        return
    # A merged model can be trained with another attention, an adapter on it as well.
    merge(causal, tmp_path / "merged causal", check=False)
    changed = SentenceEncoder.from_pretrained(tmp_path / "merged causal", device="cpu", attention="bidirectional")
    changed.add_lora(LoraSettings(rank=2))
    changed.save_pretrained(tmp_path / "second")
    np.testing.assert_array_equal(encode(tmp_path / "second"), changed.encode(TEXTS))


def test_encoders_with_other_attention_are_not_averaged(tmp_path: Path) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    causal = save_tiny_adapter(base, tmp_path / "causal", prompt="plain", pooling="mean")
    both = save_tiny_adapter(base, tmp_path / "both", attention="bidirectional")
    with pytest.raises(ArtifactError, match="attention"):
        merge(both, tmp_path / "out", others=[causal], device="cpu")


def test_stored_vectors_are_searched_with_the_attention_that_made_them(tmp_path: Path) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    files: dict[str, Any] = {"model": str(base), "input": str(tmp_path / "texts.txt"), "output": tmp_path / "rows"}
    embed_main(EmbedSettings(**files, attention="bidirectional", device="cpu", store_text=True))
    hits = VectorSearch(tmp_path / "rows")(TEXTS, top=1)
    assert [hit.text for (hit,) in hits] == TEXTS
    assert min(hit.cosine for (hit,) in hits) > 0.999
    causal = EmbedSettings(**files, prompt="plain", pooling="mean", device="cpu", store_text=True)
    with pytest.raises(FolderError, match=r"model\.attention"):
        embed_main(causal)
    embed_main(replace(causal, output=tmp_path / "causal"))
    search = VectorSearch(tmp_path / "causal")
    assert search.encoder.model.options.causal
    assert min(hit.cosine for (hit,) in search(TEXTS, top=1)) > 0.999


def test_the_base_of_a_merged_model_has_its_attention(tmp_path: Path) -> None:
    base = save_tiny_base("llama", tmp_path / "base")
    adapter = save_tiny_adapter(base, tmp_path / "adapter", attention="bidirectional")
    merge(adapter, tmp_path / "merged", check=False)
    encoder = SentenceEncoder.from_pretrained(tmp_path / "merged", device="cpu")
    rows_ND, _ = _base_rows(encoder, tmp_path / "merged", TEXTS, "cpu", (None,), None)
    np.testing.assert_allclose(rows_ND, encode(base, attention="bidirectional"), atol=1e-6)
    assert "Attention is bidirectional" in model_card(CardFacts.read(adapter), "repo")

from functools import cache

import pytest
import torch
from composites import CONFIGS, TEXT_TYPES, no_tower_of_timm, save_composite
from peft import AutoPeftModel
from safetensors import safe_open
from tiny import train_a_little
from tiny_tokenizers import VOCABULARY

from angle_llm import SentenceEncoder
from angle_llm.model.layers.fingerprint import weights_fingerprint
from angle_llm.model.layers.lora import quiet_peft
from angle_llm.model.source.backbone import BackboneLocation, load_backbone
from angle_llm.model.source.weights import open_base
from angle_llm.settings.train import LoraSettings


def _missing(name: str) -> bool:
    """Whether the installed transformers lacks a composite model."""
    try:
        CONFIGS[name]()
    except (AttributeError, KeyError, ValueError):
        return True
    return False


NAMES = [name for name in CONFIGS if not _missing(name)]


def relative(a, b):
    return float((a - b).abs().max() / b.abs().max())


def batch_with_padding():
    torch.manual_seed(1)
    ids_BT = torch.randint(3, VOCABULARY, (3, 70))
    mask_BT = torch.ones_like(ids_BT)
    for row, length in ((1, 5), (2, 41)):
        ids_BT[row, length:] = mask_BT[row, length:] = 0
    return ids_BT, mask_BT


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function from a name to the folder of a composite model and the model; each is made once."""
    return cache(lambda name: save_composite(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", NAMES)
def test_the_text_model_alone_has_the_vectors_of_the_composite_model(name, saved):
    folder, composite = saved(name)
    backbone = load_backbone(BackboneLocation(str(folder)), dtype="float32")
    ids_BT, mask_BT = batch_with_padding()
    with torch.no_grad():
        expected_BTD = composite(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state
        states_BTD = backbone(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state
    assert backbone.config.model_type == TEXT_TYPES[name]
    assert relative(states_BTD[mask_BT.bool()], expected_BTD[mask_BT.bool()]) < 1e-6  # rounding to float32


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_read_one_by_one_without_the_towers(name, saved):
    folder, _ = saved(name)
    location = BackboneLocation(str(folder))
    backbone = load_backbone(location, dtype="float32")
    base = open_base(location, dtype="float32")
    assert base.streamed
    assert base.fingerprint() == weights_fingerprint(backbone)
    assert all(torch.equal(base.read(name), tensor) for name, tensor in backbone.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_layouts_give_the_vectors_of_padded_texts(name, saved):
    folder, _ = saved(name)
    texts = ["A man eats.", "A man eats 3 apples.", "word " * 60, "word " * 60 + "end", "Some text."]
    pooling = "mean" if name == "embedding_gemma2" else "last"
    options = {"device": "cpu", "dtype": "float32", "pooling": pooling, "max_length": 200}
    encoder = SentenceEncoder.from_pretrained(folder, **options)
    padded = SentenceEncoder.from_pretrained(folder, layout="padded", **options)
    expected = {"embedding_gemma2": "packed", "qwen3_5": "padded"}.get(name, "trie")
    assert encoder.layouts.layout == expected
    rows, expected_rows = (torch.tensor(one.encode(texts)) for one in (encoder, padded))
    assert relative(rows, expected_rows) < 1e-5  # another order of additions in float32
    assert torch.pdist(rows).min() > 1e-3 * rows.norm(dim=1).mean()


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_adapter_fits_the_composite_model_in_peft_and_vllm(name, saved, tmp_path):
    folder, composite = saved(name)
    encoder = SentenceEncoder.from_pretrained(folder, device="cpu", dtype="float32", pooling="last", layout="padded")
    encoder.add_lora(LoraSettings(rank=2, targets=["q_proj", "o_proj"]))
    train_a_little(encoder.model)
    encoder.save_pretrained(tmp_path / "model")
    # With other names, vLLM serves the vectors of the base without an error (vllm/lora/utils.py).
    with safe_open(tmp_path / "model" / "adapter_model.safetensors", framework="pt") as file:
        roots = {key.partition(".layers.")[0] for key in file.keys()}  # noqa: SIM118
    paths = {"embedding_gemma2": "language_model", "smolvlm": "model.text_model"}
    assert roots == {f"base_model.model.{paths.get(name, 'model.language_model')}"}
    # peft: the composite model with the adapter has the vectors of the encoder, and its towers are not adapted.
    ids_BT, mask_BT = batch_with_padding()
    with quiet_peft(), no_tower_of_timm():
        opened = AutoPeftModel.from_pretrained(tmp_path / "model", dtype=torch.float32)
    adapted = [key for key, _ in opened.named_parameters() if "lora_" in key]
    assert len(adapted) == sum("lora_" in key for key, _ in encoder.model.backbone.named_parameters())
    assert all(key.startswith(tuple(roots)) for key in adapted)
    whole = opened.get_base_model()
    with torch.no_grad():
        expected_BTD = encoder.model.backbone(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state
        states_BTD, base_BTD = (
            model(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state
            for model in (getattr(whole, "model", whole), composite)
        )
    expected = expected_BTD[mask_BT.bool()]
    assert relative(states_BTD[mask_BT.bool()], expected) < 1e-6  # rounding to float32
    assert relative(base_BTD[mask_BT.bool()], expected) > 1e-4
    # This package opens the folder, too.
    again = SentenceEncoder.from_pretrained(tmp_path / "model", device="cpu", layout="padded")
    texts = ["A man eats.", "Some text."]
    assert relative(torch.tensor(again.encode(texts)), torch.tensor(encoder.encode(texts))) < 1e-6

import copy
import json
import os
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from composites import CONFIGS, TEXT_TYPES, no_tower_of_timm, save_composite, tiny_composite
from peft import AutoPeftModel, LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import train_a_little
from tiny_tokenizers import TOKENIZERS, VOCABULARY
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from angle_llm import SentenceEncoder
from angle_llm.export.merge import merge
from angle_llm.model.layers.fingerprint import weights_fingerprint
from angle_llm.model.meta_model import tiny_copy
from angle_llm.model.source.backbone import BackboneLocation, load_backbone, open_pretrained
from angle_llm.model.source.checks import ArtifactError
from angle_llm.model.source.composite import text_part
from angle_llm.model.source.weights import open_base
from angle_llm.run import run_training
from angle_llm.settings.train import DataSettings, LoraSettings, ModelSettings, TrainSettings


def _missing(name: str) -> bool:
    """Whether the installed transformers lacks a composite model."""
    try:
        CONFIGS[name]()
    except (AttributeError, KeyError, ValueError):
        return True
    return False


NAMES = [name for name in CONFIGS if not _missing(name)]
_LIKE_ANOTHER = {"qwen2_vl", "qwen3_vl", "mistral3", "llava"}
QUICK_NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in _LIKE_ANOTHER)) for name in NAMES]

QUIET_PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
"""peft reads a name that is deprecated in transformers 5.23."""


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


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("gemma3", "qwen2_5_vl", "mistral3", "llava")])
def test_the_language_model_of_a_composite_model_has_its_logits(name, saved):
    folder, _ = saved(name)
    model = open_pretrained("AutoModelForCausalLM", BackboneLocation(str(folder)), dtype="float32").eval()
    ids_BT, mask_BT = batch_with_padding()
    with torch.no_grad():
        logits, expected = (
            one(input_ids=ids_BT, attention_mask=mask_BT).logits[mask_BT.bool()]
            for one in (model, tiny_composite(name))
        )
    assert relative(logits, expected) < 1e-6


def _peak_memory():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of the memory is reset on Linux only")
def test_tensors_of_towers_are_not_read(saved, tmp_path):
    """The tower is a tensor of 512 MB, a hole in the file."""
    folder, _ = saved("gemma3")
    shutil.copytree(folder, tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    content = path.read_bytes()
    size = 2**29
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    start = len(content) - 8 - length
    header["vision_tower.large"] = {"dtype": "F32", "shape": [size // 4], "data_offsets": [start, start + size]}
    longer = json.dumps(header).encode()
    path.write_bytes(len(longer).to_bytes(8, "little") + longer + content[8 + length :])
    os.truncate(path, 8 + len(longer) + start + size)
    location = BackboneLocation(str(tmp_path / "base"))
    original = weights_fingerprint(load_backbone(BackboneLocation(str(folder)), dtype="float32"))
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_memory()
    assert weights_fingerprint(load_backbone(location, dtype="float32")) == original
    assert open_base(location, dtype="float32").fingerprint() == original
    assert _peak_memory() - before < size / 4


@pytest.mark.parametrize("name", QUICK_NAMES)
def test_weights_are_read_one_by_one_without_the_towers(name, saved):
    folder, _ = saved(name)
    location = BackboneLocation(str(folder))
    backbone = load_backbone(location, dtype="float32")
    base = open_base(location, dtype="float32")
    assert next(base.skeleton.parameters()).is_meta
    assert base.fingerprint() == weights_fingerprint(backbone)
    assert all(torch.equal(base.read(name), tensor) for name, tensor in backbone.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_the_text_model_can_be_made_small_for_a_forecast(name):
    config, _ = text_part(CONFIGS[name](), name)
    small = tiny_copy(config)
    assert small.config.model_type == TEXT_TYPES[name]
    assert small.config.vocab_size == 128
    types = [set(getattr(one, "layer_types", None) or ()) for one in (small.config, config)]
    assert types[0] == types[1]


@pytest.mark.parametrize("name", QUICK_NAMES)
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


ADAPTED = ("qwen2_5_vl", "gemma3", "gemma3n", "smolvlm", "embedding_gemma2")
"""Composite models of every place of the text model: `model.language_model`, `model.text_model`, `language_model`."""


@QUIET_PEFT
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ADAPTED)) for name in NAMES],
)
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
    with no_tower_of_timm():
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
    # Merged into the composite model by peft: the towers are unchanged, and this package opens its text model.
    if name in ("gemma3", "qwen2_5_vl"):
        opened.merge_and_unload().save_pretrained(tmp_path / "whole")
        before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "whole"))
        towers = {key for key in before if ".visual." in f".{key}" or "vision_tower" in key}
        assert towers
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in towers)
        merged = load_backbone(BackboneLocation(str(tmp_path / "whole")), dtype="float32")
        with torch.no_grad():
            states_BTD = merged(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state
        assert relative(states_BTD[mask_BT.bool()], expected) < 1e-5  # rounding of the merge
    # This package opens the folder, too.
    again = SentenceEncoder.from_pretrained(tmp_path / "model", device="cpu", layout="padded")
    texts = ["A man eats.", "Some text."]
    assert relative(torch.tensor(again.encode(texts)), torch.tensor(encoder.encode(texts))) < 1e-6


def _default_configs():
    """Return the default configuration of every model type of transformers that has parts, except encoder-decoders."""
    configs = {}
    for name in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[name]
        if config_class.sub_configs:
            with suppress(Exception):  # some have no default configuration
                configs[name] = config_class()
    return {name: config for name, config in configs.items() if not config.is_encoder_decoder}


@pytest.mark.slow
def test_the_text_model_of_every_multimodal_model_is_opened_or_refused_by_name():
    opened, refused = dict[str, str](), dict[str, str]()
    for name, config in _default_configs().items():
        try:
            text, composite = text_part(config, "folder")
        except ArtifactError as error:
            refused[name] = str(error)
            continue
        assert composite is not None or text is config
        towers = [part for part in ("vision_config", "audio_config") if getattr(text, part, None) is not None]
        assert not towers, name
        opened |= {} if composite is None else {name: text.model_type}
    assert all(f"folder is a multimodal model of type {name}," in message for name, message in refused.items())
    known = {
        "gemma3": "gemma3_text",
        "qwen2_5_vl": "qwen2",
        "qwen3_vl": "qwen3",
        "mistral3": "mistral",
        "idefics3": "llama",
    }
    assert known.items() <= opened.items()
    assert len(opened) > 40
    assert {"siglip", "chameleon", "qwen2_5_omni", "qwen3_vl_moe"} <= refused.keys()


def test_the_rotation_of_a_published_qwen_model_is_one_that_every_program_reads():
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    config = transformers.Qwen2_5_VLConfig(text_config={"rope_scaling": rope, "rope_theta": 1e6})
    text, _ = text_part(config, "folder")
    assert text.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("name", "with_head", "path"),
    [("modernvbert", "ModernVBertForMaskedLM", "model.text_model"), ("modernvbert", "ModernVBertModel", "text_model"),
     ("clip", "CLIPModel", "text_model")],
)  # fmt: skip
def test_the_path_of_a_text_model_with_another_name(name, with_head, path):
    config = CONFIG_MAPPING[name]()
    config.architectures = [with_head]
    _, composite = text_part(config, "folder")
    assert composite == (with_head, path)


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("gemma3n", "gemma4")])
def test_first_layers_of_a_model_with_a_projection_for_all_layers_are_refused(name, saved):
    folder, _ = saved(name)
    with pytest.raises(ValueError, match=r"layers: Gemma\w+ gives other states with 2 layers"):
        SentenceEncoder.from_pretrained(folder, device="cpu", prompt="plain", pooling="last", layers=2)


NO_PATH = {
    "InstructBlipModel", "InstructBlipVideoModel", "Sam3Model", "Sam3LiteTextModel", "VibeVoiceForConditionalGeneration",
}  # fmt: skip
"""Classes of which no folder with a text model for embeddings is known."""


@pytest.mark.slow
def test_the_path_of_every_text_model_is_its_place_in_the_composite_model():
    transformers.logging.set_verbosity_error()
    checked = 0
    for name, config in _default_configs().items():
        with_head = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(
            name, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(name)
        )
        with suppress(ArtifactError):
            text_class = type(config.get_text_config())
            for model_class in {MODEL_MAPPING_NAMES.get(name), with_head} - {None}:
                config.architectures = [model_class]
                _, composite = text_part(copy.deepcopy(config), name)
                model = None
                with suppress(Exception), torch.device("meta"):  # some have no default sizes, or need other packages
                    model = getattr(transformers, model_class)(config)
                if composite is None or model is None or model_class in NO_PATH:
                    continue
                assert type(model.get_submodule(composite.path).config) is text_class, name
                checked += 1
    assert checked > 80


def test_a_multimodal_model_without_a_text_model_is_refused_before_training(tmp_path):
    transformers.ChameleonConfig().save_pretrained(tmp_path / "base")
    TOKENIZERS["llama2"]().save_pretrained(tmp_path / "base")
    (tmp_path / "pairs.jsonl").write_text('{"text1": "A man eats.", "text2": "Someone eats."}\n')
    settings = TrainSettings(
        run_dir=str(tmp_path / "run"),
        model=ModelSettings(path=str(tmp_path / "base")),
        data=DataSettings(path=str(tmp_path / "pairs.jsonl")),
    )
    with pytest.raises(ArtifactError, match="multimodal model of type chameleon"):
        run_training(settings)
    assert not (tmp_path / "run" / "model").exists()


@QUIET_PEFT
def test_an_adapter_that_also_changes_a_tower_is_refused_by_the_true_reason(saved, tmp_path):
    folder, _ = saved("gemma3")
    whole = AutoModelForImageTextToText.from_pretrained(folder)
    adapted = get_peft_model(whole, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    adapted.save_pretrained(tmp_path / "both")
    with pytest.raises(ArtifactError, match=r"vision_tower.*not in the text model.*exclude_modules"):
        SentenceEncoder.from_pretrained(folder, adapter=tmp_path / "both", prompt="plain", device="cpu")


SMALL_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


def test_the_text_model_of_clip_takes_an_adapter_and_more_tokens_than_positions(tmp_path):
    """The forward method of peft's class for this task gives arguments to the layers that CLIP gives them too."""
    text = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes = {"num_attention_heads": 4, "max_position_embeddings": 40, "eos_token_id": 2, "bos_token_id": 1}
    config = transformers.CLIPConfig(text_config=text | sizes, vision_config=SMALL_VISION)
    transformers.CLIPModel(config).save_pretrained(tmp_path / "base")
    TOKENIZERS["llama2"]().save_pretrained(tmp_path / "base")
    options = {"device": "cpu", "pooling": "last", "prompt": "plain", "max_length": 40}
    encoder = SentenceEncoder.from_pretrained(tmp_path / "base", **options)
    encoder.add_lora(LoraSettings(rank=2))
    train_a_little(encoder.model)
    texts = [f"A man eats {number} apples." for number in range(9)]
    rows = torch.tensor(encoder.encode(texts))
    assert (
        relative(rows, torch.tensor(SentenceEncoder.from_pretrained(tmp_path / "base", **options).encode(texts))) > 1e-3
    )
    alone = torch.cat([torch.tensor(encoder.encode([text])) for text in texts])
    assert relative(rows, alone) < 1e-5
    encoder.save_pretrained(tmp_path / "model")
    merge(tmp_path / "model", tmp_path / "merged")
    for name in ("model", "merged"):
        assert (
            relative(torch.tensor(SentenceEncoder.from_pretrained(tmp_path / name, device="cpu").encode(texts)), rows)
            < 1e-5
        )


def test_a_quantized_multimodal_model_is_refused():
    config = CONFIGS["gemma3"]()
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(ArtifactError, match=r"stored quantized.*--model\.bits"):
        text_part(config, "folder")


VLLM_CLASSES = {
    "gemma3": "Gemma3TextModel", "gemma3n": "Gemma3nForCausalLM", "gemma4": "Gemma4ForCausalLM", "qwen2_5_vl": "Qwen2Model",
    "qwen3_vl": "Qwen3Model", "qwen3_5": "Qwen3_5ForCausalLM", "mistral3": "MistralModel",
}  # fmt: skip
"""Name → class that vLLM 0.32 opens the merged folder with (model_executor/models/registry.py)."""
SLOW = [name for name in NAMES if name not in ("gemma4", "qwen2_5_vl")]


@pytest.mark.parametrize(
    "name", [*sorted({*NAMES} - {*SLOW}), *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
@pytest.mark.needs("sentence_transformers")
def test_a_run_trains_the_text_model_and_merges_to_a_text_only_folder(name, saved, tmp_path):
    folder, _ = saved(name)
    pairs = [{"text1": f"A man eats {number} apples.", "text2": f"Someone eats {number}."} for number in range(4)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)) + "\n")
    settings = TrainSettings(
        run_dir=str(tmp_path / "run"),
        model=ModelSettings(path=str(folder), dtype="float32", max_length=100, prompt="query"),
        lora=LoraSettings(rank=2),
        data=DataSettings(path=str(tmp_path / "pairs.jsonl")),
        batch_size=2,
        max_steps=2,
    )
    encoder = SentenceEncoder.from_pretrained(run_training(settings).folder, device="cpu")
    verification = merge(tmp_path / "run" / "model", tmp_path / "whole", device="cpu")
    assert verification is not None
    assert verification.holds
    # The merged folder is a text-only model.
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["model_type"] == TEXT_TYPES[name]
    assert config["architectures"] == [VLLM_CLASSES.get(name, config["architectures"][0])]
    assert not {"text_config", "vision_config", "audio_config"} & config.keys()
    assert not [path.name for path in (tmp_path / "whole").iterdir() if "processor" in path.name or "chat" in path.name]
    with safe_open(tmp_path / "whole" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(load_backbone(BackboneLocation(str(tmp_path / "whole"))).state_dict())
    from sentence_transformers import SentenceTransformer

    texts = ["A man eats.", "Some other text of a few words."]
    rows = SentenceTransformer(str(tmp_path / "whole"), device="cpu").encode(texts, show_progress_bar=False)
    assert relative(torch.tensor(rows), torch.tensor(encoder.encode(texts))) < 2e-5  # padding changes the rounding

"""Adapters of peft and angle-emb: the same vectors as in the original library, or refused with an explanation."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import one_in
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import KINDS, tiny_backbone, tiny_causal_lm, train_a_little
from tiny_tokenizers import TOKENIZERS
from transformers import AutoModel, AutoModelForCausalLM

from angle_llm import SentenceEncoder
from angle_llm.model.source.checks import ArtifactError
from angle_llm.model.source.resolve import resolve_model
from angle_llm.run import resolve_models
from angle_llm.settings.train import LoraSettings, ModelSettings, TrainSettings
from angle_llm.tools.quality import open_tokens

TEXTS = ["A man is eating.", 'Someone says "no", then eats.', "Where is it?", "hello"]
PROMPT = "summarize_one_word"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def save_origin(kind: str, folder: Path, task: str, **options: Any) -> Path:
    """A base with its head, and an adapter that plain peft wrote on it."""
    head = task == "CAUSAL_LM"
    base = tiny_causal_lm(kind) if head else tiny_backbone(kind)
    base.save_pretrained(folder / "base")
    TOKENIZERS[KINDS[kind].tokenizer]().save_pretrained(folder / "base")
    model = (AutoModelForCausalLM if head else AutoModel).from_pretrained(folder / "base")
    targets = {"gpt2": ["c_attn", "c_proj"], "bert": ["query", "value"]}.get(kind, ["q_proj", "v_proj", "down_proj"])
    config = LoraConfig(
        task_type=TaskType[task], r=2, lora_alpha=6, target_modules=targets, fan_in_fan_out=kind == "gpt2", **options
    )
    adapted = get_peft_model(model, config)
    train_a_little(adapted)
    adapted.save_pretrained(folder / "adapter")
    return folder / "adapter"


@torch.no_grad()
def origins_rows(folder: Path, task: str, texts: list[str], encoder: SentenceEncoder) -> np.ndarray:
    """Rows by peft, one text at a time: hidden states of the whole model, the last one of the last token."""
    loader = AutoModelForCausalLM if task == "CAUSAL_LM" else AutoModel
    model = PeftModel.from_pretrained(loader.from_pretrained(folder / "base"), folder / "adapter").eval()
    rows = []
    for ids in encoder.tokenize(texts):
        output = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        states = output.hidden_states[-1][0]
        rows.append(states[-1] if encoder.pooling == "last" else states.mean(0))
    return torch.stack(rows).numpy()


def open_adapter(folder: Path, **options: Any) -> SentenceEncoder:
    return SentenceEncoder.from_pretrained(
        folder / "base", adapter=folder / "adapter", **({"prompt": PROMPT, "device": "cpu"} | options)
    )


@one_in(
    2,
    "origin, option",
    [
        ("llama", "CAUSAL_LM"),
        ("llama", "FEATURE_EXTRACTION"),
        ("qwen2", "CAUSAL_LM"),
        ("gpt2", "CAUSAL_LM"),
        ("gpt2", "FEATURE_EXTRACTION"),
        ("bert", "FEATURE_EXTRACTION"),
    ],
    [None, "use_rslora", "use_dora"],
)
def test_vectors_equal_those_of_peft(origin: tuple[str, str], option: str | None, tmp_path: Path) -> None:
    (kind, task), options = origin, {option: True} if option else {}
    save_origin(kind, tmp_path, task, **options)
    encoder = open_adapter(tmp_path)
    rows = encoder.encode(TEXTS)
    expected = origins_rows(tmp_path, task, TEXTS, encoder)
    assert np.abs(rows - expected).max() < 1e-5 * np.abs(expected).max()
    bare = SentenceEncoder.from_pretrained(tmp_path / "base", prompt=PROMPT, device="cpu").encode(TEXTS)
    assert np.abs(rows - bare).max() > 1e-2 * np.abs(expected).max()


def test_a_foreign_adapter_can_be_saved_loaded_and_merged(tmp_path: Path) -> None:
    from angle_llm.export.merge import merge

    save_origin("llama", tmp_path, "CAUSAL_LM")
    encoder = open_adapter(tmp_path, max_length=60)
    assert not any(parameter.requires_grad for parameter in encoder.model.parameters())
    encoder.save_pretrained(tmp_path / "saved")
    again = SentenceEncoder.from_pretrained(tmp_path / "saved", device="cpu")
    assert np.array_equal(again.encode(TEXTS), encoder.encode(TEXTS))
    assert (again.prompt, again.max_length, again.base) == (encoder.prompt, 60, str(tmp_path / "base"))
    with pytest.raises(ArtifactError, match=r"expected a saved encoder.*save_pretrained\(FOLDER\)"):
        merge(tmp_path / "adapter", tmp_path / "merged")
    assert merge(tmp_path / "saved", tmp_path / "merged", device="cpu") is not None


@pytest.mark.parametrize("name", ["ABSOLUTE", "base", "../base"])
@pytest.mark.parametrize("tokenizer", ["base", "adapter"])
def test_a_folder_alone_opens_with_the_base_that_it_names(name: str, tokenizer: str, tmp_path: Path) -> None:
    adapter = save_origin("llama", tmp_path, "CAUSAL_LM")
    change_config(tmp_path, base_model_name_or_path=str(tmp_path / "base") if name == "ABSOLUTE" else name)
    expected = open_adapter(tmp_path).encode(TEXTS)
    if tokenizer == "adapter":
        for path in (tmp_path / "base").glob("*token*"):
            path.rename(adapter / path.name)
    encoder = SentenceEncoder.from_pretrained(adapter, prompt=PROMPT, device="cpu")
    assert np.array_equal(encoder.encode(TEXTS), expected)
    assert Path(str(encoder.base)).samefile(tmp_path / "base")
    encoder.save_pretrained(tmp_path / "saved")
    again = SentenceEncoder.from_pretrained(tmp_path / "saved", device="cpu")
    assert np.array_equal(again.encode(TEXTS), expected)
    tokens = open_tokens(ModelSettings(path=str(adapter), prompt=PROMPT, max_length=60))
    assert (tokens.encoder.pooling, tokens.encoder.max_length) == ("last", 60)
    assert tokens.tokenizers.selected(TEXTS) == encoder.tokenize(TEXTS)


def test_a_folder_with_the_name_of_its_base_is_not_its_base(origin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base of adapters/gpt2 is gpt2 on the hub; with a folder `google` here, google/gemma@main is on the hub."""
    fetched: list[tuple[str, str | None]] = []

    def fetch(repo: str, revision: str | None = None) -> tuple[Path, str]:
        fetched.append((repo, revision))
        return origin / "base", "c0ffee"

    monkeypatch.setattr("angle_llm.model.source.resolve.fetch_files", fetch)
    (origin / "google").mkdir()
    adapter = origin / "adapters/gpt2"
    shutil.move(origin / "adapter", adapter)
    monkeypatch.chdir(origin)
    for name in ("gpt2", "google/gemma@main"):
        config = json.loads((adapter / CONFIG).read_text())
        (adapter / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": name}))
        assert resolve_model(str(adapter)).peft_base == (name.removesuffix("@main"), "c0ffee")
    assert fetched == [("gpt2", None), ("google/gemma", "main")]
    # A folder base@v1 beside the adapter is no revision.
    (origin / "base").rename(origin / "adapters/base@v1")
    (adapter / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": "base@v1"}))
    assert resolve_model(str(adapter)).peft_base == (str(origin / "adapters/base@v1"), None)
    # In the folder around the adapter, its name is its own.
    (adapter / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": "gpt2"}))
    monkeypatch.chdir(origin / "adapters")
    with pytest.raises(ArtifactError, match=r"has the name of its base gpt2 on the hub"):
        resolve_model("gpt2")


def test_a_folder_alone_has_pooling_and_length_of_its_base(tmp_path: Path) -> None:
    adapter = save_origin("bert", tmp_path, "FEATURE_EXTRACTION")
    usage: dict[str, Any] = {"prompt": "plain", "pooling": "cls", "max_length": 33}
    SentenceEncoder.from_pretrained(tmp_path / "base", device="cpu", **usage).save_pretrained(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "base", dirs_exist_ok=True)
    (tmp_path / "base/angle_llm.json").rename(tmp_path / "card.json")  # the rest is of sentence-transformers
    encoder = SentenceEncoder.from_pretrained(adapter, prompt="plain", device="cpu")
    assert (encoder.pooling, encoder.max_length) == ("cls", 33)
    assert np.array_equal(encoder.encode(TEXTS), open_adapter(tmp_path, prompt="plain").encode(TEXTS))
    with pytest.raises(ValueError, match=r"--prompt"):
        SentenceEncoder.from_pretrained(adapter, device="cpu")
    with pytest.raises(ValueError, match="prompt=…"):
        SentenceEncoder.from_pretrained(tmp_path / "base", adapter=adapter, device="cpu")
    (tmp_path / "card.json").rename(tmp_path / "base/angle_llm.json")
    with pytest.raises(ArtifactError, match="is a saved encoder"):
        SentenceEncoder.from_pretrained(adapter, prompt="plain", device="cpu")


def test_a_folder_with_the_configuration_of_its_base_is_an_adapter(origin: Path) -> None:
    """LLM2Vec stores adapters with `config.json`. With model weights, the folder can be opened in two ways."""
    expected = open_adapter(origin).encode(TEXTS)
    adapter = origin / "adapter"
    shutil.copy(origin / "base" / "config.json", adapter)
    assert np.array_equal(SentenceEncoder.from_pretrained(adapter, prompt=PROMPT, device="cpu").encode(TEXTS), expected)
    for name in ("model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        (adapter / name).touch()
        with pytest.raises(ArtifactError, match="contains an adapter and a model"):
            SentenceEncoder.from_pretrained(adapter, prompt=PROMPT, device="cpu")
        (adapter / name).unlink()


def test_a_folder_alone_whose_base_or_prompt_is_unknown_is_refused(origin: Path) -> None:
    adapter = origin / "adapter"
    for command in (resolve_models, SentenceEncoder.from_pretrained):
        train = TrainSettings(run_dir=str(origin / "run"), model=ModelSettings(path=str(adapter)))
        with pytest.raises(ValueError, match=r"adapter has no angle_llm.json.* --prompt .*--model\.prompt"):
            command(train if command is resolve_models else adapter)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"adapter: expected a backbone as its base, but .*adapter is an adapter"):
        SentenceEncoder.from_pretrained(adapter, adapter=adapter, prompt=PROMPT)
    for name, message in {
        "": r"adapter_config\.json: `base_model_name_or_path` is ''.*from_pretrained\(BASE, adapter=",
        "/no/base": r"no model at /no/base.*`base_model_name_or_path` in .*adapter_config\.json\. If it moved",
    }.items():
        change_config(origin, base_model_name_or_path=name)
        with pytest.raises((ArtifactError, FileNotFoundError), match=message):
            SentenceEncoder.from_pretrained(adapter, prompt=PROMPT)


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    save_origin("llama", tmp_path, "CAUSAL_LM")
    return tmp_path


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "adapter" / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "adapter" / WEIGHTS)
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "adapter" / WEIGHTS)


ROOT = "base_model.model.model"
Q = f"{ROOT}.layers.1.self_attn.q_proj"


def moved(tensors: dict[str, torch.Tensor], target: str) -> None:
    for part in ("lora_A.weight", "lora_B.weight"):
        tensors[f"{target}.{part}"] = tensors.pop(f"{Q}.{part}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.update({"lm_head.weight": torch.ones(2, 2)}), "lm_head.weight"),
        (lambda tensors: tensors.update({f"{Q}.lora_A.weight": torch.ones(2, 31)}), r"layers\.1\.self_attn\.q_proj"),
        (lambda tensors: moved(tensors, Q.replace(".1.", ".7.")), r"layers\.7\.self_attn\.q_proj"),
        (lambda tensors: moved(tensors, "base_model.model.layers.1.self_attn.q_proj"), "model.layers"),
        (lambda tensors: moved(tensors, f"{ROOT}.norm"), "LlamaRMSNorm"),
    ],
    ids=["head-weights", "shape", "layer", "mixed-prefixes", "norm"],
)
def test_tensors_that_do_not_match_the_base_are_refused(change: Any, message: str, origin: Path) -> None:
    change_tensors(origin, change)
    with pytest.raises(ArtifactError, match=message):
        open_adapter(origin)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"base_model_name_or_path": "meta-llama/Llama-2-7b-hf"}, "meta-llama/Llama-2-7b-hf"),
    ],
)
def test_unsupported_configurations_are_refused(values: dict[str, Any], message: str, origin: Path) -> None:
    change_config(origin, **values)
    with pytest.raises(ArtifactError, match=message):
        open_adapter(origin)


@pytest.mark.parametrize("name", ["some/where/BASE", None, ""])
def test_the_base_can_be_in_another_folder(name: str | None, origin: Path) -> None:
    change_config(origin, base_model_name_or_path=name)
    assert open_adapter(origin).encode(TEXTS).shape == (4, 32)


def test_a_folder_that_is_not_an_adapter_or_base_is_refused(origin: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no adapter at \S*nowhere"):
        SentenceEncoder.from_pretrained(origin / "base", adapter=origin / "nowhere", prompt=PROMPT)
    with pytest.raises(FileNotFoundError, match=r"base has no adapter_config\.json"):
        SentenceEncoder.from_pretrained(origin / "base", adapter=origin / "base", prompt=PROMPT)
    with pytest.raises(ValueError, match="prompt=…"):
        SentenceEncoder.from_pretrained(origin / "base", adapter=origin / "adapter")
    encoder = SentenceEncoder.from_pretrained(origin / "base", device="cpu")
    encoder.add_lora(LoraSettings(rank=2))
    encoder.save_pretrained(origin / "saved")
    with pytest.raises(ValueError, match="saved is a saved encoder"):
        SentenceEncoder.from_pretrained(origin / "base", adapter=origin / "saved")
    with pytest.raises(ValueError, match=r"adapter: expected a backbone.*saved is a saved encoder"):
        SentenceEncoder.from_pretrained(origin / "saved", adapter=origin / "adapter", prompt=PROMPT)

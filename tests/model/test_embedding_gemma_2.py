"""EmbeddingGemma 2: the ids and vectors of sentence-transformers, training, Matryoshka sizes, depth, export."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from embedding_gemma_2 import CHAT_TEMPLATE, DIMENSIONS, LAYERS, PROMPTS, open_in_library, save_folder
from readers.families import TEXTS
from tiny import train_a_little

from angle_llm import SentenceEncoder, cli
from angle_llm.export.merge import merge
from angle_llm.export.sentence_transformers import export_sentence_transformers
from angle_llm.model.layers.depth import LayerStack
from angle_llm.model.meta_model import meta_backbone, tiny_copy
from angle_llm.model.source.backbone import load_config
from angle_llm.model.source.checks import ArtifactError
from angle_llm.model.source.resolve import locate
from angle_llm.settings.train import LoraSettings

AWKWARD = [text for text in TEXTS[:65] if text.strip()]
SHORT = [text for text in AWKWARD if len(text) < 100 and not any(name in text for name in ("<bos>", "<pad>"))][::3]
needs_library = pytest.mark.needs("sentence_transformers")
pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "EmbeddingGemma2TextConfig"), reason="pip install 'transformers>=5.19'"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("embeddinggemma-2") / "folder")


def load(folder: Path, **options: Any) -> SentenceEncoder:
    return SentenceEncoder.from_pretrained(folder, device="cpu", **options)


def library_ids(library: Any, text: str, prompt: str) -> list[int]:
    ids: list[int] = library[0].preprocess([text], prompt=prompt)["input_ids"][0].tolist()
    return ids


@needs_library
@pytest.mark.parametrize("towers", [False, True])
def test_ids_and_vectors_equal_sentence_transformers(towers: bool, folder: Path, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "towers", towers=True) if towers else folder
    library, encoder = open_in_library(folder).double(), load(folder)
    encoder.model.double()
    assert (encoder.pooling, encoder.normalize, encoder.dimensions, encoder.layers) == (
        "mean",
        True,
        DIMENSIONS,
        LAYERS,
    )
    special = library.tokenizer.all_special_tokens
    plain = [text for text in AWKWARD if not any(name in text for name in special)]
    assert len(plain) > 55
    for side, name in (("query", "query"), ("document", "document")):
        encoder_of_side = encoder.for_side(side)
        assert encoder_of_side.prompt.template == PROMPTS[name] + "{text}"
        for text in AWKWARD:
            ids = encoder_of_side.tokenize([text])[0]
            if text in plain:
                assert ids == library_ids(library, text, PROMPTS[name])
            else:  # here, a name of a special token in a text is plain characters
                assert ids == library.tokenizer(PROMPTS[name] + text, split_special_tokens=True)["input_ids"]
        texts = [*SHORT, "two words " * 60]
        # One by one: padding moves the vectors of the library by 3e-6, also in float64.
        expected = library.encode(texts, prompt_name=name, batch_size=1)
        assert np.abs(encoder_of_side.encode(texts) - expected).max() <= 1e-7  # rows are rounded to float32
    assert np.abs(encoder.encode_query(SHORT) - encoder.encode_document(SHORT)).max() > 1e-2


def change(folder: Path, name: str, **values: object) -> None:
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))


def with_template(folder: Path, template: str) -> None:
    for path in folder.glob("chat_template*"):
        path.write_text(template)


MESSAGE = {"method": "forward", "method_output_name": "last_hidden_state", "format": "structured"}
REFUSED: dict[str, Callable[[Path], object]] = {
    "a template with roles": lambda f: with_template(
        f, CHAT_TEMPLATE.replace("{%- if", "{{ message['role'] }}{%- if", 1)
    ),
    "a template that removes spaces": lambda f: with_template(
        f, CHAT_TEMPLATE.replace("item['text']", "item['text'] | trim")
    ),
    "a tokenizer without special tokens": lambda f: (f / "processor_config.json").unlink(),
    "no template": lambda f: [path.unlink() for path in f.glob("chat_template*")],
    "another format": lambda f: change(
        f, "sentence_bert_config.json", modality_config={"message": MESSAGE | {"format": "xml"}}
    ),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_another_chat_template_is_refused(damage: str, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "folder")
    REFUSED[damage](folder)
    with pytest.raises(ArtifactError, match=r"chat template|modality_config|`message`"):
        load(folder)


def test_float16_is_refused(folder: Path) -> None:
    with pytest.raises(ArtifactError, match="NaN in float16"):
        load(folder, dtype="float16")


def test_states_between_layers(folder: Path) -> None:
    """States have 32 dimensions between layers and 48 after the projection; the first layers alone give equal vectors."""
    encoder = load(folder, prompt="plain", dtype="float32")
    stack = LayerStack.of(encoder.model.backbone)
    stack.check(encoder.model.backbone)
    with stack.states_after([2], lambda states: states) as states:
        encoder.model.backbone(input_ids=torch.tensor([[3, 4, 5]]))
    assert states[2].shape == (1, 3, 32)
    assert stack.finish(states[2]).shape == (1, 3, DIMENSIONS)
    with pytest.raises(ValueError, match=r"one of \[2, 4\], got 3"):
        encoder.truncated(layers=3)


def test_first_layers_are_saved(folder: Path, tmp_path: Path) -> None:
    short = load(folder, prompt="plain", layers=2)
    rows = short.encode(SHORT)
    short.save_pretrained(tmp_path / "short")
    saved = load(tmp_path / "short")
    assert saved.layers == 2
    assert np.abs(saved.encode(SHORT) - rows).max() <= 1e-6  # float32
    assert np.abs(load(folder, prompt="plain").encode(SHORT) - rows).max() > 1e-3


def test_an_adapter_of_the_first_layers_is_merged(folder: Path, tmp_path: Path) -> None:
    """The inputs of all layers are one tensor, of which the merged model has the first rows."""
    short = load(folder, prompt="plain", layers=2, dtype="float32")
    short.add_lora(LoraSettings(rank=2))
    train_a_little(short.model)
    short.save_pretrained(tmp_path / "short")
    verification = merge(tmp_path / "short", tmp_path / "merged", device="cpu")
    assert verification is not None
    assert verification.holds
    assert np.abs(load(tmp_path / "merged").encode(SHORT) - short.encode(SHORT)).max() <= 1e-5  # rounding of the merge


def test_an_adapter_of_the_inputs_of_all_layers(folder: Path, tmp_path: Path) -> None:
    """It fits the base, so it is trained with all layers; then the first layers alone give equal vectors."""
    target = LoraSettings(rank=2, targets=["per_layer_model_projection"])
    short = load(folder, prompt="plain", layers=2)
    short.add_lora(target)
    with pytest.raises(ValueError, match="Omit this LoRA target"):
        short.check_savable(tmp_path / "short")
    load(folder, prompt="plain", bits="fp8").add_lora(target)  # has all layers
    encoder = load(folder, prompt="plain", dtype="float32")
    encoder.add_lora(target)
    train_a_little(encoder.model)
    encoder.save_pretrained(tmp_path / "model")
    stack = LayerStack.of(encoder.model.backbone)
    ids = torch.tensor([encoder.tokenize(["A man eats."])[0]])
    with stack.states_after([2], stack.finish) as states:
        encoder.model.backbone(input_ids=ids)
    short = load(tmp_path / "model", layers=2)
    assert torch.allclose(short.model.backbone(input_ids=ids).last_hidden_state, states[2], atol=1e-5)  # float32
    with pytest.raises(ValueError, match="would not fit its base"):
        short.save_pretrained(tmp_path / "short")


@pytest.mark.needs("bitsandbytes")
def test_the_first_layers_of_a_quantized_model_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="layers: EmbeddingGemma2TextModel gives other states"):
        load(folder, prompt="plain", layers=2, bits=4)


def test_sizes_of_layers_in_small_and_meta_models(folder: Path) -> None:
    config = load_config(locate(str(folder))).get_text_config()
    config.per_layer_config = {
        1: {"head_dim": 512, "num_key_value_heads": 1},
        3: {"head_dim": 512, "num_key_value_heads": 1},
    }
    config.num_attention_heads, config.hidden_size = 8, 64
    small: Any = tiny_copy(config)
    shapes = [tuple(layer.self_attn.q_proj.weight.shape) for layer in small.layers]
    assert shapes == [(16, 32), (1024, 32)]  # two heads of 8 and of 512 dimensions
    assert small(input_ids=torch.tensor([[1, 2]])).last_hidden_state.shape == (1, 2, DIMENSIONS)
    meta = meta_backbone(load_config(locate(str(folder))), torch.float32)
    whole = load(folder).model.backbone
    assert {n: p.shape for n, p in meta.named_parameters()} == {n: p.shape for n, p in whole.named_parameters()}


@needs_library
def test_trains_nested_and_exports(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"text1": f"Where is {word}?", "text2": f"{word} is here."} for word in ("Rome", "a dog", "Ann", "the sea")]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["train", "--model.path", str(folder), "--data.path", "pairs.jsonl", "--data.format", "positive_pair"]
    nested = ["--nested.dimensions", "8", "16", "32"]
    cli.run(
        [
            *command,
            *nested,
            "--epochs",
            "2",
            "--max-steps",
            "2",
            "--batch-size",
            "4",
            "--model.dtype",
            "float32",
            "--run-dir",
            "run",
        ]
    )
    encoder, base = load(tmp_path / "run/model"), load(folder)
    adapted = {name for name, tensor in encoder.model.backbone.named_parameters() if "lora_B" in name and tensor.any()}
    assert len(adapted) == 7 * LAYERS
    assert not any(part in name for name in adapted for part in ("ple", "embedding_projection", "norm"))
    vectors = encoder.encode_query(SHORT)
    assert np.abs(vectors - base.encode_query(SHORT)).max() > 1e-6
    for size in (DIMENSIONS, 32, 16, 8):
        cut = encoder.truncated(dimensions=size).encode_query(SHORT)
        expected = vectors[:, :size] / np.linalg.norm(vectors[:, :size], axis=1, keepdims=True)
        assert np.abs(cut - expected).max() <= 1e-6
    # Export.
    export_sentence_transformers(tmp_path / "run/model", tmp_path / "exported", check=False)
    from sentence_transformers import SentenceTransformer

    library = SentenceTransformer(str(tmp_path / "exported"), device="cpu")
    assert [type(module).__name__ for module in library] == ["Transformer", "Pooling", "Normalize"]
    for name, own in (("query", vectors), ("document", encoder.encode_document(SHORT))):
        assert np.abs(library.encode(SHORT, prompt_name=name) - own).max() <= 1e-5  # float32
    assert library.tokenizer.chat_template is None


def test_adapter_and_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = load(folder)
    encoder.add_lora(LoraSettings(rank=2, targets=["embedding_projection", "q_proj"]))
    train_a_little(encoder.model)
    assert "embedding_projection" in "".join(
        name for name, _ in encoder.model.backbone.named_parameters() if "lora_B" in name
    )
    cli.run(["plan", "--model.path", str(folder), "--max-steps", "1"])
    assert "MiB per computed token" in capsys.readouterr().out

"""Folders of sentence-transformers: the vectors of the library, or an error that names what is not supported."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_server import open_hub
from tiny import KINDS, save_tiny_base, train_a_little

from angle_llm import SentenceEncoder
from angle_llm.model.meta_model import tiny_encoder_copy
from angle_llm.model.source.checks import ArtifactError
from angle_llm.model.source.encoder_card import EncoderCard
from angle_llm.model.source.resolve import resolve_model
from angle_llm.model.source.sentence_transformers_folder import SentenceTransformersFolder
from angle_llm.settings.train import ModelSettings

TEXTS = ["A man is eating.", "Where?", "Two dogs run through the snow, and nobody sees them.", "They went on. " * 40]
LENGTH = 40

needs_library = pytest.mark.needs("sentence_transformers")


def load(folder: str | Path, **options: Any) -> SentenceEncoder:
    return SentenceEncoder.from_pretrained(folder, device="cpu", **options)


def write(folder: Path, name: str, values: object) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(values))


def change(folder: Path, name: str, **values: object) -> None:
    found = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    write(folder, name, found | values)


def save_old(kind: str, folder: Path, pooling: str = "mean_tokens", *, normalize: bool = True) -> Path:
    """Write a folder as version 2 of the library did."""
    save_tiny_base(kind, folder)
    names = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {
            "idx": idx,
            "name": str(idx),
            "path": f"{idx}_{name}" if idx else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for idx, name in enumerate(names)
    ]
    write(folder, "modules.json", modules)
    write(folder, "sentence_bert_config.json", {"max_seq_length": LENGTH, "do_lower_case": False})
    flags = {"pooling_mode_mean_tokens": False, f"pooling_mode_{pooling}": True}
    write(folder, "1_Pooling/config.json", {"word_embedding_dimension": KINDS[kind].dimensions, **flags})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_old("bert", tmp_path / "folder")


@pytest.fixture(scope="module")
def transformers_of_the_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """Return the Transformer module of a tiny model with a padding side."""

    @cache
    def make(kind: str, side: str) -> Any:
        from sentence_transformers.sentence_transformer.modules import Transformer

        base = save_tiny_base(kind, tmp_path_factory.mktemp(kind))
        change(base, "tokenizer_config.json", padding_side=side)
        return Transformer(str(base), max_seq_length=LENGTH)

    return make


def test_another_similarity_is_a_warning(tmp_path: Path) -> None:
    for normalize in (True, False):
        folder = save_old("bert", tmp_path / str(normalize), normalize=normalize)
        change(folder, "config_sentence_transformers.json", similarity_fn_name="dot")
        with nullcontext() if normalize else pytest.warns(UserWarning, match="similarity_fn_name is 'dot'"):
            assert SentenceTransformersFolder.read(folder).normalize == normalize, "of unit vectors it is the cosine"


@needs_library
@pytest.mark.parametrize(("normalize", "prompt"), [(False, ""), (True, "Represent this: ")])
@pytest.mark.parametrize(
    ("kind", "side", "mode"),
    [
        *product(["qwen2"], ["left", "right"], ["lasttoken", "mean", "max", "mean_sqrt_len_tokens", "weightedmean"]),
        *product(["bert"], ["right"], ["cls", "mean", "weightedmean"]),
    ],
)
def test_vectors_equal_those_of_the_library(
    kind: str,
    side: str,
    mode: str,
    normalize: bool,
    prompt: str,
    tmp_path: Path,
    transformers_of_the_library: Callable[[str, str], Any],
) -> None:
    from sentence_transformers import SentenceTransformer, __version__
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    if (side, mode) == ("left", "weightedmean") and __version__ < "6.2":
        pytest.skip("before version 6.2 the positions of the padding count too")
    pooling: Any = Pooling(KINDS[kind].dimensions, mode)
    modules = [transformers_of_the_library(kind, side), pooling, *([Normalize()] if normalize else [])]
    prompts: dict[str, Any] = {"prompts": {"own": prompt}, "default_prompt_name": "own"} if prompt else {}
    library = SentenceTransformer(modules=modules, device="cpu", **prompts)
    library.save(str(tmp_path / "saved"), create_model_card=False)
    expected = library.encode(TEXTS)
    encoder = load(tmp_path / "saved")
    assert np.abs(encoder.encode(TEXTS) - expected).max() <= 1e-6 * np.abs(expected).max()  # float32
    assert (encoder.max_length, encoder.normalize, encoder.prompt.template) == (LENGTH, normalize, prompt + "{text}")
    assert np.abs(encoder.with_prompt("prompteol").encode(TEXTS) - expected).max() > 1e-3


@needs_library
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_vectors_of_an_adapter_equal_those_of_the_library(folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig
    from sentence_transformers import SentenceTransformer

    change(folder, "config_sentence_transformers.json", prompts={"own": "Represent: "}, default_prompt_name="own")
    library = SentenceTransformer(str(folder), device="cpu")
    try:
        library.add_adapter(LoraConfig(r=2, lora_alpha=6, target_modules=["query", "value"]))
    except ValueError as error:
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(f"transformers refuses adapters: {error}")
    train_a_little(library)
    library.save(str(tmp_path / "adapter"), create_model_card=False)
    assert not (tmp_path / "adapter" / "config.json").exists()
    expected = SentenceTransformer(str(tmp_path / "adapter"), device="cpu").encode(TEXTS)
    encoder = load(tmp_path / "adapter")
    assert np.abs(encoder.encode(TEXTS) - expected).max() <= 1e-6 * np.abs(expected).max()  # float32
    assert np.abs(load(folder).encode(TEXTS) - expected).max() > 1e-2
    assert (encoder.max_length, encoder.normalize, encoder.base) == (LENGTH, True, str(folder))
    copied = tiny_encoder_copy(resolve_model(str(tmp_path / "adapter")), ModelSettings())[0]
    assert copied.tokenize(TEXTS) == encoder.tokenize(TEXTS)


@needs_library
@pytest.mark.parametrize("name", ["document", "passage"])
def test_two_prompts_are_those_of_the_library(name: str, folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    prompts = {"query": "Where is: ", name: "Text: ", "other": "Other: "}
    change(folder, "config_sentence_transformers.json", prompts=prompts, default_prompt_name="other")
    library, encoder = SentenceTransformer(str(folder), device="cpu"), load(folder)
    assert np.abs(encoder.encode_query(TEXTS) - library.encode_query(TEXTS)).max() <= 1e-6
    # Version 6.2 intends, but does not apply, `passage`: it always has an empty prompt `document`.
    assert np.abs(encoder.encode_document(TEXTS) - library.encode(TEXTS, prompt="Text: ")).max() <= 1e-6
    with pytest.raises(ValueError, match="encode_query"):
        encoder.encode(TEXTS)
    prompts = {"query": "Where is: ", "document": "", "passage": "Text: "}
    change(folder, "config_sentence_transformers.json", prompts=prompts, default_prompt_name=None)
    library = SentenceTransformer(str(folder), device="cpu")
    assert np.abs(load(folder).encode_document(TEXTS) - library.encode_document(TEXTS)).max() <= 1e-6
    prompts = {"query": "", "document": "", "other": "Other: "}
    change(folder, "config_sentence_transformers.json", prompts=prompts, default_prompt_name="other")
    library = SentenceTransformer(str(folder), device="cpu")
    assert np.abs(load(folder).encode(TEXTS) - library.encode(TEXTS)).max() <= 1e-6
    assert np.abs(load(folder, prompt="plain").encode(TEXTS) - library.encode(TEXTS, prompt="")).max() <= 1e-6


@needs_library
def test_old_folders_equal_those_of_the_library(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = save_old("roberta", tmp_path / "folder", "max_tokens")
    (folder / "sentence_bert_config.json").rename(folder / "sentence_roberta_config.json")
    change(folder, "sentence_roberta_config.json", do_lower_case=True)
    with pytest.raises(ArtifactError, match="do_lower_case"):
        load(folder)
    change(folder, "sentence_roberta_config.json", do_lower_case=False)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert np.abs(load(folder).encode(TEXTS) - expected).max() <= 1e-6
    write(folder, "sentence_albert_config.json", {"max_seq_length": 3})
    (folder / "sentence_roberta_config.json").rename(folder / "sentence_bert_config.json")
    assert load(folder).max_length == LENGTH, "the library prefers this name"
    (folder / "sentence_albert_config.json").unlink()
    (folder / "sentence_bert_config.json").unlink()  # then the length is that of tokenizer and model
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS[:3])
    assert np.abs(load(folder).encode(TEXTS[:3]) - expected).max() <= 1e-6
    assert load(folder).max_length == 128


def test_saved_encoders_twins_and_the_hub_read_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = load(folder)
    assert (encoder.pooling, encoder.max_length, encoder.normalize, encoder.prompt.name) == (
        "mean",
        LENGTH,
        True,
        "plain",
    )
    rows = encoder.encode(TEXTS)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(1, abs=1e-6)
    assert np.linalg.norm(encoder.truncated(dimensions=5).encode(TEXTS), axis=1) == pytest.approx(1, abs=1e-6)
    encoder.save_pretrained(tmp_path / "saved")
    assert np.array_equal(load(tmp_path / "saved").encode(TEXTS), rows)
    assert EncoderCard.read(tmp_path / "saved").normalize
    tiny_copy, _ = tiny_encoder_copy(resolve_model(str(folder)), ModelSettings())
    assert (tiny_copy.pooling, tiny_copy.max_length, tiny_copy.normalize, tiny_copy.prompt) == (
        "mean",
        LENGTH,
        True,
        encoder.prompt,
    )

    hub = open_hub(tmp_path / "cache", monkeypatch)
    commit = hub.put("user/st", {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")})
    fetched = load("user/st")
    assert (fetched.base, fetched.base_revision, fetched.normalize) == ("user/st", commit, True)
    assert np.array_equal(fetched.encode(TEXTS), rows)
    assert tiny_encoder_copy(resolve_model("user/st"), ModelSettings())[0].max_length == LENGTH


def test_a_folder_without_modules_is_a_backbone(folder: Path) -> None:
    (folder / "modules.json").unlink()
    encoder = load(folder)
    assert (encoder.normalize, encoder.max_length) == (False, 128)


def module(folder: Path, number: int, **values: object) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules[number] |= values
    write(folder, "modules.json", modules)


CONFIG, POOLING = "config_sentence_transformers.json", "1_Pooling/config.json"
REFUSED: list[tuple[str, Callable[[Path], object]]] = [
    ("Router", lambda f: module(f, 2, type="sentence_transformers.models.Router")),
    ("my_code.Custom", lambda f: module(f, 0, type="my_code.Custom")),
    ("0_Transformer", lambda f: module(f, 0, path="0_Transformer")),
    ("folders of modules inside", lambda f: module(f, 1, path="../1_Pooling")),
    ("modules.json", lambda f: write(f, "modules.json", [])),
    ("modules.json", lambda f: write(f, "modules.json", {})),
    ("pooling_mode", lambda f: change(f, POOLING, pooling_mode_cls_token=True)),
    ("pooling_mode", lambda f: change(f, POOLING, pooling_mode="best")),
    (POOLING, lambda f: shutil.rmtree(f / "1_Pooling")),
    ("modality_config", lambda f: change(f, "sentence_bert_config.json", modality_config={"text": {}, "message": {}})),
    ("query_expansion", lambda f: change(f, "sentence_bert_config.json", query_expansion={"length": 32})),
    ("tokenizer_type", lambda f: change(f, "sentence_bert_config.json", tokenizer_args={"tokenizer_type": "other"})),
    ("model_type", lambda f: change(f, CONFIG, model_type="SparseEncoder")),
    ("truncate_dim", lambda f: change(f, CONFIG, truncate_dim=8)),
    (
        "include_prompt",
        lambda f: [
            change(f, CONFIG, prompts={"own": "Text: "}, default_prompt_name="own"),
            change(f, POOLING, include_prompt=False),
        ],
    ),
    ("default_prompt_name", lambda f: change(f, CONFIG, default_prompt_name="own")),
    ("TypeError", lambda f: change(f, CONFIG, prompts={"own": 3}, default_prompt_name="own")),
    ("special tokens", lambda f: change(f, CONFIG, prompts={"own": "[SEP]"}, default_prompt_name="own")),
    ("TypeError", lambda f: change(f, CONFIG, default_prompt_name=[])),
    ("truncation_side", lambda f: change(f, "tokenizer_config.json", truncation_side="left")),
]


@pytest.mark.parametrize(("named", "damage"), REFUSED)
def test_refused_by_name(named: str, damage: Callable[[Path], object], folder: Path) -> None:
    damage(folder)
    with pytest.raises(ArtifactError, match=named):
        load(folder)

"""Damaged, foreign or hostile files are refused, never partly loaded and never run."""

import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny_adapter, save_tiny_base, tiny_encoder
from tiny_tokenizers import VOCABULARY
from transformers import AddedToken, AutoModel, AutoTokenizer

from angle_llm.export.sentence_transformers import export_sentence_transformers
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.source.checks import CARD_NAME, TOKENIZER_FILES, ArtifactError, as_artifact_error, check_loaded


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base("llama", tmp_path_factory.mktemp("base"))


def test_an_added_token_beyond_the_embeddings_is_allowed(base: Path, tmp_path: Path) -> None:
    """Early copies of LLaMA-2 have a `<pad>` that is not the padding token, one past the embeddings."""
    shutil.copytree(base, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([AddedToken("<pad>", special=True)])
    assert tokenizer.convert_tokens_to_ids("<pad>") == VOCABULARY
    assert "<pad>" not in tokenizer.all_special_tokens
    tokenizer.save_pretrained(tmp_path / "model")
    rows = SentenceEncoder.from_pretrained(tmp_path / "model", device="cpu").encode(["Some <pad> text."])
    assert torch.from_numpy(rows).isfinite().all()
    tokenizer.pad_token = "<pad>"
    tokenizer.save_pretrained(tmp_path / "model")
    encoder = SentenceEncoder.from_pretrained(tmp_path / "model", device="cpu", layout="padded")
    texts = ["Some <pad> text.", "A longer text, with more tokens."]
    np.testing.assert_allclose(encoder.encode(texts)[:1], rows, rtol=0, atol=1e-5 * np.abs(rows).max())
    for prompt, folder in (("plain", "prefix"), ("summarize_one_word", "included")):  # for sentence-transformers
        encoder.with_prompt(prompt).save_pretrained(tmp_path / folder)
    export_sentence_transformers(tmp_path / "included", tmp_path / "exported", check=False)
    for folder in ("prefix", "exported"):
        padding = json.loads((tmp_path / folder / "tokenizer_config.json").read_text())["pad_token"]
        assert tokenizer.convert_tokens_to_ids(padding) < VOCABULARY


def test_a_plain_token_beyond_the_embeddings_is_refused(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ArtifactError, match="'zebra' first, beyond the model's"):
        SentenceEncoder.from_pretrained(tmp_path / "model", device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_weight_that_is_not_finite_is_refused(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = load_file(save_tiny_base("llama", tmp_path, dtype) / "model.safetensors")
    tensors["embed_tokens.weight"][-1, -1] = value  # no probe text contains this token
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ArtifactError, match=r"embed_tokens\.weight is not finite"):
        SentenceEncoder.from_pretrained(tmp_path, device="cpu")


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("weight", "finite"),
    [
        (torch.ones(2, 2).to(FP8), True),
        (torch.full((2, 2), torch.nan).to(FP8), False),
        (torch.full((2, 2), 3e38), True),  # the sum is not finite
        (torch.empty(0), True),
    ],
    ids=["fp8", "fp8 with nan", "large", "empty"],
)
def test_a_further_weight_is_checked(weight: torch.Tensor, finite: bool, base: Path) -> None:
    backbone, tokenizer = AutoModel.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    backbone.register_parameter("further", torch.nn.Parameter(weight))
    with nullcontext() if finite else pytest.raises(ArtifactError, match="further is not finite"):
        check_loaded(backbone, tokenizer, base)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    save_tiny_base("llama", tmp_path)
    path = tmp_path / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"]["vocab"]["unusual"] = VOCABULARY
    path.write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match="1 tokens, 'unusual' first, beyond the model's 400 embeddings"):
        SentenceEncoder.from_pretrained(tmp_path, device="cpu")


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    path = save_tiny_base("llama", tmp_path) / "model.safetensors"
    torch.save(load_file(path), tmp_path / "pytorch_model.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(path), "pytorch_model.bin")}
    path.unlink()
    with pytest.raises(ArtifactError, match=r"pytorch_model\.bin"):
        SentenceEncoder.from_pretrained(tmp_path, device="cpu")
    (tmp_path / "model-extra.safetensors").touch()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match="an index that names other files"):
        SentenceEncoder.from_pretrained(tmp_path, device="cpu")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "bert", "roberta"])
@pytest.mark.parametrize("saved", [True, False])
def test_a_folder_without_its_tokenizer_files_is_refused(kind: str, saved: bool, tmp_path: Path) -> None:
    """transformers then makes an empty tokenizer for most models, and every word becomes unknown."""
    save_tiny_base(kind, tmp_path)
    if saved:
        shutil.rmtree(tmp_path)
        tiny_encoder(kind).save_pretrained(tmp_path)
    for name in TOKENIZER_FILES:
        (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(ArtifactError, match=rf"{tmp_path}.*(tokenizer\.json|tokenizer)"):
        SentenceEncoder.from_pretrained(tmp_path, device="cpu")


def test_a_lack_of_memory_is_not_reported_as_damage() -> None:
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    with pytest.raises(RuntimeError) as raised, as_artifact_error("folder"):
        raise error
    assert raised.value is error


@pytest.fixture(scope="module")
def sound(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undamaged folders by kind; `outside` has files that a damaged folder may name but not read."""
    folders = tmp_path_factory.mktemp("sound")
    tiny_encoder("llama").save_pretrained(folders / "whole")
    save_tiny_adapter(base, folders / "adapter")
    save_tiny_base("llama", folders / "outside", seed=1)
    return folders


@pytest.fixture
def _time_limit() -> Iterator[None]:
    """A slow pattern would take forever."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


WEIGHTS = {"whole": "model.safetensors", "adapter": "adapter_model.safetensors"}
CONFIG = {"whole": "config.json", "adapter": "adapter_config.json"}


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def add_values(name: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = json.dumps(json.loads((folder / name).read_text()) | values)
        (folder / name).write_text(text.replace("OUTSIDE", str(folder.parent / "outside")))

    return change


def change_header(**values: Any) -> Callable[[Path], None]:
    """Change the entry of the first tensor."""

    def change(folder: Path) -> None:
        path = folder / WEIGHTS[folder.name]
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        next(entry for name, entry in header.items() if name != "__metadata__").update(values)
        written = json.dumps(header).encode()
        replace(path, len(written).to_bytes(8, "little") + written + content[end:])

    return change


def change_file(change: Callable[[Path], object], name: str = "") -> Callable[[Path], None]:
    """Change a file, the weights unless it is named."""
    return lambda folder: change(folder / (name or WEIGHTS[folder.name])) and None


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def set_nan(path: Path) -> None:
    tensors = load_file(path)
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}, path, {"format": "pt"})


class Explosive:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def replace_by_pickle(folder: Path) -> None:
    (folder / WEIGHTS[folder.name]).unlink()
    for name in ("pytorch_model.bin", "adapter_model.bin"):
        (folder / name).write_bytes(pickle.dumps(Explosive(folder.parent / "ran")))


def add_code(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder.parent / 'ran')!r}, 'w')\nclass Evil: pass\n")
    names = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    for name in {CONFIG[folder.name], "tokenizer_config.json"}:
        add_values(name, auto_map=names, trust_remote_code=True)(folder)


def add_code_of_an_unknown_model(folder: Path) -> None:
    add_code(folder)
    add_values("config.json", model_type="evil")(folder)


BOTH: dict[str, Callable[[Path], None]] = {
    "cut weights": change_file(lambda path: os.truncate(path, path.stat().st_size // 2)),
    "flipped header": change_file(
        lambda path: replace(path, path.read_bytes()[:20] + b"\xff" + path.read_bytes()[21:])
    ),
    "long header": change_file(lambda path: replace(path, (2**60).to_bytes(8, "little") + path.read_bytes()[8:])),
    "offsets beyond the file": change_header(data_offsets=[0, 2**62]),
    "negative shape": change_header(shape=[-1]),
    "another dtype": change_header(dtype="F64"),
    "not a number": change_file(set_nan),
    "no weights": change_file(Path.unlink),
    "a folder": change_file(replace_by_folder),
    "a pickle": replace_by_pickle,
    "no JSON": lambda folder: replace(folder / CONFIG[folder.name], b"\xff\xfe"),
    "cut tokenizer": change_file(lambda path: os.truncate(path, 1000), "tokenizer.json"),
    "an array as card": change_file(lambda path: replace(path, b"[]"), CARD_NAME),
}
ONE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a vocabulary too large": ("whole", add_values("config.json", vocab_size=10**12)),
    "another architecture": ("whole", add_values("config.json", model_type="t5")),
    "an unknown quantization": (
        "whole",
        add_values("config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
    ),
    "a rank too large": ("adapter", add_values("adapter_config.json", r=10**9)),
    "another kind of adapter": ("adapter", add_values("adapter_config.json", peft_type="XLORA")),
    "code of an adapter": ("adapter", add_code),
    "code of an unknown model": ("whole", add_code_of_an_unknown_model),
    "a base elsewhere": ("adapter", add_values(CARD_NAME, base="OUTSIDE")),
}
IGNORED: dict[str, tuple[str, Callable[[Path], None]]] = {
    "code of a model": ("whole", add_code),
    "a slow pattern": ("adapter", add_values("adapter_config.json", target_modules="(a+)+$" * 9)),
    "a tokenizer elsewhere": ("whole", add_values("tokenizer_config.json", tokenizer_file="OUTSIDE/config.json")),
}
CASES = {f"{kind}: {name}": (kind, change) for name, change in BOTH.items() for kind in WEIGHTS} | ONE


def damaged(sound: Path, tmp_path: Path, kind: str, change: Callable[[Path], None]) -> Path:
    """A changed copy of a folder, beside `outside`."""
    (tmp_path / "outside").symlink_to(sound / "outside")
    folder = Path(shutil.copytree(sound / kind, tmp_path / kind))
    change(folder)
    return folder


@pytest.mark.usefixtures("_time_limit")
@pytest.mark.parametrize("case", CASES)
def test_a_damaged_or_hostile_folder_is_refused_and_runs_no_code(case: str, sound: Path, tmp_path: Path) -> None:
    kind, change = CASES[case]
    folder = damaged(sound, tmp_path, kind, change)
    with pytest.raises((ArtifactError, FileNotFoundError), match=str(folder)):
        SentenceEncoder.from_pretrained(folder, device="cpu").encode(["A man is eating."])
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("_time_limit")
@pytest.mark.parametrize("case", IGNORED)
def test_values_that_an_encoder_does_not_use_have_no_effect(case: str, sound: Path, tmp_path: Path) -> None:
    kind, change = IGNORED[case]
    folder = damaged(sound, tmp_path, kind, change)
    expected = SentenceEncoder.from_pretrained(sound / kind, device="cpu").encode(["A man."])
    try:
        rows = SentenceEncoder.from_pretrained(folder, device="cpu").encode(["A man."])
    except ArtifactError:  # transformers 5.6 opens the named tokenizer file, which is none
        assert case == "a tokenizer elsewhere"
    else:
        assert np.array_equal(rows, expected)
    assert not (tmp_path / "ran").exists()

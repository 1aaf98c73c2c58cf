"""Files that are damaged, foreign or hostile are refused, never half loaded and never run."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny_base, tiny_encoder
from tiny_tokenizers import VOCABULARY
from torch import Tensor
from transformers import AddedToken, AutoTokenizer

from angle_llm.config import LoraSettings
from angle_llm.model.checks import TOKENIZER_FILES, ArtifactError, as_artifact_error
from angle_llm.model.encoder import SentenceEncoder

ADAPTER = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    encoder = SentenceEncoder.from_pretrained(base)
    encoder.add_lora(LoraSettings(rank=2))
    encoder.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def _drop_half(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for number, (name, tensor) in enumerate(tensors.items()) if number % 2}


def _drop_all(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {}


def _add_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    name, tensor = next(iter(tensors.items()))
    return tensors | {name.replace("layers.0", "layers.99"): tensor.clone()}


def _widen(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.repeat(2, 2) for name, tensor in tensors.items()}


@pytest.mark.parametrize("damage", [_drop_half, _drop_all, _add_one, _widen])
def test_an_adapter_with_other_tensors_is_refused(
    adapter: Path, damage: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    save_file(damage(load_file(adapter / ADAPTER)), adapter / ADAPTER)
    with pytest.raises(ArtifactError, match="adapter_model") as error:
        SentenceEncoder.from_pretrained(adapter)
    assert "again" in str(error.value)


def test_a_truncated_adapter_is_refused(adapter: Path) -> None:
    content = (adapter / ADAPTER).read_bytes()
    (adapter / ADAPTER).write_bytes(content[: len(content) // 2])
    with pytest.raises(ArtifactError, match="adapter_model"):
        SentenceEncoder.from_pretrained(adapter)


def test_a_whole_model_without_some_of_its_weights_is_refused(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    save_file(_drop_half(load_file(weights)), weights, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match="lacks"):
        SentenceEncoder.from_pretrained(tmp_path / "model")


def test_code_beside_the_weights_is_never_run(base: Path, tmp_path: Path) -> None:
    """Even if somebody answers yes to the question transformers would ask."""
    shutil.copytree(base, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"model_type": "trap", "auto_map": {"AutoConfig": "trap.Trap", "AutoModel": "trap.Trap"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\nclass Trap: pass\n")
    code = f"from angle_llm import SentenceEncoder; SentenceEncoder.from_pretrained({str(tmp_path / 'model')!r})"
    result = subprocess.run([sys.executable, "-c", code], input="y\ny\n", capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("special", [True, False])
def test_a_token_beyond_the_embeddings_is_allowed_if_it_is_special(base: Path, tmp_path: Path, special: bool) -> None:
    """Early copies of LLaMA-2 come with a `<pad>` that is nobody's padding token, one past the embeddings."""
    shutil.copytree(base, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([AddedToken("<pad>", special=special)])
    assert tokenizer.convert_tokens_to_ids("<pad>") == VOCABULARY
    assert "<pad>" not in tokenizer.all_special_tokens
    tokenizer.save_pretrained(tmp_path / "model")
    if special:
        rows = SentenceEncoder.from_pretrained(tmp_path / "model", device="cpu").encode(["Some <pad> text."])
        assert torch.from_numpy(rows).isfinite().all()
    else:
        with pytest.raises(ArtifactError, match="1 tokens, '<pad>' first, beyond the model's 400 embeddings"):
            SentenceEncoder.from_pretrained(tmp_path / "model", device="cpu")


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


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("not for you"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("CUDA error: device-side assert triggered"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_machine_lacks_is_not_told_as_damage(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, as_artifact_error("folder"):
        raise error
    assert raised.value is error


def test_a_missing_package_is_told_as_that() -> None:
    with pytest.raises(ArtifactError, match="without another package: sentencepiece"), as_artifact_error("folder"):
        raise ImportError("sentencepiece is needed")


def test_the_first_token_of_a_causal_model_is_no_embedding() -> None:
    with pytest.raises(ValueError, match="same vector"):
        tiny_encoder("llama", pooling="cls")


# --- two thousand damages of every kind of folder -----------------------------------------------------------------------

KINDS = ["adapter", "whole", "merged", "base", "peft", "angle-emb", "corpus", "corpus-npy", "checkpoint"]
FEW, MANY = 30, 223
"""Of each kind: 270 and 2,007 in all."""


def outcomes(kinds: list[str], first: int, count: int, work: Path) -> Counter[str]:
    """Damaged folders, opened in a process of its own under watch (see `open_damaged`): how many of them ended how.

    Each either opens, with finite vectors, or is refused by an error of the project's own.
    """
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "open_damaged.py"), ",".join(kinds), str(first), str(count), str(work)],
        env=os.environ
        | {
            "PYTHONPATH": f"{here.parent}{os.pathsep}{here.parent.parent}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(work),
            "HF_HUB_OFFLINE": "0",
        },
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    told = {(line["kind"], line["number"]): line["damage"] for line in lines if "damage" in line}
    ends = [line for line in lines if "outcome" in line]
    assert done.returncode == 0, f"the process ended with {done.returncode} after {lines[-1:]}: {done.stderr[-2000:]}"
    assert len(ends) == count * len(kinds)
    bad = [line for line in ends if line["outcome"] not in ("loaded", "refused") or line["seen"]]
    assert not bad, "\n".join(f"{told[line['kind'], line['number']]}: {line}" for line in bad)
    # A sound folder takes a few megabytes; what a lying file asked for would be hundreds.
    assert lines[-1]["grown_bytes"] < 300_000_000
    return Counter(line["outcome"] for line in ends)


@pytest.mark.skipif(sys.platform != "linux", reason="files opened elsewhere are told by inotify")
def test_damaged_and_hostile_folders_open_or_are_refused_and_nothing_runs(tmp_path: Path) -> None:
    found = outcomes(KINDS, 0, FEW, tmp_path)
    assert found["refused"] > found["loaded"] > 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="files opened elsewhere are told by inotify")
@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_of_them(kind: str, tmp_path: Path) -> None:
    outcomes([kind], FEW, MANY - FEW, tmp_path)

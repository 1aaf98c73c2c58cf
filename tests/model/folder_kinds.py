"""A folder of every kind the project reads, how each is made and opened, and code that tells when it is run."""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, TaskType, get_peft_model
from tiny import save_tiny_base, tiny_encoder, train_a_little
from torch import nn

from angle_llm.config import CheckpointSettings, LoraSettings, OptimizerSettings, TrainSettings
from angle_llm.data.corpus import Corpus
from angle_llm.embed import embed_corpus
from angle_llm.export.merge import merge
from angle_llm.model.backbone import load_backbone, locate
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.search import search_folder, source_texts
from angle_llm.train.checkpoint import Checkpoints, Progress
from angle_llm.train.distributed import Processes
from angle_llm.train.strategies import DataParallelStrategy
from angle_llm.vectors import ShardOptions, VectorForm, read_index

TEXTS = ["A man is eating.", 'Someone says "no" to the dogs.', "Where is it? 3, 5 & 7 Ü"]
MARKER = "MARKER"
"""A file that code from a folder would make, in the folder's grandparent."""


@dataclass(frozen=True)
class Kind:
    """A kind of folder."""

    make: Callable[[Path, Path], None]
    """Writes one into a folder, given a base."""
    open: Callable[[Path, Path], np.ndarray | None]
    """Opens it as the project does, given the base: the vectors that come of it, if any do."""


def _adapter(folder: Path, base: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(base, device="cpu")
    encoder.add_lora(LoraSettings(rank=2))
    train_a_little(encoder.model)
    encoder.save_pretrained(folder)


def _whole(folder: Path, base: Path) -> None:
    tiny_encoder("llama", prompt=None).save_pretrained(folder)


def _merged(folder: Path, base: Path) -> None:
    _adapter(folder.with_name("to-merge"), base)
    merge(folder.with_name("to-merge"), folder, shard_bytes=40_000, check=False)


def _peft(folder: Path, base: Path) -> None:
    config = LoraConfig(task_type=TaskType.FEATURE_EXTRACTION, r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"])
    adapted = get_peft_model(load_backbone(locate(str(base))), config)
    train_a_little(adapted)
    adapted.save_pretrained(folder)


def _angle_emb(folder: Path, base: Path) -> None:
    """As its trainer leaves them: the adapter, a tokenizer, settings of its own, and a pickle."""
    _peft(folder, base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, folder / name)
    values = {"model_name_or_path": str(base), "max_length": 64, "pooling_strategy": "last", "is_llm": True}
    (folder / "angle_config.json").write_text(json.dumps(values))
    (folder / "training_args.bin").write_bytes(canary(folder))


def _texts(folder: Path) -> Corpus:
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_suffix(".txt")
    path.write_text("".join(f"{text} {number}\n" for number in range(4) for text in TEXTS), encoding="utf-8")
    return Corpus.open(path, id_column=None)


def _corpus(folder: Path, base: Path) -> None:
    corpus, form = _texts(folder), VectorForm(ENCODER.dimensions, ENCODER.dimensions, precision="int8")
    options = ShardOptions("parquet", 5, store_text=True)
    embed_corpus(corpus, corpus.survey(skip_bad=False), ENCODER, "tiny", form, options, folder)


def _corpus_npy(folder: Path, base: Path) -> None:
    corpus, form = _texts(folder), VectorForm(ENCODER.dimensions, ENCODER.dimensions)
    options = ShardOptions("npy", 5)
    embed_corpus(corpus, corpus.survey(skip_bad=False), ENCODER, "tiny", form, options, folder)


def _checkpoint(folder: Path, base: Path) -> None:
    checkpoints, strategy = _checkpoints(folder)
    for weight in strategy.weights.values():
        weight.grad = torch.ones_like(weight)
    strategy.update(1e-3)
    checkpoints.write(Progress(3, 100))


def _checkpoints(folder: Path) -> tuple[Checkpoints, DataParallelStrategy]:
    layers = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    strategy = DataParallelStrategy(layers, OptimizerSettings(), Processes())
    settings = TrainSettings(run_dir=str(folder.parent), resume="auto", checkpoint=CheckpointSettings(keep=10))
    checkpoints = Checkpoints(settings, {"settings": "same", "base weights": None}, strategy)
    checkpoints.folder = folder
    return checkpoints, strategy


def _open_saved(folder: Path, base: Path) -> np.ndarray:
    return SentenceEncoder.from_pretrained(folder, device="cpu").encode(TEXTS)


def _open_foreign(folder: Path, base: Path) -> np.ndarray:
    return SentenceEncoder.from_pretrained(base, adapter=folder, prompt="plain", device="cpu").encode(TEXTS)


def _open_corpus(folder: Path, base: Path) -> np.ndarray:
    index = read_index(folder)
    hits = search_folder(folder, index, QUERIES, 3)
    source_texts(index, {hit.row for found in hits for hit in found})
    return np.array([[hit.cosine for hit in found] for found in hits])


def _open_checkpoint(folder: Path, base: Path) -> None:
    _checkpoints(folder)[0].resume()


KINDS: dict[str, Kind] = {
    "adapter": Kind(_adapter, _open_saved),
    "whole": Kind(_whole, _open_saved),
    "merged": Kind(_merged, _open_saved),
    "base": Kind(lambda folder, base: shutil.copytree(base, folder), _open_saved),  # type: ignore[arg-type, return-value]
    "peft": Kind(_peft, _open_foreign),
    "angle-emb": Kind(_angle_emb, _open_foreign),
    "corpus": Kind(_corpus, _open_corpus),
    "corpus-npy": Kind(_corpus_npy, _open_corpus),
    "checkpoint": Kind(_checkpoint, _open_checkpoint),
}
ENCODER = tiny_encoder("bert")
QUERIES = ENCODER.encode(TEXTS)


def make_base(folder: Path) -> Path:
    """The model that adapters go on."""
    return save_tiny_base("llama", folder)


def make_outside(folder: Path) -> None:
    """What no damaged folder may lead to: files of every name that is looked for, all of them sound."""
    save_tiny_base("llama", folder, seed=1)
    for name in ("adapter_model.safetensors", "weights.safetensors", "secret.json", "progress.json"):
        shutil.copy(folder / ("config.json" if name.endswith("json") else "model.safetensors"), folder / name)
    (folder / "evil.py").write_text(code(folder))
    (folder / "pytorch_model.bin").write_bytes(canary(folder))


# --- the canary ---------------------------------------------------------------------------------------------------------


class _Explosive:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def canary(folder: Path) -> bytes:
    """A pickle that tells when it is loaded."""
    return pickle.dumps(_Explosive(folder.parent.parent / MARKER))


def code(folder: Path) -> str:
    return f"open({str(folder.parent.parent / MARKER)!r}, 'w')\nclass Evil: pass\n"

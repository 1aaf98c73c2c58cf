"""Tiny training runs and their outputs, for the tests and programs of this folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny import save_tiny_base
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from angle_llm.data.formats import Example
from angle_llm.losses import Objective
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.settings.train import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
)
from angle_llm.train.best_model import Evaluate
from angle_llm.train.run_folder import FineTuned, Run
from angle_llm.train.token_budget import default_budget
from angle_llm.train.trainer import Trainer

TIMES = ("seconds", "pairs_per_second", "computed_tokens_per_second", "utilisation")


def run_settings(folder: Path) -> TrainSettings:
    """Twelve steps of two batches, four epochs, dropout; an evaluation every third step, a checkpoint every step."""
    pairs = folder / "pairs.tsv"
    rows = [f"Dog {n} runs.\tAnimal {m} moves.\t{abs(n - m)}" for n in range(3) for m in range(4)]
    pairs.write_text("\n".join(["sentence1\tsentence2\tscore", *rows]) + "\n")
    return TrainSettings(
        run_dir=str(folder / "undisturbed"),
        resume="auto",
        model=ModelSettings(path=str(save_tiny_base("llama", folder / "base")), dtype="float32", max_length=100),
        lora=LoraSettings(rank=4, alpha=8, dropout=0.2),
        data=DataSettings(path="starter:nli_triples.jsonl.gz", limit=20),
        optimizer=OptimizerSettings(learning_rate=1e-2),
        evaluation=EvaluationSettings(tasks=[str(pairs)], every_steps=3),
        checkpoint=CheckpointSettings(every_steps=1),
        batch_size=4,
        accumulation=2,
        epochs=4,
    )


def fit(
    encoder: SentenceEncoder,
    examples: Sequence[Example],
    loss: Objective,
    settings: TrainSettings,
    evaluate: Evaluate | None = None,
) -> FineTuned:
    """Train on examples in memory."""
    with Run.start(settings) as run:
        return Trainer(run, encoder, examples, [loss], evaluate, settings, default_budget(settings)).fit()


def checkpoint_names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def outcome(run_dir: Path) -> dict[str, Any]:
    """Outputs of a run that must not depend on interruptions."""
    return {
        "metrics": [{key: value for key, value in line.items() if key not in TIMES} for line in read_metrics(run_dir)],
        "settings": (run_dir / "settings.yaml").read_text().replace(str(run_dir), "RUN"),
        "files": sorted(path.name for path in run_dir.iterdir()),
        "checkpoints": checkpoint_names(run_dir),
        "verdict": json.loads((run_dir / "result.json").read_text()).get("verdict"),
        "model": {path.name: path.read_bytes() for path in (run_dir / "model").rglob("*") if path.is_file()},
    }


def ending(run_dir: Path) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Adapter, or all weights, and metrics of a run."""
    (path,) = (run_dir / "model").glob("*model.safetensors")
    return load_file(path), read_metrics(run_dir)


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Largest norm of the difference of two tensors of a name, relative to the norm of the first."""
    assert one
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / one[name].norm()) for name in one)


def loss_difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """Largest relative difference of the losses of two runs."""
    losses = [(a["loss"], b["loss"]) for a, b in zip(one, other, strict=True) if "loss" in a]
    assert losses
    return max(abs(a - b) / abs(a) for a, b in losses)


def float64_forward(norm: Any, states: Tensor) -> Tensor:
    """LlamaRMSNorm.forward in the dtype of its input: transformers computes it in float32, which hides anything below 2e-7."""
    scaled: Tensor = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * scaled


def use_float64_norm() -> None:
    """Replace LlamaRMSNorm.forward in this process."""
    LlamaRMSNorm.forward = float64_forward  # type: ignore[method-assign]

"""Trains one run spread in several ways, and compares where they end.

    python tests/train/spreads.py FOLDER float64 [STEPS WORLDS] | deepspeed [NAME …] | real MODEL | bits [NAME …] |
                                            elastic [ZeRO]

float64    a tiny LLaMA, 50 steps of ragged data, in 1, 2, 3 and 4 processes (STEPS 50, WORLDS 1234)
deepspeed  10 steps in float32: data parallel, ZeRO-1, -2, -3, each also with offload (or those named), against one process;
           kept and cached graphs
real       the same with the first six layers of a model
bits       the same with a base in 4 and in 8 bits
elastic    stopped by a signal at one process, and gone on with another number of processes, and with other strategies
"""

import json
import os
import signal
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import forked
import torch
import torch.utils.tensorboard  # imported here, once
from safetensors.torch import load_file
from tiny import save_tiny_base, tiny_encoder
from tiny_tokenizers import TOKENIZERS, VOCABULARY
from torch import Tensor
from transformers import AutoModel, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from angle_llm.config import (
    CheckpointSettings,
    DataSettings,
    DataSource,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
)
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import Example, ScoredPair
from angle_llm.losses import AngleObjective
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.train import trainer
from angle_llm.train.distributed import Launch
from angle_llm.train.process_loss import ProcessWatch
from angle_llm.train.signals import Interrupted
from angle_llm.train.strategies import DataParallelStrategy, ZeroStrategy, make_strategy
from angle_llm.train.trainer import train

warnings.filterwarnings("error", category=UserWarning, module="angle_llm")
OBJECTIVE = AngleObjective(cosine_weight=1.0, in_batch_weight=1.0, angle_weight=0.5)
CONFIGS = Path(__file__).parents[2] / "deepspeed_configs"


def settings(folder: Path, name: str, **changed: Any) -> TrainSettings:
    plain = TrainSettings(
        run_dir=str(folder / name),
        resume="auto",
        model=ModelSettings(path=str(folder / "base"), dtype="float32", max_length=60),
        lora=LoraSettings(rank=4, alpha=8),
        data=DataSettings(limit=60),
        optimizer=OptimizerSettings(learning_rate=3e-3),
        batch_size=7,  # the last batch of an epoch has four examples
        micro_batch_tokens=90,
    )
    return replace(plain, **changed)


def ragged(limit: int) -> list[Example]:
    """Triples, scored pairs, repeats, and texts of one word to sixty tokens."""
    examples: list[Example] = list(load_examples(DataSource(limit=limit)).examples)
    long = "A very long sentence about nothing at all " * 3
    return [*examples, ScoredPair("Hi", "Hi", 0.9), ScoredPair(long, "Hi", 0.1), ScoredPair("Hi", "Bye", 0.4)]


def float64_norm() -> None:
    """transformers' LlamaRMSNorm computes in float32 whatever the dtype."""

    def forward(norm: Any, states: Tensor) -> Tensor:
        scaled: Tensor = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * scaled

    LlamaRMSNorm.forward = forward  # type: ignore[method-assign]


def check_launch(launch: Launch, world: int, kind: str, stage: int) -> None:
    """That it is spread as the test believes; told wrongly, everything here would agree all the same."""
    assert launch.processes.count == world
    assert launch.accelerator.num_processes == world
    assert launch.accelerator.distributed_type.value == kind
    assert launch.zero_stage == stage


def ending(run_dir: Path) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Adapter and metrics."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return load_file(run_dir / "model" / "adapter_model.safetensors"), lines


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max() / one[name].abs().max()) for name in one)


def loss_difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    losses = [(a["loss"], b["loss"]) for a, b in zip(one, other, strict=True) if "loss" in a]
    assert losses
    return max(abs(a - b) / abs(a) for a, b in losses)


def work(mine: TrainSettings, world: int, kind: str, stage: int, dtype: torch.dtype, examples: list[Example]) -> None:
    """What each process does."""
    launch = Launch.join(mine.run_path)
    check_launch(launch, world, kind, stage)
    with ProcessWatch(launch.processes):
        torch.manual_seed(0)
        if dtype == torch.float64:
            encoder = tiny_encoder("llama", max_length=60, base=mine.model.path)
        else:
            encoder = SentenceEncoder.from_pretrained(
                mine.model.path, max_length=60, device="cpu", bits=mine.model.bits
            )
        encoder.add_lora(mine.lora)
        encoder.model.to(dtype)
        strategies: list[Any] = []
        trainer.make_strategy = lambda *given: strategies.append(make_strategy(*given)) or strategies[0]  # type: ignore[assignment,func-returns-value]
        train(encoder, examples, OBJECTIVE, mine, launch=launch)
        assert type(strategies[0]) is (ZeroStrategy if stage else DataParallelStrategy)


def float64(folder: Path, steps: str = "50", worlds: str = "1234") -> None:
    float64_norm()
    save_tiny_base("llama", folder / "base")
    examples = ragged(60)
    ends = {}
    for world in map(int, worlds):
        mine = settings(folder, f"world{world}", epochs=6, max_steps=int(steps))
        kind = "NO" if world == 1 else "MULTI_CPU"
        forked.run(
            world,
            lambda rank, mine=mine, world=world, kind=kind: work(mine, world, kind, 0, torch.float64, examples),
            folder / f"log{world}",
        )
        ends[world] = ending(mine.run_path)
        ups = [tensor for name, tensor in ends[world][0].items() if "lora_B" in name]  # 0 at the start
        assert max(float(tensor.abs().max()) for tensor in ups) > 0.01
        assert len(ends[world][1]) == int(steps)
    for world in map(int, worlds[1:]):
        difference = largest_difference(ends[1][0], ends[world][0])
        losses = loss_difference(ends[1][1], ends[world][1])
        imbalance = max(line["imbalance"] for line in ends[world][1])
        print(
            f"{world} processes: adapters differ by {difference:.1e}, losses by {losses:.1e}, imbalance {imbalance:.2f}"
        )
        assert difference < 1e-9, world


CPU = {"device": "cpu"}
DIVIDED = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
}  # small weights, too, are put together only when asked for
ZERO: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"stage": 1},
    "ZeRO-2": {"stage": 2},
    "ZeRO-3": DIVIDED,
    "ZeRO-1, offload": {"stage": 1, "offload_optimizer": CPU},
    "ZeRO-2, offload": {"stage": 2, "offload_optimizer": CPU},
    "ZeRO-3, offload": {**DIVIDED, "offload_optimizer": CPU, "offload_param": CPU},
}


def environment(folder: Path, name: str) -> dict[str, str]:
    """What `accelerate launch` sets for a DeepSpeed config."""
    path = folder / f"{name.replace(' ', '')}.json"
    path.write_text(json.dumps({"zero_optimization": ZERO[name]}))
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path), "DS_ACCELERATOR": "cpu"}


def import_deepspeed() -> None:
    """Once, before the forks."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    assert deepspeed


def deepspeed(folder: Path, *names: str) -> None:
    import_deepspeed()
    save_tiny_base("llama", folder / "base")
    compare(folder, [name for name in ZERO if not names or name in names])


def real(folder: Path, source: str) -> None:
    import_deepspeed()
    encoder = SentenceEncoder.from_pretrained(source, dtype="float32")
    backbone: Any = encoder.model.backbone
    del backbone.layers[6:]
    backbone.config.num_hidden_layers = 6
    backbone.save_pretrained(folder / "base")
    encoder.tokenizer.save_pretrained(folder / "base")
    compare(folder, list(ZERO), most=0.05)


def bits(folder: Path, *names: str) -> None:
    import_deepspeed()
    wide = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,  # blocks of 64 weights share a scale
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    AutoModel.from_config(wide).save_pretrained(folder / "base")
    TOKENIZERS["llama2"]().save_pretrained(folder / "base")
    for held in (4, 8):
        (folder / str(held)).mkdir()
        compare(folder / str(held), list(names), model=ModelSettings(str(folder / "base"), dtype="float32", bits=held))


def compare(folder: Path, names: list[str], most: float = 1e-3, **changed: Any) -> None:
    """One process against two, by every strategy, with kept and with cached graphs. Adapters may differ more than losses:
    Adam divides each gradient by its own size, and those near 0 are rounding alone."""
    examples = ragged(60)
    ends = {}
    spreads: dict[str, tuple[int, int, str, dict[str, str]]] = {
        "one process": (1, 0, "NO", {}),
        "data parallel": (2, 0, "MULTI_CPU", {}),
        **{name: (2, ZERO[name]["stage"], "DEEPSPEED", environment(folder, name)) for name in names},
    }
    run = {"max_steps": 10, "epochs": 2, "accumulation": 2, **changed}
    for graph_tokens in (10**6, 0):
        way = "kept" if graph_tokens else "cached"
        for name, (world, stage, kind, variables) in spreads.items():
            mine = settings(folder, f"{way} {name}", graph_tokens=graph_tokens, **run)
            forked.run(
                world,
                lambda rank, mine=mine, world=world, kind=kind, stage=stage: work(
                    mine, world, kind, stage, torch.float32, examples
                ),
                folder / f"log {way} {name}",
                variables,
            )
            ends[name] = ending(mine.run_path)
            assert len(ends[name][1]) == 10
            losses = loss_difference(ends["one process"][1], ends[name][1])
            weights = largest_difference(ends["one process"][0], ends[name][0])
            print(f"{name}, {way}: losses differ by {losses:.1e}, adapters by {weights:.1e}", flush=True)
            assert losses < 1e-5, name
            assert weights < most, name


def elastic(folder: Path, *names: str) -> None:
    if names:
        import_deepspeed()
    save_tiny_base("llama", folder / "base")
    examples = ragged(60)
    undisturbed = settings(folder, "undisturbed", max_steps=12, epochs=2)
    forked.run(1, lambda rank: work(undisturbed, 1, "NO", 0, torch.float32, examples), folder / "log")
    adapter, metrics = ending(undisturbed.run_path)
    mine = replace(undisturbed, run_dir=str(folder / "moved"), checkpoint=CheckpointSettings(every_steps=4))

    def some(rank: int, world: int, kind: str, stage: int, last: int) -> None:
        """Stopped after a step by a signal to the last process alone."""
        from angle_llm.train import trainer

        pause = trainer._Pause.__call__

        def paused(self: Any, step: int) -> None:
            if step == last < 12 and rank == world - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            pause(self, step)

        trainer._Pause.__call__ = paused  # type: ignore[method-assign]
        try:
            work(mine, world, kind, stage, torch.float32, examples)
        except Interrupted as stopped:
            if stopped.code != 143 or last == 12:
                raise AssertionError("stopped otherwise than asked") from stopped
        else:
            assert last == 12

    parts = [(2, "MULTI_CPU", 0, 3, None), (1, "NO", 0, 5, None), (3, "MULTI_CPU", 0, 7, None)]
    # Three processes divide no weight here evenly.
    parts += [(2 + stage // 3, "DEEPSPEED", stage, 7 + stage, f"ZeRO-{stage}") for stage in (1, 2, 3) if names]
    parts += [(3, "DEEPSPEED", 3, 11, "ZeRO-3")] if names else []
    parts += [(4, "MULTI_CPU", 0, 12, None)]
    for world, kind, stage, last, zero in parts:
        variables = environment(folder, zero) if zero else {}
        forked.run(
            world,
            lambda rank, world=world, kind=kind, stage=stage, last=last: some(rank, world, kind, stage, last),
            folder / f"log {last}",
            variables,
        )
    moved, lines = ending(mine.run_path)
    assert [line["step"] for line in lines] == list(range(1, 13))
    print(
        f"adapters differ by {largest_difference(adapter, moved):.1e}, losses by {loss_difference(metrics, lines):.1e}"
    )
    assert loss_difference(metrics, lines) < 1e-5
    assert largest_difference(adapter, moved) < 1e-4  # float32 sums in other orders, twelve steps of Adam


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"float64": float64, "deepspeed": deepspeed, "real": real, "bits": bits, "elastic": elastic}[sys.argv[2]](
        Path(sys.argv[1]), *sys.argv[3:]
    )

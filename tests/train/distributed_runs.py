"""Train one run with several strategies, in separate processes, and compare losses and adapters.

    python tests/train/distributed_runs.py FOLDER COMMAND [ARGUMENTS]

float64 STEPS WORLDS      a tiny LLaMA on ragged data in float64, in each of WORLDS processes, such as 123
float16                   overflows in the first steps on the last of 2 processes: neither takes these steps
options                   the same with options of the negatives and teacher scores, in 1 and 2 processes; and a run whose
                          gradient is 0, in 2
deepspeed [NAME]          5 steps in float32: data parallel and ZeRO-1, -2, -3, each also with offload, against one process;
                          kept and cached graphs. With a name, 2 steps of that one in fewer micro-batches, with cached graphs
fsdp KIND [long]          FSDP in 2 processes gives the bytes of data parallel. `long`: with kept and cached graphs, with
                          activation checkpointing and resumed; and in 3 processes, in float64, against one
bits NAME …               the same with a base in 4 and in 8 bits
together                  accumulated batches in float64: one by one in one process, and together in two
elastic [ZeRO]            interrupted by a signal to one process and resumed with other numbers of processes and strategies
mixture CONFIG [NAME …]   a mixture of datasets stored on disk, in 1 and 3 processes, and in 2 with the named ZeRO
shortage PROCESSES MB     one process has MB of memory left from the first step on: every rank repeats the step
attention KIND [NAME]     bidirectional attention: data parallel and the named ZeRO, against one process
families NAME …           models of each family and multimodal models: two steps, data parallel against one process
dense [NAME]              the same with Dense modules that are trained too
kernels [NAME]            the last rank cannot use texts in one sequence, at load: every rank pads its texts; or from the
                          second step on: the run ends and is resumed with --layout padded
"""

import json
import os
import resource
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import forked
import kills
import peft  # noqa: F401  (once, before the forks)
import pytest
import torch
import torch.utils.tensorboard
from composites import CONFIGS, save_composite
from runs import ending, fit, largest_difference, loss_difference, use_float64_norm
from safetensors.torch import load_file
from tiny import FEW_TARGETS, NO_LORA, save_tiny_base, tiny_encoder
from tiny_tokenizers import TOKENIZERS, VOCABULARY
from torch.utils.checkpoint import CheckpointError
from transformers import AutoModel, LlamaConfig

from angle_llm import fine_tune
from angle_llm.data import store
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import Example, Group, ScoredPair
from angle_llm.losses import AngleObjective, FalseNegatives, Objective
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.heads import EmbeddingModel
from angle_llm.model.layout import support
from angle_llm.model.source import artifact
from angle_llm.model.source.checks import CARD_NAME
from angle_llm.model.source.dense import Dense
from angle_llm.model.source.resolve import resolve_model
from angle_llm.prompts import load_prompts
from angle_llm.settings.parsing import load_settings
from angle_llm.settings.train import (
    CheckpointSettings,
    DataSettings,
    DataSource,
    EvaluationSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
)
from angle_llm.train import trainer
from angle_llm.train.distributed import EXIT_CODE
from angle_llm.train.loading import load_encoder
from angle_llm.train.run_folder import Run
from angle_llm.train.strategies import DataParallelStrategy, FsdpStrategy, GradientScale, ZeroStrategy, make_strategy
from angle_llm.train.token_budget import default_budget
from angle_llm.train.trainer import Interrupted

warnings.filterwarnings("error", category=UserWarning, module="angle_llm")
LOSS = AngleObjective(cosine_weight=1.0, in_batch_weight=1.0, angle_weight=0.5)
WITH_OPTIONS = AngleObjective(
    cosine_weight=1.0,
    in_batch_weight=1.0,
    kl_weight=0.1,
    margin_mse_weight=0.3,
    contrastive_form="forward",
    false_negatives=FalseNegatives(margin=0.05),
    hardness_strength=2.0,
)
CPU = {"device": "cpu"}
TANH = "torch.nn.modules.activation.Tanh"
DIVIDED = {"stage": 3, "stage3_param_persistence_threshold": 0}  # small weights are partitioned too
ZERO: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"stage": 1},
    "ZeRO-2": {"stage": 2},
    "ZeRO-3": DIVIDED,
    "ZeRO-1, offload": {"stage": 1, "offload_optimizer": CPU},
    "ZeRO-2, offload": {"stage": 2, "offload_optimizer": CPU},
    "ZeRO-3, offload": {**DIVIDED, "offload_optimizer": CPU, "offload_param": CPU},
}


def settings(folder: Path, name: str, **changed: Any) -> TrainSettings:
    plain = TrainSettings(
        run_dir=str(folder / name),
        resume="auto",
        model=ModelSettings(path=str(folder / "base"), dtype="float32", max_length=60),
        lora=LoraSettings(rank=4, alpha=8),
        data=DataSettings(limit=60),
        optimizer=OptimizerSettings(learning_rate=3e-3),
        batch_size=7,  # the last batch of an epoch has four examples
        micro_batch_tokens=180,
    )
    return replace(plain, **changed)


def ragged(limit: int) -> list[Example]:
    """Triples, scored pairs, repeats, and texts of one word to sixty tokens."""
    examples: list[Example] = list(load_examples(DataSource(limit=limit)).examples)
    long = "A very long sentence about nothing at all " * 3
    return [*examples, ScoredPair("Hi", "Hi", 0.9), ScoredPair(long, "Hi", 0.1), ScoredPair("Hi", "Bye", 0.4)]


def evaluation_of(mine: TrainSettings) -> Any:
    """An evaluation that is better each time, so that each model is saved; None without tasks."""
    values = iter(range(100))
    return (lambda _: {"number": float(next(values))}) if mine.evaluation.tasks else None


def train(
    mine: TrainSettings,
    world: int,
    examples: list[Example],
    stage: int = 0,
    dtype: torch.dtype = torch.float32,
    loss: Objective = LOSS,
) -> None:
    """The run of one process; checks that it is distributed as requested, because every strategy gives the same result."""

    def checked(model: Any, optimizer: OptimizerSettings, processes: Any) -> Any:
        # Accelerate before 1.13 names one process MULTI_CPU too.
        kinds = ["DEEPSPEED"] if stage else ["MULTI_CPU", *(["NO"] if world == 1 else [])]
        assert (processes.world_size, processes.accelerator.num_processes) == (world, world)
        assert processes.accelerator.distributed_type.value in kinds
        assert processes.zero_stage == stage
        strategy = make_strategy(model, optimizer, processes)
        assert type(strategy) is (FsdpStrategy if fsdp else ZeroStrategy if stage else DataParallelStrategy)
        if fsdp:  # a rank holds its part of every frozen weight, and the whole adapter
            for name, weight in model.named_parameters():
                local = weight if weight.requires_grad else weight.to_local()
                assert ("lora_" in name) == weight.requires_grad
                rows = [len(part) for part in torch.arange(len(weight)).chunk(1 if weight.requires_grad else world)]
                assert len(local) == [*rows, 0, 0][0 if weight.requires_grad else processes.rank], name
        return strategy

    trainer.make_strategy = checked
    torch.manual_seed(0)
    fsdp = "ACCELERATE_USE_FSDP" in os.environ
    if stage == 3 or (fsdp and dtype == torch.float32):
        train_partitioned(mine, examples)
        return
    if dtype == torch.float64:
        prompts = load_prompts({"query": "plain", "document": "summarize_one_word"})
        encoder = tiny_encoder("llama", max_length=60, base=mine.model.path, prompt=prompts)
    else:
        encoder = SentenceEncoder.from_pretrained(
            mine.model.path, max_length=60, device="cpu", bits=mine.model.bits, attention=mine.model.attention
        )
    if dtype == torch.float16:  # of the base
        encoder.model.to(dtype)
    if mine.lora.rank:
        encoder.add_lora(mine.lora)
    if dtype != torch.float16:
        encoder.model.to(dtype)
    fit(encoder, examples, loss, mine, evaluation_of(mine))


def train_partitioned(mine: TrainSettings, examples: list[Example]) -> None:
    """The run of one process under ZeRO-3 or FSDP; checks that other ranks than 0 do not read the weights."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights are read by this rank")

    with Run.start(mine) as run:
        if not run.processes.is_main:
            artifact.load_backbone = refuse
        source = resolve_model(mine.model.path, attention=mine.model.attention)
        encoder, _ = load_encoder(source, mine, run.processes)
        assert encoder.model.options.causal == (mine.model.attention is None)
        assert {parameter.is_meta for parameter in encoder.model.parameters()} == {not run.processes.is_main}
        trainer.Trainer(run, encoder, examples, [LOSS], evaluation_of(mine), mine, default_budget(mine)).fit()


def check_close(name: str, one: Path, other: Path, *, losses: float = 1e-5, weights: float = 1e-3) -> None:
    """Adapters may differ more than losses: Adam divides each gradient by its own size, also one of 1e-8 that is rounding
    (on a 4-bit base one weight of 768 differs by 6e-3 of the largest, the whole tensor by 3e-4 of its norm)."""
    (adapter, metrics), (adapter_2, metrics_2) = ending(one), ending(other)
    difference, loss = largest_difference(adapter, adapter_2), loss_difference(metrics, metrics_2)
    print(f"{name}: losses differ by {loss:.1e}, adapters by {difference:.1e}", flush=True)
    assert loss < losses, name
    assert difference < weights, name


def options(folder: Path) -> None:
    groups = [
        Group(f"Question {n}?", (f"Answer {n}.",), (f"No {n}.", "Nothing."), (2.0, -n / 9, 0.5)) for n in range(9)
    ]
    float64(folder, "5", "12", [*groups, *ragged(12)], WITH_OPTIONS)
    without_gradient(folder, 2)


def without_gradient(folder: Path, world: int, stage: int = 0, variables: dict[str, str] | None = None) -> None:
    """Each process stops, and no process waits for another one."""
    equal: list[Example] = [ScoredPair(f"Dog {n} runs.", f"Animal {n} moves.", 0.5) for n in range(8)]
    mine = settings(folder, "without gradient")

    def stopped(_: int) -> None:
        try:
            train(mine, world, equal, stage, loss=AngleObjective(cosine_weight=1.0, in_batch_weight=0.0))
        except trainer.TrainingError as error:
            print(error)
        else:
            raise AssertionError("the run did not stop")

    forked.run(world, stopped, folder / "log without gradient", variables)
    logs = [(folder / f"log without gradient.{rank}").read_text() for rank in range(world)]
    assert all("the gradient is exactly 0" in log for log in logs), logs
    assert not list(mine.run_path.glob("*/*.safetensors"))


def float64(
    folder: Path, steps: str, worlds: str, examples: list[Example] | None = None, loss: Objective = LOSS
) -> None:
    use_float64_norm()
    save_tiny_base("llama", folder / "base")
    examples = examples or ragged(20)  # four batches of at most seven
    for world in map(int, worlds):
        mine = settings(folder, f"world{world}", epochs=13, max_steps=int(steps))
        forked.run(
            world,
            lambda _, m=mine, w=world: train(m, w, examples, dtype=torch.float64, loss=loss),
            folder / f"log{world}",
        )
        adapter, metrics = ending(mine.run_path)
        assert max(float(tensor.abs().max()) for name, tensor in adapter.items() if "lora_B" in name) > 0.005
        assert len(metrics) == int(steps)
        check_close(f"{world} processes", folder / "world1", mine.run_path, losses=1e-9, weights=1e-9)


def float16(folder: Path) -> None:
    save_tiny_base("llama", folder / "base")
    mine = settings(folder, "float16", epochs=13, max_steps=6, checkpoint=CheckpointSettings(every_steps=1))
    mine = replace(mine, model=replace(mine.model, dtype="float16"))

    def run(rank: int) -> None:
        backward, update = DataParallelStrategy.backward, DataParallelStrategy.update
        updates = []

        def overflowing(self: Any, scalar: Any) -> None:
            self.scale = self.scale if updates else GradientScale(2.0**8)  # too small to overflow
            backward(self, scalar * torch.inf if rank == 1 and len(updates) in (1, 3) else scalar)

        def counted(self: Any, rate: float) -> float | None:
            assert self.processes.world_size == 2
            updates.append(update(self, rate))
            return updates[-1]

        DataParallelStrategy.backward = overflowing  # type: ignore[method-assign]
        DataParallelStrategy.update = counted  # type: ignore[method-assign]
        train(mine, 2, ragged(20), dtype=torch.float16)
        skipped = [step for step, norm in enumerate(updates) if norm is None]
        assert skipped == [1, 3], skipped
        print("equal steps without an update", flush=True)

    forked.run(2, run, folder / "log")  # a checkpoint compares the weights of the processes
    logs = [(folder / f"log.{rank}").read_text() for rank in range(2)]
    assert all("equal steps without an update" in log for log in logs)
    assert [line["step"] for line in ending(mine.run_path)[1] if line.get("overflow")] == [2, 4]
    print("equal steps without an update")


def together(folder: Path) -> None:
    use_float64_norm()
    save_tiny_base("llama", folder / "base")
    examples = ragged(18)  # three batches of seven
    grouped, step = trainer.BatchPlanner.grouped, trainer.group_step

    def run(mine: TrainSettings, world: int, count: int) -> None:
        def checked(model: Any, plan: Any, batches: Any, **named: Any) -> Any:
            assert (len(batches), len(plan.shares)) == (count, world)
            return step(model, plan, batches, **named)

        trainer.group_step = checked
        if count == 1:
            trainer.BatchPlanner.grouped = lambda planner, batches, budget: [
                grouped(planner, [one], budget)[0] for one in batches
            ]  # type: ignore[method-assign]
        train(mine, world, examples, dtype=torch.float64)

    for name, world, count in (("one by one", 1, 1), ("together", 2, 3)):
        mine = settings(folder, name, accumulation=3, epochs=3, max_steps=3)
        forked.run(world, lambda _, m=mine, w=world, c=count: run(m, w, c), folder / f"log {name}")
        check_close(name, folder / "one by one", mine.run_path, losses=1e-12, weights=1e-11)


def environment(folder: Path, name: str) -> dict[str, str]:
    """What `accelerate launch` sets for a DeepSpeed config."""
    path = folder / f"{name.replace(' ', '')}.json"
    path.write_text(json.dumps({"zero_optimization": ZERO[name]}))
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path), "DS_ACCELERATOR": "cpu"}


def import_deepspeed() -> None:
    """Once, before the forks."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; built in C++ for a minute


def deepspeed(folder: Path, name: str | None = None) -> None:
    save_tiny_base("llama", folder / "base")
    compare(folder, [name] if name else list(ZERO), quick=name is not None)


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def fsdp(folder: Path, kind: str, length: str = "") -> None:
    save_tiny_base(kind, folder / "base")
    examples = ragged(60)
    steps = 4 if length else 2
    common: dict[str, Any] = {"max_steps": steps, "epochs": 2, "lora": LoraSettings(4, 8, dropout=0.1)}
    kinds: dict[str, dict[str, Any]] = {
        "cached": {"graph_tokens": 0},
        "kept": {"graph_tokens": 10**6, "accumulation": 2},
        "computed again": {"graph_tokens": 10**6, "activation_checkpointing": "always"},
    }
    launches: dict[str, dict[str, str]] = {"data parallel": {}, "FSDP": FSDP}
    for name, more in kinds.items():
        for launch, variables in launches.items():
            mine = settings(folder, f"{name} {launch}", **common, **more)
            forked.run(2, lambda _, m=mine: train(m, 2, examples), folder / f"log {name} {launch}", variables)
        check_bytes(*(folder / f"{name} {launch}" for launch in launches))
        if not length:
            return
    # A checkpoint of FSDP resumes with FSDP and with data parallel.
    stopped = settings(
        folder, "stopped", **common, **kinds["kept"], checkpoint=CheckpointSettings(every_steps=1, keep=9)
    )
    forked.run(2, lambda _: train(stopped, 2, examples), folder / "log stopped", FSDP)
    for launch, variables in launches.items():
        resumed = replace(stopped, resume="step-000002")
        forked.run(2, lambda _, m=resumed: train(m, 2, examples), folder / f"log resumed {launch}", variables)
        assert "budget of the checkpoint" in (folder / f"log resumed {launch}.0").read_text()
        check_bytes(folder / "kept FSDP", stopped.run_path)
    # In float64, against one process; three processes divide no weight evenly.
    use_float64_norm()
    for world, variables in ((1, {}), (3, FSDP)):
        mine = settings(folder, f"world{world}", max_steps=3)
        forked.run(
            world,
            lambda _, m=mine, w=world: train(m, w, examples, dtype=torch.float64),
            folder / f"log{world}",
            variables,
        )
    check_close("FSDP in 3 processes", folder / "world1", folder / "world3", losses=1e-9, weights=1e-9)


def check_bytes(one: Path, other: Path) -> None:
    """The adapters of two runs are equal, and their losses and gradient norms."""
    names = ("step", "loss", "gradient_norm")
    numbers = [[[line[name] for name in names] for line in ending(path)[1]] for path in (one, other)]
    assert numbers[0] == numbers[1]
    files = [(path / "model" / "adapter_model.safetensors").read_bytes() for path in (one, other)]
    assert files[0] == files[1]
    print(f"{other.name}: the same bytes", flush=True)


def bits(folder: Path, *names: str) -> None:
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
    for held, attention in ((4, None), (8, None), (4, "bidirectional")):
        (folder / f"{held} {attention}").mkdir()
        model = ModelSettings(str(folder / "base"), dtype="float32", bits=held, attention=attention)
        compare(folder / f"{held} {attention}", list(names), model=model)


def compare(folder: Path, names: list[str], quick: bool = False, **changed: Any) -> None:
    """One process against two, with every strategy, with kept and with cached graphs."""
    import_deepspeed()
    examples = ragged(60)
    launches: dict[str, tuple[int, int, dict[str, str]]] = {
        "one process": (1, 0, {}),
        "data parallel": (2, 0, {}),
        **{name: (2, ZERO[name]["stage"], environment(folder, name)) for name in names},
    }
    kinds: dict[str, dict[str, Any]] = {"kept": {"graph_tokens": 10**6}, "cached": {"graph_tokens": 0}}
    runs = [(kind, name) for kind in kinds for name in launches]
    if quick:  # the slow test has the others
        runs = [("kept", "one process"), *(("cached", name) for name in names)]
    if "ZeRO-3" in names and not changed:  # the weights of a layer are gathered again
        kinds["computed again"] = {"graph_tokens": 10**6, "activation_checkpointing": "always"}
        runs.append(("computed again", "ZeRO-3"))
    for kind, name in runs:
        world, stage, variables = launches[name]
        run = {"max_steps": 5, "epochs": 2, "accumulation": 2, **kinds[kind], **changed}
        if quick:
            run |= {"max_steps": 2, "micro_batch_tokens": 300}  # each micro-batch gathers the weights of all layers
        mine = settings(folder, f"{kind} {name}", **run)
        forked.run(
            world,
            lambda _, m=mine, w=world, s=stage: train(m, w, examples, s),
            folder / f"log {kind} {name}",
            variables,
        )
        reference = "cached" if kind == "cached" and not quick else "kept"
        check_close(f"{name}, {kind}", folder / f"{reference} one process", mine.run_path)


def elastic(folder: Path, *names: str) -> None:
    save_tiny_base("llama", folder / "base")
    examples = ragged(60)
    steps = 12 if names else 7
    undisturbed = settings(folder, "undisturbed", max_steps=steps, epochs=2)
    forked.run(1, lambda _: train(undisturbed, 1, examples), folder / "log")
    mine = replace(undisturbed, run_dir=str(folder / "moved"), checkpoint=CheckpointSettings(every_steps=2))

    def part(rank: int, world: int, stage: int, last: int) -> None:
        """Interrupted after a step by a signal to the last rank alone."""
        real = trainer.Trainer._evaluate_and_save

        def with_signal(self: Any) -> None:
            if self._step == last < steps and rank == world - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            real(self)

        trainer.Trainer._evaluate_and_save = with_signal  # type: ignore[method-assign]
        try:
            train(mine, world, examples, stage)
        except Interrupted as stopped:
            if stopped.code != 143 or last == steps:
                raise AssertionError(f"exit code {stopped.code} after step {last}") from stopped
        else:
            assert last == steps

    parts: list[tuple[int, int, int]] = [(2, 0, 3), (1, 0, 5)]
    if names:
        import_deepspeed()
        parts += [(3, 0, 7)]
        parts += [(2, 1, 8), (2, 2, 9), (3, 3, 10), (3, 3, 11)]  # three processes divide no weight here evenly
    for world, stage, last in [*parts, (3, 0, steps)]:
        variables = environment(folder, f"ZeRO-{stage}") if stage else {}
        forked.run(world, lambda rank, w=world, s=stage, n=last: part(rank, w, s, n), folder / f"log {last}", variables)
    assert [line["step"] for line in ending(mine.run_path)[1]] == list(range(1, steps + 1))
    check_close("moved", undisturbed.run_path, mine.run_path, weights=1e-4)


def mixture(folder: Path, config: str, *names: str) -> None:
    store.MEMORY_LIMIT = 0  # every dataset is stored on disk
    if names:
        import_deepspeed()
    plain = load_settings(TrainSettings, config)
    launches = {"world1": 1, "world3": 3} | dict.fromkeys(names, 2)
    for name, world in launches.items():
        mine = replace(plain, run_dir=str(folder / name))
        variables = environment(folder, name) if name in names else {"ACCELERATE_USE_CPU": "true"}
        variables = variables | {"ANGLE_LLM_CACHE": str(folder / f"cache {name}")}
        forked.run(world, lambda _, m=mine: fine_tune(m), folder / f"{name}.log", variables)
        printed = (folder / f"{name}.log.0").read_text()
        strategy = "" if world == 1 else f", {name if name in names else 'data parallel'}"
        assert f"process 0 of {world} on cpu{strategy}\n" in printed, printed
        assert len(list((folder / f"cache {name}" / "examples").iterdir())) == 2, "one store per dataset"
        check_close(f"{name}: {world} processes", folder / "world1", mine.run_path)
        one, other = (
            [{name: line[name] for name in line if name.startswith("examples/")} for line in ending(path)[1]]
            for path in (folder / "world1", mine.run_path)
        )
        assert one == other


def limit_memory(extra_bytes: int) -> None:
    """From the first step on, this process can allocate only so many more bytes."""
    real = trainer.Trainer._accumulate

    def accumulate(*given: Any) -> Any:
        if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + extra_bytes, resource.RLIM_INFINITY))
        return real(*given)

    trainer.Trainer._accumulate = accumulate  # type: ignore[method-assign]


def shortage(folder: Path, processes: str, megabytes: str) -> None:
    save_tiny_base("llama", folder / "base")
    examples, world = ragged(300), int(processes)
    large = {"batch_size": 100, "accumulation": 2, "micro_batch_tokens": 10**6, "graph_tokens": 10**6}
    free = settings(folder, "free", **large, max_steps=2, epochs=2)
    short = replace(free, run_dir=str(folder / "short"))
    forked.run(world, lambda _: train(free, world, examples), folder / "free.log")

    def limited(rank: int) -> None:
        if rank == world - 1:
            limit_memory(int(megabytes) * 2**20)
        train(short, world, examples)

    forked.run(world, limited, folder / "short.log")
    assert "out of memory" not in (folder / "free.log.0").read_text()
    print((folder / "short.log.0").read_text().count("out of memory: repeating the step"), "repeated steps")
    check_close("limited", free.run_path, short.run_path)


def attention(folder: Path, kind: str, *names: str) -> None:
    save_tiny_base(kind, folder / "base")
    model = replace(settings(folder, "").model, attention="bidirectional")
    two_processes(folder, names, {"attention": "bidirectional"}, model=model)


def families(folder: Path, *names: str) -> None:
    failed = {}
    for name in names:
        (folder / name).mkdir()
        try:
            save = save_composite if name in CONFIGS else save_tiny_base
            save(name, folder / name / "base")
            path = folder / name / "base" / "config.json"
            config = json.loads(path.read_text())
            # The masks of a model's own dropout differ between ranks.
            path.write_text(json.dumps(config | {key: 0.0 for key in config if "drop" in key}))
            rank, targets = 0 if name in NO_LORA else 4, list(FEW_TARGETS.get(name, ["all-linear"]))
            lora = LoraSettings(rank=rank, alpha=8, targets=targets)
            model = settings(folder / name, "").model
            print(name, flush=True)
            two_processes(folder / name, (), {}, lora=lora, model=model, max_steps=2)
        except (Exception, pytest.skip.Exception) as error:
            failed[name] = repr(error)
    assert not failed, failed


def dense(folder: Path, *names: str) -> None:
    save_tiny_base("llama", folder / "base")
    encoder = SentenceEncoder.from_pretrained(folder / "base", prompt="plain", device="cpu")
    torch.manual_seed(0)
    layers = (Dense(torch.nn.Linear(32, 48, bias=False), TANH), Dense(torch.nn.Linear(48, 20), TANH))
    encoder.model.dense = torch.nn.Sequential(*layers)
    encoder.save_pretrained(folder / "model")
    model = replace(settings(folder, "").model, path=str(folder / "model"), prompt="plain", attention="bidirectional")
    in_card = {"dense": 2, "attention": "bidirectional"}
    two_processes(folder, names, in_card, model=model, lora=LoraSettings(rank=4, alpha=8, train_dense=True))


def whole(folder: Path, *names: str) -> None:
    """All weights are trained; the checkpoint and the saved model have them in full."""
    save_tiny_base("llama", folder / "base")
    checkpoint, evaluation = CheckpointSettings(every_steps=1), EvaluationSettings(tasks=["number"], every_steps=1)
    compare(folder, list(names), quick=True, lora=LoraSettings(rank=0), checkpoint=checkpoint, evaluation=evaluation)
    for name in names:
        run_path = folder / f"cached {name}"
        weights = load_file(run_path / "checkpoints" / "step-000002" / "weights.safetensors")
        saved = load_file(run_path / "model" / "model.safetensors")
        assert len(weights) == len(saved)
        assert all(torch.equal(saved[name.removeprefix("backbone.")], tensor) for name, tensor in weights.items())


def two_processes(folder: Path, names: tuple[str, ...], in_card: dict[str, Any], **changed: Any) -> None:
    """Compare data parallel, or the named ZeRO, with one process."""
    if names:
        compare(folder, list(names), quick=True, **changed)
        return
    for world in (1, 2):
        mine = settings(folder, f"world{world}", **{"max_steps": 3} | changed)
        forked.run(world, lambda _, m=mine, w=world: train(m, w, ragged(40)), folder / f"log{world}")
        assert json.loads((mine.run_path / "model" / CARD_NAME).read_text()).items() >= in_card.items()
        check_close(f"{world} processes", folder / "world1", mine.run_path)


def kernels(folder: Path, *names: str) -> None:
    save_tiny_base("llama", folder / "base")
    changed = {"max_steps": 3, "micro_batch_tokens": 300, "checkpoint": CheckpointSettings(every_steps=1)}
    load, step = (settings(folder, one, **changed) for one in ("load", "step"))

    def tried(rank: int) -> None:
        if rank == 1:
            support._probe = lambda *_, **__: "another driver"
        fine_tune(load)

    def failing(rank: int) -> None:
        real, calls = EmbeddingModel.forward, [0]

        def forward(model: Any, ids_BT: Any, mask_BT: Any = None, sequence: Any = None) -> Any:
            calls[0] += model.training
            if rank == 1 and sequence is not None and calls[0] > 3:  # a step has at most 3 micro-batches
                raise CheckpointError("recomputed tensors have other shapes")
            return real(model, ids_BT, mask_BT, sequence)

        EmbeddingModel.forward = forward  # type: ignore[method-assign]
        fine_tune(step)

    def log(rank: int) -> str:
        return (folder / f"step.log.{rank}").read_text()

    variables = {}
    for name in names:
        import_deepspeed()
        variables = environment(folder, name)
    forked.run(2, tried, folder / "load.log", variables)
    assert "texts: padded (another driver)" in (folder / "load.log.0").read_text()
    processes = forked.start(2, failing, folder / "step.log", variables)
    assert [kills.wait(process) for process in processes] == [EXIT_CODE, 1]
    for rank in (0, 1):
        assert "a compiled kernel failed" in log(rank)
        assert "--resume auto --layout padded" in log(rank)
    forked.run(2, lambda _: fine_tune(replace(step, layout="padded")), folder / "resumed.log", variables)
    assert "budget of the checkpoint" in (folder / "resumed.log.0").read_text()
    layouts = [[line["layout"] for line in ending(run.run_path)[1]] for run in (load, step)]
    assert layouts[0] == ["padded"] * 3
    assert layouts[1][0] == "trie"
    check_close("padded", load.run_path, step.run_path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    commands = {
        one.__name__: one
        for one in (
            float64,
            float16,
            options,
            together,
            deepspeed,
            fsdp,
            bits,
            elastic,
            mixture,
            shortage,
            attention,
            families,
            dense,
            whole,
            kernels,
        )
    }
    commands[sys.argv[2]](Path(sys.argv[1]), *sys.argv[3:])  # type: ignore[operator]

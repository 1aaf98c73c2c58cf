"""The budgets of a run: the largest useful ones that fit, as set where they are set, and kept by a resumed run."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import micro_batches_of, tiny_encoder
from torch import nn

from angle_llm.data.batch import TextBatch
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import DataError
from angle_llm.data.mixture import Mixture
from angle_llm.losses import AngleObjective
from angle_llm.memory import device_memory
from angle_llm.memory.budget import USABLE, StepForecast, best_budget, choose_budget, product_weights
from angle_llm.memory.device_memory import Sharding
from angle_llm.memory.step_memory import MemoryLedger, count_passes
from angle_llm.model.layers.depth import LayerStack
from angle_llm.model.layers.lora import without_adapter
from angle_llm.model.meta_model import meta_backbone
from angle_llm.model.source.dense import Dense
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import DataSource, LoraSettings, ModelSettings, OptimizerSettings, TrainSettings
from angle_llm.train.distributed import Processes
from angle_llm.train.step import boundary_step
from angle_llm.train.token_budget import OTHER_BUDGET, TokenBudget, budget_of, check_checkpointing, default_budget

MIB = 2**20
SMALL = TokenBudget(2048, 16_384)  # docs/memory.md


class LinearForecast(StepForecast):
    """10 MiB per token whose graph is kept, 1 with activation checkpointing, 1 GiB for everything else."""

    def __init__(
        self,
        kind: str = "cuda",
        *,
        step: int = 5000,
        batch: int = 0,
        longest: int = 100,
        zero: int = 0,
        supports: bool = True,
    ):
        values = {
            "device": SimpleNamespace(kind=kind, sharding=Sharding(1, zero)),
            "longest_text": longest,
            "step_tokens": step,
            "batch_tokens": batch or step,
            "supports_checkpointing": lambda: supports,
        }
        vars(self).update(values)

    def memory(self, tokens: int, budget: TokenBudget) -> Any:
        return SimpleNamespace(total=1024 * MIB + tokens * MIB * (1 if budget.activation_checkpointing else 10))


def memory_for(tokens: int) -> int:
    """Device memory whose usable part holds the graphs of so many tokens, without ZeRO."""
    return int((1024 + 10 * tokens) * MIB / USABLE) + MIB


@pytest.mark.parametrize(
    ("settings", "forecast", "tokens", "expected"),
    [
        # The largest multiple of 256 that fits, up to what a step can use, and at least 16,384.
        ({}, {"step": 20_000}, 4_100, (4096, 4096)),
        ({}, {"step": 20_000}, 10**6, (16_384, 25_088)),
        ({}, {"step": 500}, 10**6, (16_384, 16_384)),
        ({}, {"zero": 2}, 4_100, (3584, 3584)),
        # A budget that is set is kept.
        ({"micro_batch_tokens": 300}, {}, 2_000, (300, 1792)),
        ({"graph_tokens": 0}, {}, 2_000, (1792, 0)),
        ({"graph_tokens": 10**6}, {}, 7_000, (16_384, 10**6)),
        ({"graph_tokens": 10**6}, {}, 2_000, (16_384, 10**6, True)),
        # A micro-batch that is set need not fit encoded twice: graphs that fit are kept.
        ({"micro_batch_tokens": 16_384}, {"step": 1_500}, 2_000, (16_384, 1792)),
        ({"micro_batch_tokens": 16_384}, {"step": 1_500, "longest": 3_000}, 2_000, (16_384, 16_384, True)),
        # Set budgets that fit with activation checkpointing only.
        ({"micro_batch_tokens": 1_500, "graph_tokens": 1_800}, {"longest": 3_000}, 2_000, (1_500, 1_800, True)),
        ({"micro_batch_tokens": 9_000, "graph_tokens": 9_000}, {}, 2_000, (9_000, 9_000, True)),
        ({"micro_batch_tokens": 9_000}, {}, 2_000, (9_000, 16_384, True)),
        # A CPU has fixed ones, unless they do not fit.
        ({}, {"kind": "cpu", "step": 10**6}, 10**6, (2048, 16_384)),
        ({}, {"kind": "cpu", "step": 10**6}, 9_000, (2048, 8960)),
        # Activation checkpointing for a long text, or for many small micro-batches.
        ({}, {"longest": 3_000}, 2_000, (16_384, 16_384, True)),
        ({"activation_checkpointing": "never"}, {"longest": 3_000}, 2_000, (256, 0)),
        ({}, {"longest": 3_000, "supports": False}, 2_000, (256, 0)),
        ({}, {"step": 5000}, 1_000, (9984, 9984, True)),
        ({}, {"step": 5000, "kind": "cpu"}, 1_000, (768, 768)),
        ({}, {"step": 10**5, "batch": 700}, 1_000, (768, 768)),
        ({}, {"step": 10**5, "batch": 7_000}, 1_000, (9984, 9984, True)),
        ({}, {"step": 10**5}, 300, (2816, 2816, True)),
        ({"activation_checkpointing": "always"}, {}, 2_000, (16_384, 16_384, True)),
        # Nothing fits: the smallest.
        ({}, {}, 0, (256, 0, True)),
    ],
)
def test_the_largest_useful_budgets_that_fit(
    settings: dict[str, Any], forecast: dict[str, Any], tokens: int, expected: tuple[Any, ...]
) -> None:
    found = best_budget(TrainSettings(**settings), LinearForecast(**forecast), memory_for(tokens))
    assert found.budget == TokenBudget(*expected)
    assert found.fits == (expected[:2] != (256, 0))


def counted(encoder: Any, settings: TrainSettings, kind: str = "cpu", zero: int = 0) -> StepForecast:
    data = Mixture.of(load_examples(DataSource(limit=40)).examples)
    lora = settings.lora if settings.lora.rank else None
    config = without_adapter(encoder.model.backbone).config
    backbone = meta_backbone(config, torch.float32, lora)
    return StepForecast.of(settings, encoder, backbone, data, [AngleObjective()], Sharding(1, zero), kind)


def test_trained_dense_modules_are_in_the_forecast() -> None:
    settings = TrainSettings(batch_size=16, lora=LoraSettings(rank=4))
    encoder = tiny_encoder("bert")
    encoder.add_lora(settings.lora)
    linear = nn.Linear(encoder.dimensions, encoder.dimensions)
    encoder.model.dense = nn.Sequential(Dense(linear, "torch.nn.modules.linear.Identity"))
    moments = [
        counted(encoder, replace(settings, optimizer=OptimizerSettings(name=name))).device.moment_bytes
        for name in ("adamw", "adamw_8bit")
    ]
    assert moments[0] / 4 <= moments[1] < 0.26 * moments[0]
    numbers = []
    for trained in (False, True):
        encoder.model.dense.requires_grad_(trained)
        numbers.append(counted(encoder, settings).device.trained_numbers)
    assert numbers[1] - numbers[0] == encoder.dimensions**2 + encoder.dimensions


def test_activation_checkpointing_lowers_the_forecast_as_the_real_memory() -> None:
    settings = TrainSettings(batch_size=16, lora=LoraSettings(rank=4))
    encoder = tiny_encoder("llama", max_length=100)
    encoder.add_lora(settings.lora)
    forecast = counted(encoder, settings)
    assert forecast.longest_text < 80, "of the data, not the maximum length"
    assert forecast.supports_checkpointing()
    batch = TextBatch.from_examples(load_examples(DataSource(limit=40)).examples)
    plan = encoder.plan(batch.texts, 10_000)
    real, planned = {}, {}
    encoder.model.train()
    for enabled in (False, True):
        encoder.model.checkpoint_activations(enabled)
        with MemoryLedger([*encoder.model.parameters(), *encoder.model.buffers()]) as ledger:
            boundary_step(encoder.model, plan, batch, AngleObjective(), graph_tokens=10_000)
        real[enabled] = ledger.peak
        encoder.model.zero_grad()
        planned[enabled] = forecast.memory(plan.computed_tokens, TokenBudget(10_000, 0, enabled)).activations
    assert planned[True] / planned[False] == pytest.approx(real[True] / real[False], rel=0.1)
    # Three layers, of which the last one is not computed again, and computes the last token of each text only.
    assert real[True] < 0.75 * real[False]


@pytest.mark.parametrize("micro_tokens", [150, pytest.param(300, marks=pytest.mark.slow)])
def test_the_padding_of_flex_attention_is_in_the_forecast(micro_tokens: int) -> None:
    """Micro-batches of 150 tokens are sequences of 256; the passes of the real ones are counted on the meta device."""
    settings = TrainSettings(batch_size=16, lora=LoraSettings(rank=4))
    encoder = tiny_encoder("llama", max_length=100)
    encoder.add_lora(settings.lora)
    forecast = counted(encoder, settings, "cuda")
    texts = TextBatch.from_examples(load_examples(DataSource(limit=16)).examples).texts
    plan = encoder.plan(texts, micro_tokens)
    assert len(plan.groups) > 2
    passes = [count_passes(forecast.model, micro_batch, on_gpu=True) for micro_batch in micro_batches_of(plan)]
    kept = sum(memory.kept for memory in passes)
    peak = kept + max(memory.peak - memory.kept for memory in passes)
    planned = forecast.memory(plan.computed_tokens, TokenBudget(micro_tokens, 0)).activations
    assert kept / plan.computed_tokens > 1.2 * forecast.costs(checkpointing=False).kept_per_token
    # The plan has more micro-batches than full ones would be.
    assert 0.8 * peak < planned < 1.05 * peak


@pytest.mark.parametrize(("kind", "expected"), [("cpu", SMALL), ("mps", SMALL), ("cuda", OTHER_BUDGET)])
def test_a_mac_has_the_budgets_of_a_cpu(kind: str, expected: TokenBudget) -> None:
    assert budget_of(kind) == expected


def choose(settings: TrainSettings, encoder: Any, **processes: Any) -> TokenBudget:
    data = Mixture.of(load_examples(DataSource(limit=40)).examples)
    return choose_budget(settings, encoder, data, [AngleObjective()], Processes(**processes))


def test_the_choice_and_its_reason_are_logged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = TrainSettings(batch_size=16, lora=LoraSettings(rank=4))
    encoder = tiny_encoder("llama", max_length=100)
    encoder.add_lora(settings.lora)
    before = torch.get_rng_state()
    monkeypatch.setattr("angle_llm.memory.budget.free_memory", lambda *_: 64 * 2**30)
    assert choose(settings, encoder) == TokenBudget(2048, 16_384)
    assert "at most" not in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr("angle_llm.memory.budget.SMALL_MODEL", 0)
        assert choose(settings, encoder) == TokenBudget(2048, 16_384)
    assert "graph_tokens 16,384 (at most 0." in capsys.readouterr().out
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr("angle_llm.memory.budget.SMALL_MODEL", 0)
    monkeypatch.setattr("angle_llm.memory.budget.free_memory", lambda *_: 8 * 2**30 // 10)
    small = choose(settings, encoder)
    assert small.graph_tokens < 16_384
    assert " of 0.8 GiB" in capsys.readouterr().out
    monkeypatch.setattr("angle_llm.memory.budget.free_memory", lambda *_: 2**20)
    choose(settings, encoder)
    assert "warning: token budget: micro_batch_tokens 256, graph_tokens 0" in capsys.readouterr().out
    monkeypatch.setattr("angle_llm.memory.budget.free_memory", lambda *_: None)
    assert choose(settings, encoder) == TokenBudget(2048, 16_384)
    fixed = replace(settings, micro_batch_tokens=5, graph_tokens=6, activation_checkpointing="always")
    assert choose(fixed, encoder) == TokenBudget(5, 6, True)


HALF = TrainSettings(batch_size=16, lora=LoraSettings(rank=0), model=ModelSettings(dtype="bfloat16"))


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_all_weights_in_bfloat16_are_in_the_forecast(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dtypes of autocast, and a bfloat16 copy of each matrix per kept micro-batch."""
    encoder = tiny_encoder(kind, max_length=100)
    encoder.model = encoder.model.requires_grad_(True).changed(autocasts=True).train()
    forecast = counted(encoder, HALF)
    batch = TextBatch.from_examples(load_examples(DataSource(limit=40)).examples)
    plan = encoder.plan(batch.texts, 10_000)
    for enabled in (False, True):
        encoder.model.checkpoint_activations(enabled)
        weights = list(encoder.model.parameters())
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        with MemoryLedger([*weights, *encoder.model.buffers(), *(weight.grad for weight in weights)]) as ledger:
            boundary_step(encoder.model, plan, batch, AngleObjective(), graph_tokens=10_000)
        planned = forecast.memory(plan.computed_tokens, TokenBudget(10_000, 0, enabled)).activations
        assert ledger.peak < planned < 1.07 * ledger.peak
    largest = max(weight.nbytes for weight in encoder.model.parameters())
    assert forecast.costs(checkpointing=True).activations(1, 1, 1) > largest, "the gradient of the token embeddings"
    layers = LayerStack.of(encoder.model.backbone).layers
    copies = [2 * sum(one.weight.numel() for one in layer.modules() if isinstance(one, nn.Linear)) for layer in layers]
    others = 2 * product_weights(encoder.model.backbone) - sum(copies)  # the pooler of BERT
    assert forecast.costs(checkpointing=False).kept_per_micro_batch == others + sum(copies)
    assert forecast.costs(checkpointing=True).kept_per_micro_batch == others + 2 * copies[0], "last and recomputed"

    monkeypatch.setattr("angle_llm.memory.budget.free_memory", lambda *_: 64 * 2**30)
    monkeypatch.setattr("angle_llm.memory.budget.SMALL_MODEL", 0)
    choose(HALF, encoder)
    assert "graph_tokens 16,384 (at most 0." in capsys.readouterr().out


def test_trained_layers_are_replaced_in_the_forecast_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ZeRO-3, weights are loaded on the CPU, where layers are not replaced."""
    encoder = tiny_encoder("llama", max_length=100)
    replaced, of_zero_3 = counted(encoder, HALF, "cuda"), counted(encoder, HALF, "cuda", zero=3)
    monkeypatch.setenv("ANGLE_LLM_PLAIN", "1")
    plain = counted(encoder, HALF, "cuda").costs(checkpointing=False)
    assert of_zero_3.costs(checkpointing=False) == plain
    assert replaced.costs(checkpointing=False).kept_per_token < plain.kept_per_token
    assert of_zero_3.device.number_bytes == 4


def test_a_model_without_a_forecast_gets_the_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("aten::nonzero on meta")

    monkeypatch.setattr("angle_llm.memory.budget.count_passes", fails)
    monkeypatch.setattr("angle_llm.memory.budget.SMALL_MODEL", 0)
    monkeypatch.setattr("angle_llm.memory.budget.free_memory", lambda *_: 2**29)
    assert choose(TrainSettings(), tiny_encoder("llama")) == SMALL
    assert "aten::nonzero on meta" in capsys.readouterr().out


def test_a_bad_row_is_an_error_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise DataError("pairs.csv:3: text2 is blank")

    monkeypatch.setattr("angle_llm.memory.budget.count_passes", fails)
    monkeypatch.setattr("angle_llm.memory.budget.SMALL_MODEL", 0)
    monkeypatch.setattr("angle_llm.memory.budget.free_memory", lambda *_: 2**29)
    with pytest.raises(DataError, match=r"pairs\.csv:3"):
        choose(TrainSettings(), tiny_encoder("llama"))


def test_activation_checkpointing_is_refused_where_it_is_not_possible() -> None:
    class Plain(nn.Module):
        pass

    encoder = tiny_encoder("llama")
    assert choose(TrainSettings(activation_checkpointing="always"), encoder).activation_checkpointing
    assert "forward" not in vars(encoder.model.backbone.layers[0]), "the trainer switches it on"
    encoder.model.backbone.layers[1] = Plain()
    with pytest.raises(SettingsError, match=r"--activation-checkpointing.*Plain"):
        check_checkpointing(encoder)


def test_free_memory_is_the_least_of_machine_and_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo, limit, stat, status = (tmp_path / name for name in ("meminfo", "max", "stat", "status"))
    status.write_text("VmRSS:  9 kB\nRssAnon:  2 kB\nRssFile:  6 kB\nRssShmem:  1 kB\n")
    own = 3 * 1024
    monkeypatch.setattr(device_memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(device_memory, "_CGROUPS", [(limit, stat, "anon")])
    monkeypatch.setattr(device_memory, "_STATUS", status)
    assert device_memory.free_memory(Processes()) is None
    meminfo.write_text("MemTotal:  9 kB\nMemAvailable:     8 kB\n")
    assert device_memory.free_memory(Processes()) == 8 * 1024 + own
    monkeypatch.setattr(device_memory, "CONTEXT", 1000)
    assert device_memory.free_memory(Processes(), weights=500) == 8 * 1024 + 1500, "without an earlier model"
    limit.write_text("max\n")
    assert device_memory.free_memory(Processes()) == 8 * 1024 + own
    limit.write_text("7000\n")
    stat.write_text("anon 3000\nfile 4000\n")
    assert device_memory.free_memory(Processes()) == 4000 + own
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert device_memory.free_memory(Processes()) == 2000 + own


def test_free_memory_of_a_gpu_includes_what_a_forecast_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 200)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 150)
    monkeypatch.setattr(Processes, "max", lambda _, number: number)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 400)
    assert device_memory.free_memory(Processes(device=torch.device("mps")), weights=100) == 700
    gpu = torch.device("cuda:0")
    assert device_memory.free_memory(Processes(device=gpu)) == 1200 + device_memory.CONTEXT
    found = device_memory.free_memory(Processes(0, 2, gpu))
    assert found == 1200 + device_memory.CONTEXT + device_memory.EXCHANGE_CONTEXT
    assert device_memory.free_memory(Processes(device=gpu), weights=100) == 1150 + device_memory.CONTEXT
    forecast = device_memory.Device("cuda", Sharding(2), 0, 0, 0, 0, 0, 0).memory(0)
    assert forecast.total - forecast.embeddings == found - 1200, "a step without tensors fits an idle GPU"


def test_the_processes_of_a_launch_have_the_sharding_of_deepspeed() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}
    plugin = SimpleNamespace(zero_stage=3, deepspeed_config={"zero_optimization": zero})
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    processes = Processes(0, 4, accelerator=accelerator)
    assert (processes.zero_stage, processes.offload) == (3, "optimizer")
    zero["offload_param"] = {"device": "cpu"}
    assert Processes(0, 4, accelerator=accelerator).offload == "parameters"
    assert (Processes().zero_stage, Processes().uses_fsdp) == (0, False)


def test_settings_keep_the_other_values_of_a_stored_budget() -> None:
    stored = TokenBudget(100, 200, True)
    assert default_budget(TrainSettings(), stored) == stored
    assert default_budget(TrainSettings(graph_tokens=5), stored) == replace(stored, graph_tokens=5)

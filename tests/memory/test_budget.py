"""The budgets of a run: the largest useful ones that fit, as set where they are set, and kept by a resumed run."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_encoder
from torch import nn

from angle_llm.data.batch import TextBatch
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import DataError
from angle_llm.data.mixture import Mixture
from angle_llm.losses import AngleObjective
from angle_llm.memory import device_memory, step_forecast
from angle_llm.memory.budget import USABLE, best_budget, choose_budget
from angle_llm.memory.device_memory import Sharding
from angle_llm.memory.step_forecast import StepForecast
from angle_llm.memory.step_memory import MemoryLedger, PassCosts, StepMemory
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import DataSource, LoraSettings, ModelSettings, TrainSettings
from angle_llm.train.distributed import Processes
from angle_llm.train.step import boundary_step
from angle_llm.train.token_budget import CPU_BUDGET, TokenBudget, default_budget

MIB = 2**20


class LinearForecast:
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
        self.device = SimpleNamespace(kind=kind, sharding=Sharding(1, zero))
        self.sample = SimpleNamespace(step_tokens=step, batch_tokens=batch or step, longest_text=longest)
        self.supports_checkpointing = lambda: supports
        self.costs = lambda **_: SimpleNamespace(overhead_tokens=300.0 if kind == "cuda" else 0.0)

    def cached(self, budget: TokenBudget) -> Any:
        return self._memory(max(budget.micro_batch_tokens, self.sample.longest_text), budget)

    def kept(self, budget: TokenBudget) -> Any:
        return self._memory(budget.graph_tokens, budget)

    def _memory(self, tokens: int, budget: TokenBudget) -> Any:
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
    stub: Any = LinearForecast(**forecast)
    found = best_budget(TrainSettings(**settings), stub, memory_for(tokens))
    assert found.budget == TokenBudget(*expected)
    assert found.fits == (expected[:2] != (256, 0))


def counted(encoder: Any, settings: TrainSettings) -> StepForecast:
    data = Mixture.of(load_examples(DataSource(limit=40)).examples)
    return StepForecast.of(settings, encoder, encoder.model.backbone, data, [AngleObjective()], Sharding(), "cpu")


def test_the_longest_text_of_the_data_is_found() -> None:
    encoder = tiny_encoder("llama", max_length=100)
    examples = load_examples(DataSource(limit=40)).examples
    longest = max(map(len, encoder.tokenize(TextBatch.from_examples(examples).texts)))
    assert counted(encoder, TrainSettings(batch_size=16, lora=LoraSettings(rank=0))).sample.longest_text == longest


def test_activation_checkpointing_lowers_the_forecast_as_the_real_memory() -> None:
    settings = TrainSettings(batch_size=16, lora=LoraSettings(rank=4))
    encoder = tiny_encoder("llama", max_length=100)
    encoder.add_lora(settings.lora)
    forecast = counted(encoder, settings)
    assert forecast.supports_checkpointing()
    data = load_examples(DataSource(limit=16)).examples
    batch = TextBatch.from_examples(data)
    plan = encoder.plan(batch.texts, 10_000)
    real, planned = {}, {}
    encoder.model.train()
    for enabled in (False, True):
        encoder.model.checkpoint_activations(enabled)
        with MemoryLedger([*encoder.model.parameters(), *encoder.model.buffers()]) as ledger:
            boundary_step(encoder.model, plan, batch, AngleObjective(), graph_tokens=10_000)
        encoder.model.zero_grad()
        real[enabled] = ledger.peak
        planned[enabled] = forecast.count(list(plan.micro_batches), checkpointing=enabled, gradients_before=False).peak
    assert planned == pytest.approx(real, rel=0.05)
    assert real[True] < 0.6 * real[False]  # three layers, of which the last one is not computed again


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
    monkeypatch.setattr("angle_llm.memory.budget.free_memory", lambda _: 64 * 2**30)
    assert choose(settings, encoder) == TokenBudget(2048, 16_384)
    assert "forecast" not in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr("angle_llm.memory.budget.SMALL_MODEL", 0)
        assert choose(settings, encoder) == TokenBudget(2048, 16_384)
    assert "graph_tokens 16,384 (forecast 0." in capsys.readouterr().out
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr("angle_llm.memory.budget.SMALL_MODEL", 0)
    monkeypatch.setattr("angle_llm.memory.budget.free_memory", lambda _: 8 * 2**30 // 10)
    small = choose(settings, encoder)
    assert small.graph_tokens < 16_384
    assert " of 0.8 GiB" in capsys.readouterr().out
    monkeypatch.setattr("angle_llm.memory.budget.free_memory", lambda _: 2**20)
    choose(settings, encoder)
    assert "warning: token budget: micro_batch_tokens 256, graph_tokens 0" in capsys.readouterr().out
    monkeypatch.setattr("angle_llm.memory.budget.free_memory", lambda _: None)
    assert choose(settings, encoder) == TokenBudget(2048, 16_384)
    fixed = replace(settings, micro_batch_tokens=5, graph_tokens=6, activation_checkpointing="always")
    assert choose(fixed, encoder) == TokenBudget(5, 6, True)


def test_all_weights_in_bfloat16_are_in_the_forecast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bfloat16 copy of each matrix per kept micro-batch."""
    exact = TrainSettings(batch_size=16, lora=LoraSettings(rank=0), model=ModelSettings(dtype="float32"))
    half = replace(exact, model=ModelSettings(dtype="bfloat16"))
    encoder = tiny_encoder("llama", max_length=100)
    before = counted(encoder, exact).kept(CPU_BUDGET)
    encoder.model = encoder.model.changed(autocasts=True)
    matrices = sum(one.weight.numel() for one in encoder.model.modules() if isinstance(one, torch.nn.Linear))
    copies = 2 * matrices * 8  # 8 micro-batches of 2,048 tokens
    assert counted(encoder, half).kept(CPU_BUDGET).activations == before.activations + copies

    monkeypatch.setattr("angle_llm.memory.budget.free_memory", lambda _: 64 * 2**30)
    monkeypatch.setattr("angle_llm.memory.budget.SMALL_MODEL", 0)
    choose(half, encoder)
    assert "graph_tokens 16,384 (forecast 0." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "budget"),
    [
        (NotImplementedError("aten::nonzero on meta"), CPU_BUDGET),
        (torch.OutOfMemoryError("CUDA out of memory"), TokenBudget(256, 0)),
    ],
)
def test_a_model_without_a_forecast_gets_the_defaults_or_the_smallest_budget(
    error: Exception, budget: TokenBudget, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr("angle_llm.memory.step_forecast.model_step", fails)
    monkeypatch.setattr("angle_llm.memory.budget.SMALL_MODEL", 0)
    monkeypatch.setattr("angle_llm.memory.budget.free_memory", lambda _: 2**29)
    assert choose(TrainSettings(), tiny_encoder("llama")) == budget
    assert str(error) in capsys.readouterr().out


def test_a_bad_row_is_an_error_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise DataError("pairs.csv:3: text2 is blank")

    monkeypatch.setattr("angle_llm.memory.step_forecast.model_step", fails)
    monkeypatch.setattr("angle_llm.memory.budget.SMALL_MODEL", 0)
    monkeypatch.setattr("angle_llm.memory.budget.free_memory", lambda _: 2**29)
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
        choose(TrainSettings(activation_checkpointing="always"), encoder)


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
    monkeypatch.setattr(Processes, "max", lambda _, number: number)
    gpu = torch.device("cuda:0")
    assert device_memory.free_memory(Processes(device=gpu)) == 1200 + device_memory.CONTEXT
    found = device_memory.free_memory(Processes(0, 2, gpu))
    assert found == 1200 + device_memory.CONTEXT + device_memory.EXCHANGE_CONTEXT
    device = device_memory.Device("cuda", Sharding(2), 0, 0, 0, 0, 0, 0)
    forecast = device.memory(StepMemory(0, 0, 0, 0), cached=False)
    assert forecast.total == found - 1200, "a step without tensors fits an idle GPU"


def test_the_processes_of_a_launch_are_those_of_the_forecast() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}
    plugin = SimpleNamespace(zero_stage=3, deepspeed_config={"zero_optimization": zero})
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    assert Sharding.of(Processes(0, 4, accelerator=accelerator)) == Sharding(4, 3, "optimizer")
    zero["offload_param"] = {"device": "cpu"}
    assert Sharding.of(Processes(0, 4, accelerator=accelerator)) == Sharding(4, 3, "parameters")
    assert Sharding.of(Processes()) == Sharding()


def test_costs_between_two_measured_micro_batches_predict_other_sizes() -> None:
    """A micro-batch of n tokens: 1000 + 10 n bytes saved, 4 n temporary bytes, 300 + n seconds; gradients of 64 bytes."""
    small, large = (
        (StepMemory(tokens, 1000 + 10 * tokens, 1000 + 14 * tokens + 64, 64), 300.0 + tokens) for tokens in (512, 2048)
    )
    costs = PassCosts.between(small, large)
    assert costs == PassCosts(10.0, 1000.0, 4.0, 64, 300.0)
    assert costs.step(2048, 2048) == large[0]
    assert costs.step(4096, 1024) == StepMemory(4096, 44_960, 44_960 + 4096 + 64, 64)
    assert all(value >= 0 for value in vars(PassCosts.between(large, (replace(small[0], tokens=2100), 900.0))).values())
    same_time = PassCosts.between((small[0], 1.0), (large[0], 1.0))
    assert same_time.overhead_tokens == 2048, "noise in the times has a bounded effect"


class _Allocator:
    """The functions of `torch.cuda` that a measurement calls, for a model on the CPU whose tensors a ledger counts."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self.memory_allocated = lambda _: ledger.live
        self.max_memory_allocated = lambda _: ledger.peak
        self.synchronize = lambda _: None

    def reset_peak_memory_stats(self, _: Any) -> None:
        self._ledger.peak = self._ledger.live


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A forecast that measures the passes of a real model on the CPU."""
    settings = TrainSettings(batch_size=16, lora=LoraSettings(rank=4))
    encoder = tiny_encoder("llama", max_length=100)
    encoder.add_lora(settings.lora)
    data = Mixture.of(load_examples(DataSource(limit=120)).examples)
    ledger = MemoryLedger([*encoder.model.parameters(), *encoder.model.buffers()])
    allocator = _Allocator(ledger)
    for name in ("memory_allocated", "max_memory_allocated", "synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, getattr(allocator, name))
    backbone, losses = encoder.model.backbone, [AngleObjective()]
    forecasts = [
        StepForecast.of(settings, encoder, backbone, data, losses, Sharding(), "cpu", measure=measure)
        for measure in (True, False)
    ]
    with ledger:
        yield SimpleNamespace(encoder=encoder, real=forecasts[0], meta=forecasts[1])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_measured_costs_equal_the_forecast(measured: Any, checkpointing: bool) -> None:
    costs = measured.real.costs(checkpointing=checkpointing)
    micro = measured.real.sampled(step_forecast.MEASURED_TOKENS[1]).make()
    found = costs.step(micro.computed_tokens, micro.computed_tokens)
    counted = measured.meta.count([micro], checkpointing=checkpointing)
    # The tolerances of the forecast of a real step, in test_forecast.py.
    assert found.kept == pytest.approx(counted.kept, rel=0.1)
    assert found.peak == pytest.approx(counted.peak, rel=0.05)
    trained = [parameter for parameter in measured.encoder.model.parameters() if parameter.requires_grad]
    assert costs.gradients == sum(parameter.nbytes for parameter in trained)
    assert costs.overhead_tokens >= 0
    assert all(parameter.grad is None for parameter in measured.encoder.model.parameters())
    assert not measured.encoder.model.training


def test_a_measurement_out_of_memory_is_repeated_with_fewer_tokens(
    monkeypatch: pytest.MonkeyPatch, measured: Any
) -> None:
    real, tokens = step_forecast.measured_step, []

    def limited(model: Any, texts: Any) -> Any:
        tokens.append(texts.computed_tokens)
        if texts.computed_tokens > 600:
            raise torch.OutOfMemoryError("out of memory")
        return real(model, texts)

    monkeypatch.setattr(step_forecast, "measured_step", limited)
    assert measured.real.costs(checkpointing=False).kept_per_token > 0
    assert tokens[1] > 1000 > 600 > tokens[-1] > tokens[-2]


def test_texts_longer_than_the_measured_sizes_are_measured_once(monkeypatch: pytest.MonkeyPatch, measured: Any) -> None:
    """Both micro-batches are then the same text."""
    long = [[1, *range(2, 90)] for _ in range(1)]
    monkeypatch.setattr(step_forecast, "MEASURED_TOKENS", (10, 20))
    real = replace(measured.real, sample=replace(measured.real.sample, ids=long))
    costs = real.costs(checkpointing=False)
    assert costs.kept_per_token > 0
    assert costs.overhead_tokens == step_forecast.GPU_OVERHEAD_TOKENS


def test_the_cost_of_a_token_in_a_sequence_is_measured(monkeypatch: pytest.MonkeyPatch, measured: Any) -> None:
    layouts = measured.encoder.layouts
    kinds = []

    def timed(model: Any, texts: Any) -> Any:
        kinds.append(texts.make().sequence is not None)
        return None, texts.computed_tokens * (1.234 if kinds[-1] else 1.0)

    monkeypatch.setattr(step_forecast, "measured_step", timed)
    assert measured.real.token_cost() == 1.2
    assert set(kinds) == {True, False}
    assert measured.encoder.layouts is layouts

    monkeypatch.setattr(measured.encoder, "layouts", replace(layouts, max_tokens=1))
    assert measured.real.token_cost() is None, "every text is too long for a sequence"
    monkeypatch.setattr(measured.encoder, "layouts", layouts)

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(step_forecast, "measured_step", full)
    assert measured.real.token_cost() is None


def test_a_failed_measurement_leaves_no_gradients(monkeypatch: pytest.MonkeyPatch, measured: Any) -> None:
    calls = []

    def fails_later(model: Any, *_: Any, **__: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")

    handle = measured.encoder.model.register_forward_pre_hook(fails_later, with_kwargs=True)
    with pytest.raises(torch.OutOfMemoryError):
        step_forecast.measured_step(measured.encoder.model, measured.real.sampled(100))
    handle.remove()
    assert all(parameter.grad is None for parameter in measured.encoder.model.parameters())
    assert not measured.encoder.model.training


def test_settings_keep_the_other_values_of_a_stored_budget() -> None:
    stored = TokenBudget(100, 200, padded=True, token_cost=1.3)
    assert default_budget(TrainSettings(), stored) == stored
    assert default_budget(TrainSettings(graph_tokens=5), stored) == replace(stored, graph_tokens=5)

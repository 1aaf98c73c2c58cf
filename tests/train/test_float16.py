"""Training in float16: gradients are scaled, and a step in which they overflow changes no weight."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import fit, outcome, read_metrics, run_settings
from test_distributed import program
from tiny import save_tiny_base

from angle_llm import AngleObjective, TextBatch, fine_tune
from angle_llm.data.formats import Triple
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.settings.train import LoraSettings, ModelSettings, OptimizerSettings, TrainSettings
from angle_llm.train.distributed import Processes
from angle_llm.train.loading import with_supported_dtype
from angle_llm.train.step import boundary_step
from angle_llm.train.strategies import GROWTH_UPDATES, DataParallelStrategy, GradientScale
from angle_llm.train.trainer import TrainingError

TRIPLES = [Triple(f"Dog {n} runs.", f"Animal {n} moves.", f"Dog {n} sleeps.") for n in range(24)]


@pytest.fixture
def settings(tmp_path: Path) -> TrainSettings:
    base = save_tiny_base("llama", tmp_path / "base")
    return TrainSettings(
        run_dir=str(tmp_path / "run"),
        model=ModelSettings(path=str(base), dtype="float16", max_length=40),
        lora=LoraSettings(rank=4, alpha=8),
        optimizer=OptimizerSettings(learning_rate=1e-2),
        batch_size=4,
        epochs=1,
    )


def encoder_of(settings: TrainSettings) -> SentenceEncoder:
    torch.manual_seed(0)
    encoder = SentenceEncoder.from_pretrained(
        settings.model.path, max_length=40, dtype=settings.model.dtype, device="cpu"
    )
    encoder.add_lora(settings.lora)
    return encoder


def start_at(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all runs start with a factor."""
    prepare = DataParallelStrategy.__init__

    def prepared(self: DataParallelStrategy, *arguments: object) -> None:
        prepare(self, *arguments)
        self.scale = self.scale and GradientScale(factor)

    monkeypatch.setattr(DataParallelStrategy, "__init__", prepared)


def stepped(settings: TrainSettings, dtype: str, weight: float, factor: float) -> DataParallelStrategy:
    """Strategy with the gradients of `weight` times a loss."""
    encoder = encoder_of(replace(settings, model=replace(settings.model, dtype=dtype)))
    strategy = DataParallelStrategy(encoder.model, settings.optimizer, Processes())
    assert (strategy.scale is None) == (dtype == "float32")
    if strategy.scale is not None:
        strategy.scale = GradientScale(factor)
    batch = TextBatch.from_examples(TRIPLES)
    plan = encoder.plan(batch.texts, 1000)
    boundary_step(encoder.model, plan, batch, AngleObjective(), graph_tokens=10**6, weight=weight, strategy=strategy)
    return strategy


def gradient(settings: TrainSettings, dtype: str, weight: float, factor: float) -> torch.Tensor:
    """Gradient of `weight` times a loss, divided by `weight`."""
    strategy = stepped(settings, dtype, weight, factor)
    gradients = [weight.grad.flatten() for weight in strategy.weights.values() if weight.grad is not None]
    return torch.cat(gradients).double() / weight / (1 if strategy.scale is None else factor)


def test_small_gradients_are_not_rounded_to_zero(settings: TrainSettings) -> None:
    """A gradient a million times smaller, as of a loss near 0; float16 rounds numbers below 3e-8 to 0."""
    exact = gradient(settings, "float32", 1e-6, 1.0)
    scaled, plain = (gradient(settings, "float16", 1e-6, factor) for factor in (2.0**16, 1.0))
    lost = [float((one - exact).norm() / exact.norm()) for one in (scaled, plain)]
    assert lost[0] < 0.02  # 11 bits of float16, in all layers
    assert lost[1] > 0.5


def test_norm_and_clipping_are_of_the_gradient_without_the_factor(settings: TrainSettings) -> None:
    settings = replace(settings, optimizer=replace(settings.optimizer, max_gradient_norm=0.1))
    norms, moments = [], []
    for dtype in ("float32", "float16"):
        strategy = stepped(settings, dtype, 1.0, 2.0**10)
        norms.append(strategy.update(1e-3))
        state = strategy.optimizer_state()
        moments.append(torch.cat([state[name].flatten() for name in sorted(state) if name.endswith("/exp_avg")]))
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    assert moments[0].norm().item() == pytest.approx(0.1 * 0.1, rel=1e-3)  # 1 - beta, times the clipped norm
    assert float((moments[1] - moments[0]).norm() / moments[0].norm()) < 0.02


def test_the_factor_halves_after_an_overflow_and_doubles_after_many_updates() -> None:
    scale = GradientScale(4.0)
    for _ in range(GROWTH_UPDATES - 1):
        scale = scale.after(overflow=False)
    assert scale == GradientScale(4.0, GROWTH_UPDATES - 1)
    assert scale.after(overflow=False) == GradientScale(8.0)
    assert scale.after(overflow=True) == GradientScale(2.0)


def test_an_overflow_changes_no_weight_and_is_counted(
    settings: TrainSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start_at(2.0**18, monkeypatch)
    encoder = encoder_of(settings)
    weights = [weight.detach().clone() for weight in encoder.model.parameters() if weight.requires_grad]
    unchanged = []
    update = DataParallelStrategy.update

    def watched(self: DataParallelStrategy, rate: float) -> float | None:
        norm = update(self, rate)
        now = [weight.detach().clone() for weight in self.weights.values()]
        unchanged.append(all(torch.equal(*pair) for pair in zip(weights, now, strict=True)))
        assert (norm is None) == unchanged[-1]
        weights[:] = now
        return norm

    monkeypatch.setattr(DataParallelStrategy, "update", watched)
    fit(encoder, TRIPLES * 3, AngleObjective(), settings)
    metrics = read_metrics(settings.run_path)
    overflows = [bool(line.get("overflow")) for line in metrics]
    assert overflows == unchanged
    assert 3 <= sum(overflows) < len(metrics)
    assert all(("gradient_norm" in line) != overflow for line, overflow in zip(metrics, overflows, strict=True))
    assert capsys.readouterr().out.count("float16 overflow, no weight changes") == sum(overflows)


def test_a_gradient_that_no_factor_keeps_finite_ends_the_run(
    settings: TrainSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_at(4.0, monkeypatch)
    encoder = encoder_of(settings)
    first = next(weight for weight in encoder.model.parameters() if weight.requires_grad)
    first.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(TrainingError, match=r"step 3: .* gradient norm is (inf|nan)"):
        fit(encoder, TRIPLES, AngleObjective(), settings)


def test_a_run_in_float16_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted among the steps that overflow, before the steps that change weights."""
    start_at(2.0**16, monkeypatch)
    settings = run_settings(tmp_path)
    settings = replace(settings, model=replace(settings.model, dtype="float16"), epochs=2, max_steps=6)
    fine_tune(settings)
    mine = replace(settings, run_dir=str(tmp_path / "mine"))
    update = DataParallelStrategy.update
    updates = []

    def interrupted(self: DataParallelStrategy, rate: float) -> float | None:
        updates.append(rate)
        if len(updates) == 3:
            raise KeyboardInterrupt
        return update(self, rate)

    with monkeypatch.context() as patch:
        patch.setattr(DataParallelStrategy, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fine_tune(mine)
    fine_tune(mine)
    overflows = ["overflow" in line for line in read_metrics(settings.run_path) if "loss" in line]
    assert overflows[:3] == [True] * 3
    assert not overflows[-1]
    assert outcome(mine.run_path) == outcome(settings.run_path)


def test_an_overflow_on_one_process_skips_the_step_on_all(tmp_path: Path) -> None:
    printed = program("distributed_runs.py", str(tmp_path), "float16")
    assert "equal steps without an update" in printed


@pytest.mark.parametrize(("rank", "stage", "expected"), [(4, 0, "float16"), (0, 0, "float32"), (4, 2, "float32")])
@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_a_gpu_that_emulates_bfloat16_trains_in_another_dtype(
    rank: int,
    stage: int,
    expected: str,
    capability: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A Tesla T4 has compute capability 7.5."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(Processes, "zero_stage", stage)
    settings = TrainSettings(model=ModelSettings("org/model"), lora=LoraSettings(rank=rank))
    changed = with_supported_dtype(settings, Processes(device=torch.device("cuda", 0)))
    if capability >= (8, 0):
        assert changed is settings
    else:
        assert changed.model.dtype == expected
        assert not changed.autocasts
        assert f"Tesla T4 only emulates bfloat16: training in {expected}" in capsys.readouterr().out
    float32 = replace(settings, model=ModelSettings("org/model", dtype="float32"))
    assert with_supported_dtype(float32, Processes(device=torch.device("cuda", 0))) is float32

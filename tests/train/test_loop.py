"""A run on a tiny LLaMA from its folder: it learns, writes what it promises, repeats bit for bit, stops when it must."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import save_tiny_base

from angle_llm.config import (
    DataSettings,
    EvaluationSettings,
    LoraSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    SettingsError,
    TrainSettings,
    load_settings,
)
from angle_llm.data.formats import Triple
from angle_llm.losses import AngleObjective
from angle_llm.model.checks import ArtifactError
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.run import fine_tune
from angle_llm.train.trainer import TrainingError, train

SENTENCES = ["A dog runs.", "Somebody reads."]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture
def settings(base: Path, tmp_path: Path) -> TrainSettings:
    return TrainSettings(
        run_dir=str(tmp_path / "run"),
        model=ModelSettings(path=str(base), dtype="float32", max_length=100),
        lora=LoraSettings(rank=4, alpha=8, dropout=0.1),
        data=DataSettings(path="starter:nli_triples.jsonl.gz", limit=20),
        objective=ObjectiveSettings(cosine_weight=0.5, in_batch_weight=1, angle_weight=0.5),
        optimizer=OptimizerSettings(learning_rate=1e-2),
        batch_size=8,
        epochs=2,
        graph_tokens=500,
        micro_batch_tokens=300,
    )


def read_metrics(settings: TrainSettings) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(settings.run_dir) / "metrics.jsonl").read_text().splitlines()]


def weights(model_dir: Path) -> bytes:
    return (model_dir / "adapter_model.safetensors").read_bytes()


def test_a_run_learns_and_writes_what_it_promises(settings: TrainSettings) -> None:
    model_dir = fine_tune(replace(settings, epochs=8))
    steps = read_metrics(settings)
    assert [row["step"] for row in steps] == list(range(1, 25)), "three batches an epoch, the last one short"
    assert [row["epoch"] for row in steps[::3]] == list(range(8))
    assert {"loss", "loss/cosine", "loss/in_batch", "loss/angle", "learning_rate", "gradient_norm"} <= set(steps[0])
    for row in steps:
        assert 0 < row["computed_tokens"] < 2 * row["logical_tokens"]
        assert row["pairs"] == 2 * len(range(20)[(row["step"] - 1) % 3 * 8 :][:8]), "two for each triple of the batch"
        assert row["pairs_per_second"] * row["seconds"] == pytest.approx(row["pairs"])
        assert 0 < row["utilisation"] < 1
        assert row["layout"] in ("trie", "padded")
        assert "as a trie" in row["reason"], "both counts are told"
    assert not (settings.run_path / "tokens.int32").exists()
    first, last = steps[:3], steps[-3:]
    assert sum(row["loss"] for row in last) < 0.7 * sum(row["loss"] for row in first)
    run_dir = Path(settings.run_dir)
    assert {path.name for path in run_dir.iterdir()} == {"settings.yaml", "metrics.jsonl", "tensorboard", "model"}
    assert list((run_dir / "tensorboard").rglob("events*"))
    encoder = SentenceEncoder.from_pretrained(model_dir)
    untrained = SentenceEncoder.from_pretrained(settings.model.path, max_length=100, prompt=settings.model.prompt)
    assert np.abs(encoder.encode(SENTENCES) - untrained.encode(SENTENCES)).max() > 1e-2


def test_the_saved_settings_give_the_same_weights_bit_for_bit(settings: TrainSettings, tmp_path: Path) -> None:
    first = fine_tune(settings)
    saved = load_settings(TrainSettings, Path(settings.run_dir) / "settings.yaml")
    assert saved == settings
    torch.manual_seed(999)  # a run does not depend on what went before it
    second = fine_tune(replace(saved, run_dir=str(tmp_path / "again")))
    assert weights(first) == weights(second)
    other = fine_tune(replace(saved, run_dir=str(tmp_path / "other"), seed=43))
    assert weights(first) != weights(other)


def test_kept_and_cached_graphs_end_alike(settings: TrainSettings, tmp_path: Path) -> None:
    settings = replace(settings, epochs=1)
    kept = fine_tune(replace(settings, graph_tokens=10**6))
    cached = fine_tune(replace(settings, graph_tokens=0, run_dir=str(tmp_path / "cached")))
    one, other = (SentenceEncoder.from_pretrained(folder).encode(SENTENCES) for folder in (kept, cached))
    # Three AdamW steps from gradients that differ by float32 rounding; an adapter moves by 1e-2 a step.
    np.testing.assert_allclose(one, other, atol=5e-3 * np.abs(one).max())


def test_the_best_model_is_kept_not_the_last(settings: TrainSettings) -> None:
    """A scripted judge likes the second evaluation best."""
    examples = [Triple(f"Dog {n} runs.", f"Animal {n} moves.", f"Dog {n} sleeps.") for n in range(12)]
    encoder = _encoder(settings)
    verdicts = iter([1.0, 2.0, 9.0, 3.0])
    seen = []

    def judge(encoder: SentenceEncoder) -> float:
        seen.append(encoder.encode(SENTENCES))
        return next(verdicts)

    every_step = replace(
        settings, batch_size=4, epochs=1, evaluation=EvaluationSettings(pairs="judged below", every_steps=1)
    )
    result = train(encoder, examples, AngleObjective(), every_step, judge)
    assert (result.steps, result.start_score, result.best_score) == (3, 1.0, 9.0)
    np.testing.assert_array_equal(SentenceEncoder.from_pretrained(result.model_dir).encode(SENTENCES), seen[2])
    assert [row["evaluation"] for row in read_metrics(settings) if "evaluation" in row] == [1.0, 2.0, 9.0, 3.0]


def test_accumulated_batches_are_averaged_and_max_steps_holds(settings: TrainSettings) -> None:
    settings = replace(settings, batch_size=4, accumulation=2, epochs=3, max_steps=5)
    fine_tune(settings)
    rows = read_metrics(settings)
    assert [(row["step"], row["epoch"]) for row in rows] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1)]
    assert rows[0]["texts"] > rows[2]["texts"], "twenty examples are five batches: two, two and one"


def test_all_weights_train_without_an_adapter(settings: TrainSettings) -> None:
    model_dir = fine_tune(replace(settings, lora=LoraSettings(rank=0), max_steps=2))
    assert (model_dir / "model.safetensors").is_file()
    assert SentenceEncoder.from_pretrained(model_dir).encode(SENTENCES).shape == (2, 32)


def _encoder(settings: TrainSettings) -> SentenceEncoder:
    encoder = SentenceEncoder.from_pretrained(settings.model.path, prompt=settings.model.prompt, max_length=100)
    encoder.add_lora(settings.lora)
    return encoder


def _poison_weights(encoder: SentenceEncoder) -> None:
    next(p for p in encoder.model.parameters() if p.requires_grad).data.fill_(math.nan)


def _poison_gradients(encoder: SentenceEncoder) -> None:
    next(p for p in encoder.model.parameters() if p.requires_grad).register_hook(lambda g: g * math.inf)


@pytest.mark.parametrize("poison", [_poison_weights, _poison_gradients])
def test_a_run_stops_before_the_optimizer_takes_a_bad_step(
    settings: TrainSettings, poison: Callable[[SentenceEncoder], None]
) -> None:
    encoder = _encoder(settings)
    poison(encoder)
    before = {name: tensor.clone() for name, tensor in encoder.model.state_dict().items()}
    examples = [Triple("A dog runs.", "An animal moves.", "A dog sleeps."), Triple("One.", "Single.", "Two.")]
    with pytest.raises(TrainingError, match=r"step 1: .*No model was kept yet"):
        train(encoder, examples, AngleObjective(), settings)
    after = encoder.model.state_dict()
    assert all(torch.equal(tensor, after[name]) or tensor.isnan().any() for name, tensor in before.items())
    assert not (Path(settings.run_dir) / "model").exists()


def test_what_would_fail_late_fails_before_the_first_step(settings: TrainSettings, tmp_path: Path) -> None:
    occupied = Path(settings.run_dir) / "model"
    occupied.mkdir(parents=True)
    (occupied / "thesis.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="left alone"):
        fine_tune(settings)
    assert (occupied / "thesis.txt").read_text() == "mine"
    assert not (Path(settings.run_dir) / "metrics.jsonl").exists()
    settings = replace(settings, run_dir=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="lone surrogate"):
        train(_encoder(settings), [Triple("A dog.", "An animal.", "Broken \udc80.")], AngleObjective(), settings)
    assert not (Path(settings.run_dir) / "metrics.jsonl").exists()


def test_a_directory_is_one_runs(settings: TrainSettings) -> None:
    settings = replace(settings, max_steps=1)
    first = weights(fine_tune(settings))
    assert weights(fine_tune(settings)) == first, "the same run may run again"
    with pytest.raises(SettingsError, match="other settings"):
        fine_tune(replace(settings, seed=1))
    assert load_settings(TrainSettings, Path(settings.run_dir) / "settings.yaml") == settings


def test_a_run_that_breaks_leaves_its_weights(settings: TrainSettings) -> None:
    def judge(encoder: SentenceEncoder) -> float:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("the judge fell ill")
        return 1.0

    calls: list[int] = []
    encoder = _encoder(settings)
    examples = [Triple(f"Dog {n} runs.", f"Animal {n} moves.", f"Dog {n} sleeps.") for n in range(12)]
    with pytest.raises(ValueError, match="fell ill"):
        train(encoder, examples, AngleObjective(), settings, judge)
    rescued = SentenceEncoder.from_pretrained(Path(settings.run_dir) / "interrupted")
    np.testing.assert_array_equal(rescued.encode(SENTENCES), encoder.encode(SENTENCES))


def test_bad_rows_left_out_are_listed(settings: TrainSettings, tmp_path: Path) -> None:
    row = json.dumps({"anchor": "A dog runs.", "positive": "It moves.", "negative": "It sleeps."})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n{{broken\n{row}\n")
    data = DataSettings(path=str(tmp_path / "rows.jsonl"), on_bad_row="skip", max_bad_ratio=0.5)
    fine_tune(replace(settings, data=data, max_steps=1))
    (rejected,) = (Path(settings.run_dir) / "rejected.jsonl").read_text().splitlines()
    assert json.loads(rejected)["line"] == 2


def test_a_home_directory_is_meant(settings: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    fine_tune(replace(settings, run_dir="~/mine", max_steps=1))
    assert {path.name for path in (tmp_path / "mine").iterdir()} >= {"settings.yaml", "metrics.jsonl", "model"}


def test_no_example_is_an_error(settings: TrainSettings) -> None:
    with pytest.raises(TrainingError, match="no example"):
        train(_encoder(settings), [], AngleObjective(), settings)

"""Training a tiny LLaMA: loss, documented files, reproducible bits, and errors."""

import json
import math
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from accelerate.utils import set_seed
from runs import fit, read_metrics
from test_distributed import program
from tiny import save_tiny_base

from angle_llm import fine_tune
from angle_llm.data.formats import ScoredPair, Triple
from angle_llm.evaluate.bootstrap import PairScores, compare, mean_difference
from angle_llm.evaluate.held_out import held_out_evaluation
from angle_llm.losses import AngleObjective
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.layers.depth import LayerStack
from angle_llm.model.source.checks import ArtifactError
from angle_llm.model.source.resolve import resolve_model
from angle_llm.model.source.weights import FlopsPerToken
from angle_llm.settings.parsing import SettingsError, load_settings, settings_from_dict
from angle_llm.settings.train import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    LoraSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    TrainSettings,
)
from angle_llm.train.distributed import Processes
from angle_llm.train.loading import load_encoder, long_texts
from angle_llm.train.metrics import StepMeter, peak_flops
from angle_llm.train.step import StepResult
from angle_llm.train.trainer import TrainingError

SENTENCES = ["A dog runs.", "Somebody reads."]
TRIPLES = [Triple(f"Dog {n} runs.", f"Animal {n} moves.", f"Dog {n} sleeps.") for n in range(12)]


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


@pytest.fixture
def encoder(settings: TrainSettings) -> SentenceEncoder:
    encoder = SentenceEncoder.from_pretrained(settings.model.path, max_length=100)
    encoder.add_lora(settings.lora)
    return encoder


def weights(model_dir: Path) -> bytes:
    return (model_dir / "adapter_model.safetensors").read_bytes()


def test_a_run_learns_and_writes_the_documented_files(settings: TrainSettings) -> None:
    model_dir = fine_tune(replace(settings, epochs=5)).folder
    steps = read_metrics(settings.run_path)
    assert [row["epoch"] for row in steps[::3]] == list(range(5)), "three batches an epoch, the last one short"
    for row in steps:
        assert 0 < row["computed_tokens"] < 2 * row["logical_tokens"]
        assert row["pairs"] == 2 * len(range(20)[(row["step"] - 1) % 3 * 8 :][:8]), "two for each triple of the batch"
        assert row["pairs_per_second"] * row["seconds"] == pytest.approx(row["pairs"])
        assert "utilisation" not in row, "the peak of a CPU is unknown"
        assert row["layout"] in ("trie", "padded")
        assert "as a trie" in row["reason"], "both counts are logged"
    first, last = steps[:3], steps[-3:]
    assert sum(row["loss"] for row in last) < 0.7 * sum(row["loss"] for row in first)
    files = {"settings.yaml", "metrics.jsonl", "tensorboard", "model", "result.json"}
    assert {path.name for path in settings.run_path.iterdir()} == files
    stored = json.loads((settings.run_path / "result.json").read_text())
    assert (stored["steps"], stored["higher"]) == (15, None), "without an evaluation"
    trained = SentenceEncoder.from_pretrained(model_dir)
    untrained = SentenceEncoder.from_pretrained(settings.model.path, max_length=100)
    assert np.abs(trained.encode(SENTENCES) - untrained.encode(SENTENCES)).max() > 1e-2


def test_the_best_model_is_kept_not_the_last(settings: TrainSettings, encoder: SentenceEncoder) -> None:
    """The scores are scripted: the second evaluation is the best."""
    scores = iter([1.0, 2.0, 9.0, 3.0])
    seen = []

    def evaluate(encoder: SentenceEncoder) -> dict[str, float]:
        seen.append(encoder.encode(SENTENCES))
        score = next(scores)
        return {"task/MRR": score, "task/R@1": -score}

    evaluation = EvaluationSettings(tasks=["scripted"], every_steps=1)
    every_step = replace(settings, batch_size=4, epochs=1, evaluation=evaluation)
    result = fit(encoder, TRIPLES, AngleObjective(), every_step, evaluate)
    assert (result.steps, result.start, result.best) == (
        3,
        {"task/MRR": 1.0, "task/R@1": -1.0},
        {"task/MRR": 9.0, "task/R@1": -9.0},
    )
    stored = json.loads((settings.run_path / "result.json").read_text())
    assert (stored["start"], stored["best"], stored["metrics"]["best"]) == (1.0, 9.0, result.best)
    assert stored["higher"] is True
    assert stored["encoder"] == {"prompt": "summarize_one_word", "pooling": "last", "max_length": 100}
    np.testing.assert_array_equal(SentenceEncoder.from_pretrained(result.folder).encode(SENTENCES), seen[2])
    logged = [row["evaluation"] for row in read_metrics(settings.run_path) if "evaluation" in row]
    assert logged == [1.0, 2.0, 9.0, 3.0]
    assert [row["evaluation/task/R@1"] for row in read_metrics(settings.run_path) if "evaluation" in row][2] == -9.0


@pytest.mark.parametrize("kind", ["pairs", "questions"])
def test_the_verdict_is_the_paired_difference_to_the_model_before_training(
    kind: str, settings: TrainSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [(f"Dog {n} runs.", f"Animal {n} moves.", n / 9) for n in range(10)]
    rows = [{"sentence1": a, "sentence2": b, "score": score} for a, b, score in texts]
    if kind == "questions":
        rows = [{"question": a, "answer": b} for a, b, _ in texts]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = EvaluationSettings(tasks=[str(tmp_path / "held.jsonl")], every_steps=2)
    run = replace(settings, evaluation=evaluation)
    model = fine_tune(run).folder
    printed = capsys.readouterr().out
    held_out = held_out_evaluation(evaluation)
    assert held_out is not None
    items = []
    for path in (model, settings.model.path):
        held_out(SentenceEncoder.from_pretrained(path, max_length=100, device="cpu"))
        items.append(held_out.items["held"])
    if kind == "pairs":
        both = [{"held": PairScores(found, np.array([score for *_, score in texts]))} for found in items]
        expected: Any = compare(*both).tasks["held"]
    else:
        expected = mean_difference(*items)
    result = json.loads((settings.run_path / "result.json").read_text())
    assert (
        f"{expected.difference:+.2f} ({expected.interval.low:+.2f} to {expected.interval.high:+.2f})"
        in result["verdict"]
    )
    assert result["verdict"] in printed
    low, high = expected.interval.low, expected.interval.high
    words = "better than" if low > 0 else "worse than" if high < 0 else "no clear difference from"
    assert result["verdict"].startswith(f"{words} before training: held/")
    assert result["best"] - result["start"] == pytest.approx(expected.difference)


def test_no_verdict_without_an_interval_or_with_other_pairs(tmp_path: Path) -> None:
    rows = [("Dog runs.", "Animal moves.", 1), ("Man eats.", "Nobody sleeps.", 0), ("It rains.", "It is wet.", 0.5)]
    (tmp_path / "few.tsv").write_text(
        "sentence1\tsentence2\tscore\n" + "".join(f"{a}\t{b}\t{score}\n" for a, b, score in rows)
    )
    held_out = held_out_evaluation(EvaluationSettings(tasks=[str(tmp_path / "few.tsv")]))
    assert held_out is not None
    rising = np.array([0.1, 0.2, 0.3])
    assert held_out.verdict({"few": rising}, {"few": rising[::-1]}) is None, "a resample can have equal scores"
    assert held_out.verdict({"few": rising}, {"few": rising[:2]}) is None
    assert held_out.verdict({"few": rising[:2]}, {"few": rising[:2]}) is None
    assert held_out.verdict({"few": rising}, {}) is None


def test_the_verdict_covers_all_tasks(settings: TrainSettings, tmp_path: Path) -> None:
    """Tasks after the first show whether something became worse. A file name need not be UTF-8."""
    rows = [{"sentence1": f"Dog {n} runs.", "sentence2": f"It {n} moves.", "score": n / 30} for n in range(30)]
    for name in ("first", "second", "third\udcff"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [str(tmp_path / f"{name}.jsonl") for name in ("first", "second", "third\udcff")]
    held_out = held_out_evaluation(EvaluationSettings(tasks=tasks))
    assert held_out is not None
    good, bad = np.arange(30.0), np.random.default_rng(0).normal(size=30)
    saved, start = (
        {"first": good, "second": bad, "third\\udcff": bad},
        {"first": bad, "second": good, "third\\udcff": bad},
    )
    verdict = held_out.verdict(saved, start)
    assert verdict is not None
    assert re.fullmatch(
        r"better than before training: first/spearman \+.*; worse than before training: second/spearman -.*; "
        r"no clear difference from before training: third\\udcff/spearman \+0\.00 \(\+0\.00 to \+0\.00\)",
        verdict,
    )
    fine_tune(replace(settings, evaluation=EvaluationSettings(tasks=tasks)))
    assert json.loads((settings.run_path / "result.json").read_text())["verdict"].count("spearman") == 3


def test_an_evaluation_that_sets_seeds_does_not_change_the_training(settings: TrainSettings) -> None:
    """As mteb does; dropout draws from the generators."""
    losses, drawn = [], []
    for seed in (None, 1):

        def evaluate(_: SentenceEncoder, seed: int | None = seed) -> dict[str, float]:
            if seed is not None:
                set_seed(seed)
            return {"task/MRR": 1.0}

        set_seed(0)
        encoder = SentenceEncoder.from_pretrained(settings.model.path, max_length=100)
        encoder.add_lora(replace(settings.lora, dropout=0.5))
        run_dir = f"{settings.run_dir}-{seed}"
        evaluation = EvaluationSettings(tasks=["scripted"], every_steps=1)
        own = replace(settings, batch_size=4, epochs=1, evaluation=evaluation, run_dir=run_dir)
        fit(encoder, TRIPLES, AngleObjective(), own, evaluate)
        drawn.append((random.random(), torch.rand(1).item()))
        losses.append([row["loss"] for row in read_metrics(own.run_path) if "loss" in row])
    assert losses[0] == losses[1]
    assert drawn[0] == drawn[1]


# ------------------------------------------------------------------------------------------------------------ failures


def _poison_weights(encoder: SentenceEncoder) -> None:
    next(p for p in encoder.model.parameters() if p.requires_grad).data.fill_(math.nan)


def _poison_gradients(encoder: SentenceEncoder) -> None:
    next(p for p in encoder.model.parameters() if p.requires_grad).register_hook(lambda g: g * math.inf)


@pytest.mark.parametrize("poison", [_poison_weights, _poison_gradients])
def test_a_run_stops_before_the_optimizer_takes_a_bad_step(
    settings: TrainSettings, encoder: SentenceEncoder, poison: Callable[[SentenceEncoder], None]
) -> None:
    poison(encoder)
    (settings.run_path / "model").mkdir(parents=True)  # of an earlier attempt
    before = {name: tensor.clone() for name, tensor in encoder.model.state_dict().items()}
    with pytest.raises(TrainingError, match=r"step 1: .*--optimizer\.learning-rate.*No model was saved"):
        fit(encoder, TRIPLES, AngleObjective(), settings)
    after = encoder.model.state_dict()
    assert all(torch.equal(tensor, after[name]) or tensor.isnan().any() for name, tensor in before.items())
    assert not list((settings.run_path / "model").iterdir())


def test_memory_that_runs_out_in_an_evaluation_and_in_a_step_is_used_in_smaller_parts(
    settings: TrainSettings,
    encoder: SentenceEncoder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A step of three batches is planned again with half the budget, an evaluation encodes with half the tokens."""
    used: list[tuple[bool, int]] = []

    def check(model: torch.nn.Module, _: object, given: dict[str, torch.Tensor]) -> None:
        used.append((model.training, given["ids_BT"].numel()))
        if used[-1][1] > (150 if model.training else 60):
            raise torch.OutOfMemoryError("CUDA out of memory")

    texts = [each.anchor for each in TRIPLES]
    limited = replace(settings, batch_size=2, accumulation=3, epochs=1, micro_batch_tokens=5000, graph_tokens=5000)
    limited = replace(limited, evaluation=EvaluationSettings(tasks=["scripted"], every_steps=1))
    encoder.model.register_forward_pre_hook(check, with_kwargs=True)
    result = fit(encoder, TRIPLES, AngleObjective(), limited, lambda it: {"sum": float(it.encode(texts).sum())})
    assert result.steps == 2
    printed = capsys.readouterr().out
    assert "out of memory: repeating the step with" in printed
    assert "out of memory: encoding with at most" in printed
    assert [line["texts"] for line in read_metrics(settings.run_path) if "texts" in line] == [18, 18]


def test_texts_that_are_longer_than_max_length_are_counted(encoder: SentenceEncoder) -> None:
    long = Triple("word " * 300, "Animal moves.", "Dog sleeps.")
    assert list(long_texts(encoder, [*TRIPLES, long])) == [
        "1 of 39 sampled texts have more than 100 tokens (--model.max-length): the rest of these texts is not read"
    ]
    assert not list(long_texts(encoder, [*TRIPLES * 3, long])), "fewer than 1 %"
    (line,) = long_texts(encoder, [long] * 2500)
    assert line.startswith("834 of 2,502 sampled"), "each third example"


def test_single_texts_that_do_not_fit_are_trained_with_activation_checkpointing(
    settings: TrainSettings,
    encoder: SentenceEncoder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    layer: Any = LayerStack.of(encoder.model.backbone).layers[0]

    def check(model: torch.nn.Module, *_: object) -> None:
        if model.training and "forward" not in vars(layer):
            raise torch.OutOfMemoryError("CUDA out of memory")

    encoder.model.register_forward_pre_hook(check)
    with pytest.raises(TrainingError, match="out of memory"):
        fit(encoder, TRIPLES, AngleObjective(), replace(settings, activation_checkpointing="never"))
    assert fit(encoder, TRIPLES, AngleObjective(), settings).steps
    assert "activation checkpointing" in capsys.readouterr().out


def test_utilisation_counts_repeated_forward_passes_and_the_peak_of_the_card(
    encoder: SentenceEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = encoder.plan(SENTENCES, 100)
    flops = FlopsPerToken.of(encoder.model.backbone)
    once, work = flops.forward + flops.backward, plan.computed_tokens
    for cached, checkpointing, passes in ((False, False, 0), (True, False, 1), (False, True, 1), (True, True, 2)):
        result = StepResult([], 1, 1, plan, cached)
        counts = StepMeter(encoder, peak=1e9).counts([result], 2.0, checkpointing=checkpointing)
        assert counts["utilisation"] == pytest.approx(work * (once + passes * flops.forward) / 2e9)
    monkeypatch.setattr(encoder.model.head, "passes", 2)
    twice = StepMeter(encoder, peak=1e9).counts([StepResult([], 1, 1, plan, False)], 2.0)
    assert twice["utilisation"] == pytest.approx(2 * work * once / 2e9)
    gpu = torch.device("cuda", 0)
    for name, peak in {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA A100-SXM4-80GB": 312}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(gpu, torch.bfloat16) == peak * 1e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another GPU")
    assert peak_flops(gpu, torch.bfloat16) is None


class CheckpointError(RuntimeError):
    """Named like the error of torch for recomputed activations."""


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_a_failed_kernel_ends_the_run_and_names_the_flag(
    in_evaluation: bool, settings: TrainSettings, encoder: SentenceEncoder
) -> None:
    def check(model: torch.nn.Module, *_: object) -> None:
        if model.training != in_evaluation:
            raise CheckpointError("recomputed tensors have other shapes")

    def evaluate(it: SentenceEncoder) -> dict[str, float]:
        return {"sum": float(it.encode(SENTENCES).sum())}

    encoder.model.register_forward_pre_hook(check)
    with pytest.raises(TrainingError, match="--resume auto --layout padded"):
        fit(encoder, TRIPLES, AngleObjective(), settings, evaluate)


def test_late_failures_are_detected_before_the_first_step(
    settings: TrainSettings, encoder: SentenceEncoder, tmp_path: Path
) -> None:
    occupied = settings.run_path / "model"
    occupied.mkdir(parents=True)
    (occupied / "thesis.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=str(occupied)):
        fine_tune(settings)
    assert (occupied / "thesis.txt").read_text() == "mine"
    elsewhere = replace(settings, run_dir=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="lone surrogate"):
        fit(encoder, [Triple("A dog.", "An animal.", "Broken \udc80.")], AngleObjective(), elsewhere)
    assert not (settings.run_path / "metrics.jsonl").exists()
    assert not (elsewhere.run_path / "metrics.jsonl").exists()


def test_a_failed_run_leaves_its_weights_until_it_is_finished(
    settings: TrainSettings, encoder: SentenceEncoder
) -> None:
    calls: list[int] = []

    def evaluate(encoder: SentenceEncoder) -> dict[str, float]:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("broken evaluation")
        return {"task/score": 1.0}

    with pytest.raises(ValueError, match="broken evaluation"):
        fit(encoder, TRIPLES, AngleObjective(), settings, evaluate)
    rescued = SentenceEncoder.from_pretrained(settings.run_path / "interrupted")
    np.testing.assert_array_equal(rescued.encode(SENTENCES), encoder.encode(SENTENCES))
    fit(encoder, TRIPLES, AngleObjective(), settings, evaluate)
    assert not (settings.run_path / "interrupted").exists()


def test_a_model_from_after_the_checkpoint_is_not_reported_with_earlier_metrics(
    settings: TrainSettings, encoder: SentenceEncoder
) -> None:
    """The scores are scripted: those of the lost steps do not come again, as on a GPU."""
    settings = replace(
        settings,
        resume="auto",
        evaluation=EvaluationSettings(tasks=["scripted"], every_steps=1),
        checkpoint=CheckpointSettings(every_steps=2),
    )
    scores = [1.0, 2.0, 3.0, 9.0]  # steps 0 to 3; the fourth step fails
    with pytest.raises(IndexError, match="pop from empty list"):
        fit(encoder, TRIPLES, AngleObjective(), settings, lambda _: {"score": scores.pop(0)})
    scores = [2.5, 2.7]  # steps 3 and 4, after the checkpoint of step 2, whose best score is 3
    again = list[float]()
    with pytest.raises(IndexError):  # killed again, before a score
        fit(encoder, TRIPLES, AngleObjective(), settings, lambda _: {"score": again.pop(0)})
    result = fit(encoder, TRIPLES, AngleObjective(), settings, lambda _: {"score": scores.pop(0)})
    assert json.loads((settings.run_path / "best.json").read_text()) == {"score": 2.7}
    assert (result.steps, result.best) == (4, {"score": 2.7})
    saved = SentenceEncoder.from_pretrained(settings.run_path / "model")
    np.testing.assert_array_equal(saved.encode(SENTENCES), encoder.encode(SENTENCES))


def test_a_metric_that_is_not_a_number_ends_no_run(settings: TrainSettings, encoder: SentenceEncoder) -> None:
    settings = replace(
        settings,
        max_steps=2,
        resume="auto",
        evaluation=EvaluationSettings(tasks=["scripted"], every_steps=1),
        checkpoint=CheckpointSettings(every_steps=1),
    )
    scores = [1.0, 2.0]  # steps 0 and 1; the second step fails
    with pytest.raises(IndexError, match="pop from empty list"):
        fit(encoder, TRIPLES, AngleObjective(), settings, lambda _: {"score": scores.pop(0), "other": math.nan})
    assert json.loads((settings.run_path / "best.json").read_text()) == {"score": 2.0, "other": None}
    scores = [1.5]
    fit(encoder, TRIPLES, AngleObjective(), settings, lambda _: {"score": scores.pop(0), "other": math.nan})
    assert json.loads((settings.run_path / "best.json").read_text()) == {"score": 2.0, "other": None}


def test_a_run_whose_first_gradients_are_all_zero_stops(settings: TrainSettings, encoder: SentenceEncoder) -> None:
    pairs = [ScoredPair(f"Dog {n} runs.", f"Animal {n} moves.", 0.5) for n in range(8)]
    loss = AngleObjective(cosine_weight=1, in_batch_weight=0, angle_weight=0)
    for epochs, last in ((2, 2), (20, 10)):
        run = replace(settings, epochs=epochs, run_dir=f"{settings.run_dir}{epochs}")
        with pytest.raises(TrainingError, match=f"step {last}: the gradient is exactly 0"):
            fit(encoder, pairs, loss, run)
        assert not list(run.run_path.glob("*/*.safetensors")), "neither model/ nor interrupted/"
    fit(
        encoder,
        [*pairs, ScoredPair("Dogs run.", "They run.", 1)],
        loss,
        replace(settings, batch_size=2, epochs=1, seed=1, evaluation=EvaluationSettings(tasks=["mine"], every_steps=1)),
        lambda _: {"score": 1.0},
    )
    norms = [row["gradient_norm"] for row in read_metrics(settings.run_path) if "gradient_norm" in row]
    assert norms[0] == 0 < max(norms), norms


def test_pairs_of_a_text_with_itself_are_refused(settings: TrainSettings) -> None:
    """With two prompts a text has two embeddings, and vectors of a teacher are learned from single texts."""
    folder = settings.run_path.parent
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": f"Dog {n} runs."}) + "\n" for n in range(8)))
    data = DataSettings(path=str(folder / "docs.jsonl"), columns={"text1": "text", "text2": "text"})
    single = replace(settings, data=data, max_steps=1)
    with pytest.raises(TrainingError, match="docs: "):
        fine_tune(single)
    assert not settings.run_path.exists(), "another run can use the directory"
    fine_tune(replace(single, model=replace(settings.model, prompt={"query": "query", "document": "passage"})))
    teacher = save_tiny_base("llama", folder / "teacher", seed=3)
    for term in ("teacher_vector_weight", "teacher_similarity_weight"):
        taught = ObjectiveSettings(teacher=str(teacher), in_batch_weight=0, **{term: 1})
        fine_tune(replace(single, objective=taught, run_dir=str(folder / term)))


def test_a_directory_belongs_to_one_run(
    settings: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = replace(settings, run_dir="~/mine", max_steps=1)
    first = weights(fine_tune(settings).folder)
    before = {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    with pytest.raises(SettingsError, match=r"seed.*--run-dir"):
        fine_tune(replace(settings, seed=1))
    for resume in ("never", "auto"):  # finished, and without a checkpoint to resume from
        with pytest.raises(SettingsError, match="--run-dir"):
            fine_tune(replace(settings, resume=resume))
    assert {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*") if path.is_file()} == before
    (tmp_path / "mine/settings.yaml").write_text("evaluation: {pairs: null}\n")  # of an earlier version
    with pytest.raises(SettingsError, match="'pairs'"):
        fine_tune(settings)
    shutil.rmtree(tmp_path / "mine")
    assert weights(fine_tune(settings).folder) == first
    assert load_settings(TrainSettings, tmp_path / "mine/settings.yaml") == settings


@pytest.mark.parametrize(
    ("batches", "strategies"),
    [
        ("by_set", []),
        pytest.param("mixed", [], marks=pytest.mark.slow),
        pytest.param("by_set", ["ZeRO-2", "ZeRO-3"], marks=pytest.mark.slow),
    ],
)
def test_a_mixture_logs_the_examples_of_each_dataset(
    batches: str, strategies: list[str], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two datasets, one with its own prompt and loss, one with a bad row, with vectors of a guide and a teacher; then in
    several processes, stored on disk."""
    rows = [{"text1": f"A man number {n} eats.", "text2": f"He eats {n} things.", "score": n / 2} for n in range(10)]
    pairs = [{"query": f"How do I open door {n}?", "answer": f"Turn the key {n} times."} for n in range(10)]
    (tmp_path / "scored.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    own = {"prompt": "plain", "objective": {"cosine_weight": 1, "in_batch_weight": 0}}
    first = {"path": str(tmp_path / "scored.jsonl"), "score_range": [0, 5], "weight": 2, **own}
    values = {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(base), "dtype": "float32"},
        "lora": {"rank": 2, "alpha": 2},
        "objective": {
            "false_negatives": {"margin": 0.1, "guide": str(save_tiny_base("llama", tmp_path / "guide", seed=3))},
            "teacher": str(tmp_path / "guide"),
            "teacher_vector_weight": 0.5,
            "teacher_similarity_weight": 0.3,
        },
        "data": {"batches": batches, "sets": [first, {"path": str(tmp_path / "pairs.jsonl")}]},
        "batch_size": 4,
        "accumulation": 2,
        "epochs": 2,
    }
    fine_tune(settings_from_dict(TrainSettings, values, where="test"))
    printed = capsys.readouterr().out
    assert "scored: 20 of an epoch's 30 examples (66.7%), prompt plain, cosine_weight 1" in printed
    assert "10 of 10 rows used as positive_pair" in printed
    steps = read_metrics(tmp_path / "run")
    assert len(steps) == 8
    for epoch in (0, 1):
        lines = [step for step in steps if step["epoch"] == epoch]
        assert [sum(line[f"examples/{name}"] for line in lines) for name in ("scored", "pairs")] == [20, 10]
    assert all(math.isfinite(step["loss"]) for step in steps)
    if batches == "by_set":
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
        printed = program("distributed_runs.py", str(tmp_path), "mixture", str(tmp_path / "config.yaml"), *strategies)
        assert printed.count("losses differ by") == 2 + len(strategies)


@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_padded_texts_use_no_compiled_layer(
    layout: Any, settings: TrainSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Mock()
    monkeypatch.setattr("angle_llm.train.loading.use_compiled_rotary", compiled)
    run = replace(settings, layout=layout)
    load_encoder(resolve_model(run.model.path), run, Processes())
    assert compiled.called == (layout == "auto")

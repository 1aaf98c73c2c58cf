"""`fine_tune` in Python: data, evaluation, loss and callbacks that are objects of a program."""

import gc
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch
from safetensors.torch import load_file
from tiny import save_tiny_base

from angle_llm import AngleObjective, Interrupted, SentenceEncoder, TrainSettings, fine_tune
from angle_llm.data.formats import DataError
from angle_llm.data.sources import source_in_memory
from angle_llm.io import FolderError
from angle_llm.losses import FunctionTerm, NestedObjective, Relation
from angle_llm.losses.terms import BatchPairs, BatchTerm, Term, as_objective, described
from angle_llm.run import PythonObjects
from angle_llm.settings.parsing import SettingsError, load_settings
from angle_llm.settings.train import EvaluationSettings
from angle_llm.train.batches import rate_share
from angle_llm.train.callbacks import Callback, EarlyStopping, TrainingState

PAIRS = [{"query": f"Dog {n} runs.", "answer": f"Animal {n} moves."} for n in range(24)]
GRADED = [
    {"sentence1": f"Dog {n} runs.", "sentence2": f"Animal {m} moves.", "score": 1 - abs(n - m) / 3}
    for n in range(4)
    for m in range(4)
]


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base = save_tiny_base("llama", tmp_path_factory.mktemp("base"))
    return {
        "model": {"path": str(base), "dtype": "float32", "max_length": 100},
        "lora": {"rank": 4},
        "batch_size": 8,
        "optimizer": {"learning_rate": 1e-2},
    }


def lines() -> Iterator[dict[str, Any]]:
    yield from PAIRS


KINDS: dict[str, Callable[[Path], Any]] = {
    "list": lambda _: PAIRS,
    "file": lambda folder: write(folder / "pairs.jsonl"),
    "list of numpy": lambda _: [{name: np.str_(text) for name, text in row.items()} for row in PAIRS],
    "Dataset": lambda _: datasets.Dataset.from_list(PAIRS),
    "Dataset, formatted": lambda _: datasets.Dataset.from_list(PAIRS).with_format("arrow", columns=["query"]),
    "DatasetDict": lambda _: datasets.DatasetDict(train=datasets.Dataset.from_list(PAIRS)),
    "IterableDataset": lambda _: datasets.Dataset.from_list(PAIRS).to_iterable_dataset(),
    "pandas": lambda _: pd.DataFrame(PAIRS, index=range(7, 31)),
    "pandas, column of two types": lambda _: pd.DataFrame(PAIRS).assign(id=[1, "A7"] * 12),
    "Arrow": lambda _: pyarrow.Table.from_pylist(PAIRS),
    "function": lambda _: lines,
    "path in settings": lambda folder: {"path": write(folder / "pairs.jsonl"), "format": "positive_pair"},
}


def write(path: Path) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return str(path)


def adapter(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def test_every_kind_of_data_trains_the_same_model(common: dict[str, Any], tmp_path: Path) -> None:
    adapters = {
        name: adapter(fine_tune(data=make(tmp_path), run_dir=str(tmp_path / name), **common).folder)
        for name, make in KINDS.items()
    }
    assert len(set(adapters.values())) == 1


def test_the_result_has_encoder_metrics_and_verdict(common: dict[str, Any], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = fine_tune(data=PAIRS, evaluation=GRADED, run_dir=str(run_dir), **common)
    assert result.folder == run_dir / "model"
    assert result.steps == 3
    rows = result.encoder.encode(["Dog 1 runs."])
    np.testing.assert_array_equal(rows, SentenceEncoder.from_pretrained(result.folder).encode(["Dog 1 runs."]))
    table = pd.DataFrame(result.metrics)
    assert table["loss"].count() == 3
    assert result.best is not None
    assert table["evaluation/evaluation/spearman"].dropna().iloc[-1] == result.best["evaluation/spearman"]
    assert "before training" in (result.verdict or "")
    saved = load_settings(TrainSettings, run_dir / "settings.yaml")
    assert saved.data.path.startswith("memory:data-")
    with pytest.raises(SettingsError, match="were passed in Python"):
        fine_tune(saved, run_dir=str(tmp_path / "again"))


def test_settings_files_and_keywords_are_merged(common: dict[str, Any], tmp_path: Path) -> None:
    config = tmp_path / "own.yaml"
    config.write_text("max_steps: 2\nlora: {rank: 2, alpha: 8}\n")
    settings = fine_tune(config, data=PAIRS, run_dir=str(tmp_path / "run"), **common).folder.parent / "settings.yaml"
    saved = load_settings(TrainSettings, settings)
    assert (saved.max_steps, saved.lora.rank, saved.lora.alpha) == (2, 4, 8)
    with pytest.raises(SettingsError, match="Did you mean 'batch_size'"):
        fine_tune(data=PAIRS, batchsize=2)


def test_a_mixture_of_objects_has_weights(common: dict[str, Any], tmp_path: Path) -> None:
    sets = [{"path": PAIRS, "weight": 2}, {"path": pd.DataFrame(GRADED), "objective": {"cosine_weight": 1}}]
    result = fine_tune(data={"sets": sets}, run_dir=str(tmp_path / "run"), **common)
    counts: dict[str, float] = {}
    for numbers in result.metrics:
        for name, value in numbers.items():
            if name.startswith("examples/"):
                counts[name] = counts.get(name, 0) + value
    assert list(counts.values()) == [2 * len(PAIRS), len(GRADED)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([*PAIRS, {"query": "A dog.", "answer": None}], "data row 25: answer .* is null"),
        ([], "data: there are no rows"),
        ([1, 2], "data row 1: expected a dictionary or a text, got int"),
        (5, "data: expected a path, .* got int"),
        (lambda: iter(()), "data: there are no rows"),
        (lambda: iter([{"query": b"a", "answer": "b"}]), "data row 1: query .* is {'bytes':"),
        (pd.DataFrame({"query": ["a"], "answer": [2.5]}).assign(id=[{1}]), "data row 1: answer .* is 2.5"),
        (pd.DataFrame({"number": [1]}), "data: the columns number fit no format"),
        (datasets.DatasetDict(dev=datasets.Dataset.from_list(PAIRS)), "data: expected one split, got the splits dev"),
        (datasets.Dataset.from_list(PAIRS).with_transform(dict), "data: the dataset has a transform"),
        ([*PAIRS, {None: ["c"]}], "data row 25: expected texts as column names, got None"),
    ],
)
def test_data_that_cannot_be_used_are_named(data: Any, message: str, common: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        fine_tune(data=data, run_dir=str(tmp_path / "run"), **common)
    assert not (tmp_path / "run").exists()


def test_label_names_of_a_dataset_are_used(common: dict[str, Any], tmp_path: Path) -> None:
    names = ["contradiction", "entailment", "neutral"]  # not the usual order
    rows = [{"premise": f"Dog {n} runs.", "hypothesis": f"Animal {n}.", "label": n % 3} for n in range(24)]
    features = datasets.Features(
        premise=datasets.Value("string"), hypothesis=datasets.Value("string"), label=datasets.ClassLabel(names=names)
    )
    named = [{**row, "label": names[row["label"]]} for row in rows]
    with_numbers = datasets.Dataset.from_list(rows, features=features)
    adapters = {
        adapter(fine_tune(data=data, run_dir=str(tmp_path / str(number)), **common).folder)
        for number, data in enumerate([with_numbers, with_numbers.to_iterable_dataset(), named])
    }
    assert len(adapters) == 1


def test_a_function_measures_the_encoder_and_selects_the_best_model(common: dict[str, Any], tmp_path: Path) -> None:
    values = iter([0.0, 3.0, 1.0, 2.0])

    def own(encoder: SentenceEncoder) -> dict[str, float]:
        return {"width": encoder.encode(["A dog."]).shape[1], "falls": next(values)}

    evaluation = {"tasks": {"dev": GRADED, "own": own}, "every_steps": 1, "metric": "own/falls"}
    result = fine_tune(data=PAIRS, evaluation=evaluation, run_dir=str(tmp_path / "run"), **common)
    assert result.best is not None
    assert next(iter(result.best)) == "own/falls"
    assert result.best["own/falls"] == 3
    assert result.best["own/width"] == 32
    number = fine_tune(data=PAIRS, evaluation=lambda _: 1, run_dir=str(tmp_path / "number"), **common)
    assert number.best == {"<lambda>/score": 1.0}
    with pytest.raises(SettingsError, match=r"unknown metric 'own/rises'.* Did you mean"):
        fine_tune(
            data=PAIRS,
            evaluation={"tasks": {"own": lambda _: {"falls": 1}}, "metric": "own/rises"},
            run_dir=str(tmp_path / "unknown"),
            **common,
        )


def test_tasks_of_a_list_or_a_dictionary_have_names(common: dict[str, Any], tmp_path: Path) -> None:
    pd.DataFrame(GRADED).to_csv(tmp_path / "graded.csv", index=False)
    for evaluation, names in (
        ([pd.DataFrame(GRADED), GRADED[:4]], ["evaluation1", "evaluation2"]),
        ({"tasks": {"dev": str(tmp_path / "graded.csv"), "own": GRADED}, "metric": "own/pearson"}, ["own", "dev"]),
        (lambda: iter(GRADED), ["evaluation"]),
    ):
        result = fine_tune(data=PAIRS, evaluation=evaluation, run_dir=str(tmp_path / names[0]), **common)
        assert result.best is not None
        assert list(dict.fromkeys(name.split("/")[0] for name in result.best)) == names


def test_questions_and_answers_in_memory_are_a_retrieval_task(common: dict[str, Any], tmp_path: Path) -> None:
    result = fine_tune(data=PAIRS, evaluation=pd.DataFrame(PAIRS), run_dir=str(tmp_path / "run"), **common)
    assert result.best is not None
    assert next(iter(result.best)) == "evaluation/nDCG@10"


def spread(embeddings: torch.Tensor, relation: Relation) -> torch.Tensor:
    """Spread-out regularisation (GOR, arXiv 1708.06320)."""
    rows = torch.nn.functional.normalize(embeddings)
    cosines = (rows @ rows.T)[~torch.eye(len(rows), dtype=torch.bool)]
    return cosines.mean().square() + (cosines.square().mean() - 1 / rows.shape[1]).relu()


def test_own_losses_are_used_alone_and_beside_the_built_in_terms(common: dict[str, Any], tmp_path: Path) -> None:
    def parts(loss: Any, name: str) -> set[str]:
        result = fine_tune(data=PAIRS, loss=loss, run_dir=str(tmp_path / name), **common)
        return {key for key in result.metrics[0] if key.startswith("loss/")}

    assert parts(spread, "alone") == {"loss/spread"}
    assert parts([AngleObjective(angle_weight=0.1), FunctionTerm("gor", spread, 0.5)], "beside") == {
        "loss/in_batch",
        "loss/angle",
        "loss/gor",
    }
    (first, *_) = (tmp_path / "beside" / "settings.yaml").read_text().splitlines()
    assert first == "# Passed in Python, and not in this file: loss in_batch, loss angle, loss gor"
    recipe = tmp_path / "recipe.yaml"  # its objective is replaced
    recipe.write_text("objective: {in_batch_temperature: 0.03}\n")
    nested = NestedObjective(AngleObjective(), (4,))
    result = fine_tune(recipe, data=PAIRS, loss=nested, run_dir=str(tmp_path / "nested"), **common)
    assert (tmp_path / "nested" / "settings.yaml").read_text().startswith(f"{first.rpartition(':')[0]}: loss NestedObj")
    assert "loss/dim4" in result.metrics[0]
    with pytest.raises(SettingsError, match="loss excludes the settings objective"):
        fine_tune(data=PAIRS, loss=spread, objective={"angle_weight": 1}, run_dir=str(tmp_path / "both"), **common)
    with pytest.raises(ValueError, match="expected at least one term"):
        fine_tune(data=PAIRS, loss=[], run_dir=str(tmp_path / "none"), **common)
    with pytest.raises(ValueError, match="different names"):
        fine_tune(data=PAIRS, loss=[spread, spread], run_dir=str(tmp_path / "twice"), **common)
    with pytest.raises(TypeError, match="expected a function"):
        fine_tune(data=PAIRS, loss="angle", run_dir=str(tmp_path / "name"), **common)


@dataclass
class Events(Callback):
    """Records the events of a run."""

    seen: list[tuple[str, int]]
    stops_at: int = 0

    def __repr__(self) -> str:
        return "Events"

    def on_start(self, state: TrainingState) -> None:
        self.seen.append(("start", state.step))

    def on_step(self, state: TrainingState) -> None:
        assert state.numbers is not None
        assert state.numbers["step"] == state.step
        assert state.history()[-1] == state.numbers
        self.seen.append(("step", state.step))
        if state.step == self.stops_at:
            state.stop("test")

    def on_evaluation(self, state: TrainingState) -> None:
        assert state.numbers is not None
        assert "evaluation" in state.numbers
        self.seen.append(("evaluation", state.step))

    def on_checkpoint(self, state: TrainingState) -> None:
        assert (state.folder / "checkpoints" / f"step-{state.step:06}").is_dir()
        self.seen.append(("checkpoint", state.step))

    def on_end(self, state: TrainingState) -> None:
        assert (state.folder / "model").is_dir()
        self.seen.append(("end", state.step))


def test_settings_of_earlier_tasks_are_reset(common: dict[str, Any], tmp_path: Path) -> None:
    earlier = TrainSettings(evaluation=EvaluationSettings(tasks=["distances.tsv"], score_range=(1, 0), every_steps=3))
    result = fine_tune(earlier, data=PAIRS, evaluation=GRADED, run_dir=str(tmp_path / "run"), **common)
    stored = load_settings(TrainSettings, result.folder.parent / "settings.yaml").evaluation
    assert (stored.score_range, stored.every_steps) == (None, 3)


def test_callbacks_see_all_events_and_can_stop_the_run(common: dict[str, Any], tmp_path: Path) -> None:
    events = Events([], stops_at=2)
    result = fine_tune(
        data=PAIRS,
        evaluation=GRADED,
        callbacks=[events],
        checkpoint={"every_steps": 1},
        run_dir=str(tmp_path / "run"),
        epochs=2,
        **common,
    )
    assert events.seen == [
        ("start", 0),
        ("evaluation", 0),
        ("step", 1),
        ("checkpoint", 1),
        ("step", 2),
        ("evaluation", 2),
        ("checkpoint", 2),
        ("end", 2),
    ]
    assert (result.steps, result.stopped) == (2, "test")
    assert json.loads((tmp_path / "run/result.json").read_text())["stopped"] == "test"


class StopsAt(Callback):
    """Stops a run at its start, or at a checkpoint."""

    def __init__(self, event: str) -> None:
        self.event = event

    def on_start(self, state: TrainingState) -> None:
        if self.event == "start":
            state.stop("start")

    def on_checkpoint(self, state: TrainingState) -> None:
        if self.event == "checkpoint":
            state.stop("checkpoint")


@pytest.mark.parametrize(("event", "steps"), [("start", 1), ("checkpoint", 2)])
def test_a_stop_before_a_step_ends_the_run_after_it(
    common: dict[str, Any], tmp_path: Path, event: str, steps: int
) -> None:
    result = fine_tune(
        data=PAIRS,
        evaluation=GRADED,
        callbacks=[StopsAt(event)],
        checkpoint={"every_steps": 1},
        run_dir=str(tmp_path / "run"),
        epochs=2,
        **common,
    )
    assert (result.steps, result.stopped) == (steps, event)
    assert [row["step"] for row in result.metrics if "evaluation" in row] == [0, steps]


@pytest.mark.parametrize("event", ["start", "checkpoint"])
def test_a_stop_at_the_last_step_stops_nothing(common: dict[str, Any], tmp_path: Path, event: str) -> None:
    def train(resume: str | None) -> Any:
        return fine_tune(
            data=PAIRS,
            callbacks=[StopsAt(event)],
            checkpoint={"every_steps": 1},
            run_dir=str(tmp_path / "run"),
            max_steps=1,
            resume=resume,
            **common,
        )

    for result in map(train, (None, "auto")):
        assert (result.steps, result.stopped) == (1, None)


class Interrupt(Callback):
    """Ends a run after the checkpoint of a step, as Ctrl-C twice does."""

    def __init__(self, step: int = 0) -> None:
        self.step = step

    def on_checkpoint(self, state: TrainingState) -> None:
        if state.step == self.step:
            raise KeyboardInterrupt


def test_early_stopping_counts_the_evaluations_before_an_interruption(common: dict[str, Any], tmp_path: Path) -> None:
    def train(name: str, values: Iterator[float], callbacks: list[Callback], **more: Any) -> Any:
        return fine_tune(
            data=PAIRS,
            evaluation={"tasks": {"own": lambda _: next(values)}, "every_steps": 2},
            callbacks=callbacks,
            checkpoint={"every_steps": 1},
            run_dir=str(tmp_path / name),
            epochs=4,
            resume="auto",
            **common,
            **more,
        )

    values = [0.0, 5.0, 3.0, 5.0, 9.0]
    whole = train("flag", iter(values), [], early_stopping={"patience": 2})
    assert whole.steps == 6
    assert whole.best == {"own/score": 5.0}
    assert whole.stopped == "evaluation has not improved for 2 evaluations: best 5.00 in step 2"
    interrupted = iter(values)
    with pytest.raises(KeyboardInterrupt):
        train("python", interrupted, [EarlyStopping(2), Interrupt(5)])
    resumed = train("python", interrupted, [EarlyStopping(2), Interrupt()])
    assert (resumed.steps, resumed.stopped) == (6, whole.stopped)
    assert adapter(resumed.folder) == adapter(whole.folder)
    with pytest.raises(KeyboardInterrupt):  # between the last checkpoint and the end
        train("end", iter(values), [EarlyStopping(2), Interrupt(6)])
    assert train("end", iter(()), [EarlyStopping(2), Interrupt()]).steps == 6


def test_early_stopping_needs_evaluations_and_a_known_metric(common: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="early stopping counts evaluations"):
        fine_tune(data=PAIRS, early_stopping={"patience": 2}, **common)
    with pytest.raises(SettingsError, match=r"need early_stopping\.patience, which is not set"):
        fine_tune(data=PAIRS, early_stopping={"min_delta": 1.0}, **common)
    with pytest.raises(ValueError, match=r"early_stopping\.metric: expected one of own/score; got 'own/falls'"):
        fine_tune(
            data=PAIRS,
            evaluation={"tasks": {"own": lambda _: 1}, "every_steps": 1},
            early_stopping={"patience": 1, "metric": "own/falls"},
            run_dir=str(tmp_path / "run"),
            **common,
        )


def test_a_run_does_not_resume_with_other_data_loss_or_callbacks(common: dict[str, Any], tmp_path: Path) -> None:
    def train(name: str = "run", data: Any = PAIRS, **more: Any) -> Any:
        run_dir = str(tmp_path / name)
        return fine_tune(
            data=data, run_dir=run_dir, checkpoint={"every_steps": 1}, resume="auto", epochs=2, **common, **more
        )

    whole = train("whole")
    with pytest.raises(KeyboardInterrupt):
        train(callbacks=[Interrupt(2)])
    with pytest.raises(FolderError, match="loss"):
        train(callbacks=[Interrupt()], loss=spread)
    with pytest.raises(FolderError, match="callbacks"):
        train(callbacks=[Callback()])
    with pytest.raises(SettingsError, match=r"other settings \(data.path"):
        train(data=PAIRS[:-1], callbacks=[Interrupt()])
    assert adapter(train(data=pd.DataFrame(PAIRS), callbacks=[Interrupt()]).folder) == adapter(whole.folder)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"])
def test_schedules_are_those_of_transformers_without_a_step_of_rate_0(schedule: str) -> None:
    from transformers.optimization import get_scheduler

    steps, warmup = 20, 4
    unused = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = get_scheduler(schedule, unused, num_warmup_steps=warmup, num_training_steps=steps + 1)
    rates = [scheduler.get_last_lr()[0]]
    for _ in range(steps):
        unused.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    ours = [rate_share(step, warmup, steps, schedule) for step in range(1, steps + 1)]
    assert ours == pytest.approx(rates[1:])
    assert min(ours) > 0


@pytest.mark.needs("bitsandbytes")
def test_an_optimizer_of_8_bits_resumes_with_the_same_weights(common: dict[str, Any], tmp_path: Path) -> None:
    """Weights of 32 × 128 and more get a state of 8 bits."""

    def train(name: str, **more: Any) -> Any:
        return fine_tune(
            data=PAIRS,
            run_dir=str(tmp_path / name),
            checkpoint={"every_steps": 1},
            resume="auto",
            epochs=2,
            **(common | {"lora": {"rank": 128}, "optimizer": {"learning_rate": 1e-3, "name": "adamw_8bit"}}),
            **more,
        )

    whole = train("whole")
    with pytest.raises(KeyboardInterrupt):
        train("run", callbacks=[Interrupt(3)])
    state = load_file(sorted((tmp_path / "run/checkpoints").iterdir())[-1] / "optimizer.safetensors")
    assert torch.uint8 in {tensor.dtype for tensor in state.values()}
    assert adapter(train("run", callbacks=[Interrupt()]).folder) == adapter(whole.folder)


def squares(embeddings: torch.Tensor, relation: Relation) -> torch.Tensor:
    return embeddings.square().mean()


def test_a_run_resumes_with_a_loss_of_the_same_name_and_weight(common: dict[str, Any], tmp_path: Path) -> None:
    def train(loss: Any) -> Any:
        settings = common | {"checkpoint": {"every_steps": 1}, "resume": "auto", "run_dir": str(tmp_path / "run")}
        return fine_tune(data=PAIRS, loss=loss, **settings)

    first = train(squares)

    def edited(embeddings: Any, relation: Any) -> Any:
        return embeddings.pow(2).mean()

    edited.__name__ = "squares"
    assert train(edited).best == first.best
    with pytest.raises(FolderError, match="loss"):
        train(FunctionTerm("squares", squares, weight=2.0))


class Misspelt(Callback):
    def on_step_end(self, state: TrainingState) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": 1e-3}, r"unknown setting 'learning_rate'. Did you mean optimizer=\{'learning_rate': …\}"),
        ({"callbacks": EarlyStopping(2)}, "callbacks: expected a list, got EarlyStopping; write callbacks="),
        ({"callbacks": [object()]}, "callbacks: expected objects of classes derived from Callback, got object"),
        ({"callbacks": [Misspelt()]}, "Misspelt.on_step_end is never called; expected one of on_start"),
        ({"callbacks": [EarlyStopping(2)]}, "early stopping counts evaluations"),
        (
            {
                "evaluation": {"tasks": {"own": lambda _: 1.0}, "every_steps": 1},
                "early_stopping": {"patience": 1, "metric": "won/value"},
            },
            "early_stopping.metric: expected TASK/METRIC with a task of own, got won/value",
        ),
        (
            {
                "evaluation": {"tasks": {"dev": GRADED}, "every_steps": 1},
                "callbacks": [EarlyStopping(1, "dev/alignment")],
            },
            "early_stopping.metric dev/alignment: lower is better",
        ),
        (
            {"loss": [AngleObjective(angle_weight=1), FunctionTerm("own", squares)], "nested": {"dimensions": [5]}},
            "nested.dimensions: expected even numbers",
        ),
        ({"loss": lambda embeddings, _: embeddings.detach().sum()}, "loss <lambda>: expected a scalar that depends on"),
        ({"loss": AngleObjective}, r"loss: expected an object, got the class AngleObjective; pass AngleObjective\("),
        (
            {"evaluation": [lambda _: 1, lambda _: 2]},
            "two functions have the name <lambda>; pass a dictionary",
        ),
        (
            {"evaluation": datasets.DatasetDict(a=datasets.Dataset.from_list(GRADED))},
            "one of the splits a, such as data",
        ),
        ({"loss": torch.nn.PReLU()}, "loss: PReLU has parameters, which a run does not train"),
        ({"evaluation": {"own": lambda _: None}}, "evaluation own: expected a number or a dictionary of numbers"),
        (
            {"loss": lambda embeddings, _: embeddings.sum(1)},
            r"loss <lambda>: expected a scalar tensor, got a .* \(16,\)",
        ),
    ],
)
def test_arguments_that_cannot_be_used_are_named(
    arguments: dict[str, Any], message: str, common: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises((SettingsError, TypeError, ValueError), match=message):
        fine_tune(data=PAIRS, run_dir=str(tmp_path / "run"), **(common | arguments))


def test_a_model_may_be_a_path(common: dict[str, Any], tmp_path: Path) -> None:
    path = common["model"]["path"]
    settings: dict[str, Any] = common | {"model": Path(path), "optimizer": {"learning_rate": np.float64(1e-3)}}
    result = fine_tune(data=PAIRS, max_steps=1, run_dir=tmp_path / "run", **settings)
    assert load_settings(TrainSettings, result.folder.parent / "settings.yaml").model.path == path


def test_rows_of_a_function_are_in_the_cache_while_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANGLE_LLM_CACHE", str(tmp_path / "cache"))
    source = source_in_memory(lines, "data")
    assert [path.name for path in tmp_path.glob("cache/rows-*/*")] == ["rows.jsonl"]
    assert [row.values for row in source.good_rows()] == PAIRS
    del source
    gc.collect()
    assert not list(tmp_path.glob("cache/rows-*"))


def test_rows_of_a_function_may_have_other_columns_in_later_rows(common: dict[str, Any], tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"anchor": f"Dog {n} runs.", "positive": f"Animal {n} moves."} for n in range(12)]
    rows += [{**row, "negative": f"Ship {n}.", "count": n + 0.5} for n, row in enumerate(rows)]
    readers = [source_in_memory(data, "data") for data in (rows, lambda: iter(rows))]
    assert [list(reader.columns) for reader in readers] == [["anchor", "positive", "negative", "count"]] * 2
    assert readers[0].text == readers[1].text
    assert [row.values for row in readers[0].rows()] == [row.values for row in readers[1].rows()]  # type: ignore[union-attr]
    with pytest.raises(DataError, match="data row 2: expected a dictionary or a text, got int"):
        source_in_memory(lambda: iter([PAIRS[0], 5]), "data")
    assert [row.values["text"] for row in source_in_memory(lambda: iter(["a", "b"]), "data").rows()] == ["a", "b"]  # type: ignore[union-attr]


class StopAndSignal(Callback):
    """Stops a run at step 2; in its first process also sends SIGTERM, before the evaluation that the stop makes due."""

    signals = True

    def on_step(self, state: TrainingState) -> None:
        if state.step == 2:
            state.stop("two")
            if StopAndSignal.signals:
                StopAndSignal.signals = False
                os.kill(os.getpid(), signal.SIGTERM)


def test_a_stopped_run_that_is_interrupted_ends_where_it_was_stopped(common: dict[str, Any], tmp_path: Path) -> None:
    def train() -> Any:
        return fine_tune(
            data=PAIRS,
            evaluation=GRADED,
            callbacks=[StopAndSignal()],
            resume="auto",
            run_dir=str(tmp_path / "run"),
            **common,
        )

    with pytest.raises(Interrupted):
        train()
    result = train()
    assert (result.steps, result.stopped) == (2, "two")


class Draws(Callback):
    def on_start(self, state: TrainingState) -> None:
        torch.rand(3)

    on_step = on_start


def test_callbacks_that_draw_numbers_do_not_change_the_training(common: dict[str, Any], tmp_path: Path) -> None:
    settings = common | {"lora": {"rank": 4, "dropout": 0.3}}
    plain, drawn = (
        fine_tune(data=PAIRS, callbacks=callbacks, run_dir=str(tmp_path / str(number)), **settings)
        for number, callbacks in enumerate(([], [Draws()]))
    )
    assert adapter(plain.folder) == adapter(drawn.folder)


def test_early_stopping_counts_one_value_per_step_and_ignores_undefined_ones(tmp_path: Path) -> None:
    def stops(values: list[tuple[int, float]]) -> bool:
        lines = [json.dumps({"step": step, "evaluation": value}) for step, value in values]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
        state = TrainingState(tmp_path, steps=9, encoder=None)  # type: ignore[arg-type]
        EarlyStopping(2).on_evaluation(state)
        return state.stopped is not None

    nan = float("nan")
    assert not stops([(0, nan), (1, 2.0), (2, 3.0), (3, 4.0)])
    assert stops([(0, nan), (1, 2.0), (2, 2.0), (3, 2.0)])
    assert not stops([(0, 1.0), (1, 2.0), (2, 1.0), (2, 1.0)])
    assert stops([(0, nan), (1, nan), (2, nan)])
    with pytest.raises(ValueError, match="patience: expected 1 or more, got 0"):
        EarlyStopping(0)


@dataclass
class Counts(Callback):
    losses: list[float]
    limit: int = 3

    def on_step(self, state: TrainingState) -> None:
        assert state.numbers is not None
        self.losses.append(state.numbers["loss"])


class Plain(Term):
    name = "plain"

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def prepare(self, pairs: BatchPairs) -> BatchTerm:
        raise AssertionError("the term is only described")


def test_the_identity_of_a_run_has_names_and_fields_of_its_loss_and_callbacks() -> None:
    def identity(*terms: Any, callbacks: Sequence[Callback] = ()) -> dict[str, str]:
        return PythonObjects(loss=as_objective(list(terms)) if terms else None, callbacks=callbacks).identity()

    assert identity() == {"callbacks": "", "loss": ""}
    assert identity(AngleObjective()) == identity(AngleObjective())
    assert identity(AngleObjective(angle_weight=1)) == identity(AngleObjective(angle_weight=1))
    assert identity(AngleObjective()) != identity(AngleObjective(in_batch_temperature=0.5))
    assert identity(FunctionTerm("own", spread)) != identity(FunctionTerm("own", spread, weight=2.0))
    assert identity(FunctionTerm("own", spread)) != identity(FunctionTerm("own", squares))
    assert identity(Plain(1.0)) != identity(Plain(2.0))
    assert identity(FunctionTerm("own", partial(spread, relation=1))) != identity(FunctionTerm("own", spread))
    assert identity(callbacks=[Counts([])]) == identity(callbacks=[Counts([1.0])])
    assert identity(callbacks=[Counts([])]) != identity(callbacks=[Counts([], limit=4)])


class OrderedSet(frozenset[str]):
    """A set with a fixed order of items; the order of a usual set of texts differs between processes."""

    def __new__(cls, items: Sequence[str]) -> "OrderedSet":
        ordered = super().__new__(cls, items)
        ordered.items = items
        return ordered

    items: Sequence[str]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items)


def test_the_identity_of_a_run_is_the_same_in_every_process() -> None:
    """The order of a set of texts depends on PYTHONHASHSEED."""
    names = ["guide", "teacher", "text", "group"]
    terms = [FunctionTerm("own", print, needs=OrderedSet(order)) for order in (names, names[::-1])]
    assert [list(term.needs) for term in terms] == [names, names[::-1]]
    assert described(terms[0]) == described(terms[1])
    assert all(repr(name) in described(terms[0]) for name in names)


def test_a_metric_that_appears_later_and_no_evaluation_at_all(common: dict[str, Any], tmp_path: Path) -> None:
    values = iter([{"a": 1.0}, {"a": 2.0, "b": 3.0}])
    result = fine_tune(data=PAIRS, evaluation=lambda _: next(values), run_dir=str(tmp_path / "run"), **common)
    assert result.best == {"<lambda>/a": 2.0, "<lambda>/b": 3.0}
    off = fine_tune("starter", data=PAIRS, evaluation=[], run_dir=str(tmp_path / "off"), **common)
    assert off.best is None


def test_data_replace_the_data_of_the_settings(common: dict[str, Any], tmp_path: Path) -> None:
    config = tmp_path / "own.yaml"
    config.write_text("data: {sets: [{path: no.tsv}]}")
    assert fine_tune(config, data={"path": PAIRS}, run_dir=str(tmp_path / "run"), **common).steps == 3
    with pytest.raises(SettingsError, match=r"sets\.0"):
        fine_tune(data={"sets": [{"path": PAIRS, "wieght": 2}]}, run_dir=str(tmp_path / "no"), **common)
    with pytest.raises(SettingsError, match="loss needs teacher_vectors"):
        fine_tune(data=PAIRS, loss=AngleObjective(teacher_vector_weight=1), run_dir=str(tmp_path / "no"), **common)

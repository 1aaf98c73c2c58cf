"""Training on texts with a class: exact in any number of processes, resumed bit for bit, refused without classes.

As a program, `python tests/train/test_class_training.py FOLDER` makes the runs of several processes.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import datasets
import pytest
import torch
from programs import run
from runs import ending, largest_difference, read_metrics
from tiny import save_tiny_base, tiny_encoder

from angle_llm import Interrupted, fine_tune
from angle_llm.data.formats import LabelledText, PositivePair
from angle_llm.data.mixture import LoadedSet, Mixture
from angle_llm.losses import AngleObjective, FunctionTerm, MixedObjective
from angle_llm.losses.terms import SumOfTerms
from angle_llm.settings.parsing import SettingsError
from angle_llm.train.batches import BatchPlanner
from angle_llm.train.callbacks import Callback, TrainingState
from angle_llm.train.objectives import checked_data

NAMES = ["animals", "shares", "music"]
TEXTS = [LabelledText(f"{name} {number} " * (number % 5 + 1), name) for name in NAMES for number in range(9)]
LOSS = AngleObjective(in_batch_weight=0.0, class_weight=1.0)


@pytest.mark.slow
def test_updates_do_not_depend_on_processes_or_kept_graphs(tmp_path: Path) -> None:
    done = run("python", Path(__file__), str(tmp_path), seconds=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.count("adapters by") == 4


def table() -> datasets.Dataset:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=NAMES)})
    rows = {"text": [text.text for text in TEXTS], "label": [NAMES.index(text.label) for text in TEXTS]}
    return datasets.Dataset.from_dict(rows, features=features)


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base = save_tiny_base("llama", tmp_path_factory.mktemp("base"))
    return {
        "model": {"path": str(base), "dtype": "float32", "max_length": 60},
        "lora": {"rank": 4, "dropout": 0.1},
        "optimizer": {"learning_rate": 1e-2},
        "batch_size": 8,
        "epochs": 2,
    }


class Stop(Callback):
    """Sends SIGINT after step 3, the first time."""

    def __init__(self) -> None:
        self.sent = False

    def on_step(self, state: TrainingState) -> None:
        if state.step == 3 and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)  # a shell ignores SIGINT for its background jobs


def test_a_dataset_with_label_names_trains_and_an_interrupted_run_ends_with_the_same_weights(
    common: dict[str, Any], tmp_path: Path
) -> None:
    learned = {"objective": {"class_weight": 1, "in_batch_weight": 0}, "resume": "auto"}
    whole = fine_tune(data=table(), run_dir=str(tmp_path / "whole"), **learned, **common)
    stopped = {"callbacks": [Stop()], "run_dir": str(tmp_path / "stopped"), "data": table()}
    with pytest.raises(Interrupted):
        fine_tune(**stopped, **learned, **common)
    resumed = fine_tune(**stopped, **learned, **common)
    assert resumed.steps == whole.steps == 8
    (adapter, metrics), (adapter_2, _) = ending(tmp_path / "whole"), ending(tmp_path / "stopped")
    assert largest_difference(adapter, adapter_2) == 0.0
    assert metrics[-1]["loss/class"] < metrics[0]["loss/class"]
    settings = (tmp_path / "whole" / "settings.yaml").read_text()
    assert "class_temperature: 0.1" in settings


def test_labelled_texts_are_refused_if_nothing_can_be_learned(common: dict[str, Any], tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    with pytest.raises(SettingsError, match=r"data-\w+ has texts with a class: set --objective.class-weight above 0"):
        fine_tune(data=table(), run_dir=run_dir, **common)
    learned = common | {"objective": {"class_weight": 1}, "run_dir": run_dir}
    with pytest.raises(SettingsError, match="got 9 texts in 1 classes"):
        fine_tune(data=table().select(range(9)), **learned)
    with pytest.raises(SettingsError, match="got 3 texts in 3 classes"):
        fine_tune(data=table().select([0, 9, 18]), **learned)
    with pytest.raises(
        SettingsError, match=r"class_weight\): expected texts with a class \(--data.format labelled_text\)"
    ):
        fine_tune(data=[{"query": "a", "answer": "b"}], **learned)


def test_classes_of_two_datasets_are_never_compared() -> None:
    """Equal names in two datasets are different classes, and pairs are not negatives of classes."""
    sets = [
        LoadedSet("first", TEXTS[:12]),
        LoadedSet("pairs", [PositivePair("a", "b"), PositivePair("c", "d")]),
        LoadedSet("second", [LabelledText(text.text + "!", text.label) for text in TEXTS[:12]]),
        LoadedSet("more pairs", [PositivePair("e", "f")]),
    ]
    both = AngleObjective(class_weight=1.0)
    planner = BatchPlanner(tiny_encoder("llama"), Mixture(sets), [both] * 4, 1)
    batch = planner._batch(list(range(27)), 0)
    assert isinstance(batch.loss, MixedObjective)
    assert [part.pairs.tolist() for part in batch.loss.parts] == [[*range(12)], [12, 13, 26], [*range(14, 26)]]
    assert [part.share for part in batch.loss.parts] == [12 / 27, 3 / 27, 12 / 27]


def test_an_own_loss_gets_batches_with_the_classes() -> None:
    own = SumOfTerms(FunctionTerm("own", lambda embeddings, _: embeddings.sum()))
    assert checked_data([own], Mixture([LoadedSet("first", TEXTS)])).draws.classes[0] is not None


def test_a_mixture_with_pairs_trains(common: dict[str, Any], tmp_path: Path) -> None:
    pairs = [{"query": f"Dog {n} runs.", "answer": f"Animal {n} moves."} for n in range(12)]
    classes = {"path": table(), "objective": {"class_weight": 1, "in_batch_weight": 0}}
    fine_tune(data={"sets": [classes, {"path": pairs}]}, run_dir=str(tmp_path / "run"), **common)
    metrics = read_metrics(tmp_path / "run")
    assert {"loss/class", "loss/in_batch"} <= set().union(*metrics)
    both = {"sets": [{"path": table()}, {"path": pairs}]}
    objective = {"class_weight": 1, "in_batch_weight": 0}
    with pytest.raises(SettingsError, match=r"data2\S* has no classes, and class_weight is the only weight"):
        fine_tune(data=both, objective=objective, run_dir=str(tmp_path / "alone"), **common)


def test_the_order_of_pretraining_does_not_depend_on_classes() -> None:
    """Texts of a class would be negatives of each other in SimCSE."""
    texts = [LabelledText(f"text {n}", str(n % 2)) for n in range(40)]
    batches = Mixture.of(texts).without_classes().draws.epoch(0, 8, seed=1)
    plain = Mixture.of([PositivePair(text.text, text.text) for text in texts]).draws.epoch(0, 8, seed=1)
    assert list(batches) == list(plain) != list(Mixture.of(texts).draws.epoch(0, 8, seed=1))


def main(folder: Path) -> None:
    """Train in one and two processes, with kept and with recomputed graphs, and compare the adapters."""
    import distributed_runs
    import forked
    from runs import use_float64_norm

    use_float64_norm()
    save_tiny_base("llama", folder / "base")
    for graph_tokens in (10**6, 0):
        for world in (1, 2):
            name = f"{world} processes, {graph_tokens} tokens kept"
            settings = distributed_runs.settings(folder, name, max_steps=3, graph_tokens=graph_tokens)

            def work(_: int, settings=settings, world=world) -> None:  # type: ignore[no-untyped-def]
                distributed_runs.train(settings, world, TEXTS, dtype=torch.float64, loss=LOSS)

            forked.run(world, work, folder / "log")
            one = folder / f"1 processes, {10**6} tokens kept"
            distributed_runs.check_close(name, one, settings.run_path, losses=1e-9, weights=1e-9)
            adapter, metrics = ending(settings.run_path)
            assert metrics[-1]["loss/class"] > 0
            assert max(float(tensor.abs().max()) for key, tensor in adapter.items() if "lora_B" in key) > 1e-3


if __name__ == "__main__":
    main(Path(sys.argv[1]))

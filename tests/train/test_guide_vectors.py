"""Vectors of the training texts by a guide and a teacher: computed once, stored, and given to the losses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import outcome, read_metrics
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import save_tiny_base, tiny_encoder
from torch.testing import assert_close

from angle_llm.config import NestedSettings, TrainSettings
from angle_llm.data.formats import Group, PositivePair, Triple
from angle_llm.data.mixture import LoadedSet, Mixture
from angle_llm.io import FolderError
from angle_llm.losses import AngleObjective
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.resumable import ResumableFolder
from angle_llm.run import fine_tune
from angle_llm.settings_io import SettingsError, settings_from_dict
from angle_llm.train import guide_vectors as module
from angle_llm.train.batches import BatchPlanner, make_losses
from angle_llm.train.distributed import Processes
from angle_llm.train.guide_vectors import guide_vectors
from angle_llm.train.memory import TokenBudget
from angle_llm.train.step import relations

EXAMPLES = [
    Triple("Who eats?", "A man eats.", "Nobody eats."),
    PositivePair("A man eats.", "Someone eats."),  # a document above
    Group("Who runs?", ("A dog runs.", "A man runs."), ("Nobody runs.",), (0.9, 0.7, 0.1)),
]


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    """An encoder with two prompts."""
    prompts = {"query": "plain", "document": "summarize_one_word"}
    encoder = tiny_encoder("llama", prompt=prompts, base=str(save_tiny_base("llama", tmp_path / "guide base", seed=3)))
    encoder.model.backbone = tiny_encoder("llama", seed=3).model.backbone
    encoder.save_pretrained(tmp_path / "guide")
    return tmp_path / "guide"


def settings(**objective: Any) -> TrainSettings:
    return settings_from_dict(TrainSettings, {"objective": objective}, where="test")


def guided(path: Path, **more: Any) -> TrainSettings:
    return settings(false_negatives={"margin": 0.1, "guide": str(path)}, **more)


def test_each_text_gets_the_vector_of_its_side(guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the relation of a batch, in which two texts are one row."""
    monkeypatch.setattr(module, "TEXTS_AT_ONCE", 4)
    mixture = Mixture([LoadedSet("all", EXAMPLES)])
    found = guide_vectors(guided(guide), mixture, tmp_path / "run", Processes())
    student = tiny_encoder("bert", max_length=4)  # cuts texts, so that some have equal ids
    planner = BatchPlanner(student, mixture, [AngleObjective()], 1, TokenBudget(60, 10**9), found)
    ((_, (group,)),) = planner.steps(iter([(0, [[0, 1, 2]])]))
    (batch,) = group.batches
    one = SentenceEncoder.from_pretrained(guide, device="cpu")
    queries = {"Who eats?", "A man eats.", "Who runs?"}  # the first texts of pairs
    expected = {
        text: one.for_side("query" if text in queries else "document").encode([text])[0] for text in batch.batch.texts
    }
    rows = batch.vectors["guide"]
    # Rounding of float32, in micro-batches of other texts.
    assert_close(rows, torch.from_numpy(np.stack([expected[text] for text in batch.batch.texts])), rtol=1e-5, atol=1e-5)
    ((of_plan, relation),) = relations(group.plan, group.batches)
    assert relation.guide is not None
    assert len(relation.guide) == len(of_plan) < len(rows)
    row_of = [list(of_plan).index(row) for row in group.plan.row_of]
    for row in range(len(of_plan)):
        assert torch.equal(relation.guide[row], rows[row_of.index(row)])


def test_vectors_are_computed_once_for_an_encoder_and_examples(
    guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = SentenceEncoder.from_pretrained
    monkeypatch.setattr(
        SentenceEncoder, "from_pretrained", lambda path, **more: (loaded.append(path), load(path, **more))[1]
    )

    def digest(examples: Any) -> str:
        mixture = Mixture([LoadedSet("all", examples)])
        return guide_vectors(guided(guide), mixture, tmp_path / "run", Processes())["guide"].digest

    first = digest(EXAMPLES)
    assert digest(EXAMPLES) == first
    assert len(loaded) == 1
    assert digest(EXAMPLES[:2]) != first
    (guide / "model.safetensors").touch()  # perhaps other weights
    digest(EXAMPLES[:2])
    assert len(loaded) == 3
    assert not list((tmp_path / "run" / "vectors").glob(".*"))


def test_vectors_that_were_interrupted_are_completed(
    guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TEXTS_AT_ONCE", 4)
    mixture, folder = Mixture([LoadedSet("all", EXAMPLES)]), tmp_path / "run" / "vectors"
    whole = guide_vectors(guided(guide), mixture, tmp_path / "other", Processes())["guide"].digest
    written: list[str] = []
    write = ResumableFolder.write

    def stops(self: ResumableFolder, name: str, *more: Any) -> None:
        if len(written) == 1:
            raise KeyboardInterrupt
        write(self, name, *more)
        written.append(name)

    monkeypatch.setattr(ResumableFolder, "write", stops)
    with pytest.raises(KeyboardInterrupt):
        guide_vectors(guided(guide), mixture, tmp_path / "run", Processes())
    assert [path.name for path in folder.iterdir()] == ["guide.parts"]
    shutil.copytree(folder / "guide.parts", tmp_path / "run of others" / "vectors" / "guide.parts")
    written[:] = []
    monkeypatch.setattr(
        ResumableFolder, "write", lambda self, name, *more: (written.append(name), write(self, name, *more))
    )
    assert guide_vectors(guided(guide), mixture, tmp_path / "run", Processes())["guide"].digest == whole
    assert written == ["part-000000000004", "part-000000000008"]
    assert [path.name for path in folder.iterdir()] == ["guide"]
    written[:] = []
    guide_vectors(guided(guide), Mixture([LoadedSet("all", EXAMPLES[:2])]), tmp_path / "run of others", Processes())
    assert written == ["part-000000000000", "part-000000000004"], "other examples: nothing is reused"


def test_a_run_with_a_guide_and_a_teacher_resumes(guide: Path, tmp_path: Path) -> None:
    """The vectors of both are part of the identity of the run."""
    groups = [
        {"query": f"Who eats {n}?", "positives": [f"A man eats {n}."], "negatives": ["Nobody."]} for n in range(6)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, groups)))
    values: dict[str, Any] = {
        "run_dir": str(tmp_path / "whole"),
        "resume": "auto",
        "model": {"path": str(save_tiny_base("llama", tmp_path / "base")), "dtype": "float32"},
        "lora": {"rank": 2},
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "objective": {
            "contrastive_form": "forward",
            "false_negatives": {"margin": 0.0, "scope": "all", "guide": str(guide)},
            "teacher": str(guide),
            "teacher_vector_weight": 0.5,
        },
        "nested": {"dimensions": [4]},
        "batch_size": 3,
        "epochs": 2,
        "checkpoint": {"every_steps": 1},
    }
    whole = settings_from_dict(TrainSettings, values, where="test")
    fine_tune(whole)
    assert {"loss/in_batch", "loss/teacher_vector"} <= read_metrics(whole.run_path)[-1].keys()
    expected = outcome(whole.run_path)
    (whole.run_path / "result.json").unlink()
    shutil.rmtree(max((whole.run_path / "checkpoints").glob("step-*")))
    fine_tune(whole)
    assert outcome(whole.run_path) == expected
    (whole.run_path / "result.json").unlink()
    vectors = np.load(whole.run_path / "vectors/guide/vectors.npy", mmap_mode="r+")
    vectors[0] += 1
    vectors.flush()
    with pytest.raises(FolderError, match="vectors of guide"):
        fine_tune(whole)


def test_a_projection_is_trained_and_not_saved(tmp_path: Path) -> None:
    """The teacher has 20 dimensions, the student 32."""
    save_tiny_base("bert", tmp_path / "base")
    tiny_encoder("bert", seed=3).truncated(dimensions=20).save_pretrained(tmp_path / "teacher")
    data = tmp_path / "pairs.jsonl"
    data.write_text(
        "".join(json.dumps({"query": f"Who is {n}?", "positive": f"{n} is a number."}) + "\n" for n in range(8))
    )
    run = settings_from_dict(TrainSettings, {
        "run_dir": str(tmp_path / "run"), "epochs": 10, "batch_size": 8, "lora": {"rank": 0},
        "model": {"path": str(tmp_path / "base"), "dtype": "float32"},
        "data": {"path": str(data), "format": "positive_pair"}, "optimizer": {"learning_rate": 0.01},
        "checkpoint": {"every_steps": 5},
        "objective": {
            "in_batch_weight": 0, "teacher": str(tmp_path / "teacher"), "teacher_vector_weight": 1,
            "teacher_projection": True,
        },
    }, where="test")  # fmt: skip
    model = fine_tune(run)
    losses = [line["loss"] for line in read_metrics(run.run_path)]
    assert losses[0] > 0.5, "a random projection"
    assert losses[-1] < 0.4 * losses[0]
    with safe_open(run.run_path / "checkpoints/step-000010/weights.safetensors", "pt") as checkpoint:
        assert checkpoint.get_tensor("projection.weight").shape == (20, 32)
    assert not [name for file in model.rglob("*.safetensors") for name in load_file(file) if "projection" in name]
    assert SentenceEncoder.from_pretrained(model, device="cpu").encode(["Who is 3?"]).shape == (1, 32)
    expected = outcome(run.run_path)
    (run.run_path / "result.json").unlink()
    shutil.rmtree(run.run_path / "checkpoints/step-000010")
    fine_tune(replace(run, resume="auto"))
    assert outcome(run.run_path) == expected


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"false_negatives": {"guide": "g"}}, "expected a margin or a ratio too"),
        ({"teacher_vector_weight": 1.0}, "expected objective.teacher too"),
        ({"teacher": "t"}, "expected objective.teacher_vector_weight above 0 too"),
        ({"teacher_projection": True}, "teacher_projection: expected objective.teacher too"),
    ],
)
def test_half_of_a_setting_is_refused(objective: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_losses(settings(**objective))


def test_a_projection_is_refused_with_nested_vectors_and_for_one_dataset() -> None:
    taught = settings(teacher="t", teacher_vector_weight=1.0, teacher_projection=True)
    with pytest.raises(SettingsError, match=r"expected no nested\.layers"):
        make_losses(replace(taught, nested=NestedSettings(dimensions=[8])))
    sets = [{"path": "a.jsonl", "objective": {"teacher_projection": False}}]
    mixed = settings_from_dict(TrainSettings, {"data": {"sets": sets}}, where="test")
    with pytest.raises(SettingsError, match=r"a\.jsonl: expected teacher_projection True.* got False"):
        make_losses(replace(taught, data=mixed.data))


def test_a_teacher_of_one_dataset_is_refused() -> None:
    plain = settings(teacher="t", teacher_vector_weight=1.0)
    sets = [{"path": "a.jsonl", "objective": {"teacher": "u"}}]
    mixed = settings_from_dict(TrainSettings, {"data": {"sets": sets}}, where="test")
    with pytest.raises(SettingsError, match=r"objective of a\.jsonl: expected no teacher, got 'u'"):
        make_losses(replace(plain, data=mixed.data))

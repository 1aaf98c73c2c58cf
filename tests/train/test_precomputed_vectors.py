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
from tiny import save_tiny_base, tiny_encoder
from torch.testing import assert_close

from angle_llm import fine_tune
from angle_llm.data.formats import Group, PositivePair, Triple
from angle_llm.data.mixture import LoadedSet, Mixture
from angle_llm.io import FolderError
from angle_llm.losses import AngleObjective
from angle_llm.model import text_vectors as module
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.source.resolve import resolve_model
from angle_llm.model.text_vectors import PrecomputedVectors, precompute_vectors
from angle_llm.resumable_folder import ResumableFolder
from angle_llm.settings.parsing import SettingsError, settings_from_dict
from angle_llm.settings.train import TrainSettings
from angle_llm.train.batches import BatchPlanner
from angle_llm.train.distributed import Processes
from angle_llm.train.objectives import make_losses
from angle_llm.train.step import relations
from angle_llm.train.token_budget import TokenBudget

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


def stored(
    guide: Path, data: Mixture, run_folder: Path, processes: Processes | None = None
) -> dict[str, PrecomputedVectors]:
    processes = processes or Processes()
    encoders = {"guide": resolve_model(str(guide))}
    return precompute_vectors(encoders, data, run_folder, processes.device, processes.from_main)


def test_each_text_gets_the_vector_of_its_side(guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the relation of a batch, in which two texts are one row."""
    monkeypatch.setattr(module, "TEXTS_AT_ONCE", 4)
    mixture = Mixture([LoadedSet("all", EXAMPLES)])
    found = stored(guide, mixture, tmp_path / "run")
    student = tiny_encoder("bert", max_length=4)  # cuts texts, so that some have equal ids
    planner = BatchPlanner(student, mixture, [AngleObjective()], 1, found)
    ((_, (group,)),) = planner.steps(iter([(0, [[0, 1, 2]])]), TokenBudget(60, 10**9))
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
        return stored(guide, mixture, tmp_path / "run")["guide"].digest

    first = digest(EXAMPLES)
    assert digest(EXAMPLES) == first
    assert len(loaded) == 1
    assert digest(EXAMPLES[:2]) != first
    (guide / "model.safetensors").touch()  # perhaps other weights
    digest(EXAMPLES[:2])
    assert len(loaded) == 3
    assert not list((tmp_path / "run" / "vectors").glob(".*"))


def test_vectors_are_computed_on_the_device_of_the_run_under_zero_3(
    guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the weights of the trained model are loaded on the CPU, but a guide is not partitioned."""
    devices: list[torch.device] = []

    def load(*_: Any, device: torch.device) -> Any:
        devices.append(device)
        raise InterruptedError

    monkeypatch.setattr(SentenceEncoder, "from_pretrained", load)
    monkeypatch.setattr(Processes, "zero_stage", 3)
    run = Processes(device=torch.device("cuda", 0))
    mixture = Mixture([LoadedSet("all", EXAMPLES)])
    with pytest.raises(InterruptedError):
        stored(guide, mixture, tmp_path / "run", run)
    assert run.load_device == torch.device("cpu")
    assert devices == [run.device]


def test_vectors_that_were_interrupted_are_completed(
    guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TEXTS_AT_ONCE", 4)
    mixture, folder = Mixture([LoadedSet("all", EXAMPLES)]), tmp_path / "run" / "vectors"
    whole = stored(guide, mixture, tmp_path / "other")["guide"].digest
    written: list[str] = []
    write = ResumableFolder.write

    def stops(self: ResumableFolder, name: str, *more: Any) -> None:
        if len(written) == 1:
            raise KeyboardInterrupt
        write(self, name, *more)
        written.append(name)

    monkeypatch.setattr(ResumableFolder, "write", stops)
    with pytest.raises(KeyboardInterrupt):
        stored(guide, mixture, tmp_path / "run")
    assert [path.name for path in folder.iterdir()] == ["guide.parts"]
    shutil.copytree(folder / "guide.parts", tmp_path / "run of others" / "vectors" / "guide.parts")
    written[:] = []
    monkeypatch.setattr(
        ResumableFolder, "write", lambda self, name, *more: (written.append(name), write(self, name, *more))
    )
    assert stored(guide, mixture, tmp_path / "run")["guide"].digest == whole
    assert written == ["part-000000000004", "part-000000000008"]
    assert [path.name for path in folder.iterdir()] == ["guide"]
    written[:] = []
    stored(guide, Mixture([LoadedSet("all", EXAMPLES[:2])]), tmp_path / "run of others")
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
    (guide / "model.safetensors").touch()  # as on another machine
    written = (whole.run_path / "vectors/guide/vectors.npy").stat().st_mtime_ns
    fine_tune(whole)
    assert (whole.run_path / "vectors/guide/vectors.npy").stat().st_mtime_ns == written, (
        "a resumed run computes no vectors"
    )
    assert outcome(whole.run_path) == expected
    (whole.run_path / "result.json").unlink()
    before = (whole.run_path / "vectors/guide/vectors.npy").read_bytes()
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, groups[1:])))
    with pytest.raises(FolderError, match="examples"):
        fine_tune(whole)
    assert (whole.run_path / "vectors/guide/vectors.npy").read_bytes() == before, "a refused run changes no file"
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, groups)))
    vectors = np.load(whole.run_path / "vectors/guide/vectors.npy", mmap_mode="r+")
    vectors[0] += 1
    vectors.flush()
    with pytest.raises(FolderError, match="vectors of guide"):
        fine_tune(whole)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"false_negatives": {"guide": "g"}}, "margin or a ratio"),
        ({"teacher_vector_weight": 1.0}, r"--objective\.teacher-vector-weight: expected --objective\.teacher too"),
        (
            {"teacher_similarity_weight": 1.0},
            r"--objective\.teacher-similarity-weight: expected --objective\.teacher too",
        ),
        ({"teacher": "t"}, r"--objective\.teacher-vector-weight or --objective\.teacher-similarity-weight"),
    ],
)
def test_half_of_a_setting_is_refused(objective: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_losses(settings(**objective))


def test_a_teacher_of_one_dataset_is_refused() -> None:
    plain = settings(teacher="t", teacher_vector_weight=1.0)
    sets = [{"path": "a.jsonl", "objective": {"teacher": "u"}}]
    mixed = settings_from_dict(TrainSettings, {"data": {"sets": sets}}, where="test")
    with pytest.raises(SettingsError, match=r"objective of a\.jsonl: expected no teacher, got 'u'"):
        make_losses(replace(plain, data=mixed.data))

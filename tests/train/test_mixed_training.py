"""Training on several sets: a step is that of its batch taken apart by hand; logs tell what came from where."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from test_spread import program
from tiny import save_tiny_base, tiny_encoder

from angle_llm.config import TrainSettings, settings_from_dict
from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import PositivePair, ScoredPair
from angle_llm.data.mixture import LoadedSet, Mixture
from angle_llm.losses import AngleObjective, MixedObjective
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.run import fine_tune
from angle_llm.train.batches import BatchPlanner, PlannedBatch, Tokens, Wordings
from angle_llm.train.memory import TokenBudget
from angle_llm.train.step import boundary_step

SCORED = [ScoredPair(f"A man number {n} eats.", f"Someone eats {n} things.", n / 10) for n in range(11)]
POSITIVE = [PositivePair(f"How do I open door {n}?", f"Turn the key {n} times.") for n in range(9)]
"""With one text of the other set, under another prompt."""
POSITIVE.append(PositivePair(SCORED[0].left, "He eats."))


def planned_batch(
    encoder: SentenceEncoder,
    sets: list[LoadedSet],
    objectives: list[AngleObjective],
    indices: list[int],
    graph_tokens: int = 0,
) -> PlannedBatch:
    data = Mixture(sets)
    wordings = Wordings(encoder, data)
    tokens = Tokens(wordings, TextBatch.from_examples([]))
    planner = BatchPlanner(encoder, tokens, wordings, data, objectives, 1, TokenBudget(40, graph_tokens))
    ((_, (planned,)),) = planner.all(iter([(0, [indices])]))
    return planned


@pytest.mark.parametrize("graph_tokens", [0, 10_000])
def test_a_step_on_a_mixed_batch_is_the_sum_of_its_sets_steps(graph_tokens: int) -> None:
    torch.manual_seed(0)
    encoder = tiny_encoder("opt", torch.float64)
    sets = [LoadedSet("scored", SCORED, prompt="plain"), LoadedSet("positive", POSITIVE)]
    objectives = [AngleObjective(cosine_weight=1, in_batch_weight=0), AngleObjective(in_batch_weight=2)]
    planned = planned_batch(encoder, sets, objectives, [0, 12, 5, 20, 14, 9, 15], graph_tokens)
    assert planned.sets == {"scored": 3, "positive": 4}
    assert len(planned.batch.texts) == 14  # the text of both sets is worded in two ways
    encoder.model.eval()  # without dropout, whose masks would differ
    value = boundary_step(encoder.model, planned.plan, planned.batch, planned.objective, graph_tokens=graph_tokens)
    together = {
        name: weight.grad.clone() for name, weight in encoder.model.named_parameters() if weight.grad is not None
    }

    encoder.model.zero_grad()
    losses = []
    for number, (some, share) in enumerate([([0, 5, 9], 3 / 7), ([12, 20, 14, 15], 4 / 7)]):
        worded = encoder.with_prompt("plain") if number == 0 else encoder
        batch = TextBatch.from_examples([Mixture(sets)[index] for index in some])
        plan = worded.plan(batch.texts, 40)
        step = boundary_step(encoder.model, plan, batch, objectives[number], graph_tokens=graph_tokens, share=share)
        losses.append(share * step.loss)
    assert value.loss == pytest.approx(sum(losses), rel=1e-12)
    assert together
    for name, weight in encoder.model.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(together[name], weight.grad, rtol=1e-9, atol=1e-12)  # sums of other order


def test_sets_with_the_same_objective_are_one_anothers_negatives() -> None:
    encoder = tiny_encoder("llama")
    sets = [LoadedSet("a", POSITIVE[:5]), LoadedSet("b", POSITIVE[5:])]
    objective = AngleObjective()
    assert planned_batch(encoder, sets, [objective, AngleObjective()], [0, 7]).objective == objective


def test_the_same_text_under_two_prompts_is_no_negative_of_itself() -> None:
    encoder = tiny_encoder("llama")
    sets = [LoadedSet("a", POSITIVE[:2]), LoadedSet("b", POSITIVE[:2], prompt="plain")]
    objective = planned_batch(encoder, sets, [AngleObjective()] * 2, [0, 3]).objective
    assert isinstance(objective, MixedObjective)
    assert [(part.share, part.pairs.tolist()) for part in objective.parts] == [(0.5, [0]), (0.5, [1])]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run on three sets, the last of them named by a list of its own format."""
    rows = [{"text1": one.left, "text2": one.right, "score": one.score * 5} for one in SCORED[:10]]
    (tmp_path / "scored.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = [{"query": one.left, "answer": one.right} for one in POSITIVE]
    (tmp_path / "pairs.jsonl").write_text("\n".join([*map(json.dumps, pairs), '{"query": 5}']))
    values = {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(save_tiny_base("llama", tmp_path / "base")), "dtype": "float32"},
        "lora": {"rank": 2, "alpha": 2},
        "data": {
            "batches": "by_set",
            "sets": [
                {
                    "path": str(tmp_path / "scored.jsonl"),
                    "score_range": [0, 5],
                    "weight": 2,
                    "prompt": "plain",
                    "objective": {"cosine_weight": 1, "in_batch_weight": 0},
                },
                {"path": str(tmp_path / "pairs.jsonl"), "on_bad_row": "skip"},
            ],
        },
        "batch_size": 4,
        "accumulation": 2,
        "epochs": 2,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "config.yaml"


@pytest.mark.parametrize("batches", ["by_set", "mixed"])
def test_a_run_on_a_mixture_tells_what_came_from_where(
    batches: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load(config.read_text())
    values["data"]["batches"] = batches
    settings = settings_from_dict(TrainSettings, values, where="test")
    fine_tune(settings)
    told = capsys.readouterr().out
    assert "10 examples from 10 of 10 rows as scored_pair" in told
    assert "as scored: 20 of an epoch's 30 examples (66.7%), prompt plain, cosine_weight 1, in_batch_weight 0" in told
    assert "10 examples from 10 of 11 rows as positive_pair" in told
    assert json.loads((tmp_path / "run" / "rejected.jsonl").read_text())["line"] == 11
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 8
    for epoch in (0, 1):
        of = {
            name: sum(step[f"examples/{name}"] for step in steps if step["epoch"] == epoch)
            for name in ("scored", "pairs")
        }
        assert of == {"scored": 20, "pairs": 10}
    assert all(torch.isfinite(torch.tensor(step["loss"])) for step in steps)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"objective": {"cosine_wieght": 1}}, "unknown setting 'cosine_wieght'"),
        ({"objective": {"in_batch_weight": 0}}, "greater than 0"),
        ({"prompt": "palin"}, "palin"),
    ],
)
def test_what_a_set_says_wrongly_shows_before_anything_is_read(
    own: dict[str, object], message: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("angle_llm.data.mixture.load_mixture", lambda *_: pytest.fail("it was read"))
    values = yaml.safe_load(config.read_text())
    values["data"]["sets"][0] |= own
    settings = settings_from_dict(TrainSettings, values, where="test")
    with pytest.raises(ValueError, match=message):
        fine_tune(settings)


def test_processes_see_the_same_batches_of_a_mixture_on_disk(config: Path, tmp_path: Path) -> None:
    printed = program("mixtures.py", str(tmp_path), str(config))
    assert "2 processes: losses differ by" in printed
    assert "3 processes: losses differ by" in printed

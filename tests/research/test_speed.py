"""`eval/speed.py` with angle_llm alone: the work of its worker, the watched processes, the report."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import save_tiny_base

pytest.importorskip("matplotlib")
import speed
from report import draw_speed
from speed_peers import worker_ours
from speed_peers.comparison import PeerComparison
from speed_peers.job import Job
from speed_peers.processes import GIB, OURS, Run, watched

TEMPLATE = 'Summarize sentence "{text}" in one word:"'
TRIPLES = [
    ["A man eats.", "Someone eats.", "Nobody eats."],
    ["A dog runs.", "An animal moves.", "A dog sleeps."],
    ["A girl sings.", "A child makes music.", "A girl is silent."],
    ["Two men play chess.", "People play a game.", "Two men swim."],
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A job on a tiny LLaMA, prepared as for all libraries."""
    folder = tmp_path_factory.mktemp("speed")
    with torch.random.fork_rng():
        worker_ours.prepare(str(save_tiny_base("llama", folder / "source")), folder / "model", folder / "adapter", 4)
    text = {
        "model": str(folder / "model"),
        "template": TEMPLATE,
        "pooling": "last",
        "max_length": 64,
        "dtype": "float32",
    }
    lora = {"adapter": str(folder / "adapter"), "rank": 4, "alpha": 8, "learning_rate": 0.05}
    return {**text, **lora, "micro_batch_tokens": 512, "graph_tokens": 16384, "batch": 2, "threads": 1, "steps": 2}


def trained(job: dict[str, Any], **changes: Any) -> dict[str, Any]:
    with torch.random.fork_rng():
        return worker_ours.train(Job(**job | {"triples": TRIPLES} | changes))


def test_the_first_loss_is_the_cross_entropy_over_all_positives_and_negatives(job: dict[str, Any]) -> None:
    """As sentence-transformers and angle-emb define it, on the rows of the untrained encoder."""
    answer = trained(job)
    encoder = worker_ours.open_encoder(Job(**job))
    anchors, positives, negatives = (encoder.encode([triple[side] for triple in TRIPLES[:2]]) for side in range(3))
    unit_PD = torch.nn.functional.normalize(torch.from_numpy(np.concatenate([positives, negatives])))
    cosine_AP = torch.nn.functional.normalize(torch.from_numpy(anchors)) @ unit_PD.T
    expected = torch.nn.functional.cross_entropy(cosine_AP / 0.05, torch.arange(2))
    assert answer["losses"][0] == pytest.approx(float(expected), abs=1e-5)
    assert len(answer["step_seconds"]) == 2
    assert answer["facts"].items() >= {"texts": 12, "unique_texts": 12, "too_long": 0}.items()
    same = {"triples": TRIPLES[:2] * 2}
    before, after = trained(job, **same)["losses"]
    assert after < before
    cached = trained(job, **same, micro_batch_tokens=16, graph_tokens=0)["losses"]
    assert cached == pytest.approx([before, after], abs=1e-4)


def python(tmp_path: Path, code: str, limit: int = 20 * GIB) -> tuple[int, Run]:
    return watched([sys.executable, "-c", code], {}, limit, tmp_path / "log")


def test_a_process_over_the_limit_is_killed(tmp_path: Path) -> None:
    greedy = "import time\nkept = []\nwhile True:\n    kept.append(b'x' * 5_000_000 + bytes(len(kept)))\n    time.sleep(0.01)"
    code, run = python(tmp_path, greedy, limit=150 * 2**20)
    assert (code, run.problem) == (-9, "killed at 0.1 GiB of memory")
    assert 150 * 2**20 < run.peak_bytes < GIB
    code, run = python(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (code, run.problem, set((tmp_path / "log").read_text().split())) == (3, None, {"out", "err"})


def comparison() -> PeerComparison:
    def runs(*seconds: float, **values: Any) -> list[Run]:
        return [Run(seconds=each, peak_bytes=2 * GIB, **values) for each in seconds]

    facts = {"texts": 48, "unique_texts": 40, "too_long": 2, "logical_tokens": 1000, "computed_tokens": 700}
    job = {"kind": "train", "model": "/home/me/model", "triples": TRIPLES}
    found = PeerComparison("Training · float32", "triples", 16, job, [])
    found.runs = {
        OURS: runs(2.0, 1.0, 4.0, losses=[1.5, 1.25], facts=facts),
        "angle-emb": runs(8.0, 5.0, 12.0, losses=[3.35, 1.26], cosine_min=0.7, other_cores=0.97),
        "sentence-transformers": [Run("killed at 20.0 GiB of memory")],
    }
    return found


def test_the_report_has_ratios_losses_and_warnings(tmp_path: Path) -> None:
    text = " ".join(comparison().report().split())
    for note in (
        # Ratios are taken repetition by repetition: 8/2, 5/1, 12/4.
        "angle-emb 8.00 s, 2.00 per s, 2.00 GiB, 4.00 times angle_llm, least 3.00, most 5.00, cosine 0.700000",
        "angle_llm losses 1.500000, 1.250000",
        "sentence-transformers: killed at 20.0 GiB",
        "NOT THE SAME WORK: the first loss of angle-emb is 3.3500, of angle_llm 1.5000.",
        "NOT THE SAME WORK: a vector of angle-emb has cosine 0.7000",
        "DISTURBED: other programs used up to 1.0 cores while angle-emb ran",
        "48 texts, 40 of them unique.",
        "2 texts are too long",
        "angle_llm computed 700 of 1,000 tokens.",
    ):
        assert note in text
    settings = speed.SpeedSettings(json=Path("/home/me/a.json"), data="/home/me/nli.jsonl")
    content = json.loads(json.dumps(speed.results([comparison()], settings), allow_nan=False))
    assert "/home/me" not in json.dumps(content)
    assert content["scenarios"][0]["summary"]["angle-emb"]["ratio"] == 4.0
    assert content["scenarios"][0]["summary"]["sentence-transformers"] is None
    draw_speed(content, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 1000


@pytest.mark.slow  # eight processes
def test_the_whole_command_with_a_library_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_base("llama", tmp_path / "base")
    monkeypatch.setattr(speed, "ensure_environment", lambda name, workdir: Path(sys.executable))
    settings = speed.SpeedSettings(
        peers=("angle-emb",), dtype=("float32",), max_length=(64,), batch=(2,), steps=2, repetitions=2, limit_texts=6,
        model=str(tmp_path / "base"), max_load=99, workdir=tmp_path / "bench", json=tmp_path / "speed.json", encode=True,
    )  # fmt: skip
    comparisons = speed.main(settings)
    assert [each.title.split(", ")[-1] for each in comparisons][:1] == ["with the prompt"]
    assert [len(comparisons[0].runs[library]) for library in (OURS, "angle-emb")] == [2, 1], (
        "a failed library is not repeated"
    )
    assert not any(run.problem for each in comparisons for run in each.runs[OURS])
    assert "No module named 'angle_emb'" in capsys.readouterr().out
    content = json.loads((tmp_path / "speed.json").read_text())
    assert content["packages"][OURS]["torch"]
    assert {path.name for path in (tmp_path / "bench").iterdir()} == {".gitignore", "logs", "models"}

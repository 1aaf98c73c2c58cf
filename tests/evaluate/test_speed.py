"""`eval/speed.py` without its peers: what is asked of workers, how they are watched, what is made of their answers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import save_tiny_base, tiny_encoder

EVAL = Path(__file__).parents[2] / "eval"
sys.path.insert(0, str(EVAL))

import speed  # noqa: E402
from speed_peers import comparisons, environments, report, watch, worker_ours, workers  # noqa: E402
from speed_peers.comparisons import Comparison, SpeedSettings  # noqa: E402
from speed_peers.job import EncodeJob, TrainJob, adapter_key, load_start, read_job, serve, write_job  # noqa: E402
from speed_peers.report import OURS, Run, Scenario  # noqa: E402

TEMPLATE = 'Summarize sentence "{text}" in one word:"'
TRIPLES = [
    ["A man eats.", "Someone eats.", "Nobody eats."],
    ["A dog runs.", "An animal moves.", "A dog sleeps."],
    ["A girl sings.", "A child makes music.", "A girl is silent."],
    ["Two men play chess.", "People play a game.", "Two men swim."],
]
GIB = 2**30


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny LLaMA and the start of an adapter, prepared as for all libraries."""
    folder = tmp_path_factory.mktemp("speed")
    source = save_tiny_base("llama", folder / "source")
    model, adapter = folder / "model", folder / "adapter.safetensors"
    with torch.random.fork_rng():
        worker_ours.prepare(str(source), model, adapter, rank=4)
    return model, adapter


def train_job(base: tuple[Path, Path], **changes: Any) -> TrainJob:
    job = TrainJob(
        model=str(base[0]),
        adapter=str(base[1]),
        dtype="float32",
        max_length=64,
        template=TEMPLATE,
        rank=4,
        alpha=8,
        batch=2,
        steps=2,
        learning_rate=1e-3,
        triples=TRIPLES,
        micro_batch_tokens=512,
        graph_tokens=16384,
        threads=torch.get_num_threads(),
    )
    return replace(job, **changes)


def encode_job(base: tuple[Path, Path], **changes: Any) -> EncodeJob:
    texts = [text for triple in TRIPLES[:2] for text in triple]
    job = EncodeJob(str(base[0]), "float32", 64, TEMPLATE, "last", 4, texts, torch.get_num_threads())
    return replace(job, **changes)


def answer_of(job: TrainJob | EncodeJob, folder: Path) -> dict[str, Any]:
    """Our worker, run in this process."""
    write_job(folder / "job.json", job)
    with torch.random.fork_rng():
        serve(worker_ours.train, worker_ours.encode, [str(folder / "job.json"), str(folder)])
    answer: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return answer


# ---------------------------------------------------------------------------------------------- our worker


def test_our_worker_trains(base: tuple[Path, Path], tmp_path: Path) -> None:
    answer = answer_of(train_job(base), tmp_path)
    assert len(answer["step_seconds"]) == len(answer["losses"]) == 2
    assert all(seconds > 0 for seconds in answer["step_seconds"])
    assert answer["peak_bytes"] > 50 * 2**20
    assert "torch" in answer["packages"]
    assert answer["facts"]["texts"] == answer["facts"]["unique_texts"] == 12
    assert answer["facts"]["too_long"] == 0
    assert answer["facts"]["computed_tokens"] > 0


def test_the_first_loss_is_the_cross_entropy_of_each_anchor_against_all_positives_and_negatives(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    """As sentence-transformers and angle-emb define it, written out over the untrained encoder's rows."""
    (first, _) = answer_of(train_job(base), tmp_path)["losses"]
    encoder = worker_ours.open_encoder(str(base[0]), TEMPLATE, "last", 64, "float32")
    anchors, positives, negatives = (encoder.encode([triple[side] for triple in TRIPLES[:2]]) for side in range(3))
    unit_PD = torch.nn.functional.normalize(torch.from_numpy(np.concatenate([positives, negatives])))
    cosine_AP = torch.nn.functional.normalize(torch.from_numpy(anchors)) @ unit_PD.T
    expected = torch.nn.functional.cross_entropy(cosine_AP / 0.05, torch.arange(2))
    assert first == pytest.approx(float(expected), abs=1e-5)


def test_steps_learn_and_small_limits_change_nothing(base: tuple[Path, Path], tmp_path: Path) -> None:
    job = train_job(base, triples=TRIPLES[:2] * 2, learning_rate=0.05)  # the same batch twice
    before, after = answer_of(job, tmp_path)["losses"]
    assert after < before
    cached = answer_of(replace(job, micro_batch_tokens=16, graph_tokens=0), tmp_path)["losses"]
    assert cached == pytest.approx([before, after], abs=1e-4)


def test_our_worker_encodes(base: tuple[Path, Path], tmp_path: Path) -> None:
    job = encode_job(base)
    answer = answer_of(job, tmp_path)
    rows = np.load(tmp_path / "rows.npy")
    encoder = worker_ours.open_encoder(str(base[0]), TEMPLATE, "last", 64, "float32")
    assert answer["seconds"] > 0
    assert rows.shape == (6, 32)
    np.testing.assert_allclose(rows, encoder.encode(job.texts), rtol=1e-5, atol=1e-6)


def test_texts_that_are_cut_are_counted(base: tuple[Path, Path], tmp_path: Path) -> None:
    long = encode_job(base, texts=["a short one", "word " * 60])
    assert answer_of(long, tmp_path)["facts"]["too_long"] == 1


def test_the_start_of_the_adapter_is_the_same_for_all(base: tuple[Path, Path]) -> None:
    assert adapter_key("0.model.layers.0.mlp.up_proj.lora_A.default.weight") == "layers.0.mlp.up_proj.lora_A.weight"
    ours = "backbone.base_model.model.layers.0.mlp.up_proj.lora_A.default.weight"
    assert adapter_key(ours) == "layers.0.mlp.up_proj.lora_A.weight"
    with pytest.raises(ValueError, match="another model or rank"):
        load_start(tiny_encoder("llama").model, str(base[1]))  # no adapter: its weights are not in the file
    frozen = tiny_encoder("llama").model.requires_grad_(False)
    with pytest.raises(ValueError, match="no place for"):
        load_start(frozen, str(base[1]))


# ---------------------------------------------------------------------------------------------- job files


@pytest.mark.parametrize("make", [train_job, encode_job])
def test_a_job_survives_its_file(make: Any, tmp_path: Path) -> None:
    job = make((tmp_path, tmp_path))
    write_job(tmp_path / "job.json", job)
    assert read_job(tmp_path / "job.json") == job
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]  # no temporary file is left


def test_a_job_with_other_fields_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    write_job(path, encode_job((tmp_path, tmp_path)))
    values = json.loads(path.read_text())
    del values["texts"]
    path.write_text(json.dumps({**values, "colour": "red"}))
    with pytest.raises(ValueError, match=r"colour.*texts"):
        read_job(path)


def test_peers_are_importable_by_name_and_need_nothing_of_ours() -> None:
    for worker in workers.WORKERS.values():
        source = (EVAL / "speed_peers" / f"{worker}.py").read_text()
        assert ("angle_llm" in source.split('"""')[2]) == (worker == "worker_ours")
    for shared in ("job", "trainer_clock"):
        assert "import angle_llm" not in (EVAL / "speed_peers" / f"{shared}.py").read_text()
    assert set(workers.WORKERS) == {OURS, *environments.REQUIREMENTS}


# ---------------------------------------------------------------------------------------------- the watch


def python(tmp_path: Path, code: str, limit_bytes: int = GIB) -> watch.Outcome:
    return watch.run_watched([sys.executable, "-c", code], env={}, limit_bytes=limit_bytes, log=tmp_path / "log")


def test_a_program_that_takes_too_much_memory_is_ended(tmp_path: Path) -> None:
    greedy = "import time\nkept = []\nwhile True:\n    kept.append(b'x' * 5_000_000 + bytes(len(kept)))\n    time.sleep(0.01)"
    outcome = python(tmp_path, greedy, limit_bytes=150 * 2**20)
    assert outcome.over_limit
    assert outcome.code == -9
    assert 150 * 2**20 < outcome.peak_bytes < GIB


def test_a_modest_program_runs_to_its_end(tmp_path: Path) -> None:
    outcome = python(tmp_path, "import sys; print('said'); print('loud', file=sys.stderr); sys.exit(3)")
    assert (outcome.code, outcome.over_limit) == (3, False)
    assert set((tmp_path / "log").read_text().split()) == {"said", "loud"}


def test_the_limit_is_what_the_machine_can_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "available_bytes", lambda: 3 * GIB)
    assert python(tmp_path, "pass", limit_bytes=20 * GIB).limit_bytes == 2.5 * GIB
    monkeypatch.setattr(watch, "available_bytes", lambda: None)
    assert python(tmp_path, "pass", limit_bytes=20 * GIB).limit_bytes == 20 * GIB


def test_work_of_other_programs_is_seen(tmp_path: Path) -> None:
    busy = "import time\nend = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass"
    other = subprocess.Popen([sys.executable, "-c", busy])
    disturbed = python(tmp_path, "import time; time.sleep(1)").other_cores
    other.wait()
    assert disturbed is None or disturbed > 0.3


@pytest.mark.skipif(watch.busy_seconds() is None, reason="the system does not tell")
def test_its_own_work_is_not_that_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "busy_seconds", watch._children_seconds)  # a machine on which nothing else runs
    assert python(tmp_path, "sum(range(20_000_000))").other_cores == 0


# ---------------------------------------------------------------------------------------------- environments


def test_an_environment_that_is_there_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "_run", lambda *_: pytest.fail("nothing is to be made"))
    folder = tmp_path / "environments" / "angle-emb"
    folder.mkdir(parents=True)
    (folder / "installed.json").write_text(json.dumps(environments.REQUIREMENTS["angle-emb"]))
    assert environments.ensure_environment("angle-emb", tmp_path).is_relative_to(folder)


def test_other_requirements_are_installed_anew_and_torch_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def record(command: list[str], _: str) -> None:
        commands.append(command)
        (tmp_path / "environments" / "angle-emb").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(environments, "_run", record)
    environments.ensure_environment("angle-emb", tmp_path)
    assert [command[1:3] for command in commands] == [["-m", "venv"], ["-m", "pip"], ["-m", "pip"]]
    assert commands[1][-1] == environments.TORCH
    assert "angle-emb==0.6.1" in commands[2]
    environments.ensure_environment("angle-emb", tmp_path)
    assert len(commands) == 3


def test_a_failed_installation_says_what_and_how_to_go_on() -> None:
    code = "import sys; sys.exit('no network')"
    with pytest.raises(
        environments.InstallationError, match=r"(?s)angle-emb.*no network.*--peers sentence-transformers"
    ):
        environments._run([sys.executable, "-c", code], "angle-emb")


# ---------------------------------------------------------------------------------------------- the report


def runs(*seconds: float | None, **values: Any) -> list[Run]:
    return [Run(seconds=each, peak_bytes=2 * GIB, **values) if each else Run("ended at 20.0 GiB") for each in seconds]


@pytest.fixture
def training() -> Scenario:
    facts = {"texts": 48, "unique_texts": 40, "too_long": 2, "logical_tokens": 1000, "computed_tokens": 700}
    return Scenario(
        "train",
        "Training · float32, 16 triples a step, at most 50 tokens",
        {"dtype": "float32"},
        "triples",
        16,
        {
            OURS: runs(2.0, 1.0, 4.0, losses=[1.5, 1.25], facts=facts),
            "angle-emb": runs(8.0, 5.0, 12.0, losses=[1.5, 1.26]),
            "sentence-transformers": runs(None),
        },
    )


def test_medians_and_ratios_are_taken_run_by_run(training: Scenario) -> None:
    ours, theirs = training.summary(OURS), training.summary("angle-emb")
    assert ours is not None
    assert theirs is not None
    assert (ours.seconds, ours.per_second, ours.peak_gib) == (2.0, 8.0, 2.0)
    assert (ours.ratio, ours.ratio_min, ours.ratio_max) == (1, 1, 1)
    assert (theirs.seconds, theirs.ratio, theirs.ratio_min, theirs.ratio_max) == (8.0, 4.0, 3.0, 5.0)
    assert training.summary("sentence-transformers") is None
    assert training.problem("sentence-transformers") == "ended at 20.0 GiB"


def test_without_a_figure_of_ours_there_is_no_ratio(training: Scenario) -> None:
    training.runs[OURS] = runs(None)
    theirs = training.summary("angle-emb")
    assert theirs is not None
    assert (theirs.seconds, theirs.ratio) == (8.0, None)
    assert "angle-emb" in report.scenario_report(training)


def test_the_first_step_does_not_count() -> None:
    assert report.step_time([100.0, 1.0, 3.0, 2.0]) == 2.0
    assert report.step_time([100.0]) == 100.0


def test_cosines_of_rows() -> None:
    rows = np.array([[1.0, 0.0], [0.0, 2.0]], dtype=np.float32)
    assert report.cosines(rows, 3 * rows) == pytest.approx((1.0, 1.0))
    assert report.cosines(rows, np.array([[1.0, 0.0], [1.0, 1.0]])) == pytest.approx((0.5**0.5, (1 + 0.5**0.5) / 2))
    with pytest.raises(ValueError, match="shape"):
        report.cosines(rows, rows[:1])


def test_the_report_shows_figures_losses_and_what_may_differ(training: Scenario) -> None:
    text = report.scenario_report(training)
    lines = text.splitlines()
    assert lines[0] == training.title
    theirs = next(line for line in lines if line.startswith("angle-emb"))
    assert theirs.split() == ["angle-emb", "8.00", "2.0", "2.0", "4.00", "3.00–5.00"]
    assert "sentence-transformers: ended at 20.0 GiB" in lines
    assert ["2", "1.250000", "1.260000", "–"] in [line.split() for line in lines]
    assert "48 texts, 40 of them different" in text
    assert "2 longer than the maximum" in text
    assert "700 tokens for 1,000" in text


def test_an_encoding_shows_cosines() -> None:
    scenario = Scenario("encode", "Encoding", {}, "texts", 10)
    scenario.runs = {OURS: runs(1.0), "angle-emb": runs(2.0, cosine_min=0.9999, cosine_mean=0.99999)}
    assert "0.999900" in report.scenario_report(scenario)


def test_other_work_is_called_so(training: Scenario) -> None:
    assert report.disagreements(training) == []
    training.runs["angle-emb"] = runs(8.0, losses=[3.35, 3.17])
    assert "NOT THE SAME WORK: angle-emb, its first loss is 3.3500, ours 1.5000." in report.scenario_report(training)
    encoding = Scenario("encode", "Encoding", {}, "texts", 10)
    encoding.runs = {OURS: runs(1.0), "angle-emb": runs(2.0, cosine_min=0.7, cosine_mean=0.8)}
    assert [library for library, _ in report.disagreements(encoding)] == ["angle-emb"]


def test_a_disturbed_run_is_called_so(training: Scenario) -> None:
    assert "DISTURBED" not in report.scenario_report(training)
    training.runs["angle-emb"].append(Run(seconds=9.0, other_cores=0.97))
    assert "DISTURBED: while angle-emb ran, other programs kept up to 1.0 cores" in report.scenario_report(training)


def test_columns_are_aligned() -> None:
    assert report.table([["a", "bb"], ["ccc", "d"], ["e"]]) == "a    bb\nccc   d\ne"


def test_the_chart_is_drawn(training: Scenario, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.plot([training, training], tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 1000


# ---------------------------------------------------------------------------------------------- the command


def test_settings_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ValueError, match="--steps must be 1 or more"):
        SpeedSettings(steps=0)
    with pytest.raises(ValueError, match="give one"):
        SpeedSettings(texts=Path("a"), data_dir=Path("b"))


def test_texts_keep_their_order_and_repeats(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("one\ntwo\n\none\n")
    assert comparisons.read_texts(SpeedSettings(texts=tmp_path / "texts.txt")) == ["one", "two", "one"]
    assert comparisons.read_texts(SpeedSettings(texts=tmp_path / "texts.txt", limit_texts=2)) == ["one", "two"]
    (tmp_path / "sts").mkdir()
    header = "sentence1\tsentence2\tscore\n"
    (tmp_path / "sts" / "sts12.test.tsv").write_text(f"{header}b\ta\t1\nc\ta\t2\n")
    assert comparisons.read_texts(SpeedSettings(data_dir=tmp_path)) == ["b", "a", "c", "a"]
    assert len(comparisons.read_texts(SpeedSettings())) > 100


def test_too_few_triples_are_told(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text(
        "\n".join(json.dumps(dict(zip(("anchor", "positive", "negative"), t, strict=True))) for t in TRIPLES)
    )
    with pytest.raises(ValueError, match=r"4 triples.*need 8"):
        comparisons.read_triples(SpeedSettings(data=str(path), batch=(1, 4), steps=2))
    triples = comparisons.read_triples(SpeedSettings(data=str(path), batch=(2,), steps=2))
    assert sorted(map(list, triples)) == sorted(TRIPLES)


def test_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed.os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    with pytest.raises(RuntimeError, match=r"busy: load average 3\.00"):
        speed.wait_until_quiet(0.5, patience=0)
    speed.wait_until_quiet(99, patience=0)


def test_workers_see_no_network_and_no_gpu() -> None:
    environment = workers.worker_environment(3)
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["PYTHONPATH"] == str(EVAL)


def test_repetitions_take_turns_and_what_failed_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def fake(library: str, *_: Any) -> Run:
        asked.append(library)
        return Run("ended at 20.0 GiB") if library == "angle-emb" else Run(seconds=float(len(asked)))

    monkeypatch.setattr(speed, "run_worker", fake)
    names = [OURS, "angle-emb", "sentence-transformers"]
    job = encode_job((tmp_path, tmp_path))
    comparison = Comparison(Scenario("encode", "Encoding", {}, "texts", 6), job, names)
    speed.measure(comparison, SpeedSettings(repetitions=2), dict.fromkeys(names, Path("python")), tmp_path)
    assert asked == [*names, OURS, "sentence-transformers"]
    assert "1/2 angle-emb: ended at 20.0 GiB" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_fails_is_reported(tmp_path: Path) -> None:
    job = encode_job((tmp_path / "nothing", tmp_path))
    run = workers.run_worker("angle-emb", Path(sys.executable), job, tmp_path, tmp_path, SpeedSettings().max_gib)
    assert run.problem is not None
    assert "No module named 'angle_emb'" in run.problem  # not installed where tests run


def test_the_json_holds_everything_and_no_nan(training: Scenario) -> None:
    content = speed.results_dict([training], SpeedSettings(json=Path("/home/me/a.json"), data="/home/me/nli.jsonl"))
    again = json.loads(json.dumps(content, allow_nan=False))
    assert (again["settings"]["json"], again["settings"]["data"]) == ("a.json", "nli.jsonl"), (
        "a place is nobody's business"
    )
    assert again["settings"]["model"] == SpeedSettings().model
    assert again["machine"]["cores"] >= 1
    (scenario,) = again["scenarios"]
    assert scenario["kind"] == "train"
    assert scenario["summary"]["angle-emb"]["ratio"] == 4.0
    assert scenario["summary"]["sentence-transformers"] is None
    assert scenario["runs"]["sentence-transformers"][0]["problem"] == "ended at 20.0 GiB"
    assert [run["losses"] for run in scenario["runs"][OURS]] == [[1.5, 1.25]] * 3


@pytest.mark.slow
def test_the_whole_command_with_ours_alone(tmp_path: Path) -> None:
    save_tiny_base("llama", tmp_path / "base")
    settings = SpeedSettings(
        peers=(),
        dtype=("float32",),
        max_length=(64,),
        batch=(2,),
        steps=2,
        repetitions=2,
        model=str(tmp_path / "base"),
        limit_texts=6,
        max_load=99,
        workdir=tmp_path / "bench",
        json=tmp_path / "out" / "speed.json",
    )
    scenarios = speed.main(settings)
    assert [scenario.kind for scenario in scenarios][:2] == ["train", "encode"]
    assert all(len(scenario.runs[OURS]) == 2 and not scenario.problem(OURS) for scenario in scenarios)
    assert json.loads((tmp_path / "out" / "speed.json").read_text())["packages"][OURS]["torch"]
    assert {path.name for path in (tmp_path / "bench").iterdir()} == {".gitignore", "logs", "models"}

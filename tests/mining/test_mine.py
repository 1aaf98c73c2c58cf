"""The command in this process, with a tiny encoder: every pair accounted for, rows as they are said to be, refusals."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pairs_for_mining import PAIRS, many_pairs, material, read_rows, settings, write_pairs
from tiny import save_tiny_base, tiny_encoder

from angle_llm import cli
from angle_llm.config import SettingsError
from angle_llm.data import DataError, DataSource, load_examples
from angle_llm.data.formats import ScoredPair, Triple
from angle_llm.data.keys import near
from angle_llm.mining import selection
from angle_llm.mining.command import mine_main
from angle_llm.mining.job import MiningError
from angle_llm.mining.pairs import gather
from angle_llm.mining.report import Account
from angle_llm.mining.search import ExactIndex
from angle_llm.mining.selection import Miner
from angle_llm.mining.settings import MineSettings


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base("bert", tmp_path_factory.mktemp("base"))


def mine(
    folder: Path, base: Path, pairs: Path, name: str = "triples", **changed: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows and the report of a run."""
    usual = {"ranks": (1, None), "relative_margin": None}
    mine_main(
        MineSettings(**{"pairs": str(pairs), "model": str(base), "out": folder / f"{name}.jsonl", **usual, **changed})
    )
    return read_rows(folder / f"{name}.jsonl"), json.loads((folder / f"{name}.report.json").read_text())


def random_miner(count: int = 60, **changed: Any) -> Miner:
    found = material(many_pairs(count))
    vectors = np.random.default_rng(0).standard_normal((len(found.texts), 8)).astype(np.float32)
    asked = settings(**changed)
    return Miner(found, asked, vectors, ExactIndex(vectors, found.candidates_C, asked.block_candidates))


def rows_of(miner: Miner) -> list[dict[str, Any]]:
    return [row for number in range(miner.parts) for row in miner.part(number)["rows"]]


def test_training_reads_what_is_written_as_triples(tmp_path: Path, base: Path) -> None:
    mine(tmp_path, base, write_pairs(tmp_path / "pairs.jsonl"))
    loaded = load_examples(DataSource(path=str(tmp_path / "triples.jsonl")))
    assert loaded.report.format == "triple"
    assert [(triple.anchor, triple.positive) for triple in loaded.examples if isinstance(triple, Triple)] == PAIRS


def test_a_row_says_where_it_comes_from(tmp_path: Path, base: Path) -> None:
    rows, report = mine(tmp_path, base, write_pairs(tmp_path / "pairs.jsonl"), ranks=(2, 5))
    assert [row["example"] for row in rows] == list(range(len(PAIRS)))
    assert all(2 <= row["rank"] <= 5 for row in rows)
    assert report["triples"]["rows"] == len(rows)
    assert report["named"]["pairs"] == str(tmp_path / "pairs.jsonl")
    assert report["quantiles"]["rank"]["0"] == min(row["rank"] for row in rows)


def test_no_negative_is_of_its_anchors_cluster(tmp_path: Path, base: Path) -> None:
    rows, report = mine(tmp_path, base, write_pairs(tmp_path / "pairs.jsonl"), negatives=3)
    eats = [row["negative"] for row in rows if row["anchor"] in ("A man eats.", "Someone has food.")]
    assert eats
    assert not {"Someone eats.", "Someone has food.", "There is food."}.intersection(eats)
    assert report["refused"]["of its cluster"] > 0


@pytest.mark.parametrize("short", ["keep", "drop"])
def test_every_pair_is_accounted_for(short: Any) -> None:
    miner = random_miner(120, negatives=4, margin=0.0, ranks=(2, 12), short=short, block_pairs=50)
    account = Account(120, negatives=4)
    rows = [json.loads(line) for line in account.lines(miner.part(number) for number in range(miner.parts))]
    report = account.report()
    told = report["pairs"]
    assert told["in"] == 120 == told["mined"] + told["short"] + told["without"]
    assert min(told["mined"], told["short"], told["without"]) > 0, "the pairs show nothing of one of the three"
    found = Counter(row["example"] for row in rows)
    assert sum(count == 4 for count in found.values()) == told["mined"]
    assert sum(count < 4 for count in found.values()) == (told["short"] if short == "keep" else 0)
    assert told["short_left_out"] == (0 if short == "keep" else told["short"])
    assert 120 * 11 - sum(report["refused"].values()) >= len(rows), (
        "a window of 11, less the refused, holds those taken"
    )


def test_margins_hold_in_every_row() -> None:
    rows = rows_of(random_miner(relative_margin=0.3, margin=0.1, negatives=5))
    assert rows
    for row in rows:  # figures are told to 6 digits
        most = row["positive_cosine"] - max(0.1, 0.3 * abs(row["positive_cosine"]))
        assert row["negative_cosine"] < most + 1e-6


def test_the_nearest_are_taken_unless_chance_is_asked_for() -> None:
    top, drawn = rows_of(random_miner(ranks=(3, 30))), rows_of(random_miner(ranks=(3, 30), sampling="random"))
    assert all(row["rank"] in (3, 4, 5) for row in top), "two are refused at most: the anchor and its positive"
    assert np.mean([row["rank"] for row in drawn]) > 10, "the mean of 3 to 30 is 16.5"
    assert drawn == rows_of(random_miner(ranks=(3, 30), sampling="random")), "the seed decides"
    assert drawn != rows_of(random_miner(ranks=(3, 30), sampling="random", seed=1))


@pytest.mark.parametrize("sampling", ["top", "random"])
def test_blocks_change_nothing(sampling: Any) -> None:
    due = rows_of(random_miner(negatives=2, sampling=sampling))
    for block_pairs, block_candidates in [(1, 7), (7, 1), (64, 33), (13, 1000)]:
        changed: dict[str, Any] = {"block_pairs": block_pairs, "block_candidates": block_candidates}
        assert rows_of(random_miner(negatives=2, sampling=sampling, **changed)) == due


def test_a_judge_is_asked_by_its_own_cosines() -> None:
    free = random_miner(negatives=10)
    judge_vectors = np.random.default_rng(9).standard_normal((len(free.material.texts), 5)).astype(np.float32)
    judged = Miner(free.material, free.settings, free.vectors, free.index, judge_vectors)
    unit = judge_vectors / np.linalg.norm(judge_vectors, axis=1, keepdims=True)
    number = {text: place for place, text in enumerate(free.material.texts)}

    def agreed(row: dict[str, Any]) -> bool:
        anchor, positive, negative = (unit[number[row[name]]] for name in ("anchor", "positive", "negative"))
        return bool(anchor @ negative < anchor @ positive)

    assert not all(agreed(row) for row in rows_of(free))
    assert all(agreed(row) for row in rows_of(judged))


def test_the_judge_is_loaded_and_asked_by_the_command(tmp_path: Path, base: Path) -> None:
    judge = save_tiny_base("bert", tmp_path / "judge", seed=1)
    pairs = write_pairs(tmp_path / "p.jsonl", many_pairs(40))
    _, report = mine(tmp_path, base, pairs, judge=str(judge), negatives=5)
    assert report["refused"]["the judge disagrees"] > 0
    assert report["job"]["judge"]["weights"] != report["job"]["model"]["weights"]


def test_candidates_may_come_from_a_corpus(tmp_path: Path, base: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("A train leaves.\nSomeone eats.\nA train LEAVES!\nSnow falls.\n")
    rows, report = mine(tmp_path, base, write_pairs(tmp_path / "p.jsonl"), corpus=corpus, ranks=(1, 3))
    assert {row["negative"] for row in rows} <= {"A train leaves.", "Someone eats.", "Snow falls."}
    assert report["job"]["material"]["candidates"] == 3, "two differ in writing alone"


def test_own_negatives_stay_beside_the_mined_ones(tmp_path: Path, base: Path) -> None:
    triples = [{"anchor": a, "positive": p, "negative": f"Nobody says: {a}"} for a, p in PAIRS]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in triples))
    rows, _ = mine(tmp_path, base, path, name="mined")
    assert [row["own_negative"] for row in rows] == [row["negative"] for row in triples]
    assert not any(row["negative"].startswith("Nobody") for row in rows)


def test_no_own_negative_of_a_repeated_pair_is_lost_and_training_reads_the_first(tmp_path: Path, base: Path) -> None:
    again = {"anchor": PAIRS[0][0], "positive": PAIRS[0][1]}
    triples = [{"anchor": a, "positive": p, "negative": "first"} for a, p in PAIRS]
    triples += [again | {"negative": negative} for negative in ("second", "first", "third")]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in triples))
    rows, _ = mine(tmp_path, base, path, name="mined")
    assert (rows[0]["own_negative"], rows[0]["other_own_negatives"]) == ("first", ["second", "third"])
    assert all("other_own_negatives" not in row for row in rows[1:])
    source = DataSource(path=str(tmp_path / "mined.jsonl"), columns={"negative": "own_negative"})
    assert load_examples(source).examples[0] == Triple(*PAIRS[0], "first")


def test_scored_pairs_give_positives_above_a_score_alone() -> None:
    found = gather(
        [ScoredPair("one", "two", 0.9), ScoredPair("one", "three", 0.5), ScoredPair("four", "five", 0.85)], None, 0.8
    )
    assert [(found.texts[pair.anchor], found.texts[pair.positive]) for pair in found.pairs] == [
        ("one", "two"),
        ("four", "five"),
    ]
    assert found.judged == 1
    assert found.texts == ["one", "two", "four", "five"], "what is no candidate needs no vector"


def test_a_pair_that_is_repeated_is_mined_once() -> None:
    found = material([*PAIRS, PAIRS[0]])
    assert (len(found.pairs), found.repeated) == (len(PAIRS), 1)


def test_candidates_differ_in_more_than_writing() -> None:
    found = material([("one", "Two"), ("three", "two!"), ("four", "five")])
    assert [near(found.texts[text]) for text in found.candidates_C] == ["two", "five"]


def test_given_again_it_finds_its_work_done_and_other_settings_are_refused(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = write_pairs(tmp_path / "p.jsonl")
    mine(tmp_path, base, pairs)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"p.jsonl", "triples.jsonl", "triples.report.json"}, "nothing else is left"
    mine(tmp_path, base, pairs, block_pairs=3)
    assert "is there already" in capsys.readouterr().err
    with pytest.raises(MiningError, match="settings negatives 1, not 2"):
        mine(tmp_path, base, pairs, negatives=2)
    write_pairs(pairs, PAIRS[1:])
    with pytest.raises(MiningError, match="material sha256"):
        mine(tmp_path, base, pairs)
    (tmp_path / "p.jsonl").write_bytes(before["p.jsonl"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path, base: Path) -> None:
    (tmp_path / "triples.jsonl").write_text("mine\n")
    with pytest.raises(MiningError, match="nothing says that it is of this command"):
        mine(tmp_path, base, write_pairs(tmp_path / "p.jsonl"))
    assert (tmp_path / "triples.jsonl").read_text() == "mine\n"


def test_triples_that_were_changed_are_not_taken_for_its_work(tmp_path: Path, base: Path) -> None:
    pairs = write_pairs(tmp_path / "p.jsonl")
    mine(tmp_path, base, pairs)
    with (tmp_path / "triples.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(MiningError, match="was changed since it was mined"):
        mine(tmp_path, base, pairs)


def test_a_folder_where_the_work_would_lie_is_left_alone(tmp_path: Path, base: Path) -> None:
    pairs, held = write_pairs(tmp_path / "p.jsonl"), tmp_path / "triples.jsonl.parts" / "held"
    held.mkdir(parents=True)
    with pytest.raises(MiningError, match="holds other things"):
        mine(tmp_path, base, pairs)
    held.rmdir()
    mine(tmp_path, base, pairs)
    held.mkdir(parents=True)
    mine(tmp_path, base, pairs)
    assert held.is_dir()


def test_vectors_that_are_kept_serve_other_settings(tmp_path: Path, base: Path) -> None:
    pairs = write_pairs(tmp_path / "p.jsonl")
    mine(tmp_path, base, pairs, "one", vectors=tmp_path / "kept")
    [kept] = (tmp_path / "kept").iterdir()
    made = kept.stat().st_mtime_ns
    rows, _ = mine(tmp_path, base, pairs, "two", vectors=tmp_path / "kept", negatives=2)
    assert kept.stat().st_mtime_ns == made
    assert rows == mine(tmp_path, base, pairs, "three", negatives=2)[0]


def test_pairs_without_a_positive_are_refused() -> None:
    with pytest.raises(DataError, match=r"No score is above --positive-above 0\.8"):
        gather([ScoredPair("one", "two", 0.5)], None, 0.8)


@pytest.mark.parametrize("ranks", [(1, 9), (9, None)])
def test_ranks_beyond_the_candidates_are_refused(ranks: Any, tmp_path: Path, base: Path) -> None:
    with pytest.raises(MiningError, match="needs at least 9 candidates, and there are 8"):
        mine(tmp_path, base, write_pairs(tmp_path / "p.jsonl"), ranks=ranks)


def test_all_ranks_of_many_candidates_take_bounded_memory_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    due, sizes = rows_of(random_miner(negatives=2)), []
    miner = random_miner(negatives=2, block_candidates=10)
    real = miner.index.nearest

    def nearest(anchors: np.ndarray, ranks: int) -> tuple[np.ndarray, np.ndarray]:
        sizes.append(len(anchors) * (ranks + 10))
        return real(anchors, ranks)

    monkeypatch.setattr(miner.index, "nearest", nearest)
    monkeypatch.setattr(selection, "SCORES_AT_ONCE", 500)
    assert rows_of(miner) == due
    assert len(sizes) > 1
    assert max(sizes) <= 500


def test_a_text_that_leaves_no_tokens_is_told_with_its_example_before_any_is_embedded(
    tmp_path: Path, base: Path
) -> None:
    pairs = write_pairs(tmp_path / "p.jsonl", [*PAIRS, ("A bird flies.", "\u200b\u200b")])
    with pytest.raises(DataError, match=r'text "\\u200b\\u200b", the positive of example 8 .*nothing of') as told:
        mine(tmp_path, base, pairs)
    assert "--on-bad-row" not in str(told.value)
    assert not list(tmp_path.glob("*.parts/vectors-*"))


def test_texts_embedded_in_other_parts_are_another_job(tmp_path: Path, base: Path) -> None:
    pairs = write_pairs(tmp_path / "p.jsonl")
    mine(tmp_path, base, pairs, vectors=tmp_path / "kept", shard_rows=8)
    mine(tmp_path, base, pairs, "other", vectors=tmp_path / "kept", shard_rows=5)
    assert len(list((tmp_path / "kept").iterdir())) == 2
    with pytest.raises(MiningError, match="was made with settings shard_rows 8, not 5"):
        mine(tmp_path, base, pairs, shard_rows=5)


@pytest.mark.filterwarnings("ignore:.*overflow:RuntimeWarning")
def test_vectors_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    broken = tiny_encoder("bert", base="nowhere")
    next(broken.model.backbone.parameters()).data.fill_(float("nan"))
    broken.save_pretrained(tmp_path / "broken")
    with pytest.raises(ValueError, match="not finite"):
        mine(tmp_path, tmp_path / "broken", write_pairs(tmp_path / "p.jsonl"))
    assert not (tmp_path / "triples.jsonl").exists()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"ranks": (0, 5)}, "from 1"),
        ({"ranks": (6, 5)}, "from 1"),
        ({"negatives": 0}, "--negatives must be at least 1"),
        ({"block_pairs": 0}, "--block-pairs must be at least 1"),
        ({"ranks": (1, 3), "negatives": 4}, "more than the 3 ranks"),
        ({"out": Path("triples.csv")}, "NAME.jsonl"),
        ({"column": "text"}, "none is given"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        settings(**changed)


def test_the_command_line_reaches_it(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs, out = write_pairs(tmp_path / "p.jsonl"), tmp_path / "o.jsonl"
    cli.run(
        [
            "data",
            "mine",
            str(pairs),
            "--model",
            str(base),
            "--out",
            str(out),
            "--ranks",
            "1",
            "None",
            "--relative-margin",
            "None",
        ]
    )
    assert len(read_rows(out)) == len(PAIRS)
    assert "8 pairs = 8 with 1 negative + 0 without; 8 triples" in capsys.readouterr().out

"""Hard negatives: rules, selection, counts of every pair; and the command with a tiny encoder."""

import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kills import check_resumes_after_any_kill, contents
from tiny import save_tiny_base, tiny_encoder
from tiny_rerankers import save_tiny_reranker

from angle_llm import cli
from angle_llm.data import DataError
from angle_llm.data.corpus import corpus_texts
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import Group, PositivePair, ScoredPair, Triple
from angle_llm.data.keys import normalized
from angle_llm.data.positives import MiningData, collect_pairs
from angle_llm.io import FolderError
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.text_vectors import TextVectors, vectors_of
from angle_llm.prompts import load_prompts
from angle_llm.settings.commands import MineSettings
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import DataSource
from angle_llm.tools import hard_negatives
from angle_llm.tools.hard_negatives import (
    REASONS,
    MinedPart,
    Miner,
    PairScorer,
    Window,
    check_candidates,
    cosines_by,
    ranks_of,
    refused_candidates,
)
from angle_llm.tools.mine import mine_main

PAIRS = [
    ("A man eats.", "Someone eats."),
    ("A man eats.", "Someone has food."),
    ("Someone has food.", "There is food."),
    ("A dog runs.", "An animal moves."),
    ("The dog sleeps.", "An animal rests."),
    ("A child sings.", "Someone makes music."),
    ("Two women talk.", "People speak."),
    ("A car stops.", "A vehicle stands still."),
]
""""There is food." is in the cluster of the first anchor, but not a positive of it."""


def material(pairs: list[tuple[str, str]] = PAIRS) -> MiningData:
    return collect_pairs([PositivePair(*pair) for pair in pairs], None, 0.8)


def settings(**changed: Any) -> MineSettings:
    """Settings without limits on cosines that use all candidates."""
    usual = {"ranks": (1, None), "relative_margin": None}
    return MineSettings(**{"pairs": "-", "model": "-", "out": Path("t.jsonl"), **usual, **changed})


def many_pairs(count: int) -> list[tuple[str, str]]:
    draw = random.Random(0)
    words = "a man woman dog cat child runs eats sleeps sings in on the park house small old two street food".split()  # noqa: SIM905
    texts = [" ".join(draw.choices(words, k=draw.randint(3, 9))) for _ in range(2 * count)]
    return list(zip(texts[::2], texts[1::2], strict=True))


def write_pairs(path: Path, pairs: list[tuple[str, str]] = PAIRS) -> Path:
    return write_rows(path, [{"anchor": anchor, "positive": positive} for anchor, positive in pairs])


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- rules -----------------------------------------------------------------------------------------------------------------


def refusals(
    found: MiningData,
    anchor: str,
    negative: str,
    *,
    cosine: float = 0.1,
    positive: float = 0.8,
    judge: PairScorer | None = None,
    **changed: Any,
) -> list[str]:
    """Return all reasons to refuse a candidate as negative of a query, whose positives have a cosine at least."""
    query = next(query for query in found.queries if found.texts[query.text] == anchor)
    text_W = np.array([found.texts.index(negative)])
    window = Window(query, positive, text_W, np.array([cosine]))
    refused = refused_candidates(found, settings(judge="-", **changed), window, judge)
    return [reason for reason, refused_W in refused.items() if refused_W.all()]


def judging(negative: float) -> PairScorer:
    """An encoder as a judge, by which "A dog runs." has this cosine with the query, and every positive 0.5."""
    cosines = {"A man eats.": 1.0, "A dog runs.": negative}
    cosine_T = np.array([cosines.get(text, 0.5) for text in material().texts])
    return cosines_by(text_vectors(np.stack([cosine_T, np.sqrt(1 - cosine_T**2)], axis=1)))


def text_vectors(vectors: np.ndarray) -> TextVectors:
    return TextVectors(vectors, np.arange(len(vectors)), np.arange(len(vectors)))


EATS: Any = (material(), "A man eats.")
SHOUTED = material([*PAIRS, ("Hungry?", "a MAN  eats"), ("Something else.", "someone has food!")])
LINKED = material([("one", "two"), ("TWO!", "three"), ("four", "five")])
TRIPLES = collect_pairs([Triple("one", "two", "Three"), Triple("four", "three", "six")], None, 0.8)
SCORED = collect_pairs(
    [ScoredPair("one", "two", 1.0), ScoredPair("one", "three", 0.7), ScoredPair("four", "three", 0.9)], None, 0.8
)
"""A score of 0.7 is no positive, and no good negative either."""


@pytest.mark.parametrize(
    ("found", "anchor", "negative", "options", "reason"),
    [
        (SHOUTED, "A man eats.", "a MAN  eats", {}, "the query itself"),
        (*EATS, "Someone has food.", {}, "a positive of the query"),
        (material(), "Someone has food.", "A man eats.", {}, "a positive of the query"),
        (SHOUTED, "A man eats.", "someone has food!", {}, "a positive of the query"),
        (TRIPLES, "one", "three", {}, "known from another row"),
        (SCORED, "one", "three", {}, "known from another row"),
        (*EATS, "There is food.", {}, "of the query's cluster"),
        (LINKED, "one", "three", {}, "of the query's cluster"),
        (*EATS, "A dog runs.", {"cosine": 0.61, "max_score": 0.6}, "above --max-score"),
        (*EATS, "A dog runs.", {"cosine": 0.71, "margin": 0.1}, "within --margin"),
        (*EATS, "A dog runs.", {"cosine": 0.80, "margin": 0.0}, "within --margin"),
        (*EATS, "A dog runs.", {"cosine": 0.77, "relative_margin": 0.05}, "within --relative-margin"),
        # 5 % of -0.4 below it is -0.42
        (*EATS, "A dog runs.", {"positive": -0.4, "cosine": -0.41, "relative_margin": 0.05}, "within --relative-margin"),
        (*EATS, "A dog runs.", {"judge": judging(0.51)}, "the judge disagrees"),
        (*EATS, "A dog runs.", {"judge": judging(0.41), "judge_margin": 0.1}, "the judge disagrees"),
    ],
)  # fmt: skip
def test_each_rule_refuses_its_case(
    found: MiningData, anchor: str, negative: str, options: dict[str, Any], reason: str
) -> None:
    assert refusals(found, anchor, negative, **options)[0] == reason


@pytest.mark.parametrize(
    ("found", "anchor", "negative", "options"),
    [
        (*EATS, "An animal moves.", {}),
        (LINKED, "one", "five", {}),
        *((*EATS, "A dog runs.", {"cosine": cosine, name: bound})
          for name, cosine, bound in [
              ("max_score", 0.6, 0.6), ("margin", 0.69, 0.1), ("relative_margin", 0.75, 0.05)]),
        (*EATS, "A dog runs.", {"positive": -0.4, "cosine": -0.43, "relative_margin": 0.05}),
        (*EATS, "A dog runs.", {"judge": judging(0.49)}),
        (*EATS, "A dog runs.", {"judge": judging(0.39), "judge_margin": 0.1}),
    ],
)  # fmt: skip
def test_other_candidates_are_not_refused(
    found: MiningData, anchor: str, negative: str, options: dict[str, Any]
) -> None:
    assert refusals(found, anchor, negative, **options) == []


# --- material and selection -------------------------------------------------------------------------------------------------


def test_pairs_and_candidates_are_numbered_once() -> None:
    again = material([*PAIRS, PAIRS[0]])
    assert (len(again.queries), again.counts()["positives"], again.skipped["repeated"]) == (
        len(PAIRS) - 1,
        len(PAIRS),
        1,
    )
    found = material([("one", "Two"), ("three", "two!"), ("four", "five")])
    assert [normalized(found.texts[text]) for text in found.candidates_C] == ["two", "five"], (
        "one candidate per near key"
    )
    scored = [ScoredPair("one", "two", 0.9), ScoredPair("one", "three", 0.5), ScoredPair("four", "five", 0.85)]
    found = collect_pairs(scored, None, 0.8)
    assert [(found.texts[query.text], *(found.texts[text] for text in query.positives)) for query in found.queries] == [
        ("one", "two"),
        ("four", "five"),
    ]
    assert found.skipped["scored_lower"] == 1
    assert found.texts == ["one", "two", "four", "five"], "other texts need no vector"
    with pytest.raises(DataError, match=r"--positive-above 0\.8"):
        collect_pairs([ScoredPair("one", "two", 0.5)], None, 0.8)


def random_miner(count: int = 60, **changed: Any) -> Miner:
    found, rules = material(many_pairs(count)), settings(**changed)
    vectors = np.random.default_rng(0).standard_normal((len(found.texts), 8)).astype(np.float32)
    return Miner(found, rules, text_vectors(vectors))


def parts_of(miner: Miner) -> list[MinedPart]:
    return [miner.part(number) for number in range(-(-len(miner.material.queries) // miner.queries_at_once))]


def rows_of(miner: Miner) -> list[dict[str, Any]]:
    return [row for part in parts_of(miner) for row in part.rows]


@pytest.mark.parametrize("short", ["keep", "drop"])
def test_every_query_is_accounted_for(short: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hard_negatives, "QUERIES_AT_ONCE", 50)
    miner = random_miner(120, negatives=4, margin=0.0, ranks=(2, 12), short=short)
    counts = Counter[str]()
    for part in parts_of(miner):
        counts.update(part.counts)
    assert counts["mined"] + counts["short"] + counts["without"] == 120
    assert min(counts["mined"], counts["short"], counts["without"]) > 0, "expected queries of all three kinds"
    rows = Counter(len(row["negatives"]) for row in rows_of(miner))
    assert rows[4] == counts["mined"]
    assert rows[0] == (counts["without"] if short == "keep" else 0)
    assert sum(rows.values()) - rows[4] - rows[0] == (counts["short"] if short == "keep" else 0)
    refused, taken = sum(counts[reason] for reason in REASONS), sum(size * count for size, count in rows.items())
    assert 120 * 11 - refused >= taken, "a window of 11, less the refused, contains the taken"


def test_the_nearest_or_random_candidates_are_taken() -> None:
    top, drawn = rows_of(random_miner(ranks=(3, 30))), rows_of(random_miner(ranks=(3, 30), sampling="random"))
    assert all(row["ranks"][0] in (3, 4, 5) for row in top), "at most two are refused: the query and its positive"
    assert np.mean([row["ranks"] for row in drawn]) > 10, "the mean of 3 to 30 is 16.5"
    assert drawn == rows_of(random_miner(ranks=(3, 30), sampling="random"))


@pytest.mark.parametrize("sampling", ["top", "random"])
def test_the_block_size_does_not_change_the_rows(sampling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    due = rows_of(random_miner(negatives=2, sampling=sampling))
    for pairs, candidates in [(1, 7), (7, 1), (64, 33), (13, 1000)]:
        monkeypatch.setattr(hard_negatives, "QUERIES_AT_ONCE", pairs)
        monkeypatch.setattr(hard_negatives, "CANDIDATES_AT_ONCE", candidates)
        assert rows_of(random_miner(negatives=2, sampling=sampling)) == due
    monkeypatch.setattr(hard_negatives, "SCORES_AT_ONCE", 500)
    miner = random_miner(negatives=2, sampling=sampling)
    assert rows_of(miner) == due
    assert miner.queries_at_once < 13


def test_the_judge_uses_its_own_cosines() -> None:
    free = random_miner(negatives=10)
    vectors = np.random.default_rng(9).standard_normal((len(free.material.texts), 5)).astype(np.float32)
    judged = Miner(free.material, free.rules, free.vectors, cosines_by(text_vectors(vectors)))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    number = {text: place for place, text in enumerate(free.material.texts)}

    def agreed(row: dict[str, Any]) -> bool:
        query, positives = unit[number[row["query"]]], unit[[number[text] for text in row["positives"]]]
        return all(unit[number[text]] @ query < (positives @ query).min() for text in row["negatives"])

    assert not all(agreed(row) for row in rows_of(free))
    assert all(agreed(row) for row in rows_of(judged))


# --- the command ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base("bert", tmp_path_factory.mktemp("base"))


def mine(
    folder: Path, base: Path, pairs: Path, name: str = "triples", **changed: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows and the report of a run."""
    mine_main(settings(pairs=str(pairs), model=str(base), out=folder / f"{name}.jsonl", **changed))
    return read_rows(folder / f"{name}.jsonl"), json.loads((folder / f"{name}.report.json").read_text())


def test_the_command_and_its_report(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs, out = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "triples.jsonl"
    options = ["--ranks", "1", "None", "--relative-margin", "None"]
    cli.run(["data", "mine", str(pairs), "--model", str(base), "--out", str(out), *options])
    printed = capsys.readouterr().out
    assert "queries: 7, positives: 8, candidates: 8, texts: 14; the largest cluster" in printed
    assert "queries:\n  in: 7\n  mined: 7\n" in printed
    assert "median_cosine:\n  positives: " in printed
    loaded = load_examples(DataSource(path=str(out)))
    groups = [one for one in loaded.examples if isinstance(one, Group)]
    assert [(one.query, text) for one in groups for text in one.positives] == PAIRS
    assert groups[0].positives == ("Someone eats.", "Someone has food."), "a query has all its positives"
    rows, report = read_rows(out), json.loads((tmp_path / "triples.report.json").read_text())
    assert [example for row in rows for example in row["examples"]] == list(range(len(PAIRS)))
    assert report["groups"]["rows"] == len(rows)
    assert report["settings"]["pairs"] == str(pairs)
    cosines = [score for row in rows for score in row["scores"][len(row["positives"]) :]]
    assert report["median_cosine"]["mined_negatives"] == pytest.approx(np.median(cosines), abs=1e-6)
    assert report["refused"]["of the query's cluster"] > 0


def test_each_positive_may_be_an_example_of_its_own(tmp_path: Path, base: Path) -> None:
    pairs, rules = write_pairs(tmp_path / "pairs.jsonl"), {"ranks": (1, None), "relative_margin": None, "negatives": 2}
    groups, _ = mine(tmp_path, base, pairs, "groups", **rules)
    split, report = mine(tmp_path, base, pairs, "split", split_positives=True, **rules)
    due = []
    for group in groups:
        for place, text in enumerate(group["positives"]):
            scores = [group["scores"][place], *group["scores"][len(group["positives"]) :]]
            own = {"positives": [text], "examples": [group["examples"][place]], "scores": scores}
            due.append({**group, **own})
    assert split == due
    assert [(row["query"], *row["positives"]) for row in split] == PAIRS
    assert report["queries"]["in"] == len(groups) < report["groups"]["rows"] == len(PAIRS)
    with pytest.raises(FolderError, match="split_positives"):
        mine(tmp_path, base, pairs, "split", **rules)


def test_a_limit_of_queries_hides_no_positive(tmp_path: Path, base: Path) -> None:
    pairs, rules = write_pairs(tmp_path / "pairs.jsonl"), {"ranks": (1, None), "relative_margin": None, "negatives": 3}
    every, _ = mine(tmp_path, base, pairs, "every", **rules)
    first, report = mine(tmp_path, base, pairs, "first", limit=2, **rules)
    assert first == every[:2]
    assert report["queries"]["in"] == 2
    write_pairs(tmp_path / "pairs.jsonl", [*PAIRS, (PAIRS[-1][0], PAIRS[0][1])])
    with pytest.raises(FolderError, match="material"):
        mine(tmp_path, base, pairs, "first", limit=2, **rules)  # a link beyond the limit
    with pytest.raises(SettingsError, match=r"limit: .*greater than or equal to 1, got 0"):
        settings(limit=0)


def test_candidates_from_a_corpus_and_a_judge(tmp_path: Path, base: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("A train leaves.\nSomeone eats.\nA train LEAVES!\nSnow falls.\n")
    rows, report = mine(tmp_path, base, write_pairs(tmp_path / "p.jsonl"), corpus=corpus, ranks=(1, 3))
    assert {text for row in rows for text in row["negatives"]} <= {"A train leaves.", "Someone eats.", "Snow falls."}
    assert report["identity"]["material"]["candidates"] == 3
    corpus.write_text("A train leaves.\n\n")
    with pytest.raises(DataError, match=r"corpus\.txt:2: .*empty"):
        mine(tmp_path, base, tmp_path / "p.jsonl", corpus=corpus)
    judge = save_tiny_base("bert", tmp_path / "judge", seed=1)
    pairs = write_pairs(tmp_path / "many.jsonl", many_pairs(40))
    _, report = mine(tmp_path, base, pairs, "judged", judge=str(judge), negatives=5)
    assert report["refused"]["the judge disagrees"] > 0
    assert report["identity"]["judge"]["weights"] != report["identity"]["model"]["weights"]


@pytest.mark.needs("sentence_transformers")
def test_a_reranker_judges_by_raw_scores(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negatives are those of an earlier run that the library scores below every positive by more than the margin."""
    import torch
    from sentence_transformers import CrossEncoder

    pairs = write_pairs(tmp_path / "pairs.jsonl", many_pairs(24))
    folder = save_tiny_reranker("bert", tmp_path / "RERANKER")
    rules: dict[str, Any] = {"ranks": (1, 12), "negatives": 12}
    every, _ = mine(tmp_path, base, pairs, "all", **rules)
    monkeypatch.setattr("angle_llm.tools.hard_negatives._RERANKED_AT_ONCE", 5)
    judged, report = mine(tmp_path, base, pairs, "judged", judge=str(folder), judge_margin=0.2, **rules)
    library = CrossEncoder(str(folder), activation_fn=torch.nn.Identity(), device="cpu")
    dropped = 0
    for row, kept in zip(every, judged, strict=True):
        texts = [*row["positives"], *row["negatives"]]
        score_of = dict(zip(texts, library.predict([(row["query"], text) for text in texts]).tolist(), strict=True))
        limit = min(score_of[text] for text in row["positives"]) - 0.2
        assert all(abs(score - limit) > 1e-5 for score in score_of.values()), "no case depends on rounding"
        assert kept["negatives"] == [text for text in row["negatives"] if score_of[text] < limit]
        dropped += len(row["negatives"]) - len(kept["negatives"])
    assert report["refused"]["the judge disagrees"] == dropped > 0
    assert sum(len(row["negatives"]) for row in judged) > 0
    assert set(report["identity"]["judge"]) >= {"reranker", "tokenizer"}
    shutil.copytree(base, tmp_path / "ENCODER")
    monkeypatch.chdir(tmp_path)
    guide = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    angle-llm (data mine .* --judge .*)$", guide, re.MULTILINE)
    cli.run([*command.split(), "--out", "of_the_guide.jsonl"])
    with pytest.raises(FolderError, match=r"settings\.judge_margin 0\.2 \(now 0\.0\)"):
        mine(tmp_path, base, pairs, "judged", judge=str(folder), **rules)
    with pytest.raises(SettingsError, match="--judge-margin belongs to --judge"):
        settings(judge=None, judge_margin=1.0)
    with pytest.raises(SettingsError, match="--column belongs to --corpus"):
        settings(column="body")


def test_candidates_of_a_beir_folder_have_their_titles(tmp_path: Path, base: Path) -> None:
    """Without its title, a positive would be another text, and a candidate."""
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    documents = [{"_id": f"d{n}", "title": f"Title {n}", "text": one} for n, (_, one) in enumerate(PAIRS)]
    write_rows(folder / "corpus.jsonl", [*documents, {"_id": "empty", "title": "", "text": ""}])
    write_rows(folder / "queries.jsonl", [{"_id": f"q{n}", "text": one} for n, (one, _) in enumerate(PAIRS)])
    judged = "".join(f"q{n}\td{n}\t1\n" for n in range(len(PAIRS)))
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    texts = {f"{one['title']} {one['text']}" for one in documents}
    for name, corpus in (("a", folder), ("b", folder / "corpus.jsonl")):
        rows, report = mine(tmp_path, base, folder, name, corpus=corpus, negatives=3)
        assert report["identity"]["material"]["candidates"] == len(PAIRS)
        assert {text for row in rows for text in row["negatives"]} <= texts
        assert not any(set(row["positives"]) & set(row["negatives"]) for row in rows)
    corpus = folder / "corpus.jsonl"
    corpus.write_text('{"_id": "d0", "text": 3}\n')
    with pytest.raises(DataError, match=r"corpus\.jsonl:1: expected _id or id, text .*'text': 3"):
        list(corpus_texts(folder, None))


def test_own_negatives_are_kept_before_the_mined_ones(tmp_path: Path, base: Path) -> None:
    triples = [{"anchor": a, "positive": p, "negative": f"Nobody says: {a}"} for a, p in PAIRS]
    again = {"anchor": PAIRS[0][0], "positive": PAIRS[0][1]}
    triples += [again | {"negative": negative} for negative in ("second", PAIRS[1][1])]
    rows, report = mine(tmp_path, base, write_rows(tmp_path / "t.jsonl", triples), "mined", negatives=2)
    assert rows[0]["negatives"][:2] == [triples[0]["negative"], "second"], "a text that is also a positive is left out"
    assert rows[0]["ranks"][:2] == [None, None]
    assert all(row["negatives"][0].startswith("Nobody") and None not in row["ranks"][-2:] for row in rows)
    assert report["identity"]["material"]["contradicted"] == 1
    assert report["groups"]["own_negatives"] == len(rows) + 1
    again_rows, _ = mine(tmp_path, base, tmp_path / "mined.jsonl", "twice", negatives=1)
    assert [row["negatives"][:-1] for row in again_rows] == [row["negatives"] for row in rows], "groups are read too"


def test_scores_are_the_cosines_of_the_encoder(tmp_path: Path, base: Path) -> None:
    triples = [{"anchor": a, "positive": p, "negative": f"Nobody says: {a}"} for a, p in PAIRS]
    rows, _ = mine(tmp_path, base, write_rows(tmp_path / "t.jsonl", triples), negatives=3)
    encoder = SentenceEncoder.from_pretrained(str(base))
    for row in rows:
        vectors = encoder.encode([row["query"], *row["positives"], *row["negatives"]]).astype(np.float64)
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        np.testing.assert_allclose(row["scores"], unit[1:] @ unit[0], atol=2e-6)  # float32, and six digits


def test_queries_without_negatives_are_kept(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, report = mine(tmp_path, base, write_pairs(tmp_path / "p.jsonl"), max_score=-1.0)
    assert [row["negatives"] for row in rows] == [[]] * 7
    assert report["queries"] == {"in": 7, "mined": 0, "short": 0, "without": 7, "dropped": 0}
    assert "without: 7" in capsys.readouterr().out
    assert len(load_examples(DataSource(path=str(tmp_path / "triples.jsonl"))).examples) == 7
    rows, report = mine(tmp_path, base, tmp_path / "p.jsonl", "dropped", max_score=-1.0, short="drop")
    assert (rows, report["queries"]["dropped"], report["median_cosine"]) == ([], 7, {})


@pytest.mark.parametrize(
    ("count", "changed", "ranks"),
    [
        (8, {}, (1, 8)),
        (287, {}, (1, 41)),
        (2_328, {}, (3, 43)),
        (1_000_000, {}, (10, 50)),
        (287, {"negatives": 20}, (1, 81)),
        (287, {"ranks": (2, None)}, (2, 287)),
    ],
)
def test_default_ranks_follow_the_number_of_candidates(
    count: int, changed: dict[str, Any], ranks: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    rules = settings(**{"ranks": None, **changed})
    assert ranks_of(rules, count) == ranks
    check_candidates(rules, count)
    assert "warning" not in capsys.readouterr().out


def test_ranks_of_a_larger_pool_get_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    check_candidates(settings(ranks=(10, 50)), 5_000)
    assert "warning" not in capsys.readouterr().out
    check_candidates(settings(ranks=(10, 50)), 287)
    warning = capsys.readouterr().out
    assert "--ranks 10 50 suits a larger pool" in warning
    assert "--ranks 1 41" in warning
    with pytest.raises(SettingsError, match=r"--negatives 9 .*9 candidates.* 8\."):
        check_candidates(settings(ranks=None, negatives=9), 8)


def test_a_finished_command_is_recognised_and_other_settings_are_refused(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = write_pairs(tmp_path / "p.jsonl")
    mine(tmp_path, base, pairs)
    before = contents(tmp_path)
    assert set(before) == {"p.jsonl", "triples.jsonl", "triples.report.json"}
    mine(tmp_path, base, pairs)
    assert "exists already" in capsys.readouterr().err
    for changed in ({"negatives": 2}, {"sampling": "random"}):
        with pytest.raises(FolderError, match=rf"settings\.{next(iter(changed))} .*--out"):
            mine(tmp_path, base, pairs, **changed)
    write_pairs(pairs, PAIRS[1:])
    with pytest.raises(FolderError, match=r"material\.sha256"):
        mine(tmp_path, base, pairs)
    pairs.write_bytes(before["p.jsonl"])
    assert contents(tmp_path) == before


def test_a_result_with_another_attention_is_refused(tmp_path: Path) -> None:
    pairs, base = write_pairs(tmp_path / "p.jsonl"), save_tiny_base("llama", tmp_path / "base")
    how: dict[str, Any] = {"prompt": "plain", "pooling": "mean"}
    mine(tmp_path, base, pairs, attention="bidirectional", **how)
    with pytest.raises(FolderError, match=r"was made with model\.attention"):
        mine(tmp_path, base, pairs, **how)


def test_a_result_with_a_prompt_that_appended_a_token_is_refused(tmp_path: Path) -> None:
    pairs, prompt = write_pairs(tmp_path / "p.jsonl"), tmp_path / "own.yaml"
    base = save_tiny_base("llama", tmp_path / "base")
    prompt.write_text("name: own\ntemplate: 'About {text}'\nappend: eos\n")
    mine(tmp_path, base, pairs, prompt=str(prompt))
    prompt.write_text("name: own\ntemplate: 'About {text}'\n")
    with pytest.raises(FolderError, match=r'append "eos" \(now null\)'):
        mine(tmp_path, base, pairs, prompt=str(prompt))


def test_other_files_are_not_changed(tmp_path: Path, base: Path) -> None:
    pairs, held = write_pairs(tmp_path / "p.jsonl"), tmp_path / "triples.jsonl.parts" / "held"
    (tmp_path / "triples.jsonl").write_text("mine\n")
    with pytest.raises(FolderError, match=r"triples\.jsonl was made with .*--out"):
        mine(tmp_path, base, pairs)
    assert (tmp_path / "triples.jsonl").read_text() == "mine\n"
    (tmp_path / "triples.jsonl").unlink()
    held.mkdir(parents=True)
    with pytest.raises(FolderError, match=r"--out .*contains other files \(held\)"):
        mine(tmp_path, base, pairs)
    assert held.is_dir()


def test_settings_and_candidates_are_checked_before_a_model_is_loaded(tmp_path: Path) -> None:
    pairs, nowhere = write_pairs(tmp_path / "p.jsonl"), tmp_path / "no-model"
    for ranks in ((1, 9), (9, None)):
        with pytest.raises(SettingsError, match=r"--ranks .*9 candidates.* 8\."):
            mine(tmp_path, nowhere, pairs, ranks=ranks)
    with pytest.raises(SettingsError, match=r"--out: .*triples\.csv"):
        mine_main(settings(pairs=str(pairs), model=str(nowhere), out=Path("triples.csv")))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"ranks": (0, 5)}, "--ranks"),
        ({"ranks": (6, 5)}, "--ranks"),
        ({"negatives": 0}, "negatives: .*got 0"),
        ({"ranks": (1, 3), "negatives": 4}, "--ranks: .*--negatives 4"),
        ({"margin": float("nan")}, "margin: .*nan"),
    ],
)
def test_impossible_settings_are_refused(changed: dict[str, Any], expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        settings(**changed)


# --- vectors ----------------------------------------------------------------------------------------------------------------


def test_kept_vectors_are_used_again_for_the_same_texts_and_blocks(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, kept = write_pairs(tmp_path / "p.jsonl"), tmp_path / "kept"
    mine(tmp_path, base, pairs, "one", vectors=kept)
    [path] = kept.iterdir()
    made = (path / "vectors.npy").stat().st_mtime_ns
    rows, _ = mine(tmp_path, base, pairs, "two", vectors=kept, negatives=2)
    assert (path / "vectors.npy").stat().st_mtime_ns == made
    assert rows == mine(tmp_path, base, pairs, "three", negatives=2)[0]
    monkeypatch.setattr("angle_llm.model.text_vectors.TEXTS_AT_ONCE", 5)
    mine(tmp_path, base, pairs, "other", vectors=kept)
    assert len(list(kept.iterdir())) == 2


def test_texts_without_a_direction_are_refused_by_name(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = write_pairs(tmp_path / "p.jsonl", [*PAIRS, ("A bird flies.", "\u20ac")])
    tokenize = SentenceEncoder.tokenize

    def refuse(self: SentenceEncoder, texts: Any, *more: Any) -> Any:
        if "\u20ac" in texts:
            raise ValueError("text 0: no token")
        return tokenize(self, texts, *more)

    with monkeypatch.context() as patch:  # as a tokenizer that drops unknown characters
        patch.setattr(SentenceEncoder, "tokenize", refuse)
        with pytest.raises(DataError, match=r'text "\\u20ac": no token') as refused:
            mine(tmp_path, base, pairs)
    assert "--on-bad-row" not in str(refused.value)
    assert not list(tmp_path.glob("*.parts/vectors-*/part-*")), "no text was embedded"

    encoder = tiny_encoder("bert")
    real = encoder.encode

    def encode(texts: list[str], **_: object) -> np.ndarray:
        return np.where([[one == "There is food."] for one in texts], 0, real(texts))

    monkeypatch.setattr(encoder, "encode", encode)
    with pytest.raises(DataError, match=r'text "There is food\.": its vector is 0'):
        vectors_of(material(), encoder, tmp_path / "vectors")


def test_cosines_of_many_pairs_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors_KD = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    rows_T = np.arange(50)
    pairs_2O = np.random.default_rng(1).integers(50, size=(2, 200))
    whole = cosines_by(TextVectors(vectors_KD, rows_T, rows_T)).of(*pairs_2O)
    sizes: list[int] = []
    real = hard_negatives.on_grid
    monkeypatch.setattr(hard_negatives, "on_grid", lambda rows: (sizes.append(len(rows)), real(rows))[1])
    monkeypatch.setattr(hard_negatives, "SCORES_AT_ONCE", 9 * 8)
    assert np.array_equal(cosines_by(TextVectors(vectors_KD, rows_T, rows_T)).of(*pairs_2O), whole)
    assert max(sizes) == 9


def test_the_output_is_not_part_of_the_input(tmp_path: Path, base: Path) -> None:
    (tmp_path / "folder").mkdir()
    pairs = write_pairs(tmp_path / "folder" / "pairs.jsonl")
    for source, out in ((tmp_path / "folder", "folder/mined.jsonl"), (pairs, "folder/pairs.jsonl")):
        with pytest.raises(SettingsError, match="--out: expected a file that is not part of the input"):
            mine_main(settings(pairs=str(source), model=str(base), out=tmp_path / out))


def test_instructions_of_documents_are_not_kept_and_this_is_said(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"anchor": a, "positive": b, "instruction": "Find.", "document_instruction": "Read."} for a, b in PAIRS]
    pairs = write_rows(tmp_path / "p.jsonl", rows)
    mine_main(settings(pairs=str(pairs), model=str(base), out=tmp_path / "mined.jsonl"))
    assert "warning: the groups do not keep document_instruction" in "".join(capsys.readouterr())
    assert all(row["instruction"] == "Find." for row in read_rows(tmp_path / "mined.jsonl"))


def test_queries_and_documents_have_their_own_prompts(tmp_path: Path) -> None:
    both = load_prompts({"query": "plain", "document": "prompteol"})
    encoder = tiny_encoder("llama", prompt=both)
    found = material(many_pairs(30))
    vectors = vectors_of(found, encoder, tmp_path)
    queries = [query.text for query in found.queries]
    query_QD = encoder.encode_query([found.texts[text] for text in queries])
    document_TD = encoder.encode_document(found.texts)
    positives = sorted({text for query in found.queries for text in query.positives})
    # float32 sums in another order
    np.testing.assert_allclose(vectors.queries(queries), query_QD, atol=1e-5)
    np.testing.assert_allclose(vectors.documents(positives), document_TD[positives], atol=1e-5)
    assert len(vectors.vectors_KD) == len(queries) + len(positives), "no query is encoded as a document"
    assert len(positives) < len(found.texts)
    unit_QD, unit_TD = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (query_QD, document_TD))
    number = {text: place for place, text in enumerate(found.texts)}
    rows = rows_of(Miner(found, settings(ranks=(1, 20)), vectors))
    assert len(rows) == 30
    for row, query in zip(rows, queries, strict=True):
        texts = [*row["positives"], *row["negatives"]]
        due = unit_TD[[number[text] for text in texts]] @ unit_QD[queries.index(query)]
        np.testing.assert_allclose(row["scores"], due, atol=1e-5)


def test_two_commands_do_not_compute_the_same_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = tiny_encoder("bert")
    real = encoder.encode

    def encode(texts: list[str], **_: object) -> np.ndarray:
        with pytest.raises(FolderError, match="another process"):
            vectors_of(material(), tiny_encoder("bert"), tmp_path)
        return real(texts)

    monkeypatch.setattr(encoder, "encode", encode)
    vectors_of(material(), encoder, tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [""], "a folder, and no unfinished parts"


# --- kills ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_before_any_write_it_resumes_to_the_same_bytes(
    step: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", many_pairs(30))
    monkeypatch.setattr("angle_llm.model.text_vectors.TEXTS_AT_ONCE", 16)
    monkeypatch.setattr("angle_llm.tools.hard_negatives.QUERIES_AT_ONCE", 8)

    def work(place: Path) -> None:
        mine(place, base, pairs, ranks=(2, 20), negatives=2)

    kills = check_resumes_after_any_kill(work, tmp_path, step)
    assert kills > 60 / step
    assert (tmp_path / "undisturbed" / "triples.jsonl").read_bytes().count(b"\n") == 30

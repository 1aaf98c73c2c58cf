"""`angle-llm data score`: teacher scores of pairs, in groups."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from json_lines import read_rows, write_rows
from kills import check_resumes_after_any_kill, contents
from tiny import save_tiny_base
from tiny_rerankers import RERANKERS, save_tiny_reranker

from angle_llm import cli
from angle_llm.data import DataError, Group
from angle_llm.data.examples import load_examples
from angle_llm.io import FolderError
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.reranker import Reranker
from angle_llm.prompts import PromptTemplate
from angle_llm.settings.commands import MineSettings, ScoreSettings
from angle_llm.settings.parsing import SettingsError
from angle_llm.settings.train import DataSource
from angle_llm.tools.mine import mine_main, score_main

TRIPLES = [
    {"anchor": "A man eats.", "positive": "Someone eats.", "negative": "A dog runs."},
    {"anchor": "A dog runs.", "positive": "An animal moves.", "negative": "Someone eats."},
    {"anchor": "A man eats.", "positive": "Someone has food.", "negative": "It rains."},
    {"anchor": "A man eats.", "positive": "Someone eats.", "negative": "Someone has food."},
]
GROUPS = [
    ("A man eats.", ("Someone eats.", "Someone has food."), ("A dog runs.", "It rains.")),
    ("A dog runs.", ("An animal moves.",), ("Someone eats.",)),
]
"""Of the triples: one for each query; a negative that is a positive in another row is left out."""
SIDES = {"query": "question: {text}", "document": "passage: {text}"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base("bert", tmp_path_factory.mktemp("base"))


@pytest.fixture
def sides(tmp_path: Path) -> dict[str, str]:
    """Prompt files by side."""
    for side, template in SIDES.items():
        (tmp_path / f"{side}.yaml").write_text(f"name: {side}\ntemplate: '{template}'\n")
    return {side: str(tmp_path / f"{side}.yaml") for side in SIDES}


def score(folder: Path, base: Path, file: Path, name: str = "scored", **changed: Any) -> list[Group]:
    """The groups of a run, as training reads them."""
    out = folder / f"{name}.jsonl"
    score_main(ScoreSettings(file=str(file), teacher=str(base), out=out, **changed))
    return [one for one in load_examples(DataSource(path=str(out))).examples if isinstance(one, Group)]


def cosines(encoder: SentenceEncoder, group: Group) -> list[float]:
    texts = [*group.positives, *group.negatives]
    query, others = encoder.encode_query([group.query]), encoder.encode_document(texts)
    unit = [rows.astype(np.float64) / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (query, others)]
    found: list[float] = (unit[1] @ unit[0][0]).tolist()
    return found


def test_the_command_writes_groups_with_cosines(tmp_path: Path, base: Path) -> None:
    file, out = write_rows(tmp_path / "t.jsonl", TRIPLES), tmp_path / "scored.jsonl"
    cli.run(["data", "score", str(file), "--teacher", str(base), "--out", str(out)])
    groups = [one for one in load_examples(DataSource(path=str(out))).examples if isinstance(one, Group)]
    assert [(one.query, one.positives, one.negatives) for one in groups] == GROUPS
    encoder = SentenceEncoder.from_pretrained(str(base))
    for group in groups:
        np.testing.assert_allclose(group.scores or (), cosines(encoder, group), atol=2e-6)  # float32, and six digits
    report = json.loads((tmp_path / "scored.report.json").read_text())
    assert report["identity"]["model"]["pooling"] == encoder.pooling
    assert set(report["median_cosine"]) == {"positives", "own_negatives"}
    assert set(contents(tmp_path)) == {"t.jsonl", "scored.jsonl", "scored.report.json"}
    cli.run(["data", "score", str(file), "--teacher", str(base), "--out", str(out)])
    with pytest.raises(FolderError, match=r"settings\.positive_above .*--out"):
        score(tmp_path, base, file, positive_above=0.7)
    split = score(tmp_path, base, file, "split", split_positives=True)
    assert [(one.query, one.positives, one.negatives) for one in split] == [
        (query, (text,), negatives) for query, positives, negatives in GROUPS for text in positives
    ]
    for group in split:
        np.testing.assert_allclose(group.scores or (), cosines(encoder, group), atol=2e-6)


def test_every_format_that_makes_pairs_is_scored(tmp_path: Path, base: Path) -> None:
    pairs = write_rows(tmp_path / "p.jsonl", [{"anchor": "a b", "positive": "c"}, {"anchor": "d", "positive": "e"}])
    assert [(one.query, one.positives, one.negatives) for one in score(tmp_path, base, pairs, "a")] == [
        ("a b", ("c",), ()),
        ("d", ("e",), ()),
    ]
    scored = [("q", "p", 5), ("q", "n", 2), ("r", "n", 1), ("q", "m", 4.5)]
    rows = [{"sentence1": one, "sentence2": two, "score": value} for one, two, value in scored]
    found = score(tmp_path, base, write_rows(tmp_path / "s.jsonl", rows), "b", score_range=(0, 5))
    assert [(one.query, one.positives, one.negatives) for one in found] == [("q", ("p", "m"), ("n",))]
    group = {"query": "q", "pos": ["p", "r"], "neg": ["n"], "pos_scores": [1, 2], "neg_scores": [3]}
    (one,) = score(tmp_path, base, write_rows(tmp_path / "g.jsonl", [group]), "c")
    assert (one.positives, one.negatives) == (("p", "r"), ("n",))
    assert one.scores != (1.0, 2.0, 3.0), "the scores are those of the teacher"
    with pytest.raises(DataError, match="positive"):
        score(tmp_path, base, write_rows(tmp_path / "n.jsonl", rows[1:3]), "d", score_range=(0, 5))
    with pytest.raises(SettingsError, match=r"--out: .*x\.csv"):
        score_main(ScoreSettings(file="-", teacher="-", out=Path("x.csv")))


def test_queries_and_documents_have_their_prompts(tmp_path: Path, base: Path, sides: dict[str, str]) -> None:
    file = write_rows(tmp_path / "t.jsonl", TRIPLES)
    one, two = score(tmp_path, base, file), score(tmp_path, base, file, "two", prompt=sides)
    assert [(group.query, group.positives, group.negatives) for group in two] == GROUPS
    prompts = {side: PromptTemplate(name=side, template=template) for side, template in SIDES.items()}
    encoder = SentenceEncoder.from_pretrained(str(base)).with_prompt(prompts)
    for group, plain in zip(two, one, strict=True):
        np.testing.assert_allclose(group.scores or (), cosines(encoder, group), atol=2e-6)  # float32, and six digits
        assert group.scores != plain.scores


def test_mining_compares_queries_with_documents(tmp_path: Path, base: Path, sides: dict[str, str]) -> None:
    """ "A dog runs." is a query and a document."""
    file, out = write_rows(tmp_path / "t.jsonl", TRIPLES[:2]), tmp_path / "mined.jsonl"
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("It rains.\nIt snows.\nSomeone sings.\nPeople talk.\n")
    options: dict[str, Any] = {"prompt": sides, "corpus": corpus, "relative_margin": None, "judge": str(base)}
    mine_main(MineSettings(pairs=str(file), model=str(base), out=out, negatives=2, **options))
    prompts = {side: PromptTemplate(name=side, template=template) for side, template in SIDES.items()}
    encoder = SentenceEncoder.from_pretrained(str(base)).with_prompt(prompts)
    groups = [one for one in load_examples(DataSource(path=str(out))).examples if isinstance(one, Group)]
    assert len(groups) == 2
    for group in groups:
        np.testing.assert_allclose(group.scores or (), cosines(encoder, group), atol=2e-6)  # float32, and six digits


@pytest.mark.slow
def test_killed_before_any_write_it_resumes_to_the_same_bytes(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("angle_llm.model.text_vectors.TEXTS_AT_ONCE", 12)
    file = write_rows(tmp_path / "t.jsonl", [row | {"negative": f"text {n}"} for n in range(12) for row in TRIPLES])
    kills = check_resumes_after_any_kill(lambda place: score(place, base, file), tmp_path, 17)
    assert kills > 1


def test_scored_groups_train_with_a_teacher(tmp_path: Path, base: Path) -> None:
    """Groups of different sizes, one without negatives, and one without scores."""
    score(tmp_path, base, write_rows(tmp_path / "t.jsonl", TRIPLES))
    rows = read_rows(tmp_path / "scored.jsonl")
    rows += [{"query": "It rains.", "positives": ["Water falls."], "scores": [0.9]}]
    rows += [{"query": "It snows.", "positives": ["Snow falls."], "negatives": ["It rains."]}]
    data = write_rows(tmp_path / "groups.jsonl", rows)
    options = ["--model.path", str(base), "--model.dtype", "float32", "--lora.rank", "0", "--batch-size", "4"]
    options += ["--objective.kl-weight", "1"]
    cli.run(["train", "--data.path", str(data), "--run-dir", str(tmp_path / "run"), "--max-steps", "1", *options])
    (line, *_) = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert line["pairs"] == 4 + 2 + 1 + 2
    assert np.isfinite(line["loss"])


# --- rerankers ------------------------------------------------------------------------------------------------------------


@pytest.mark.needs("sentence_transformers")
@pytest.mark.parametrize("kind", RERANKERS)
def test_a_reranker_scores_every_pair_and_the_student_learns_from_it(
    kind: str, tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from sentence_transformers import CrossEncoder

    file, folder = write_rows(tmp_path / "groups.jsonl", TRIPLES), save_tiny_reranker(kind, tmp_path / "RERANKER")
    out = tmp_path / "scored.jsonl"
    monkeypatch.chdir(tmp_path)
    guide = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    angle-llm (.* --reranker .*)$", guide, re.MULTILINE)
    cli.run(command.split())
    groups = [one for one in load_examples(DataSource(path=str(out))).examples if isinstance(one, Group)]
    assert [(one.query, one.positives, one.negatives) for one in groups] == GROUPS
    library = CrossEncoder(str(folder), activation_fn=torch.nn.Identity(), device="cpu")
    for group in groups:
        due = [library.predict((group.query, text)).item() for text in (*group.positives, *group.negatives)]
        np.testing.assert_allclose(group.scores or (), due, atol=1e-5)  # float32 in batches with other padding
    report = json.loads((tmp_path / "scored.report.json").read_text())
    assert set(report["median_score"]) == {"positives", "own_negatives"}
    cli.run(command.split())
    with pytest.raises(FolderError, match=r"model\.\w+ .*--out"):
        score(tmp_path, base, file)  # by an encoder, in the same file
    run = ["train", "--data.path", str(out), "--run-dir", str(tmp_path / "run"), "--max-steps", "1"]
    run += ["--model.path", str(base), "--model.dtype", "float32", "--lora.rank", "0", "--batch-size", "2"]
    run += ["--objective.kl-weight", "1", "--objective.in-batch-weight", "0", "--objective.teacher-temperature", "1"]
    cli.run(run)
    (line, *_) = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert line["loss/kl"] > 0


@pytest.mark.needs("sentence_transformers")
def test_a_reranker_killed_before_any_write_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("angle_llm.tools.hard_negatives._RERANKED_AT_ONCE", 2)
    rows = [row | {"anchor": f"text {n}"} for n in range(5) for row in TRIPLES]
    file, folder = write_rows(tmp_path / "t.jsonl", rows), save_tiny_reranker("bert", tmp_path / "reranker")

    def work(place: Path) -> None:
        score_main(ScoreSettings(file=str(file), reranker=str(folder), out=place / "x.jsonl", device="cpu"))

    assert check_resumes_after_any_kill(work, tmp_path, 19) > 1


def test_a_finished_part_is_not_scored_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run stops at the third part, so it must have taken two parts from the first run."""
    monkeypatch.setattr("angle_llm.tools.hard_negatives._RERANKED_AT_ONCE", 1)
    calls: list[int] = []

    class Counting(Reranker):
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def scores(self, pairs: Sequence[tuple[str, str]]) -> Any:
            calls.append(len(pairs))
            if len(calls) == 3:
                raise KeyboardInterrupt
            return np.arange(len(pairs), dtype=np.float32)

    monkeypatch.setattr("angle_llm.tools.mine.Reranker", Counting)
    monkeypatch.setattr("angle_llm.tools.mine.scorer_identity", lambda _: {"reranker": "x"})
    rows = [row | {"anchor": f"text {n}"} for n in range(4) for row in TRIPLES[:1]]
    settings = ScoreSettings(
        file=str(write_rows(tmp_path / "t.jsonl", rows)), reranker="x", out=tmp_path / "scored.jsonl"
    )
    with pytest.raises(KeyboardInterrupt):
        score_main(settings)
    score_main(settings)
    assert calls == [2] * 5  # 3 and 2 of 4 parts
    assert [row["scores"] for row in read_rows(tmp_path / "scored.jsonl")] == [[0.0, 1.0]] * 4


def test_flags_of_the_teacher_and_the_reranker(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    for named in ({}, {"teacher": "a", "reranker": "b"}):
        with pytest.raises(SettingsError, match="--teacher ENCODER or --reranker RERANKER"):
            ScoreSettings(file="-", out=out, **named)
    for name in ("pooling", "instruction"):
        with pytest.raises(SettingsError, match=f"--{name} belongs to --teacher"):
            ScoreSettings(file="-", out=out, reranker="b", **{name: "mean"})
    file, reranker = write_rows(tmp_path / "t.jsonl", TRIPLES), save_tiny_reranker("bert", tmp_path / "r")
    with pytest.raises(SettingsError, match=r"--teacher .*r is a reranker, which has no vectors\. Use --reranker"):
        score_main(ScoreSettings(file=str(file), out=out, teacher=str(reranker)))

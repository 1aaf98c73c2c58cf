"""AnglE-BERT on natural language inference: all weights trained, first token pooled (arXiv 2309.12871).

    accelerate launch --num_processes 1 recipes/bert_nli.py
    accelerate launch --num_processes 1 recipes/bert_nli.py --config recipes/minilm_starter.yaml

The second stage goes on from the first one's model with graded pairs, STS-B train and SICK train mixed. Both stages, with MiniLM:

    python recipes/ablation.py --grid recipes/grids/bert.yaml --data-dir DATA --rows nli nli-mix --seeds 42

For another BERT name it in a copy of that grid.
"""

from angle_llm.cli import guarded, launch
from angle_llm.config import (
    DataSettings,
    LoraSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    TrainSettings,
)

PUBLISHED = TrainSettings(
    run_dir="runs/bert_nli",
    # 1. The backbone reads the bare sentence.
    model=ModelSettings(
        path="google-bert/bert-base-uncased", dtype="float32", prompt="plain", pooling="cls", max_length=128
    ),
    # 2. No adapter: every weight is trained.
    lora=LoraSettings(rank=0),
    # 3. SNLI and MNLI train: entailment is 1, contradiction 0, neutral dropped.
    data=DataSettings(path="SeanLee97/all_nli_angle_format_a", format="scored_pair"),
    # 4. The objective, without the cosine term. In-batch 30 there is 15 here (see recipes/llama2_nli.py); the
    #    published angle temperature 20 multiplies, 0.05 divides.
    objective=ObjectiveSettings(
        cosine_weight=0,
        in_batch_weight=15,
        angle_weight=1,
        in_batch_temperature=0.05,
        angle_temperature=0.05,
        angle_form="reference",
        contrastive_form="symmetric",
    ),
    # 5. The optimizer: batches of 128 on each of 8 GPUs, 16 accumulated.
    optimizer=OptimizerSettings(learning_rate=5e-5, warmup=0.0),
    batch_size=128,
    accumulation=128,
    epochs=10,
)

if __name__ == "__main__":
    guarded(launch, PUBLISHED, description=__doc__)

"""AnglE-LLaMA2-7B on natural language inference, version 2 of the published recipe (arXiv 2309.12871).

    accelerate launch --num_processes 1 recipes/llama2_nli.py
    accelerate launch --num_processes 1 recipes/llama2_nli.py --config recipes/starter.yaml

Without options it fetches LLaMA-2-7B and AllNLI from the hub and trains at the published settings; a settings file or
single options replace any of them.
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
    run_dir="runs/llama2_nli",
    # 1. The backbone, and how a sentence is put to it.
    model=ModelSettings(
        path="NousResearch/Llama-2-7b-hf", dtype="bfloat16", prompt="summarize_one_word", pooling="last", max_length=50
    ),
    # 2. The adapter.
    lora=LoraSettings(rank=32, alpha=32, dropout=0.1, targets=["q_proj", "v_proj"]),
    # 3. SNLI and MNLI train: entailment is 1, contradiction 0, neutral dropped.
    data=DataSettings(path="SeanLee97/all_nli_angle_format_a", format="scored_pair"),
    # 4. The objective. The published weights are 1/35/1, with an in-batch mean over all rows; here it is over the rows
    #    with a positive, half of them on this data, so 35 there is 17.5 here.
    objective=ObjectiveSettings(
        cosine_weight=1,
        in_batch_weight=17.5,
        angle_weight=1,
        cosine_temperature=0.05,
        in_batch_temperature=0.05,
        angle_temperature=1.0,
        angle_form="reference",
        contrastive_form="symmetric",
    ),
    # 5. The optimizer: 120 pairs on each of 4 GPUs, 4 accumulated, is 16 batches of 120 a step.
    optimizer=OptimizerSettings(learning_rate=1e-4, warmup=100),
    batch_size=120,
    accumulation=16,
    epochs=1,
    # 6. Memory: 4,096 tokens of activations, some 23 GiB beside the 12.3 of the base (by arithmetic). Larger batches are
    #    encoded twice.
    micro_batch_tokens=4096,
    graph_tokens=4096,
)

if __name__ == "__main__":
    guarded(launch, PUBLISHED, description=__doc__)

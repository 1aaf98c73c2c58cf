"""AnglE-BERT on natural language inference: all weights trained, first token pooled (arXiv 2309.12871).

The published settings; this training has not been run with this code yet.

    accelerate launch --num_processes 1 recipes/bert_nli.py
    accelerate launch --num_processes 1 --num_cpu_threads_per_process 2 recipes/bert_nli.py --config recipes/minilm_starter.yaml

A second stage can train the model further on graded pairs (STS-B train and SICK train, mixed). Both stages with MiniLM:

    python eval/ablation.py --grid eval/grids/bert.yaml --data-dir DATA --rows nli nli-mix --seeds 42

For another BERT, change the model in a copy of this grid. On a GPU, texts are padded because BERT has attention dropout,
and training steps compute float32 products in TF32.
"""

from angle_llm.cli import launch, run_cli
from angle_llm.settings import train as config

PUBLISHED = config.TrainSettings(
    run_dir="runs/bert_nli",
    # 1. The backbone, without a prompt.
    model=config.ModelSettings(
        path="google-bert/bert-base-uncased", dtype="float32", prompt="plain", pooling="cls", max_length=128
    ),
    # 2. No adapter: all weights are trained.
    lora=config.LoraSettings(rank=0),
    # 3. SNLI and MNLI train: entailment is 1, contradiction 0, neutral dropped.
    data=config.DataSettings(path="SeanLee97/all_nli_angle_format_a", format="scored_pair"),
    # 4. The objective, without the cosine term. The published in-batch weight 30 is 15 here (see
    #    recipes/llama2_nli.py). The published angle temperature 20 multiplies; 0.05 divides.
    objective=config.ObjectiveSettings(
        cosine_weight=0,
        in_batch_weight=15,
        angle_weight=1,
        in_batch_temperature=0.05,
        angle_temperature=0.05,
        angle_form="reference",
        contrastive_form="symmetric",
    ),
    # 5. The optimizer. The published command has 128 pairs, 8 GPUs and 16 accumulated batches; angle-emb divides the latter
    #    by the number of GPUs, which leaves 16 batches of 128 per step.
    optimizer=config.OptimizerSettings(learning_rate=5e-5, warmup=50),
    batch_size=128,
    accumulation=16,
    epochs=10,
)

if __name__ == "__main__":
    run_cli(launch, PUBLISHED, description=__doc__)

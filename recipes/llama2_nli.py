"""AnglE-LLaMA2-7B on natural language inference, version 2 of the published recipe (arXiv 2309.12871).

    accelerate launch --num_processes 1 recipes/llama2_nli.py
    accelerate launch --num_processes 1 --num_cpu_threads_per_process 2 recipes/llama2_nli.py --config recipes/starter.yaml

Without options it downloads LLaMA-2-7B and AllNLI from the hub and trains with the published settings. `--config FILE` and
flags replace settings. As in the published run, the base is in NF4 if bitsandbytes is installed and a GPU is available;
`--model.bits None` keeps it in bfloat16, and `--model.bits 4` requires NF4. Another `--model.path` is quantised only if
`--model.bits` is set.
"""

import importlib.util
import os
from dataclasses import replace

from angle_llm.cli import run_cli, train
from angle_llm.settings import train as config
from angle_llm.settings.parsing import parse_settings

PUBLISHED = config.TrainSettings(
    run_dir="runs/llama2_nli",
    # 1. The backbone, and the prompt around each text.
    model=config.ModelSettings(
        path="NousResearch/Llama-2-7b-hf",
        dtype="bfloat16",
        bits=4,
        prompt="summarize_one_word",
        pooling="last",
        max_length=50,
    ),
    # 2. The adapter.
    lora=config.LoraSettings(rank=32, alpha=32, dropout=0.1, targets=["q_proj", "v_proj"]),
    # 3. SNLI and MNLI train: entailment is 1, contradiction 0, neutral dropped.
    data=config.DataSettings(path="SeanLee97/all_nli_angle_format_a", format="scored_pair"),
    # 4. The objective. The published weights are 1/35/1, with an in-batch mean over all rows. Here the mean is over the
    #    rows with a positive, half of the rows of this data, so 17.5 is the same as 35 there.
    objective=config.ObjectiveSettings(
        cosine_weight=1,
        in_batch_weight=17.5,
        angle_weight=1,
        cosine_temperature=0.05,
        in_batch_temperature=0.05,
        angle_temperature=1.0,
        angle_form="reference",
        contrastive_form="symmetric",
    ),
    # 5. The optimizer. The published command has 120 pairs, 4 GPUs and 4 accumulated batches; angle-emb divides the latter by
    #    the number of GPUs, which leaves 4 batches of 120 per step.
    optimizer=config.OptimizerSettings(learning_rate=1e-4, warmup=100),
    batch_size=120,
    accumulation=4,
    epochs=1,
    # 6. Memory: the token budgets are chosen for the free memory of the GPU when the run starts.
)


def main() -> None:
    """Train with the published settings, overridden by `--config FILE` and flags."""
    unquantised = replace(PUBLISHED, model=replace(PUBLISHED.model, bits=None))
    settings = parse_settings(unquantised, description=__doc__ or "")
    if settings.model.path == PUBLISHED.model.path and settings.model.bits is None:
        quantised = parse_settings(PUBLISHED)
        reason = not_quantised_because()
        if reason is None:
            settings = quantised
        elif (
            quantised != settings and os.environ.get("RANK", "0") == "0"
        ):  # equal settings: the user set --model.bits None
            print(
                f"the base is in {settings.model.dtype}, not in NF4 as in the published run: {reason}. "
                "To accept this, set --model.bits None."
            )
    train(settings)


def not_quantised_because() -> str | None:
    """Return the reason why the base cannot be quantised to NF4; None if it can."""
    import torch

    if not torch.cuda.is_available():
        return "this machine has no GPU"
    installed = importlib.util.find_spec("bitsandbytes") is not None
    return None if installed else "bitsandbytes is not installed (pip install 'angle_llm[quantization]')"


if __name__ == "__main__":
    run_cli(main)

"""A whole fine-tuning run, from settings to a directory: what the recipes and `angle-llm train` call."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from angle_llm.settings import TrainSettings, save_settings


def fine_tune(settings: TrainSettings) -> Path:
    """Turns a language model into a sentence encoder; returns the directory of the model to use.

    The run directory holds settings.yaml (starts the same run again), metrics.jsonl, tensorboard/ and model/.
    """
    from accelerate.utils import set_seed

    from angle_llm.data.sources import load_examples
    from angle_llm.evaluation.sts import sts_score
    from angle_llm.modeling.adapters import count_parameters
    from angle_llm.modeling.encoder import SentenceEncoder
    from angle_llm.objectives.angle import AngleObjective
    from angle_llm.training.loop import train

    # 1. What to learn from, and how it is measured. Both fail fast, before weights load.
    data = load_examples(settings.data)
    print(data.report.summary())
    objective = AngleObjective(**asdict(settings.objective))
    evaluate = None
    if settings.evaluation.pairs:
        evaluate = sts_score(settings.evaluation.pairs, micro_batch_tokens=settings.micro_batch_tokens)

    # 2. The run directory knows how to start this run again.
    run_dir = Path(settings.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    save_settings(settings, run_dir / "settings.yaml")

    # 3. The encoder: a backbone, the prompt, the pooling, an adapter.
    set_seed(settings.seed)
    model = settings.model
    print(f"loading {model.path}")
    encoder = SentenceEncoder.from_pretrained(
        model.path,
        prompt=model.prompt,
        pooling=model.pooling,
        max_length=model.max_length,
        dtype=model.dtype,
        revision=model.revision,
    )
    if settings.lora.rank:
        encoder.add_lora(settings.lora)
    trainable, total = count_parameters(encoder.model)
    print(f"training {trainable:,} of {total:,} parameters ({trainable / total:.2%})")

    # 4. Train, keep the best.
    result = train(encoder, data.examples, objective, settings, evaluate)
    if result.best_score is not None:
        print(f"evaluation: {result.start_score:.2f} before, {result.best_score:.2f} after (Spearman × 100)")
    return result.model_dir

"""Worker that runs jobs with the trainer, loss and `encode` of sentence-transformers 6.2."""

from __future__ import annotations

import importlib
import tempfile
from typing import Any

import torch

from speed_peers.job import Answer, Clock, Job, load_start, serve, timed

# Not installed where this file is type-checked.
st: Any = importlib.import_module("sentence_transformers")
modules: Any = importlib.import_module("sentence_transformers.sentence_transformer.modules")
losses: Any = importlib.import_module("sentence_transformers.sentence_transformer.losses")

POOLINGS = {"last": "lasttoken", "mean": "mean"}


def open_model(job: Job) -> Any:
    """Open the model of the job with sentence-transformers, with the pooling of the job."""
    transformer = modules.Transformer(
        job.model,
        max_seq_length=job.max_length,
        model_kwargs={"dtype": getattr(torch, job.dtype)},
        # The default applies the chat template of the tokenizer, which adds a system prompt and twenty tokens.
        modality_config={"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        module_output_name="token_embeddings",
    )
    pooling = modules.Pooling(transformer.get_embedding_dimension(), POOLINGS[job.pooling])
    return st.SentenceTransformer(modules=[transformer, pooling], device="cpu")


def timed_training(model: Any, data: Any, loss: Any, *, in_order: bool = False, **arguments: Any) -> Answer:
    """Train with the trainer of the library on the CPU; return seconds and loss of each step.

    `in_order`: keep the order of the rows; the default shuffles. `arguments` are more training arguments.
    """
    from torch.utils.data import BatchSampler, SequentialSampler

    common = {"use_cpu": True, "save_strategy": "no", "logging_strategy": "no", "report_to": "none"}
    with tempfile.TemporaryDirectory() as folder:
        settings = st.SentenceTransformerTrainingArguments(output_dir=folder, **common, **arguments)
        trainer = st.SentenceTransformerTrainer(model=model, args=settings, train_dataset=data, loss=loss)
        if in_order:  # replacing this method sets the order, as documented
            trainer.get_batch_sampler = lambda dataset, batch_size, drop_last, **_: BatchSampler(
                SequentialSampler(dataset), batch_size, drop_last
            )
        clock = Clock(trainer)
        trainer.train()
    return clock.answer()


def train(job: Job) -> Answer:
    """Time the training steps of the job with sentence-transformers."""
    from datasets import Dataset
    from peft import LoraConfig, TaskType

    model = open_model(job)
    how: dict[str, Any] = {"lora_alpha": job.alpha, "lora_dropout": 0.0, "target_modules": "all-linear"}
    model.add_adapter(LoraConfig(task_type=TaskType.FEATURE_EXTRACTION, r=job.rank, **how))
    load_start(model, job.adapter)
    texts = [[job.template.replace("{text}", text) for text in column] for column in zip(*job.triples, strict=True)]
    return timed_training(
        model,
        Dataset.from_dict(dict(zip(("anchor", "positive", "negative"), texts, strict=True))),
        losses.MultipleNegativesRankingLoss(model, scale=20.0),
        in_order=True,
        per_device_train_batch_size=job.batch,
        max_steps=job.steps,
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_grad_norm=1.0,
        disable_tqdm=True,
    )


def encode(job: Job) -> Answer:
    """Time the encoding of the texts of the job with sentence-transformers."""
    model = open_model(job)

    def formatted(texts: list[str]) -> Any:  # prompts of the library can only precede a text
        texts = [job.template.replace("{text}", text) for text in texts]
        return model.encode(texts, batch_size=job.batch, show_progress_bar=False)

    return timed(formatted, job)


if __name__ == "__main__":
    serve(train, encode)

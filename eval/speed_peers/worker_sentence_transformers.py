"""sentence-transformers 6.2 as a worker: its own trainer, loss and `encode`. Runs in an environment of its own."""

from __future__ import annotations

import importlib
import tempfile
import time
from typing import Any

import torch

from speed_peers.job import Answer, EncodeJob, TrainJob, load_start, serve

# Not installed where this file is type-checked.
st: Any = importlib.import_module("sentence_transformers")
modules: Any = importlib.import_module("sentence_transformers.sentence_transformer.modules")
losses: Any = importlib.import_module("sentence_transformers.sentence_transformer.losses")

POOLINGS = {"last": "lasttoken", "mean": "mean"}


def open_model(model: str, dtype: str, max_length: int, pooling: str) -> Any:
    transformer = modules.Transformer(
        model,
        max_seq_length=max_length,
        model_kwargs={"dtype": getattr(torch, dtype)},
        # Left to itself it wraps every text in the tokenizer's chat template, where there is one: a system prompt and
        # twenty tokens more, and another last token.
        modality_config={"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        module_output_name="token_embeddings",
    )
    return st.SentenceTransformer(
        modules=[transformer, modules.Pooling(transformer.get_embedding_dimension(), POOLINGS[pooling])], device="cpu"
    )


def train(job: TrainJob) -> Answer:
    from datasets import Dataset
    from peft import LoraConfig, TaskType
    from torch.utils.data import BatchSampler, SequentialSampler

    from speed_peers.trainer_clock import Clock

    model = open_model(job.model, job.dtype, job.max_length, "last")
    model.add_adapter(
        LoraConfig(
            task_type=TaskType.FEATURE_EXTRACTION,
            r=job.rank,
            lora_alpha=job.alpha,
            lora_dropout=0.0,
            target_modules="all-linear",
        )
    )
    load_start(model, job.adapter)
    columns = zip(*job.triples, strict=True)
    data = Dataset.from_dict(
        {
            name: [job.template.replace("{text}", text) for text in texts]
            for name, texts in zip(("anchor", "positive", "negative"), columns, strict=True)
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = st.SentenceTransformerTrainer(
            model=model,
            args=st.SentenceTransformerTrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=job.batch,
                max_steps=job.steps,
                learning_rate=job.learning_rate,
                lr_scheduler_type="constant",
                warmup_steps=0,
                max_grad_norm=1.0,
                use_cpu=True,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=data,
            loss=losses.MultipleNegativesRankingLoss(model, scale=20.0),
        )
        # Its documentation names this method as the one to replace for an order of one's own; the default shuffles.
        trainer.get_batch_sampler = lambda dataset, batch_size, drop_last, **_: BatchSampler(
            SequentialSampler(dataset), batch_size, drop_last
        )
        clock = Clock(trainer)
        trainer.train()
    return {"step_seconds": clock.step_seconds, "losses": clock.losses}


def encode(job: EncodeJob) -> Answer:
    model = open_model(job.model, job.dtype, job.max_length, job.pooling)
    # Its own prompts can only stand before the text.
    template = job.template or "{text}"
    texts = [template.replace("{text}", text) for text in job.texts]
    model.encode(texts[: job.batch], batch_size=job.batch)  # threads and memory wake up
    started = time.perf_counter()
    rows_ND = model.encode(texts, batch_size=job.batch, show_progress_bar=False)
    return {"seconds": time.perf_counter() - started, "rows": rows_ND}


if __name__ == "__main__":
    serve(train, encode)

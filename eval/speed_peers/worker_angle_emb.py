"""Worker that runs jobs with `fit` and `encode` of angle-emb 0.6.1."""

from __future__ import annotations

import importlib
import tempfile
from typing import Any

import torch

from speed_peers.job import Answer, Clock, Job, load_start, serve, timed

angle: Any = importlib.import_module("angle_emb.angle")  # not installed where this file is type-checked


def train(job: Job) -> Answer:
    """Time the training steps of the job with angle-emb's `fit`."""
    from datasets import Dataset

    model = angle.AnglE(
        job.model,
        max_length=job.max_length,
        is_llm=True,
        pooling_strategy="last",
        apply_lora=True,  # on all linear layers but the language-model head
        lora_config_kwargs={"r": job.rank, "lora_alpha": job.alpha, "lora_dropout": 0.0},
        train_mode=True,
        torch_dtype=getattr(torch, job.dtype),
        device="cpu",
    )
    load_start(model.backbone, job.adapter)
    clocks: list[Clock] = []
    make = angle.AngleTrainer

    def clocked(**arguments: Any) -> Any:
        trainer = make(**arguments)
        clocks.append(Clock(trainer))
        return trainer

    angle.AngleTrainer = clocked  # `fit` creates the trainer itself and takes no callbacks
    columns = zip(*job.triples, strict=True)
    data = Dataset.from_dict(dict(zip(("query", "positive", "negative"), map(list, columns), strict=True)))
    with tempfile.TemporaryDirectory() as folder:
        model.fit(
            data,
            batch_size=job.batch,
            output_dir=folder,
            learning_rate=job.learning_rate,
            warmup_steps=0,
            save_strategy="no",
            # (ibn_w * contrast with positives + cln_w * contrast with positives and negatives) / 2: with 0 and 2, the
            # objective of the job.
            loss_kwargs={"cosine_w": 0.0, "angle_w": 0.0, "ibn_w": 0.0, "cln_w": 2.0, "ibn_tau": 20.0},
            filter_duplicate=False,  # True would drop rows that the other libraries train on
            query_prompt=job.template,
            doc_prompt=job.template,
            argument_kwargs={
                "max_steps": job.steps,
                "lr_scheduler_type": "constant",
                "max_grad_norm": 1.0,
                "train_sampling_strategy": "sequential",
                "use_cpu": True,
                "report_to": "none",
                "disable_tqdm": True,
            },
        )
    return clocks[0].answer()


def encode(job: Job) -> Answer:
    """Time the encoding of the texts of the job with angle-emb."""
    how: dict[str, Any] = {"is_llm": True, "pooling_strategy": job.pooling, "torch_dtype": getattr(torch, job.dtype)}
    model = angle.AnglE.from_pretrained(job.model, max_length=job.max_length, device="cpu", **how)

    def in_batches(texts: list[str]) -> list[Any]:
        # `encode` takes all texts as one batch; the evaluation of angle-emb makes batches in file order.
        starts = range(0, len(texts), job.batch)
        return [row for first in starts for row in model.encode(texts[first : first + job.batch], prompt=job.template)]

    return timed(in_batches, job)


if __name__ == "__main__":
    serve(train, encode)

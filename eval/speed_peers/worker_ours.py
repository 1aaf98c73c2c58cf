"""angle_llm as a worker. The two short functions `train_step` and `encode_texts` are all that is timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn import Parameter
from torch.optim import AdamW

from angle_llm import AngleObjective, SentenceEncoder, TextBatch
from angle_llm.config import LoraSettings
from angle_llm.data.formats import Triple
from angle_llm.model.tokenizer import SentenceTokenizer
from angle_llm.prompts import PromptTemplate
from angle_llm.train.step import StepResult, boundary_step
from speed_peers.job import Answer, EncodeJob, TrainJob, adapter_key, load_start, serve

OBJECTIVE = AngleObjective(
    cosine_weight=0, in_batch_weight=1, angle_weight=0, in_batch_temperature=0.05, contrastive_form="forward"
)
UNCUT = 8192


def train_step(
    encoder: SentenceEncoder, optimizer: AdamW, trainable: Sequence[Parameter], triples: Sequence[Triple], job: TrainJob
) -> StepResult:
    """One optimizer step, as `angle_llm.train.trainer` takes it, but with tokenising and planning in line: the others'
    times hold theirs, too."""
    encoder.model.train()
    batch = TextBatch.from_examples(triples)
    plan = encoder.plan_ids(encoder.tokenize(batch.texts), job.micro_batch_tokens)
    result = boundary_step(encoder.model, plan, batch, OBJECTIVE, graph_tokens=job.graph_tokens)
    torch.nn.utils.clip_grad_norm_(trainable, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return result


def encode_texts(encoder: SentenceEncoder, texts: Sequence[str]) -> np.ndarray:
    """The public way from texts to rows."""
    return encoder.encode(texts)


def train(job: TrainJob) -> Answer:
    encoder = open_encoder(job.model, job.template, "last", job.max_length, job.dtype)
    encoder.add_lora(LoraSettings(rank=job.rank, alpha=job.alpha, dropout=0, targets=["all-linear"]))
    load_start(encoder.model, job.adapter)
    trainable = [parameter for parameter in encoder.model.parameters() if parameter.requires_grad]
    optimizer = AdamW(trainable, lr=job.learning_rate, weight_decay=0)
    triples = [Triple(*texts) for texts in job.triples]

    seconds, results = [], []
    for first in range(0, len(triples), job.batch):
        started = time.perf_counter()
        results.append(train_step(encoder, optimizer, trainable, triples[first : first + job.batch], job))
        seconds.append(time.perf_counter() - started)
    facts = {
        **_text_facts(encoder, [text for texts in job.triples for text in texts]),
        "logical_tokens": sum(result.logical_tokens for result in results),
        "computed_tokens": sum(result.computed_tokens for result in results),
    }
    return {"step_seconds": seconds, "losses": [result.loss for result in results], "facts": facts}


def encode(job: EncodeJob) -> Answer:
    encoder = open_encoder(job.model, job.template or "{text}", job.pooling, job.max_length, job.dtype)
    encode_texts(encoder, job.texts[: job.batch])  # threads and memory wake up
    started = time.perf_counter()
    rows_ND = encode_texts(encoder, job.texts)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "rows": rows_ND, "facts": _text_facts(encoder, job.texts)}


def open_encoder(model: str, template: str, pooling: str, max_length: int, dtype: str) -> SentenceEncoder:
    prompt = PromptTemplate(name="speed", template=template)
    return SentenceEncoder.from_pretrained(
        model, prompt=prompt, pooling=pooling, max_length=max_length, dtype=dtype, device="cpu"
    )


def _text_facts(encoder: SentenceEncoder, texts: Sequence[str]) -> dict[str, int]:
    uncut = SentenceTokenizer(encoder.tokenizer, encoder.prompt, UNCUT)
    too_long = sum(len(ids) > encoder.max_length for ids in uncut(texts))
    return {"texts": len(texts), "unique_texts": len(set(texts)), "too_long": too_long}


def prepare(model: str, folder: Path, adapter: Path, rank: int) -> None:
    """Saves what all workers load: a plain float32 model folder, and the start of an adapter."""
    from safetensors.torch import save_file

    encoder = SentenceEncoder.from_pretrained(model, dtype="float32", device="cpu")
    if not folder.exists():
        temporary = folder.with_name(folder.name + ".tmp")
        encoder.model.backbone.save_pretrained(temporary)  # type: ignore[operator]
        encoder.tokenizer.save_pretrained(temporary)
        temporary.replace(folder)
    torch.manual_seed(0)
    encoder.add_lora(LoraSettings(rank=rank, alpha=rank))
    start = {
        adapter_key(name): parameter.data.contiguous()
        for name, parameter in encoder.model.named_parameters()
        if parameter.requires_grad
    }
    save_file(start, adapter)


if __name__ == "__main__":
    import sys

    if sys.argv[1] == "prepare":
        prepare(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
    else:
        serve(train, encode)

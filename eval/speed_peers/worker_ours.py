"""Worker that runs jobs with angle_llm."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.optim import AdamW

from angle_llm import AngleObjective, SentenceEncoder, TextBatch
from angle_llm.data.formats import Triple
from angle_llm.model.source.tokenizer import SentenceTokenizer
from angle_llm.prompts import PromptTemplate
from angle_llm.settings.train import LoraSettings
from angle_llm.train.step import StepResult, boundary_step
from speed_peers.job import Answer, Job, adapter_key, load_start, serve, timed

OBJECTIVE = AngleObjective(
    cosine_weight=0, in_batch_weight=1, angle_weight=0, in_batch_temperature=0.05, contrastive_form="forward"
)
NO_LIMIT = 8192
"""Maximum length in tokens that no text exceeds."""


def train(job: Job) -> Answer:
    """Time the training steps of the job with angle_llm, including tokenization."""
    encoder = open_encoder(job)
    encoder.add_lora(LoraSettings(rank=job.rank, alpha=job.alpha, dropout=0, targets=["all-linear"]))
    load_start(encoder.model, job.adapter)
    trainable = [parameter for parameter in encoder.model.parameters() if parameter.requires_grad]
    optimizer = AdamW(trainable, lr=job.learning_rate, weight_decay=0)

    def step(triples: Sequence[Triple]) -> StepResult:
        encoder.model.train()
        batch = TextBatch.from_examples(triples)
        plan = encoder.plan_ids(encoder.tokenize(batch.texts), job.micro_batch_tokens)
        result = boundary_step(encoder.model, plan, batch, OBJECTIVE, graph_tokens=job.graph_tokens)
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return result

    triples = [Triple(*texts) for texts in job.triples]
    seconds, results = [], []
    for first in range(0, len(triples), job.batch):
        started = time.perf_counter()
        results.append(step(triples[first : first + job.batch]))
        seconds.append(time.perf_counter() - started)
    tokens = {name: sum(getattr(each.plan, name) for each in results) for name in ("logical_tokens", "computed_tokens")}
    facts = text_facts(encoder, [text for texts in job.triples for text in texts]) | tokens
    return {"step_seconds": seconds, "losses": [result.loss for result in results], "facts": facts}


def encode(job: Job) -> Answer:
    """Time the encoding of the texts of the job with angle_llm."""
    encoder = open_encoder(job)
    return timed(encoder.encode, job) | {"facts": text_facts(encoder, job.texts)}


def open_encoder(job: Job) -> SentenceEncoder:
    """Open the encoder of the job with angle_llm."""
    prompt = PromptTemplate(name="speed", template=job.template)
    return SentenceEncoder.from_pretrained(
        job.model, prompt=prompt, pooling=job.pooling, max_length=job.max_length, dtype=job.dtype, device="cpu"
    )


def text_facts(encoder: SentenceEncoder, texts: Sequence[str]) -> dict[str, int]:
    """Return the numbers of texts, of unique texts, and of texts longer than the maximum length."""
    uncut = SentenceTokenizer(encoder.tokenizer, encoder.prompt, NO_LIMIT)
    too_long = sum(len(ids) > encoder.max_length for ids in uncut(texts))
    return {"texts": len(texts), "unique_texts": len(set(texts)), "too_long": too_long}


def prepare(model: str, folder: Path, adapter: Path, rank: int) -> None:
    """Save a float32 model folder and initial adapter weights, which all workers load."""
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
    if sys.argv[1] == "prepare":
        prepare(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
    else:
        serve(train, encode)

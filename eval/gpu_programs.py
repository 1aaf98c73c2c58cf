"""The programs of this project on a GPU: a training that is stopped and resumed, and embedding beside sentence-transformers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from gpu_bench import GpuSettings, free_memory, random_backbone, tokenizer_of

# isort: split
import torch

from angle_llm.data.formats import pairs_of

PUBLISHED = [
    "--model.prompt=summarize_one_word", "--model.max-length=50", "--model.bits=None", "--lora.rank=32", "--lora.alpha=32",
    "--lora.dropout=0.1", "--lora.targets", "q_proj", "v_proj", "--objective.cosine-weight=1",
    "--objective.in-batch-weight=17.5", "--objective.angle-weight=1", "--objective.angle-temperature=1",
    "--objective.angle-form=reference", "--optimizer.learning-rate=1e-4", "--optimizer.warmup=100", "--epochs=100",
]  # fmt: skip
"""Flags of `recipes/llama2_nli.py`; the number and size of batches depend on the size of the visit."""
ANGLE_LLM = (sys.executable, "-m", "angle_llm.cli")


def write_base(settings: GpuSettings, device: torch.device, folder: Path, *, bert: bool = False) -> Path:
    """Write a model with random weights in bfloat16 and its tokenizer to a folder, unless it is there."""
    if not (folder / "config.json").exists():
        backbone = random_backbone(settings, device, torch.bfloat16, bert=bert)
        tokenizer_of(settings.tokenizer).save_pretrained(folder)
        backbone.save_pretrained(folder)
    return folder


def write_scored_pairs(settings: GpuSettings, path: Path) -> Path:
    """Write the triples of the settings as scored pairs: the positive has score 1, the negative score 0."""
    with path.open("w", encoding="utf-8") as file:
        for example in settings.examples:
            for left, right, score in pairs_of(example):
                file.write(json.dumps({"text1": left, "text2": right, "score": float(score or 0)}) + "\n")
    return path


def published_run(settings: GpuSettings, device: torch.device, folder: Path) -> dict[str, Any]:
    """Train with the published settings, and stop and resume the run (`stopped_training`); the base stays in `folder`/base."""
    base = write_base(settings, device, folder / "base")
    free_memory(device)  # for the processes of the run
    data = write_scored_pairs(settings, folder / "pairs.jsonl")
    flags = ["--model.path", str(base), "--data.path", str(data), *PUBLISHED]
    flags += ["--batch-size", str(settings.batch), "--accumulation", str(settings.accumulation)]
    return stopped_training(flags, folder / "run", steps=8 if settings.is_small else 5)


LIMIT = 300.0
"""Maximum seconds to the second step, and to the end after a signal and after the resume; then the training is killed."""


def stopped_training(flags: Sequence[str], run: Path, steps: int) -> dict[str, Any]:
    """Run `angle-llm train`, stop it with SIGTERM after step 2, and resume it to its end; return its speed and checks.

    The speed is the median over all steps but the first of each process.

    Raises:
        RuntimeError: if a process ends with an unexpected exit code; the message has the end of its output.
        TimeoutExpired: if a process does not end within `LIMIT`.
    """
    metrics, started = run / "metrics.jsonl", time.monotonic()
    command = [*ANGLE_LLM, "train", *flags, "--max-steps", str(steps), "--run-dir", str(run), "--resume", "auto"]
    log = run.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            while process.poll() is None and steps_in(metrics) < 2 and time.monotonic() < started + LIMIT:
                time.sleep(0.02)
            loaded = time.monotonic() - started
            expect(process.poll() is not None or steps_in(metrics) >= 2, f"no second step in {LIMIT:g} s", log)
            process.send_signal(signal.SIGTERM)
            code = process.wait(LIMIT)
            stopped = steps_in(metrics)
            expect(code == 128 + signal.SIGTERM and stopped < steps, f"exit code {code} after SIGTERM", log)
            process = subprocess.Popen(command, stdout=file, stderr=file)
            code = process.wait(LIMIT)
        finally:
            process.kill()  # also if this process is stopped; nothing happens after its end
    expect(code == 0, f"exit code {code} of the resumed run", log)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row for row in rows if "pairs_per_second" in row]
    steady = [row for row in rows if row["step"] not in (1, stopped + 1)]
    return {
        **{name: median(row[name] for row in steady) for name in ("pairs_per_second", "seconds")},
        "utilisation": median(row.get("utilisation", 0.0) for row in steady),  # unknown on a CPU
        "layout": rows[0]["layout"],
        "losses": [round(row["loss"], 4) for row in rows],
        "stopped_after": stopped,
        "seconds_to_step_2": loaded,
        "holds": [row["step"] for row in rows] == list(range(1, steps + 1)),
    }


def steps_in(metrics: Path) -> int:
    """Return the number of optimizer steps in a file of metrics; 0 if it does not exist yet."""
    return metrics.read_text().count('"pairs_per_second"') if metrics.exists() else 0


def expect(holds: bool, what: str, log: Path) -> None:
    """Raise `RuntimeError` with the end of a log file, unless `holds`."""
    if not holds:
        raise RuntimeError(f"{what}: {log.read_text(errors='replace')[-300:]}")


def embedded(model: Path, texts: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run `angle-llm embed`; return texts/s between the first and the last shard, and the seconds of the whole command."""
    rows, output, log = max(1, len(texts) // 10), folder / f"{model.name}-vectors", folder / f"{model.name}-embed.log"
    source = folder / f"{model.name}-texts.txt"
    source.write_text("\n".join(texts) + "\n", encoding="utf-8")
    files = ["--input", str(source), "--output", str(output), "--shard-rows", str(rows)]
    started = time.monotonic()
    with log.open("w") as file:
        code = subprocess.run(
            [*ANGLE_LLM, "embed", "--model", str(model), *files], stdout=file, stderr=file, check=False
        ).returncode
    expect(code == 0, f"exit code {code} of embed", log)
    written = sorted(path.stat().st_mtime for path in output.glob("shard-*.parquet"))
    speed = (len(texts) - rows) / max(written[-1] - written[0], 1e-9)
    limits = [line for line in log.read_text(errors="replace").splitlines() if "limits the speed" in line]
    return {
        "texts": len(texts),
        "texts_per_second": speed,
        "command_seconds": time.monotonic() - started,
        "limits": limits,
    }


def encoded_by_sentence_transformers(model: Path, texts: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Encode texts with sentence-transformers in bfloat16, batches of 256; return texts/s without loading and first batch."""
    library: Any = import_module("sentence_transformers")
    encoder = library.SentenceTransformer(str(model), device=str(device)).bfloat16()
    encoder.encode(texts[:256], batch_size=256)
    started = time.perf_counter()
    encoder.encode(texts, batch_size=256, show_progress_bar=False)
    return {"texts": len(texts), "peer_texts_per_second": len(texts) / (time.perf_counter() - started)}


def joined_texts(settings: GpuSettings, count: int, sentences: int) -> list[str]:
    """Return `count` different texts, each of `sentences` sentences of the triples."""
    pool = list(dict.fromkeys(text for example in settings.examples for pair in pairs_of(example) for text in pair[:2]))
    size = len(pool)
    # The second sentence moves on after a round over all first ones, so no text repeats for count <= size².
    starts = [(number % size, number // size + 1) for number in range(count)]
    return [" ".join(pool[(first + step * move) % size] for move in range(sentences)) for first, step in starts]


def shared_memory() -> str | None:
    """Return /dev/shm, where a model is read at the speed of memory, if 20 GB are free there; else None."""
    path = Path("/dev/shm")
    free_bytes = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize if path.is_dir() else 0
    return str(path) if free_bytes > 20e9 else None

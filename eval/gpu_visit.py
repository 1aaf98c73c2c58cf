"""Measure what a short loan of a GPU can answer, the most valuable rows first.

    python eval/gpu_visit.py pack                        # here: wheels and tokenizers; prints the command
    python eval/gpu_visit.py run --list                  # rows and their expected seconds
    python eval/gpu_visit.py run --out rows.jsonl        # on the machine: at most 330 s; twice
    python eval/gpu_visit.py run --out rows.jsonl --size tiny    # rehearsal on a CPU

Each row is written at once. A row starts only if its expected time is left. A second run goes on with the rows that are
missing in `--out` and `--earlier`; rows that failed come last. Every group of rows runs in a process of its own, a copy of
this one with all packages imported, so an error on the GPU ends one group only.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # otherwise an import can start CUDA, which a fork could not use

from gpu_bench import (
    GpuSettings,
    Rows,
    append_row,
    free_memory,
    random_encoder,
    randomize_adapter,
    synchronize,
    tokenizer_of,
)

# isort: split
import gpu_programs as programs
import torch
import tyro
from gpu_changes import CHANGES, Plain
from gpu_check import KEPT, chosen_budget, computed, planner_of, traced, training_speed, with_layout
from gpu_pack import FILES, PackSettings, pack
from torch import Tensor

from angle_llm.cli import run_cli
from angle_llm.settings.train import DataSource
from angle_llm.train.token_budget import TokenBudget

PLAN: dict[str, dict[str, float]] = {
    "peak": {"start": 10, "bf16": 12, "fp8": 12},
    "train": {
        "start": 40, "trie": 16, "gradient": 20, **dict.fromkeys(CHANGES, 15), "packed": 8, "budget": 20, "tokens128": 12,
        "tokens512": 12, "caching": 6, "checkpointing": 6, "padded": 12,
    },
    "fp8": {"start": 45, "speed": 12, "gradient": 15},
    "nf4": {"start": 30, "speed": 8, "gradient": 15},
    "recipe": {"start": 20, "stop and resume": 110},
    "embed": {"start": 20, "20,000 passages": 75},
    "minilm shape": {"start": 5, "200,000 texts": 35, "sentence-transformers": 20},
    "grouped": {"start": 25, "speed": 8, "gradient": 10},
    "bidirectional": {"start": 25, "speed": 8, "gradient": 10},
}  # fmt: skip
"""Expected seconds on an H200 of the rows of each group, the most valuable first; `start`: of the group before its rows."""
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"layers": 8, "intermediate": 14336, "kv_heads": 8},
    "nf4": {"layers": 8},
    "bidirectional": {"layers": 8, "bidirectional": True},
    "minilm shape": {"layers": 6, "hidden": 384, "heads": 12, "intermediate": 1536},
}
"""Where the model of a group differs from the 7B shape."""
NO_CUDA = 77
"""Exit code of a process that cannot initialise CUDA."""
TINY: dict[str, Any] = {
    "layers": 2, "hidden": 64, "heads": 4, "intermediate": 96, "batch": 4, "accumulation": 2, "micro_batch_tokens": 512
}  # fmt: skip
"""The model of `--size tiny`."""


@dataclass(frozen=True, kw_only=True)
class VisitSettings:
    """Rows and limits of a visit to a GPU."""

    out: Path = Path("gpu_visit.jsonl")
    """JSON Lines file of the result rows."""
    earlier: tuple[Path, ...] = ()
    """Files with rows of earlier runs, which are not measured again. A file that does not exist is ignored."""
    pack: Path = Path(".bench/visit")
    """Folder that `pack` wrote."""
    seconds: float = 325
    """Time limit of the run."""
    size: Literal["7b", "tiny"] = "7b"
    """tiny: small models, for a rehearsal on a CPU."""
    rows: tuple[str, ...] = ()
    """Groups or rows (GROUP/ROW) to measure. Empty: all."""
    list: bool = False
    """Print the rows and their expected seconds only."""
    steps: int = 5
    """Optimizer steps of a row, after a first one that is not counted."""

    @property
    def is_tiny(self) -> bool:
        """Whether this is a rehearsal."""
        return self.size == "tiny"

    def expected(self, group: str, row: str) -> float:
        """Return the expected seconds of a row."""
        return PLAN[group][row] * (0.1 if self.is_tiny else 1)

    def wants(self, name: str) -> bool:
        """Return whether a row, named GROUP/ROW, is asked for."""
        return not self.rows or any(name == asked or name.startswith(f"{asked}/") for asked in self.rows)


def run(settings: VisitSettings) -> None:
    """Measure the missing rows of all groups, each group in a forked process, until the time is over."""
    deadline = time.monotonic() + settings.seconds
    earlier = list(read_rows(settings.out, *settings.earlier))
    done = {row["row"] for row in earlier if "result" in row and not {"error", "out_of_memory", "skipped"} & row.keys()}
    tried = {row["row"] for row in earlier} - done
    names = [f"{group}/{row}" for group, rows in PLAN.items() for row in rows if row != "start"]
    if unknown := set(settings.rows) - {*names, *PLAN}:
        raise ValueError(f"--rows: unknown {', '.join(sorted(unknown))}. --list prints all groups and rows.")
    names = [name for name in names if name not in done and settings.wants(name)]
    with tempfile.TemporaryDirectory(dir=programs.shared_memory()) as folder:
        with tarfile.open(settings.pack / FILES) as archive:
            archive.extractall(folder, filter="data")
        names.sort(key=tried.__contains__)  # rows that failed come last, otherwise in order
        for (_, group), rows in groupby(names, lambda name: (name in tried, name.partition("/")[0])):
            Visit(settings, group, [row.partition("/")[2] for row in rows], deadline, Path(folder)).in_process()


def read_rows(*paths: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of result files that have a name."""
    for path in filter(Path.exists, paths):
        for line in path.read_text("utf-8").splitlines():
            if '"row":' in line and line.endswith("}"):  # a killed run can leave half a line
                yield json.loads(line)


@dataclass(frozen=True)
class Visit:
    """The rows of a group that a process measures."""

    settings: VisitSettings
    group: str
    names: list[str]
    deadline: float
    folder: Path
    """Temporary folder with the files of the pack."""
    gpu: GpuSettings = field(init=False)
    """Shape of the model, and texts."""

    def __post_init__(self) -> None:
        shape = SHAPES.get(self.group, {}) | (TINY if self.settings.is_tiny else {})
        if self.settings.is_tiny and "kv_heads" in shape:
            shape["kv_heads"] = 2
        tokenizer = "bert" if self.group == "minilm shape" else "llama"
        values = {**shape, "tokenizer": str(self.folder / tokenizer), "steps": self.settings.steps, "minutes": 1e6}
        object.__setattr__(self, "gpu", GpuSettings(out=self.settings.out, **values))

    @property
    def left(self) -> float:
        """Seconds until the end of the run."""
        return self.deadline - time.monotonic()

    @cached_property
    def results(self) -> Rows:
        """Result rows of this process, which initialises the GPU."""
        return Rows(self.gpu)

    @property
    def device(self) -> torch.device:
        """The GPU, or the CPU if there is no GPU."""
        return self.results.device

    def in_process(self) -> None:
        """Measure the rows in a forked process, unless none fits; stop the process at the end of the time."""
        expected = partial(self.settings.expected, self.group)
        need = expected("start") + min(map(expected, self.names))
        if need > self.left:
            return append_row(None, {"group": self.group, "skipped": f"needs {need:.0f} s, {self.left:.0f} s are left"})
        print(
            f"{self.group}: {', '.join(self.names)}; start {expected('start'):g} s, {self.left:.0f} s are left",
            flush=True,
        )
        for method in ("fork", "spawn"):  # a new process takes seconds to import everything
            context: Any = multiprocessing.get_context(method)
            process = context.Process(target=self._measure)
            process.start()
            process.join(max(self.left, 0))
            if process.exitcode != NO_CUDA:
                break
        stopped = process.exitcode is None
        if stopped:
            os.killpg(process.pid or 0, signal.SIGKILL)  # programs that it started, too
            process.join()
        if stopped or process.exitcode:
            problem = "stopped at the end of the time" if stopped else f"the process ended with code {process.exitcode}"
            append_row(self.settings.out, {"group": self.group, "error": problem})
        return None

    def _measure(self) -> None:
        """Measure all rows of the group in this process; exit with `NO_CUDA` if a fork cannot use the GPU."""
        os.setsid()
        if torch.version.cuda and not self.settings.is_tiny:
            try:
                torch.cuda.init()  # type: ignore[no-untyped-call]
            except RuntimeError:
                sys.exit(NO_CUDA)
        GROUPS[self.group](self)

    def row(self, name: str, work: Callable[[], dict[str, Any]], **about: Any) -> None:
        """Add a row, if it is wanted and fits in the time left."""
        if name not in self.names:
            return
        full, expected = f"{self.group}/{name}", self.settings.expected(self.group, name)
        if expected > self.left:
            append_row(None, {"row": full, "skipped": f"needs {expected:.0f} s, {self.left:.0f} s are left"})
            return
        self.results.add(row=full, expected_seconds=expected, seconds_left=round(self.left))
        self.results.measure(work, row=full, result=True, **about)


# --- groups of rows ---------------------------------------------------------------------------------------------------


def peak_group(visit: Visit) -> None:
    """Measure the speed of large products of random matrices, in a burst and under continuous load."""
    size, seconds = (256, 0.2) if visit.settings.is_tiny else (8192, 8.0)
    tokens, inner = (64, 96) if visit.settings.is_tiny else (4992, 11008)  # of a batch, and of the 7B shape
    device = visit.device

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    def fp8_product(left: Tensor, right: Tensor) -> Callable[[], Tensor]:
        """Return a product in e4m3 with a scale per row; a GPU needs the right matrix in columns."""
        left, right = left.to(torch.float8_e4m3fn), right.T.contiguous().to(torch.float8_e4m3fn).T
        scales = torch.ones(len(left), 1, device=device), torch.ones(1, right.shape[1], device=device)
        return lambda: torch._scaled_mm(left, right, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)

    def measure(make: Callable[[Tensor, Tensor], Callable[[], Tensor]]) -> dict[str, Any]:
        square = product_speed(device, make(draw(size, size), draw(size, size)), 2 * size**3, seconds)
        layer = product_speed(device, make(draw(tokens, size // 2), draw(size // 2, inner)), tokens * size * inner, 0.0)
        return {**square, "layer_tflops": layer["burst_tflops"]}

    visit.row("bf16", partial(measure, lambda left, right: lambda: left @ right))
    visit.row("fp8", partial(measure, fp8_product))


def product_speed(device: torch.device, product: Callable[[], Tensor], flops: float, seconds: float) -> dict[str, Any]:
    """Return the TFLOP/s of a product: of three after a pause, and in the last part of `seconds` of load."""

    def speed(count: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(count):
            product()
        synchronize(device)
        return count * flops / (time.perf_counter() - started) / 1e12

    speed(3)
    bursts = []
    for _ in range(5):
        time.sleep(0.05)
        bursts.append(speed(3))
    speeds, started = [speed(3)], time.perf_counter()
    while time.perf_counter() - started < seconds:
        speeds.append(speed(50))
    return {"burst_tflops": median(bursts), "sustained_tflops": median(speeds[2 * len(speeds) // 3 :])}


class Training:
    """Speed and gradients of a model with random weights, in the forms that the rows compare."""

    def __init__(self, visit: Visit, bits: Any = None) -> None:
        self.visit, self.bits = visit, bits
        self.encoder = random_encoder(visit.gpu, visit.device, bits)

    def speed(self, layout: str, budget: TokenBudget | None = None, tokens: int | None = None) -> dict[str, Any]:
        """Return the speed of training in a layout; `tokens`: number of tokens of longer texts."""
        gpu = self.visit.gpu
        if tokens is not None:
            data = DataSource(path=str(long_triples(self.visit, tokens)))
            gpu = replace(gpu, data=data, batch=min(gpu.batch, 4096 // tokens))
        encoder = with_layout(self.encoder, layout)
        config, planner, kept = planner_of(gpu, encoder)
        return training_speed(gpu, encoder, config, planner, budget or kept)[0]

    @cached_property
    def plain(self) -> tuple[GpuSettings, Tensor]:
        """A small batch, and its gradient with padded texts and the layers of the libraries; FP8: on a bfloat16 base."""
        gpu = replace(self.visit.gpu, batch=min(self.visit.gpu.batch, 24))
        bits = None if self.bits == "fp8" else self.bits
        encoder = random_encoder(gpu, self.visit.device, bits, plain=True)
        return gpu, computed(gpu, encoder, "padded", cached=True)[2]

    def distance(self, layout: str) -> dict[str, Any]:
        """Return 1 − cosine of the gradient in a layout and of the plain gradient, and the ratio of their norms."""
        gpu, expected = self.plain
        randomize_adapter(self.encoder)  # the rows before have trained it
        plan, _, gradient = computed(gpu, self.encoder, layout, cached=False)
        cosine = torch.cosine_similarity(gradient, expected, dim=0)
        return {"layout": plan.layout, "distance": float(1 - cosine), "norms": float(gradient.norm() / expected.norm())}

    def without(self, plain: Plain, layout: str) -> dict[str, Any]:
        """Return the seconds of a step with, without and with a change, and the distance of the gradient without it."""
        encoder, seconds = self.encoder, [self.speed(layout)["seconds"]]
        try:
            with plain(encoder) as self.encoder:
                seconds.append(self.speed(layout)["seconds"])
                distance = self.distance(layout)["distance"]
        finally:
            self.encoder = encoder
        seconds.append(self.speed(layout)["seconds"])
        gain = 1000 * (seconds[1] - (seconds[0] + seconds[2]) / 2)
        return {"seconds": seconds, "gain_ms": gain, "distance_without": distance}


def train_group(visit: Visit) -> None:
    """Measure LoRA on a bfloat16 base: layouts, budgets, lengths of texts, and each change alone."""
    training = Training(visit)
    encoder, speed, tokens = training.encoder, training.speed, visit.gpu.micro_batch_tokens
    visit.row("trie", lambda: {**speed("trie"), **traced(visit.gpu, with_layout(encoder, "trie"))})
    visit.row("gradient", lambda: training.distance("trie"))
    for name, (predicted, change) in CHANGES.items():
        visit.row(name, partial(training.without, change, "trie"), predicted_ms=predicted)
    visit.row("packed", lambda: speed("packed"))
    short = replace(visit.gpu, accumulation=min(4, visit.gpu.accumulation))  # as in the first measurements
    visit.row("budget", lambda: chosen_budget(short, with_layout(encoder, "trie")))
    visit.row("tokens128", lambda: speed("trie", tokens=128))
    visit.row("tokens512", lambda: speed("trie", tokens=512))
    visit.row("caching", lambda: speed("trie", TokenBudget(tokens, 0)))
    visit.row("checkpointing", lambda: speed("trie", TokenBudget(tokens, KEPT, activation_checkpointing=True)))
    visit.row("padded", lambda: speed("padded"))


def long_triples(visit: Visit, tokens: int) -> Path:
    """Write triples whose texts have about `tokens` tokens, and return the file."""
    tokenizer, path = tokenizer_of(visit.gpu.tokenizer), visit.folder / f"tokens{tokens}.jsonl"
    pool = iter(programs.joined_texts(visit.gpu, 60 if visit.settings.is_tiny else 300, tokens // 8))
    with path.open("w", encoding="utf-8") as file:
        for anchor, positive, negative in zip(pool, pool, pool, strict=True):
            texts = (
                tokenizer.decode(tokenizer.encode(text)[:tokens], skip_special_tokens=True)
                for text in (anchor, positive, negative)
            )
            file.write(json.dumps(dict(zip(("anchor", "positive", "negative"), texts, strict=True))) + "\n")
    return path


def base_group(visit: Visit) -> None:
    """Measure training in the layout of the encoder on another base or architecture: NF4, FP8, grouped heads, bidirectional."""
    bits = {"nf4": 4, "fp8": "fp8"}.get(visit.group)
    training = Training(visit, bits)
    layout = training.encoder.layouts.layout
    visit.row("speed", lambda: training.speed(layout))
    visit.row("gradient", lambda: training.distance(layout))


def recipe_group(visit: Visit) -> None:
    """Train with the published settings through `angle-llm train`, stop the run with SIGTERM, and resume it."""
    visit.row("stop and resume", lambda: programs.published_run(visit.gpu, visit.device, visit.folder))


def embed_group(visit: Visit) -> None:
    """Embed passages with the 7B shape through `angle-llm embed`."""
    base = programs.write_base(visit.gpu, visit.device, visit.folder / "base")
    free_memory(visit.device)
    texts = programs.joined_texts(visit.gpu, 100 if visit.settings.is_tiny else 20_000, 5)
    visit.row("20,000 passages", lambda: programs.embedded(base, texts, visit.folder))


def small_group(visit: Visit) -> None:
    """Embed sentences with the shape of a small encoder, and with sentence-transformers on a quarter of them."""
    base = programs.write_base(visit.gpu, visit.device, visit.folder / "minilm", bert=True)
    texts = programs.joined_texts(visit.gpu, 200 if visit.settings.is_tiny else 200_000, 1)
    some = texts[: len(texts) // 4]
    visit.row("200,000 texts", lambda: programs.embedded(base, texts, visit.folder))
    peer = partial(programs.encoded_by_sentence_transformers, base, some, visit.device)
    visit.row("sentence-transformers", peer)


GROUPS: dict[str, Callable[[Visit], None]] = {
    "peak": peak_group,
    "train": train_group,
    "recipe": recipe_group,
    "embed": embed_group,
    "minilm shape": small_group,
    **dict.fromkeys(("fp8", "nf4", "grouped", "bidirectional"), base_group),
}


def list_rows() -> None:
    """Print the rows in their order, their expected seconds, and the seconds until their end."""
    total = 0.0
    for group in PLAN:
        for row, seconds in PLAN[group].items():
            total += seconds
            print(f"{group}/{row}".ljust(40), f"{seconds:5.0f} s {total:6.0f} s")


Command = Annotated[PackSettings, tyro.conf.subcommand("pack")] | Annotated[VisitSettings, tyro.conf.subcommand("run")]


def main(settings: PackSettings | VisitSettings) -> None:
    """Pack, list or measure the rows."""
    if isinstance(settings, PackSettings):
        pack(settings)
    elif settings.list:
        list_rows()
    else:
        run(settings)


if __name__ == "__main__":
    run_cli(lambda: main(tyro.cli(Command, description=__doc__)))

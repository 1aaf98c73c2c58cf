"""A run whose memory is limited while it trains, against one that has room: more than one attempt, the same update.

python tests/train/shortage.py FOLDER PROCESSES ROOM_IN_MB
"""

import os
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import forked
import torch
import torch.utils.tensorboard
from spreads import ending, largest_difference, loss_difference, ragged, settings, work
from tiny import save_tiny_base

from angle_llm.train import trainer


def virtual_bytes() -> int:
    words = Path("/proc/self/statm").read_text().split()
    return int(words[0]) * os.sysconf("SC_PAGE_SIZE")


def limited(room: int) -> None:
    """From the first step on, this process may have so many bytes more than it had."""
    real = trainer._accumulate

    def accumulate(*given: Any) -> Any:
        if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (virtual_bytes() + room, resource.RLIM_INFINITY))
        return real(*given)

    trainer._accumulate = accumulate


def main(folder: Path, world: int, room: int) -> None:
    save_tiny_base("llama", folder / "base")
    examples = ragged(300)
    kind = "NO" if world == 1 else "MULTI_CPU"
    free = settings(
        folder,
        "free",
        batch_size=100,
        accumulation=2,
        micro_batch_tokens=10**6,
        graph_tokens=10**6,
        max_steps=3,
        epochs=2,
    )
    short = replace(free, run_dir=str(folder / "short"))
    forked.run(world, lambda rank: work(free, world, kind, 0, torch.float32, examples), folder / "free.log")

    def limited_work(rank: int) -> None:
        if rank == world - 1:  # one process is short; all must do it again
            limited(room)
        work(short, world, kind, 0, torch.float32, examples)

    forked.run(world, limited_work, folder / "short.log")
    told = (folder / "short.log.0").read_text()
    assert "memory ran out" not in (folder / "free.log.0").read_text()
    print(told.count("memory ran out"), "times:", [line for line in told.splitlines() if "memory ran out" in line][-1])
    (adapter, metrics), (other, lines) = ending(free.run_path), ending(short.run_path)
    print(
        f"losses differ by {loss_difference(metrics, lines):.1e}, adapters by {largest_difference(adapter, other):.1e}"
    )
    assert loss_difference(metrics, lines) < 1e-5
    # float32 sums in other orders; Adam divides each by its own size, so small gradients differ most.
    assert largest_difference(adapter, other) < 1e-3


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) * 2**20)

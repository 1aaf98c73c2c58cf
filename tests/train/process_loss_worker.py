"""One process of a training run that loses a process: `angle-llm train`, until a rank fails after the third step.

    LAUNCHER … process_loss_worker.py CONFIG RUN_DIR FAILURE RANK

FAILURE is SIGKILL, SIGSTOP, exception, or operation: the rank calls another collective operation. RANK is 0, 1 or both, where
rank 0 then takes 20 s to save its last weights.
Writes RUN_DIR.RANK.pid at the start and RUN_DIR.failed at the failure.
"""

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from angle_llm import SentenceEncoder, cli
from angle_llm.train import distributed as process_loss


def main(config: str, run_dir: str, failure: str, failing: str) -> None:
    torch.set_num_threads(1)
    process_loss.LOST_SECONDS = process_loss.STUCK_SECONDS = 6  # the defaults are tested without waiting
    rank = os.environ["RANK"]
    Path(f"{run_dir}.{rank}.pid").write_text(str(os.getpid()))
    steps = itertools.count(1)

    def after_step(*_: Any) -> None:
        if next(steps) != 3 or failing not in (rank, "both"):
            return
        Path(f"{run_dir}.failed").touch()
        if failing == "both" and rank == "0":
            save_slowly()
        if failure == "operation":
            process_loss.Processes.max = call_gather  # type: ignore[method-assign]
            return
        if failure == "exception":
            raise ArithmeticError("raised after a step")
        os.kill(os.getpid(), signal.Signals[failure])

    register_optimizer_step_post_hook(after_step)
    sys.argv = ["angle-llm", "train", "--config", config, "--run-dir", run_dir]
    cli.main()


def call_gather(processes: process_loss.Processes, number: int) -> int:
    processes.gather(number)
    return number


def save_slowly() -> None:
    save = SentenceEncoder.save_pretrained

    def slow(*given: Any) -> None:
        time.sleep(20)
        save(*given)

    SentenceEncoder.save_pretrained = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    main(*sys.argv[1:])

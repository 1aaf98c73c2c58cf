"""Two processes train, one is killed, stopped, or fails; how long until both are gone, and what the other says.

    python tests/train/lost.py FOLDER CASE [CASE …]        CASE: kill0 kill1 stop0 stop1 raise0 raise1 (the number is the rank)
                                                              both0: both fail, and the main one takes its time to save

All cases run beside each other, each in two processes that no launcher watches. Prints a JSON line for each.
"""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import forked
import torch
import torch.utils.tensorboard
from spreads import ragged, settings, work
from tiny import save_tiny_base

from angle_llm.model.encoder import SentenceEncoder
from angle_llm.train import trainer

STEP = 3


def losing(case: str, rank: int, moment: Path) -> None:
    """After a few steps the process that the case names is lost."""
    kind, lost = case[:-1], int(case[-1])
    real = trainer._Pause.__call__

    def paused(self: Any, step: int) -> None:
        if step == STEP and (rank == lost or kind == "both"):
            moment.write_text(str(time.time()))
            if kind == "both" and rank == 0:
                slow_saves()
            if kind in ("raise", "both"):
                raise ArithmeticError("something only this process has met")
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
        real(self, step)

    trainer._Pause.__call__ = paused  # type: ignore[method-assign]


def slow_saves() -> None:
    real = SentenceEncoder.save_pretrained

    def save(*given: Any) -> None:
        time.sleep(4)
        real(*given)

    SentenceEncoder.save_pretrained = save  # type: ignore[method-assign]


def main(folder: Path, cases: list[str]) -> None:
    save_tiny_base("llama", folder / "base")
    examples = ragged(60)
    pids = {}
    for case in cases:
        mine = replace(settings(folder, case), epochs=50)

        def run(rank: int, case: str = case, mine: Any = mine) -> None:
            losing(case, rank, folder / f"{case}.moment")
            work(mine, 2, "MULTI_CPU", 0, torch.float32, examples)

        pids[case] = forked.start(2, run, folder / f"{case}.log")
    left = {pid: (case, rank) for case, both in pids.items() for rank, pid in enumerate(both)}
    codes: dict[str, dict[int, int]] = {case: {} for case in cases}
    ended = {}
    while left:
        pid, status = os.wait()
        case, rank = left.pop(pid)
        codes[case][rank] = os.waitstatus_to_exitcode(status)
        ended[case] = time.time()
        print(f"{case}: process {rank} ended", flush=True)
    for case in cases:
        seconds = ended[case] - float((folder / f"{case}.moment").read_text())
        survivor = 1 - int(case[-1])
        said = [line for line in (folder / f"{case}.log.{survivor}").read_text().splitlines() if "leaves" in line]
        print(
            json.dumps(
                {
                    "case": case,
                    "seconds": round(seconds, 1),
                    "codes": codes[case],
                    "said": said[-1:],
                    "left": sorted(path.name for path in (folder / case).iterdir()),
                }
            )
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])

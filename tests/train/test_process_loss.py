"""When a process of a run is killed, stopped or fails, every process ends within a minute, and a message names its rank."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from forked import free_port
from tiny import save_tiny_base
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from angle_llm.train import distributed
from angle_llm.train.distributed import (
    PASSES,
    Operation,
    Processes,
    ProcessWatch,
    RemoteRankError,
    _mismatch,
    wait_for_ranks,
)

WORKER = Path(__file__).with_name("process_loss_worker.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
ACCELERATE += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
LIMIT = 60
"""Seconds from the failure to the end of the last process."""


@pytest.mark.slow  # half a minute each; tests/contract/test_contract_resume.py has a quick one
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "two torchrun", "none"])
@pytest.mark.parametrize("failure", ["SIGKILL", "SIGSTOP", "exception", "operation"])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_processes_end(launcher: str, failure: str, rank: int, tmp_path: Path) -> None:
    seconds, codes, outputs = lose(launcher, failure, rank, tmp_path)
    assert seconds < LIMIT
    assert 0 not in codes
    # torchrun names the rank of a process on its machine, the other processes that of a process elsewhere.
    cause = "failed: ArithmeticError" if failure == "exception" else "was killed or stopped|or its launcher"
    named = rf"exits: rank {rank} \(host[^)]*\) ({cause})|Root Cause[^=]*?rank +: {rank} \(local_rank"
    if failure == "operation":  # rank 0 waits too, so rank 1 is named
        operations = ("gather", "max") if rank == 1 else ("max", "gather")
        named = rf"exits: rank 1 \(host[^)]*\) is in operation \d+ \({operations[0]}\), and rank 0 waits .*\({operations[1]}\)"
    assert re.search(named, outputs[(1 - rank) % len(outputs)], flags=re.DOTALL), outputs


BUSY, LEFT = Operation(6), None


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        ([Operation(7, "max"), Operation(7, "max")], None),
        ([Operation(7, "max"), BUSY], None),  # computes, for hours if it reads data
        ([Operation(7), Operation(7)], None),
        ([Operation(7, PASSES), Operation(8, "sum"), Operation(8, "sum")], None),  # slower than the others
        ([LEFT, Operation(7)], None),  # saves the model
        ([Operation(7, "max"), Operation(7, "gather")], (1, r"7 (gather), and rank 0 waits in operation 7 (max)")),
        ([Operation(7, "max"), Operation(7)], (1, "7 (completed), and rank 0 waits in operation 7 (max)")),
        ([BUSY, Operation(7, "sum"), Operation(9, "sum")], (2, "9 (sum), and rank 1 waits in operation 7 (sum)")),
        ([Operation(7, PASSES), Operation(7, "max")], (0, f"7 ({PASSES}), and rank 1 waits in operation 7 (max)")),
        ([LEFT, Operation(7, "max")], (0, "has ended its run, and rank 1 waits in operation 7 (max)")),
    ],
)
def test_ranks_in_different_operations_are_named(calls: list[Operation | None], named: tuple[int, str] | None) -> None:
    mismatch = _mismatch(calls)
    if named is None or mismatch is None:
        assert mismatch == named
    else:
        assert (mismatch[0], mismatch[1].removeprefix("is in operation ")) == named


def test_the_operation_of_a_process_is_recorded_and_restored() -> None:
    operations = Processes().operations
    with operations.running(PASSES):
        with operations.running("max"):
            assert operations.current == (2, "max")
        assert operations.current == (2, PASSES)
    assert operations.current == (2, "")


class Intervals:
    """Counters of two ranks at each interval of a `ProcessWatch`, which ends after the last interval."""

    def __init__(self, watch: ProcessWatch, counters: Iterable[list[bytes]]) -> None:
        self._watch, self._counters = watch, iter(counters)

    def wait(self, _: float) -> bool:
        counters = next(self._counters, None)
        self._watch._counters = counters or []
        return counters is None


@pytest.mark.parametrize(
    ("silent", "ends"),
    [
        ([], True),  # every process increments its counter: rank 1 is beyond the operation that rank 0 runs
        (range(5, 200), False),  # rank 0 compiles and holds the GIL; it has ended the operation in its counter
    ],
)
def test_an_operation_that_is_out_of_date_ends_no_process(
    silent: Sequence[int], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "LOST_SECONDS", 600)
    monkeypatch.setattr(ProcessWatch, "_exit", lambda *given, **_: ended.append(given[2]))
    ended: list[str] = []
    watch = ProcessWatch(Processes(world_size=2))
    counts = [4 if count in silent else count for count in range(200)]
    counters = [[f"{own},7,sum".encode(), f"{count},8,max".encode()] for count, own in enumerate(counts)]
    watch._counters = counters[0]
    watch._stopped = Intervals(watch, counters[1:])  # type: ignore[assignment]
    watch._watch()
    assert bool(ended) == ends


def test_a_rank_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    for rank, missing in enumerate(("1, 2", "2")):
        with pytest.raises(RemoteRankError, match=rf"^rank {missing} of 3 did not start within 0:00:00\.200000\."):
            wait_for_ranks(rank, 3, timedelta(milliseconds=200))
    wait_for_ranks(2, 3)
    wait_for_ranks(0, 3)


@pytest.mark.slow
def test_last_weights_are_saved_before_a_process_ends(tmp_path: Path) -> None:
    lose("none", "exception", "both", tmp_path)
    assert (tmp_path / "run" / "interrupted" / "adapter_model.safetensors").is_file()


def lose(launcher: str, failure: str, rank: int | str, folder: Path) -> tuple[float, list[int], list[str]]:
    """Seconds from the failure until no process is left, exit codes and outputs of the launchers."""
    save_tiny_base("llama", folder / "base")
    model = {"path": str(folder / "base"), "dtype": "float32"}
    settings = {"model": model, "lora": {"rank": 4}, "batch_size": 8, "epochs": 100}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    arguments = [str(WORKER), str(folder / "config.yaml"), str(folder / "run"), failure, str(rank)]
    logs, started, pids = [], [], []
    for number, (command, environment) in enumerate(commands(launcher)):
        logs.append(folder / f"log{number}")
        with logs[-1].open("wb") as log:
            everything = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
            started.append(subprocess.Popen([*command, *arguments], stdout=log, stderr=log, env=everything))
    try:
        wait_until((folder / "run.failed").exists, 200, logs)
        failed = time.time()
        pids = [int(path.read_text()) for path in folder.glob("run.*.pid")]
        assert len(pids) == 2
        wait_until(lambda: not any(map(is_running, [*pids, *(one.pid for one in started)])), 2 * LIMIT, logs)
        return time.time() - failed, [one.wait() for one in started], [log.read_text(errors="replace") for log in logs]
    finally:
        for pid in filter(is_running, [*pids, *(one.pid for one in started)]):
            os.kill(pid, signal.SIGKILL)


def commands(launcher: str) -> list[tuple[list[str], dict[str, str]]]:
    """Command and environment of each launcher; "none" starts the two processes as mpirun or srun do."""
    port = str(free_port())
    if launcher == "torchrun":
        return [([*TORCHRUN, "--nproc_per_node", "2", "--master_port", port], {})]
    if launcher == "accelerate":
        return [([*ACCELERATE, "--main_process_port", port], {})]
    if launcher == "two torchrun":
        node = [
            *TORCHRUN,
            "--nnodes",
            "2",
            "--nproc_per_node",
            "1",
            "--master_addr",
            "127.0.0.1",
            "--master_port",
            port,
        ]
        return [([*node, "--node_rank", rank], {}) for rank in "01"]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [([sys.executable], {"RANK": rank, "LOCAL_RANK": rank, **common}) for rank in "01"]


def wait_until(done: Callable[[], bool], seconds: float, logs: list[Path]) -> None:
    end = time.time() + seconds
    while not done():
        assert time.time() < end, [log.read_text(errors="replace")[-3000:] for log in logs]
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False

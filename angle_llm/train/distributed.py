"""Processes of a training run: launch, collective operations, and detection of lost processes.

`Processes` represents one process of the run. With a single process, collective operations return their input. Rank 0,
the main process, writes all files and sends file contents to all other ranks, which do not need access to its disk.

`check_launch` refuses launchers and DeepSpeed configurations that would not train as requested.

`ProcessWatch` ends a process when another rank is lost. torchrun ends processes only on the machine of the lost
process, gloo only detects closed connections, and NCCL blocks. So every process increments a counter in the TCPStore of
the launcher once a second. A rank is lost if its counter does not change for `LOST_SECONDS`. A process that fails writes
its error to the store, and all other processes end after `GRACE_SECONDS`.

Every process also writes the collective operation that it runs. If ranks have called different operations, none of them
would end; the processes then end after `STUCK_SECONDS` and name the operations.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from angle_llm.io import set_allocator
from angle_llm.settings.parsing import SettingsError

Value = TypeVar("Value")


class RemoteRankError(RuntimeError):
    """Raised when another rank failed, or when the inputs of a rank differ from the inputs of rank 0."""


class Operation(NamedTuple):
    """A collective operation of a rank."""

    number: int = 0
    """Number of operations that the rank has started so far."""
    name: str = ""
    """Name of the operation that the rank runs now; empty between operations."""


class Operations:
    """The collective operation that this process runs, for `ProcessWatch`."""

    def __init__(self) -> None:
        self.current = Operation()

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Mark the collective operation `name` as running inside this context."""
        outer = self.current.name
        self.current = Operation(self.current.number + 1, name)
        try:
            yield
        finally:
            self.current = Operation(self.current.number, outer)


@dataclass(frozen=True)
class Processes:
    """One process of a training run: rank, device, and collective operations with all other ranks.

    All ranks must call the collective operations in the same order.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device of the model, and of tensors in collective operations."""
    local_rank: int = 0
    """Rank of this process among the processes on the same machine."""
    accelerator: Any = field(default=None, compare=False, repr=False)
    """The `accelerate.Accelerator` of the launch, used with DeepSpeed only; None if the processes were not launched."""
    operations: Operations = field(default_factory=Operations, compare=False, repr=False)

    @classmethod
    def start(cls) -> Processes:
        """Connect to all other processes that the launcher (accelerate or torchrun) started, and return this process.

        Raises:
            SettingsError: if the launcher selects a strategy that is not supported.
            RemoteRankError: with NCCL, if a process has not started after `START_MINUTES`.
            RuntimeError: from torch, if the processes cannot connect.
        """
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from accelerate.utils import InitProcessGroupKwargs

        with_deepspeed = _flag(os.environ, "ACCELERATE_USE_DEEPSPEED")
        needs_group = with_deepspeed or int(os.environ.get("WORLD_SIZE", "1")) > 1
        on_cpu = _flag(os.environ, "ACCELERATE_USE_CPU") or (needs_group and not torch.accelerator.is_available())
        backend = "gloo" if on_cpu else "nccl" if torch.cuda.is_available() else None
        if backend == "nccl":
            set_allocator()
        started, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if backend == "nccl" and started > gpus:
            raise SettingsError(
                f"the launcher starts {started} processes on a machine with {gpus} GPUs; expected a GPU for each process. Set "
                f"--num_processes (torchrun: --nproc-per-node) to {gpus}."
            )
        if not needs_group:  # a trainer of another library in this process may have left its dtype and device
            AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(
            # True would disable DeepSpeed; False without a GPU would not connect the processes.
            cpu=on_cpu and not with_deepspeed,
            mixed_precision="no",  # the settings choose the dtype, not the launcher
            deepspeed_plugin=_deepspeed_plugin() if with_deepspeed else None,
            # ProcessWatch detects a lost process; a rank that writes or reads data may take long.
            kwargs_handlers=[InitProcessGroupKwargs(backend=backend, timeout=timedelta(days=1))] if needs_group else [],
        )
        if _flag(os.environ, "ACCELERATE_USE_FSDP"):  # else transformers loads no weights on some ranks
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        state: Any = accelerator.state
        if with_deepspeed:
            # Otherwise transformers would partition the weights on loading, and probes could not run the model.
            state.deepspeed_plugin.dschf = None
        device = torch.device("cpu") if state.device.type == "cpu" else state.device  # Accelerate may number CPUs
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        processes = cls(state.process_index, state.num_processes, device, state.local_process_index, accelerator)
        if processes.world_size > 1:
            wait_for_ranks(processes.rank, processes.world_size)
        check_launch(accelerator.distributed_type.value, processes.deepspeed_config, os.environ)
        return processes

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, which writes the files of the run."""
        return self.rank == 0

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of DeepSpeed; 0 without DeepSpeed."""
        plugin = self.accelerator and self.accelerator.state.deepspeed_plugin
        return int(plugin.zero_stage) if plugin else 0

    @property
    def uses_fsdp(self) -> bool:
        """Whether the launcher selects FSDP, with several processes."""
        return self.world_size > 1 and _flag(os.environ, "ACCELERATE_USE_FSDP")

    @property
    def partition(self) -> Literal["ZeRO-3", "FSDP"] | None:
        """What partitions the weights of the base over ranks; None if every rank holds all weights."""
        return "FSDP" if self.uses_fsdp else "ZeRO-3" if self.zero_stage == 3 else None

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The DeepSpeed configuration; empty without DeepSpeed."""
        return self.accelerator.state.deepspeed_plugin.deepspeed_config if self.zero_stage else {}

    @property
    def load_device(self) -> torch.device:
        """The device on which model weights are loaded.

        With ZeRO-3 and FSDP, this is the CPU: weights are partitioned from there, so that no GPU ever holds all weights.
        """
        return torch.device("cpu") if self.partition else self.device

    @property
    def offload(self) -> str:
        """What DeepSpeed keeps in host memory: `none`, `optimizer` or `parameters`.

        `parameters` takes precedence if both kinds of offload are configured.
        """
        zero = self.deepspeed_config.get("zero_optimization", {})
        for section, name in (("offload_param", "parameters"), ("offload_optimizer", "optimizer")):
            if zero.get(section, {}).get("device", "none") != "none":
                return name
        return "none"

    def __str__(self) -> str:
        strategy = f", {'FSDP' if self.uses_fsdp else 'data parallel'}" if self.world_size > 1 else ""
        if self.zero_stage:
            strategy = f", ZeRO-{self.zero_stage}{'' if self.offload == 'none' else ' with offload'}"
        return f"process {self.rank} of {self.world_size} on {self.device}{strategy}"

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place, and return the tensor; the values are bitwise equal on every rank."""
        if self.world_size > 1:
            with self.operations.running("sum"):
                distributed.all_reduce(tensor)
        return tensor

    def max(self, number: int) -> int:
        """Return the maximum of an integer over all ranks."""
        if self.world_size == 1:
            return number
        with self.operations.running("max"):
            tensor = torch.tensor([number], device=self.device)
            distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
            return int(tensor)

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks as a list, in the order of the ranks. Values must be small and picklable."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self.operations.running("gather"):
            distributed.all_gather_object(values, value)
        return values

    def from_main(self, make: Callable[[], Value], *, each_machine: bool = False) -> Value:
        """Call `make` on rank 0, and return its result on every rank. The result must be small and picklable.

        With `each_machine`, the first rank of every machine also calls `make`.

        Raises:
            RemoteRankError: on all other ranks, if `make` fails.
        """
        if self.world_size == 1:
            return make()
        values: list[Any] = [None]
        problem = ""
        try:
            if (self.local_rank if each_machine else self.rank) == 0:
                values = [make()]
        except BaseException as error:
            problem = f"rank {self.rank} failed: {type(error).__name__}: {error}"
            raise
        finally:
            problems = list(filter(None, self.gather(problem)))
        if problems:
            raise RemoteRankError(problems[0])
        with self.operations.running("from_main"):
            distributed.broadcast_object_list(values, src=0)
        return cast(Value, values[0])

    def broadcast(self, tensors: Mapping[str, Tensor] | None) -> Iterator[tuple[str, Tensor]]:
        """Send tensors from rank 0 to all ranks; yield (name, tensor on the device of this rank).

        Rank 0 passes the tensors by name, all other ranks pass None.
        """
        shapes = self.from_main(lambda: {name: (value.shape, value.dtype) for name, value in (tensors or {}).items()})
        for name, (shape, dtype) in shapes.items():
            tensor = tensors[name] if tensors is not None else torch.empty(shape, dtype=dtype)
            on_device = tensor.to(self.device).contiguous()
            if self.world_size > 1:
                with self.operations.running("broadcast"):
                    distributed.broadcast(on_device, src=0)
            yield name, on_device

    def check_equal(self, label: str, value: object) -> None:
        """Check that a value is equal on every rank; `label` names the value in the error message.

        Raises:
            RemoteRankError: on every rank; names the first rank whose value differs from the value of rank 0.
        """
        values = self.gather(value)
        for rank, rank_value in enumerate(values):
            if rank_value != values[0]:
                raise RemoteRankError(
                    f"{label} differs between ranks: rank {rank} has {rank_value}, rank 0 has {values[0]}. Use the same files, "
                    "packages and settings on every machine."
                )


def check_launch(distributed_type: str, deepspeed_config: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Check that the launcher selects a supported strategy.

    Not supported: FSDP of version 1 or with offload, DeepSpeed on the CPU, mixed precision in a DeepSpeed config, and tensor,
    pipeline or sequence parallelism.

    Args:
        distributed_type: type of launch in Accelerate, such as `MULTI_GPU`.
        deepspeed_config: configuration of DeepSpeed; empty without DeepSpeed.
        environment: environment variables set by the launcher.

    Raises:
        SettingsError: with the reason and a supported alternative.
    """
    if not (distributed_type in ("NO", "DEEPSPEED", "FSDP") or distributed_type.startswith("MULTI_")):
        raise SettingsError(
            f"the launcher selects {distributed_type}, which is not supported. To partition weights, use FSDP or ZeRO-3: "
            "accelerate launch --config_file deepspeed_configs/fsdp2.yaml or deepspeed_configs/zero3.yaml."
        )
    fsdp = _flag(environment, "ACCELERATE_USE_FSDP")  # without a GPU, `distributed_type` does not show it
    if fsdp and environment.get("FSDP_VERSION", "1") != "2":
        raise SettingsError(
            "the launcher selects FSDP of version 1; expected version 2. Set --fsdp_version 2, or fsdp_version: 2 in the config "
            "file, as in deepspeed_configs/fsdp2.yaml."
        )
    if fsdp and _flag(environment, "FSDP_OFFLOAD_PARAMS"):
        raise SettingsError(
            "the launcher selects FSDP with offload, which is not supported. Set fsdp_offload_params: false, or use ZeRO-3 with "
            "offload: accelerate launch --config_file deepspeed_configs/zero3_offload.yaml."
        )
    if _flag(environment, "ACCELERATE_USE_DEEPSPEED") and _flag(environment, "ACCELERATE_USE_CPU"):
        raise SettingsError(
            "the launcher selects DeepSpeed and the CPU, and Accelerate then turns DeepSpeed off. Set use_cpu: false in the "
            "config file and omit --cpu; to keep a run off the GPUs, set CUDA_VISIBLE_DEVICES=''."
        )
    if any(deepspeed_config.get(dtype, {}).get("enabled") is True for dtype in ("bf16", "fp16")):
        raise SettingsError(
            "the DeepSpeed config enables bf16 or fp16, which would round the adapter and its optimizer state. Remove that "
            "section: model.dtype sets the dtype of the base, the adapter stays float32."
        )
    sizes = [environment.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1") for name in ("TP", "CP", "SP")]
    sizes.append(str(deepspeed_config.get("sequence_parallel_size", 1)))
    if "pipeline" in deepspeed_config or deepspeed_config.get("tensor_parallel") or any(size != "1" for size in sizes):
        raise SettingsError(
            "the launcher or the DeepSpeed config selects tensor, context, pipeline or sequence parallelism, but every rank "
            "encodes its own texts. Remove these settings. To partition weights, use ZeRO-3 or FSDP."
        )


def _flag(environment: Mapping[str, str], name: str) -> bool:
    """Return whether an environment variable of the launcher is true, parsed as Accelerate does (`yes`, `1`, …)."""
    return environment.get(name, "false").lower() in ("y", "yes", "t", "true", "on", "1")


def _deepspeed_plugin() -> Any:
    """Return the DeepSpeed plugin of Accelerate, with the config values that training requires.

    All other values come from the config file or flags of the launcher.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")  # read on import
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero3_init_flag=False)
    plugin.deepspeed_config.update(
        train_micro_batch_size_per_gpu=1,  # micro-batches are made by `model/layout/micro_batches`
        gradient_accumulation_steps=1,
        managed_gradient_accumulation=False,  # any number of backward passes, then one step
        zero_allow_untested_optimizer=True,
        zero_force_ds_cpu_optimizer=False,  # torch's AdamW also with offload: same numbers, nothing to compile
    )
    if plugin.zero_stage != 2:  # with any number of backward passes, DeepSpeed documents overlap for stage 2 only
        plugin.deepspeed_config["zero_optimization"]["overlap_comm"] = False
    return plugin


INTERVAL = 1.0
"""Seconds after which a process increments its counter in the store again, to show that the process is alive."""
LOST_SECONDS = 12
"""A rank is lost if its counter has not changed for this many seconds. Calls that hold the GIL delay increments, such as a
long compilation on a slow machine; the environment variable ANGLE_LLM_LOST_SECONDS allows more time."""
START_MINUTES = 60
"""Minutes in which all ranks must start. A program can prepare data on one rank before it calls `fine_tune`."""
STALE = 3
"""Intervals without an increment after which the operation in a counter is out of date."""
STUCK_SECONDS = 30
"""Seconds after which ranks that wait in different collective operations end."""
PASSES = "forward or backward pass"
"""Name of the operation of a rank that computes passes with collective operations inside (ZeRO, FSDP)."""
GRACE_SECONDS = 3
"""Seconds in which a process can end with its own error message after another rank has failed."""
EXIT_CODE = 3
"""Exit code of a process that ends because another rank is lost."""
LEFT, FAILED = "left", "failed"
"""Last values of a counter in the store: LEFT after a normal end, FAILED and the error message after an error."""
exit_lock = threading.Lock()
"""Hold this lock while saving files: `ProcessWatch` does not end the process until the lock is released."""


def wait_for_ranks(rank: int, world_size: int, limit: timedelta = timedelta(minutes=START_MINUTES)) -> None:
    """Mark this rank as started in the store of the launcher, and wait for all other ranks.

    NCCL would wait a day for a rank on another machine that failed before its first operation. With gloo, torch itself
    waits a day, before this function is called.

    Raises:
        RemoteRankError: if a rank has not started after the limit.
    """
    started = PrefixStore(f"angle_llm/started/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", _launcher_store())
    keys = [str(number) for number in range(world_size)]
    started.set(keys[rank], "")
    try:
        started.wait(keys, limit)
    except RuntimeError as error:
        missing = [key for key in keys if not started.check([key])]
        raise RemoteRankError(
            f"rank {', '.join(missing)} of {world_size} did not start within {limit}. See the log on its machine."
        ) from error


def _launcher_store(**options: Any) -> TCPStore:
    """Return a connection to the store that the launcher or rank 0 started."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, wait_for_workers=False, **options)


class ProcessWatch:
    """Context manager that ends this process with a message when another rank is lost, fails, or calls another operation.

    A rank is lost if its process was killed or stopped. Every rank increments a counter in a store of torch. A thread
    writes and reads the counters. A second thread counts the intervals without an increment: if the process of
    the store is stopped, a call of the store blocks forever, despite its timeout. The second thread measures no clock
    time, so a process that was suspended does not report running ranks as lost.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._lost_seconds = int(os.environ.get("ANGLE_LLM_LOST_SECONDS", LOST_SECONDS))
        self._stopped = threading.Event()
        self._last = LEFT
        self._handles: dict[int, int] = {}
        """Rank → pidfd (file descriptor) of its process, on this machine; unlike a process id, it is not reused."""
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._exchange_counters, self._watch)]

    def __enter__(self) -> ProcessWatch:
        if self._processes.world_size > 1:
            run_id = self._processes.from_main(lambda: os.urandom(8).hex())  # a restarted run can have the same store
            store = _launcher_store(timeout=timedelta(seconds=self._lost_seconds))
            self._store = PrefixStore(f"angle_llm/{run_id}", store)
            self._ranks = [str(rank) for rank in range(self._processes.world_size)]
            self._store.set(self._ranks[self._processes.rank], "0,0,")  # as in `_exchange_counters`
            self._process_ids = self._processes.gather((_machine(), socket.gethostname(), os.getpid()))
            for rank, (machine, _, pid) in enumerate(self._process_ids):
                if machine == _machine():
                    with suppress(OSError, AttributeError):  # Linux only
                        self._handles[rank] = os.pidfd_open(pid)
            self._counters = self._store.multi_get(self._ranks)  # every rank has set its counter before the gather
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._processes.world_size == 1:
            return
        exchanging, watching = self._threads
        if isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Connection")):
            # `_watch` names the lost rank and ends this process, on a busy machine after more than `LOST_SECONDS`.
            watching.join(3 * self._lost_seconds)
        left = error is None or isinstance(error, SystemExit)  # SystemExit: all ranks stop together
        self._last = LEFT if left else f"{FAILED}: {type(error).__name__}: {error}"
        self._stopped.set()
        exchanging.join(self._lost_seconds if left else 2 * INTERVAL)  # without LEFT, this rank counts as lost
        if self._processes.is_main and not left:
            time.sleep(2 * INTERVAL)  # the store can end with this process: other ranks must read it before
        for handle in self._handles.values():
            os.close(handle)

    def _exchange_counters(self) -> None:
        """Increment the counter of this rank and read the counters of all ranks, every `INTERVAL` seconds (thread)."""
        count = 0
        with suppress(RuntimeError):  # if the store does not respond, `_watch` counts the missing increments
            while not self._stopped.wait(INTERVAL):
                count += 1
                number, name = self._processes.operations.current
                self._store.set(self._ranks[self._processes.rank], f"{count},{number},{name}")
                self._counters = self._store.multi_get(self._ranks)
            self._store.set(self._ranks[self._processes.rank], self._last)

    def _watch(self) -> None:
        """End this process if a rank has failed, or a counter or the store has not changed for too long (thread).

        Also if ranks have called different operations.
        """
        last = self._counters
        last_mismatch: tuple[int, str] | None = None
        # Numbers of intervals: without an answer of the store, with one mismatch, without an increment (by rank).
        unanswered = stuck = 0
        silent = [0] * self._processes.world_size
        while not self._stopped.wait(INTERVAL):
            counters = self._counters
            for rank, counter in enumerate(counters):
                if counter.startswith(FAILED.encode()):
                    if not self._stopped.wait(GRACE_SECONDS):  # else this process has ended with its own error
                        self._exit(rank, counter.decode(errors="replace"))
                    return
            unanswered = unanswered + 1 if counters is last else 0  # every answer is a new list
            if unanswered * INTERVAL >= self._lost_seconds:  # the store is part of rank 0 or its launcher
                self._exit(0, "or its launcher was killed or stopped, or has failed")
            if counters is not last:
                for rank, counter in enumerate(counters):
                    silent[rank] = silent[rank] + 1 if counter == last[rank] != LEFT.encode() else 0
                    if silent[rank] * INTERVAL >= self._lost_seconds:
                        self._exit(rank, "was killed or stopped")
                last = counters
                # The operation of a silent rank is out of date: it may hold the GIL, longer with more LOST_SECONDS.
                mismatch = None if max(silent) >= STALE else _mismatch(list(map(_operation, counters)))
                stuck = stuck + 1 if mismatch is not None and mismatch == last_mismatch else 0
                last_mismatch = mismatch
                if mismatch is not None and stuck * INTERVAL >= STUCK_SECONDS:
                    self._exit(*mismatch, is_alive=True)

    def _exit(self, rank: int, reason: str, *, is_alive: bool = False) -> None:
        """End this process, with a message that another rank is lost, has failed, or has called another operation.

        A lost process on this machine is killed first, because the launcher waits for a process that is only stopped.

        Args:
            rank: the lost or failed rank.
            reason: end of the sentence "rank N …", such as `was killed or stopped`.
            is_alive: whether the rank ends itself, with a message of its own.
        """
        machine, host, pid = self._process_ids[rank]
        if not (is_alive or reason.startswith(FAILED)):
            with suppress(OSError):  # the process may have ended
                if rank in self._handles:
                    signal.pidfd_send_signal(self._handles[rank], signal.SIGKILL)
                elif machine == _machine():  # no handles, as on macOS
                    os.kill(pid, signal.SIGKILL)
        if self._processes.is_main:
            time.sleep(2 * INTERVAL)  # as in __exit__
        lost = f"rank {rank} (host {host}, process {pid}) {reason}"
        message = f"rank {self._processes.rank} exits: {lost}. Resume with --resume auto."
        with exit_lock:
            if self._stopped.wait(INTERVAL):  # this process has failed meanwhile
                return
            os.write(2, f"\nerror: {message}\n".encode())
            os._exit(EXIT_CODE)  # the main thread may be waiting in a collective


def _operation(counter: bytes) -> Operation | None:
    """Return the operation in a counter of the store; None if the rank has ended its run."""
    _, _, operation = counter.decode(errors="replace").partition(",")
    number, _, name = operation.partition(",")
    return Operation(int(number), name) if number else None


def _mismatch(calls: Sequence[Operation | None]) -> tuple[int, str] | None:
    """Return the first rank that has called another operation than a waiting rank, with a description; None if none has.

    `calls` has the operation of every rank. A rank that has started fewer operations may still compute, for any time.
    """
    for waiting, awaited in enumerate(calls):
        if awaited is None or awaited.name in ("", PASSES):  # passes take different times on different ranks
            continue
        for rank, call in enumerate(calls):
            reason = f"and rank {waiting} waits in operation {awaited.number} ({awaited.name})"
            if call is None:
                return rank, f"has ended its run, {reason}"
            if call.number > awaited.number or (call.number == awaited.number and call.name != awaited.name):
                return rank, f"is in operation {call.number} ({call.name or 'completed'}), {reason}"
    return None


def _machine() -> str:
    """Return an id of the machine or container in which process ids are unique.

    A host name does not suffice, because two containers can have equal host names.
    """
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()

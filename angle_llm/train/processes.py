"""The processes of a run: who is who, and the few things they say to one another.

A run of one process is the same code: it has nobody to talk to. Whatever is written is written by the main process, rank 0;
what it reads it tells the others, so that they need not see its disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

Value = TypeVar("Value")


class ElsewhereError(RuntimeError):
    """Another process of the run has failed, or is not where this one is."""


@dataclass(frozen=True)
class Processes:
    """A process among those of its run. Every method but the properties is for all of them to call, in the same order."""

    rank: int
    count: int
    device: torch.device
    """Where what they exchange lies."""
    local_rank: int = 0
    """Its number on its machine."""

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> Processes:
        """A run of one process."""
        return cls(0, 1, torch.device(device))

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Adds up the processes' tensors of one shape, in place; all get the same bits."""
        if self.count > 1:
            distributed.all_reduce(tensor)
        return tensor

    def highest(self, number: int) -> int:
        """The largest of the processes' numbers."""
        if self.count == 1:
            return number
        tensor = torch.tensor([number], device=self.device)
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
        return int(tensor)

    def gather(self, value: Value) -> list[Value]:
        """Everybody's value, by rank; small things."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def from_main(self, make: Callable[[], Value]) -> Value:
        """What the main process makes, and tells the others.

        Raises:
            ElsewhereError: in the others, if it fails there.
        """
        if self.count == 1:
            return make()
        told: list[Any] = [None, None]
        try:
            if self.is_main:
                told = [make(), None]
        except BaseException as error:
            told = [None, f"{type(error).__name__}: {error}"]
            raise
        finally:
            distributed.broadcast_object_list(told, src=0)
        if told[1] is not None:
            raise ElsewhereError(f"process 0 could not go on: {told[1]}")
        value: Value = told[0]
        return value

    def once_a_machine(self, work: Callable[[], None]) -> None:
        """Has the first process of every machine do something; the others wait until it is done.

        Raises:
            ElsewhereError: where it was not done, if it failed somewhere.
        """
        problem = None
        try:
            if self.local_rank == 0:
                work()
        except Exception as error:
            problem = f"process {self.rank} could not go on: {error}"
            raise
        finally:
            problems = [one for one in self.gather(problem) if one]
        if problems:
            raise ElsewhereError(problems[0])

    def tensors_from_main(self, tensors: Mapping[str, Tensor] | None) -> Iterator[tuple[str, Tensor]]:
        """Named tensors that the main process holds (the others pass None), one after the other, on the device of all."""
        shapes = self.from_main(lambda: {name: (one.shape, one.dtype) for name, one in (tensors or {}).items()})
        for name, (shape, dtype) in shapes.items():
            tensor = tensors[name] if tensors is not None else torch.empty(shape, dtype=dtype)
            on_device = tensor.to(self.device).contiguous()
            if self.count > 1:
                distributed.broadcast(on_device, src=0)
            yield name, on_device

    def check_same(self, what: str, value: object) -> None:
        """Refuses to go on if a process holds another value than the main one.

        Raises:
            ElsewhereError: in all of them, naming the process.
        """
        for rank, other in enumerate(values := self.gather(value)):
            if other != values[0]:
                raise ElsewhereError(
                    f"process {rank} has other {what} than process 0 ({other}; {values[0]}). Give every process the same "
                    "files, packages and settings."
                )

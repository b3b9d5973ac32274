"""World: processes with a share of each batch, by torch.distributed.

Invariant: after `average` all processes have the same gradients, the mean over processes. Cost: an
all-reduce of all gradients per optimiser step.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPossiblyUnboundVariable=false
# (torch leaves parts untyped)

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import torch
from torch import distributed

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Self

__all__ = ["World", "spawn", "spawned"]


class World:
    """The processes of a run: a single process, or the processes started by torchrun."""

    def __init__(self, devices: int) -> None:
        self.size, self.rank = 1, 0
        if devices > 1:
            found = int(os.environ.get("WORLD_SIZE", "1"))
            if found != devices:
                raise ConfigError(f"devices is {devices}, and {found} processes were started")
            distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
            self.size, self.rank = distributed.get_world_size(), distributed.get_rank()

    @property
    def leads(self) -> bool:
        """Whether this process writes the files of the run."""
        return self.rank == 0

    @property
    def device(self) -> str | None:
        """The GPU of this process, None for a single process or without CUDA."""
        return f"cuda:{self.rank}" if self.size > 1 and torch.cuda.is_available() else None

    def average(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace every gradient by the mean over all processes, with a single all-reduce."""
        if self.size == 1:
            return
        trained = [each for each in parameters if each.requires_grad]
        for each in trained:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        parts = [each.grad.flatten().float() for each in trained if each.grad is not None]
        every = torch.cat(parts)
        distributed.all_reduce(every)
        every /= self.size
        sizes = [each.numel() for each in trained]
        for each, mean in zip(trained, every.split(sizes), strict=True):
            if each.grad is not None:
                each.grad.copy_(mean.view_as(each))

    def mean(self, value: float) -> float:
        """Return the mean of a number over all processes."""
        return self.sum(value) / self.size

    def sum(self, value: float) -> float:
        """Return the sum of a number over all processes."""
        if self.size == 1:
            return value
        numbers = torch.tensor(value, dtype=torch.float64, device=self.device or "cpu")
        distributed.all_reduce(numbers)
        return float(numbers)

    def wait(self) -> None:
        """Wait until all processes have called this method."""
        if self.size > 1:
            distributed.barrier()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.size > 1:
            distributed.destroy_process_group()


def spawned() -> bool:
    """Return whether torchrun started this process."""
    return "WORLD_SIZE" in os.environ


def spawn(devices: int, words: Sequence[str]) -> int:
    """Run `kvtrie` with arguments in `devices` processes by torchrun and return the status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(devices), "-m", "kvtrie", *words]
    threads = max(1, torch.get_num_threads() // devices)
    env = {"OMP_NUM_THREADS": str(threads)} | dict(os.environ)
    return subprocess.run(command, env=env, check=False).returncode  # noqa: S603 - our own arguments

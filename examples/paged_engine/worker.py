"""Worker: the process of one rank. It holds bytes and decides nothing; it has no `BlockManager`.

Its gpu pool and host pool have the rank's heads of every slot; slot numbers mean the same on all
ranks. A step brings moves, which a `Runner` copies, and a batch; the reply says which moves went
well and which tokens come next.
Invariant: every move is reported once, done or failed, and ends before the batch begins.
Cost: a move copies its bytes once; an addition sends one tensor to the neighbour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from examples.paged_engine.model import Model, Sequence
from kvtrie import Moves
from kvtrie.tiers import Pool
from kvtrie.transfer import Runner

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    from kvtrie import ModelShape


class Setup(NamedTuple):
    """The arguments of a worker."""

    shape: ModelShape
    config: dict[str, Any]
    weights: dict[str, Any]
    slots: list[int]  # of each tier
    block_tokens: int
    fail_a_load: bool  # for show: the first one


class StepInput(NamedTuple):
    """From the scheduler: moves, as `Moves.to_bytes` gave them, and what to compute."""

    moves: list[bytes]
    batch: list[Sequence]


class Reply(NamedTuple):
    """To the scheduler: ids of moves that are done, those that failed and why, next tokens."""

    done: list[int]
    failed: dict[int, str]
    tokens: list[int]


def serve(rank: int, setup: Setup, scheduler: Connection, neighbour: Connection) -> None:
    """Answer steps until the scheduler hangs up."""
    torch.set_num_threads(1)
    worker = _Worker(rank, setup, neighbour)
    with worker.runner:
        try:
            while True:
                scheduler.send(worker.step(scheduler.recv()))
        except (EOFError, ConnectionError):
            return  # the scheduler or the neighbour has ended; the scheduler reports the latter


class _FailingPool(Pool):
    """The gpu pool of the rank whose first load fails, for show."""

    failed = False

    def copy_from(
        self, source: Pool, source_units: NDArray[np.int64], units: NDArray[np.int64]
    ) -> None:
        if source is not self and not self.failed:
            self.failed = True
            raise OSError(f"injected: cannot read slot {source_units[0] // source.layers}")
        super().copy_from(source, source_units, units)


class _Worker:
    def __init__(self, rank: int, setup: Setup, neighbour: Connection) -> None:
        self._model = Model(setup.config, setup.weights, self._add)
        gpu = _FailingPool if setup.fail_a_load else Pool
        kinds = [gpu, *[Pool] * (len(setup.slots) - 1)]
        self.pools = [
            kind(setup.shape, slots, setup.block_tokens)
            for kind, slots in zip(kinds, setup.slots, strict=True)
        ]
        self._memory = self._model.blocks_of(self.pools[0])
        # One move a job: what cannot be copied costs one block.
        self.runner = Runner(self.pools, workers=1, moves_per_job=1)
        self._rank = rank
        self._neighbour = neighbour

    def step(self, step: StepInput) -> Reply:
        reply = Reply([], {}, [])
        for data in step.moves:
            self.runner.submit(Moves.from_bytes(data))
        for report in self.runner.drain():
            if report.error is not None:
                reply.failed.update(dict.fromkeys(report.ids, report.error))
            elif report.layers_done is None:  # not only some of its layers
                reply.done.extend(report.ids)
        if step.batch:
            logits = self._model.forward(step.batch, self._memory)
            reply.tokens.extend(int(token) for token in logits.argmax(-1))
        return reply

    def _add(self, mine: torch.Tensor) -> torch.Tensor:
        """The sum over both ranks, to the last bit the same on both: a + b is b + a."""
        theirs = np.empty(mine.numel(), dtype=np.float32)
        if self._rank == 0:  # one speaks first: if both did, full pipes could stop both
            self._neighbour.send_bytes(mine.numpy().tobytes())
        self._neighbour.recv_bytes_into(theirs)
        if self._rank == 1:
            self._neighbour.send_bytes(mine.numpy().tobytes())
        return mine + torch.as_tensor(theirs).view_as(mine)

"""Worker: the process of one rank. It holds bytes and decides nothing.

Its gpu pool and host pool have the rank's heads of every slot; slot numbers mean the same on all
ranks. A step brings moves and a batch, the reply says which moves went well and what comes next.
Invariant: every move is reported once, done or failed, and ends before the batch begins.
Cost: a move copies its bytes once; an addition sends one tensor to the neighbour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from examples.paged_engine.model import Model, Sequence
from kvtrie import Moves

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvtrie import Move


class Setup(NamedTuple):
    """What a rank needs to know."""

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
    try:
        while True:
            scheduler.send(worker.step(scheduler.recv()))
    except (EOFError, ConnectionError):
        return  # somebody is gone; if that is the neighbour, the scheduler tells


class _Worker:
    def __init__(self, rank: int, setup: Setup, neighbour: Connection) -> None:
        self._model = Model(setup.config, setup.weights, self._add)
        self._pools = [self._model.pool(slots, setup.block_tokens) for slots in setup.slots]
        self._rank = rank
        self._neighbour = neighbour
        self._fail_a_load = setup.fail_a_load

    def step(self, step: StepInput) -> Reply:
        reply = Reply([], {}, [])
        for move in (move for data in step.moves for move in Moves.from_bytes(data)):
            try:
                self._copy(move)
                reply.done.append(move.id)
            except OSError as error:
                reply.failed[move.id] = str(error)
        if step.batch:
            logits = self._model.forward(step.batch, self._pools[0])
            reply.tokens.extend(int(token) for token in logits.argmax(-1))
        return reply

    def _copy(self, move: Move) -> None:
        if self._fail_a_load and move.kind == Moves.LOAD:
            self._fail_a_load = False
            raise OSError(f"injected: tier {move.src} cannot read slot {move.src_slot}")
        layers = slice(move.layer_lo, move.layer_hi)
        source = self._pools[move.src][move.src_slot, layers]
        self._pools[move.dst][move.dst_slot, layers] = source

    def _add(self, mine: torch.Tensor) -> torch.Tensor:
        """The sum over both ranks, to the last bit the same on both: a + b is b + a."""
        theirs = np.empty(mine.numel(), dtype=np.float32)
        if self._rank == 0:  # one speaks first: if both did, full pipes could stop both
            self._neighbour.send_bytes(mine.numpy().tobytes())
        self._neighbour.recv_bytes_into(theirs)
        if self._rank == 1:
            self._neighbour.send_bytes(mine.numpy().tobytes())
        return mine + torch.as_tensor(theirs).view_as(mine)

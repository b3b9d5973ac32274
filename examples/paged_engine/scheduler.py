"""Scheduler: who runs in a step and in which slots. Every call into kvtrie is made here.

The gpu tier is ours (`owner="engine"`): we hand its slots out and name them with `bind`. kvtrie
decides what the host tier keeps, what of it a request loads, and what must be copied when.

    acquire, bind        a prompt is looked up; what host has of it is loaded into our slots
    moves, complete      workers copy, every rank reports
    failed               what did not come is computed instead
    commit               KV that a step has written counts from now on
    suspend, resume      a request steps back when room runs out, and comes again
    release              what host lacks is written there; then the slots are ours again

Invariant: a slot is given to nobody while a lease, or a move that has not ended, uses it.
Cost: one message to and from each rank per step; a few calls of microseconds per request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from examples.paged_engine.model import Sequence
from examples.paged_engine.slots import Slots
from examples.paged_engine.worker import Step
from kvtrie import Moves

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from examples.paged_engine.ranks import Ranks
    from examples.paged_engine.worker import Reply
    from kvtrie import BlockManager, Lease


@dataclass(slots=True)
class Request:
    """A prompt that is answered until it has `length` tokens; the last one's KV is not needed."""

    name: str
    tokens: list[int]
    length: int


class Event(NamedTuple):
    """Something worth a line: who, what, and how many tokens or moves."""

    who: str
    what: str
    amount: int


@dataclass(slots=True)
class Report:
    """A step: how many tokens it computed of each request, and what else happened."""

    computed: dict[str, int] = field(default_factory=dict[str, int])
    events: list[Event] = field(default_factory=list[Event])


@dataclass(slots=True, eq=False)
class _Run:
    """An admitted request: kvtrie's hold on it, and ours, the slots of its blocks in order.

    The KV of its first `shared` tokens stood in our slots when it came.
    """

    request: Request
    lease: Lease
    table: list[int]
    shared: int


class Scheduler:
    """Continuous batching over one manager and its ranks.

    Args:
        manager: with `structure="holes"`. Our model computes any position, so a block that is lost
            costs that block and none behind it.
        ranks: the workers.
        clock: nanoseconds that never fall.
    """

    def __init__(self, manager: BlockManager, ranks: Ranks, clock: Callable[[], int]) -> None:
        self._manager = manager
        self._ranks = ranks
        self._clock = clock
        self._size = manager.block_tokens
        self._room = manager.tiers[0].room(manager.model, self._size)
        self.slots = Slots(self._room, self._size)
        self._waiting: deque[Request] = deque()
        self._running: list[_Run] = []  # oldest first
        self._suspended: deque[_Run] = deque()
        self._queue: dict[int, Moves] = {}  # moves that have not started, one each, by id
        self._leaving: list[tuple[set[int], list[int]]] = []  # moves, and slots that they use
        self._report = Report()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do, not even a copy."""
        works = (self._waiting, self._running, self._suspended, self._queue, self._leaving)
        return not any(works)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it has no prompt, no answer, or could never run.
        """
        blocks = self._blocks(request.length)
        if not 0 < len(request.tokens) < request.length or blocks > self._room:
            raise ValueError(
                f"request {request.name!r} of {len(request.tokens)} tokens is to have "
                f"{request.length}, which is {blocks} blocks; there are {self._room}"
            )
        self._waiting.append(request)

    def step(self) -> Report:
        """Make room, copy, and compute one batch of prefills and decodes."""
        self._report = Report()
        self._grow()
        self._resume()
        self._admit()
        moves = self._start()
        # Whose loads are under way, or whose next slot is not there, sits this step out.
        batch = [run for run in self._running if run.lease.ready() and not self._lacks(run)]
        work = [self._sequence(run) for run in batch]
        replies = self._ranks.step(Step([move.to_bytes() for move in moves.values()], work))
        self._complete(moves, replies)
        self._commit(batch, replies[0].tokens)
        return self._report

    # ---------------------------------------------------------------------- requests and slots

    def _admit(self) -> None:
        """Lease what there is room for, first come, first served."""
        while self._waiting and not self._suspended:
            tokens, now = self._waiting[0].tokens, self._clock()
            shared = self.slots.find(tokens)
            if self._blocks(len(tokens)) - len(shared) > self.slots.free:
                return
            ours = len(shared) * self._size
            lease = self._manager.acquire(tokens, now=now, load="none" if ours else "plan")
            run = _Run(self._waiting.popleft(), lease, self.slots.hold(shared), ours)
            if ours:
                self._tell(run, "from gpu", ours)
            if ours < lease.matched:
                lease.load(blocks=(len(shared), lease.matched // self._size), now=now)
            self._enter(run)
            if ours > lease.matched:
                # Their KV is written, no matter by whom; so the lease may count on it.
                lease.commit(tokens[lease.matched : ours], now=now)

    def _resume(self) -> None:
        """Bring back who stepped back, before anybody new.

        `NoSpaceError` speaks of room that kvtrie gives; here it gives none on the gpu.
        """
        while self._suspended and self._lacks(run := self._suspended[0]) <= self.slots.free:
            run.lease.resume(now=self._clock())
            self._enter(self._suspended.popleft())
            self._tell(run, "resumed", len(run.request.tokens))

    def _enter(self, run: _Run) -> None:
        run.table += self.slots.take(self._lacks(run))
        run.lease.bind(0, run.table)  # loads begin when their slots have names
        self._running.append(run)
        loads = [span for span in run.lease.plan.spans if span.action == "load"]
        if loads:
            self._tell(run, "from host", sum(span.stop - span.start for span in loads))

    def _grow(self) -> None:
        """A slot for each run whose next token begins a block; if none is left, the youngest goes.

        Its slots are free when its blocks are written down. Until then who needs one waits.
        """
        for run in list(self._running):
            if run not in self._running or not self._lacks(run):
                continue
            if not self.slots.free and not self._leaving:
                self._suspend(next(r for r in reversed(self._running) if r.lease.ready()))
            if self.slots.free and run in self._running:
                run.table += self.slots.take(1)
                run.lease.bind(0, run.table)

    def _suspend(self, run: _Run) -> None:
        self._running.remove(run)
        self._suspended.append(run)
        self._tell(run, "preempted", len(run.request.tokens))
        self._leave(run, run.lease.suspend(now=self._clock()))

    def _leave(self, run: _Run, reading: NDArray[np.uint64]) -> None:
        """Take a run's slots back when the moves that still read them have ended."""
        self._leaving.append((set(reading.tolist()), run.table))
        run.table, run.shared = [], 0
        self._free(set())

    def _free(self, ended: set[int]) -> None:
        left = [(reading - ended, table) for reading, table in self._leaving]
        self._leaving = [(reading, table) for reading, table in left if reading]
        for reading, table in left:
            if not reading:
                self.slots.give(table)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def _lacks(self, run: _Run) -> int:
        return self._blocks(len(run.request.tokens)) - len(run.table)

    # ----------------------------------------------------------------------------------- moves

    def _start(self) -> dict[int, Moves]:
        """The moves that may start: what they name as `after` has ended well on every rank."""
        while len(move := self._manager.moves(limit=1)):  # one by one: each may have to wait
            self._queue[int(move.id[0])] = move
        able = {at: move for at, move in self._queue.items() if move.after[0] not in self._queue}
        self._queue = {at: move for at, move in self._queue.items() if at not in able}
        return able

    def _complete(self, moves: dict[int, Moves], replies: list[Reply]) -> None:
        """Report for every rank: a move is done when all have done it, failed when one has not."""
        now = self._clock()
        lost: set[int] = set()
        for rank, reply in enumerate(replies):
            self._manager.complete(reply.done, now=now, rank=rank)
            for ident, why in reply.failed.items():
                self._manager.complete(ident, now=now, ok=False, rank=rank, error=why)
                lost.add(ident)
        kinds = [move[0].kind for ident, move in moves.items() if ident not in lost]
        loads = kinds.count(Moves.LOAD)
        for what, amount in (("loaded", loads), ("stored", len(kinds) - loads)):
            if amount:
                self._report.events.append(Event("blocks", what, amount))
        for ident, move in list(self._queue.items()):  # in order: one pass finds chains too
            if move.after[0] in lost:
                lost.add(ident)  # it has failed with the other, and must not run
                del self._queue[ident]
        self._free(moves.keys() | lost)
        # kvtrie has planned anew: `plan.recompute` now names the tokens that did not come.
        runs = {run.lease.id: run for run in self._running}
        for failed in self._manager.failed():
            if failed.lease in runs:
                self._tell(runs[failed.lease], "failed load", failed.stop - failed.start)

    # ---------------------------------------------------------------------------------- tokens

    def _sequence(self, run: _Run) -> Sequence:
        """What is to be computed: the holes of the match, and all behind what the lease holds."""
        tokens = run.request.tokens
        holes = run.lease.plan.recompute()  # none after the first commit
        holes = holes[holes >= run.shared].tolist()
        positions = [*holes, *range(max(run.shared, run.lease.tokens), len(tokens))]
        self._report.computed[run.request.name] = len(positions)
        return Sequence([tokens[at] for at in positions], positions, run.table)

    def _commit(self, batch: list[_Run], answers: list[int]) -> None:
        """Book what the batch has written, append what it has answered, let go who is done."""
        now = self._clock()
        written = [run.request.tokens[run.lease.tokens :] for run in batch]
        self._manager.commit_many([run.lease.id for run in batch], written, now=now)
        for run, token in zip(batch, answers, strict=True):
            request = run.request
            self.slots.name(request.tokens, run.table)
            request.tokens.append(token)
            if len(request.tokens) == request.length:
                self._running.remove(run)
                self._tell(run, "done", request.length)
                self._leave(run, run.lease.release(now=now))

    def _tell(self, run: _Run, what: str, amount: int) -> None:
        self._report.events.append(Event(run.request.name, what, amount))

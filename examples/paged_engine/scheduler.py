"""Scheduler: which requests run in a step, and in which slots.

The gpu tier is ours (`owner="engine"`): we hand its slots out and name them with `bind`. kvtrie
decides what the host tier keeps, what of it a request loads, and what must be copied when. A
request's life, call by call:

    acquire           hold what host has of the prompt, and plan: load it, or compute it again
    bind              our slots get names; loads into them may begin
    moves, complete   workers copy, every rank reports (`pending.py`)
    failed            what did not come is computed instead
    commit            KV that a step has written counts from now on
    suspend, resume   a request steps back when room runs out, and comes again
    release           what host lacks is written there; then the slots are ours again

Invariant: a slot is not reused while a lease, or a move that has not ended, uses it.
Cost: one message to and from each rank per step; a few calls of microseconds per request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from examples.paged_engine.model import Sequence
from examples.paged_engine.pending import PendingMoves
from examples.paged_engine.slots import Slots
from examples.paged_engine.worker import StepInput
from kvtrie import Moves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from examples.paged_engine.ranks import Ranks
    from kvtrie import BlockManager, Lease
    from kvtrie.cluster import Publisher


@dataclass(slots=True)
class ChatRequest:
    """A prompt that is answered until it has `length` tokens; the last one's KV is not needed."""

    name: str
    tokens: list[int]
    length: int


class StepEvent(NamedTuple):
    """An event of a request, with its number of tokens or moves."""

    who: str
    what: str
    amount: int


@dataclass(slots=True)
class StepReport:
    """A step: how many tokens it computed of each request, and what else happened."""

    computed: dict[str, int] = field(default_factory=dict[str, int])
    events: list[StepEvent] = field(default_factory=list[StepEvent])


@dataclass(slots=True, eq=False)
class _Run:
    """An admitted request: kvtrie's hold on it, and ours, the slots of its blocks in order.

    The KV of its first `shared` tokens was in our slots when it arrived.
    """

    request: ChatRequest
    lease: Lease
    table: list[int]
    shared: int


class Scheduler:
    """Continuous batching over one manager and its ranks.

    Args:
        manager: with `structure="holes"`. Our model computes any position, so a block that is lost
            costs that block and none after it.
        ranks: the workers.
        clock: nanoseconds that never fall.
    """

    def __init__(
        self,
        manager: BlockManager,
        ranks: Ranks,
        clock: Callable[[], int],
        publisher: Publisher | None = None,
    ) -> None:
        self._manager = manager
        self._publisher = publisher
        self._ranks = ranks
        self._clock = clock
        self._size = manager.block_tokens
        self._room = manager.tiers[0].room(manager.model, self._size)
        self.slots = Slots(self._room, self._size)
        self._copies = PendingMoves(manager)
        self._waiting: deque[ChatRequest] = deque()
        self._running: list[_Run] = []  # oldest first
        self._suspended: deque[_Run] = deque()
        self._report = StepReport()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do, not even a copy."""
        busy = self._waiting or self._running or self._suspended or self.slots.leaving
        return not busy and self._copies.idle

    def submit(self, request: ChatRequest) -> None:
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

    def step(self) -> StepReport:
        """Make room, copy, and compute one batch of prefills and decodes."""
        self._report = StepReport()
        self._grow()
        self._resume()
        self._admit()
        copies = self._copies.start()
        # Whose loads are under way, or whose next slot is not there, sits this step out.
        batch = [run for run in self._running if run.lease.ready() and not self._lacks(run)]
        work = [self._sequence(run) for run in batch]
        replies = self._ranks.step(StepInput([move.to_bytes() for move in copies.values()], work))
        failed = self._copies.complete(replies, self._clock())
        self._book(copies, failed)
        self._commit(batch, replies[0].tokens)
        if self._publisher is not None:
            self._publisher.pump()  # routers learn which blocks came and which left
        return self._report

    # ---------------------------------------------------------------------- requests and slots

    def _admit(self) -> None:
        """Let requests in while there are slots for their prompts, first come, first served."""
        while self._waiting and not self._suspended:
            request, now = self._waiting[0], self._clock()
            # kvtrie does not know what still stands in our slots: we look there first.
            known = self.slots.find(request.tokens)
            if self._blocks(len(request.tokens)) - len(known) > self.slots.free:
                return
            self._waiting.popleft()
            # Nothing is loaded into slots that have it already. So the plan decides alone only if
            # none has; else we name the blocks to load: those on host after ours.
            load = "none" if known else "plan"
            lease = self._manager.acquire(request.tokens, now=now, load=load)
            run = _Run(request, lease, self.slots.hold(known), shared=len(known) * self._size)
            if known:
                self._add_event(run, "from gpu", run.shared)
            if known and run.shared < lease.matched:
                lease.load(blocks=(len(known), lease.matched // self._size), now=now)
            self._enter(run)
            # A commit reports that KV is written, by any request: blocks that we share count for
            # this lease too, beyond those that host had.
            if run.shared > lease.matched:
                lease.commit(request.tokens[lease.matched : run.shared], now=now)

    def _enter(self, run: _Run) -> None:
        run.table += self.slots.take(self._lacks(run))
        run.lease.bind(0, run.table)  # a load is handed out when its slot has a name
        self._running.append(run)
        loads = [span for span in run.lease.plan.spans if span.action == "load"]
        if loads:
            self._add_event(run, "from host", sum(span.stop - span.start for span in loads))

    def _grow(self) -> None:
        """A slot for each run whose next token begins a block; if none is left, the youngest goes.

        Its slots are free when its blocks are written down. Until then requests that need one wait.
        """
        for run in list(self._running):
            if run not in self._running or not self._lacks(run):
                continue
            if not self.slots.free and not self.slots.leaving:
                self._suspend(next(r for r in reversed(self._running) if r.lease.ready()))
            if self.slots.free and run in self._running:
                run.table += self.slots.take(1)
                run.lease.bind(0, run.table)

    def _suspend(self, run: _Run) -> None:
        """StepInput back: host takes what it has room for, the lease remembers all tokens."""
        self._running.remove(run)
        self._suspended.append(run)
        self._add_event(run, "preempted", len(run.request.tokens))
        self._leave(run, run.lease.suspend(now=self._clock()))

    def _resume(self) -> None:
        """Resume preempted requests before new ones.

        Each is planned again: some of its blocks are loaded, the others computed. There is no
        `NoSpaceError`: kvtrie does not allocate on the gpu.
        """
        while self._suspended and self._lacks(run := self._suspended[0]) <= self.slots.free:
            run.lease.resume(now=self._clock())
            self._enter(self._suspended.popleft())
            self._add_event(run, "resumed", len(run.request.tokens))

    def _leave(self, run: _Run, reading: Iterable[int]) -> None:
        """Give a run's slots back; `reading` has the moves that still read them."""
        self.slots.give(run.table, reading)
        run.table, run.shared = [], 0

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def _lacks(self, run: _Run) -> int:
        """Return the number of slots that a run lacks for its tokens."""
        return self._blocks(len(run.request.tokens)) - len(run.table)

    # ------------------------------------------------------------------------ moves and tokens

    def _book(self, copies: dict[int, Moves], failed: set[int]) -> None:
        """Draw the consequences of moves that have ended."""
        kinds = [move[0].kind for ident, move in copies.items() if ident not in failed]
        loads = kinds.count(Moves.LOAD)
        for what, amount in (("loaded", loads), ("stored", len(kinds) - loads)):
            if amount:
                self._report.events.append(StepEvent("blocks", what, amount))
        self.slots.ended(copies.keys() | failed)
        # kvtrie has updated the plan: `plan.recompute` now has the tokens that failed to load.
        runs = {run.lease.id: run for run in self._running}
        for loss in self._manager.failed():
            if loss.lease in runs:
                self._add_event(runs[loss.lease], "failed load", loss.stop - loss.start)

    def _sequence(self, run: _Run) -> Sequence:
        """Return the tokens to compute: the holes of the match, and all after its blocks."""
        tokens = run.request.tokens
        holes = run.lease.plan.recompute()  # none after the first commit
        holes = holes[holes >= run.shared].tolist()  # kvtrie takes ours for holes
        positions = [*holes, *range(max(run.shared, run.lease.tokens), len(tokens))]
        self._report.computed[run.request.name] = len(positions)
        return Sequence([tokens[at] for at in positions], positions, run.table)

    def _commit(self, batch: list[_Run], answers: list[int]) -> None:
        """Commit the batch's blocks, append its answers, and release finished requests.

        The KV of an answer is written by the next step, so it is committed then.
        """
        now = self._clock()
        written = [run.request.tokens[run.lease.tokens :] for run in batch]
        self._manager.commit_many([run.lease.id for run in batch], written, now=now)
        for run, token in zip(batch, answers, strict=True):
            request = run.request
            self.slots.name(request.tokens, run.table)
            request.tokens.append(token)
            if len(request.tokens) == request.length:
                self._running.remove(run)
                self._add_event(run, "done", request.length)
                self._leave(run, run.lease.release(now=now))

    def _add_event(self, run: _Run, what: str, amount: int) -> None:
        self._report.events.append(StepEvent(run.request.name, what, amount))

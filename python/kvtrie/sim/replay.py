"""Replay: a trace of block hashes through a manager that moves no bytes.

Requests run one after the other: each arrives at its time, or when the one before is done, waits
for its loads, and computes in no time. Every move ends at the time that the manager predicted.
Invariant: the same trace and settings give the same figures.
Cost: a few microseconds per block.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvtrie._kvtrie import BlockManager
from kvtrie.cost import Cost
from kvtrie.errors import ConfigError, NoSpaceError
from kvtrie.hint import Release
from kvtrie.shape import ModelShape
from kvtrie.sim.ends import last_ones
from kvtrie.sim.fates import Fates, TurnFigures
from kvtrie.tier import DEFAULT_POLICY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtrie._kvtrie import Lease
    from kvtrie.scope import Structure
    from kvtrie.sim.trace import TraceRequest
    from kvtrie.tier import Tier

__all__ = ["Replayed", "TierFigures", "open_manager", "prompt_cost", "replay"]

_SHAPE = ModelShape(
    layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", query_heads=32, hidden=4096
)


@dataclass(frozen=True, slots=True)
class TierFigures:
    """The counts of one tier.

    Attributes:
        kind: which tier.
        blocks: its room.
        hits: blocks that requests found here.
        clean: evictions of copies that stood elsewhere too.
        demoted: evictions that were written to the next tier.
        dropped: evictions of last copies.
    """

    kind: str
    blocks: int
    hits: int
    clean: int
    demoted: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay; counts are in blocks unless they say otherwise.

    Attributes:
        requests: requests of the trace.
        refused: requests that did not fit on the first tier, which found nothing.
        blocks: blocks of all prompts.
        tokens: tokens of all prompts, as the trace states them.
        hits: blocks found on any tier.
        recomputed: blocks inside a match that were computed again.
        tokens_hit: tokens of the blocks found.
        cost: cost of computing all prompts, in tokens without context.
        cost_saved: the part of it that the blocks found save.
        waited_s: seconds that requests waited for their loads, in all.
        tiers: per tier, fastest first.
        evicted: blocks that were there once and had left.
        diverged: blocks that nobody asked for before, where the session's prompt before had others;
            None for a trace without sessions.
        turns: by turn, the last one and all behind it together.
    """

    requests: int
    refused: int
    blocks: int
    tokens: int
    hits: int
    recomputed: int
    tokens_hit: int
    cost: float
    cost_saved: float
    waited_s: float
    tiers: tuple[TierFigures, ...]
    evicted: int = 0
    diverged: int | None = None
    turns: tuple[TurnFigures, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Blocks found per block asked for, from 0 to 1."""
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def token_rate(self) -> float:
        """Tokens found per token asked for, from 0 to 1."""
        return self.tokens_hit / self.tokens if self.tokens else 0.0

    @property
    def cost_rate(self) -> float:
        """Cost saved per cost of computing everything, from 0 to 1."""
        return self.cost_saved / self.cost if self.cost else 0.0

    @property
    def bound(self) -> float:
        """Blocks that a cache of any size could find, per block asked for, from 0 to 1."""
        return (self.hits + self.evicted) / self.blocks if self.blocks else 0.0

    @property
    def evictions(self) -> int:
        """Blocks that left the first tier."""
        first = self.tiers[0]
        return first.clean + first.demoted + first.dropped


def open_manager(
    tiers: Iterable[Tier],
    *,
    policy: str = DEFAULT_POLICY,
    structure: Structure = "leaf-only",
    block_tokens: int = 512,
    eviction_log: int = 0,
    objective: Literal["cost", "balanced", "hits"] = "cost",
) -> BlockManager:
    """A manager without bytes whose tokens are block hashes.

    Times are those of a model of 8 billion parameters in bfloat16.

    Args:
        tiers: fastest first; they hold no bytes, whatever their owner.
        policy: which block leaves first.
        structure: whether blocks inside a sequence may be dropped.
        block_tokens: real tokens per hash.
        eviction_log: how many evictions are kept for `evictions`.
        objective: what policies by value save.

    Raises:
        ConfigError: a setting that the manager refuses.
    """
    if block_tokens < 1:
        raise ConfigError(f"block_tokens is {block_tokens}, at least 1 wanted")
    return BlockManager(
        _SHAPE,
        [dataclasses.replace(tier, owner="none") for tier in tiers],
        block_tokens=1,
        token_weight=block_tokens,
        policy=policy,
        structure=structure,
        eviction_log=eviction_log,
        objective=objective,
    )


def replay(
    requests: Iterable[TraceRequest],
    manager: BlockManager,
    *,
    load: Literal["plan", "all"] = "all",
    block_tokens: int = 512,
    ends: bool = False,
    running: int = 1,
) -> Replayed:
    """Play a trace through a fresh manager.

    Args:
        requests: in order of arrival.
        manager: as `open_manager` makes it.
        load: "all" loads whatever a lower tier holds; "plan" computes again what is sooner
            computed, which then is no hit.
        block_tokens: as for `open_manager`; tokens and costs are counted by it.
        ends: tell the manager when a session has had its last request, by `Release`.
        running: so many requests hold their blocks at a time; the others have ended.

    A request that does not fit on the first tier counts as refused.
    """
    flights = _Flights(manager)
    bill, fates = _Bill(block_tokens), Fates()
    last: set[int] = set()
    if ends:
        requests = list(requests)
        last = last_ones(request.session for request in requests)
    held: deque[tuple[Lease, str | None]] = deque()
    now = count = refused = blocks = tokens = matched = waited = 0
    for request in requests:
        count += 1
        blocks += len(request.blocks)
        tokens += request.input_tokens
        bill.ask(len(request.blocks))
        now = max(now + 1, request.at)
        flights.land(now)
        try:
            lease = manager.acquire(
                request.blocks,
                now=now,
                session=request.session if ends else None,
                keep=0,
                reserve=0 if request.answer is None else len(request.answer),
                load=load,
            )
        except NoSpaceError:
            refused += 1
            fates.add(request, 0)
            continue
        matched += lease.matched
        fates.add(request, bill.find(request, lease))
        arrived, now = now, flights.wait(lease.ready, now)
        waited += now - arrived
        lease.commit(request.blocks[lease.matched :], now=now)
        if request.answer is not None:
            lease.commit(request.answer, now=now)
        held.append((lease, request.session if count - 1 in last else None))
        if len(held) >= running:
            oldest, session = held.popleft()
            oldest.release(now=now)
            if session is not None:
                manager.hint([Release(session=session)], now=now)
        flights.take(now)
    for lease, _ in held:
        lease.release(now=now)
    flights.land(None)
    stats = manager.stats()
    tiers = tuple(
        TierFigures(
            kind=tier.kind,
            blocks=counters.slots,
            hits=counters.hits,
            clean=counters.evicted_clean,
            demoted=counters.evicted_dirty,
            dropped=counters.dropped,
        )
        for tier, counters in zip(manager.tiers, stats.tiers.values(), strict=True)
    )
    hits = sum(tier.hits for tier in tiers)
    return Replayed(
        requests=count,
        refused=refused,
        blocks=blocks,
        tokens=tokens,
        hits=hits,
        recomputed=matched - hits,
        tokens_hit=bill.tokens_hit,
        cost=bill.asked,
        cost_saved=bill.saved,
        waited_s=waited / 1e9,
        tiers=tiers,
        evicted=fates.evicted,
        diverged=fates.diverged,
        turns=fates.turns(),
    )


def prompt_cost(blocks: int, block_tokens: int) -> float:
    """Cost of the first blocks of a prompt, in tokens without context.

    Each token counts as if it were its block's first.
    """
    return block_tokens * (blocks + Cost().alpha * block_tokens * blocks * (blocks - 1) / 2)


class _Bill:
    """The cost of computing prompts, and the part that hits save."""

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._alpha = Cost().alpha
        self.asked = self.saved = 0.0
        self.tokens_hit = 0

    def ask(self, blocks: int) -> None:
        """Count a whole prompt."""
        self.asked += self._first(blocks)

    def find(self, request: TraceRequest, lease: Lease) -> int:
        """Count what of a prompt need not be computed; returns the blocks found."""
        matched, block = lease.matched, self._block
        holes = lease.plan.recompute()
        found = matched - len(holes)
        spared = self._first(matched)
        if len(holes):
            spared -= block * (len(holes) + self._alpha * block * float(holes.sum()))
        self.saved += spared
        self.tokens_hit += found * block
        if matched == len(request.blocks) and (not len(holes) or holes[-1] < matched - 1):
            self.tokens_hit -= max(0, matched * block - request.input_tokens)
        return found

    def _first(self, blocks: int) -> float:
        return prompt_cost(blocks, self._block)


class _Flights:
    """Moves under way, each ending when the manager said it would."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._ends: list[tuple[int, int]] = []  # (time, move), a heap; dependents end later

    def take(self, now: int) -> None:
        """Take over what the manager wants moved."""
        moves = self._manager.moves()
        if len(moves):
            _, ready = self._manager.predict(moves.id, now=now)
            for end in zip(ready.tolist(), moves.id.tolist(), strict=True):
                heapq.heappush(self._ends, end)

    def land(self, now: int | None) -> None:
        """Report all moves that end by `now`; None means all there are."""
        while self._ends and (now is None or self._ends[0][0] <= now):
            at, move = heapq.heappop(self._ends)
            ids = [move]
            while self._ends and self._ends[0][0] == at:
                ids.append(heapq.heappop(self._ends)[1])
            self._manager.complete(ids, now=at)
            self.take(at)

    def wait(self, ready: Callable[[], bool], now: int) -> int:
        """Let moves end until `ready`; returns when that is."""
        self.take(now)
        while not ready():
            now = max(now, self._ends[0][0])
            self.land(now)
        return now

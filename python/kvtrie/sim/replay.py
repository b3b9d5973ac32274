"""Replay: a trace of block hashes through a manager without bytes.

The simulator plays the trace on a machine with an engine computing in no time: requests run
sequentially, each from its time or the end of the previous request, and wait for their loads. Every
move ends at its predicted time.
Invariant: the same trace and settings give the same figures.
Cost: a few microseconds per block.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvtrie._kvtrie import BlockManager, Simulation
from kvtrie.errors import ConfigError
from kvtrie.model.cost import Cost
from kvtrie.model.shape import ModelShape
from kvtrie.settings.tier import DEFAULT_POLICY
from kvtrie.sim.fates import Fates, TurnFigures
from kvtrie.sim.sessions import Tenants, last_ones

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvtrie.settings.resume import ResumePoints
    from kvtrie.settings.scope import Structure
    from kvtrie.settings.tier import Tier
    from kvtrie.sim.readers.rows import OptionalFields, Record, RowWithMore
    from kvtrie.sim.trace import TraceRequest

__all__ = [
    "SHAPE",
    "GroupFigures",
    "Replayed",
    "TierFigures",
    "open_manager",
    "prompt_cost",
    "replay",
]

SHAPE = ModelShape(
    layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", query_heads=32, hidden=4096
)
_NO_TENANTS = Tenants()


@dataclass(frozen=True, slots=True)
class TierFigures:
    """Counters of a tier.

    Attributes:
        kind: kind of the tier.
        blocks: room in blocks.
        hits: blocks found on the tier.
        clean: evictions of copies also present on a different tier.
        demoted: evictions written to the next tier.
        dropped: evictions of last copies.
    """

    kind: str
    blocks: int
    hits: int
    clean: int
    demoted: int
    dropped: int


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """Bytes of a layer group on the first tier.

    Attributes:
        kind: kind of group.
        layers: number of layers.
        slot_bytes: bytes of a block in this group, or of a state.
        held_bytes: bytes of blocks held by resume points. For the first group, of all blocks.
        released_bytes: bytes still found until their room is reused.
    """

    kind: str
    layers: int
    slot_bytes: int
    held_bytes: int
    released_bytes: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay. Counts are in blocks unless stated.

    Attributes:
        requests: requests of the trace.
        refused: requests too large for the first tier, without hits.
        blocks: blocks of all prompts.
        tokens: tokens of all prompts, as stated in the trace.
        hits: blocks found on any tier.
        recomputed: recomputed blocks inside a match.
        tokens_hit: tokens of the found blocks.
        cost: cost of computing all prompts, in tokens without context.
        cost_saved: part of `cost` saved by the found blocks.
        waited_s: total seconds spent waiting for loads.
        tiers: counters per tier, fastest first.
        evicted: requested blocks evicted before the request.
        diverged: new blocks at positions with different blocks in the session's last prompt, or
            None for a trace without sessions.
        turns: figures by turn. The last entry includes all later turns.
        groups: bytes per layer group at the end, for separate groups.
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
    groups: tuple[GroupFigures, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Found share of the requested blocks, from 0 to 1."""
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def token_rate(self) -> float:
        """Found share of the requested tokens, from 0 to 1."""
        return self.tokens_hit / self.tokens if self.tokens else 0.0

    @property
    def cost_rate(self) -> float:
        """Saved share of the total cost, from 0 to 1."""
        return self.cost_saved / self.cost if self.cost else 0.0

    @property
    def bound(self) -> float:
        """Share of requested blocks found by a cache of any size, from 0 to 1."""
        return (self.hits + self.evicted) / self.blocks if self.blocks else 0.0

    @property
    def evictions(self) -> int:
        """Number of blocks evicted from the first tier."""
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
    model: ModelShape = SHAPE,
    resume: ResumePoints | None = None,
) -> BlockManager:
    """Return a manager without bytes, with block hashes as tokens.

    Args:
        tiers: tiers, fastest first. They hold no bytes, whatever their owner.
        policy: eviction policy.
        structure: whether blocks inside a sequence may be dropped.
        block_tokens: real tokens per hash.
        eviction_log: number of evictions kept for `evictions`.
        objective: objective of value-based policies.
        model: model for bytes and times. Default: 8 billion parameters in bfloat16.
        resume: resumable borders of separate layer groups. None keeps all tokens of all layers.

    Raises:
        ConfigError: a setting refused by the manager.
    """
    if block_tokens < 1:
        raise ConfigError(f"block_tokens is {block_tokens}, at least 1 wanted")
    return BlockManager(
        model,
        [dataclasses.replace(tier, owner="none") for tier in tiers],
        block_tokens=1,
        token_weight=block_tokens,
        policy=policy,
        structure=structure,
        eviction_log=eviction_log,
        objective=objective,
        resume=resume,
    )


def replay(
    requests: Iterable[TraceRequest],
    manager: BlockManager,
    *,
    load: Literal["plan", "all"] = "all",
    block_tokens: int = 512,
    ends: bool = False,
    tenants: Tenants = _NO_TENANTS,
    running: int = 1,
) -> Replayed:
    """Play a trace through a fresh manager.

    Args:
        requests: requests in arrival order.
        manager: a new manager of `open_manager`.
        load: "all" loads all blocks found on lower tiers. "plan" recomputes blocks if faster, and
            they do not count as hits.
        block_tokens: as for `open_manager`, to count tokens and costs.
        ends: hint `Release` to the manager with the last request of each session.
        tenants: tenants of the sessions.
        running: number of requests holding their blocks at a time, including finished requests.

    A request too large for the first tier counts as refused. With separate layer groups, a prompt's
    last, partial block is left out, because no resume point is after it.
    """
    grouped = any(tier.groups for tier in manager.stats().tiers.values())
    sums = _Sums(block_tokens)
    last: set[int] = set()
    if ends:
        requests = list(requests)
        last = last_ones(request.session for request in requests)

    def rows() -> Iterator[RowWithMore]:
        for at, whole in enumerate(requests):
            request = _full_blocks(whole, block_tokens) if grouped else whole
            sums.add(request)
            session = request.session if ends else None
            answer = request.blocks[:0] if request.answer is None else request.answer
            tokens = request.input_tokens
            more: OptionalFields = {"last": at in last, "answer": answer}
            scope = tenants.scope(request.session or f"{at}", 0)
            if scope is not None:
                more["scope"] = scope
            yield request.at, request.blocks, tokens, 0, session, more

    Simulation.over(manager, load=load, running=running).run(rows(), sums.on_record)
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
        requests=sums.requests,
        refused=sums.refused,
        blocks=sums.blocks,
        tokens=sums.tokens,
        hits=hits,
        recomputed=sums.matched - hits,
        tokens_hit=sums.tokens_hit,
        cost=sums.cost,
        cost_saved=sums.cost_saved,
        waited_s=sums.waited_ns / 1e9,
        tiers=tiers,
        evicted=sums.fates.evicted,
        diverged=sums.fates.diverged,
        turns=sums.fates.turns(),
        groups=_groups(manager, block_tokens),
    )


def _groups(manager: BlockManager, block_tokens: int) -> tuple[GroupFigures, ...]:
    slots = next(iter(manager.stats().tiers.values())).groups
    found: list[GroupFigures] = []
    for at, (group, counted) in enumerate(zip(manager.model.groups, slots, strict=False)):
        each = manager.model.block_bytes(block_tokens, at)
        sizes = (each, each * counted.held, each * counted.released)
        found.append(GroupFigures(group.kind, len(group.layers), *sizes))
    return tuple(found)


def _full_blocks(request: TraceRequest, block_tokens: int) -> TraceRequest:
    """Return a request without its last block, if partial and not the only block."""
    full = max(1, request.input_tokens // block_tokens)
    return dataclasses.replace(request, blocks=request.blocks[:full])


def prompt_cost(blocks: int, block_tokens: int) -> float:
    """Return the cost of the first blocks of a prompt, in tokens without context.

    `t * (n + alpha * t * n * (n - 1) / 2)` for n blocks of t tokens, with `Cost().alpha`: each
    token counts like the first token of its block.

    Args:
        blocks: number of blocks.
        block_tokens: tokens per block.
    """
    return block_tokens * (blocks + Cost().alpha * block_tokens * blocks * (blocks - 1) / 2)


class _Sums:
    """Sums over requests: requested and found blocks."""

    def __init__(self, block_tokens: int) -> None:
        self._block, self._alpha = block_tokens, Cost().alpha
        self._played: deque[TraceRequest] = deque()  # without a record yet
        self.requests = self.refused = self.blocks = self.tokens = 0
        self.matched = self.tokens_hit = self.waited_ns = 0
        self.cost = self.cost_saved = 0.0
        self.fates = Fates()

    def add(self, request: TraceRequest) -> None:
        """Count a whole prompt."""
        self._played.append(request)
        self.requests += 1
        self.blocks += len(request.blocks)
        self.tokens += request.input_tokens
        self.cost += prompt_cost(len(request.blocks), self._block)

    def on_record(self, record: Record) -> None:
        """Count the hits of the next request."""
        request, first_token, hits = self._played.popleft(), record[3], record[5]
        if first_token is None:
            self.refused += 1
            self.fates.add(request, 0)
            return
        _, matched, holes = record[7]
        self.matched += matched
        self.tokens_hit += sum(hits)
        self.waited_ns += record[8][1]
        spared, block = prompt_cost(matched, self._block), self._block
        if holes:
            spared -= block * (len(holes) + self._alpha * block * float(sum(holes)))
        self.cost_saved += spared
        self.fates.add(request, matched - len(holes))

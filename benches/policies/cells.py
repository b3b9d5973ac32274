"""Cells of the table: a policy, or what it is compared with, on one trace in one room, played.

Figures are per cent of all prompts. Invariant: a cell depends on its job alone, so cells may be
played in any order and process. Cost: seconds each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Literal

import numpy as np

from benches.policies import short
from benches.policies.traces import Source, engine_room, trace_of
from kvtrie import Tier
from kvtrie.model.cost import Cost
from kvtrie.sim.offline import OfflineHits, leaves_first, most_hits
from kvtrie.sim.replay import open_manager, replay

if TYPE_CHECKING:
    from kvtrie.sim.trace import TraceRequest

BOUND = "belady"
LEAVES = "belady, leaves (ref)"
BLOCKS = "belady, blocks (ref)"
# Our policy, and libcachesim's that must find the same.
CHECKED = {"lru": "LRU", "fifo": "FIFO", "lfu": "LFU"}
# Policies that libcachesim has and we do not; our default is played next to them.
BASELINES = ("ARC", "S3FIFO", "LIRS", "GDSF")
HITS = ", hits"
BALANCED = ", balanced"
ENDS = ", ends hinted"
# Blocks of the second tier for each of the first.
BELOW = 4
# The same below an engine that evicts by its own lru and stores every block.
BELOW_ENGINE = (2, 4, 10)
ENGINE = "engine"
SHORT = "short"

Objective = Literal["cost", "balanced", "hits"]


@dataclass(frozen=True, slots=True)
class Job:
    """One replay; `policy` may also name the objective and whether requests report their ends."""

    source: Source
    room: int
    structure: str
    tiers: int
    policy: str

    @property
    def key(self) -> tuple[str, int, int, str, int, str]:
        """Of its row."""
        source = self.source
        return (source.name, source.seed, self.room, self.structure, self.tiers, self.policy)


@dataclass(frozen=True, slots=True)
class Row:
    """Results of a job, in per cent; None if not measured.

    Attributes:
        refused: requests that did not fit on the first tier, and so found nothing.
    """

    trace: str
    seed: int
    room: int
    structure: str
    tiers: int
    policy: str
    cost_saved: float | None
    hits: float
    tokens: float | None = None
    check: float | None = None
    refused: int | None = None

    @property
    def key(self) -> tuple[str, int, int, str, int, str]:
        """Trace, seed, room, structure, tiers and policy."""
        return (self.trace, self.seed, self.room, self.structure, self.tiers, self.policy)


def play(job: Job) -> Row:
    """Fill one cell."""
    if job.structure == SHORT:
        return Row(
            *job.key, None, short.hits(job.source.name, job.room, job.source.seed, job.policy)
        )
    if job.structure == "single blocks":
        ours, theirs = singles(job, trace_of(job.source))
        return Row(*job.key, None, ours, check=theirs)
    requests = trace_of(job.source)
    if job.policy == BOUND:
        requested = sum(len(request.blocks) for request in requests)
        return Row(*job.key, None, 100 * most_hits(requests, job.room).hits / requested)
    if job.policy in {LEAVES, BLOCKS}:
        plan = leaves_first if job.policy == LEAVES else most_hits
        # Requests that do not fit are refused, so they hit no blocks.
        stored = [whole(request) for request in requests]
        fits = [len(path.blocks) <= job.room for path in stored]
        found = iter(plan(list(compress(stored, fits)), job.room).blocks)
        masks = tuple(next(found) if fit else () for fit in fits)
        return Row(*job.key, *bill(job.source, requests, OfflineHits(masks)))
    policy = job.policy.partition(",")[0]
    manager = open_manager(
        _tiers(job, policy),
        policy=policy,
        structure="holes" if job.structure == "holes" else "leaf-only",
        block_tokens=job.source.block_tokens,
        objective=objective_of(job.policy),
    )
    with_ends = ENDS in job.policy
    size, running = job.source.block_tokens, job.source.running
    played = replay(requests, manager, block_tokens=size, ends=with_ends, running=running)
    found = (100 * played.cost_rate, 100 * played.hit_rate, 100 * played.token_rate)
    return Row(*job.key, *found, refused=played.refused)


def _tiers(job: Job, policy: str) -> list[Tier]:
    if job.structure == ENGINE:
        first = Tier("gpu", blocks=engine_room(job.source), policy="lru", write="through")
        return [first, Tier("host", blocks=job.room, policy=policy)]
    rooms = (job.room, BELOW * job.room)[: job.tiers]
    kinds = ("gpu", "host")
    return [Tier(kind, blocks=blocks) for kind, blocks in zip(kinds, rooms, strict=False)]


def objective_of(policy: str) -> Objective:
    """The objective that the name of a policy states, `cost` without one."""
    if HITS in policy:
        return "hits"
    return "balanced" if BALANCED in policy else "cost"


def whole(request: TraceRequest) -> Path:
    """All blocks that a request stores."""
    if request.answer is None:
        return Path(request.blocks)
    return Path(np.concatenate([request.blocks, request.answer]))


@dataclass(frozen=True, slots=True)
class Path:
    """Ids of the blocks of a path."""

    blocks: np.ndarray


def bill(
    source: Source, requests: list[TraceRequest], found: OfflineHits
) -> tuple[float, float, float]:
    """Cost, hits and tokens of what an offline plan finds."""
    size, alpha = source.block_tokens, Cost().alpha
    sums = np.zeros((2, 3))
    for request, mask in zip(requests, map(list, found.blocks), strict=True):
        n = len(request.blocks)
        tokens = np.full(n, size)
        tokens[-1] -= max(0, size * n - request.input_tokens)
        each = np.stack([size * (1 + alpha * size * np.arange(n)), np.ones(n), tokens])
        sums[0] += each.sum(axis=1)
        sums[1] += each[:, [at for at in mask if at < n]].sum(axis=1)
    cost, hits, tokens = (100 * sums[1] / sums[0]).tolist()
    return cost, hits, tokens


def singles(job: Job, requests: list[TraceRequest]) -> tuple[float, float]:
    """Hits of ours and of libcachesim's, in per cent, if every block is a separate request."""
    import libcachesim

    mine = job.policy if job.policy in CHECKED else "learned"
    manager = open_manager([Tier("gpu", blocks=job.room)], policy=mine, objective="cost")
    theirs = getattr(libcachesim, CHECKED.get(job.policy, job.policy))(cache_size=job.room)
    requested = libcachesim.Request()
    requested.obj_size = 1
    stream = np.concatenate([request.blocks for request in requests])
    ours = others = 0
    for now, block in enumerate(stream.reshape(-1, 1)):
        lease = manager.acquire(block, now=now, keep=0)
        ours += lease.matched
        lease.commit(block[lease.matched :], now=now)
        lease.release(now=now)
        requested.obj_id = int(block[0])
        others += theirs.get(requested)
    return 100 * ours / len(stream), 100 * others / len(stream)

"""The traces that policies are compared on, by name, each with its rooms.

`common` is the trace of `make bench-core`, its blocks as ids and with the answers' blocks, 64
requests at a time; `coding agents` and `conversation` are files. Cost: seconds each, once per
process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from benches.workload import BLOCK, RUNNING, SEED, SYSTEM_TOKENS, Trace
from kvtrie.sim.trace import TraceRequest, read_trace
from kvtrie.sim.workloads import FAMILIES

CONVERSATION = "conversation"
AGENTS = "coding agents"
COMMON = "common"
SHARES = (0.01, 0.03, 0.1, 0.3)
# A room that papers use.
PUBLISHED_ROOM = 5859
AGENT_ROOMS = (4_000, 14_000, 40_000)
COMMON_ROOMS = (30_000, 100_000)
SEEDS = 3
# Nanoseconds between requests of the common trace. Storing a prompt through takes 6 ms: if requests
# come faster, the first tier fills with blocks that are being written, and requests are refused.
APART = 20_000_000


@dataclass(frozen=True, slots=True)
class Source:
    """A trace: its name, its file or its seed, and how much of it is played."""

    name: str
    path: str | None
    seed: int
    requests: int

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return {COMMON: BLOCK, AGENTS: 64}.get(self.name, 512)

    @property
    def running(self) -> int:
        """Requests that hold their blocks at a time."""
        return RUNNING if self.name == COMMON else 1


@cache
def trace_of(source: Source) -> list[TraceRequest]:
    """The requests of a trace, read or made once per process."""
    if source.path is not None:
        return read_trace(Path(source.path))
    if source.name == COMMON:
        return common(source.seed, source.requests)
    return FAMILIES[source.name](requests=source.requests, seed=source.seed)


@cache
def rooms_of(source: Source) -> list[int]:
    """The rooms of a trace in blocks: each holds the longest request."""
    if source.name == COMMON:
        return list(COMMON_ROOMS)
    if source.name == AGENTS:
        return list(AGENT_ROOMS)
    # All seeds of a trace have the first one's rooms, so that their means mean something.
    first = trace_of(replace(source, seed=0))
    distinct = len(np.unique(np.concatenate([request.blocks for request in first])))
    seeds = range(SEEDS if source.path is None else 1)
    longest = max(
        len(request.blocks) for seed in seeds for request in trace_of(replace(source, seed=seed))
    )
    rooms = [max(longest, round(share * distinct)) for share in SHARES]
    if source.name == CONVERSATION:
        rooms.append(PUBLISHED_ROOM)
    return sorted(set(rooms))


def engine_room(source: Source) -> int:
    """Blocks of an engine's first tier: the least room, or one as engines have it."""
    return {AGENTS: AGENT_ROOMS[1], COMMON: COMMON_ROOMS[0]}.get(source.name, rooms_of(source)[0])


def common(seed: int, requests: int) -> list[TraceRequest]:
    """The common trace with ids for its blocks; its conversations are sessions.

    Args:
        seed: 0 for the trace of `make bench-core`.
        requests: their approximate number, 50 031 by default.
    """
    trace = Trace(SEED + seed, conversations=requests // 5)
    system = SYSTEM_TOKENS // BLOCK
    firsts = np.cumsum([0, *(-(-len(body) // BLOCK) for body in trace.bodies)])
    firsts += system * len(trace.system)
    made: list[TraceRequest] = []
    for at, (c, ask, end) in enumerate(trace.order):
        prompt = int(trace.prompt_of[c])
        head = np.arange(system * prompt, system * (prompt + 1), dtype=np.uint32)
        own = np.arange(firsts[c], firsts[c] + end // BLOCK, dtype=np.uint32)
        prompt_blocks = ask // BLOCK
        made.append(
            TraceRequest(
                at=at * APART,
                input_tokens=SYSTEM_TOKENS + ask,
                output_tokens=end - ask,
                blocks=np.concatenate([head, own[:prompt_blocks]]),
                session=str(c),
                answer=own[prompt_blocks:],
            )
        )
    return made


def sources(trace: str | None, sessions: str | None, seeds: int, requests: int) -> list[Source]:
    """All traces that can be played, with as many seeds as each has."""
    named = [Source(CONVERSATION, trace, 0, 0)] if trace else []
    for name in FAMILIES:
        named += [Source(name, None, seed, requests) for seed in range(seeds)]
    named += [Source(AGENTS, sessions, 0, 0)] if sessions else []
    named += [Source(COMMON, None, seed, 5 * requests) for seed in range(seeds)]
    return named

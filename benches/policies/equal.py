"""Room equivalence: the share of the room of `lru` in which the default policy is as good.

For one tier the room is the tier's; below an engine it is the host tier's, and the engine's tier
stays as it is. The share is found by bisection of the room, once for the cost saved and once for
the hits, with a straight line between the last two rooms. A policy that needs more room has a share
above 1, of at most `MOST`. Cost: about ten replays per line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benches.policies.cells import BELOW_ENGINE, ENGINE, Job, play
from benches.policies.traces import engine_room, rooms_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benches.policies.traces import Source

STEPS = 4
MOST = 2.0
LEAST = 1 / 16


@dataclass(frozen=True, slots=True)
class Equal:
    """The question: which share of this job's room does the default policy need."""

    lru: Job


@dataclass(frozen=True, slots=True)
class Share:
    """The answer: shares of the room of `lru`, for its cost saved and for its hits."""

    trace: str
    seed: int
    room: int
    structure: str
    tiers: int
    cost: float
    hits: float


def questions(source: Source) -> Iterator[Equal]:
    """One line for one tier and one below an engine, in the room in the middle of the trace's."""
    rooms = rooms_of(source)
    yield Equal(Job(source, rooms[len(rooms) // 2], "leaf-only", 1, "lru"))
    below = BELOW_ENGINE[len(BELOW_ENGINE) // 2] * engine_room(source)
    yield Equal(Job(source, below, ENGINE, 2, "lru"))


def share_of(asked: Equal) -> Share:
    """Answer a question."""
    lru = asked.lru
    wanted = play(lru)
    played: dict[int, tuple[float, float]] = {}

    def at(share: float) -> tuple[float, float]:
        room = max(1, round(share * lru.room))
        if room not in played:
            row = play(replace(lru, room=room, policy="learned"))
            played[room] = (row.cost_saved or 0.0, row.hits)
        return played[room]

    return Share(
        lru.source.name,
        lru.source.seed,
        lru.room,
        lru.structure,
        lru.tiers,
        crossing(lambda share: at(share)[0], wanted.cost_saved or 0.0),
        crossing(lambda share: at(share)[1], wanted.hits),
    )


def crossing(figure: Callable[[float], float], wanted: float) -> float:
    """The share at which a figure that grows with the room reaches what is wanted."""
    low, high = (LEAST, 1.0) if figure(1.0) >= wanted else (1.0, MOST)
    if figure(high) < wanted:
        return MOST
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if figure(middle) >= wanted else (middle, high)
    below, above = figure(low), figure(high)
    if below >= wanted:
        return low
    return low + (high - low) * (wanted - below) / (above - below)

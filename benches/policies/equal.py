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
class Share:
    """Shares of the room of `lru`, for its cost saved and for its hits."""

    trace: str
    seed: int
    room: int
    structure: str
    tiers: int
    cost: float
    hits: float

    @property
    def key(self) -> tuple[str, int, int, str, int]:
        """Trace, seed, room, structure and tiers."""
        return (self.trace, self.seed, self.room, self.structure, self.tiers)


def questions(source: Source) -> Iterator[Job]:
    """One line for one tier and one below an engine, in the room in the middle of the trace's."""
    rooms = rooms_of(source)
    yield Job(source, rooms[len(rooms) // 2], "leaf-only", 1, "lru")
    below = BELOW_ENGINE[len(BELOW_ENGINE) // 2] * engine_room(source)
    yield Job(source, below, ENGINE, 2, "lru")


def share_of(lru: Job) -> Share:
    """The share of a job's room that the default policy needs."""
    wanted = play(lru)
    played: dict[int, tuple[float, float]] = {}

    def at(share: float) -> tuple[float, float]:
        room = max(1, round(share * lru.room))
        if room not in played:
            row = play(replace(lru, room=room, policy="learned"))
            played[room] = (row.cost_saved or 0.0, row.hits)
        return played[room]

    return Share(
        *lru.key[:-1],
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

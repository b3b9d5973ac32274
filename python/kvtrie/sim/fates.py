"""Fates of the blocks requested by a trace: found, evicted, diverged or new.

A block's id identifies its whole prefix, so the previously seen blocks of a prompt are its first
blocks. Invariant: found, evicted, diverged and new blocks add up to all requested blocks.
Cost: a set of the seen ids, and O(log blocks) per request in addition to its new blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie.sim.trace import TraceRequest

__all__ = ["MOST_TURNS", "Fates", "TurnFigures"]

MOST_TURNS = 8
"""Number of turns with separate rows. The last row also counts all later turns."""


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """Requested and found blocks of a turn.

    Attributes:
        turn: turn number, from 1 on. The last row also counts all later turns.
        requests: number of requests.
        blocks: blocks of their prompts.
        hits: found blocks.
    """

    turn: int
    requests: int
    blocks: int
    hits: int


class Fates:
    """Counter of the fates of requested blocks.

    Attributes:
        evicted: formerly cached blocks, evicted before the request.
    """

    def __init__(self) -> None:
        self.evicted = 0
        self._diverged = 0
        self._turn_of: dict[int, int] = {}  # by block: turn of its first request
        self._prompts: dict[str, NDArray[np.uint32]] = {}
        self._turns: dict[int, list[int]] = {}

    def add(self, request: TraceRequest, found: int) -> None:
        """Count a request with `found` found blocks."""
        blocks = request.blocks.tolist()
        seen = bisect_left(blocks, x=True, key=lambda block: block not in self._turn_of)
        self.evicted += max(0, seen - found)
        turn = self._turn_of[blocks[seen - 1]] if seen else 0
        turn = min(MOST_TURNS, turn + (seen < len(blocks) or not turn))
        if request.session is not None:
            before = self._prompts.get(request.session)
            if before is not None:
                same = max(seen, shared(before, request))
                self._diverged += max(0, min(len(before), len(blocks)) - same)
            self._prompts[request.session] = request.blocks
        answer = () if request.answer is None else request.answer.tolist()
        self._turn_of.update(dict.fromkeys((*blocks[seen:], *answer), turn))
        row = self._turns.setdefault(turn, [0, 0, 0])
        row[0] += 1
        row[1] += len(blocks)
        row[2] += found

    @property
    def diverged(self) -> int | None:
        """New blocks at positions with different blocks in the session's last prompt, or None."""
        return self._diverged if self._prompts else None

    def turns(self) -> tuple[TurnFigures, ...]:
        """Return the figures by turn, ascending."""
        return tuple(TurnFigures(turn, *row) for turn, row in sorted(self._turns.items()))


def shared(before: NDArray[np.uint32], request: TraceRequest) -> int:
    """Return the number of leading blocks shared by two prompts."""
    n = min(len(before), len(request.blocks))
    apart = np.flatnonzero(before[:n] != request.blocks[:n])
    return int(apart[0]) if len(apart) else n

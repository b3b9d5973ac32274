"""StoreMoves: hands out moves, so that nothing waits for a write to a shared store.

A store to the remote tier for whose slot another move or a request waits is refused before it goes
to the workers, and given up if they have it and have not begun it: the manager then drops the
block. So are the oldest stores that wait beyond a number of blocks, because a block that is to be
written cannot be evicted. Loads are remembered by the keys of their blocks, so that one that fails
refutes a belief.
Invariant: a move is handed out once, or refused. Cost: array operations over the moves of a step,
if there is a remote tier; none without one.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvtrie import Moves
    from kvtrie.transfer.dispatch import Dispatch

__all__ = ["DROPPED", "StoreMoves"]

DROPPED = "evicted before the store had it"
"""The reason under which a block that no write took to the store is counted."""

_WHY = "eviction does not wait for a shared store"


class StoreMoves:
    """The moves of one manager that go to the workers.

    Args:
        dispatch: the moves under way.
        tier: index of the remote tier; None without one.
        most: stores that may wait for the workers.

    Attributes:
        dispatch: the moves under way.
    """

    def __init__(self, dispatch: Dispatch, tier: int | None, most: int) -> None:
        self.dispatch, self._tier, self._most = dispatch, tier, most
        self._early: list[Moves] = []
        self._loads: dict[int, bytes] = {}
        self._stores: dict[int, None] = {}  # oldest first
        self._dropped = 0

    def take_early(self, now: int) -> None:
        """Take the moves that the next `take` will return first."""
        self._early += self._take(now)

    def take(self, now: int) -> list[Moves]:
        """Return the moves that every rank may carry out now, in the manager's order."""
        early, self._early = self._early, []
        return [*early, *self._take(now)]

    def _take(self, now: int) -> list[Moves]:
        parts = self.dispatch.take(now)
        if self._tier is None:
            return parts
        kept: list[Moves] = []
        while parts:
            awaited = self._awaited()
            refused = False
            for part in parts:
                store: NDArray[np.bool_] = part.dst == self._tier
                store &= (part.lease != 0) | np.isin(part.id, awaited)
                if store.any():
                    refused = True
                    self._dropped += int(store.sum())
                    self.dispatch.refuse([part[store]], now, _WHY, blame=True)
                    part = part[~store]  # noqa: PLW2901 - the rest
                if len(part):
                    kept.append(self._noted(part))
            parts = self.dispatch.take(now) if refused else []
        return kept

    def take_dropped(self) -> int:
        """Return the number of stores that were refused since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def give_up(self) -> list[int]:
        """Return the stores that workers have and that nothing may wait for any longer."""
        if not self._stores:
            return []
        ids = self._stores.keys() & set(self._awaited().tolist())
        ids.update(islice(self._stores, max(0, len(self._stores) - self._most)))
        for ident in ids:
            del self._stores[ident]
        return sorted(ids)

    def reported(self, ids: Iterable[int], failed: Iterable[int]) -> list[bytes]:
        """Note moves of which a rank has reported something.

        Args:
            ids: the moves.
            failed: those that have failed.

        Returns:
            The keys of blocks whose loads from the store have failed.
        """
        if not self._loads and not self._stores:
            return []
        keys = (self._loads.pop(ident, None) for ident in failed)
        lost = [key for key in keys if key is not None]
        for ident in ids:
            if not self.dispatch.is_open(ident):
                self._loads.pop(ident, None)
                self._stores.pop(ident, None)
        return lost

    def cancel_all(self, now: int, why: str) -> None:
        """Cancel the moves that no rank has.

        Args:
            now: the time.
            why: the error that the manager records.
        """
        self.dispatch.refuse([*self._early, *self.dispatch.take(now)], now, why)
        self._early = []
        waiting = [int(one.id[0]) for one in self.dispatch.waiting()]
        self.dispatch.cancel(waiting, now, why)

    def clear(self) -> None:
        """Forget all moves: none is under way."""
        self._loads.clear()
        self._stores.clear()

    def _awaited(self) -> NDArray[np.uint64]:
        """The moves that others wait for."""
        return np.array([int(one.after[0]) for one in self.dispatch.waiting()], dtype=np.uint64)

    def _noted(self, part: Moves) -> Moves:
        rows: NDArray[np.bool_] = part.src == self._tier
        if rows.any():
            loads = part[rows]
            keys = (key.tobytes() for key in loads.key)
            self._loads.update(zip(loads.id.tolist(), keys, strict=True))
        rows = part.dst == self._tier
        if rows.any():
            self._stores |= dict.fromkeys(part.id[rows].tolist())
        return part

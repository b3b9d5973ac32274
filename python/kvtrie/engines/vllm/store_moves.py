"""StoreMoves: hands out moves, of which few write to a shared store at a time.

The manager decides which blocks are written there: eviction drops a store that it has not handed
out, and passes over the slots that the others read. The scheduler cannot know when a worker begins
to read a slot, so a store counts as begun from the time that it is in a step's orders. Workers have
as many as their limit of writes in flight lets them begin; the others stay in the manager.
Loads are remembered by the keys of their blocks, so that one that fails refutes a belief.
Invariant: a move is handed out once. Cost: array operations over the moves of a step, if there is a
remote tier; none without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from numpy.typing import NDArray

    from kvtrie import BlockManager, Moves
    from kvtrie.transfer.dispatch import Dispatch

__all__ = ["DROPPED", "StoreMoves"]

DROPPED = "evicted before the store had it"
"""The reason under which a block that no write took to the store is counted."""


class StoreMoves:
    """The moves of one manager that go to the workers.

    Args:
        manager: the manager.
        dispatch: its moves under way.
        tier: index of the remote tier; None without one.
        most: blocks whose writes to the remote tier the workers may have.

    Attributes:
        dispatch: the moves under way.
    """

    def __init__(
        self, manager: BlockManager, dispatch: Dispatch, tier: int | None, most: int
    ) -> None:
        self._manager, self.dispatch, self._tier, self._most = manager, dispatch, tier, most
        self._early: list[Moves] = []
        self._loads: dict[int, tuple[int, bytes]] = {}  # the groups and keys of their blocks
        self._stores: set[int] = set()
        self._dropped = 0

    def take_early(self, now: int) -> None:
        """Take the moves that the next `take` will return first."""
        self._early += self._take(now)

    def take(self, now: int) -> list[Moves]:
        """Return the moves that every rank may carry out now, in the manager's order."""
        early, self._early = self._early, []
        return [*early, *self._take(now)]

    def _take(self, now: int) -> list[Moves]:
        parts = self.dispatch.take(now, shared=max(0, self._most - len(self._stores)))
        if self._tier is not None:
            for part in parts:
                self._note(part, self._tier)
        return parts

    def take_dropped(self) -> int:
        """Return the number of stores that eviction has dropped since the last call."""
        before, self._dropped = self._dropped, self._manager.shared_stores[1]
        return self._dropped - before

    def reported(self, ids: Iterable[int], failed: Iterable[int]) -> list[tuple[int, bytes]]:
        """Note moves of which a rank has reported something.

        Args:
            ids: the moves.
            failed: those that have failed.

        Returns:
            The groups and keys of blocks whose loads from the store have failed.
        """
        if not self._loads and not self._stores:
            return []
        blocks = (self._loads.pop(ident, None) for ident in failed)
        lost = [block for block in blocks if block is not None]
        for ident in ids:
            if not self.dispatch.is_open(ident):
                self._loads.pop(ident, None)
                self._stores.discard(ident)
        return lost

    def cancel(self, ids: Collection[int], now: int, why: str) -> None:
        """Cancel those of some moves that no rank has, those that `take_early` took included."""
        self.dispatch.cancel(ids, now, why)
        wanted = np.array([*ids], np.uint64)
        parts = [(part, np.isin(part.id, wanted)) for part in self._early]
        late = [part[rows] for part, rows in parts if rows.any()]
        self._early = [part[~rows] for part, rows in parts if not rows.all()]
        self.dispatch.refuse(late, now, why)

    def cancel_all(self, now: int, why: str) -> None:
        """Cancel the moves that no rank has.

        Args:
            now: the time.
            why: the error that the manager records.
        """
        self.dispatch.refuse([*self._early, *self.dispatch.take(now, shared=0)], now, why)
        self._early = []
        waiting = [int(one.id[0]) for one in self.dispatch.waiting()]
        self.dispatch.cancel(waiting, now, why)

    def clear(self) -> None:
        """Forget all moves: none is under way."""
        self._loads.clear()
        self._stores.clear()

    def _note(self, part: Moves, tier: int) -> None:
        rows: NDArray[np.bool_] = part.src == tier
        if rows.any():
            loads = part[rows]
            keys = (key.tobytes() for key in loads.key)
            blocks = zip(loads.group.tolist(), keys, strict=True)
            self._loads.update(zip(loads.id.tolist(), blocks, strict=True))
        rows = part.dst == tier
        if rows.any():
            self._stores.update(part.id[rows].tolist())

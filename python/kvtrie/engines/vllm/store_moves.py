"""StoreMoves: issues moves to workers, with a limit on writes to a shared store.

The manager selects the blocks to write there. Eviction drops a store before it is issued, and skips
the slots of issued stores. The scheduler cannot know when a worker starts to read a slot, so a
store counts as started from its step's orders on. Workers get only stores within their limit of
writes in flight, and the rest stays in the manager.
Loads are tracked with the keys of their blocks, so a failed load corrects the cached answer of the
store.
Invariant: a move is issued once. Cost: array operations over the moves of a step with a remote
tier, else none.
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
"""The reason counted for a block evicted before its write to the store."""


class StoreMoves:
    """The moves of a manager for the workers.

    Args:
        manager: the manager.
        dispatch: its moves in flight.
        tier: index of the remote tier, or None.
        most: the most blocks in issued writes to the remote tier.

    Attributes:
        dispatch: the moves in flight.
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
        """Take moves early. The next `take` returns them first."""
        self._early += self._take(now)

    def take(self, now: int) -> list[Moves]:
        """Return the moves for all ranks to execute now, in the manager's order."""
        early, self._early = self._early, []
        return [*early, *self._take(now)]

    def _take(self, now: int) -> list[Moves]:
        parts = self.dispatch.take(now, shared=max(0, self._most - len(self._stores)))
        if self._tier is not None:
            for part in parts:
                self._note(part, self._tier)
        return parts

    def take_dropped(self) -> int:
        """Return the number of stores dropped by eviction since the last call."""
        before, self._dropped = self._dropped, self._manager.shared_stores[1]
        return self._dropped - before

    def reported(self, ids: Iterable[int], failed: Iterable[int]) -> list[tuple[int, bytes]]:
        """Record moves reported by a rank.

        Args:
            ids: the reported moves.
            failed: the failed moves.

        Returns:
            The groups and keys of blocks with failed loads from the store.
        """
        if not self._loads and not self._stores:
            return []
        blocks = (self._loads.pop(ident, None) for ident in failed)
        lost = [block for block in blocks if block is not None]
        for ident in self.dispatch.ended(ids):
            self._loads.pop(ident, None)
            self._stores.discard(ident)
        return lost

    def cancel(self, ids: Collection[int], now: int, why: str) -> None:
        """Cancel the given moves unless issued to a rank. Includes moves of `take_early`."""
        self.dispatch.cancel(ids, now, why)
        wanted = np.array([*ids], np.uint64)
        parts = [(part, np.isin(part.id, wanted)) for part in self._early]
        late = [part[rows] for part, rows in parts if rows.any()]
        self._early = [part[~rows] for part, rows in parts if not rows.all()]
        self.dispatch.refuse(late, now, why)

    def cancel_all(self, now: int, why: str) -> None:
        """Cancel all moves not yet issued to a rank.

        Args:
            now: the time.
            why: the error recorded by the manager.
        """
        self.dispatch.refuse([*self._early, *self.dispatch.take(now, shared=0)], now, why)
        self._early = []
        waiting = [int(one.id[0]) for one in self.dispatch.waiting()]
        self.dispatch.cancel(waiting, now, why)

    def clear(self) -> None:
        """Forget all moves. None may be in flight."""
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

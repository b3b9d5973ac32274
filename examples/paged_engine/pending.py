"""PendingMoves: kvtrie's moves on their way through the ranks, and what became of them.

    moves        each is handed out once; a move is one copy, the same slots on every rank
    complete     a rank reports the result of its part; after the last report the bytes are valid

Invariant: a move is sent when the one it names as `after` has ended well on all ranks, and never if
that one failed. Cost: a pass over the moves that wait, per step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from examples.paged_engine.worker import Reply
    from kvtrie import BlockManager, Moves


class PendingMoves:
    """The moves of a manager that have not ended."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._waiting: dict[int, Moves] = {}  # one move each, by id, in the manager's order

    @property
    def idle(self) -> bool:
        """Whether no move waits for another."""
        return not self._waiting

    def start(self) -> dict[int, Moves]:
        """The moves that every rank may carry out now."""
        while len(move := self._manager.moves(limit=1)):  # one by one: each may have to wait
            self._waiting[int(move.id[0])] = move
        able = {
            at: move for at, move in self._waiting.items() if move.after[0] not in self._waiting
        }
        for ident in able:
            del self._waiting[ident]
        return able

    def complete(self, replies: list[Reply], now: int) -> set[int]:
        """Report the ranks' replies to kvtrie; return the moves that failed.

        A move is done when all ranks have done it, and has failed when one has not.
        """
        failed: set[int] = set()
        for rank, reply in enumerate(replies):
            self._manager.complete(reply.done, now=now, rank=rank)
            for ident, why in reply.failed.items():
                self._manager.complete(ident, now=now, ok=False, rank=rank, error=why)
                failed.add(ident)
        # kvtrie has failed the moves that depend on a failed one. `after` precedes its dependents
        # in the order of moves, so one pass finds whole chains.
        for ident, move in list(self._waiting.items()):
            if move.after[0] in failed:
                failed.add(ident)
                del self._waiting[ident]
        return failed

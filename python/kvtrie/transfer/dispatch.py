"""Dispatch: sends the moves of a manager to the ranks and returns the ranks' reports to it.

It runs in the manager's process; each rank has a `Runner` in another process. No call blocks.
Invariant: a move is handed out once, to all ranks, and only after the move that it names as `after`
has succeeded on every rank; a cancelled move that the manager has not handed out yet is refused
when it comes. Cost: array operations over the moves of a call, a step per move that waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtrie.transfer.report import MoveReport

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kvtrie import BlockManager, Moves

__all__ = ["Dispatch"]


class Dispatch:
    """The moves of one manager that have not ended on every rank.

    Args:
        manager: the source of the moves.
        ranks: number of processes that carry out each move.
    """

    def __init__(self, manager: BlockManager, ranks: int = 1) -> None:
        self._manager = manager
        self._ranks = ranks
        self._all = (1 << ranks) - 1
        self._waiting: dict[int, Moves] = {}  # one move each, in the manager's order
        self._out: dict[int, int] = {}  # ranks that have not reported the end of each, a bit each
        self._hung: set[tuple[int, int]] = set()  # moves and ranks, of which one more report comes
        self._unwanted: set[int] = set()  # that the manager has not handed out yet

    @property
    def pending(self) -> int:
        """Moves that have not ended on every rank, those that hang included."""
        hung = {ident for ident, _ in self._hung if ident not in self._out}
        return len(self._waiting) + len(self._out) + len(hung)

    def waiting(self) -> list[Moves]:
        """Moves that wait for another one, which has not ended on every rank."""
        return list(self._waiting.values())

    def is_open(self, ident: int) -> bool:
        """Whether a move has not ended on every rank."""
        return ident in self._waiting or ident in self._out

    def take(self, now: int, *, shared: int | None = None) -> list[Moves]:
        """Return the moves that every rank may carry out now, in the manager's order.

        Args:
            now: the time in nanoseconds, for reports of moves that are not wanted any more.
            shared: as of `BlockManager.moves`.
        """
        able = [one for one in self._waiting.values() if not self.is_open(int(one.after[0]))]
        for move in able:
            del self._waiting[int(move.id[0])]
        moves = self._manager.moves(shared=shared)
        if len(moves):
            able += self._sort(moves, now)
        for part in able:
            self._out |= dict.fromkeys(part.id.tolist(), self._all)
        return able

    def on_reports(self, rank: int, reports: Iterable[MoveReport], now: int) -> set[int]:
        """Pass the reports of a rank on to the manager.

        A move that has ended on this rank already is not reported again.

        Args:
            rank: the rank, from 0 on.
            reports: what the rank's `Runner.reports` returned.
            now: the time, nanoseconds.

        Returns:
            The moves that have failed by it, those that waited for them included.

        Raises:
            ConfigError: a report that contradicts an earlier one.
        """
        failed: set[int] = set()
        bit, out, hung = 1 << rank, self._out, self._hung
        for report in reports:
            ids = [each for each in report.ids if out.get(each, 0) & bit or (each, rank) in hung]
            if not ids:
                continue
            self._manager.complete(
                ids,
                now=now,
                ok=report.ok,
                layers_done=report.layers_done,
                rank=rank,
                error=report.error,
                hung=report.hung,
                cancelled=report.cancelled,
            )
            if not report.ok:
                failed.update(ids)
            if report.hung:
                hung.update((ident, rank) for ident in ids)
            elif hung:
                hung.difference_update((ident, rank) for ident in ids)
            if report.layers_done is None:
                self._end(ids, bit)
        return failed | self._lose(failed)

    def cancel(self, ids: Collection[int], now: int, why: str) -> int:
        """Take back moves that no rank has: those that wait, and those still to be handed out.

        Args:
            ids: which moves; those that the ranks have run on.
            now: the time.
            why: the error that the manager records.

        Returns:
            The number of waiting moves that were removed, with the moves that waited for them.
        """
        if not ids:
            return 0
        gone = {ident for ident in ids if ident in self._waiting}
        self._unwanted.update(set(ids) - gone - self._out.keys())
        for ident in gone:
            del self._waiting[ident]
        self._fail(gone, now, why)
        return len(gone) + len(self._lose(gone))

    def refuse(self, parts: Iterable[Moves], now: int, why: str, *, blame: bool = False) -> None:
        """Fail moves that were taken and will not be handed to any rank.

        Args:
            parts: moves as `take` returned them.
            now: the time.
            why: the error that the manager records.
            blame: fail them instead of cancelling them, so that they are not asked for again.
        """
        for part in parts:
            report = MoveReport(tuple(part.id.tolist()), error=why, cancelled=not blame)
            for rank in range(self._ranks):
                self.on_reports(rank, [report], now)

    def _sort(self, moves: Moves, now: int) -> list[Moves]:
        """Return the new moves that may start; keep or refuse the others."""
        ids, after = moves.id.tolist(), moves.after.tolist()
        if not self._unwanted and not any(after):
            return [moves]
        here, free = set(ids), list[int]()
        refused = {ident for ident in ids if ident in self._unwanted}
        self._unwanted -= refused
        for row, (ident, before) in enumerate(zip(ids, after, strict=True)):
            if ident in refused:
                continue
            if before in refused:  # in topological order, so one pass finds chains
                refused.add(ident)
            elif before and (self.is_open(before) or before in here):
                self._waiting[ident] = moves[row : row + 1]
            else:
                free.append(row)
        mine = refused & {i for i, before in zip(ids, after, strict=True) if before not in refused}
        self._fail(mine, now, "its slot was given back")
        if not free:
            return []
        return [moves[np.asarray(free)]]

    def _end(self, ids: Iterable[int], bit: int) -> None:
        for ident in ids:
            left = self._out.pop(ident, 0) & ~bit
            if left:
                self._out[ident] = left

    def _fail(self, ids: Collection[int], now: int, why: str) -> None:
        for rank in range(self._ranks if ids else 0):
            self._manager.complete(
                list(ids), now=now, ok=False, rank=rank, error=why, cancelled=True
            )

    def _lose(self, failed: Collection[int]) -> set[int]:
        """Drop the moves that waited for failed moves: the manager has failed them already."""
        if not failed:
            return set()
        lost = set(failed)
        for ident, move in list(self._waiting.items()):
            if int(move.after[0]) in lost:
                lost.add(ident)
                del self._waiting[ident]
        return lost - set(failed)

"""Dispatch: sends a manager's moves to the ranks and returns the ranks' reports.

It runs in the manager's process. Each rank has a `Runner` in another process. No call blocks.
Invariant: a move is handed out once, to all ranks, and only after its `after` has succeeded on
every rank. A move cancelled before the manager issues it is refused when the manager issues it.
Cost: array operations over the moves of a call, and a step per waiting move.
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
    """The moves of a manager until their end on every rank.

    Args:
        manager: the source of the moves.
        ranks: number of processes executing each move.
    """

    def __init__(self, manager: BlockManager, ranks: int = 1) -> None:
        self._manager = manager
        self._ranks = ranks
        self._all = (1 << ranks) - 1
        self._waiting: dict[int, Moves] = {}  # single moves, in the manager's order
        self._out: dict[int, int] = {}  # by move, a bit per rank without a final report
        self._hung: set[tuple[int, int]] = set()  # moves and ranks with a final report to come
        self._unwanted: set[int] = set()  # cancelled before the manager issued them

    @property
    def pending(self) -> int:
        """Number of moves unended on some rank, including hung moves."""
        hung = {ident for ident, _ in self._hung if ident not in self._out}
        return len(self._waiting) + len(self._out) + len(hung)

    def waiting(self) -> list[Moves]:
        """Return the moves waiting for an unended `after`."""
        return list(self._waiting.values())

    def is_open(self, ident: int) -> bool:
        """Return whether a move is unended on some rank."""
        return ident in self._waiting or ident in self._out

    def ended(self, ids: Iterable[int]) -> list[int]:
        """Return those of the moves that are ended on every rank."""
        waiting, out = self._waiting, self._out
        return [ident for ident in ids if ident not in waiting and ident not in out]

    def take(self, now: int, *, shared: int | None = None) -> list[Moves]:
        """Return the moves now ready on every rank, in the manager's order.

        Args:
            now: the time in nanoseconds, for reports of cancelled moves.
            shared: as for `BlockManager.moves`.
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

        A second report for a move already ended on this rank is dropped.

        Args:
            rank: the rank, from 0 on.
            reports: the result of the rank's `Runner.reports`.
            now: the time, nanoseconds.

        Returns:
            The moves failed by these reports, including their dependents.

        Raises:
            ConfigError: a report contradicts an earlier report.
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
        """Cancel moves not yet sent to a rank, including moves not yet issued by the manager.

        Args:
            ids: the moves. Moves already sent to the ranks continue.
            now: the time.
            why: the error recorded by the manager.

        Returns:
            The number of waiting moves removed, including their dependents.
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
        """Fail moves returned by `take` that no rank will execute.

        Args:
            parts: moves as returned by `take`.
            now: the time.
            why: the error recorded by the manager.
            blame: report a failure instead of a cancellation, so that the moves are not planned
                again.
        """
        for part in parts:
            report = MoveReport(tuple(part.id.tolist()), error=why, cancelled=not blame)
            for rank in range(self._ranks):
                self.on_reports(rank, [report], now)

    def _sort(self, moves: Moves, now: int) -> list[Moves]:
        """Return the startable new moves, keep the waiting and refuse the cancelled moves."""
        ids, after = moves.id.tolist(), moves.after.tolist()
        if not self._unwanted and not any(after):
            return [moves]
        given, free = set(ids), list[int]()
        refused = {ident for ident in ids if ident in self._unwanted}
        self._unwanted -= refused
        for row, (ident, before) in enumerate(zip(ids, after, strict=True)):
            if ident in refused:
                continue
            if before in refused:  # in topological order, so one pass finds chains
                refused.add(ident)
            elif before and (self.is_open(before) or before in given):
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
        """Drop the waiting dependents of failed moves. The manager has already failed them."""
        if not failed:
            return set()
        lost = set(failed)
        for ident, move in list(self._waiting.items()):
            if int(move.after[0]) in lost:
                lost.add(ident)
                del self._waiting[ident]
        return lost - set(failed)

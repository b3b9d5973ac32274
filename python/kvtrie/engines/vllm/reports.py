"""Reports: applies the workers' reports of steps and moves.

Invariant: a move is finished once every rank has reported it. Cost: a pass over a step's reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.transfer.report import MoveReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtrie.engines.vllm.cache import ServedCache
    from kvtrie.engines.vllm.loads import Loads
    from kvtrie.engines.vllm.messages import StepNews
    from kvtrie.engines.vllm.requests import Requests

__all__ = ["Reports"]


class Reports:
    """Applies the workers' reports.

    Attributes:
        kept_blocks: by rank, the blocks in kept host memory for the next server.
    """

    def __init__(self, cache: ServedCache, requests: Requests, loads: Loads) -> None:
        self._cache, self._requests, self._loads = cache, requests, loads
        self.kept_blocks: dict[int, int] = {}
        self._lost_kept: dict[int, dict[str, int]] = {}

    def take_in(self, news: Mapping[int, StepNews], now: int) -> None:
        """Apply the workers' reports of a finished step."""
        moved = False
        for rank, one in news.items():
            self._note_news(rank, one)
            if one.reports:
                self._apply(rank, MoveReport.from_bytes(one.reports), now)
                moved = True
        if moved:  # the manager plans new moves only after reports of moves
            self._cache.manager.failed()
            if not self._cache.resetting:
                self._cache.moves.take_early(now)  # so that `busy` counts them

    def _note_news(self, rank: int, news: StepNews) -> None:
        """Apply a worker's reports on weights, adapters, kept host memory and a shared store."""
        cache, lost = self._cache, self._cache.counters.lost
        if news.weights is not None:
            cache.identity.on_answer(rank, *news.weights)
        if news.adapters is not None:
            cache.identity.adapters.on_held(rank, *news.adapters)
        if news.verified:
            cache.unverified.on_answers(rank, news.verified)
        if news.unstored:
            lost.update(news.unstored)
        if news.kept is None:
            return
        self.kept_blocks[rank] = news.kept
        before = self._lost_kept.get(rank, {})
        for reason, count in news.lost.items():
            lost[f"kept block: {reason}"] += count - before.get(reason, 0)
        self._lost_kept[rank] = news.lost

    def _apply(self, rank: int, reports: Sequence[MoveReport], now: int) -> None:
        """Report a rank's moves to the manager, and end its finished loads."""
        cache = self._cache
        failed = cache.moves.dispatch.on_reports(rank, reports, now)
        unread = cache.moves.reported((each for one in reports for each in one.ids), failed)
        if unread and cache.store is not None:
            cache.store.refute(unread)
        done = (ident for report in reports if report.ok for ident in report.ids)
        if broken := self._loads.reported(done, failed):
            # Requests sharing a failed block may have computed from missing KV.
            for run in self._requests.running.values():
                run.stopped |= not broken.isdisjoint(run.table)

"""Reports: results of steps and moves, ends of requests, resets, events and counters.

Invariant: a block is committed only after every rank has finished the step that fills it; a reset
empties the manager only after the last move has ended.
Cost: per step a pass over its reports; per request one call at its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtrie.engines.server.miss_report import UNASKED
from kvtrie.engines.vllm.books import HOST
from kvtrie.engines.vllm.matching import Matching
from kvtrie.settings.hint import Release
from kvtrie.transfer.report import MoveReport
from kvtrie.transfer.used_blocks import UsedBlocks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.request import Request

    from kvtrie.engines.vllm.events import Change
    from kvtrie.engines.vllm.messages import StepNews
    from kvtrie.engines.vllm.metrics import ExportedValues, MetricsExporter

__all__ = ["Reports"]


_NS = 1_000_000_000
_RESET = "the cache was reset"  # why moves are cancelled then


class Reports(Matching):
    """The calls that follow a step."""

    def on_reports(self, news: Mapping[int, StepNews]) -> None:
        """Apply the workers' reports of a finished step: results of its moves."""
        now, moved = self._clock(), False
        for rank, one in news.items():
            self._note_news(rank, one)
            if one.reports:
                self._take_in_reports(rank, MoveReport.from_bytes(one.reports), now)
                moved = True
        if moved:  # which alone has the manager plan more
            self.manager.failed()
            if not self._resetting:
                self._ready += self._moves.take(now)  # so that `busy` knows of them
        self._end_reset(now)
        self._note_written(min([one.step for one in news.values()], default=-1))

    def _note_news(self, rank: int, news: StepNews) -> None:
        """Apply what a worker reports of its weights, of kept host memory and of a shared store."""
        if news.weights is not None:
            self.identity.on_answer(rank, *news.weights)
        if news.adapters is not None:
            self.identity.adapters.on_held(rank, *news.adapters)
        if news.proved:
            self.proofs.on_answers(rank, news.proved)
        if news.unstored:
            self.counters.lost.update(news.unstored)
        if news.kept is None:
            return
        self.kept_blocks[rank] = news.kept
        before = self._lost_kept.get(rank, {})
        for reason, count in news.lost.items():
            self.counters.lost[f"kept block: {reason}"] += count - before.get(reason, 0)
        self._lost_kept[rank] = news.lost

    def _take_in_reports(self, rank: int, reports: Sequence[MoveReport], now: int) -> None:
        """Pass a rank's reports on to the manager, and end the loads that they are of."""
        failed = self.dispatch.on_reports(rank, reports, now)
        unread = self._moves.reported((each for one in reports for each in one.ids), failed)
        if unread and self._store is not None:
            self._store.refute(unread)
        if failed:
            self._give_up(failed & self._loads.keys())
        for report in reports if self._loads else ():
            for ident in report.ids if report.ok else ():
                # One that is open may still fail on another rank.
                if ident in self._loads and not self.dispatch.is_open(ident):
                    del self._loads[ident]

    def _note_written(self, finished: int) -> None:
        """Blocks that steps up to one have filled are due."""
        while self._planned and self._planned[0].step <= finished:
            for run, upto in self._planned.popleft().rows:
                run.written = max(run.written, upto)
                if not run.stopped:
                    self._to_commit[run] = None

    def _give_up(self, loads: set[int]) -> None:
        """Stop commits of requests that read a block whose load has failed."""
        broken = {slot for ident in loads for slot in self._loads[ident].table}
        for ident in loads:
            self.counters.lost["a load that failed"] += 1
            self._loads.pop(ident).stopped = True
        if broken:  # requests that share a failed block may have computed from missing KV
            for run in self._runs.values():
                run.stopped |= not broken.isdisjoint(run.table)

    def end(self, request: Request) -> dict[str, Any] | None:
        """Take note that a request has ended, well or not; vLLM frees its blocks now.

        Returns:
            Why its tokens were computed, if it asked.
        """
        waiting, now = self._waiting.pop(request.request_id, None), self._clock()
        self._drop(request.request_id)
        self.identity.adapters.ended(request.request_id)
        with self._contained(request.request_id):
            if waiting is not None:
                self._unpin(waiting, now)
            if waiting is not None and waiting.session and waiting.ends:
                ended = Release(session=waiting.session, scope=waiting.scope)
                self.manager.hint([ended], now=now)
        if waiting is None or not waiting.asked:
            return None
        return waiting.why if self._why_clients else dict(UNASKED)

    @property
    def busy(self) -> bool:
        """Whether further steps are wanted although nothing may be left to compute."""
        return bool(
            self._leaving
            or self._resetting
            or self._forget
            or ((self._used or self._used_host) and not self._runs)
            or self.proofs.pending
            or self.dispatch.pending
            or len(self.commands)
        )

    def reset(self) -> bool:
        """Forget all that is kept. Nothing matches from now on; returns True.

        Copies that no rank has are cancelled, those that ranks have are awaited: until the last one
        has ended their slots stay in use, and requests neither match nor store.
        """
        now = self._clock()
        self.identity.doubt()
        for waiting in self._waiting.values():
            self._unpin(waiting, now)
            waiting.answer, waiting.coming = None, False
            waiting.waits_until, waiting.prefetched, waiting.gave_up = 0, -1, False
            waiting.from_disk = waiting.from_store = 0
            waiting.forget_store()
        for run in self._runs.values():
            run.stopped = True
        self._leaving += self._runs.values()
        self._runs, self._resetting = {}, True
        self._cleared += [] if self._announced is None else self._announced.clear()
        self._end_reset(now)
        return True

    def _end_reset(self, now: int) -> None:
        """Cancel the moves that no rank has; empty the manager once none is under way."""
        if not self._resetting:
            return
        self._let_go(now)
        self._planned.clear()
        self._committed, self._stored = set(), 0
        self.dispatch.refuse([*self._ready, *self.dispatch.take(now)], now, _RESET)
        self._ready = []
        waiting = [int(one.id[0]) for one in self.dispatch.waiting()]
        self.dispatch.cancel(waiting, now, _RESET)
        if self.dispatch.pending or self.manager.stats().moves:
            return
        self.manager.reset()
        self._moves.clear()
        if self._store is not None:
            self._store.forget()
        self._used = UsedBlocks(self.manager, self._disk)
        self._used_host = UsedBlocks(self.manager, HOST if self._kept else None)
        self.proofs.clear()
        self._loads, self._forget, self._resetting = {}, True, False

    def changes(self) -> list[Change]:
        """Blocks that have come whole to host or disk since the last call, or left, in order."""
        if self._announced is None:
            return []
        cleared, self._cleared = self._cleared, []
        if self._resetting:  # the manager still has the blocks; they are published as removed
            for _ in self._announced.take(self.manager.take_events()):
                pass
            for _ in self._announced.clear():
                pass
            return cleared
        return [*cleared, *self._announced.take(self.manager.take_events())]

    def counts(self, counts: MetricsExporter) -> ExportedValues | None:
        """Return the increase since the last export; None if that was less than 1 s ago.

        A server that falls idle exports at once: its next step may be hours away.
        """
        now = self._clock()
        if now - self._exported_at < _NS and (self._runs or self.busy):
            return None
        self._exported_at = now
        if self._announced is not None:
            self.counters.lost["an event without a hash"] = self._announced.unknown
        waiting = self._waiting.values()
        waits = sum(one.waits_until > 0 and not one.gave_up for one in waiting)
        kept = min(self.kept_blocks.values(), default=0)
        stats = self.manager.stats()
        return counts.take(
            stats,
            self.counters,
            self._pinned,
            waits,
            self.why,
            kept=kept,
            figures=self.format_costs,
        )

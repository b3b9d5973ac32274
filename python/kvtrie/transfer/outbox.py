"""Outbox: the news of a runner's moves that leaves it: reports, progress, and warnings in the log.

Reports go to the sink, where the manager is in this process, and are kept for `Runner.reports`
otherwise. Progress goes to a callback of the user, outside of the runner's section.
Invariant: ids of failed moves are remembered exactly where no manager remembers them; the callback
can stop no thread of the runner. Cost: one tuple per report.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from kvtrie.failure_log import FailureLog
from kvtrie.tiers import LogsFailures
from kvtrie.transfer.report import MoveReport, Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie.settings.tier import Tier
    from kvtrie.tiers import TierBytes
    from kvtrie.transfer.job import Job
    from kvtrie.transfer.report import Sink

__all__ = ["Outbox", "name_of"]

_LOG = logging.getLogger(__name__)
_MOST_FAILED = 1 << 16  # ids of failed moves, for later ones that name them as `after`


class Outbox:
    """Reports and failures of moves, on their way out.

    Args:
        pools: the pool or storage of each tier.
        tiers: the manager's tiers, for their names in the log.
        clock: nanoseconds, monotone.
        sink: takes the reports; None keeps them for `take`.
        callback: takes the progress; None drops it.
        threads: the runner's own threads, of which no exception of the callback ends one.

    Attributes:
        sink: as given.
        callback: as given; the runner sets None when it is dropped.
        news: reports that `take` has not returned.
        failed: ids of the moves that failed last, where there is no sink.
    """

    def __init__(
        self,
        pools: Sequence[TierBytes | None],
        tiers: Sequence[Tier],
        clock: Callable[[], int],
        *,
        sink: Sink | None,
        callback: Callable[[Progress], None] | None,
        threads: Collection[threading.Thread],
    ) -> None:
        self.sink = sink
        self.callback = callback
        self.news: list[MoveReport] = []
        self.failed: dict[int, None] = {}
        self._pools = tuple(pools)
        self._places = [_place(at, tiers) for at in range(len(pools))]
        self._clock = clock
        self._threads = threads
        self._failures = FailureLog(_LOG, clock)
        self._complained = False

    def report(
        self,
        ids: Sequence[int] | NDArray[np.uint64],
        *,
        layers_done: int | None,
        error: str | None,
        hung: bool,
        cancelled: bool,
    ) -> None:
        """Pass a report on to the sink, which may raise anything, or keep it for `take`.

        Args:
            ids: the moves, at least one.
            layers_done: number of layers that have arrived, for moves that still run.
            error: why the moves failed; None if they did not.
            hung: they passed the deadline and still run.
            cancelled: they failed and never started.
        """
        if self.sink is not None:
            self.sink.report(
                ids,
                self._clock(),
                layers_done=layers_done,
                error=error,
                hung=hung,
                cancelled=cancelled,
            )
            return
        each = tuple(map(int, ids))
        self.news.append(MoveReport(each, layers_done, error, hung, cancelled))
        if error is not None:
            self.failed.update(dict.fromkeys(each))
            while len(self.failed) > _MOST_FAILED:
                del self.failed[next(iter(self.failed))]

    def take(self) -> list[MoveReport]:
        """Return the reports since the last call."""
        news, self.news = self.news, []
        return news

    def progress(
        self,
        ids: Sequence[int] | NDArray[np.uint64],
        layers_done: int,
        layers: int,
        error: str | None,
        left: Callable[[], int],
    ) -> None:
        """Call the callback; not in the section, as it may take long.

        Args:
            ids: the moves.
            layers_done: number of layers copied.
            layers: number of layers of each move.
            error: why they failed; None if they did not.
            left: counts the moves that have not ended.
        """
        if self.callback is None or not len(ids):
            return
        each, pending = tuple(map(int, ids)), left()
        try:
            self.callback(Progress(each, layers_done, layers, error, pending))
        except BaseException as raised:
            own = threading.current_thread() in self._threads
            if not isinstance(raised, Exception) and not own:
                raise  # Ctrl-C is the caller's
            if not self._complained:
                self._complained = True
                _LOG.warning(
                    "the progress callback raised, moves go on: %s", raised, exc_info=raised
                )

    def warn(self, place: object, reason: str) -> None:
        """Log a failure at a place, once per reason."""
        self._failures.warn(place, reason)

    def warn_of_store(self, job: Job, error: str) -> None:
        """Log the failure of a job that is a store, unless its storage does that itself."""
        target = job.tiers[1]
        pool = self._pools[target]
        logs = isinstance(pool, LogsFailures) and pool.logs_failures
        if job.store and not logs:
            self.warn(self._places[target], f"a block is not stored: {error}")


def name_of(at: int, tiers: Sequence[Tier]) -> str:
    """Return the name of a tier in errors and in the log."""
    return f"tier {at} ({tiers[at].kind})" if at < len(tiers) else f"tier {at}"


def _place(at: int, tiers: Sequence[Tier]) -> str:
    path = (tiers[at].path or tiers[at].keep) if at < len(tiers) else None
    return name_of(at, tiers) if path is None else f"{name_of(at, tiers)} in {path}"

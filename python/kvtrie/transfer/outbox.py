"""Outbox: delivers a runner's reports, progress and log warnings.

Reports go to the sink if the manager is in this process. Otherwise they are kept for
`Runner.reports`. Progress goes to a user callback, outside the runner's section.
Invariant: ids of failed moves are remembered only without a manager. The callback cannot stop a
thread of the runner.
Cost: a tuple per report.
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
_MOST_FAILED = 1 << 16  # ids of failed moves, for later moves depending on them


class Outbox:
    """Reports and failures of moves.

    Args:
        pools: the pool or storage of each tier.
        tiers: the manager's tiers, for their names in the log.
        clock: nanoseconds, monotone.
        sink: receives the reports, or None to keep them for `take`.
        callback: receives the progress, or None to drop it.
        threads: the runner's own threads, never ended by an exception of the callback.

    Attributes:
        sink: as given.
        callback: as given, until a dropped runner sets None.
        news: reports not yet returned by `take`.
        failed: ids of the most recently failed moves, without a sink.
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
        """Pass a report to the sink, which may raise anything, or keep it for `take`.

        Args:
            ids: the moves, at least one.
            layers_done: number of copied layers, for running moves.
            error: the reason of a failure, or None.
            hung: the moves passed the deadline and still run.
            cancelled: the moves failed without starting.
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
        """Call the callback, outside the section because it may take long.

        Args:
            ids: the moves.
            layers_done: number of layers copied.
            layers: number of layers of each move.
            error: the reason of a failure, or None.
            left: counts the unended moves.
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
        """Log a failure of a tier, once per reason."""
        self._failures.warn(place, reason)

    def warn_of_store(self, job: Job, error: str) -> None:
        """Log the failure of a store, unless the storage logs its failures itself."""
        target = job.tiers[1]
        pool = self._pools[target]
        logs = isinstance(pool, LogsFailures) and pool.logs_failures
        if job.store and not logs:
            self.warn(self._places[target], f"a block is not stored: {error}")


def name_of(at: int, tiers: Sequence[Tier]) -> str:
    """Return a tier's name for errors and the log."""
    return f"tier {at} ({tiers[at].kind})" if at < len(tiers) else f"tier {at}"


def _place(at: int, tiers: Sequence[Tier]) -> str:
    path = (tiers[at].path or tiers[at].keep) if at < len(tiers) else None
    return name_of(at, tiers) if path is None else f"{name_of(at, tiers)} in {path}"

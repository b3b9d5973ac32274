"""Budget: how many bytes per second background copies may take from each tier (`Tier.io_budget`).

A copy may start when those before it would have ended at the budgeted rate, so one that is larger
than a second's worth still starts, and what follows it waits the longer.
Invariant: over any time, what has started exceeds the budget by one copy at most.
Cost: a few comparisons per copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.settings.tier import Tier
    from kvtrie.transfer.job import Job

__all__ = ["Budget"]

_NS = 1_000_000_000


class Budget:
    """The rates of a manager's tiers, and from when on each may be used again.

    Args:
        tiers: the manager's.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._rates = [None if tier.io_budget is None else int(tier.io_budget) for tier in tiers]
        self._free = [0] * len(tiers)

    @property
    def limited(self) -> bool:
        """Whether any tier has a budget."""
        return any(self._rates)

    def free_at(self, job: Job) -> int:
        """From when on a background job may start, in nanoseconds; a demanded one always may."""
        if not self.limited or job.urgency == 0:
            return 0
        return max(self._free[tier] for tier in job.tiers)

    def spend(self, job: Job, now: int) -> None:
        """Count the bytes of a background job that starts."""
        if not self.limited:
            return
        for tier in job.tiers:
            rate = self._rates[tier]
            if rate:
                self._free[tier] = max(now, self._free[tier]) + job.bytes * _NS // rate

"""Budget: limits background copies to bytes per second and tier (`Tier.io_budget`).

A copy may start when the earlier copies would have ended at the budgeted rate. A copy of more
than a second's worth of bytes still starts, and delays the next copies.
Invariant: over any time, the started bytes exceed the budget by at most one copy.
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
    """The rate of each tier, and the time from which each tier may be used again.

    Args:
        tiers: the manager's tiers.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._rates = [None if tier.io_budget is None else int(tier.io_budget) for tier in tiers]
        self._free = [0] * len(tiers)

    @property
    def limited(self) -> bool:
        """Whether any tier has a budget."""
        return any(self._rates)

    def free_at(self, job: Job) -> int:
        """Return the earliest start of a job in nanoseconds, or 0 for a demanded job."""
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

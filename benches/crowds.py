"""Cost of a call of one more owner or tenant as their number grows; the goal is a flat curve.

Part of `make bench-scaling`. Owners all retain one block, and one more does so, and lets go.
Tenants all have a quota and hold more than it allows, and one more serves a request for which
blocks leave, and sets its quota. Medians of one call each.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from benches.ours.manager import STEP, manager
from benches.workload import BLOCK
from kvtrie import Quota, Release, Retain, Scope

if TYPE_CHECKING:
    from collections.abc import Callable

NUMBERS = (100, 1_000, 10_000, 100_000)
CALLS = 400
LABELS = {
    "retain": "one more owner retains a block",
    "release": "and lets go",
    "request": "request of a tenant with a quota",
    "quota": "a quota is set",
}


def costs(number: int) -> dict[str, float]:
    """Median microseconds of each call with `number` other owners, or tenants."""
    return {name: round(1e6 * us, 3) for name, us in (_owners(number) | _tenants(number)).items()}


def _owners(number: int) -> dict[str, float]:
    managed, tokens = manager(64), np.arange(BLOCK, dtype=np.uint32)
    lease = managed.acquire(tokens, now=0)
    lease.commit(tokens, now=0)
    lease.release(now=0)
    for at in range(number):
        managed.hint([Retain(tokens=tokens, priority=36 + at % 60, owner=f"owner {at}")], now=0)
    retain = [Retain(tokens=tokens, priority=99, owner="one more")]
    release = [Release(owner="one more")]
    times: dict[str, list[float]] = {"retain": [], "release": []}
    for _ in range(CALLS):
        times["retain"].append(_timed(lambda: managed.hint(retain, now=0)))
        times["release"].append(_timed(lambda: managed.hint(release, now=0)))
    managed.close()
    return {name: median(each) for name, each in times.items()}


def _tenants(number: int) -> dict[str, float]:
    managed = manager(2 * number + 64)
    now = 0

    def serve(scope: Scope, first: int) -> None:
        nonlocal now
        now += STEP
        tokens = np.arange(first, first + 2 * BLOCK, dtype=np.uint32)
        lease = managed.acquire(tokens, now=now, scope=scope)
        lease.commit(tokens, now=now)
        lease.release(now=now)

    for at in range(number):
        tenant = b"tenant %d" % at
        serve(Scope(tenant=tenant), 0)
        managed.hint([Quota(tenant=tenant, blocks=1, tier="gpu")], now=now)
    more = Scope(tenant=b"one more")
    quota = [Quota(tenant=more.tenant, blocks=1, tier="gpu")]
    for at in range(40):  # No free block is left.
        serve(more, 1000 * at)
    times: dict[str, list[float]] = {"request": [], "quota": []}
    for at in range(CALLS):
        first = 1000 * (40 + at)
        times["quota"].append(_timed(lambda: managed.hint(quota, now=now)))
        times["request"].append(_timed(lambda first=first: serve(more, first)))
    managed.close()
    return {name: median(each) for name, each in times.items()}


def _timed(call: Callable[[], object]) -> float:
    t = perf_counter()
    call()
    return perf_counter() - t

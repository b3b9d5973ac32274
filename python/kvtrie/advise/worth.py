"""Worth: sizes that are worth their price, from the figures of all settings.

Invariant: shares are relative to the computation of all prefills. Each share is compared with the
next smaller host of the same policy, with or without a disk. Cost: arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.advise.outlook import Outlook

__all__ = ["Step", "Worth", "bend", "worth_of"]

_GB = 1e9


@dataclass(frozen=True, slots=True)
class Step:
    """Gain of the bytes of a setting.

    Attributes:
        policy: the policy of host and disk.
        host: bytes of host memory.
        disk: bytes of the disk.
        cost: saved share of the computation of all prefills.
        per_host_gb: additional share per GB of host beyond the next smaller host.
        per_disk_gb: additional share per GB of the disk on this host. None without a disk.
    """

    policy: str
    host: int
    disk: int
    cost: float
    per_host_gb: float
    per_disk_gb: float | None


@dataclass(frozen=True, slots=True)
class Worth:
    """Sizes worth their price.

    Attributes:
        steps: all settings.
        knees: by policy without a disk, the bytes of host memory with the strongest bend of the
            curve. Beyond it a GB adds less than the mean GB. Policies without savings are left out.
        equal: bytes of host memory with which `learned` saves as much as `lru` with the largest
            host, linear between the played sizes. None if either policy was not played or `learned`
            saves less.
    """

    steps: tuple[Step, ...]
    knees: dict[str, int]
    equal: int | None


def worth_of(rows: Sequence[Outlook], fine: Sequence[Outlook] = ()) -> Worth:
    """Return the gain of each size.

    Args:
        rows: all settings.
        fine: the curve of `lru` without a disk at more sizes, for a more exact bend.
    """
    steps: list[Step] = []
    plain: dict[str, list[tuple[int, float]]] = {}
    alone = {(row.policy, row.host): row.cost for row in rows if not row.disk}
    for row in sorted(rows, key=lambda row: (row.policy, row.disk, row.host)):
        before = steps[-1] if steps else None
        size, cost = 0, 0.0
        if before is not None and (before.policy, before.disk) == (row.policy, row.disk):
            size, cost = before.host, before.cost
        elif row.disk:  # the disk's share is not the host's
            size, cost = row.host, row.cost
        per_disk = None
        if row.disk:
            per_disk = (row.cost - alone[row.policy, row.host]) / (row.disk / _GB)
        else:
            plain.setdefault(row.policy, []).append((row.host, row.cost))
        gained = (row.cost - cost) / ((row.host - size) / _GB) if row.host > size else 0.0
        steps.append(Step(row.policy, row.host, row.disk, row.cost, gained, per_disk))
    curves = plain | ({"lru": [(row.host, row.cost) for row in fine]} if fine else {})
    knees = {name: at for name, curve in curves.items() if (at := bend(curve)) is not None}
    return Worth(tuple(steps), knees, _equal(plain))


def bend(curve: Sequence[tuple[int, float]]) -> int | None:
    """Return the size farthest above the line from zero to the largest, or None without savings.

    Args:
        curve: pairs of a size and its savings, ascending.
    """
    last, most = curve[-1]
    if most <= 0:
        return None
    return max(curve, key=lambda point: point[1] / most - point[0] / last)[0]


def _equal(plain: dict[str, list[tuple[int, float]]]) -> int | None:
    if "lru" not in plain or "learned" not in plain:
        return None
    wanted, before = plain["lru"][-1][1], (0, 0.0)
    for size, cost in plain["learned"]:
        if cost >= wanted > 0:
            part = (wanted - before[1]) / (cost - before[1]) if cost > before[1] else 1.0
            return round(before[0] + (size - before[0]) * max(0.0, part))
        before = (size, cost)
    return None

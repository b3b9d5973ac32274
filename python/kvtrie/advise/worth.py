"""Worth: which sizes are worth their price, from the figures of all settings.

Invariant: shares are of the computation of all prefills; those of one policy, without or with a
disk, are compared with the next smaller host. Cost: arithmetic.
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
    """What the bytes of one setting add.

    Attributes:
        policy: the policy of host and disk.
        host: bytes of host memory.
        disk: bytes of the disk.
        cost: share of the computation of all prefills that is saved.
        per_host_gb: share that each GB of host adds beyond the next smaller host.
        per_disk_gb: share that each GB of the disk adds to this host; None without a disk.
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
        knees: by policy without a disk, the bytes of host memory at which the curve bends most;
            beyond them a GB adds less than the mean GB. Policies that save nothing are left out.
        equal: bytes of host memory with which `learned` saves as much as `lru` with the largest,
            linear between the sizes that were played; None if one of them was not played or
            `learned` saves less.
    """

    steps: tuple[Step, ...]
    knees: dict[str, int]
    equal: int | None


def worth_of(rows: Sequence[Outlook], fine: Sequence[Outlook] = ()) -> Worth:
    """Return what each size adds.

    Args:
        rows: all settings.
        fine: the curve of `lru` without a disk at more sizes; its bend is more exact.
    """
    steps: list[Step] = []
    plain: dict[str, list[tuple[int, float]]] = {}
    alone = {(row.policy, row.host): row.cost for row in rows if not row.disk}
    for row in sorted(rows, key=lambda row: (row.policy, row.disk, row.host)):
        before = steps[-1] if steps else None
        size, cost = 0, 0.0
        if before is not None and (before.policy, before.disk) == (row.policy, row.disk):
            size, cost = before.host, before.cost
        elif row.disk:  # what the disk adds is not the host's
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
    """Return the size farthest above the line from nothing to the largest; None if none saves.

    Args:
        curve: sizes, which ascend, and what each saves.
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

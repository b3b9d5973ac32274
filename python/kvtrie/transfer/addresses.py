"""Check the addresses of moves against the pools of a process before a byte is touched.

A move from another process may name a missing tier or a slot out of range.
Cost: a few array operations per batch and tier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtrie.tiers import Pool, parts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtrie import Moves
    from kvtrie.tiers import TierBytes

__all__ = ["misaddressed"]


def misaddressed(moves: Moves, pools: Sequence[TierBytes | None]) -> dict[int, str]:
    """Return the rows of `moves` that these pools cannot serve, with the reason.

    Storages are not checked: they raise on a read or write out of range.
    """
    why: dict[int, str] = {}
    sides = ((moves.src, moves.src_slot), (moves.dst, moves.dst_slot))
    for tiers, slots in sides:
        for tier in sorted(set[int](tiers.tolist())):
            rows = np.flatnonzero(tiers == tier)
            pool = pools[tier] if tier < len(pools) else None
            if pool is None:
                present = [at for at, one in enumerate(pools) if one is not None]
                why |= dict.fromkeys(rows.tolist(), f"no pool for tier {tier}: this has {present}")
                continue
            groups = parts_of(pool)
            for group in sorted(set[int](moves.group[rows].tolist())):
                own = rows[moves.group[rows] == group]
                if group >= len(groups):
                    reason = f"group {group} of {len(groups)} on tier {tier}"
                    why |= dict.fromkeys(own.tolist(), reason)
                elif isinstance(part := groups[group], Pool):
                    why |= _outside(moves, own, slots, tier, part)
    return why


def _outside(
    moves: Moves, rows: NDArray[np.int64], slots: NDArray[np.uint32], tier: int, pool: Pool
) -> dict[int, str]:
    """Return the rows of a tier with slots or layers out of range for its pool."""
    why: dict[int, str] = {}
    room = pool.blocks * (pool.layers if pool.layer_slots else 1)
    for row in rows[slots[rows] >= room].tolist():
        why[row] = f"slot {slots[row]} of tier {tier}, whose pool has {room}"
    for row in rows[moves.layer_hi[rows] > pool.layers].tolist():
        why[row] = f"layer {moves.layer_hi[row] - 1} of {pool.layers} on tier {tier}"
    wide = moves.layer_hi[rows] - moves.layer_lo[rows] != 1
    if pool.layer_slots and wide.any():
        reason = f"several layers in one layer slot of tier {tier}"
        why |= dict.fromkeys(rows[wide].tolist(), reason)
    return why

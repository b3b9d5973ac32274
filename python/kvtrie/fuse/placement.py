"""Placement: checks for room for the blocks of chunks, before any change.

Invariant: nothing is changed. Cost: reads of the tiers' counters. In addition a hash per block for
the first tier, a look at the copies for lower tiers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError, NoSpaceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie import BlockManager, MatchedBlock, TierStats

__all__ = ["check_place", "check_room"]


def check_room(manager: BlockManager, sequences: Sequence[NDArray[np.int64]]) -> None:
    """Refuse sequences that do not fit into the first tier even when it is empty.

    Args:
        manager: manager of the tiers.
        sequences: int64 each, of full blocks. Shared blocks count once.

    Raises:
        NoSpaceError: the first tier has fewer slots than the sequences need.
    """
    size = manager.block_tokens
    blocks: set[int] = set()
    for sequence in sequences:
        above = 0
        for at in range(0, len(sequence), size):
            above = hash((above, sequence[at : at + size].tobytes()))
            blocks.add(above)
    tier = manager.tiers[0]
    tier_stats = manager.stats().tiers[tier.kind]
    each = manager.model.layers if tier.layer_slots else 1
    if len(blocks) * each > tier_stats.slots:
        raise NoSpaceError(
            f"chunks and prefix are {len(blocks)} blocks, {tier.kind} holds "
            f"{tier_stats.slots // each}",
            tier=tier.kind,
            wanted=len(blocks) * each,
            free=tier_stats.free + tier_stats.evictable,
            coming=tier_stats.coming,
            leased=_leased(tier_stats),
        )


def _leased(stats: TierStats) -> int:
    """Return the number of slots neither free, evictable nor reserved for arrivals."""
    return stats.slots - stats.free - stats.evictable - stats.coming


def check_place(
    manager: BlockManager, cached: Sequence[MatchedBlock], blocks: int, kind: str
) -> None:
    """Refuse an unreachable tier, or a tier without room for `blocks` blocks.

    Args:
        manager: manager of the tiers.
        cached: the blocks already cached.
        blocks: total number of blocks.
        kind: kind of the tier.

    Raises:
        ConfigError: the tier does not exist, or it or a tier on the way has `write="never"`.
        NoSpaceError: it or a tier on the way has too few free and evictable slots.
    """
    tiers = manager.tiers
    kinds = [tier.kind for tier in tiers]
    if kind not in kinds:
        raise ConfigError(f"a chunk is inserted into {' or '.join(kinds)}, not {kind!r}")
    stats = manager.stats().tiers
    for at in range(1, kinds.index(kind) + 1):
        tier, tier_stats = tiers[at], stats[tiers[at].kind]
        if tier.write == "never":
            raise ConfigError(f"nothing is ever written to {tier.kind}: it has write='never'")
        have = sum(any(copy.tier == at for copy in one.copies) for one in cached)
        wanted = (blocks - have) * (manager.model.layers if tier.layer_slots else 1)
        if wanted > tier_stats.free + tier_stats.evictable:
            raise NoSpaceError(
                f"{blocks} blocks of a chunk want {wanted} slots of {tier.kind}, where "
                f"{tier_stats.free} are free and {tier_stats.evictable} could be",
                tier=tier.kind,
                wanted=wanted,
                free=tier_stats.free + tier_stats.evictable,
                coming=tier_stats.coming,
                leased=_leased(tier_stats),
            )

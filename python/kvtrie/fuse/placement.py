"""Placement: whether a tier can take the blocks of a chunk, asked before anything is kept.

Invariant: nothing is changed. Cost: counters of the tiers on the way, and a look at the copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError, NoSpaceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie import BlockManager, MatchedBlock

__all__ = ["check_place"]


def check_place(
    manager: BlockManager, there: Sequence[MatchedBlock], blocks: int, kind: str
) -> None:
    """Refuse a tier to which so many blocks cannot go, one tier after another.

    Args:
        manager: whose tiers.
        there: those of the blocks that are cached already.
        blocks: how many there will be.
        kind: kind of the tier.

    Raises:
        ConfigError: there is no such tier, or nothing is ever written to it or on the way to it.
        NoSpaceError: it, or one on the way, has less room than they want: neither free nor
            evictable.
    """
    tiers = manager.tiers
    kinds = [tier.kind for tier in tiers]
    if kind not in kinds:
        raise ConfigError(f"a chunk is inserted into {' or '.join(kinds)}, not {kind!r}")
    stats = manager.stats().tiers
    for at in range(1, kinds.index(kind) + 1):
        tier, here = tiers[at], stats[tiers[at].kind]
        if tier.write == "never":
            raise ConfigError(f"nothing is ever written to {tier.kind}: it has write='never'")
        have = sum(any(copy.tier == at for copy in one.copies) for one in there)
        wanted = (blocks - have) * (manager.model.layers if tier.layer_slots else 1)
        if wanted > here.free + here.evictable:
            raise NoSpaceError(
                f"{blocks} blocks of a chunk want {wanted} slots of {tier.kind}, where {here.free} "
                f"are free and {here.evictable} could be",
                tier=tier.kind,
                wanted=wanted,
                free=here.free + here.evictable,
                coming=here.coming,
                leased=here.slots - here.free - here.evictable - here.coming,
            )

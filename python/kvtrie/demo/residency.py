"""Residency: which layer of which block of a conversation is on which tier, as a small grid.

The demo draws its picture and timeline from these grids, and `kvtrie map` prints them.
Invariant: a lookup changes nothing in the manager.
Cost: one lookup per conversation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtrie import BlockManager

__all__ = ["DROPPED", "grid", "share"]

DROPPED = -1
"""The code of a layer that is on no tier; the other codes are the tiers' numbers."""


def grid(manager: BlockManager, tokens: Sequence[int], now: int) -> NDArray[np.int8]:
    """Return the tier of every layer of every full block of `tokens`.

    Returns:
        int8 `(layers, blocks)`: the number of the fastest tier that holds it, or `DROPPED`. Where
        groups of layers are kept apart, a layer of a group has what its group has.
    """
    blocks = len(tokens) // manager.block_tokens
    where = np.full((manager.model.layers, blocks), DROPPED, dtype=np.int8)
    match = manager.lookup(tokens, now=now, keep=0)
    apart = any(tier.groups for tier in manager.stats().tiers.values())
    for index, block in enumerate(match.blocks):
        if not apart:
            where[:, index] = manager.layer_tiers(block.block)
            continue
        for copy in reversed(block.copies):
            layers = manager.model.groups[copy.group].layers[copy.layer_lo : copy.layer_hi]
            where[list(layers), index] = copy.tier
    return where


def share(grids: Sequence[NDArray[np.int8]], common: int, tiers: int) -> list[float]:
    """Count layers on each tier and, last, dropped ones, in units of whole blocks.

    Args:
        grids: one per conversation.
        common: blocks at their start that all conversations share; they count once.
        tiers: number of tiers.
    """
    counted = [each if at == 0 else each[:, common:] for at, each in enumerate(grids)]
    flat = np.concatenate([each.ravel() for each in counted]) if counted else np.zeros(0, np.int8)
    layers = max((each.shape[0] for each in grids), default=1)
    return [float((flat == tier).sum()) / layers for tier in (*range(tiers), DROPPED)]

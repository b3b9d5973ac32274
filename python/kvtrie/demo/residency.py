"""Residency: the tiers of all layers and blocks of a conversation, as a small grid.

The demo draws its picture and timeline from these grids, and `kvtrie map` prints them.
Invariant: a lookup changes nothing in the manager.
Cost: a lookup per conversation.
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
"""The code of a layer without a tier. All remaining codes are the tiers' numbers."""


def grid(manager: BlockManager, tokens: Sequence[int], now: int) -> NDArray[np.int8]:
    """Return the tier of every layer of every full block of `tokens`.

    Returns:
        int8 `(layers, blocks)`: the number of the fastest tier with the layer, or `DROPPED`. If
        groups of layers are kept apart, a layer has the tier of its group's copy.
    """
    blocks = len(tokens) // manager.block_tokens
    where = np.full((manager.model.layers, blocks), DROPPED, dtype=np.int8)
    match = manager.lookup(tokens, now=now, keep=0)
    separate_groups = any(tier.groups for tier in manager.stats().tiers.values())
    for index, block in enumerate(match.blocks):
        if not separate_groups:
            where[:, index] = manager.layer_tiers(block.block)
            continue
        for copy in reversed(block.copies):
            layers = manager.model.groups[copy.group].layers[copy.layer_lo : copy.layer_hi]
            where[list(layers), index] = copy.tier
    return where


def share(grids: Sequence[NDArray[np.int8]], common: int, tiers: int) -> list[float]:
    """Count layers on each tier and, last, dropped layers, in units of whole blocks.

    Args:
        grids: a grid per conversation.
        common: number of shared blocks at the start of all conversations, counted once.
        tiers: number of tiers.
    """
    counted = [each if at == 0 else each[:, common:] for at, each in enumerate(grids)]
    flat = np.concatenate([each.ravel() for each in counted]) if counted else np.zeros(0, np.int8)
    layers = max((each.shape[0] for each in grids), default=1)
    return [float((flat == tier).sum()) / layers for tier in (*range(tiers), DROPPED)]

"""Restored: the tiers opened by the workers, and the blocks found in them at start.

Cost: a pass over the index of each rank's disk, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtrie import BlockManager, Index
from kvtrie.errors import ConfigError
from kvtrie.settings.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtrie.engines.vllm.messages import IndexRow, Opened
    from kvtrie.engines.vllm.model import ServedModel
    from kvtrie.engines.vllm.native_first import NativeFirst
    from kvtrie.engines.vllm.settings import Settings

__all__ = [
    "DISK",
    "HOST",
    "keys_with_images",
    "load_indexes",
    "on_every_rank",
    "opened_tiers",
    "root_key",
]

HOST, DISK = 1, 2
"""Indices of the tiers below vLLM's memory."""


def root_key(model: ServedModel, host: Tier) -> bytes:
    """Return the parent key of first blocks in a scope without salt and adapter.

    Args:
        model: the served KV.
        host: a host tier with room for a block.
    """
    size = model.block_tokens
    manager = BlockManager(
        model.shape,
        [Tier("host", blocks=host.blocks, bytes=host.bytes)],
        block_tokens=size,
        events=8,
        events_of="residency",
        resume=model.resume,
    )
    with manager.acquire(np.zeros(size, np.uint32), now=0) as lease:
        lease.reserve(size, now=0)
        lease.commit(np.zeros(size, np.uint32), now=0)
    return next(event.parent for event in manager.take_events() if event.parent is not None)


def on_every_rank(ranks: list[list[IndexRow]]) -> Index:
    """Return the blocks found by every rank in the same slots. The rest will be overwritten."""
    if not ranks:
        return Index()
    # Labels differ, because each has its rank's own age. Layers differ between pipeline stages.
    slots = [[(row[1], *row[4:]) for row in each] for each in ranks]
    places = [[*zip(_keys(each), at, strict=True)] for each, at in zip(ranks, slots, strict=True)]
    common = set(places[0]).intersection(*places[1:])
    return Index([row for row, at in zip(ranks[0], places[0], strict=True) if at in common])


def load_indexes(manager: BlockManager, found: Mapping[int, Index], now: int) -> None:
    """Load the tiers' blocks, repeatedly: a path may start on a different tier."""
    left, more = dict(found), True
    while more:
        loaded = {tier: manager.load_index(index, tier, now=now) for tier, index in left.items()}
        left = {tier: index for tier, index in left.items() if loaded[tier] < len(index)}
        more = bool(left) and len(found) > 1 and any(loaded.values())


def keys_with_images(ranks: list[list[IndexRow]]) -> set[bytes]:
    """Return the keys of restored blocks with images.

    A label has its record's number of digests at byte 36, or eight bytes later after a cost.
    """
    labels: set[bytes] = set()
    for label in (row[0] for rows in ranks for row in rows):
        at = 36 + 8 * label[25]
        if any(label[at : at + 4]):
            labels.add(label)
    return set(_keys([(label, at, 0, 1) for at, label in enumerate(labels)]))


def _keys(rows: list[IndexRow]) -> list[bytes]:
    return [key.tobytes() for key in Index(rows).key]


def opened_tiers(
    settings: Settings, model: ServedModel, opened: Mapping[int, Opened], native: NativeFirst
) -> list[Tier]:
    """Return the manager's tiers, each with the lowest capacity over all ranks.

    Raises:
        ConfigError: groups with different numbers of layers by pipeline stage, and so different
            numbers of blocks per page. Or no room for the native blocks of a prompt.
    """
    layers = {rank: one.layers for rank, one in opened.items() if model.resume is not None}
    if len({tuple(each) for each in layers.values()}) > 1:
        raise ConfigError(
            f"the groups have {layers} layers by rank: with several groups all pipeline stages "
            "need equal numbers of layers in each"
        )
    counts = [min(rooms) for rooms in zip(*(each.rooms for each in opened.values()), strict=True)]
    below = settings.tiers or (Tier("host", bytes=1),)
    if model.resume is None:
        native.require_room(counts[0])
    slots = model.blocks * (native.parts + 1)
    first = Tier("gpu", blocks=slots, owner="engine", write="through")
    return [
        first,
        *(model.budget(tier, room) for tier, room in zip(below, counts, strict=True)),
    ]

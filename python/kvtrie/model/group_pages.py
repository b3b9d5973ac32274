"""GroupPages: divides the bytes of a tier among the groups of a model.

A tier consists of pages of equal size. A group divides a page into slots of its size on the tier:
in memory the bytes of a block in the tier's format, on a disk also its header pages and its share
of the manifest.
Invariant: manager, pools and stores all use these numbers, so a slot number means the same place
everywhere.
Cost: arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtrie._kvtrie import DiskStore, page_bytes
from kvtrie.errors import ConfigError
from kvtrie.model.group_layout import group_bytes
from kvtrie.settings.sizes import forgotten

if TYPE_CHECKING:
    from typing import Self

    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier

__all__ = ["LAYER_DIGEST", "GroupPages", "layer_digests", "slot_start"]

LAYER_DIGEST = 16
"""Bytes of a layer's digest in tables of kept memory."""

_MANY = 1 << 16  # number of blocks for the average bytes of a block


@dataclass(frozen=True, slots=True)
class GroupPages:
    """Pages of a tier, and the slots of each group in a page.

    Attributes:
        bytes: bytes of all pages, including a remainder.
        slots: bytes of a slot of each group.
    """

    bytes: int
    slots: tuple[int, ...]

    @classmethod
    def of(cls, model: ModelShape, tier: Tier, block_tokens: int) -> Self:
        """Return the pages of a tier.

        Args:
            model: a model with separate groups.
            tier: the tier. `blocks` counts blocks of all layers, and for an engine's or a remote
                tier also the same number of states.
            block_tokens: tokens of a block.

        Raises:
            ConfigError: the tier is smaller than a block of the first group, `blocks` is used for a
                model with states, or the layout is unsupported by groups.
        """
        slots = group_bytes(model, block_tokens, tier.layout)
        metadata_bytes = 0
        if tier.kind == "disk" and tier.path is not None:
            stores = [
                (len(one.layers), slot // len(one.layers), block_tokens)
                for one, slot in zip(model.groups, slots, strict=True)
            ]
            least = [DiskStore.bytes_for(0, *store) for store in stores]
            metadata_bytes = sum(least)
            slots = tuple(
                -(-(DiskStore.bytes_for(_MANY, *store) - empty) // _MANY)
                for store, empty in zip(stores, least, strict=True)
            )
        if tier.bytes is None:
            states = any(group.kind == "state" for group in model.groups)
            if states and tier.owner != "engine" and tier.kind != "remote":
                raise ConfigError(
                    f"tier {tier.kind!r} has blocks={tier.blocks}: a model with states wants bytes="
                )
            return cls((tier.blocks or 0) * sum(slots), slots)
        room = int(tier.bytes)
        if room < metadata_bytes + slots[0]:
            raise ConfigError(
                f"tier {tier.kind!r} has {room} bytes, a block of the first group takes "
                f"{metadata_bytes + slots[0]}{forgotten(room)}"
            )
        return cls(room - metadata_bytes, slots)

    @property
    def page(self) -> int:
        """Bytes of a page."""
        return page_bytes(list(self.slots))

    @property
    def count(self) -> int:
        """Number of pages."""
        return self.bytes // self.page

    @property
    def per_page(self) -> tuple[int, ...]:
        """Number of slots per page of each group."""
        return tuple(self.page // slot for slot in self.slots)


def slot_start(slot: int, page_bytes: int, slot_bytes: int) -> int:
    """Return the byte offset of a slot in pages of `page_bytes`, divided into slots."""
    page, place = divmod(slot, page_bytes // slot_bytes)
    return page * page_bytes + place * slot_bytes


def layer_digests(block: bytes | memoryview, layers: int) -> bytes:
    """Return the concatenated digests of layers of equal size."""
    import hashlib

    each = len(block) // layers
    parts = (block[at * each : (at + 1) * each] for at in range(layers))
    return b"".join(hashlib.blake2b(part, digest_size=LAYER_DIGEST).digest() for part in parts)

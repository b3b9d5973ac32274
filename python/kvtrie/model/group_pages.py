"""GroupPages: how the groups of a model share the bytes of one tier.

The room of a tier is pages of one size. A group cuts a page into slots of its size on that tier: in
memory the bytes of a block in the tier's format, on a disk also its header pages and its share of
the manifest.
Invariant: manager, pools and stores take their numbers from here, so that a slot number means the
same place to all of them. Cost: arithmetic.
"""

from __future__ import annotations

import hashlib
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
"""Bytes of the digest of a layer that tables of kept memory have."""

_MANY = 1 << 16  # blocks of which the bytes of one are the average


@dataclass(frozen=True, slots=True)
class GroupPages:
    """Pages of one tier, and the slots that each group cuts them into.

    Attributes:
        bytes: of all pages, and a rest.
        slots: bytes that a slot of each group takes.
    """

    bytes: int
    slots: tuple[int, ...]

    @classmethod
    def of(cls, model: ModelShape, tier: Tier, block_tokens: int) -> Self:
        """The pages of a tier.

        Args:
            model: its groups are kept apart.
            tier: the tier; with `blocks` it has the bytes of that number of blocks of all layers,
                an engine's or a remote tier also those of as many states.
            block_tokens: tokens of a block.

        Raises:
            ConfigError: less than a block of the first group, blocks of a model with states, or a
                layout that groups cannot have.
        """
        slots = group_bytes(model, block_tokens, tier.layout)
        books = 0
        if tier.kind == "disk" and tier.path is not None:
            stores = [
                (len(one.layers), slot // len(one.layers), block_tokens)
                for one, slot in zip(model.groups, slots, strict=True)
            ]
            least = [DiskStore.bytes_for(0, *store) for store in stores]
            books = sum(least)
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
        if room < books + slots[0]:
            raise ConfigError(
                f"tier {tier.kind!r} has {room} bytes, a block of the first group takes "
                f"{books + slots[0]}{forgotten(room)}"
            )
        return cls(room - books, slots)

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
        """Slots that each group cuts a page into."""
        return tuple(self.page // slot for slot in self.slots)


def slot_start(slot: int, page_bytes: int, slot_bytes: int) -> int:
    """Offset of a slot in pages that its group cuts into slots of some bytes."""
    page, place = divmod(slot, page_bytes // slot_bytes)
    return page * page_bytes + place * slot_bytes


def layer_digests(block: bytes | memoryview, layers: int) -> bytes:
    """Return the digests of a number of layers of one size, one after the other."""
    each = len(block) // layers
    parts = (block[at * each : (at + 1) * each] for at in range(layers))
    return b"".join(hashlib.blake2b(part, digest_size=LAYER_DIGEST).digest() for part in parts)

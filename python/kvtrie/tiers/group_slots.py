"""GroupSlots: the slots of a group of layers on a tier, and the places of their units in memory.

The groups of a model share the pages of a tier. A group cuts the pages that it has into its own
slots, and a slot is the layers of the group one after another. A *unit* is one of these layers:

```text
memory   | page 0: group 0      | page 1: group 1      | page 2: group 0 ...
          [slot 0][slot 1]...    [slot 1        ]
offset of a slot = slot // slots per page · page bytes + slot % slots per page · slot bytes
```

All layers of a model that keeps no groups apart are one group, and each of its pages is a slot.
Invariant: a tier's pages are those of the manager, which alone says whose a page is. Cost:
arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.model.group_layout import STATE
from kvtrie.model.group_pages import GroupPages
from kvtrie.model.layout import DTYPE_BYTES, Layout
from kvtrie.tiers import conversion
from kvtrie.tiers.block_format import BlockFormat

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier

__all__ = ["GroupSlots"]


@dataclass(frozen=True)
class GroupSlots:
    """The slots of one group.

    Attributes:
        block_format: format of a block.
        blocks: number of slots.
        page: bytes of a page.
        per_page: slots of a page.
        group: the group's number; None if all layers of the model are one group.
    """

    block_format: BlockFormat
    blocks: int
    page: int
    per_page: int = 1
    group: int | None = None

    @classmethod
    def of(cls, model: ModelShape, blocks: int, block_tokens: int, layout: Layout | None) -> Self:
        """Return the slots of all layers of a model.

        Args:
            model: the shape whose KV is kept; sizes are those of one rank.
            blocks: number of slots.
            block_tokens: tokens of a block.
            layout: layout of a layer of a block; None is kvtrie's own.

        Raises:
            ConfigError: layers that do not all keep the same KV.
        """
        form = BlockFormat.of(model, layout, block_tokens)
        return cls(form, blocks, form.layers * form.unit_bytes)

    @classmethod
    def of_tier(
        cls, model: ModelShape, tier: Tier, block_tokens: int, *, apart: bool
    ) -> tuple[Self, ...]:
        """Return the slots of each group on a tier.

        Args:
            model: the shape whose KV is kept; sizes are those of one rank.
            tier: its budget and layout.
            block_tokens: tokens of a block.
            apart: whether the groups of the model's layers are kept apart.

        Raises:
            ConfigError: a budget without room for a block or a page, a layout that groups cannot
                have, layer slots of several groups.
        """
        if not apart:
            return (cls.of(model, tier.room(model, block_tokens), block_tokens, tier.layout),)
        if tier.layer_slots:
            raise ConfigError(
                f"tier {tier.kind!r} has layer_slots: groups of layers are kept in slots of whole "
                "blocks"
            )
        pages = GroupPages.of(model, tier, block_tokens)
        if not pages.count:
            raise ConfigError(
                f"tier {tier.kind!r} has {pages.bytes} bytes for blocks, a page takes {pages.page}"
            )
        return tuple(
            cls(
                BlockFormat.of_group(model, group, block_tokens, tier.layout),
                pages.count * each,
                pages.page,
                each,
                group,
            )
            for group, each in enumerate(pages.per_page)
        )

    @classmethod
    def of_engine(cls, model: ModelShape, group: int, blocks: int, block_tokens: int) -> Self:
        """Return the slots of a group in an engine's tensors, which have no pages in common.

        Args:
            model: the shape whose KV is kept; sizes are those of one rank.
            group: which of its groups.
            blocks: number of slots.
            block_tokens: tokens of a block.
        """
        form = BlockFormat.of_group(model, group, block_tokens, None)
        return cls(form, blocks, form.layers * form.unit_bytes, group=group)

    @property
    def number(self) -> int:
        """The number of the group on its tier."""
        return self.group or 0

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, which the groups of a tier share."""
        return self.blocks // self.per_page * self.page

    @cached_property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        return self.block_format.unit_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.block_format.layers * self.unit_bytes

    @cached_property
    def even(self) -> bool:
        """Whether all units are one after another: no page has a rest after its last one."""
        return self.page == self.per_page * self.slot_bytes

    @cached_property
    def wide(self) -> int:
        """Bytes of the widest rows of memory at which every unit starts."""
        return math.gcd(self.page, self.unit_bytes)

    def rows(self, units: NDArray[np.int64], wide: int) -> NDArray[np.int64]:
        """Return all rows of units, int64 `(n,)`, in memory of rows of `wide` bytes."""
        layers = self.block_format.layers
        slots, layer = np.divmod(units, layers)
        pages, inside = np.divmod(slots, self.per_page)
        first = pages * self.page + (inside * layers + layer) * self.unit_bytes
        return (first[:, None] // wide + np.arange(self.unit_bytes // wide)).reshape(-1)

    def check_memory(self, model: ModelShape) -> None:
        """Raise unless memory can keep KV of a model in these slots.

        Raises:
            ConfigError: an order of axes other than kvtrie's own, a format that KV of the model
                cannot be converted to, slots at places where their numbers cannot be.
        """
        fmt, layout = self.block_format, self.block_format.layout
        if layout.order != Layout().order or layout.strides is not None:
            raise ConfigError(f"pools keep the order {Layout().order}, not {layout.order}")
        if layout.opaque == STATE:
            return
        dtype = model.dtype if self.group is None else model.form(self.group)[-1]
        plain = replace(layout, dtype=dtype, scales="none")
        if layout != plain:
            conversion.check(replace(fmt, layout=plain), fmt)
        elif self.wide % (width := DTYPE_BYTES[dtype]) and not layout.opaque:
            raise ConfigError(
                f"slots of {self.slot_bytes} bytes of group {self.group} in pages of "
                f"{self.page} bytes do not start at multiples of {width} bytes, the size of a "
                f"{dtype}"
            )

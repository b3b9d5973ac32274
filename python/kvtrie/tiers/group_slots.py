"""GroupSlots: the slots of a group of layers on a tier, and the places of their units.

The groups of a model share the pages of a tier. A group divides its pages into slots, and a slot
consists of the layers of the group in sequence. A *unit* is one of these layers:

```text
memory   | page 0: group 0      | page 1: group 1      | page 2: group 0 ...
          [slot 0][slot 1]...    [slot 1        ]
offset of a slot = slot // slots per page · page bytes + slot % slots per page · slot bytes
```

Without separate groups, all layers of a model are a single group, and each of its pages is a slot.
Invariant: a tier's pages are the manager's, and only the manager decides their owners.
Cost: arithmetic.
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
    """The slots of a group.

    Attributes:
        block_format: format of a block.
        blocks: number of slots.
        page: bytes of a page.
        per_page: slots of a page.
        group: the group's number, or None if all layers of the model are a single group.
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
            model: the shape of the model, with the sizes of a rank.
            blocks: number of slots.
            block_tokens: tokens of a block.
            layout: layout of a layer of a block, or None for kvtrie's own.

        Raises:
            ConfigError: the layers do not all keep the same KV.
        """
        form = BlockFormat.of(model, layout, block_tokens)
        return cls(form, blocks, form.layers * form.unit_bytes)

    @classmethod
    def of_tier(
        cls, model: ModelShape, tier: Tier, block_tokens: int, *, separate_groups: bool
    ) -> tuple[Self, ...]:
        """Return the slots of each group on a tier.

        Args:
            model: the shape of the model, with the sizes of a rank.
            tier: its budget and layout.
            block_tokens: tokens of a block.
            separate_groups: whether the model's layer groups are separate.

        Raises:
            ConfigError: a budget without room for a block or a page, a layout unsupported by
                groups, or layer slots with several groups.
        """
        if not separate_groups:
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
        """Return the slots of a group in an engine's tensors, without shared pages.

        Args:
            model: the shape of the model, with the sizes of a rank.
            group: the number of the group.
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
        """Bytes of all pages shared by the groups of a tier."""
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
        """Whether all units are contiguous, without a remainder in each page."""
        return self.page == self.per_page * self.slot_bytes

    @cached_property
    def wide(self) -> int:
        """Row width in bytes of the widest memory rows aligned with all units."""
        return math.gcd(self.page, self.unit_bytes)

    def rows(self, units: NDArray[np.int64], wide: int) -> NDArray[np.int64]:
        """Return all rows of units, int64 `(n,)`, in memory with rows of `wide` bytes."""
        layers = self.block_format.layers
        slots, layer = np.divmod(units, layers)
        pages, inside = np.divmod(slots, self.per_page)
        first = pages * self.page + (inside * layers + layer) * self.unit_bytes
        return (first[:, None] // wide + np.arange(self.unit_bytes // wide)).reshape(-1)

    def check_memory(self, model: ModelShape) -> None:
        """Raise unless memory can keep KV of a model in these slots.

        Raises:
            ConfigError: a different axis order than kvtrie's, a format without conversion from the
                model's, or slots not aligned to the size of their numbers.
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

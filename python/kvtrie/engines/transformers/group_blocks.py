"""GroupBlocks: the blocks of rows in one group of layers of the first tier.

Invariant: a slot that a method returns is one that the row's lease holds. Cost: a look at the
lease's block table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from kvtrie.errors import InvariantError, TransferError
from kvtrie.tiers import parts_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from kvtrie.engines.transformers.rows import Row
    from kvtrie.tiers import Pool
    from kvtrie.transfer import Executor

__all__ = ["GroupBlocks"]

_NOTHING = 2**32 - 1


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """One group of layers after the first.

    Attributes:
        number: which of the model's groups.
        layers: its layers of the model, ascending.
        window: tokens that its sliding window spans; 0 for a state.
        pool: its slots of the first tier.
    """

    number: int
    layers: tuple[int, ...]
    window: int
    pool: Pool

    @classmethod
    def of(cls, executor: Executor) -> list[Self]:
        """The groups after the first, of an executor whose tiers keep them apart."""
        pools = cast("tuple[Pool, ...]", parts_of(executor.pools[0]))
        groups = zip(executor.manager.model.groups, pools, strict=True)
        return [
            cls(number, group.layers, group.window, pool)
            for number, (group, pool) in enumerate(groups)
            if number
        ]

    def taken(self, row: Row, blocks: range) -> list[tuple[int, int]]:
        """The blocks of a range that have a slot in the group, with their slots."""
        slots = row.lease.slots(0, self.number)[blocks.start : blocks.stop].tolist()
        return [one for one in zip(blocks, slots, strict=False) if one[1] != _NOTHING]

    def last(self, row: Row, tokens: int) -> list[int]:
        """The slots of what a resume needs after some tokens of a row: a window, or one state.

        Raises:
            TransferError: the row's match is shorter now.
        """
        size = self.pool.block_tokens
        border = tokens // size
        count = min(border, -(-(self.window - 1) // size) if self.window else 1)
        slots = row.lease.slots(0, self.number)[border - count : border].tolist()
        if len(slots) < count or _NOTHING in slots:
            lacks = f"group {self.number} lacks a block of {count} before {border}"
            if row.lease.tokens < tokens:
                raise TransferError(f"{lacks}: a load has failed")
            raise InvariantError(lacks)
        return slots

    def tokens(self, slots: Sequence[int], index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `(1, heads, tokens, dim)` of blocks in one layer of the group."""
        size, device = self.pool.block_tokens, self.pool.device
        units = torch.tensor(slots, device=device, dtype=torch.int64) * len(self.layers) + index
        offsets = torch.arange(size, device=device).repeat(len(slots))
        keys, values = self.pool.gather(units.repeat_interleave(size), offsets)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

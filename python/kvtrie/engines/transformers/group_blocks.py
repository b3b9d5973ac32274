"""GroupBlocks: blocks of rows in a group of layers of the first tier.

Invariant: the row's lease holds every returned slot. Cost: a read of the lease's block table.
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
    """A group of layers after the first.

    Attributes:
        number: index of the group in the model.
        layers: layers of the model in the group, ascending.
        window: tokens of the sliding window, 0 for a group of states.
        pool: slots of the group in the first tier.
    """

    number: int
    layers: tuple[int, ...]
    window: int
    pool: Pool

    @classmethod
    def of(cls, executor: Executor) -> list[Self]:
        """Return all groups after the first, for an executor with separate groups."""
        pools = cast("tuple[Pool, ...]", parts_of(executor.pools[0]))
        groups = zip(executor.manager.model.groups, pools, strict=True)
        return [
            cls(number, group.layers, group.window, pool)
            for number, (group, pool) in enumerate(groups)
            if number
        ]

    def taken(self, row: Row, blocks: range) -> list[tuple[int, int]]:
        """Return the blocks of a range with a slot in the group, as pairs with their slots."""
        slots = row.lease.slots(0, self.number)[blocks.start : blocks.stop].tolist()
        return [one for one in zip(blocks, slots, strict=False) if one[1] != _NOTHING]

    def last(self, row: Row, tokens: int) -> list[int]:
        """Return the slots for resuming a row after `tokens`: of a window, or of a single state.

        Raises:
            TransferError: a failed load has shortened the match.
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
        """Return K and V `(1, heads, tokens, dim)` of blocks in a layer of the group."""
        size, device = self.pool.block_tokens, self.pool.device
        units = torch.tensor(slots, device=device, dtype=torch.int64) * len(self.layers) + index
        offsets = torch.arange(size, device=device).repeat(len(slots))
        keys, values = self.pool.gather(units.repeat_interleave(size), offsets)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

"""Step: maps logical positions of a forward pass to rows of a pool.

Built once per pass for all layers, so a layer's `update` is one scatter and one gather.
Invariant: only rows computed by the pass are written. Shared rows are only read.
Cost: `layers × batch × keys` integers per pass. A gather copies the keys and values it returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.tiers import Pool

__all__ = ["Step"]


@dataclass(slots=True)
class Step:
    """Pool addresses of a pass: new rows of K and V to write, and rows visible to queries.

    Attributes:
        pool: the memory of the first tier.
        keys: number of keys visible to every row of the batch.
        units: int64 `(layers, batch × keys)`: the unit of each key.
        offsets: int64 `(batch × keys,)`: the offset of each key in its block.
        sources: per layer, indices of the new rows to write, from `batch × queries`.
        targets: per layer, the unit and offset of each written row, int64 `(2, written)`.
    """

    pool: Pool
    keys: int
    units: torch.Tensor
    offsets: torch.Tensor
    sources: Sequence[torch.Tensor]
    targets: Sequence[torch.Tensor]

    @classmethod
    def of_columns(
        cls,
        pool: Pool,
        tables: Sequence[torch.Tensor],
        *,
        pads: Sequence[int],
        cached: Sequence[int],
        past: int,
        queries: int,
    ) -> Step:
        """Return the step for appending `queries` columns to a left-padded batch.

        Args:
            pool: the memory of the first tier.
            tables: per row, its units, int64 `(layers, blocks)`.
            pads: per row, the number of columns before its first token.
            cached: per row, the number of tokens with KV. They are not written again.
            past: columns before the new ones.
            queries: new columns.
        """
        device, keys = pool.device, past + queries
        pad = torch.tensor(pads, device=device)[:, None]
        positions = (torch.arange(keys, device=device) - pad).clamp_(min=0)
        block = positions // pool.block_tokens
        offsets = positions % pool.block_tokens
        units = torch.stack(
            [table[:, where] for table, where in zip(tables, block, strict=True)], dim=1
        )
        fresh = torch.arange(past, keys, device=device) - pad
        counts = torch.tensor(cached, device=device)[:, None]
        source = ((fresh >= 0) & (fresh >= counts)).flatten().nonzero().flatten()
        place = offsets[:, past:].flatten()[source]
        written = units[:, :, past:].flatten(1)[:, source]
        return cls(
            pool,
            keys,
            units.flatten(1),
            offsets.flatten(),
            [source] * pool.layers,
            [torch.stack([unit, place]) for unit in written],
        )

    @classmethod
    def of_positions(
        cls,
        pool: Pool,
        table: torch.Tensor,
        positions: torch.Tensor,
        per_layer: Sequence[torch.Tensor],
    ) -> Step:
        """Return the step for computing single positions of a sequence.

        Args:
            pool: the memory of the first tier.
            table: units of the sequence, int64 `(layers, blocks)`.
            positions: int64 `(queries,)`, ascending: the positions to compute.
            per_layer: for each layer, the positions with missing KV.
        """
        keys = int(positions[-1]) + 1
        logical = torch.arange(keys, device=pool.device)
        block, offsets = logical // pool.block_tokens, logical % pool.block_tokens
        units = table[:, block]
        sources = [torch.isin(positions, wanted).nonzero().flatten() for wanted in per_layer]
        targets = [
            torch.stack([units[layer, at], offsets[at]])
            for layer, at in enumerate(positions[source] for source in sources)
        ]
        return cls(pool, keys, units, offsets, sources, targets)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new K and V `(batch, heads, queries, dim)` of a layer."""
        source, (unit, offset) = self.sources[layer], self.targets[layer]
        if len(source):
            self.pool.scatter(
                unit,
                offset,
                keys.transpose(1, 2).flatten(0, 1)[source],
                values.transpose(1, 2).flatten(0, 1)[source],
            )

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer in logical order, `(batch, heads, keys, dim)`."""
        keys, values = self.pool.gather(self.units[layer], self.offsets)
        shape = (-1, self.keys, *keys.shape[1:-1])
        return (
            keys.view(*shape, keys.shape[-1]).transpose(1, 2),
            values.view(*shape, values.shape[-1]).transpose(1, 2),
        )

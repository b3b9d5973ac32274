"""WindowKVCache: the rows of a layer with a window of visible tokens.

The layer keeps the newest tokens of its window, like the model itself, without a policy.
Invariant: rows are in the order of their positions, and exact. Cost: a copy of K and V of the
window per step.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

import torch

from kvtrie.errors import ConfigError
from kvtrie.kernels import attend_ordered
from kvtrie.selective.buffered import KVCacheWithBuffers
from kvtrie.selective.buffers import DefaultBuffers, Place

__all__ = ["WindowKVCache"]

_MOST = 2**31 - 1


class WindowKVCache(KVCacheWithBuffers):
    """The newest tokens of a layer with a window.

    Args:
        place: batch, KV heads, tokens of the window and numbers per head.
        query_heads: number of query heads of the model's layer.
        tmp_array_limit_gb: bound of attention's temporary arrays, in 10^9 bytes.
    """

    def __init__(self, place: Place, query_heads: int, *, tmp_array_limit_gb: float = 3.0) -> None:
        super().__init__(DefaultBuffers(place), query_heads, tmp_array_limit_gb=tmp_array_limit_gb)
        self.span = self.cache_length

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Read the next m tokens and attend, see `KVCache.forward`."""
        new = self._checked(query, key, value)
        if not self.input_pos:
            self.prefill_length = new
        keys, values = self.keys_values()
        keys, values = torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2)
        out = attend_ordered(
            query,
            keys,
            values,
            span=self.span,
            input_pos=self.input_pos,
            first=self.first,
            scale=self.scale,
            terms=self.terms,
            tmp_array_limit_gb=self.tmp_array_limit_gb,
        )
        self.input_pos += new
        self.filled = min(self.cache_length, keys.shape[2])
        self.evicted = self.input_pos > self.filled
        rows = torch.arange(self.filled, device=self.place.device)
        rows = rows.expand(self.batch, self.kv_heads, -1)
        positions = rows + (self.input_pos - self.filled)
        self._put(rows, positions, keys[:, :, -self.filled :], values[:, :, -self.filled :])
        self._log(new, None)
        return out

    def step_at(self, input_pos: int) -> int:
        """Return a very large number: steps of any length attend to their own tokens."""
        del input_pos
        return _MOST

    def next_positions(self, new: int) -> torch.Tensor:
        """Raise an error: no row is ever chosen.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"a layer with a window of {self.span} chooses no rows for {new} tokens")

    def check_shrink(self, cache_length: int) -> None:
        """Accept any number of rows: the window stays."""

    def shrink(self, cache_length: int) -> None:
        """Keep the window."""

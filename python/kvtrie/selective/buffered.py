"""KVCacheWithBuffers: a layer's cache with rows in a buffer strategy, the base of policies.

Invariant: K and V, position and the policy's per-row numbers of a token are in the same row, also
after selecting, cropping, arranging and restoring. Cost: a write of the new rows per step, and
copies of all rows when they are rearranged.
"""

# pyright: reportUnknownMemberType=false
# (torch leaves parts untyped)

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from kvtrie.errors import ConfigError
from kvtrie.selective.buffers import take_rows
from kvtrie.selective.cache import DefaultKVCache

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtrie.selective.arguments import CacheArguments
    from kvtrie.selective.buffers import KVCacheBuffers

__all__ = ["KVCacheWithBuffers"]


class KVCacheWithBuffers(DefaultKVCache):
    """A cache with rows in a buffer strategy.

    Per-row numbers of a policy (`_state`) move with their rows. See `DefaultKVCache` for the
    remaining arguments.

    Args:
        buffers: storage of K and V.
    """

    def __init__(
        self,
        buffers: KVCacheBuffers,
        query_heads: int,
        arguments: CacheArguments | None = None,
        *,
        scale: float | None = None,
        tmp_array_limit_gb: float = 3.0,
    ) -> None:
        super().__init__(
            buffers.place,
            query_heads,
            arguments,
            scale=scale,
            tmp_array_limit_gb=tmp_array_limit_gb,
        )
        self.buffers = buffers
        self._state: dict[str, torch.Tensor] = {}

    def keys_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the filled rows, valid until the next step of any layer."""
        return self.buffers.seen(self.filled)

    def _rows_seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.buffers.seen(self.filled)

    def _end_step(self) -> None:
        self.buffers.end_step()

    def _fill(
        self, rows: torch.Tensor, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self._put(rows, positions, key, value)

    def _overwrite(self, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        new = key.shape[2]
        positions = torch.arange(self.input_pos, self.input_pos + new, device=rows.device)
        self._put(rows, positions.expand_as(rows), key, value)

    def _put(
        self, rows: torch.Tensor, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.buffers.write(rows, key, value)
        self._token_pos.scatter_(2, rows, positions)
        if self._state:
            arrived = self._arrivals(key, value)
            for name, plane in self._state.items():
                if name in arrived:
                    plane.scatter_(2, rows, arrived[name])
                else:
                    plane.scatter_(2, rows, 0.0)

    def _arrivals(self, key: torch.Tensor, value: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the initial per-row numbers of new tokens unless they are 0."""
        del key, value
        return {}

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        for plane in self._state.values():
            plane.zero_()

    def crop(self, tokens: int) -> None:
        """Forget the last tokens. Their contribution to scores remains.

        Raises:
            ConfigError: more tokens than were read, or a cache with evicted rows.
        """
        self.check_crop(tokens)
        self.input_pos -= tokens
        self.filled -= tokens
        self.prefill_length = min(self.prefill_length, self.input_pos)
        if not self.input_pos:
            self.reset()

    def check_crop(self, tokens: int) -> None:
        """Check whether `crop` is possible.

        Raises:
            ConfigError: more tokens than were read, or a cache with evicted rows.
        """
        if not 0 <= tokens <= self.input_pos:
            raise ConfigError(f"cannot crop by {tokens} of {self.input_pos} tokens")
        if self.evicted and tokens:
            raise ConfigError(
                f"cannot crop by {tokens} of {self.input_pos} tokens: rows that made room for them "
                f"in a cache of {self.cache_length} are gone"
            )

    def select(self, rows: torch.Tensor) -> None:
        """Replace the batch by the batch rows at these indices, int64 `(n,)`."""
        rows = rows.to(self.place.device)

        def taken(plane: torch.Tensor) -> torch.Tensor:
            return plane.index_select(0, rows)

        self.place = self.place.resized(batch=len(rows))
        self.batch = len(rows)
        self.buffers.rebuilt(taken, self.place)
        self._token_pos = taken(self._token_pos)
        self._state = {name: taken(plane) for name, plane in self._state.items()}
        self.first = None if self.first is None else taken(self.first)
        self._selected(rows)

    def _selected(self, rows: torch.Tensor) -> None:
        """Apply `select` to further data per batch row."""

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Return the full state of the cache: tensors and numbers by name."""
        rows = {str(at): plane[:, :, : self.filled] for at, plane in enumerate(self.buffers.planes)}
        own = {f"state {name}": plane[:, :, : self.filled] for name, plane in self._state.items()}
        tensors = {**rows, **own, "token_pos": self.token_pos}
        if self.first is not None:
            tensors["first"] = self.first
        names = ("input_pos", "filled", "evicted", "prefill_length", "cache_length")
        return tensors, {name: int(getattr(self, name)) for name in names}

    def load_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, int]) -> None:
        """Restore the `state` of a cache of the same kind and sizes."""
        self.reset()
        filled = numbers["filled"]
        planes = list(self.buffers.planes)
        for at, plane in enumerate(planes):
            plane[:, :, :filled] = tensors[str(at)]
        self.buffers.planes = planes
        for name, plane in self._state.items():
            plane[:, :, :filled] = tensors[f"state {name}"]
        self._token_pos[:, :, :filled] = tensors["token_pos"]
        self.first = tensors.get("first")
        self.filled, self.input_pos = filled, numbers["input_pos"]
        self.evicted, self.prefill_length = bool(numbers["evicted"]), numbers["prefill_length"]

    def arranged(self, order: torch.Tensor, cache_length: int) -> None:
        """Keep the rows `order`, int64 `(batch, kv_heads, n)`, in this order, in fewer rows."""
        count = order.shape[2]

        def taken(plane: torch.Tensor) -> torch.Tensor:
            made = plane.new_zeros((*plane.shape[:2], cache_length, *plane.shape[3:]))
            made[:, :, :count] = take_rows(plane, order)
            return made

        self.place = self.place.resized(rows=cache_length)
        self.evicted = self.evicted or count < self.filled
        self.cache_length, self.filled = cache_length, count
        self.buffers.rebuilt(taken, self.place)
        self._token_pos = taken(self._token_pos)
        self._state = {name: taken(plane) for name, plane in self._state.items()}

    @abstractmethod
    def shrink(self, cache_length: int) -> None:
        """Reduce the number of rows. The policy chooses the rows to evict.

        Raises:
            ConfigError: more rows than now, or fewer than the policy's arguments need.
        """

    def check_shrink(self, cache_length: int) -> None:
        """Check whether `shrink` is possible.

        Raises:
            ConfigError: more rows than now, or fewer than the policy's arguments need.
        """
        if not 0 < cache_length <= self.cache_length:
            raise ConfigError(
                f"cannot shrink {self.cache_length} rows to {cache_length}: 1 to "
                f"{self.cache_length} wanted"
            )
        self.arguments.check(type(self).accepts, type(self).__name__, cache_length)

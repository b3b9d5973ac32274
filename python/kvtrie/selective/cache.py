"""KVCache: a layer of a selective cache, and the common step of all policies.

`KVCache` is the bare interface. `DefaultKVCache` implements a step, with attention separated from
rows and buffers. `KVCacheWithBuffers` (`buffered`) keeps rows in a buffer strategy.
Invariant: a step overwrites rows, attends over all rows, and then gives the weights to the policy.
A refused step has changed nothing. Cost: attention over the rows, and the policy's cost.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from kvtrie.errors import ConfigError
from kvtrie.kernels import attend, attend_causal, attend_ordered, attend_without_weights
from kvtrie.kernels.attention import fits
from kvtrie.selective.arguments import CacheArguments

if TYPE_CHECKING:
    from kvtrie.kernels import Terms
    from kvtrie.selective.buffers import Place
    from kvtrie.selective.replay import AttnWeightsReplayLog

__all__ = ["DefaultKVCache", "KVCache"]


class KVCache(ABC):
    """The rows of a layer for a batch.

    Attributes:
        input_pos: number of tokens read so far, including padding: the next token's position.
        first: start of each batch row, int64 `(batch,)`. None without padding.
        scale: factor of the products of queries and keys. None takes `dim ** -0.5`.
        terms: additions of the model's layer to the softmax, None if there are none.
        span: tokens visible to a query in a layer with a window, including its own. None if it
            attends to all kept rows.
        replay_log: log of decisions. None, the initial value, records nothing.
    """

    input_pos: int
    scale: float | None
    first: torch.Tensor | None
    terms: Terms | None = None
    span: int | None = None
    replay_log: AttnWeightsReplayLog | None

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Call `forward`."""
        return self.forward(query, key, value)

    @abstractmethod
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Read the next m tokens and attend.

        Args:
            query: `(batch, query_heads, m, dim)`, rotated.
            key: `(batch, kv_heads, m, dim)`, rotated.
            value: like `key`.

        Returns:
            `(batch, query_heads, m, dim)`.

        Raises:
            ConfigError: a step too long, wrong shapes, or NaN. Nothing has changed then.
        """

    @property
    @abstractmethod
    def token_pos(self) -> torch.Tensor:
        """int64 `(batch, kv_heads, n)`: the positions of the tokens in the n filled rows."""

    @property
    @abstractmethod
    def scores(self) -> torch.Tensor:
        """fp32 `(batch, kv_heads, n)`: accumulated attention of the filled rows."""

    @abstractmethod
    def keys_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V `(batch, kv_heads, n, dim)` of the filled rows for the next attention."""

    def attended_first(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, limit_gb: float
    ) -> torch.Tensor:
        """Return the output of the first step, plain causal attention to its own tokens."""
        if self.terms is None:
            return attend_causal(
                query,
                key,
                value,
                first=self.first,
                scale=self.scale,
                tmp_array_limit_gb=limit_gb,
            )
        return attend_ordered(
            query,
            key,
            value,
            first=self.first,
            scale=self.scale,
            terms=self.terms,
            tmp_array_limit_gb=limit_gb,
        )

    @property
    @abstractmethod
    def largest_step(self) -> int:
        """Largest number of tokens of the next step, 0 if the cache accepts no more tokens."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens."""


class DefaultKVCache(KVCache):
    """A cache with a step of attention, rows and a policy.

    Args:
        place: batch, KV heads, rows and numbers per head, with format and device.
        query_heads: number of query heads of the model's layer.
        arguments: arguments of the policy.
        scale: factor of the products of queries and keys. None takes `dim ** -0.5`.

    Raises:
        ConfigError: numbers out of range, or arguments missing in the policy.
    """

    accepts: ClassVar[frozenset[str]] = frozenset()
    """Names of the policy's arguments."""

    update_requires_attn_weights: ClassVar[bool] = False
    """Whether the policy uses attention weights."""

    def __init__(
        self,
        place: Place,
        query_heads: int,
        arguments: CacheArguments | None = None,
        *,
        scale: float | None = None,
        tmp_array_limit_gb: float = 3.0,
    ) -> None:
        self.batch, self.kv_heads, self.cache_length, self.head_dim = place.shape
        if query_heads % self.kv_heads:
            raise ConfigError(f"{query_heads} query heads do not divide over {self.kv_heads} heads")
        self.query_heads = query_heads
        self.place = place
        self.arguments = CacheArguments() if arguments is None else arguments
        self.arguments.check(type(self).accepts, type(self).__name__, self.cache_length)
        self.arguments.note(self.cache_length)
        self.scale = scale
        self.tmp_array_limit_gb = tmp_array_limit_gb
        self.input_pos = 0
        self.replay_log = None
        self.filled = 0
        self.evicted = False
        self.prefill_length = 0
        self.first = None
        self._token_pos = torch.zeros(place.shape[:3], dtype=torch.int64, device=place.device)

    # ------------------------------------------------------------------ what subclasses supply

    @abstractmethod
    def next_positions(self, new: int) -> torch.Tensor:
        """Return the rows to overwrite by the next `new` tokens, int64 `(batch, kv_heads, new)`.

        Called only after all rows are filled.
        """

    @abstractmethod
    def _overwrite(self, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write K, V and positions of the new tokens, or of tokens leaving a ring, to rows."""

    @abstractmethod
    def _rows_seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the filled rows during a step."""

    @abstractmethod
    def _end_step(self) -> None:
        """End a step."""

    def _update(self, query: torch.Tensor, weights: torch.Tensor | None, *, prefill: bool) -> None:
        """Update the policy from queries and weights per KV head, fp32 `(batch, kv_heads, n)`."""

    # ------------------------------------------------------------------------------ the step

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Read the next m tokens and attend, see `KVCache.forward`."""
        new = self._checked(query, key, value)
        prefill = self.input_pos == 0
        if self.filled < self.cache_length:
            rows = torch.arange(self.filled, self.filled + new, device=self.place.device)
            rows = rows.expand(self.batch, self.kv_heads, new)
            positions = torch.arange(self.input_pos, self.input_pos + new, device=rows.device)
            self._fill(rows, positions.expand_as(rows), key, value)
            self.filled += new
            self._log(new, None)
        else:
            rows = self.next_positions(new)
            self._overwrite(rows, key, value)
            self.evicted = True
            self._log(new, rows)
        if prefill:
            self.prefill_length = new
            out = self.attended_first(query, key, value, self.tmp_array_limit_gb)
            weights = None
        else:
            out, weights = self._attend(query)
        self.input_pos += new
        self._update(query, weights, prefill=prefill)
        self._end_step()
        return out

    def _attend(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and the weights per KV head if the policy uses them."""
        keys, values = self._rows_seen()
        if not self.update_requires_attn_weights:
            out = attend_without_weights(
                query,
                keys,
                values,
                token_pos=self.token_pos,
                input_pos=self.input_pos,
                first=self.first,
                scale=self.scale,
                terms=self.terms,
                tmp_array_limit_gb=self.tmp_array_limit_gb,
            )
            return out, None
        out, weights = attend(
            query,
            keys,
            values,
            token_pos=self.token_pos,
            input_pos=self.input_pos,
            first=self.first,
            scale=self.scale,
            terms=self.terms,
            return_attn_weights=True,
            tmp_array_limit_gb=self.tmp_array_limit_gb,
        )
        return out, None if weights is None else self._per_kv_head(weights)

    def _per_kv_head(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the mean over each KV head's query heads."""
        return weights.unflatten(1, (self.kv_heads, -1)).mean(dim=2)

    @abstractmethod
    def _fill(
        self, rows: torch.Tensor, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write tokens to empty rows."""

    def _log(self, new: int, rows: torch.Tensor | None) -> None:
        if self.replay_log is not None:
            self.replay_log.note(new, rows)

    # -------------------------------------------------------------------------- state

    @property
    def token_pos(self) -> torch.Tensor:
        """Positions of the tokens in the filled rows."""
        return self._token_pos[:, :, : self.filled]

    @property
    def scores(self) -> torch.Tensor:
        """Zeros: this policy accumulates no attention."""
        return torch.zeros_like(self.token_pos, dtype=torch.float32)

    @property
    def largest_step(self) -> int:
        """Largest number of tokens of the next step."""
        return self.step_at(self.input_pos)

    def step_at(self, input_pos: int) -> int:
        """Return the largest number of tokens of a step after `input_pos` tokens."""
        if self.evicted or input_pos >= self.cache_length:
            return self._largest_when_full()
        room, most = self.cache_length - input_pos, self.arguments.max_chunk_size
        return room if most is None or input_pos == 0 else min(room, most)

    def _largest_when_full(self) -> int:
        most = self.arguments.max_chunk_size
        room = self.cache_length - self.arguments.grace_period - self.arguments.sinks
        return room if most is None else min(room, most)

    def reset(self) -> None:
        """Forget all tokens."""
        self.input_pos = self.filled = self.prefill_length = 0
        self.evicted = False
        self.first = None

    def pad(self, first: torch.Tensor | None) -> None:
        """Set the start of each batch row, int64 `(batch,)`, before the first step."""
        self.first = None if first is None else first.to(self.place.device)

    def _checked(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
        new = key.shape[2] if key.dim() == 4 else 0  # noqa: PLR2004 - four axes
        expected = (self.batch, self.query_heads, new, self.head_dim)
        given = (self.batch, self.kv_heads, new, self.head_dim)
        if (query.shape, key.shape, value.shape) != (expected, given, given) or not new:
            raise ConfigError(
                f"queries {tuple(query.shape)}, keys {tuple(key.shape)}, values "
                f"{tuple(value.shape)}: {expected[:2]} and {given[:2]} by tokens by "
                f"{self.head_dim} wanted"
            )
        if key.device.type == "cpu":  # elsewhere the check would wait for the device
            for name, each in (("queries", query), ("keys", key), ("values", value)):
                total = each.detach().sum(dtype=torch.float32)
                if not bool(total.isfinite()) and not bool(each.isfinite().all()):
                    count = int((~each.isfinite()).sum())
                    raise ConfigError(f"{count} of {each.numel()} numbers in {name} are not finite")
        masked = self.first is not None or (
            self.input_pos and not self.update_requires_attn_weights
        )
        # GPU kernels compute weights without temporary arrays.
        if masked or (self.update_requires_attn_weights and key.device.type == "cpu"):
            rows = min(self.cache_length, self.filled + new)
            fits(4 * self.batch * self.query_heads * rows, self.tmp_array_limit_gb)
        most = self.largest_step
        if new > most:
            raise ConfigError(self._too_long(new, most))
        return new

    def _too_long(self, new: int, most: int) -> str:
        if self.filled < self.cache_length and new > self.cache_length - self.filled:
            return (
                f"a step of {new} tokens after {self.filled} in a cache of {self.cache_length} "
                f"rows: no step may go beyond the filling, so at most {most} come first"
            )
        return (
            f"a step of {new} tokens, at most {most} wanted: the cache has {self.cache_length} "
            f"rows, a grace period of {self.arguments.grace_period}, {self.arguments.sinks} sinks "
            f"and max_chunk_size {self.arguments.max_chunk_size}"
        )

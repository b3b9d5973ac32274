"""Policies specified in `docs/selective.md`: the choice of rows to overwrite.

Invariant: they follow the specified rules. The tests replay the rules row by row with an oracle.
Cost: see `AttnWeightsKVCache`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from kvtrie.errors import ConfigError
from kvtrie.selective.attn_weights import AttnWeightsKVCache, Rows
from kvtrie.selective.buffered import KVCacheWithBuffers

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DenseKVCache",
    "H2OKVCache",
    "H2OOriginalKVCache",
    "LastRecentlyInsertedKVCache",
    "QuantizedH2OKVCache",
    "QuantizedVLengthH2OKVCache",
    "VLengthH2OKVCache",
]

_MIX = 0.5  # weight of the score against the quantisation error


class DenseKVCache(KVCacheWithBuffers):
    """Keeps all tokens up to the number of rows and refuses more."""

    def next_positions(self, new: int) -> torch.Tensor:
        """Raise an error: no row is ever overwritten.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(self._too_long(new, 0))

    def _largest_when_full(self) -> int:
        return 0

    def _too_long(self, new: int, most: int) -> str:
        del most
        return (
            f"a sequence of {self.input_pos + new} tokens is longer than the {self.cache_length} "
            "rows of a dense cache: give it more rows, or a policy that evicts"
        )

    def check_shrink(self, cache_length: int) -> None:
        """Refuse fewer rows than tokens."""
        super().check_shrink(cache_length)
        if cache_length < self.filled:
            raise ConfigError(
                f"a dense cache keeps all of its {self.filled} tokens: it cannot shrink to "
                f"{cache_length} rows"
            )

    def shrink(self, cache_length: int) -> None:
        """Remove empty rows."""
        self.check_shrink(cache_length)
        rows = torch.arange(self.filled, device=self.place.device)
        self.arranged(rows.expand(self.batch, self.kv_heads, -1), cache_length)


class LastRecentlyInsertedKVCache(KVCacheWithBuffers):
    """Keeps the newest tokens and the first `sinks` or `init_grace_tokens` tokens."""

    accepts: ClassVar[frozenset[str]] = frozenset({"init_grace_tokens", "sinks"})

    @property
    def _fixed(self) -> int:
        return max(self.arguments.init_grace_tokens, self.arguments.sinks)

    def _largest_when_full(self) -> int:
        return self.cache_length - self._fixed

    def pad(self, first: torch.Tensor | None) -> None:
        """Set the start of each batch row.

        Raises:
            ConfigError: padding and sinks do not fit into the rows.
        """
        super().pad(first)
        most = 0 if first is None else int(first.max())
        if self._fixed and most + self._fixed > self.cache_length:
            raise ConfigError(
                f"{most} columns of padding and {self._fixed} sinks do not fit into "
                f"{self.cache_length} rows"
            )

    def next_positions(self, new: int) -> torch.Tensor:
        """Return the least recently written rows."""
        return self._ring_rows(self.input_pos - self.cache_length, new, self.cache_length)

    def _ring_rows(self, start: int, count: int, cache_length: int) -> torch.Tensor:
        """Return the rows of places `start`, `start + 1`, ... in the ring, without the sinks."""
        ring = cache_length - self._fixed
        places = (start + torch.arange(count, device=self.place.device)) % ring
        places = places.expand(self.batch, count)
        if self._fixed:
            first = places.new_zeros(self.batch) if self.first is None else self.first
            past_fixed = places >= first.clamp(max=ring)[:, None]
            places = places + self._fixed * past_fixed
        return places[:, None].expand(-1, self.kv_heads, -1)

    def shrink(self, cache_length: int) -> None:
        """Reduce the number of rows by evicting the oldest."""
        self.check_shrink(cache_length)
        order = self.token_pos.argsort(dim=-1)
        if self.filled < cache_length:
            self.arranged(order, cache_length)
            return
        first = order.new_zeros(self.batch) if self.first is None else self.first
        last = (first + self._fixed)[:, None, None]
        by_age = self.token_pos.gather(2, order)
        sinks = (by_age >= last - self._fixed) & (by_age < last)
        # Sinks first, then the remaining rows, each by age.
        order = order.gather(2, (~sinks).long().argsort(dim=-1, stable=True))
        ring = cache_length - self._fixed
        newest = order[:, :, self.filled - ring :]
        rows = self._ring_rows(self.input_pos - cache_length, ring, cache_length)
        made = order.new_full((*order.shape[:2], cache_length), -1).scatter_(2, rows, newest)
        if self._fixed:
            made[made < 0] = order[:, :, : self._fixed].flatten()
        self.arranged(made, cache_length)


class H2OKVCache(AttnWeightsKVCache):
    """Evicts first the rows with the least accumulated attention since their token entered."""

    prefill_scores: ClassVar[int] = 0

    def _compute_scores(self, rows: Rows) -> torch.Tensor:
        return rows.scores


class VLengthH2OKVCache(H2OKVCache):
    """`h2o` with attention weights multiplied by the norms of the values."""

    names: ClassVar[tuple[str, ...]] = ("scores", "v_norm")

    def _arrivals(self, key: torch.Tensor, value: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {**super()._arrivals(key, value), "v_norm": value.float().norm(dim=-1)}

    def _cumulate(self, weights: torch.Tensor, new: int) -> None:
        lengths = weights * self._state["v_norm"][:, :, : self.filled]
        total = lengths.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        super()._cumulate(lengths * (weights.sum(dim=-1, keepdim=True) / total), new)


class _Quantized(AttnWeightsKVCache):
    """Base of policies with lower scores for rows with a large quantisation error."""

    names: ClassVar[tuple[str, ...]] = ("scores", "error")

    def _arrivals(self, key: torch.Tensor, value: torch.Tensor) -> Mapping[str, torch.Tensor]:
        error = sum(
            (new.float() - self.buffers.rounded(new).float()).norm(dim=-1) for new in (key, value)
        )
        return {**super()._arrivals(key, value), "error": torch.as_tensor(error)}

    def _compute_scores(self, rows: Rows) -> torch.Tensor:
        scores = super()._compute_scores(rows)  # pyright: ignore[reportAbstractUsage]
        error = self._state["error"][:, :, : scores.shape[2]]
        used, wrong = _min_max(scores, rows.real), _min_max(error, rows.real)
        return _MIX * used + (_MIX - 1) / 2 * wrong + (1 - _MIX)


class QuantizedH2OKVCache(_Quantized, H2OKVCache):
    """`h2o` with scores reduced by quantisation errors."""


class QuantizedVLengthH2OKVCache(_Quantized, VLengthH2OKVCache):
    """`h2o-vlen` with scores reduced by quantisation errors."""

    names: ClassVar[tuple[str, ...]] = ("scores", "v_norm", "error")


class H2OOriginalKVCache(H2OKVCache):
    """H2O as first published, for comparison: a common choice for the whole batch."""

    accepts: ClassVar[frozenset[str]] = frozenset(
        {"keep_initial_fraction", "prefill_scores", "sinks"}
    )

    def pad(self, first: torch.Tensor | None) -> None:
        """Refuse padding: a common choice cannot evict the padding of a single row first.

        Raises:
            ConfigError: a row has padding.
        """
        if first is not None and bool((first > 0).any()):
            raise ConfigError(
                f"h2o-orig chooses for a whole batch, so it takes no padding: {first.tolist()} "
                "columns given"
            )

    def _cumulate(self, weights: torch.Tensor, new: int) -> None:
        super()._cumulate(weights.sum(dim=0, keepdim=True).expand_as(weights), new)


def _min_max(x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Scale the numbers of each batch row to 0 to 1 over heads and rows, ignoring padding."""
    low = x.masked_fill(~real, torch.inf).amin(dim=(1, 2), keepdim=True)
    high = x.masked_fill(~real, -torch.inf).amax(dim=(1, 2), keepdim=True)
    span = high - low
    return torch.where(span > 0, (x - low) / span, torch.zeros_like(x))

"""AttnWeightsKVCache: the base of policies evicting the rows with the lowest scores.

A policy overrides `_compute_scores`. The base accumulates attention weights as S, finds victims,
protects the newest tokens in a grace ring, spares sinks, evicts padding first, and records or
replays decisions.
Invariant: the newest tokens of the grace period are always kept. Per-row numbers move with their
rows and restart with each token. Equal scores are ordered by age, so the order of rows has no
effect. Cost: per step an addition over the rows and a partial sort.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from kvtrie.errors import ConfigError
from kvtrie.kernels import attend
from kvtrie.selective.buffered import KVCacheWithBuffers
from kvtrie.selective.buffers import KVCacheBuffers, put_rows, take_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtrie.kernels import Terms
    from kvtrie.selective.arguments import CacheArguments
    from kvtrie.selective.replay import AttnWeightsReplayLog

__all__ = ["AttnWeightsKVCache", "Rows"]

_FIRST = torch.iinfo(torch.int64).min
_LAST = torch.iinfo(torch.int64).max
_BEYOND = 2**30
_POOL = 5  # neighbours for the average of scores


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows outside of the grace ring: input of a policy.

    Attributes:
        keys: `(batch, kv_heads, n, dim)`, rotated, as used in attention.
        values: like `keys`.
        scores: fp32 `(batch, kv_heads, n)`, S: weights accumulated since the row's token entered.
        weights: fp32, A: weights of the last step. Zeros if the policy does not request them.
        token_pos: int64, positions of the tokens.
        real: bool, False for padding.
        queries: the last queries of the policy's window, `(batch, query_heads, w, dim)`.
        input_pos: the position of the next token.
        each: query heads per KV head.
        scale: factor of the products of queries and keys.
        terms: additions of the layer to the softmax.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scores: torch.Tensor
    weights: torch.Tensor
    token_pos: torch.Tensor
    real: torch.Tensor
    queries: torch.Tensor | None
    input_pos: int
    each: int
    scale: float
    terms: Terms | None = None

    def weights_of_queries(self) -> torch.Tensor:
        """Return the summed weights of these rows from the last queries, fp32, like `scores`."""
        queries = self.queries
        if queries is None:
            return torch.zeros_like(self.scores)
        _, weights = attend(
            queries,
            self.keys,
            self.values,
            # Padding gets a position beyond all queries, and all real rows are visible.
            token_pos=(~self.real).long() * _BEYOND,
            input_pos=0,
            scale=self.scale,
            terms=self.terms,
            return_attn_weights=True,
        )
        assert weights is not None  # noqa: S101 - they were asked for
        return weights.unflatten(1, (-1, self.each)).mean(dim=2)

    def pooled(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores averaged over neighbours by position."""
        order = self.token_pos.argsort(dim=-1)
        smooth = functional.avg_pool1d(
            scores.gather(2, order), _POOL, stride=1, padding=_POOL // 2, count_include_pad=False
        )
        return torch.zeros_like(scores).scatter_(2, order, smooth)


class AttnWeightsKVCache(KVCacheWithBuffers):
    """A cache with eviction by score, see `_compute_scores`."""

    accepts: ClassVar[frozenset[str]] = frozenset(
        {
            "grace_period",
            "max_chunk_size",
            "keep_initial_fraction",
            "normalize_scores",
            "prefill_scores",
            "sinks",
        }
    )
    update_requires_attn_weights: ClassVar[bool] = True
    prefill_scores: ClassVar[int] = 32
    """Default of the argument: number of last queries of the first step used to score it."""

    window: ClassVar[int] = 0
    """Number of last queries kept for the policy."""

    names: ClassVar[tuple[str, ...]] = ("scores",)
    """Per-row numbers, fp32, in addition to K and V."""

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
            buffers, query_heads, arguments, scale=scale, tmp_array_limit_gb=tmp_array_limit_gb
        )
        self._state = {name: self._plane() for name in type(self).names}
        wanted = self.arguments.prefill_scores
        self._prefill_scores = type(self).prefill_scores if wanted is None else wanted
        self._weights: torch.Tensor | None = None
        self._queries: torch.Tensor | None = None
        self._ring = 0
        self._replayed: tuple[AttnWeightsReplayLog, int] | None = None

    def _plane(self) -> torch.Tensor:
        return torch.zeros(self.place.shape[:3], device=self.place.device)

    @abstractmethod
    def _compute_scores(self, rows: Rows) -> torch.Tensor:
        """Return scores `(batch, kv_heads, n)` of the given rows. The lowest are evicted first."""

    # ------------------------------------------------------------------------------ victims

    @property
    def scores(self) -> torch.Tensor:
        """S: accumulated attention of the rows, mean over each group's heads."""
        return self._state["scores"][:, :, : self.filled]

    def next_positions(self, new: int) -> torch.Tensor:
        """Return the rows with the lowest scores, in ascending order of scores."""
        if self._replayed is not None:
            log, step = self._replayed
            self._replayed = log, step + 1
            return log.chosen(step).to(self.place.device)
        if self.prefill_length == self.cache_length and not self.evicted and not self._prefill:
            order = self._order(self._initial(new), self.token_pos)
        else:
            rows = self.rows()
            order = self._order(self._compute_scores(rows), rows.token_pos)
        order = order[:, :, : self.cache_length - self.arguments.grace_period]
        return order.topk(new, dim=-1, largest=False, sorted=True).indices

    def rows(self, beyond: int | None = None) -> Rows:
        """Return the input of `_compute_scores`, without the last rows, by default the ring."""
        n = self.filled - (self.arguments.grace_period if beyond is None else beyond)
        keys, values = self._rows_seen()
        scores = self.scores[:, :, :n]
        token_pos = self.token_pos[:, :, :n]
        if self.arguments.normalize_scores:
            start = self.prefill_length - self._prefill - 1
            scores = scores / (self.input_pos - token_pos.clamp(min=start))
        weights = torch.zeros_like(scores)
        if self._weights is not None:
            weights[:, :, : self._weights.shape[2]] = self._weights[:, :, :n]
        return Rows(
            keys=keys[:, :, :n],
            values=values[:, :, :n],
            scores=scores,
            weights=weights,
            token_pos=token_pos,
            real=self._real(token_pos),
            queries=self._queries,
            input_pos=self.input_pos,
            each=self.query_heads // self.kv_heads,
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            terms=self.terms,
        )

    @property
    def _prefill(self) -> int:
        """Number of queries used to score the first step."""
        return min(self.prefill_length, self._prefill_scores)

    def _real(self, token_pos: torch.Tensor) -> torch.Tensor:
        if self.first is None:
            return torch.ones_like(token_pos, dtype=torch.bool)
        return token_pos >= self.first[:, None, None]

    def _initial(self, new: int) -> torch.Tensor:
        """Return the order without scores: the oldest tokens after a share of the rows go first."""
        place = self.token_pos
        first = place.new_zeros(self.batch) if self.first is None else self.first
        fraction = int(self.arguments.keep_initial_fraction * self.cache_length)
        wanted = (new - first).clamp(min=0)  # padding is evicted first
        start = first + max(fraction, self.arguments.sinks)
        start = torch.minimum(start, self.cache_length - self.arguments.grace_period - wanted)
        later = place - start[:, None, None]
        return torch.where(later < 0, later + 2 * self.cache_length, later).float()

    def _order(self, scores: torch.Tensor, token_pos: torch.Tensor) -> torch.Tensor:
        """Return integers with the order of (padding or not, sink or not, score, position)."""
        bits = (scores.float() + 0.0).contiguous().view(torch.int32)  # -0.0 becomes 0.0
        rising = bits ^ ((bits >> 31) & 0x7FFF_FFFF)
        token_pos = token_pos[:, :, : scores.shape[2]]
        order = (rising.long() << 32) | token_pos
        first = None if self.first is None else self.first[:, None, None]
        if self.arguments.sinks:
            last = self.arguments.sinks + (0 if first is None else first)
            order = torch.where(token_pos < last, _LAST - token_pos, order)
        if first is not None:
            order = torch.where(token_pos < first, _FIRST + token_pos, order)
        return order

    # ------------------------------------------------------------------------------ the step

    def _overwrite(self, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Move rows leaving the ring to victims, then write new tokens, the last to the ring."""
        grace, new = self.arguments.grace_period, key.shape[2]
        turning = min(new, grace)
        direct = new - turning
        if turning:
            base = self.cache_length - grace
            ring = (self._ring + torch.arange(turning, device=rows.device)) % grace + base
            ring = ring.expand(*rows.shape[:2], turning)
            self._move(rows[:, :, :turning], ring)
            if direct == 0:
                self._ring = (self._ring + new) % grace
            rows = torch.cat((rows[:, :, turning:], ring), dim=2)
        super()._overwrite(rows, key, value)

    def _move(self, rows: torch.Tensor, of: torch.Tensor) -> None:
        """Copy the content of rows `of` to `rows`, including per-row numbers."""
        self.buffers.move(rows, of)
        for plane in (self._token_pos, *self._state.values()):
            put_rows(plane, rows, take_rows(plane, of))

    def _update(self, query: torch.Tensor, weights: torch.Tensor | None, *, prefill: bool) -> None:
        if self.window or (prefill and self._prefill):
            self._remember(query, max(self.window, self._prefill if prefill else 0))
        if prefill and self._prefill and self.update_requires_attn_weights:
            rows = self.rows(beyond=0)
            weights = rows.pooled(self._window_weights(query))
        if weights is not None:
            self._weights = weights
            self._cumulate(weights, query.shape[2])
        if not self.window:
            self._queries = None

    def _window_weights(self, query: torch.Tensor) -> torch.Tensor:
        """Return the causal attention weights of the last queries of the first step."""
        last = self._prefill
        keys, values = self._rows_seen()
        _, weights = attend(
            query[:, :, -last:],
            keys,
            values,
            token_pos=self.token_pos,
            input_pos=self.prefill_length - last,
            first=self.first,
            scale=self.scale,
            terms=self.terms,
            return_attn_weights=True,
            tmp_array_limit_gb=self.tmp_array_limit_gb,
        )
        assert weights is not None  # noqa: S101 - they were asked for
        return self._per_kv_head(weights)

    def _remember(self, query: torch.Tensor, window: int) -> None:
        before = self._queries
        every = query if before is None else torch.cat((before, query), dim=2)
        self._queries = every[:, :, -window:].clone()

    def _cumulate(self, weights: torch.Tensor, new: int) -> None:
        """Add the weights of a step of `new` tokens, `(batch, kv_heads, n)`, to the scores."""
        del new
        self.scores.add_(weights)

    # ------------------------------------------------------------------------- other states

    def replay(self, log: AttnWeightsReplayLog) -> None:
        """Choose rows by a log from the start, without scores.

        Raises:
            ConfigError: tokens were read already.
        """
        if self.input_pos:
            raise ConfigError(f"{self.input_pos} tokens were given: replay a log from the start")
        filling = sum(rows is None for rows in log.rows)
        self._replayed = log, filling

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self._weights = self._queries = None
        self._ring = 0
        if self._replayed is not None:
            self._replayed = None

    def crop(self, tokens: int) -> None:
        """Forget the last tokens, see `KVCacheWithBuffers.crop`."""
        super().crop(tokens)
        if self._queries is not None and tokens:
            left = self._queries[:, :, :-tokens]
            self._queries = left if left.shape[2] else None
        if self._weights is not None:
            self._weights = self._weights[:, :, : self.filled]

    def _selected(self, rows: torch.Tensor) -> None:
        if self._weights is not None:
            self._weights = self._weights.index_select(0, rows)
        if self._queries is not None:
            self._queries = self._queries.index_select(0, rows)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Return the state, see `KVCacheWithBuffers.state`."""
        tensors, numbers = super().state()
        if self._weights is not None:
            tensors["weights"] = self._weights
        if self._queries is not None:
            tensors["queries"] = self._queries
        return tensors, {**numbers, "ring": self._ring}

    def load_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, int]) -> None:
        """Restore a result of `state`."""
        super().load_state(tensors, numbers)
        self._weights, self._queries = tensors.get("weights"), tensors.get("queries")
        self._ring = numbers["ring"]

    def shrink(self, cache_length: int) -> None:
        """Reduce the number of rows, see `KVCacheWithBuffers.shrink`."""
        self.check_shrink(cache_length)
        full, grace = self.filled == self.cache_length, self.arguments.grace_period
        count = min(self.filled, cache_length)
        rows = torch.arange(self.filled, device=self.place.device)
        if full and grace:  # oldest of the ring first: it restarts at 0
            turned = (rows[-grace:] - rows[-grace] + self._ring) % grace + rows[-grace]
            rows = torch.cat((rows[:-grace], turned))
        order = rows.expand(self.batch, self.kv_heads, -1)
        if count < self.filled:
            candidates = self.rows(beyond=grace)
            keys = self._order(self._compute_scores(candidates), candidates.token_pos)
            best = keys.topk(count - grace, dim=-1).indices.sort(dim=-1).values
            order = torch.cat((best, order[:, :, self.filled - grace :]), dim=2)
        if self._weights is not None:
            filler = order.clamp(max=self._weights.shape[2] - 1)
            self._weights = self._weights.gather(2, filler)
        self._ring = 0
        self.arranged(order, cache_length)

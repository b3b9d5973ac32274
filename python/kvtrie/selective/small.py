"""Small policies on `AttnWeightsKVCache`, each with a short definition of scores.

Invariant: a score depends on rows and queries, never on the order of rows or on the rest of the
batch. Cost: one pass over the rows per step with evictions. Policies with a window compute its
attention weights in addition.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn import functional

from kvtrie.selective.attn_weights import AttnWeightsKVCache, Rows
from kvtrie.selective.policies import H2OKVCache

__all__ = ["Decay", "Expected", "KeyDiff", "KeyNorm", "Random", "SnapKV", "Tova"]


class KeyDiff(AttnWeightsKVCache):
    """Evicts first the keys most similar to the mean of all keys (keydiff)."""

    update_requires_attn_weights: ClassVar[bool] = False

    def _compute_scores(self, rows: Rows) -> torch.Tensor:
        unit = functional.normalize(rows.keys.float(), dim=-1)
        real = rows.real[..., None].float()
        mean = (unit * real).sum(dim=2, keepdim=True)
        return -functional.cosine_similarity(unit, mean, dim=-1)


class KeyNorm(AttnWeightsKVCache):
    """Evicts first the keys with the largest norms (knorm)."""

    update_requires_attn_weights: ClassVar[bool] = False

    def _compute_scores(self, rows: Rows) -> torch.Tensor:
        return -rows.keys.float().norm(dim=-1)


class Tova(AttnWeightsKVCache):
    """Evicts first the rows with the least attention from the last query (tova)."""

    update_requires_attn_weights: ClassVar[bool] = False
    window: ClassVar[int] = 1

    def _compute_scores(self, rows: Rows) -> torch.Tensor:
        return rows.weights_of_queries()


class SnapKV(AttnWeightsKVCache):
    """Evicts first the rows with the least attention from the last queries, smoothed (snapkv)."""

    update_requires_attn_weights: ClassVar[bool] = False
    window: ClassVar[int] = 32

    def _compute_scores(self, rows: Rows) -> torch.Tensor:
        return rows.pooled(rows.weights_of_queries())


class Expected(AttnWeightsKVCache):
    """Evicts first the rows with the smallest expected contribution to future output (expected)."""

    update_requires_attn_weights: ClassVar[bool] = False
    window: ClassVar[int] = 64

    def _compute_scores(self, rows: Rows) -> torch.Tensor:
        if rows.queries is None:
            return torch.zeros_like(rows.scores)
        queries, keys = rows.queries.float(), rows.keys.float() * rows.scale
        groups = queries.unflatten(1, (keys.shape[1], rows.each))
        mean, spread = groups.mean(dim=3).mT, groups.var(dim=3, correction=0).mT
        # Logarithm of the mean of exp(q k), assuming normally distributed q like the last queries.
        expected = (keys @ mean + (keys**2 @ spread) / 2).mean(dim=-1)
        return expected + rows.values.float().norm(dim=-1).log()


class Decay(H2OKVCache):
    """`h2o` with scores decaying with each token (h2o-decay)."""

    accepts: ClassVar[frozenset[str]] = H2OKVCache.accepts | {"decay"}
    prefill_scores: ClassVar[int] = 32

    def _cumulate(self, weights: torch.Tensor, new: int) -> None:
        self.scores.mul_(self.arguments.decay**new)
        super()._cumulate(weights, new)


class Random(AttnWeightsKVCache):
    """Random baseline: scores from a hash of seed, head and position (random)."""

    accepts: ClassVar[frozenset[str]] = AttnWeightsKVCache.accepts | {"seed"}
    update_requires_attn_weights: ClassVar[bool] = False

    def _compute_scores(self, rows: Rows) -> torch.Tensor:
        head = torch.arange(self.kv_heads, device=rows.token_pos.device)[:, None]
        mixed = rows.token_pos * 2_654_435_761 + head * 40_503 + self.arguments.seed * 69_069
        mixed = ((mixed ^ (mixed >> 15)) * 2_246_822_519) & 0xFFFF_FFFF
        return ((mixed ^ (mixed >> 13)) & 0xFF_FFFF).float()

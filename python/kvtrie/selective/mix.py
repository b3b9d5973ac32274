"""Mix: two policies, each with half of the rows.

The score of a row is the better of its two ranks. Of any number of kept rows, half are therefore
the best rows of the first policy and half the best rows of the second.
Invariant: each part sees the same rows as alone and has separate per-row numbers.
Cost: both policies, and two sorts of the rows per step with evictions.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)
# ruff: noqa: SLF001 - a part is the mix itself in another class

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvtrie.errors import ConfigError
from kvtrie.selective.attn_weights import AttnWeightsKVCache, Rows

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["mixed"]


class _Mix(AttnWeightsKVCache):
    """Evicts first the rows with low ranks in both policies."""

    parts: tuple[type[AttnWeightsKVCache], ...] = ()

    def _part(self, at: int) -> AttnWeightsKVCache:
        """Return a part as a separate policy, with its methods and its per-row numbers."""
        kind = type(self).parts[at]
        part = object.__new__(kind)
        vars(part).update(vars(self))
        part._state = {name: self._state[f"{at}.{name}"] for name in kind.names}
        return part

    def _arrivals(self, key: torch.Tensor, value: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {
            f"{at}.{name}": new
            for at in range(len(type(self).parts))
            for name, new in self._part(at)._arrivals(key, value).items()
        }

    def _cumulate(self, weights: torch.Tensor, new: int) -> None:
        super()._cumulate(weights, new)
        for at in range(len(type(self).parts)):
            self._part(at)._cumulate(weights, new)

    def _compute_scores(self, rows: Rows) -> torch.Tensor:
        beyond = self.filled - rows.scores.shape[2]
        ranks: list[torch.Tensor] = []
        for at, kind in enumerate(type(self).parts):
            part = self._part(at)
            seen = part.rows(beyond)
            if kind.window and seen.queries is not None:
                # The part alone would have kept these queries, more directly after the first step.
                recent = self._prefill if self.input_pos == self.prefill_length else 0
                last = seen.queries[:, :, -max(kind.window, recent) :]
                seen = replace(seen, queries=last)
            order = part._order(part._compute_scores(seen), seen.token_pos)
            ranks.append(order.argsort(dim=-1).argsort(dim=-1))
        # Whole numbers of float32 up to 2^24 rows; a tie of two ranks goes to the first policy.
        best = torch.stack([2 * rank - at for at, rank in enumerate(ranks)]).amax(dim=0)
        return best.float()


def mixed(
    name: str, one: type[AttnWeightsKVCache], other: type[AttnWeightsKVCache]
) -> type[AttnWeightsKVCache]:
    """Return the class of `mix-one+other`.

    Raises:
        ConfigError: a policy mixed with itself.
    """
    if one is other:
        raise ConfigError(f"{name} mixes a policy with itself")
    parts = (one, other)
    body = {
        "__doc__": f"Half of the rows by each policy of {name}.",
        "parts": parts,
        "accepts": one.accepts | other.accepts,
        "update_requires_attn_weights": any(p.update_requires_attn_weights for p in parts),
        "window": max(p.window for p in parts),
        "prefill_scores": 32,
        "names": (
            "scores",
            *(f"{at}.{name}" for at, part in enumerate(parts) for name in part.names),
        ),
    }
    return type("Mix", (_Mix,), body)

"""Terms: additions of some models to the softmax of attention.

Invariant: without terms attention is the softmax of scaled products. Cost: a copy of the weights of
a slice of queries.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Terms"]


@dataclass(frozen=True, slots=True)
class Terms:
    """Additions of a layer to its attention.

    Attributes:
        softcap: replaces products p by `softcap * tanh(p / softcap)`, as in Gemma 2. None for no
            softcap.
        sinks: `(query_heads,)`, a logit per query head in the softmax without a value, as in
            gpt-oss. None for no sinks.
    """

    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def capped(self, products: torch.Tensor) -> torch.Tensor:
        """Return the products after the softcap."""
        if self.softcap is None:
            return products
        return torch.tanh(products / self.softcap) * self.softcap

    def slope(self, capped: torch.Tensor) -> torch.Tensor | None:
        """Return the derivative of `capped` by the products, from its result, or None for 1."""
        return None if self.softcap is None else 1.0 - (capped / self.softcap) ** 2

    def softmax(self, capped: torch.Tensor) -> torch.Tensor:
        """Return the weights of products `(batch, kv_heads, each, queries, rows)`."""
        if self.sinks is None:
            return torch.softmax(capped, dim=-1)
        sinks = self.sinks.to(capped.dtype).view(1, *capped.shape[1:3], 1, 1)
        both = torch.cat((capped, sinks.expand(*capped.shape[:-1], 1)), dim=-1)
        return torch.softmax(both, dim=-1)[..., :-1]

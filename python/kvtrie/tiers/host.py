"""The pool of the `host` tier: ordinary memory, pinned where there is a GPU to copy to and from.

Pinned pages let copies overlap with kernels; pinning costs about 0.3 s per GB, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtrie.tiers.pool import Pool

if TYPE_CHECKING:
    from kvtrie.shape import ModelShape
    from kvtrie.tier import Tier

__all__ = ["host_pool"]


def host_pool(model: ModelShape, tier: Tier, block_tokens: int, *, spare: int = 0) -> Pool:
    """Allocate the memory of a `host` tier.

    Args:
        model: the shape whose KV is kept.
        tier: its budget, layout and form of slots.
        block_tokens: tokens per block.
        spare: blocks of memory beyond the budget.
    """
    pinned = torch.cuda.is_available()
    return Pool.of_tier(model, tier, block_tokens, device="cpu", pinned=pinned, spare=spare)

"""The pool of the `host` tier: memory, pinned where there is a GPU to copy to and from.

With `Tier(keep=...)` it is a file of a memory file system, which the next process takes over.

Pinned pages let copies overlap with kernels; pinning costs about 0.3 s per GB, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtrie.tiers.kept_tier import kept_pool
from kvtrie.tiers.pool import Pool

if TYPE_CHECKING:
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier

__all__ = ["host_pool"]


def host_pool(
    model: ModelShape,
    tier: Tier,
    block_tokens: int,
    *,
    spare: int = 0,
    rank: int = 0,
    ranks: int = 1,
    apart: bool = False,
) -> Pool:
    """Allocate the memory of a `host` tier, or take over that of an earlier process.

    Args:
        model: the shape whose KV is kept.
        tier: its budget, layout, form of slots and `keep`.
        block_tokens: tokens per block.
        spare: blocks of memory beyond the budget.
        rank: the tensor-parallel rank whose part of the KV this is.
        ranks: how many there are; each keeps a separate file.
        apart: whether the groups of the model's layers are kept apart.

    Raises:
        ConfigError: a file at `keep` that cannot be used.
        TransferError: no room for the file.
    """
    pinned = torch.cuda.is_available()
    if tier.keep is not None:
        kept = kept_pool(
            model,
            tier,
            block_tokens,
            rank=rank,
            ranks=ranks,
            pinned=pinned,
            spare=spare,
            apart=apart,
        )
        if kept is not None:
            return kept
    return Pool.of_tier(
        model, tier, block_tokens, device="cpu", pinned=pinned, spare=spare, apart=apart
    )

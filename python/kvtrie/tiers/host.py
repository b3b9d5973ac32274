"""The pool of the `host` tier: memory, pinned on a machine with a GPU.

With `Tier(keep=...)` the memory is a file of a memory file system, reused by the next process.

Pinned pages let copies overlap with kernels. Pinning costs about 0.3 s per GB, once.
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
    separate_groups: bool = False,
) -> Pool:
    """Allocate the memory of a `host` tier, or reuse the memory of an earlier process.

    Args:
        model: the shape of the model.
        tier: its budget, layout, form of slots and `keep`.
        block_tokens: tokens per block.
        spare: blocks of memory beyond the budget.
        rank: the tensor-parallel rank of this part of the KV.
        ranks: number of ranks, each with a separate file.
        separate_groups: whether the model's layer groups are separate.

    Raises:
        ConfigError: the file at `keep` cannot be used.
        TransferError: the file system has no room for the file.
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
            separate_groups=separate_groups,
        )
        if kept is not None:
            return kept
    return Pool.of_tier(
        model,
        tier,
        block_tokens,
        device="cpu",
        pinned=pinned,
        spare=spare,
        separate_groups=separate_groups,
    )

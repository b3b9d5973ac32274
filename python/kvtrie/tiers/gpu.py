"""The pool of the `gpu` tier: device memory, or CPU memory on a machine without a GPU.

The CPU fallback keeps every program runnable without a GPU, only slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtrie.tiers.pool import Pool

if TYPE_CHECKING:
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier

__all__ = ["default_device", "gpu_pool"]


def gpu_pool(
    model: ModelShape,
    tier: Tier,
    block_tokens: int,
    *,
    device: torch.device | str | None = None,
    separate_groups: bool = False,
) -> Pool:
    """Allocate the memory of a `gpu` tier.

    Args:
        model: the shape of the model.
        tier: its budget, layout and form of slots.
        block_tokens: tokens per block.
        device: the device, by default the current CUDA device, or the CPU without CUDA.
        separate_groups: whether the model's layer groups are separate.
    """
    where = default_device() if device is None else device
    return Pool.of_tier(
        model, tier, block_tokens, device=where, pinned=False, separate_groups=separate_groups
    )


def default_device() -> torch.device:
    """Return the default device of a `gpu` tier, as required for a model computing in the tier."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

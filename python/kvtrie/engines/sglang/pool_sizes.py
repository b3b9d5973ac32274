"""PoolSizes: cached, evictable and locked sizes of a radix cache in each of SGLang's pools.

Invariant: cached slots are evictable or locked, and SGLang's checks of its pools add up.
Cost: O(1), except lists of all slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from sglang.srt.mem_cache.radix_cache import RadixCache

from kvtrie.engines.sglang.device_pools import FULL, state_allocator

if TYPE_CHECKING:
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

    from kvtrie import BlockManager
    from kvtrie.engines.sglang.block_slots import BlockSlots
    from kvtrie.engines.sglang.device_pools import DevicePools
    from kvtrie.engines.sglang.locks import Locks

__all__ = ["PoolSizes"]


class PoolSizes(RadixCache):
    """Sizes of a cache, by pool."""

    pools: DevicePools
    slots: BlockSlots
    locks: Locks
    manager: BlockManager

    def all_values_flatten(self) -> torch.Tensor:
        """Return the token slots of all blocks, in no order."""
        return self.slots.all()

    def supports_swa(self) -> bool:
        """Whether sliding windows have a separate pool."""
        return self.pools.windows > 0

    def supports_mamba(self) -> bool:
        """Whether states have a separate pool."""
        return self.pools.states > 0

    def all_mamba_values_flatten(self) -> torch.Tensor:
        """Return the slots of all cached states, in no order."""
        return torch.cat([self._empty_device_indices, *self.slots.states.values()])

    def _evictable(self, group: int) -> int:
        return (self.slots.count(group) - self.locks.count(group)) * self.pools.unit(group)

    def evictable_size(self) -> int:
        """Return the number of evictable tokens."""
        return self._evictable(FULL)

    def protected_size(self) -> int:
        """Return the number of locked tokens."""
        return self.locks.count(FULL) * self.page_size

    full_evictable_size, full_protected_size = evictable_size, protected_size

    def swa_evictable_size(self) -> int:
        """Return the number of tokens with evictable windows."""
        return self._evictable(self.pools.windows_at)

    def swa_protected_size(self) -> int:
        """Return the number of tokens with locked windows."""
        return self.locks.count(self.pools.windows_at) * self.page_size

    def mamba_evictable_size(self) -> int:
        """Return the number of evictable cached states."""
        return self._evictable(self.pools.states_at)

    def mamba_protected_size(self) -> int:
        """Return the number of locked cached states."""
        return self.locks.count(self.pools.states_at)

    def total_size(self) -> int:
        """Return the number of cached tokens."""
        return len(self.slots) * self.page_size

    def sanity_check(self) -> None:
        """Check that the blocks with pages match the manager's blocks, and nothing is locked.

        Raises:
            AssertionError: the blocks differ, or a path is locked.
        """
        counted = self.manager.stats().tiers["gpu"].groups
        seen = [self.slots.count(group) for group, _ in enumerate(counted)]
        known = [group.held + group.released for group in counted]
        locked = [self.locks.count(group) for group, _ in enumerate(counted)]
        if seen != known or any(locked):
            raise AssertionError(f"{seen} blocks have pages, {known} are known, {locked} locked")

    def available_and_evictable_str(self) -> str:
        """Return free and evictable sizes, for SGLang's messages."""
        if not self.pools.several:
            return super().available_and_evictable_str()
        free: dict[str, int] = {}
        could = {"full tokens": self.evictable_size()}
        if self.pools.windows:
            hybrid = cast("SWATokenToKVPoolAllocator", self.token_to_kv_pool_allocator)
            free["full tokens"] = hybrid.full_available_size()
            free["SWA tokens"] = hybrid.swa_available_size()
            could["SWA tokens"] = self.swa_evictable_size()
        else:
            free["full tokens"] = self.token_to_kv_pool_allocator.available_size()
        if self.pools.states:
            free["states"] = state_allocator(self.req_to_token_pool).available_size()
            could["states"] = self.mamba_evictable_size()
        return "".join(
            f"Available {what}: {free[what]}, {could[what]} evictable\n" for what in free
        )

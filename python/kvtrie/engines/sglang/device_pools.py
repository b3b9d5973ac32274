"""DevicePools: the pools of SGLang's GPU memory that a radix cache divides, and their sizes.

SGLang has a pool of full attention's KV and, for models with sliding windows, one of theirs. A
token of the first pool may have a slot of the second, which the allocator maps it to. The manager
counts both in pages of one arena that is never full: SGLang says which pool wants room.
Invariant: a pool that the cache does not divide rightly is refused by name. Cost: arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtrie import LayerGroup, ModelShape, ResumePoints, Tier
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from typing import Self

    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

__all__ = ["FULL", "WINDOWS", "DevicePools"]

FULL, WINDOWS = 0, 1
"""Numbers of the groups of layers."""

_SPARE = 64


@dataclass(frozen=True, slots=True)
class DevicePools:
    """Sizes in pages.

    Attributes:
        page_size: tokens of a page.
        blocks: pages of the pool of full attention.
        windows: pages of the pool of sliding windows; 0 without one.
        window: tokens that a request which goes on at a border needs before it; 0 without windows.
    """

    page_size: int
    blocks: int
    windows: int = 0
    window: int = 0

    @classmethod
    def of(cls, params: CacheInitParams, blocks: int | None, *, windows: bool) -> Self:
        """The pools of a server.

        Args:
            params: SGLang's `CacheInitParams`.
            blocks: pages of the KV pool; None asks the allocator.
            windows: whether layers with sliding windows have a pool of their own.

        Raises:
            ConfigError: a pool of less than a page, or windows in another pool than
                `SWATokenToKVPoolAllocator`'s, or of which matches need none.
        """
        allocator, page = params.token_to_kv_pool_allocator, int(params.page_size)
        if windows:
            cls._check_windows(params)
            full, swa = int(allocator.size_full) // page, int(allocator.size_swa) // page
            pools = cls(page, full, swa, int(params.swa_retain_window or 0))
        else:
            pools = cls(page, blocks or int(allocator.size) // page)
        if pools.blocks < 1 or (windows and pools.windows < 1):
            sizes = (allocator.size_full, allocator.size_swa) if windows else (allocator.size,)
            raise ConfigError(
                f"SGLang's KV pool has {' and '.join(map(str, sizes))} tokens, at least a page of "
                f"{page} wanted"
            )
        return pools

    @staticmethod
    def _check_windows(params: CacheInitParams) -> None:
        allocator, window = params.token_to_kv_pool_allocator, params.swa_retain_window
        kind, ring = type(allocator).__name__, getattr(allocator, "swa_req_ring", False)
        if kind != "SWATokenToKVPoolAllocator" or ring:
            raise ConfigError(
                f"SGLang's {kind}{' with a ring per request' if ring else ''} has the sliding "
                "windows: --radix-cache-backend kvtrie serves those of SWATokenToKVPoolAllocator"
            )
        if not window or not params.swa_gates_prefix_match or params.decoder_swa_bounded_replay:
            raise ConfigError(
                f"sliding windows of {window} tokens with swa_gates_prefix_match="
                f"{params.swa_gates_prefix_match} and decoder_swa_bounded_replay="
                f"{params.decoder_swa_bounded_replay}: --radix-cache-backend kvtrie serves windows "
                "that are stored whole and that a match needs"
            )

    @property
    def several(self) -> bool:
        """Whether groups of layers have pools of their own."""
        return self.windows > 0

    @property
    def window_blocks(self) -> int:
        """Pages before a border that a request needs of windows."""
        return -(-self.window // self.page_size)

    def shape(self) -> ModelShape:
        """The model as the manager counts it: a slot of either pool is a page of its arena."""
        if not self.several:
            return ModelShape(layers=1, kv_heads=1, head_dim=16)
        # A border needs the blocks of `window - 1` tokens, and SGLang those of all of them.
        windows = LayerGroup((1,), kind="sliding", window=self.window + 1)
        return ModelShape(2, 1, 16, groups=(LayerGroup((0,)), windows))

    def tiers(self) -> list[Tier]:
        """The one tier of the manager."""
        if not self.several:
            return [Tier("gpu", blocks=self.blocks)]
        # A new block may have both slots for a moment, whatever SGLang keeps of its window.
        pages = 2 * self.blocks + self.windows + self.window_blocks + _SPARE
        each = self.shape().block_bytes(self.page_size, FULL)
        return [Tier("gpu", bytes=pages * each, owner="none")]

    def resume(self) -> ResumePoints | None:
        """Which borders stay resumable."""
        return ResumePoints() if self.several else None

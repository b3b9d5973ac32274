"""DevicePools: the pools of SGLang's GPU memory shared by a radix cache, and their sizes.

SGLang has a pool for the KV of full attention. Models with sliding windows or state layers have a
separate pool for these. The allocator may map a token of the first pool to a slot of the window
pool. A state has a separate slot. The manager counts all slots in pages of a single arena. The
arena is never full, because SGLang requests evictions per pool.
Invariant: an unsupported pool is refused by name. Cost: arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from kvtrie import LayerGroup, ModelShape, ResumePoints, Tier
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from typing import Self

    from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, ReqToTokenPool

__all__ = ["FULL", "DevicePools", "state_allocator"]

FULL = 0
"""Index of the group of layers with full attention."""

_NO_GROUP = -1

_SPARE = 64


@dataclass(frozen=True, slots=True)
class DevicePools:
    """Sizes in pages.

    Attributes:
        page_size: tokens of a page.
        blocks: pages of the pool of full attention.
        windows: pages of the pool of sliding windows, 0 without a pool.
        window: tokens needed before a border to resume a request there, 0 without windows.
        states: slots of the pool of states, 0 without a pool.
    """

    page_size: int
    blocks: int
    windows: int = 0
    window: int = 0
    states: int = 0

    @classmethod
    def of(
        cls, params: CacheInitParams, blocks: int | None, *, windows: bool, states: bool
    ) -> Self:
        """Return the pools of a server.

        Args:
            params: SGLang's `CacheInitParams`.
            blocks: pages of the KV pool, None to ask the allocator.
            windows: whether layers with sliding windows have a separate pool.
            states: whether state layers have a separate pool.

        Raises:
            ConfigError: a pool smaller than a page, windows in a pool different from
                `SWATokenToKVPoolAllocator`'s or not needed by matches, or states with a second form
                in the cache.
        """
        allocator, page = params.token_to_kv_pool_allocator, int(params.page_size)
        slots = cls._state_slots(params) if states else 0
        sizes: tuple[int, ...]
        if windows:
            hybrid = cls._window_allocator(params)
            sizes = int(hybrid.size_full), int(hybrid.size_swa)
            full, swa = (size // page for size in sizes)
            pools = cls(page, full, swa, int(params.swa_retain_window or 0), slots)
        else:
            sizes = (blocks * page if blocks else int(allocator.size),)
            pools = cls(page, sizes[0] // page, states=slots)
        if pools.blocks < 1 or (windows and pools.windows < 1):
            raise ConfigError(
                f"SGLang's KV pool has {' and '.join(map(str, sizes))} tokens, at least a page of "
                f"{page} wanted"
            )
        return pools

    @staticmethod
    def _window_allocator(params: CacheInitParams) -> SWATokenToKVPoolAllocator:
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
        return cast("SWATokenToKVPoolAllocator", allocator)

    @staticmethod
    def _state_slots(params: CacheInitParams) -> int:
        pool = params.req_to_token_pool
        allocator = state_allocator(pool)
        kind = type(allocator).__name__
        second = getattr(pool, "mamba_ckpt_pool", None) is not None
        if kind != "MambaSlotAllocator" or second or params.enable_mamba_extra_buffer_lazy:
            lazy = params.enable_mamba_extra_buffer_lazy
            raise ConfigError(
                f"SGLang's {kind} has the states, a pool of checkpoints is {second} and "
                f"enable_mamba_extra_buffer_lazy is {lazy}: --radix-cache-backend kvtrie serves "
                "those of MambaSlotAllocator without either"
            )
        if not params.enable_mamba_extra_buffer and params.page_size != 1:
            raise ConfigError(
                f"pages of {params.page_size} tokens: without --enable-mamba-extra-buffer states "
                "are kept with pages of 1 token"
            )
        return int(allocator.size)

    @property
    def several(self) -> bool:
        """Whether groups of layers have separate pools."""
        return self.windows_at > 0 or self.states_at > 0

    @property
    def windows_at(self) -> int:
        """Index of the group of layers with sliding windows, -1 without a group."""
        return 1 if self.windows else _NO_GROUP

    @property
    def states_at(self) -> int:
        """Index of the group of state layers, -1 without a group."""
        return max(self.windows_at, 0) + 1 if self.states else _NO_GROUP

    def unit(self, group: int) -> int:
        """Return SGLang's units of a pool per manager slot: a page's tokens, or 1 for a state."""
        return 1 if group == self.states_at else self.page_size

    @property
    def window_blocks(self) -> int:
        """Window pages needed before a border to resume a request there."""
        return -(-self.window // self.page_size)

    def shape(self) -> ModelShape:
        """Return the manager's model: a slot of each pool is a page of the manager's arena."""
        if not self.several:
            return ModelShape(layers=1, kv_heads=1, head_dim=16)
        groups = [LayerGroup((0,))]
        if self.windows:
            # kvtrie keeps the blocks of `window - 1` tokens, SGLang needs `self.window` tokens.
            groups.append(LayerGroup((1,), kind="sliding", window=self.window + 1))
        if self.states:
            page = ModelShape(1, 1, 16).block_bytes(self.page_size)
            groups.append(LayerGroup((2,), kind="state", state_bytes=page))
        return ModelShape(3, 1, 16, groups=tuple(groups))

    def tiers(self) -> list[Tier]:
        """Return the only tier of the manager."""
        if not self.several:
            return [Tier("gpu", blocks=self.blocks)]
        # A new block may briefly have both slots, even if SGLang does not keep its window.
        pages = 2 * self.blocks + self.windows + self.window_blocks + self.states + _SPARE
        each = self.shape().block_bytes(self.page_size, FULL)
        return [Tier("gpu", bytes=pages * each, owner="none")]

    def resume(self) -> ResumePoints | None:
        """Return the rule for resumable borders, None for a single pool."""
        return ResumePoints() if self.several else None


def state_allocator(rows: ReqToTokenPool) -> MambaSlotAllocator:
    """Return SGLang's allocator of states, from the request pool of a model with states."""
    return cast("HybridReqToTokenPool", rows).mamba_allocator

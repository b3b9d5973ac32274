"""KvtrieHiCache: a disk, kept memory or a shared store as `dynamic` storage of SGLang's HiCache.

`--hicache-storage-backend dynamic` loads it. `--hicache-storage-backend-extra-config` has `path`,
a folder or the URL of a store, or `keep`, a file in memory. Pages belong to the weights of all
ranks. After an in-place update of weights, nothing is found or written until the server restarts.
Invariant: the storage never exceeds its room. A damaged page is a miss. A later server of the same
model finds the pages, and in a shared store concurrent servers do, too.
Cost: a digest per page and call, and the read or write.
"""

from __future__ import annotations

import logging
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvtrie.engines.server.boundary import Boundary
from kvtrie.engines.server.startup import OpenTier, log_startup, startup_line, startup_warnings
from kvtrie.engines.server.surface_check import warn
from kvtrie.engines.sglang import surface
from kvtrie.engines.sglang.host_pools import POOLS, PoolPages, memory_of
from kvtrie.engines.sglang.pages import PageSettings, PoolSize
from kvtrie.engines.sglang.weights import identity, watch
from kvtrie.errors import ConfigError
from kvtrie.tiers.keyed_disk import KeyedDisk
from kvtrie.tiers.other_stores import count_others

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    from kvtrie.engines.sglang.pages import Pages

__all__ = ["KvtrieHiCache"]

_LOG = logging.getLogger("sglang.srt.kvtrie")  # a name shown by SGLang


class KvtrieHiCache(HiCacheStorage):
    """Pages of a rank on disk or in a shared store, by SGLang's hashes.

    Args:
        storage_config: SGLang's `HiCacheStorageConfig`, with kvtrie's keys in `extra_config`.
        kwargs: ignored. SGLang passes none.

    Raises:
        ConfigError: unknown keys, no path, or latent KV of several ranks on a disk.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:  # noqa: ANN401, ARG002
        warn(surface, version("sglang"))
        self._settings = PageSettings.read(storage_config.extra_config or {})
        ranks, on_disk = storage_config.tp_size, self._settings.store is None
        # SGLang writes latent KV on one rank only, because it is equal on all ranks.
        if storage_config.is_mla_model and ranks > 1 and on_disk:
            raise ConfigError(
                f"latent KV of {ranks} ranks: SGLang writes it once, and one process at a time has "
                f"a folder of kvtrie; a shared store, as 'folder:{self._settings.path}', is read "
                "by all ranks"
            )
        self._config = storage_config
        self._host: dict[str, HostKVCache] = {}  # SGLang's pools by name, KV first
        self._pools: dict[str, PoolPages] = {}
        self._updated = False  # whether SGLang's memory may have KV of newer weights
        self.boundary = Boundary("the storage kvtrie", _LOG)

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Register the pool of KV."""
        super().register_mem_pool_host(mem_pool_host)
        self._host["kv"] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: str) -> None:
        """Register a pool of windows, states or an indexer.

        Raises:
            ConfigError: an unknown kind of pool, or a pool added after the start.
        """
        name = str(host_pool_name)
        if name not in POOLS or (self._pools and name not in self._pools):
            self.close()
            raise ConfigError(
                f"SGLang has a pool {name!r}: the storage kvtrie keeps the pools "
                f"{', '.join(POOLS)}, which are known when the server starts"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._host[name] = host_pool

    def on_host_pools_registered(self) -> None:
        """Open the pages, with sizes from the registered pools."""
        super().on_host_pools_registered()
        # A size is for the whole server.
        ranks = max(self._config.tp_size, 1) * max(self._config.pp_size, 1)
        weights = f"weights {identity()}"  # a collective call of all ranks
        opened = self._settings.open(
            {name: _size(self._config, name, pool, weights) for name, pool in self._host.items()},
            rank=self._config.pp_rank * max(self._config.tp_size, 1) + self._config.tp_rank,
            ranks=ranks,
        )
        self._pools = {name: PoolPages(self._host[name], opened[name]) for name in opened}
        if not self._config.tp_rank and not self._config.pp_rank:
            self._log_start(opened, ranks, weights)
        watch(self)

    def _log_start(self, opened: dict[str, Pages], ranks: int, weights: str) -> None:
        """Log the disk or store of a server, with the data of its first rank."""
        path, pages = self._settings.path, opened["kv"]
        if isinstance(pages, KeyedDisk):
            kept, store = self._settings.kept, pages.store
            others = 0
            if not kept:
                others = count_others(store.folder.parent, lambda about: weights in about)
            stores = [each.store for each in opened.values() if isinstance(each, KeyedDisk)]
            tier = OpenTier(
                "host" if kept else "disk",
                sum(each.slots * each.layer_bytes for each in stores) * ranks,
                store.slots,
                found=len(pages),
                others=others,
                path=path,
                kept=kept,
            )
        else:
            tier = OpenTier("remote", 0, 0, path=path)
        tokens = int(self.mem_pool_host.page_size)
        line = startup_line([tier], block_tokens=tokens, ranks=ranks)
        log_startup(_LOG, line, startup_warnings([tier]))

    def weights_updated(self) -> None:
        """Disable the storage, because a rank cannot identify the updated weights of all ranks."""
        if not self._updated:
            _LOG.warning(
                "kvtrie: weights were updated in place: the storage is off until a restart"
            )
        self._updated = True

    @property
    def pages(self) -> Pages:
        """The disk or the shared store of KV.

        Raises:
            ConfigError: SGLang has not registered its pools yet.
        """
        return self._pool(PoolName.KV).pages

    def _pool(self, name: str) -> PoolPages:
        if str(name) not in self._pools:
            raise ConfigError(f"SGLang has not registered its host memory of {str(name)!r}")
        return self._pools[str(name)]

    def exists(self, key: str) -> bool:
        """Return whether a page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ANN401, ARG002 - SGLang's own
        """Return the number of leading stored pages."""
        pages = self.pages
        with self.boundary.contained():
            return 0 if self._updated else pages.leading([key.encode() for key in keys])
        return 0

    def get(
        self,
        key: str,
        target_location: torch.Tensor | None = None,
        target_sizes: Any = None,  # noqa: ANN401, ARG002 - SGLang's own
    ) -> torch.Tensor | None:
        """Read a page into `target_location`. Return None if it is missing or damaged."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor | None] | None = None,
        target_sizes: Any = None,  # noqa: ANN401, ARG002 - SGLang's own
    ) -> list[torch.Tensor | None]:
        """Read several pages, each as by `get`."""
        pages = self.pages
        if self._updated:
            return [None] * len(keys)
        with self.boundary.contained():
            targets = [
                self.mem_pool_host.get_dummy_flat_data_page() if target is None else target
                for target in (target_locations or [None] * len(keys))
            ]
            rows = [(key.encode(), memory_of(to)) for key, to in zip(keys, targets, strict=True)]
            results = pages.read_many(rows)
            return [to if good else None for to, good in zip(targets, results, strict=True)]
        return [None] * len(keys)

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,  # noqa: ANN401, ARG002 - SGLang's own
        target_sizes: Any = None,  # noqa: ANN401, ARG002 - SGLang's own
    ) -> bool:
        """Store a page. Return whether it is stored."""
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,  # noqa: ANN401, ARG002 - SGLang's own
        target_sizes: Any = None,  # noqa: ANN401, ARG002 - SGLang's own
    ) -> bool:
        """Store pages, in the order of their sequence. Return whether all are stored."""
        return all(self._write(keys, values or [], None))

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read pages into SGLang's host memory of KV. Return for each whether it was intact."""
        one = PoolTransfer(PoolName.KV, host_indices, keys=keys)
        return self.batch_get_v2([one], extra_info)[PoolName.KV]

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages of SGLang's host memory of KV. Return for each whether it is stored."""
        one = PoolTransfer(PoolName.KV, host_indices, keys=keys)
        return self.batch_set_v2([one], extra_info)[PoolName.KV]

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> PoolTransferResult:
        """Return the number of restorable leading pages, and all restorable lengths.

        A prefix needs all its pages of KV and of pools with the policy `ALL_PAGES`. Of pools with
        the policy `TRAILING_PAGES`, it needs the last `len(keys)` pages before its end.
        """
        pages = self.pages
        if self._updated:
            return PoolTransferResult.empty()
        with self.boundary.contained():
            prefix = [key.encode() for key in keys]
            prefix = prefix[: pages.leading(prefix)]
            lengths = list(range(1, len(prefix) + 1))
            found: dict[str, int] = {PoolName.KV: len(prefix)}
            for transfer in pool_transfers or []:
                # Groups of compressed pages are a second form of KV pages, and limit nothing.
                if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                    continue
                trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
                last = max(1, len(transfer.keys or ())) if trailing else None
                borders = self._pool(transfer.name).borders(prefix, last)
                found[transfer.name] = max(borders, default=0)
                lengths = [length for length in lengths if length in borders]
            hit = {name: pages for name, pages in found.items() if pages}
            return PoolTransferResult(lengths[-1] if lengths else 0, hit, lengths)
        return PoolTransferResult.empty()

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> dict[str, list[bool]]:
        """Read pages into SGLang's pools. Return for each pool and page whether it was intact."""
        return {each.name: self._transfer(each, self._pool(each.name).read) for each in transfers}

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Store pages of SGLang's pools. Return for each pool and page whether it is stored."""
        before = getattr(extra_info, "prefix_keys", None)
        done: dict[str, list[bool]] = {}
        for each in transfers:
            # The last pages of a window or a state do not follow the prefix pages.
            follows = before and each.hit_policy != PoolHitPolicy.TRAILING_PAGES
            after = before[-1] if before and follows else None
            done[each.name] = self._transfer(
                each, partial(self._pool(each.name).write, before=after)
            )
        return done

    def _transfer(
        self, transfer: PoolTransfer, copy: Callable[[list[str], torch.Tensor], list[bool]]
    ) -> list[bool]:
        """Read or write pages of a pool, unless the weights were updated in place."""
        keys, rows = transfer.keys or [], transfer.host_indices
        if not self._updated:
            with self.boundary.contained():
                return copy(keys, torch.empty(0) if rows is None else rows)
        return [False] * len(keys)

    def clear(self) -> None:
        """Remove all pages of a disk. A shared store keeps its pages, but its index is dropped."""
        self.pages  # noqa: B018 - raises where there are none
        for pool in self._pools.values():
            pool.pages.clear()

    def close(self) -> None:
        """Release the folder or store. Idempotent."""
        for pool in self._pools.values():
            pool.pages.close()

    def _write(
        self, keys: list[str], values: Sequence[torch.Tensor], before: str | None
    ) -> list[bool]:
        pool = self._pool(PoolName.KV)
        if not self._updated:
            with self.boundary.contained():
                return pool.write_values(keys, values, before)
        return [False] * len(keys)


def _size(config: HiCacheStorageConfig, name: str, pool: HostKVCache, weights: str) -> PoolSize:
    """Return a pool's page size and the format of its bytes, not covered by SGLang's hashes."""
    page = pool.get_dummy_flat_data_page()
    ranks = {
        name: getattr(config, name)
        for name in ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size")
    }
    # Latent KV is equal on all tensor-parallel ranks. States are divided among ranks.
    if config.is_mla_model and name != "mamba":
        ranks |= {"tp_rank": 0, "tp_size": 1}
    which = "" if name == "kv" else f" of {name}"
    meaning = (
        f"sglang {page.dtype} {tuple(page.shape)} {pool.layout} pages of {pool.page_size}{which} "
        f"{ranks} {weights}"
    )
    return PoolSize(meaning, page.numel() * page.element_size(), int(pool.page_num))

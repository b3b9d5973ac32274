"""KvtrieHiCache: a disk, kept memory or a shared store as `dynamic` storage of SGLang's HiCache.

`--hicache-storage-backend dynamic` loads it; `--hicache-storage-backend-extra-config` has `path`,
a folder or the URL of a store, or `keep`, a file in memory. Pages belong to the weights that all
ranks have loaded; once weights were updated in place nothing is found or written until the server
starts again. Invariant: the place takes no more than its room; a damaged page is a miss; a later
server of the same model finds the pages, and of a shared store other servers do.
Cost: a digest per page and call, and the read or write.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvtrie.engines.server.boundary import Boundary
from kvtrie.engines.server.startup import OpenTier, log_startup, startup_line, startup_warnings
from kvtrie.engines.sglang.pages import PageSettings
from kvtrie.engines.sglang.weights import identity, watch
from kvtrie.errors import ConfigError
from kvtrie.tiers.keyed_disk import KeyedDisk
from kvtrie.tiers.other_stores import count_others

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    from kvtrie.engines.sglang.pages import Pages

__all__ = ["KvtrieHiCache"]

_LOG = logging.getLogger("sglang.srt.kvtrie")  # whose lines SGLang shows


class KvtrieHiCache(HiCacheStorage):
    """Pages of one rank on disk or in a shared store, by SGLang's hashes.

    Args:
        storage_config: SGLang's `HiCacheStorageConfig`; its `extra_config` has our keys.
        kwargs: SGLang gives none.

    Raises:
        ConfigError: unknown keys, no path, or latent KV of several ranks on a disk.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:  # noqa: ANN401, ARG002
        self._settings = PageSettings.read(storage_config.extra_config or {})
        ranks, on_disk = storage_config.tp_size, self._settings.store is None
        # Of latent KV, SGLang writes the pages of one rank, which are those of all.
        if storage_config.is_mla_model and ranks > 1 and on_disk:
            raise ConfigError(
                f"latent KV of {ranks} ranks: SGLang writes it once, and one process at a time has "
                f"a folder of kvtrie; a shared store, as 'folder:{self._settings.path}', is read "
                "by all ranks"
            )
        self._config = storage_config
        self._pages: Pages | None = None
        self._updated = False  # SGLang's memory may have KV of other weights than the pages
        self.boundary = Boundary("the storage kvtrie", _LOG)

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Open the pages: the pool says how large one is."""
        super().register_mem_pool_host(mem_pool_host)
        page = mem_pool_host.get_dummy_flat_data_page()
        # A size is that of the server.
        ranks = max(self._config.tp_size, 1) * max(self._config.pp_size, 1)
        weights = f"weights {identity()}"  # which all ranks ask for at once
        self._pages = self._settings.open(
            meaning=f"{_meaning(self._config, mem_pool_host, page)} {weights}",
            size=page.numel() * page.element_size(),
            rank=self._config.pp_rank * max(self._config.tp_size, 1) + self._config.tp_rank,
            ranks=ranks,
        )
        if not self._config.tp_rank and not self._config.pp_rank:
            self._log_start(self._pages, ranks, weights)
        watch(self)

    def _log_start(self, pages: Pages, ranks: int, weights: str) -> None:
        """Log the disk or store of a server once, as its first rank has it."""
        path = self._settings.path
        if isinstance(pages, KeyedDisk):
            kept, store = self._settings.kept, pages.store
            others = 0
            if not kept:
                others = count_others(store.folder.parent, lambda about: weights in about)
            tier = OpenTier(
                "host" if kept else "disk",
                store.slots * store.layer_bytes * ranks,
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

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: str) -> None:
        """Refuse pools other than that of KV.

        Raises:
            ConfigError: a pool of states, windows, an indexer or a draft model.
        """
        if str(host_pool_name) != "kv":
            self.close()
            raise ConfigError(
                f"SGLang has a pool {str(host_pool_name)!r}: the storage kvtrie keeps the pool "
                "'kv' only; models with states, windows or drafts are not supported"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def weights_updated(self) -> None:
        """Find and write nothing any more: other ranks' weights are not known here."""
        if not self._updated:
            _LOG.warning(
                "kvtrie: weights were updated in place: the storage is off until a restart"
            )
        self._updated = True

    @property
    def pages(self) -> Pages:
        """The disk or the shared store.

        Raises:
            ConfigError: SGLang has not registered its pool yet.
        """
        if self._pages is None:
            raise ConfigError("SGLang has not registered its host memory")
        return self._pages

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ANN401, ARG002 - SGLang's own
        """Return the number of leading pages that are there."""
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
        """A page, read into `target_location` and proved; None if it is not there or not whole."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor | None] | None = None,
        target_sizes: Any = None,  # noqa: ANN401, ARG002 - SGLang's own
    ) -> list[torch.Tensor | None]:
        """Pages, as `get` gives each."""
        pages = self.pages
        if self._updated:
            return [None] * len(keys)
        with self.boundary.contained():
            targets = [
                self.mem_pool_host.get_dummy_flat_data_page() if target is None else target
                for target in (target_locations or [None] * len(keys))
            ]
            rows = [(key.encode(), _bytes(to)) for key, to in zip(keys, targets, strict=True)]
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
        """Keep a page; whether it is there now."""
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,  # noqa: ANN401, ARG002 - SGLang's own
        target_sizes: Any = None,  # noqa: ANN401, ARG002 - SGLang's own
    ) -> bool:
        """Keep pages, in the order of their sequence; whether all are there now."""
        return all(self._write(keys, values or [], None))

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> list[bool]:
        """Read pages into SGLang's host memory; which of them were there and whole."""
        pages = self.batch_get(keys)
        for page, at in zip(pages, self._starts(host_indices), strict=True):
            if page is not None:
                self.mem_pool_host.set_from_flat_data_page(at, page)
        return [page is not None for page in pages]

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Keep pages out of SGLang's host memory; which of them are there now."""
        pool = self.mem_pool_host
        values = [pool.get_data_page(at, flat=True) for at in self._starts(host_indices)]
        before = getattr(extra_info, "prefix_keys", None)
        return self._write(keys, values, before)

    def clear(self) -> None:
        """Remove all pages of a disk; of a shared store, forget what it has, and remove nothing."""
        self.pages.clear()

    def close(self) -> None:
        """Give the folder or store back. Closing twice does nothing."""
        if self._pages is not None:
            self._pages.close()

    def _starts(self, host_indices: torch.Tensor) -> list[int]:
        size = self.mem_pool_host.page_size
        return host_indices[::size].tolist()  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType] - torch's

    def _write(
        self, keys: list[str], values: Sequence[torch.Tensor], before: list[str] | None
    ) -> list[bool]:
        pages = self.pages
        if self._updated:
            return [False] * len(keys)
        with self.boundary.contained():
            rows = [
                (key.encode(), _bytes(value.contiguous()))
                for key, value in zip(keys, values, strict=True)
            ]
            return pages.write_many(rows, after=before[-1].encode() if before else None)
        return [False] * len(keys)


def _bytes(page: torch.Tensor) -> NDArray[np.uint8]:
    return page.view(-1).view(torch.uint8).numpy()


def _meaning(config: HiCacheStorageConfig, pool: HostKVCache, page: torch.Tensor) -> str:
    """The form of a page's bytes; SGLang's hashes name tokens, salt and adapter."""
    ranks = {
        name: getattr(config, name)
        for name in ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size")
    }
    if config.is_mla_model:  # equal on all tensor-parallel ranks
        ranks |= {"tp_rank": 0, "tp_size": 1}
    return (
        f"sglang {page.dtype} {tuple(page.shape)} {pool.layout} pages of {pool.page_size} {ranks}"
    )

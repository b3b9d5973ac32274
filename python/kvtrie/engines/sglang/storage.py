"""KvtrieHiCache: kvtrie's disk as a `dynamic` storage of SGLang's HiCache.

`--hicache-storage-backend dynamic` loads it; `--hicache-storage-backend-extra-config` has `path`
and `bytes` or `blocks`. Pages belong to the weights that all ranks have loaded; once weights were
updated in place nothing is found or written until the server starts again.
Invariant: the files take no more than their room; every byte is proved on every read, so a damaged
page is a miss; a later server of the same model finds the pages.
Cost: a digest per page and call, and the read or write.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvtrie.argument import folder, shown, whole
from kvtrie.engines.boundary import Boundary
from kvtrie.engines.sglang.weights import identity, watch
from kvtrie.engines.startup import OpenTier, log_startup, startup_line, startup_warnings
from kvtrie.errors import ConfigError
from kvtrie.sizes import free_disk
from kvtrie.sizes import size as size_of
from kvtrie.tiers.keyed_disk import KeyedDisk
from kvtrie.tiers.other_stores import count_others

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

__all__ = ["KvtrieHiCache"]

_LOG = logging.getLogger("sglang.srt.kvtrie")  # whose lines SGLang shows
_SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1")
_KEYS = ("path", "bytes", "blocks", "durability")
_FAR = 2**62


class KvtrieHiCache(HiCacheStorage):
    """Pages of one rank on disk, by SGLang's hashes.

    Args:
        storage_config: SGLang's `HiCacheStorageConfig`; its `extra_config` has our keys.
        kwargs: SGLang gives none.

    Raises:
        ConfigError: unknown keys, no path, or latent KV of several ranks.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:  # noqa: ANN401, ARG002
        extra: dict[str, Any] = dict(storage_config.extra_config or {})
        allowed = {*_SGLANGS, *_KEYS}
        # The same section has SGLang's own keys of prefetching.
        strange = [
            shown(key)
            for key in extra
            if key not in allowed and not key.startswith(("prefetch", "hicache"))
        ]
        if strange:
            raise ConfigError(f"the storage has no {', '.join(strange)}: {', '.join(_KEYS)}")
        if not extra.get("path"):
            raise ConfigError("the storage needs a path, the folder of its files")
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            raise ConfigError(
                f"latent KV of {storage_config.tp_size} ranks: SGLang writes it once, and one "
                "process at a time has a folder of kvtrie; not supported"
            )
        self._config, self._extra = storage_config, extra
        self._disk: KeyedDisk | None = None
        self._updated = False  # SGLang's memory may have KV of other weights than the files
        self.boundary = Boundary("the storage kvtrie", _LOG)

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Open the files: the pool says how large a page is."""
        super().register_mem_pool_host(mem_pool_host)
        page = mem_pool_host.get_dummy_flat_data_page()
        size = page.numel() * page.element_size()
        blocks, path = self._extra.get("blocks"), folder("path", self._extra["path"])
        # A size is that of the server.
        ranks = max(self._config.tp_size, 1) * max(self._config.pp_size, 1)
        room = self._extra.get("bytes")
        if room is not None:
            room = size_of("bytes", room, ranks, of=lambda: free_disk(path)) // ranks
        weights = f"weights {identity()}"  # which all ranks ask for at once
        self._disk = KeyedDisk(
            path,
            meaning=f"{_meaning(self._config, mem_pool_host, page)} {weights}",
            size=size,
            durability=self._extra.get("durability", "flush"),
            bytes=room,
            blocks=None if blocks is None else whole("blocks", blocks, 1, _FAR),
        )
        if self._disk.read_only:
            reason = self._disk.store.refusal
            self._disk.close()
            raise ConfigError(f"the folder {path} cannot be written: {reason}")
        if not self._config.tp_rank and not self._config.pp_rank:
            self._log_start(self._disk, path, ranks, weights)
        watch(self)

    def _log_start(self, disk: KeyedDisk, path: str, ranks: int, weights: str) -> None:
        """Log the disk of a server once, as its first rank has it."""
        tier = OpenTier(
            "disk",
            disk.store.slots * disk.store.layer_bytes * ranks,
            disk.store.slots,
            found=len(disk),
            others=count_others(disk.store.folder.parent, lambda about: weights in about),
            path=path,
        )
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
            _LOG.warning("kvtrie: weights were updated in place: the disk is off until a restart")
        self._updated = True

    @property
    def disk(self) -> KeyedDisk:
        """The files.

        Raises:
            ConfigError: SGLang has not registered its pool yet.
        """
        if self._disk is None:
            raise ConfigError("SGLang has not registered its host memory")
        return self._disk

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        disk = self.disk
        with self.boundary.contained():
            return not self._updated and key.encode() in disk
        return False

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
        disk = self.disk
        if self._updated:
            return [None] * len(keys)
        with self.boundary.contained():
            targets = [
                self.mem_pool_host.get_dummy_flat_data_page() if target is None else target
                for target in (target_locations or [None] * len(keys))
            ]
            rows = [(key.encode(), _bytes(to)) for key, to in zip(keys, targets, strict=True)]
            results = disk.read_many(rows)
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
        """Forget all pages."""
        self.disk.clear()

    def close(self) -> None:
        """Give the folder back. Closing twice does nothing."""
        if self._disk is not None:
            self._disk.close()

    def _starts(self, host_indices: torch.Tensor) -> list[int]:
        size = self.mem_pool_host.page_size
        return host_indices[::size].tolist()  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType] - torch's

    def _write(
        self, keys: list[str], values: Sequence[torch.Tensor], before: list[str] | None
    ) -> list[bool]:
        disk = self.disk
        if self._updated:
            return [False] * len(keys)
        with self.boundary.contained():
            rows = [
                (key.encode(), _bytes(value.contiguous()))
                for key, value in zip(keys, values, strict=True)
            ]
            return disk.write_many(rows, after=before[-1].encode() if before else None)
        return [False] * len(keys)


def _bytes(page: torch.Tensor) -> NDArray[np.uint8]:
    return page.view(-1).view(torch.uint8).numpy()


def _meaning(config: HiCacheStorageConfig, pool: HostKVCache, page: torch.Tensor) -> str:
    """The form of a page's bytes; SGLang's hashes name tokens, salt and adapter."""
    ranks = {
        name: getattr(config, name)
        for name in ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size")
    }
    return (
        f"sglang {page.dtype} {tuple(page.shape)} {pool.layout} pages of {pool.page_size} {ranks}"
    )

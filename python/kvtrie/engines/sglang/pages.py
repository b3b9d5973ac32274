"""Stored pages of a rank: on disk, in kept memory, or in a shared store.

Reads the settings of `--hicache-storage-backend-extra-config` and opens the storage at `path` or
`keep`. Invariant: nothing is opened with an invalid setting. Pages of a different format are never
found. Cost: opening a disk or a store.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import flag, folder, instance, masked, real, shown, whole
from kvtrie.settings.sizes import free_disk
from kvtrie.settings.sizes import size as size_of
from kvtrie.settings.tier import Tier
from kvtrie.tiers.keyed_disk import KeyedDisk
from kvtrie.tiers.remote.keyed import KeyedRemote
from kvtrie.tiers.remote.open import read_secret

__all__ = ["KEYS", "PageSettings", "Pages", "PoolSize"]

Pages: TypeAlias = "KeyedDisk | KeyedRemote"

_SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1")
_TIER_KEYS = (
    "path",
    "bytes",
    "blocks",
    "durability",
    "keep",
    "keep_replace",
    "trust_s",
    "lookup",
    "secret_file",
)
_KEYS = ("deadline_s", "lookup_s")
KEYS = (*_TIER_KEYS, *_KEYS)
"""Keys of the settings of a storage."""

_OF_DISK = ("bytes", "blocks", "durability")
_OF_MEMORY = ("bytes", "blocks", "keep", "keep_replace")
_OF_STORE = ("trust_s", "lookup", "secret_file", *_KEYS)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_FAR = 2**62
_DEADLINE_S = 30.0
_LOOKUP_S = 0.05


class PoolSize(NamedTuple):
    """A pool of SGLang's host memory.

    Attributes:
        meaning: everything that decides the bytes of a page: model, layout, rank, pool.
        size: bytes of a page.
        pages: number of pages in the pool.
    """

    meaning: str
    size: int
    pages: int


@dataclass(frozen=True, slots=True)
class PageSettings:
    """Settings of a server's storage.

    Attributes:
        path: the folder of the files, the URL of a shared store, or the file of kept memory.
        bytes: room of a disk or of kept memory, for all ranks and pools together.
        blocks: the same room in pages of KV, per rank.
        durability: the event that a finished write to a disk survives, as in `Tier`.
        store: the tier of a shared store with its checked settings, else None.
        kept: whether the pages are in a file in memory, for the next server.
        replace: whether to replace a file of kept memory from a different model.
        deadline_s: time limit in seconds for a read or write of several pages of a shared store.
        lookup_s: time limit in seconds for a lookup in a shared store.
    """

    path: str
    bytes: int | str | None = None
    blocks: int | None = None
    durability: Any = "flush"
    store: Tier | None = None
    kept: bool = False
    replace: bool = False
    deadline_s: float = _DEADLINE_S
    lookup_s: float = _LOOKUP_S

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> PageSettings:
        """Check the settings of a server.

        Args:
            extra: the keys of the configuration, including SGLang's own.

        Raises:
            ConfigError: unknown keys, no path, a key not allowed for this storage, or an invalid
                value.
        """
        instance("the storage's settings", extra, Mapping)
        ours = KEYS
        # The same section has SGLang's own keys of prefetching.
        unknown = [
            shown(key)
            for key in extra
            if key not in {*_SGLANGS, *ours} and not key.startswith(("prefetch", "hicache"))
        ]
        if unknown:
            raise ConfigError(f"the storage has no {', '.join(unknown)}: {', '.join(ours)}")
        given = {key: extra[key] for key in ours if extra.get(key) is not None}
        if "keep" in given:
            return cls._of_memory(given)
        path = given.get("path")
        if not path:
            raise ConfigError("the storage needs a path: a folder, or the URL of a shared store")
        shared = isinstance(path, str) and _SCHEME.match(path) and not path.startswith("file:")
        for key in (*_OF_DISK, "keep_replace") if shared else (*_OF_STORE, "keep_replace"):
            if key in given:
                place = "a shared store has its own" if shared else "only a shared store has one"
                place = "it is for keep" if key == "keep_replace" else place
                raise ConfigError(f"{key} is given with path {masked(str(path))!r}: {place}")
        if not shared:
            blocks = given.get("blocks")
            return cls(
                folder("path", path),
                given.get("bytes"),
                None if blocks is None else whole("blocks", blocks, 1, _FAR),
                given.get("durability", "flush"),
            )
        tier = Tier("remote", blocks=1, **{key: given[key] for key in _TIER_KEYS if key in given})
        deadline = given.get("deadline_s", _DEADLINE_S)
        lookup = given.get("lookup_s", _LOOKUP_S)
        return cls(
            str(tier.path),
            store=tier,
            deadline_s=real("deadline_s", deadline, 1e-3, 1e6),
            lookup_s=real("lookup_s", lookup, 1e-3, 1e6),
        )

    @classmethod
    def _of_memory(cls, given: Mapping[str, Any]) -> PageSettings:
        if unknown := [key for key in given if key not in _OF_MEMORY]:
            raise ConfigError(
                f"keep is given with {', '.join(unknown)}: {', '.join(_OF_MEMORY)} go together"
            )
        blocks = given.get("blocks")
        return cls(
            folder("keep", given["keep"]),
            given.get("bytes"),
            None if blocks is None else whole("blocks", blocks, 1, _FAR),
            kept=True,
            replace=flag("keep_replace", given.get("keep_replace", False)),
        )

    def open(
        self, pools: Mapping[str, PoolSize], *, rank: int = 0, ranks: int = 1
    ) -> dict[str, Pages]:
        """Open the pages of the pools of a rank.

        The pools share a budget, in proportion to their sizes in SGLang's host memory.

        Args:
            pools: the pools by name, KV first.
            rank: index of the rank.
            ranks: number of ranks sharing `bytes`.

        Raises:
            ConfigError: the folder cannot be written, the store or secret cannot be opened, or
                there is no room for a page of each pool.
            TransferError: the folder cannot be read or created.
        """
        room, (kv, *_) = self.bytes, pools.values()
        if room is not None:
            # A share of free memory would differ at each start, and the file with it.
            free = None if self.kept else lambda: free_disk(self.path)
            room = size_of("bytes", room, ranks, of=free) // ranks
        whole = sum(pool.size * pool.pages for pool in pools.values())
        opened: dict[str, Pages] = {}
        try:
            for name, pool in pools.items():
                file = f"{self.path}{f'-{rank}' * (ranks > 1)}{f'-{name}' * bool(opened)}"
                share = None if room is None else room * pool.size * pool.pages // whole
                blocks = self.blocks and -(-self.blocks * pool.pages // kv.pages)
                opened[name] = self._open(pool, file, share, blocks)
        except BaseException:
            for pages in opened.values():
                pages.close()
            raise
        return opened

    def _open(self, pool: PoolSize, file: str, room: int | None, blocks: int | None) -> Pages:
        """Open the pages of a pool. In kept memory, each pool has a separate file."""
        if self.store is not None:
            return KeyedRemote(
                self.path,
                meaning=pool.meaning,
                size=pool.size,
                secret=read_secret(self.store.secret_file),
                trust_s=self.store.trust_s,
                lookup=self.store.lookup,
                lookup_s=self.lookup_s,
                deadline_s=self.deadline_s,
            )
        disk = KeyedDisk(
            file if self.kept else self.path,
            meaning=pool.meaning,
            size=pool.size,
            durability=self.durability,
            bytes=room,
            blocks=blocks,
            keep=self.kept,
            replace=self.replace,
        )
        if disk.read_only and not self.kept:
            reason = disk.store.refusal
            disk.close()
            raise ConfigError(f"the folder {self.path} cannot be written: {reason}")
        return disk

"""KeyedDisk: blocks of equal size in the files of a disk tier, identified by an engine's keys.

With `keep` the blocks are in a file of a memory file system and outlive the process.

For engines with their own block lookup. As in every disk tier, each byte is verified on each read,
a damaged block is a miss, and the files never exceed the configured size. The next process finds
the blocks again with their ages and uses, also after a kill: reads and writes save ages and uses
every five seconds, and so does `close`.
Invariant: a block is found under its key, or not at all. When the room is used up, a `KeyOrder`
selects the blocks to evict.
Cost: a digest per call and block, and the read or write.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrie._kvtrie import DiskStore, Index
from kvtrie.errors import ConfigError, TransferError
from kvtrie.failure_log import FailureLog
from kvtrie.settings.argument import folder as path_of
from kvtrie.settings.sizes import all_disk, check_exists, forgotten, free_disk
from kvtrie.settings.sizes import size as read_size
from kvtrie.tiers.kept_slots import KeptSlots
from kvtrie.tiers.key_label import KEY_TOKENS, content_key, key_label
from kvtrie.tiers.key_order import KeyOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Literal, TypeAlias

    import numpy as np
    from numpy.typing import NDArray

    Slots: TypeAlias = DiskStore | KeptSlots

__all__ = ["KeyedDisk"]

_LOG = logging.getLogger(__name__)
_DEPTH = 8
_PERIOD_NS = 5_000_000_000
_AT_ONCE = 1024  # blocks with uses saved per call


class KeyedDisk:
    """A bounded store of blocks by key.

    Args:
        folder: folder of the files, possibly with stores of different meanings. With `keep` a
            single file in a memory file system.
        meaning: the meaning of the bytes: model, layout, rank. Stores with a different meaning are
            not found.
        size: bytes of a block.
        bytes: size of all files together, or with `keep` of all blocks, also as "200GB" or "25%" of
            the free disk.
        blocks: number of blocks, instead of `bytes`.
        durability: the event survived by a finished write, as in `Tier`.
        io: "direct" bypasses the system's page cache if possible, or "buffered".
        keep: whether the blocks are in memory found by the next process. While another process has
            the file, the memory is temporary.
        replace: whether to replace a kept file with a different meaning, otherwise it is refused.
        clock: nanoseconds of the wall clock.

    Attributes:
        read_only: whether another process writes to the store, or the folder was removed or
            replaced.

    Raises:
        ConfigError: no room for a block, neither or both of `bytes` and `blocks`, or a kept file
            outside a memory file system or with a different meaning.
        TransferError: the folder cannot be read or created, or has no room for a kept file.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        meaning: str,
        size: int,
        bytes: int | str | None = None,  # noqa: A002 - the name in `Tier`
        blocks: int | None = None,
        durability: Literal["none", "flush", "fsync"] = "flush",
        io: Literal["direct", "buffered"] = "direct",
        keep: bool = False,
        replace: bool = False,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        if (bytes is None) == (blocks is None):
            raise ConfigError(f"bytes is {bytes} and blocks is {blocks}: one of them wanted")
        folder = path_of("keep" if keep else "the folder of a disk", folder)
        if bytes is not None and keep:
            bytes = read_size("bytes of kept memory", bytes)  # noqa: A001
            blocks = bytes // size
        elif bytes is not None:
            bytes = read_size("bytes of a disk", bytes, of=lambda: free_disk(folder))  # noqa: A001
            blocks = DiskStore.blocks_in(bytes, 1, size, KEY_TOKENS)
        if not blocks or blocks < 1:
            hint = forgotten(bytes or 0)
            raise ConfigError(
                f"a budget of {bytes} bytes has no room for a block of {size}: more wanted{hint}"
            )
        about = f"kvtrie keyed blocks of {size} bytes: {meaning}"
        if keep:
            file = Path(folder).absolute()
            self.store: Slots = KeptSlots.open(file, about, size, blocks, replace=replace)
        else:
            check_exists(f"a disk in {folder}", blocks * size, all_disk(folder), "its file system")
            self.store = DiskStore(
                folder,
                identity=hashlib.blake2b(about.encode(), digest_size=32).digest(),
                about=about,
                layers=1,
                layer_bytes=size,
                block_tokens=KEY_TOKENS,
                blocks=blocks,
                durability=durability,
                io=io,
            )
        self._begin(blocks, clock)

    def _begin(self, blocks: int, clock: Callable[[], int]) -> None:
        """Load the blocks of an earlier process."""
        self._lost = self.store.read_only
        self._clock, self._closed = clock, False
        self._failures = FailureLog(_LOG, clock)
        self._lock = threading.RLock()
        self._slots: dict[bytes, int] = {}
        self._reading: Counter[bytes] = Counter()  # digests of blocks being read
        self._coming: set[bytes] = set()  # digests of blocks being written
        now = clock()
        found = self.store.blocks(now)
        self._order = KeyOrder(max(blocks, len(found)), clock=clock)
        self._slots.update((digest, slot) for slot, digest, *_ in found)
        self._order.restore((digest, age, uses) for _, digest, _, _, age, uses, _ in found)
        self._used: dict[bytes, bytes] = {}  # digests with an unsaved use, and their keys
        self._next_ns = now + _PERIOD_NS
        taken = set(self._slots.values())
        self._free = [slot for slot in range(blocks - 1, -1, -1) if slot not in taken]
        for reason in self.store.reasons():
            _LOG.warning("%s: %s", self.store.folder, reason)

    @property
    def read_only(self) -> bool:
        """Whether the store currently refuses writes."""
        return self.store.read_only

    def __len__(self) -> int:
        with self._lock:
            return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return content_key(key) in self._slots

    def leading(self, keys: Iterable[bytes]) -> int:
        """Return the number of leading blocks of a sequence in the store."""
        return sum(1 for _ in takewhile(self.__contains__, keys))

    def present(self, keys: Iterable[bytes]) -> list[bool]:
        """Return the presence of each block, looked up independently."""
        return [key in self for key in keys]

    def read_many(self, rows: Sequence[tuple[bytes, NDArray[np.uint8]]]) -> list[bool]:
        """Read blocks into memory, and return for each block whether it was present and intact.

        Args:
            rows: keys, each with memory for a block.
        """
        with self._lock:
            found = [(at, content_key(key), memory) for at, (key, memory) in enumerate(rows)]
            stored = [
                (at, digest, self._slots[digest], memory)
                for at, digest, memory in found
                if digest in self._slots
            ]
            self._order.request(digest for _, digest, _, _ in stored)
            self._used.update((digest, rows[at][0]) for at, digest, _, _ in stored)
            self._reading.update(digest for _, digest, _, _ in stored)
        reads = [(digest, slot, (0, 1), _rows(memory)) for _, digest, slot, memory in stored]
        why = self.store.read_many(reads, depth=_DEPTH) if reads else []
        whole = [False] * len(rows)
        with self._lock:
            self._reading -= Counter(digest for _, digest, _, _ in stored)
            for (at, digest, _, _), reason in zip(stored, why, strict=True):
                whole[at] = reason is None
                if reason is not None and digest in self._slots:
                    _LOG.warning("%s: %s", self.store.folder, reason)
                    self._drop(digest)
        self._note_uses()
        return whole

    def write_many(
        self,
        rows: Sequence[tuple[bytes, NDArray[np.uint8]]],
        *,
        after: bytes | None = None,
    ) -> list[bool]:
        """Write blocks, and return for each block whether it is now stored.

        Args:
            rows: keys and bytes, in the order of a sequence.
            after: the key of the block before the first row.
        """
        if self.read_only:
            return [key in self for key, _ in rows]
        begun: list[tuple[int, bytes, int, NDArray[np.uint8]]] = []
        on_disk = [True] * len(rows)
        with self._lock:
            digests = [content_key(key) for key, _ in rows]
            self._make_room(set(digests))
            for at, (digest, (key, memory)) in enumerate(zip(digests, rows, strict=True)):
                if digest in self._slots:
                    self._used[digest] = key
                elif digest in self._coming:
                    continue
                elif self._free:
                    self._coming.add(digest)
                    begun.append((at, digest, self._free.pop(), memory))
                else:
                    on_disk[at] = False
        writes = [
            (digest, slot, (0, 1), _rows(memory), key_label(rows[at][0]))
            for at, digest, slot, memory in begun
        ]
        why = self.store.write_many(writes, self._clock(), depth=_DEPTH) if writes else []
        with self._lock:
            for (at, digest, slot, _), reason in zip(begun, why, strict=True):
                self._coming.remove(digest)
                if reason is None:
                    self._slots[digest] = slot
                else:
                    on_disk[at] = False
                    if not self._report_loss():
                        self._failures.warn(self.store.folder, reason)
                    self._free.append(slot)
            before = None if after is None else content_key(after)
            self._order.request(filter(self._slots.__contains__, digests), after=before)
        self._note_uses()
        return on_disk

    def use(self, keys: Iterable[bytes]) -> None:
        """Record a use of the stored blocks among `keys`, in the order of their sequence."""
        with self._lock:
            found = {d: key for key in keys if (d := content_key(key)) in self._slots}
            self._order.request(found)
            self._used.update(found)

    def keep(self, key: bytes, priority: int, ttl_ns: int | None = None) -> None:
        """Give a block a priority, as for `Retain`."""
        with self._lock:
            self._order.keep([content_key(key)], priority, ttl_ns)

    def clear(self) -> None:
        """Remove all blocks except blocks being read or written, and their predecessors."""
        with self._lock:
            evict, reading = self._order.evict, self._reading
            while gone := evict(len(self._order), reading) or evict(1, reading):
                self._forget(gone)

    def close(self) -> None:
        """Close the files and release the folder. Closing twice does nothing."""
        if not self._closed:
            self._closed = True
            self._note_uses(everything=True)
        self.store.close()

    def _note_uses(self, *, everything: bool = False) -> None:
        """Save ages and uses of used blocks, if the period since the last save has passed.

        Args:
            everything: save all of them now.
        """
        with self._lock:
            now = self._clock()
            if self.read_only or not self._used or (now < self._next_ns and not everything):
                return
            count = len(self._used) if everything else min(len(self._used), _AT_ONCE)
            used = [self._used.popitem() for _ in range(count)]
            rows = [
                (key_label(key, age, uses), self._slots[digest], 0, 1)
                for (digest, key), (age, uses) in zip(
                    used, self._order.ages(digest for digest, _ in used), strict=True
                )
            ]
            if not self._used:
                self._next_ns = now + _PERIOD_NS
        try:
            self.store.note_uses(Index(rows), now)
        except TransferError as error:
            if not self._report_loss():
                self._failures.warn(self.store.folder, f"uses were not written down: {error}")

    def _report_loss(self) -> bool:
        """Return whether the folder was removed or replaced while open, and log it once."""
        if not self.read_only:
            return False
        if not self._lost:
            self._lost = True
            for reason in self.store.reasons():
                _LOG.warning("%s: %s", self.store.folder, reason)
        return True

    def _make_room(self, digests: set[bytes]) -> None:
        """Evict until all of these blocks have slots, or no more blocks may leave."""
        evict, reading, stay = self._order.evict, self._reading, digests | self._reading.keys()
        while (lacking := len(digests - self._slots.keys() - self._coming) - len(self._free)) > 0:
            gone = evict(lacking, stay) or evict(1, stay)
            if not gone and len(digests) <= self.store.slots:
                # Stored blocks keep all their predecessors, so evict them too and rewrite them.
                gone = evict(1, reading)
            if not gone:
                return
            self._forget(gone)

    def _drop(self, digest: bytes) -> None:
        self._order.remove(digest)
        self._forget([digest])

    def _forget(self, digests: list[bytes]) -> None:
        """Free the slots of blocks no longer in the order."""
        slots = [self._slots.pop(digest) for digest in digests]
        self._free += slots
        for digest in digests:
            self._used.pop(digest, None)
        if not self.read_only:
            try:
                for slot in slots:
                    self.store.remove(slot)
            except TransferError:
                # Freed room is reused only by writes, which fail in a lost folder.
                if not self._report_loss():
                    raise


def _rows(memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return memory.reshape(1, -1)

"""KeptPool: a host tier's memory in a file of a memory file system, found by the next process.

`docs/design/kept.md` describes the file: a header, a table with an entry per slot, and the pool.
Before a block is copied into a slot its entry says so; after the copy, a worker thread takes the
checksum and seals the entry. A block of an earlier process is proved before its first use.
Invariant: a block is found again only if it was sealed, and used only if its bytes give the
checksum; one process has the lock, and only that process writes. A slot is the manager's number; a
*place* is a block of memory, which another slot may adopt.
`kept_tier` says which files groups of layers have.
Cost: a few microseconds per block and copy under one lock; a hash over the bytes per block that is
stored, after its move has been reported, and one on the first use of a block of an earlier process;
with groups a BLAKE2b per layer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvtrie import Index
from kvtrie.errors import TransferError
from kvtrie.model.group_pages import LAYER_DIGEST, layer_digests
from kvtrie.tiers.kept_file import mapped
from kvtrie.tiers.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Self

    import torch
    from numpy.typing import NDArray

    from kvtrie._kvtrie import KeptFile
    from kvtrie.model.layout import Layout
    from kvtrie.model.shape import ModelShape
    from kvtrie.tiers.group_slots import GroupSlots
    from kvtrie.tiers.page_owners import PageOwners
    from kvtrie.tiers.pages_file import PagesFile

__all__ = ["KeptPool"]

_LOG = logging.getLogger(__name__)
_NO_KEY = bytes(32)
_AT_ONCE = 16

_open: weakref.WeakSet[KeptPool] = weakref.WeakSet()


class _Unsealed(NamedTuple):
    """A place whose copies have ended."""

    place: int
    generation: int
    layers: tuple[int, int]
    label: bytes
    wall: int


class KeptPool(Pool):
    """The memory of a host tier with `keep`.

    Args:
        file: its table, locked by this process.
        memory: its pool, uint8.
        model: the shape whose KV is kept.
        blocks: the tier's blocks.
        block_tokens: tokens per block.
        layout: layout of a layer of a block.
        pinned: whether to register the memory with CUDA.
        spare: blocks of memory beyond those of the slots.
        clock: the wall clock in nanoseconds; ages grow by it between two processes.
        slots: as of `Pool`.
        pages: the pages that the group shares with others; None has memory and table in one file.
        owners: the owners of those pages.
        rest: as of `Pool`.

    Attributes:
        file: the table.
    """

    def __init__(
        self,
        file: KeptFile,
        memory: torch.Tensor,
        model: ModelShape,
        blocks: int,
        block_tokens: int,
        *,
        layout: Layout | None = None,
        pinned: bool = False,
        spare: int = 0,
        clock: Callable[[], int] = time.time_ns,
        slots: GroupSlots | None = None,
        pages: PagesFile | None = None,
        owners: PageOwners | None = None,
        rest: Self | None = None,
    ) -> None:
        super().__init__(
            model,
            blocks,
            block_tokens,
            layout=layout,
            pinned=pinned,
            spare=spare,
            memory=memory,
            slots=slots,
            rest=rest,
        )
        self.file = file
        self._clock = clock
        self._unsealed: deque[_Unsealed] = deque()
        self._sealing = threading.Lock()
        self._lock = file.descriptors[1]
        self._pages = pages
        self._take_pages = None if owners is None else owners.join(self.slots.number, self._empty)
        self._digests: NDArray[np.uint8] | None = None
        if pages is not None:
            size = file.slots * self.layers * LAYER_DIGEST
            table = np.frombuffer(mapped(file), np.uint8)[:size]
            self._digests = table.reshape(file.slots, self.layers, LAYER_DIGEST)
        _open.add(self)

    @property
    def closed(self) -> bool:
        """Whether the lock was given back: another process may write there."""
        return self not in _open

    @property
    def kept_blocks(self) -> int:
        """Blocks that the next process would find, of all groups; 0 once it is closed."""
        return sum(part.file.sealed for part in self.groups) if self in _open else 0

    @property
    def lost_blocks(self) -> Mapping[str, int]:
        """Blocks of earlier processes that were misses, by reason.

        `torn`: not sealed when the process died; `entry`, `key`, `checksum`: damaged; `record`: too
        long for an entry.
        """
        lost = Counter[str]()
        for part in self.groups if self in _open else ():
            lost.update(part.file.lost)
        return lost

    def begin(
        self, slots: NDArray[np.integer], keys: Sequence[bytes], layers: tuple[int, int]
    ) -> dict[int, str]:
        """Mark blocks as being written, before the first byte of their layers is copied.

        Returns:
            By index, why a block may not be written.
        """
        if self not in _open:  # another process may write there now
            return self._closed(len(keys))
        places = self._places(slots)
        if self._take_pages is not None:
            self._take_pages(places)
        failed: dict[int, str] = {}
        for at, why in enumerate(self.file.begin(places, list(keys), layers)):
            if why is None:
                continue
            # More layers for a block of an earlier process: the ones that are there come first.
            reason = self._prove(places[at], keys[at])
            if reason is None:
                (reason,) = self.file.begin([places[at]], [keys[at]], layers)
            if reason is not None:
                failed[at] = reason
        return failed

    def finish(
        self,
        slots: NDArray[np.integer],
        keys: Sequence[bytes],
        labels: Sequence[bytes],
        *,
        ok: bool,
    ) -> None:
        """Note that copies into slots have ended; `seal` seals those that are whole."""
        if self not in _open:
            return
        places = self._places(slots)
        named = {place: label for place, label in zip(places, labels, strict=False) if label}
        if ok and len(named) == len(places):
            sealable = self.file.finish(places, list(keys), ok=True)
        else:  # a block that is not committed has no name to be found by
            sealable: list[tuple[int, int, tuple[int, int]]] = []
            for place, key in zip(places, keys, strict=True):
                sealable += self.file.finish([place], [key], ok=ok and place in named)
        wall = self._clock()  # of the ages in the labels
        self._unsealed.extend(
            _Unsealed(place, generation, layers, named[place], wall)
            for place, generation, layers in sealable
        )

    @property
    def sealable(self) -> bool:
        """Whether blocks wait to be sealed, and no thread seals."""
        return bool(self._unsealed) and not self._sealing.locked()

    @property
    def unsealed(self) -> int:
        """Blocks that wait to be sealed."""
        return len(self._unsealed)

    def seal(self) -> bool:
        """Seal some blocks whose copies have ended, unless another thread does.

        Returns:
            Whether there were any.
        """
        if not self._sealing.acquire(blocking=False):
            return False
        try:
            return self._seal_some()
        finally:
            self._sealing.release()

    def _seal_some(self) -> bool:
        waiting: list[_Unsealed] = []
        with suppress(IndexError):
            while len(waiting) < _AT_ONCE:
                waiting.append(self._unsealed.popleft())
        for wall, batch in groupby(waiting, key=attrgetter("wall")):
            rows = [
                (place, generation, layers, self._bytes(place, layers), label)
                for place, generation, layers, label, _ in batch
            ]
            self.file.seal(rows, wall)
        return bool(waiting)

    def _seal_all(self) -> None:
        with self._sealing:  # what another thread seals just now is waited for
            while self._seal_some():
                pass

    def prove(self, slots: NDArray[np.integer], keys: Sequence[bytes]) -> dict[int, str]:
        """Prove blocks of earlier processes before their first use; others cost nothing.

        Returns:
            By index, why a block is a miss.
        """
        if self not in _open:
            return self._closed(len(keys))
        if not self.file.unproved and not self.file.lost:
            return {}
        proofs = (self._prove(*one) for one in zip(self._places(slots), keys, strict=True))
        return {at: why for at, why in enumerate(proofs) if why is not None}

    def recall(self) -> Index:
        """The index of the blocks of earlier processes, for `BlockManager.load_index`."""
        found = self.file.sealed
        wall = self._clock()
        if self._place is None:
            index = self.file.index(wall)
        else:
            self.arrange(self.file.index(wall).slot.tolist())
            index = self.file.index(wall, self.slot_of_place())
        lost = ", ".join(f"{count} {reason}" for reason, count in self.file.lost.items())
        _LOG.info(
            "%s: %d blocks of %d found again, lost: %s",
            self.file.path,
            len(index),
            found + sum(self.file.lost.values()),
            lost or "none",
        )
        if self.slots.number:
            index = Index((*row[:4], self.slots.number) for row in index)
        return index if self._rest is None else index + self._rest.recall()

    def keep(self, index: Index) -> None:
        """Seal all that has been copied, and note the ages and uses of the blocks of `index`."""
        for part in self.groups:
            part._seal_all()  # noqa: SLF001 - this class's
        self.note_uses(index)

    def note_uses(self, index: Index, wall: int | None = None) -> None:
        """Note ages and uses of the blocks of `index`, and leave all others as they are.

        Args:
            index: what `BlockManager.index` gave of some blocks.
            wall: the time of its ages by the wall clock, in nanoseconds; None is now.
        """
        wall = self.wall() if wall is None else wall
        if self in _open:
            mine = index
            if self.slots.group is not None:
                rows = zip(index, index.group.tolist(), strict=True)
                mine = Index(row[:4] for row, group in rows if group == self.slots.group)
            self.file.note_uses(mine, wall, self._place)
        if self._rest is not None:
            self._rest.note_uses(index, wall)

    def wall(self) -> int:
        """Return the time of the wall clock, in nanoseconds."""
        return self._clock()

    def forget(self) -> None:
        """Empty all slots: no later process finds a block. No copy may be under way."""
        if self in _open:
            self._unsealed.clear()
            self._empty(0, self.blocks + self.spare)
            if self._rest is not None:
                self._rest.forget()

    def _empty(self, first: int, upto: int) -> None:
        """Empty the entries of some places."""
        places = [*range(first, upto)]
        keys = [_NO_KEY] * len(places)
        self.file.begin(places, keys, (0, self.layers))
        self.file.finish(places, keys, ok=False)

    @property
    def address(self) -> tuple[int, int, int]:
        """Process, descriptor and offset at which `open_kept_memory` finds the memory."""
        return os.getpid(), self.file.descriptors[0], self.file.pool[0]

    def set_aside(self, blocks: int) -> list[int]:
        """As of `Pool`; the spare blocks count as being written."""
        taken = super().set_aside(blocks)
        self.file.begin(taken, [_NO_KEY] * len(taken), (0, self.layers))
        return taken

    def put_back(self, spares: Iterable[int]) -> None:
        """Give spare blocks back, which hold nothing then."""
        given = list(spares)
        if self in _open:
            self.file.finish(given, [_NO_KEY] * len(given), ok=False)
        super().put_back(given)

    def named(
        self, slots: NDArray[np.integer], keys: Sequence[bytes], labels: Sequence[bytes]
    ) -> None:
        """Name the blocks whose spare blocks slots have adopted; `seal` seals them."""
        self.file.begin(self._places(slots), list(keys), (0, self.layers))
        self.finish(slots, keys, labels, ok=True)

    def close(self) -> None:
        """Seal what has been copied, and give the lock and the memory back. Twice does nothing."""
        try:
            if self._pages is not None:
                self._pages.close()  # first: the tables are locked yet
            if self in _open:
                self._seal_all()
                _open.discard(self)
                self.file.close()
        finally:
            self._digests = None if self._digests is None else self._digests[:0].copy()
            super().close()

    def _closed(self, count: int) -> dict[int, str]:
        return dict.fromkeys(range(count), f"{self.file.path} is closed")

    def in_child(self) -> None:
        """Leave the lock to the parent, in a fork."""
        if self._lock is not None:
            with suppress(OSError):
                os.close(self._lock)

    def _places(self, slots: NDArray[np.integer]) -> list[int]:
        places = slots if self._place is None else self._place[slots]
        return places.tolist()

    def _bytes(self, place: int, layers: tuple[int, int]) -> NDArray[np.uint8]:
        """The bytes of some layers, or their digests, which a table of a group has then."""
        first, (lo, hi) = place * self.layers, layers
        if self._digests is None:
            return self.planes[0][first + lo : first + hi].numpy()
        digests = layer_digests(self.layer_bytes(place, layers).view(-1).numpy().data, hi - lo)
        self._digests[place, lo:hi] = np.frombuffer(digests, np.uint8).reshape(hi - lo, -1)
        return self._digests[place, lo:hi]

    def _prove(self, place: int, key: bytes) -> str | None:
        try:
            layers = self.file.to_prove(place)
            if layers is not None:
                self.file.prove(place, key, self._bytes(place, layers))
        except TransferError as error:
            _LOG.warning("%s: %s", self.file.path, error)
            return str(error)
        return None


def _after_fork() -> None:
    for pool in list(_open):
        pool.in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

"""KeptPool: a host tier's memory in a file of a memory file system, for the next process.

`docs/design/kept.md` describes the file: a header, a table with an entry per slot, and the pool. An
entry is marked as being written before a block is copied into its slot. After the copy, a worker
thread computes the checksum and seals the entry. A block of an earlier process is verified before
its first use.
Invariant: a block is found again only if it was sealed, and used only if its checksum matches. Only
the process with the lock writes. A slot is the manager's number. A *place* is a block of memory,
adoptable by any slot.
`kept_tier` describes the files for groups of layers.
Cost: a few microseconds per block and copy under a lock. A hash over the bytes of each stored
block, after its move is reported, and a hash at the first use of a block of an earlier process.
With groups, a BLAKE2b per layer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
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


class _Unsealed(NamedTuple):
    """A fully copied place."""

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
        model: the shape of the model.
        blocks: the tier's blocks.
        block_tokens: tokens per block.
        layout: layout of a layer of a block.
        pinned: whether to register the memory with CUDA.
        spare: blocks of memory beyond the slots.
        clock: the wall clock in nanoseconds, also for ages across processes.
        slots: as for `Pool`.
        pages: the pages shared with other groups, or None for memory and table in a single file.
        owners: the owners of the pages.
        rest: as for `Pool`.

    Attributes:
        file: the table.
        closed: whether the lock was released, so another process may write to the memory.
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
        self._pages = pages
        self._take_pages = None if owners is None else owners.join(self.slots.number, self._empty)
        self._digests: NDArray[np.uint8] | None = None
        if pages is not None:
            size = file.slots * self.layers * LAYER_DIGEST
            table = np.frombuffer(mapped(file), np.uint8)[:size]
            self._digests = table.reshape(file.slots, self.layers, LAYER_DIGEST)
        self.closed = False

    @property
    def kept_blocks(self) -> int:
        """Blocks the next process would find, over all groups, or 0 after closing."""
        return 0 if self.closed else sum(part.file.sealed for part in self.groups)

    @property
    def lost_blocks(self) -> Mapping[str, int]:
        """Unusable blocks of earlier processes, by reason.

        `torn`: not sealed when the process died. `entry`, `key`, `checksum`: damaged. `record`: too
        long for an entry.
        """
        lost = Counter[str]()
        for part in () if self.closed else self.groups:
            lost.update(part.file.lost)
        return lost

    def begin(
        self, slots: NDArray[np.integer], keys: Sequence[bytes], layers: tuple[int, int]
    ) -> dict[int, str]:
        """Mark blocks as being written, before the first byte of their layers is copied.

        Returns:
            The reasons against writing a block, by index.
        """
        if self.closed:  # another process may now write to the memory
            return self._closed(len(keys))
        places = self._places(slots)
        if self._take_pages is not None:
            self._take_pages(places)
        failed: dict[int, str] = {}
        for at, why in enumerate(self.file.begin(places, list(keys), layers)):
            if why is None:
                continue
            # Verify the existing layers of an earlier process's block before adding layers.
            reason = self._verify(places[at], keys[at])
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
        """Record the end of copies into slots, so that `seal` seals the complete blocks."""
        if self.closed:
            return
        places = self._places(slots)
        named = {place: label for place, label in zip(places, labels, strict=False) if label}
        if ok and len(named) == len(places):
            sealable = self.file.finish(places, list(keys), ok=True)
        else:  # an uncommitted block has no name
            sealable: list[tuple[int, int, tuple[int, int]]] = []
            for place, key in zip(places, keys, strict=True):
                sealable += self.file.finish([place], [key], ok=ok and place in named)
        wall = self._clock()  # time of the ages in the labels
        self._unsealed.extend(
            _Unsealed(place, generation, layers, named[place], wall)
            for place, generation, layers in sealable
        )

    @property
    def sealable(self) -> bool:
        """Whether blocks wait to be sealed, and no thread is sealing."""
        return bool(self._unsealed) and not self._sealing.locked()

    @property
    def unsealed(self) -> int:
        """Number of blocks waiting to be sealed."""
        return len(self._unsealed)

    def seal(self) -> bool:
        """Seal some copied blocks, unless another thread is sealing.

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
        with self._sealing:  # wait for a thread currently sealing
            while self._seal_some():
                pass

    def verify(self, slots: NDArray[np.integer], keys: Sequence[bytes]) -> dict[int, str]:
        """Verify blocks of earlier processes before their first use. Other blocks cost nothing.

        Returns:
            The reason of each miss, by index.
        """
        if self.closed:
            return self._closed(len(keys))
        if not self.file.unverified and not self.file.lost:
            return {}
        proofs = (self._verify(*one) for one in zip(self._places(slots), keys, strict=True))
        return {at: why for at, why in enumerate(proofs) if why is not None}

    def recall(self) -> Index:
        """Return the index of the blocks of earlier processes, for `BlockManager.load_index`."""
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
        """Seal all copied blocks, and save the ages and uses of the blocks of `index`."""
        for part in self.groups:
            part._seal_all()  # noqa: SLF001 - same class
        self.note_uses(index)

    def note_uses(self, index: Index, wall: int | None = None) -> None:
        """Save ages and uses of the blocks of `index`, and leave all other blocks unchanged.

        Args:
            index: blocks as returned by `BlockManager.index`.
            wall: wall clock time of its ages in nanoseconds, or None for now.
        """
        wall = self.wall() if wall is None else wall
        if not self.closed:
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
        """Empty all slots, so no later process finds a block. No copy may be in flight."""
        if not self.closed:
            self._unsealed.clear()
            self._empty(0, self.blocks + self.spare)
            if self._rest is not None:
                self._rest.forget()

    def _empty(self, first: int, upto: int) -> None:
        """Empty the entries of a range of places."""
        places = [*range(first, upto)]
        keys = [_NO_KEY] * len(places)
        self.file.begin(places, keys, (0, self.layers))
        self.file.finish(places, keys, ok=False)

    @property
    def address(self) -> tuple[int, int, int]:
        """Process, descriptor and offset of the memory, for `open_kept_memory`."""
        return os.getpid(), self.file.descriptor, self.file.pool[0]

    def set_aside(self, blocks: int) -> list[int]:
        """Call `Pool.set_aside` and mark the spare blocks as being written."""
        taken = super().set_aside(blocks)
        self.file.begin(taken, [_NO_KEY] * len(taken), (0, self.layers))
        return taken

    def put_back(self, spares: Iterable[int]) -> None:
        """Return spare blocks and empty their entries."""
        given = list(spares)
        if not self.closed:
            self.file.finish(given, [_NO_KEY] * len(given), ok=False)
        super().put_back(given)

    def named(
        self, slots: NDArray[np.integer], keys: Sequence[bytes], labels: Sequence[bytes]
    ) -> None:
        """Name adopted spare blocks, so that `seal` seals them."""
        self.file.begin(self._places(slots), list(keys), (0, self.layers))
        self.finish(slots, keys, labels, ok=True)

    def close(self) -> None:
        """Seal the copied blocks, release the lock and the memory. Closing twice does nothing."""
        try:
            if self._pages is not None:
                self._pages.close()  # first, while the tables are still locked
            if not self.closed:
                self._seal_all()
                self.closed = True
                self.file.close()
        finally:
            self._digests = None if self._digests is None else self._digests[:0].copy()
            super().close()

    def _closed(self, count: int) -> dict[int, str]:
        return dict.fromkeys(range(count), f"{self.file.path} is closed")

    def _places(self, slots: NDArray[np.integer]) -> list[int]:
        places = slots if self._place is None else self._place[slots]
        return places.tolist()

    def _bytes(self, place: int, layers: tuple[int, int]) -> NDArray[np.uint8]:
        """Return the bytes of a range of layers, or update and return a group's digests."""
        first, (lo, hi) = place * self.layers, layers
        if self._digests is None:
            return self.planes[0][first + lo : first + hi].numpy()
        digests = layer_digests(self.layer_bytes(place, layers).view(-1).numpy().data, hi - lo)
        self._digests[place, lo:hi] = np.frombuffer(digests, np.uint8).reshape(hi - lo, -1)
        return self._digests[place, lo:hi]

    def _verify(self, place: int, key: bytes) -> str | None:
        try:
            layers = self.file.layers_to_verify(place)
            if layers is not None:
                self.file.verify_block(place, key, self._bytes(place, layers))
        except TransferError as error:
            _LOG.warning("%s: %s", self.file.path, error)
            return str(error)
        return None

"""KeptPool: a host tier's memory in a file of a memory file system, found by the next process.

`docs/design/kept.md` describes the file: a header, a table with an entry per slot, and the pool.
Before a block is copied into a slot its entry says so; after the copy, a worker thread takes the
checksum and seals the entry. A block of an earlier process is proved before its first use.
Invariant: a block is found again only if it was sealed, and used only if its bytes give the
checksum; one process has the lock, and only that process writes. A slot is the manager's number; a
*place* is a block of memory, which another slot may adopt.
Cost: a few microseconds per block and copy under one lock; a hash over the bytes per block that is
stored, after its move has been reported, and one on the first use of a block of an earlier process.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvtrie._kvtrie import KeptFile
from kvtrie.errors import ConfigError, TransferError
from kvtrie.model.shape import require_fingerprint
from kvtrie.settings.sizes import free_memory
from kvtrie.tiers.block_format import BlockFormat
from kvtrie.tiers.meaning import meaning
from kvtrie.tiers.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from kvtrie import Index
    from kvtrie.model.layout import Layout
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier

__all__ = [
    "KeptPool",
    "advise",
    "check_memory",
    "kept_pool",
    "open_kept_file",
    "open_kept_memory",
]

_LOG = logging.getLogger(__name__)
_NO_KEY = bytes(32)
_PATIENCE_S = 10.0  # that the system takes at most to free the memory of a killed process
_PAUSE_S = 0.02
_AT_ONCE = 16
_POPULATE_WRITE = 23  # of Linux, from 5.14 on

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
    ) -> None:
        super().__init__(
            model,
            blocks,
            block_tokens,
            layout=layout,
            pinned=pinned,
            spare=spare,
            memory=memory,
        )
        self._keep_in(file, clock)

    def _keep_in(self, file: KeptFile, clock: Callable[[], int]) -> None:
        """Note the slots in a table from now on."""
        self.file = file
        self._clock = clock
        self._unsealed: deque[_Unsealed] = deque()
        self._sealing = threading.Lock()
        self._lock = file.descriptors[1]
        _open.add(self)

    @property
    def closed(self) -> bool:
        """Whether the lock was given back: another process may write there."""
        return self not in _open

    @property
    def kept_blocks(self) -> int:
        """Blocks that the next process would find; 0 once it is closed."""
        return self.file.sealed if self in _open else 0

    @property
    def lost_blocks(self) -> Mapping[str, int]:
        """Blocks of earlier processes that were misses, by reason.

        `torn`: not sealed when the process died; `entry`, `key`, `checksum`: damaged; `record`: too
        long for an entry.
        """
        return self.file.lost if self in _open else {}

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
                (
                    one.place,
                    one.generation,
                    one.layers,
                    self._bytes(one.place, one.layers),
                    one.label,
                )
                for one in batch
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
            self._arrange(self._place)
            index = self.file.index(wall, self._slots(self._place))
        lost = ", ".join(f"{count} {reason}" for reason, count in self.file.lost.items())
        _LOG.info(
            "%s: %d blocks of %d found again, lost: %s",
            self.file.path,
            len(index),
            found + sum(self.file.lost.values()),
            lost or "none",
        )
        return index

    def keep(self, index: Index) -> None:
        """Seal all that has been copied, and note the ages and uses of the blocks of `index`."""
        self._seal_all()
        self.note_uses(index)

    def note_uses(self, index: Index, wall: int | None = None) -> None:
        """Note ages and uses of the blocks of `index`, and leave all others as they are.

        Args:
            index: what `BlockManager.index` gave of some blocks.
            wall: the time of its ages by the wall clock, in nanoseconds; None is now.
        """
        if self in _open:
            self.file.note_uses(index, self.wall() if wall is None else wall, self._place)

    def wall(self) -> int:
        """Return the time of the wall clock, in nanoseconds."""
        return self._clock()

    def forget(self) -> None:
        """Empty all slots: no later process finds a block. No copy may be under way."""
        if self in _open:
            self._unsealed.clear()
            places = [*range(self.blocks + self.spare)]
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
        if self in _open:
            self._seal_all()
            _open.discard(self)
            self.file.close()
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
        first = place * self.layers
        return self.planes[0][first + layers[0] : first + layers[1]].numpy()

    def _prove(self, place: int, key: bytes) -> str | None:
        try:
            layers = self.file.to_prove(place)
            if layers is not None:
                self.file.prove(place, key, self._bytes(place, layers))
        except TransferError as error:
            _LOG.warning("%s: %s", self.file.path, error)
            return str(error)
        return None

    def _arrange(self, place: NDArray[np.int64]) -> None:
        """Give slots to the blocks in places that were adopted, as far as there are free slots."""
        index = self.file.index(self._clock())
        held = set(index.slot.tolist())
        empty = (slot for slot in range(self.blocks) if int(place[slot]) not in held)
        for at, spare in enumerate(self._free):
            if spare in held:
                slot = next(empty, None)
                if slot is None:
                    return
                self._free[at], place[slot] = int(place[slot]), spare

    def _slots(self, place: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slot of each place; below 0 for spare ones."""
        slots = np.full(self.blocks + self.spare, -1, dtype=np.int64)
        slots[place] = np.arange(self.blocks)
        return slots


def kept_pool(
    model: ModelShape,
    tier: Tier,
    block_tokens: int,
    *,
    layout: Layout | None = None,
    rank: int = 0,
    ranks: int = 1,
    pinned: bool = False,
    spare: int = 0,
    clock: Callable[[], int] = time.time_ns,
    patience_s: float = _PATIENCE_S,
) -> KeptPool | None:
    """Open the file of a tier with `keep`, or make it with the first block that is written.

    Args:
        model: the shape whose KV is kept; its `fingerprint` may not be empty.
        tier: its path, its budget and its layout.
        block_tokens: tokens per block.
        layout: layout of a layer of a block; None is the tier's.
        rank: the tensor-parallel rank whose part of the KV this is.
        ranks: how many there are; each has a separate file, with its number after the path.
        pinned: whether to register the memory with CUDA.
        spare: blocks of memory beyond those of the slots.
        clock: the wall clock in nanoseconds.
        patience_s: seconds to wait for the lock of a process that has died.

    Returns:
        The pool; None if another process has the file, of which the log warns.

    Raises:
        ConfigError: a model without a fingerprint, a layout with K and V apart, a path outside a
            memory file system, a file with something else unless `keep_replace`.
        TransferError: the file system has no room.
    """
    assert tier.keep is not None  # noqa: S101 - its callers look
    path = Path(tier.keep if ranks == 1 else f"{tier.keep}-{rank}").absolute()
    require_fingerprint(model, f"the kept file {path}")
    block_format = BlockFormat.of(model, layout or tier.layout, block_tokens)
    planes = block_format.planes()
    if len(planes) != 1:
        raise ConfigError("a kept file has K and V of a layer together: use Layout(kv='joined')")
    about = meaning(model, block_format.layout, block_tokens, rank)
    blocks = tier.room(model, block_tokens)
    check_memory(path, (blocks + spare) * model.layers * planes[0])
    file = open_kept_file(
        path,
        about,
        (model.layers, planes[0], block_tokens, blocks + spare),
        replace=tier.keep_replace,
        patience_s=patience_s,
    )
    if file is None:
        return None
    if file.cold is not None:
        _LOG.warning("%s: starts without blocks: %s", path, file.cold)
    start, length = file.pool
    size = (blocks + spare) * model.layers * planes[0]
    try:
        mapped = mmap.mmap(file.descriptors[0], length - start, offset=start)
        advise(mapped, touch=not file.found)
        return KeptPool(
            file,
            torch.frombuffer(mapped, dtype=torch.uint8)[:size],
            model,
            blocks,
            block_tokens,
            layout=layout or tier.layout,
            pinned=pinned,
            spare=spare,
            clock=clock,
        )
    except BaseException:
        file.close()
        raise


def advise(mapped: mmap.mmap, *, touch: bool) -> None:
    """Ask for huge pages and, with `touch`, for all pages now; first copies would wait for them.

    The bytes of a file that is not made yet stay.
    """
    wanted = [getattr(mmap, "MADV_HUGEPAGE", None), _POPULATE_WRITE if touch else None]
    for advice in wanted:
        with suppress(OSError):  # a kernel without it
            if advice is not None:
                mapped.madvise(advice)


def open_kept_memory(process: int, file: int, start: int, size: int) -> torch.Tensor:
    """Map the memory of a kept pool of another process of this machine, without its table.

    Args:
        process: that process, `file` its descriptor and `start` the pool's offset: the `address`
            of the pool.
        file: see `process`.
        start: see `process`.
        size: bytes of the pool.

    Raises:
        ConfigError: there is no such memory.
    """
    what = f"the kept file {file} of process {process}"
    try:
        found = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{what} cannot be opened: {error}") from error
    try:
        length = os.fstat(found).st_size
        if length < start + size:
            raise ConfigError(f"{what} has {length} bytes, at least {start + size} wanted")
        mapped = mmap.mmap(found, length - start, offset=start)
    finally:
        os.close(found)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:size]


def check_memory(path: Path, wanted: int) -> None:
    """Raise if a new file would take more memory than is free: the kernel would end a process."""
    try:
        there = path.stat().st_size
    except OSError:
        there = 0
    if there < wanted and wanted - there > (free := free_memory()):
        raise ConfigError(f"{path} takes {wanted} bytes of memory: {free} are free")


def open_kept_file(
    path: Path,
    about: str,
    numbers: tuple[int, int, int, int],
    *,
    replace: bool,
    patience_s: float = _PATIENCE_S,
) -> KeptFile | None:
    """Open a file of layers, bytes of a layer, tokens of a block and blocks.

    One that is new, or whose blocks cannot be used, is made when the first block is written; closed
    before that, it is as it was.

    Args:
        path: the file.
        about: all that decides the bytes of its blocks.
        numbers: those four.
        replace: whether a file with something else is replaced.
        patience_s: seconds to wait for the lock of a process that has died.

    Returns:
        The file; None if another process has it, of which the log warns.

    Raises:
        ConfigError: a path outside a memory file system, a file with something else.
        TransferError: the file system has no room.
    """
    layers, layer_bytes, block_tokens, blocks = numbers
    until = time.monotonic() + patience_s
    while True:
        file, owner, dead = KeptFile.open(
            path,
            identity=hashlib.blake2b(about.encode(), digest_size=32).digest(),
            about=about,
            layers=layers,
            layer_bytes=layer_bytes,
            block_tokens=block_tokens,
            blocks=blocks,
            replace=replace,
        )
        if file is not None:
            return file
        # The system releases the lock of a killed process once its memory is freed.
        if not dead or time.monotonic() > until:
            break
        time.sleep(_PAUSE_S)
    _LOG.warning(
        "%s: %s writes there, so this process starts with a pool of its own and keeps no blocks",
        path,
        "another process" if owner is None else f"process {owner}",
    )
    return None


def _after_fork() -> None:
    for pool in list(_open):
        pool.in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

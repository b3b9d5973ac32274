"""KeptSlots: slots in a file of a memory file system, with the calls of a disk's files.

A `KeyedDisk` over them keeps blocks in memory that outlives the process: see `KeyedKept`.
Invariant: that of `KeptPool`: a block is found again only if it was sealed, and used only if its
bytes give the checksum; one process has the file. Cost: a copy and a hash per block that is
written, a copy per block that is read, a hash on the first read of a block of an earlier process.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtrie.argument import folder as path_of
from kvtrie.errors import ConfigError, TransferError
from kvtrie.sizes import forgotten
from kvtrie.sizes import size as read_size
from kvtrie.tiers.kept import check_memory, open_kept_file
from kvtrie.tiers.key_label import KEY_TOKENS
from kvtrie.tiers.keyed_disk import KeyedDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvtrie import Index
    from kvtrie._kvtrie import KeptFile

    _Layers = tuple[int, int]

__all__ = ["KeptSlots", "KeyedKept"]

_NO_KEY = bytes(32)
_WHOLE = (0, 1)


class KeptSlots:
    """The slots of a kept file, in memory.

    Args:
        file: the file, of blocks of one layer.
        kept: whether the next process finds it.

    Attributes:
        folder: the file's path.
        slots: how many blocks it may hold.
        layer_bytes: bytes of a block.
        kept: whether the next process finds it.
        read_only: whether it is closed.
        refusal: why nothing may be written, which is never so.
    """

    refusal: str | None = None

    def __init__(self, file: KeptFile, *, kept: bool) -> None:
        self._file, self.kept = file, kept
        self.folder, self.slots, self.layer_bytes = file.path, file.slots, file.layer_bytes
        start, length = file.pool
        mapped = mmap.mmap(file.descriptors[0], length - start, offset=start)
        size = self.slots * self.layer_bytes
        self._memory = np.frombuffer(mapped, np.uint8)[:size].reshape(self.slots, -1)
        self.read_only = False

    def blocks(self, wall: int) -> list[tuple[int, bytes, int, int, int, int, bool]]:
        """Every block as a row, as of a `DiskStore`."""
        return self._file.blocks(wall)

    def reasons(self) -> list[str]:
        """Why blocks of an earlier process were lost."""
        lost = [f"{count} blocks lost: {why}" for why, count in self._file.lost.items()]
        return lost if self._file.cold is None else [self._file.cold, *lost]

    def read_many(
        self, blocks: Sequence[tuple[bytes, int, _Layers, NDArray[np.uint8]]], *, depth: int
    ) -> list[str | None]:
        """Copy blocks into memory, each proved once; the reason for each that is not."""
        del depth
        return [self._read(key, slot, memory) for key, slot, _, memory in blocks]

    def write_many(
        self,
        blocks: Sequence[tuple[bytes, int, _Layers, NDArray[np.uint8], bytes]],
        wall: int,
        *,
        depth: int,
    ) -> list[str | None]:
        """Copy blocks into slots, and seal them; the reason for each that could not be."""
        del depth
        return [self._write(*one, wall) for one in blocks]

    def remove(self, slot: int) -> None:
        """Empty a slot."""
        if not self.read_only:
            self._file.begin([slot], [_NO_KEY], _WHOLE)
            self._file.finish([slot], [_NO_KEY], ok=False)

    def note_uses(self, index: Index, wall: int) -> None:
        """Note the ages and uses of the blocks of an index."""
        self._file.note_uses(index, wall)

    def close(self) -> None:
        """Give the lock back. Closing twice does nothing."""
        self.read_only = True
        self._file.close()

    def _read(self, key: bytes, slot: int, memory: NDArray[np.uint8]) -> str | None:
        try:
            if self._file.to_prove(slot) is not None:
                self._file.prove(slot, key, self._memory[slot : slot + 1])
        except TransferError as error:
            return str(error)
        memory[:] = self._memory[slot]
        return None

    def _write(
        self,
        key: bytes,
        slot: int,
        _: _Layers,
        memory: NDArray[np.uint8],
        label: bytes,
        wall: int,
    ) -> str | None:
        (why,) = self._file.begin([slot], [key], _WHOLE)
        if why is not None:
            return why
        self._memory[slot] = memory[0]
        sealable = self._file.finish([slot], [key], ok=True)
        rows = [(*one, self._memory[slot : slot + 1], label) for one in sealable]
        return None if self._file.seal(rows, wall) else "the block was not sealed"


class KeyedKept(KeyedDisk):
    """Blocks by an engine's keys in a file in memory that the next process finds.

    Args:
        path: the file, in a memory file system.
        meaning: all that decides what the bytes are: model, layout, rank.
        size: bytes of a block.
        bytes: memory of all blocks, also as "20GB"; or
        blocks: how many blocks.
        replace: whether a file of another meaning is replaced; otherwise it is refused.
        clock: nanoseconds of the wall clock.

    Raises:
        ConfigError: no room for one block, neither or both of `bytes` and `blocks`, a path outside
            a memory file system, a file of another meaning.
        TransferError: the file system has no room.
    """

    def __init__(  # pyright: ignore[reportMissingSuperCall] - `_start` takes its place
        self,
        path: str | Path,
        *,
        meaning: str,
        size: int,
        bytes: int | str | None = None,  # noqa: A002 - the name that `Tier` has for it
        blocks: int | None = None,
        replace: bool = False,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        if (bytes is None) == (blocks is None):
            raise ConfigError(f"bytes is {bytes} and blocks is {blocks}: one of them wanted")
        file = Path(path_of("keep", path)).absolute()
        if bytes is not None:
            room = read_size("bytes of kept memory", bytes)
            blocks = room // size
            if not blocks:
                raise ConfigError(
                    f"a budget of {room} bytes has no room for a block of {size}: more wanted"
                    f"{forgotten(room)}"
                )
        assert blocks is not None  # noqa: S101 - one of the two was given
        about = f"kvtrie keyed blocks of {size} bytes: {meaning}"
        self._start(_opened(file, about, size, blocks, replace=replace), blocks, clock)


def _opened(path: Path, about: str, size: int, blocks: int, *, replace: bool) -> KeptSlots:
    """The file; memory that ends with this process if another one has the file."""
    check_memory(path, blocks * size)
    numbers = (1, size, KEY_TOKENS, blocks)
    file = open_kept_file(path, about, numbers, replace=replace)
    if file is not None:
        return KeptSlots(file, kept=True)
    own = path.with_name(f"{path.name}.{os.getpid()}")
    file = open_kept_file(own, about, numbers, replace=True)
    if file is None:
        raise ConfigError(f"{own} is in use by another process")
    own.unlink()
    return KeptSlots(file, kept=False)

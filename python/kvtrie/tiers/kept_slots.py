"""KeptSlots: slots in a file of a memory file system, with the interface of a disk's files.

A `KeyedDisk` with `keep` uses them, so its memory outlives the process.
Invariant: as for `KeptPool`: a block is found again only if it was sealed, and used only if its
checksum matches. Only one process has the file.
Cost: a copy and a hash per written block, a copy per read block, and a hash at the first read of a
block of an earlier process.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np

from kvtrie.errors import ConfigError, TransferError
from kvtrie.tiers.kept_file import check_memory, mapped, open_kept_file
from kvtrie.tiers.key_label import KEY_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Self

    from numpy.typing import NDArray

    from kvtrie import Index
    from kvtrie._kvtrie import KeptFile

    _Layers = tuple[int, int]

__all__ = ["KeptSlots"]

_NO_KEY = bytes(32)
_WHOLE = (0, 1)


class KeptSlots:
    """The slots of a kept file, in memory.

    Args:
        file: the file, with blocks of a single layer.
        kept: whether the next process finds it.

    Attributes:
        folder: the file's path.
        slots: maximum number of blocks.
        layer_bytes: bytes of a block.
        kept: whether the next process finds it.
        read_only: whether it is closed.
        refusal: the reason for refusing all writes, always None.
    """

    refusal: str | None = None

    def __init__(self, file: KeptFile, *, kept: bool) -> None:
        self._file, self.kept = file, kept
        self.folder, self.slots, self.layer_bytes = file.path, file.slots, file.layer_bytes
        size = self.slots * self.layer_bytes
        self._memory = np.frombuffer(mapped(file), np.uint8)[:size].reshape(self.slots, -1)
        self.read_only = False

    @classmethod
    def open(cls, path: Path, about: str, size: int, blocks: int, *, replace: bool) -> Self:
        """Open a file, or temporary memory of this process if another process has the file.

        Args:
            path: the file, in a memory file system.
            about: the meaning of the bytes.
            size: bytes of a block.
            blocks: number of blocks.
            replace: whether to replace a file with a different meaning.

        Raises:
            ConfigError: the path is outside a memory file system, or the file has a different
                meaning.
            TransferError: the file system has no room.
        """
        check_memory(path, blocks * size)
        numbers = (1, size, KEY_TOKENS, blocks)
        file = open_kept_file(path, about, numbers, replace=replace)
        if file is not None:
            return cls(file, kept=True)
        own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        file = open_kept_file(own, about, numbers, replace=False)
        if file is None:
            raise ConfigError(f"{own} is in use by another process")
        own.unlink()
        return cls(file, kept=False)

    def blocks(self, wall: int) -> list[tuple[int, bytes, int, int, int, int, bool]]:
        """Return every block as a row, as in a `DiskStore`."""
        return self._file.blocks(wall)

    def reasons(self) -> list[str]:
        """Return the reasons for lost blocks of an earlier process."""
        lost = [f"{count} blocks lost: {why}" for why, count in self._file.lost.items()]
        return lost if self._file.cold is None else [self._file.cold, *lost]

    def read_many(
        self, blocks: Sequence[tuple[bytes, int, _Layers, NDArray[np.uint8]]], *, depth: int
    ) -> list[str | None]:
        """Copy blocks into memory, each verified once, and return the reason of each failure."""
        del depth
        return [self._read(key, slot, memory) for key, slot, _, memory in blocks]

    def write_many(
        self,
        blocks: Sequence[tuple[bytes, int, _Layers, NDArray[np.uint8], bytes]],
        wall: int,
        *,
        depth: int,
    ) -> list[str | None]:
        """Copy blocks into slots and seal them, and return the reason of each failure."""
        del depth
        return [self._write(*one, wall) for one in blocks]

    def remove(self, slot: int) -> None:
        """Empty a slot."""
        if not self.read_only:
            self._file.begin([slot], [_NO_KEY], _WHOLE)
            self._file.finish([slot], [_NO_KEY], ok=False)

    def note_uses(self, index: Index, wall: int) -> None:
        """Save the ages and uses of the blocks of an index."""
        self._file.note_uses(index, wall)

    def close(self) -> None:
        """Release the lock. Closing twice does nothing."""
        self.read_only = True
        self._file.close()

    def _read(self, key: bytes, slot: int, memory: NDArray[np.uint8]) -> str | None:
        try:
            if self._file.layers_to_verify(slot) is not None:
                self._file.verify_block(slot, key, self._memory[slot : slot + 1])
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

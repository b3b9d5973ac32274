"""PagesFile: the pages of a kept host tier with separate groups of layers, as a file.

Invariant: until `fix_size` the file keeps its old bytes, and `close` restores it. The tables of the
groups stay locked, so no other engine uses it.
Cost: the allocation.
"""

from __future__ import annotations

import mmap
import os
import stat
from typing import TYPE_CHECKING

import torch

from kvtrie.errors import ConfigError, TransferError
from kvtrie.tiers.kept_file import advise

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["PagesFile"]


class PagesFile:
    """A file of a given size, created if missing.

    Content not matching the tables' blocks is detected when the blocks are verified.

    Args:
        path: the file.
        size: bytes of all pages.
        touch: whether to allocate all pages now.

    Attributes:
        memory: the pages, uint8.

    Raises:
        ConfigError: the path belongs to a different user, or is not a regular file.
        TransferError: the file system has no room.
    """

    def __init__(self, path: Path, size: int, *, touch: bool) -> None:
        self._path, self._size_fixed = path, False
        self._whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._new = not os.path.lexists(path)
        self._mapped: mmap.mmap | None = None
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            raise ConfigError(f"{path} cannot be opened: {error.strerror}") from error
        self._before = os.fstat(self._file).st_size
        try:
            self._mapped = self._take_room()
        except OSError as error:
            self.close()
            raise TransferError(f"{path} takes {size} bytes: {error.strerror}") from error
        except BaseException:
            self.close()
            raise
        advise(self._mapped, touch=touch)
        self.memory = torch.frombuffer(self._mapped, dtype=torch.uint8)[:size]

    def _take_room(self) -> mmap.mmap:
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{self._path} is not a file")
        if found.st_uid != os.geteuid():
            raise ConfigError(f"{self._path} is another user's file")
        os.posix_fallocate(self._file, 0, self._whole)
        return mmap.mmap(self._file, self._whole)

    def fix_size(self) -> None:
        """Set the size of the file, before the first byte of a block is written."""
        if not self._size_fixed:
            self._size_fixed = True
            if self._before > self._whole:
                os.ftruncate(self._file, self._whole)

    def close(self) -> None:
        """Close the file, restore it unless its size is fixed, and release the memory."""
        file, self._file = self._file, -1
        if file >= 0:
            try:
                if not self._size_fixed:
                    self._restore(file)
            except OSError:  # the file only takes room
                pass
            finally:
                os.close(file)
        self._mapped, self.memory = None, torch.empty(0, dtype=torch.uint8)

    def _restore(self, file: int) -> None:
        if self._new:
            if _leads_to(self._path, file):
                self._path.unlink()
        elif self._mapped is None:
            os.ftruncate(file, self._before)
        elif self._before < self._whole:
            # Keep the length, because an access beyond the end would kill the process.
            first = -(-self._before // mmap.PAGESIZE) * mmap.PAGESIZE
            self._mapped.madvise(mmap.MADV_REMOVE, first, self._whole - first)


def _leads_to(path: Path, file: int) -> bool:
    """Return whether a path still leads to an open file."""
    return os.path.samestat(path.lstat(), os.fstat(file))

"""PagesFile: the pages of a kept host tier whose groups of layers are kept apart, as one file.

Invariant: until `settle` the file has its old bytes, and `close` gives it back as it was; the
tables of the groups are locked all the time, so no other engine uses it. Cost: the allocation.
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
    """The file of some bytes, which is made if there is none.

    Another content than that of the tables' blocks is found when they are proved.

    Args:
        path: the file.
        size: bytes of all pages.
        touch: whether to get all pages now.

    Attributes:
        memory: the pages, uint8.

    Raises:
        ConfigError: another user's file, or no file.
        TransferError: the file system has no room.
    """

    def __init__(self, path: Path, size: int, *, touch: bool) -> None:
        self._path, self._settled = path, False
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

    def settle(self) -> None:
        """Give the file its size, before the first byte of a block is written."""
        if not self._settled:
            self._settled = True
            if self._before > self._whole:
                os.ftruncate(self._file, self._whole)

    def close(self) -> None:
        """Close the file, and give it back as it was unless it is settled; let the memory go."""
        file, self._file = self._file, -1
        if file >= 0:
            try:
                if not self._settled:
                    self._restore(file)
            except OSError:  # it only takes room
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
            # The length stays: an access beyond the end would end the process.
            first = -(-self._before // mmap.PAGESIZE) * mmap.PAGESIZE
            self._mapped.madvise(mmap.MADV_REMOVE, first, self._whole - first)


def _leads_to(path: Path, file: int) -> bool:
    """Whether a path still leads to an open file."""
    return os.path.samestat(path.lstat(), os.fstat(file))

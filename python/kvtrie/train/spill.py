"""Spill: layer inputs in files instead of memory, in a store like the disk tier's.

Invariant: reads return the written bytes, verified by checksums. Cost: a write and a read of each
input. The files are deleted after the batch.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtrie._kvtrie import DiskStore
from kvtrie.errors import ConfigError, KvtrieError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Spill", "Spilled"]

_PIECE = 1 << 18
# The stored label of a block without tokens and without reuse.
_LABEL = bytes(32) + bytes([1]) + bytes(11 + 32)
# The store's key of all these blocks: they differ only by slot.
_KEY = bytes.fromhex("352bd266dae53c6e6a29244011cfa029813d0ab8434b2a2b830a487d882832ba")


class Spill:
    """Files for the layer inputs of a batch.

    Args:
        folder: parent of the new folder for the files.
        tensors: bytes of each tensor to be written.

    Raises:
        ConfigError: the folder cannot be written, or has no room for the tensors.
    """

    def __init__(self, folder: str, tensors: Sequence[int]) -> None:
        pieces = sum(-(-each // _PIECE) for each in tensors)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free < (wanted := pieces * _PIECE):
                raise ConfigError(
                    f"{folder} has room for {free / 1e6:.0f} MB, checkpoints take "
                    f"{wanted / 1e6:.0f} MB"
                )
            self._folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=folder))
        except OSError as error:
            raise ConfigError(f"cannot write to {folder}: {error}") from error
        self._store: DiskStore | None = None
        self._next = 0
        try:
            self._store = DiskStore(
                self._folder,
                identity=os.urandom(32),
                about="{}",
                layers=1,
                layer_bytes=_PIECE,
                block_tokens=1,
                blocks=max(1, pieces),
                durability="none",
                io="direct",
            )
        except KvtrieError:
            self.close()
            raise

    def put(self, x: torch.Tensor) -> Spilled:
        """Write numbers from host memory.

        Raises:
            ConfigError: the numbers cannot be written.
        """
        store = self._open()
        plain = x.contiguous().view(torch.uint8).flatten().numpy()
        first = self._next
        for lo in range(0, len(plain), _PIECE):
            piece = np.zeros((1, _PIECE), dtype=np.uint8)
            piece[0, : len(plain) - lo] = plain[lo : lo + _PIECE]
            store.write(_KEY, self._next, (0, 1), piece, _LABEL, 0)
            self._next += 1
        return Spilled(self, first, x.shape, x.dtype)

    def take(self, first: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Read numbers, starting at a piece."""
        store = self._open()
        size = shape.numel() * dtype.itemsize
        pieces = -(-size // _PIECE)
        plain = np.empty((pieces, 1, _PIECE), dtype=np.uint8)
        for at in range(pieces):
            store.read(_KEY, first + at, (0, 1), plain[at])
        found = torch.from_numpy(plain.reshape(-1)[:size].copy())
        return found.view(dtype).view(shape)

    def close(self) -> None:
        """Delete the files. Idempotent."""
        self._store = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _open(self) -> DiskStore:
        if self._store is None:
            raise ConfigError("the checkpoints of this batch are gone")
        return self._store


class Spilled:
    """Numbers in files."""

    __slots__ = ("_dtype", "_first", "_of", "_shape")

    def __init__(self, of: Spill, first: int, shape: torch.Size, dtype: torch.dtype) -> None:
        self._of, self._first, self._shape, self._dtype = of, first, shape, dtype

    def read(self) -> torch.Tensor:
        """Return the numbers, in host memory."""
        return self._of.take(self._first, self._shape, self._dtype)

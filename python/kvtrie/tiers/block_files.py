"""BlockFiles: copies blocks between memory and the files of a store.

Invariant: every layer is verified on every read. A block is written completely or not at all.
Cost: a single call per operation, without the interpreter lock. See `Alike` and `Narrowed` for
memory.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvtrie.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from kvtrie._kvtrie import DiskStore
    from kvtrie.tiers.narrowed import Alike, Narrowed

__all__ = ["BlockFiles"]

_LOG = logging.getLogger("kvtrie.tiers.disk")
_UNDER_WAY = 32 << 20  # bytes in flight per call, for blocks neither tiny nor huge


class BlockFiles:
    """The blocks of a group of layers in files: a thread-safe `Storage`.

    Args:
        store: the files.
        way: conversion of blocks to the format of the files.
        clock: the wall clock in nanoseconds.
        take: takes over the pages of slots from other groups, or None with a single group.

    Attributes:
        store: the files.
    """

    def __init__(
        self,
        store: DiskStore,
        way: Alike | Narrowed,
        clock: Callable[[], int],
        take: Callable[[Iterable[int]], None] | None,
    ) -> None:
        self.store, self._way, self._clock, self._take = store, way, clock, take
        self._lost = store.read_only
        if self._lost:
            _LOG.warning("%s: opened read-only: %s", store.folder, store.refusal)
        for reason in store.travel[2]:
            _LOG.info("%s: %s", store.folder, reason)
        self.log()

    def wall(self) -> int:
        """Return the wall clock in nanoseconds."""
        return self._clock()

    def read(self, key: bytes, slot: int, layers: tuple[int, int], memory: torch.Tensor) -> None:
        """Read layers of a block into memory, and verify each layer.

        Args:
            key: the block's content key, 32 bytes.
            slot: its slot.
            layers: the first layer, and the end of the range.
            memory: uint8 `(layers, bytes of one layer)`, on any device.

        Raises:
            TransferError: the block is missing or damaged, or the device failed.
        """
        host = self._way.buffer(memory)
        try:
            self.store.read(key, slot, layers, host.numpy())
        except TransferError as error:
            # Not by `log`, because it waits for the device, possibly hung.
            _LOG.warning("%s: %s", self.store.folder, error)
            raise
        self._way.widen(host, memory)

    def write(
        self, key: bytes, slot: int, layers: tuple[int, int], memory: torch.Tensor, label: bytes
    ) -> None:
        """Write layers of a block at a slot, all or none.

        Args:
            key: the block's content key, 32 bytes.
            slot: its slot.
            layers: the first layer, and the end of the range.
            memory: uint8 `(layers, bytes of one layer)`, on any device.
            label: the block's `Moves.label`, for a later process to find the block.

        Raises:
            TransferError: the device failed or is full, or this storage is read-only.
        """
        if self._take is not None:
            self._take([slot])
        host = self._way.narrow(memory)
        try:
            self.store.write(key, slot, layers, host.numpy(), label, self.wall())
        except TransferError:
            self.report_loss()
            raise

    def read_many(
        self, blocks: Sequence[tuple[bytes, int, tuple[int, int], torch.Tensor]]
    ) -> list[str | None]:
        """Read several blocks at once, each given as the arguments of `read`.

        The memory is on the host. Returns the reason of each block's failure, or None.
        """
        if not blocks:
            return []
        hosts = [self._way.buffer(memory) for *_, memory in blocks]
        rows = [
            (key, slot, layers, host.numpy())
            for (key, slot, layers, _), host in zip(blocks, hosts, strict=True)
        ]
        reasons = self.store.read_many(rows, depth=_depth(hosts))
        for (*_, memory), host, why in zip(blocks, hosts, reasons, strict=True):
            if why is None:
                self._way.widen(host, memory)
        for why in filter(None, reasons):
            _LOG.warning("%s: %s", self.store.folder, why)
        return reasons

    def write_many(
        self, blocks: Sequence[tuple[bytes, int, tuple[int, int], torch.Tensor, bytes]]
    ) -> list[str | None]:
        """Write several blocks at once, each given as the arguments of `write`.

        The memory is on the host. Returns the reason of each block's failure, or None.
        """
        if not blocks:
            return []
        if self._take is not None:
            self._take(slot for _, slot, *_ in blocks)
        hosts = [self._way.narrow(memory) for *_, memory, _ in blocks]
        rows = [
            (key, slot, layers, host.numpy(), label)
            for (key, slot, layers, _, label), host in zip(blocks, hosts, strict=True)
        ]
        reasons = self.store.write_many(rows, self.wall(), depth=_depth(hosts))
        if any(reasons):
            self.report_loss()
        return reasons

    def report_loss(self) -> bool:
        """Return whether the folder was removed or replaced while open, and log it once."""
        if not self.store.read_only:
            return False
        if not self._lost:
            self._lost = True
            self.log()
        return True

    def log(self) -> None:
        """Log the store's reports."""
        for reason in self.store.reasons():
            _LOG.warning("%s: %s", self.store.folder, reason)


def _depth(memory: Sequence[torch.Tensor]) -> int:
    """Return a number of blocks in flight, so that small blocks keep a device equally busy."""
    return min(64, max(4, _UNDER_WAY // max(one.nbytes for one in memory)))

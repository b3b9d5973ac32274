"""BlockFiles: bytes of blocks between memory and the files of one store.

Invariant: every layer is verified on every read; a block is written whole or not at all. Cost: one
call that leaves the interpreter to other threads; see `Alike` and `Narrowed` for its memory.
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
_UNDER_WAY = 32 << 20  # bytes that a call keeps under way, if its blocks are neither tiny nor huge


class BlockFiles:
    """The blocks of one group of layers in files: a `Storage` that several threads call.

    Args:
        store: the files.
        way: how blocks get the format of the files.
        clock: the wall clock in nanoseconds.
        take: takes the pages of slots that other groups had; None where no other group has any.

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
        """Read layers of a block into memory, and verify each of them.

        Args:
            key: the block's content key, 32 bytes.
            slot: its slot.
            layers: the first layer, and the last plus 1.
            memory: uint8 `(layers, bytes of one layer)`, on any device.

        Raises:
            TransferError: the block is not there, is damaged, or the device failed.
        """
        host = self._way.buffer(memory)
        try:
            self.store.read(key, slot, layers, host.numpy())
        except TransferError as error:
            # Not by `_log`: that waits for the device, which may be what hangs.
            _LOG.warning("%s: %s", self.store.folder, error)
            raise
        self._way.widen(host, memory)

    def write(
        self, key: bytes, slot: int, layers: tuple[int, int], memory: torch.Tensor, label: bytes
    ) -> None:
        """Write layers of a block at a slot: all of them, or none.

        Args:
            key: the block's content key, 32 bytes.
            slot: its slot.
            layers: the first layer, and the last plus 1.
            memory: uint8 `(layers, bytes of one layer)`, on any device.
            label: what `Moves.label` has for it, by which a later process finds the block.

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
        """Read blocks as `read` does, given as its arguments, several of them at once.

        The memory is the host's. Returns for each block the reason of its failure, or None.
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
        """Write blocks as `write` does, given as its arguments, several of them at once.

        The memory is the host's. Returns for each block the reason of its failure, or None.
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
        """Return whether the folder was removed or replaced while open; log that once."""
        if not self.store.read_only:
            return False
        if not self._lost:
            self._lost = True
            self.log()
        return True

    def log(self) -> None:
        """Log what the store has to report."""
        for reason in self.store.reasons():
            _LOG.warning("%s: %s", self.store.folder, reason)


def _depth(memory: Sequence[torch.Tensor]) -> int:
    """Number of blocks in flight, so that small ones keep a device as busy as large ones."""
    return min(64, max(4, _UNDER_WAY // max(one.nbytes for one in memory)))

"""HostPool: host memory for checkpoints, and the streams that copy to it and back.

Memory is pinned if there is a GPU, and reused as soon as a checkpoint is freed. Two streams of
`kvtrie.transfer` copy out of the device and into it. Both overlap with the computation and wait
only for their inputs. On a CPU they are threads.
Invariant: a buffer is overwritten only after all copies from it. At most a few copies out are in
flight, so their sources do not pile up. Cost: a copy in each direction, and the peak memory of the
checkpoints in sizes of the last batch.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from kvtrie.transfer.stream import Current, Stream, StreamEvent

if TYPE_CHECKING:
    from kvtrie.train.spill import Spill, Spilled

__all__ = ["HostCopy", "HostPool"]

_UNDER_WAY = 8


class _Buffer:
    """Bytes in host memory, and the last copy from them."""

    __slots__ = ("memory", "read")

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.read: StreamEvent | None = None


class HostPool:
    """Buffers for the checkpoints of a single batch at a time.

    Args:
        device: source of the numbers, and target when they are read back.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.current = Current(device)
        self.outwards = Stream("kvtrie-checkpoints-out", device)
        self.inwards = Stream("kvtrie-checkpoints-in", device)
        self._free: dict[int, list[_Buffer]] = {}
        self._used: dict[int, list[_Buffer]] = {}
        self._on_the_way: deque[StreamEvent] = deque()

    def put(self, x: torch.Tensor, spill: Spill | None = None) -> HostCopy:
        """Start copying numbers to host memory.

        Args:
            x: the numbers in their final state, on the pool's device.
            spill: files for the numbers. None leaves them in memory.

        Raises:
            BaseException: exception of an earlier copy.
        """
        x = x.detach()
        buffer = self._take(x.nbytes)
        made = HostCopy(self, buffer, x.shape, x.dtype, spilled=spill is not None)
        host = made.host

        def copy() -> None:
            host.copy_(x, non_blocking=True)
            if spill is not None:
                self.outwards.finish_device_work()
                made.file = spill.put(host)

        self.outwards.wait(self.current.record())
        if buffer.read is not None:
            self.outwards.wait(buffer.read)
        made.copied = self.outwards.submit(copy)
        if self.outwards.cuda is not None:
            x.record_stream(self.outwards.cuda)
        if spill is not None:
            self.give(buffer)  # its next content is copied after the write
        self._on_the_way.append(made.copied)
        while len(self._on_the_way) > _UNDER_WAY:
            self._on_the_way.popleft().join()
        return made

    def give(self, buffer: _Buffer) -> None:
        """Return a buffer to the pool."""
        size = buffer.memory.nbytes
        if buffer in self._used.get(size, ()):
            self._used[size].remove(buffer)
            self._free.setdefault(size, []).append(buffer)

    def reset(self) -> None:
        """Return all buffers to the pool after a batch, and free sizes not used in it."""
        for stream in (self.outwards, self.inwards):
            stream.synchronize()
        self._on_the_way.clear()
        for size, used in self._used.items():
            self._free.setdefault(size, []).extend(used)
        self._free = {size: self._free[size] for size in self._used}
        self._used = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        both = (*self._free.values(), *self._used.values())
        return sum(buffer.memory.nbytes for each in both for buffer in each)

    def _take(self, size: int) -> _Buffer:
        free = self._free.get(size)
        buffer = free.pop() if free else _Buffer(size, pinned=self.device.type == "cuda")
        self._used.setdefault(size, []).append(buffer)
        return buffer


class HostCopy:
    """Numbers in a pool's memory, or in files.

    Attributes:
        host: the copy in host memory.
        copied: the event after the copy.
        file: the copy in files, None without a spill.
    """

    __slots__ = ("_brought", "_buffer", "_on_device", "_pool", "_spilled", "copied", "file", "host")

    def __init__(
        self,
        pool: HostPool,
        buffer: _Buffer,
        shape: torch.Size,
        dtype: torch.dtype,
        *,
        spilled: bool,
    ) -> None:
        self.host = buffer.memory.view(dtype).view(shape)
        self.copied = StreamEvent()
        self.file: Spilled | None = None
        self._pool, self._buffer, self._spilled = pool, buffer, spilled
        self._brought: StreamEvent | None = None
        self._on_device: torch.Tensor | None = None

    def bring(self) -> StreamEvent:
        """Start copying back in parallel with the computation. `read` waits for the copy."""
        if self._brought is None:
            self._brought = self._pool.inwards.submit(self._copy_back)
            if not self._spilled:
                self._buffer.read = self._brought
        return self._brought

    def read(self) -> torch.Tensor:
        """Return the numbers, on the pool's device.

        Raises:
            BaseException: exception of a copy.
        """
        self._pool.current.wait(self.bring())
        on_device, self._on_device, self._brought = self._on_device, None, None
        assert on_device is not None  # noqa: S101 - set by the copy
        if self._pool.device.type == "cuda":
            on_device.record_stream(torch.cuda.current_stream(self._pool.device))
        return on_device

    def free(self) -> None:
        """Release the buffer to the pool."""
        if not self._spilled:
            self._pool.give(self._buffer)

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return 0 if self._spilled else self.host.nbytes

    def _copy_back(self) -> None:
        self.copied.join()  # raises an exception of the copy out to the reader
        stream = self._pool.inwards.cuda
        if stream is not None and self.copied.cuda is not None:
            stream.wait_event(self.copied.cuda)
        host = self.host if self.file is None else self.file.read()
        on_device = torch.empty_like(host, device=self._pool.device, pin_memory=False)
        self._on_device = on_device.copy_(host, non_blocking=True)

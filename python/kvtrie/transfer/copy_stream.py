"""CopyStream: a CUDA stream for copies enqueued by the computing thread.

`Stream` enqueues its calls on a separate thread. Here the caller enqueues, so an engine step needs
no thread switch. Without a GPU the caller makes the copies, and nothing waits.
Invariant: copies run in the order of the calls, after the computation enqueued before `follow`.
Cost: an event per `follow` and `record`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["CopyStream"]


class CopyStream:
    """A copy stream, ordered with the caller's stream by events.

    Args:
        device: where the computation runs.

    Attributes:
        overlaps: whether copies run while the caller's stream computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device
        self.overlaps = self._cuda is not None

    def copying(self) -> AbstractContextManager[object]:
        """Return a context manager that runs copies on this stream."""
        return nullcontext() if self._cuda is None else torch.cuda.stream(self._cuda)

    def follow(self) -> None:
        """Make later copies wait for the work enqueued on the caller's stream so far."""
        if self._cuda is not None:
            self._cuda.wait_stream(torch.cuda.current_stream(self._device))

    def record(self) -> torch.cuda.Event | None:
        """Return an event after the copies so far, or None without a GPU."""
        if self._cuda is None:
            return None
        event = torch.cuda.Event()
        event.record(self._cuda)
        return event

    def hold(self, event: torch.cuda.Event | None) -> None:
        """Make the caller's stream wait for an event returned by `record`."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def synchronize(self) -> None:
        """Block until the GPU has finished the copies."""
        if self._cuda is not None:
            self._cuda.synchronize()

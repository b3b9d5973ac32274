"""CopyStream: a stream of a GPU for copies that the computing thread enqueues.

`Stream` has a thread that enqueues or makes its calls; here the caller enqueues, so that a step of
an engine needs no thread switch. Without a GPU the caller makes the copies, and nothing waits.
Invariant: copies run in the order of the calls, after the computation that `follow` has seen.
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
    """A stream for copies, between which and the caller's stream events order the work.

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
        """Return a context whose copies run on this stream."""
        return nullcontext() if self._cuda is None else torch.cuda.stream(self._cuda)

    def follow(self) -> None:
        """Let copies from now on wait for what the caller's stream has been given so far."""
        if self._cuda is not None:
            self._cuda.wait_stream(torch.cuda.current_stream(self._device))

    def record(self) -> torch.cuda.Event | None:
        """Return the point of this stream after the copies so far; None without a GPU."""
        if self._cuda is None:
            return None
        event = torch.cuda.Event()
        event.record(self._cuda)
        return event

    def hold(self, event: torch.cuda.Event | None) -> None:
        """Let the caller's stream wait for a point that `record` returned."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def synchronize(self) -> None:
        """Block until the GPU has made the copies."""
        if self._cuda is not None:
            self._cuda.synchronize()

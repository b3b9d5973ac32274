"""Stream: runs calls in sequence, concurrently with the caller, on a thread or a GPU.

On a GPU the thread only enqueues copies on a separate CUDA stream. Without a GPU it makes the
copies itself, so the same program overlaps copies with computation on both.
Invariant: calls run in the order of submission. A call submitted after `wait` starts after the
event. A caller waiting for a call gets its exception.
Cost: a queue and a wake-up per call. A caller waiting for calls not yet begun makes them itself,
without a thread switch.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from kvtrie.at_exit import end_at_exit
from kvtrie.errors import TransferError
from kvtrie.transfer.section import Section

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrie.transfer.section import Ticket

__all__ = ["Current", "Stream", "StreamEvent"]


class StreamEvent:
    """A point in a stream that is passed once.

    Args:
        stream: the stream, or None for the caller's.

    Attributes:
        passed: whether the stream has made the previous calls. The GPU may still run their copies.
        cuda: the same point on the GPU.
        error: the exception of the previous call.
    """

    __slots__ = ("_stream", "cuda", "error", "passed")

    def __init__(self, stream: Stream | None = None) -> None:
        self._stream = stream
        self.passed = False
        self.cuda: torch.cuda.Event | torch.Event | None = None
        self.error: BaseException | None = None

    def mark(self, cuda: torch.cuda.Stream | None, error: BaseException | None = None) -> None:
        """Mark the event as passed, with the error of the previous call."""
        self.error = error
        if cuda is not None:
            self.cuda = cuda.record_event()
        self.passed = True

    def join(self) -> None:
        """Block until the stream has made the previous calls.

        Raises:
            BaseException: the exception of the previous call.
        """
        if self._stream is not None:
            self._stream.run_to(self)
        if self.error is not None:
            raise self.error


class Stream:
    """A queue of calls and the thread for them.

    Args:
        name: the thread's name.
        device: source or target of the copies. On a GPU the stream has a CUDA stream there.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.cuda = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._calls: deque[tuple[Callable[[], object], StreamEvent]] = deque()
        self._section = Section()
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event, Callable[[int], object]]] = []
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(
            target=_work, args=(weakref.ref(self),), name=name, daemon=True
        )
        self._thread.start()
        end_at_exit(self._thread, self._end)

    def __del__(self) -> None:
        """End the thread: a stream without a reference gets no more calls."""
        section: Section | None = getattr(self, "_section", None)
        if section is not None and section.in_own_process and not sys.is_finalizing():
            self.close(wait=False)

    @property
    def idle(self) -> bool:
        """Whether no call runs or waits."""
        with self._section.lock:
            return not self._busy and not self._calls

    def submit(self, call: Callable[[], object], *, wake: bool = True) -> StreamEvent:
        """Enqueue a call.

        Args:
            call: the call.
            wake: whether the thread begins at once, or at the next `wake`.

        Raises:
            TransferError: the stream is closed.
        """
        event = StreamEvent(self)
        with self._section.lock:
            if self._closed:
                raise TransferError("the stream is closed")
            self._calls.append((call, event))
            if wake:
                self._section.notify_all()
        return event

    def wake(self) -> None:
        """Wake the thread if calls wait."""
        with self._section.lock:
            if self._calls and not self._busy:
                self._section.notify_all()

    def run_to(self, event: StreamEvent) -> None:
        """Block until an event of this stream has passed, making waiting calls if needed."""
        while not event.passed:
            with self._section.lock:
                if event.passed:
                    return
                given = self._take()
                ticket = None if given is not None else self._section.ticket(None)
            if given is not None:
                self._make(*given)
            elif ticket is not None:
                ticket.wait()

    def wait(self, event: StreamEvent) -> None:
        """Make later calls wait for an event of a different stream."""
        if event.passed and event.error is None and (self.cuda is None or event.cuda is None):
            return

        def until() -> None:
            event.join()
            if self.cuda is not None and event.cuda is not None:
                self.cuda.wait_event(event.cuda)

        self.submit(until)

    def synchronize(self) -> None:
        """Block until all submitted calls are done, also on the GPU."""
        self.submit(self.finish_device_work).join()

    def finish_device_work(self) -> None:
        """Block until the GPU has finished the enqueued work. Use it within a call."""
        if self.cuda is not None:
            self.cuda.synchronize()
            spans, self._spans = self._spans, []
            for begin, end, on_time in spans:
                on_time(int(begin.elapsed_time(end) * 1e6))

    def mark(self) -> torch.cuda.Event | None:
        """Return the current point of the CUDA stream for `measure`. Use it within a call."""
        if self.cuda is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.cuda)
        return event

    def measure(self, begin: torch.cuda.Event, on_time: Callable[[int], object]) -> None:
        """Pass the nanoseconds since a mark to `on_time` at the next `finish_device_work`.

        Use it within a call.
        """
        end = self.mark()
        if end is not None:
            self._spans.append((begin, end, on_time))

    def close(self, *, wait: bool = True) -> None:
        """Run the submitted calls, then end the thread. Closing twice does nothing.

        Args:
            wait: block until the thread has ended, even if a call hangs.
        """
        with self._section.lock:
            self._closed = True
            self._section.notify_all()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    def _end(self) -> None:
        self.close(wait=False)

    def run_calls(self) -> Ticket | None:
        """Make the waiting calls, on the stream's thread.

        Returns:
            The ticket to wait for before the next call, or None once no more calls can come.
        """
        while True:
            with self._section.lock:
                given = self._take()
                if given is None:
                    done = self._closed and not self._calls
                    return None if done else self._section.ticket(None)
            self._make(*given)

    def _take(self) -> tuple[Callable[[], object], StreamEvent] | None:
        """Return the next call to make, or None without a call or while a call is running."""
        if self._busy or not self._calls:
            return None
        self._busy = True
        return self._calls.popleft()

    def _make(self, call: Callable[[], object], event: StreamEvent) -> None:
        error: BaseException | None = None
        try:
            with torch.cuda.stream(self.cuda) if self.cuda is not None else nullcontext():
                call()
        except BaseException as caught:  # noqa: BLE001 - raised by `join`
            error = caught
        event.mark(self.cuda, error)
        with self._section.lock:
            self._busy = False
            self._section.notify_all()


def _work(ref: weakref.ref[Stream]) -> None:
    """Run the thread's loop, referring to the stream only while working, so it can be dropped."""
    while (stream := ref()) is not None:
        ticket = stream.run_calls()
        del stream
        if ticket is None:
            return
        ticket.wait()


class Current:
    """The caller's own stream: its thread, and on a GPU torch's current CUDA stream.

    Args:
        device: where the computation runs.

    Attributes:
        waits: number of waits for a copy stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self.waits = 0

    def record(self) -> StreamEvent:
        """Return the current point of the computation."""
        event = StreamEvent()
        event.mark(None if self._device is None else torch.cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        """Block until the computation so far has ended."""
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def wait(self, event: StreamEvent) -> None:
        """Make the computation wait for a point of a different stream.

        Raises:
            BaseException: the exception of the call before the event.
        """
        self.waits += 1
        event.join()
        if self._device is not None and event.cuda is not None:
            torch.cuda.current_stream(self._device).wait_event(event.cuda)

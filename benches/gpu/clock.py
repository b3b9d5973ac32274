"""Clock: seconds that work takes on a device, and the rows that figures become.

Invariant: device time between two events, after a warm-up, the median of several runs; work that
a graph can hold is replayed from one, so that Python's time for starting it stays out. On a CPU,
for rehearsal, plain time. Cost: the work, `RUNS` times and a few more.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

RUNS = 15


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        what: what was measured.
        figure: the median.
        unit: of it.
        of: what it is compared with; empty where nothing is.
        ratio: to that.
        goal: the ratio wanted; None where none is set.
    """

    what: str
    figure: float
    unit: str
    of: str = ""
    ratio: float | None = None
    goal: float | None = None

    @property
    def ok(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        return None if self.goal is None or self.ratio is None else self.ratio >= self.goal


class Clock:
    """Takes the time on one device."""

    def __init__(self, device: torch.device, runs: int = RUNS) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.runs = runs if self.cuda else 1

    def stream(self) -> torch.cuda.Stream | None:
        """Return a new stream; None on a CPU."""
        return torch.cuda.Stream(self.device) if self.cuda else None

    def on(self, stream: torch.cuda.Stream | None):
        """A context in which work goes to the stream."""
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], *, graph: bool = True) -> float:
        """The median time of one run of `work`.

        Args:
            work: starts the work in the current stream (or joins other streams to it).
            graph: whether a CUDA graph can hold it.
        """
        if graph:
            work = self.replayed(work)
        work()
        self.wait()
        return statistics.median(self.once(work) for _ in range(self.runs))

    def replayed(self, work: Callable[[], object]) -> Callable[[], object]:
        """The work from a CUDA graph, which holds what it starts; on a CPU the work itself."""
        work()
        self.wait()
        if not self.cuda:
            return work
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        return captured.replay

    def host_seconds(self, work: Callable[[], object], calls: int = 50) -> float:
        """The time that starting `work` keeps the host, without waiting for the device."""
        work()
        self.wait()
        calls = calls if self.cuda else 1
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        spent = time.perf_counter() - begin
        self.wait()
        return spent / calls

    def steady(self, work: Callable[[], object], seconds: float = 0.15) -> float:
        """The time of one run among as many as take `seconds`, after an equal number of others."""
        often = max(1, round(seconds / self.once(work))) if self.cuda else 1
        for _ in range(often):
            work()
        return self.once(lambda: [work() for _ in range(often)]) / often

    def once(self, work: Callable[[], object]) -> float:
        """The time of one run of `work`, which has run before."""
        if not self.cuda:
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

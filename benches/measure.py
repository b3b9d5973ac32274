"""Shared by all drivers: a clock with named parts, resident memory, and the line of output.

Invariant: one measurement is one line of JSON with `peer`, `what`, `value`, `unit` and
the conditions; needs numpy alone. Cost: a part of the clock takes about a tenth of a
microsecond, which is the peers' time too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
from array import array
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def emit(peer: str, what: str, value: float, unit: str, **context: Any) -> None:
    """Print one measurement."""
    line = {"peer": peer, "what": what, "value": round(float(value), 4), "unit": unit, **context}
    print(json.dumps(line), flush=True)


def resident_bytes() -> int:
    """Resident memory after garbage is collected and free heap pages are handed back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def clear_peak() -> int:
    """Set the peak of resident memory to what is resident, and return it in kilobytes; Linux."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_kilobytes()


def peak_kilobytes() -> int:
    """The most resident memory since the peak was cleared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def percentile(samples: Sequence[float] | NDArray[np.float64], share: float) -> float:
    """The sample below which that share of all samples is."""
    return float(np.sort(np.asarray(samples))[int(share * len(samples))])


class Clock:
    """Adds up time per named part and request.

    `start`, then `lap(part)` after each timed call; `next` ends a request. Time between a
    `lap` and the next `start` is not counted.
    """

    def __init__(self, *parts: str) -> None:
        self.samples = {part: array("d") for part in parts}
        self.now = dict.fromkeys(parts, 0.0)
        self.since = 0.0

    def start(self) -> None:
        """Start to count."""
        self.since = perf_counter()

    def lap(self, part: str) -> None:
        """Add the time since the start or the last lap to that part."""
        self.now[part] += perf_counter() - self.since
        self.since = perf_counter()

    def next(self) -> None:
        """A request is over."""
        for part, seconds in self.now.items():
            self.samples[part].append(seconds)
            self.now[part] = 0.0

    def us(self, *parts: str) -> NDArray[np.float64]:
        """Microseconds per request, summed over the parts; all when none is named."""
        named = [np.array(self.samples[part]) for part in parts or self.samples]
        return 1e6 * np.sum(named, axis=0)

    def means(self) -> dict[str, float]:
        """Mean microseconds per part."""
        return {part: round(float(self.us(part).mean()), 3) for part in self.samples}

"""Streams that record what is enqueued on them, and find copies that no wait orders.

Copies and computation are made at once, so that bytes are those of the program's order. On a GPU
any order is possible that events do not exclude: two accesses of a unit, one of which writes, are a
race unless the streams' waits put the first one before the second. Vector clocks say so.
"""

import random
from contextlib import contextmanager

from kvtrie.transfer import layer_copies
from kvtrie.transfer.copy_stream import CopyStream


class RecordedEvent:
    """A point of a stream. The host learns of it late, at random."""

    def __init__(self, timeline, clock):
        self._timeline, self.clock, self._passed = timeline, clock, False

    def query(self):
        self._passed = self._passed or self._timeline.draw.random() < 0.5
        if self._passed:
            self._timeline.learn("host", self.clock)
        return self._passed

    def synchronize(self):
        self._passed = True
        self._timeline.learn("host", self.clock)


class Timeline:
    """What one worker's streams are given, in the order of the calls.

    Attributes:
        log: (stream, event) in the order of the calls.
        races: accesses that no wait orders.
    """

    def __init__(self, seed=0):
        self.draw, self.log, self.races = random.Random(seed), [], []
        self.clocks = {name: {} for name in ("host", "engine", "load", "store")}
        self.current, self.gpu = "engine", None
        self._names = ["load", "store"]
        self._writes, self._reads = {}, {}

    def stream(self, _device):
        """The next stream of a worker: that of loads comes first."""
        return RecordedStream(self, self._names.pop(0))

    def learn(self, name, clock):
        """What has passed on this clock comes before what `name` is given from now on."""
        mine = self.clocks[name]
        for stream, passed in clock.items():
            mine[stream] = max(mine.get(stream, 0), passed)

    def access(self, what, reads, writes):
        """Enqueue on the current stream a kernel that reads and writes units."""
        self.log.append((self.current, what))
        self.learn(self.current, self.clocks["host"])
        clock = self.clocks[self.current]
        clock[self.current] = now = clock.get(self.current, 0) + 1
        for unit in (*reads, *writes):
            stream, then = self._writes.get(unit, (None, 0))
            if clock.get(stream, 0) < then:
                self.races.append((unit, f"{stream} writes", f"{self.current} {what}"))
        for unit in writes:
            for stream, then in self._reads.pop(unit, {}).items():
                if clock.get(stream, 0) < then:
                    self.races.append((unit, f"{stream} reads", f"{self.current} {what}"))
            self._writes[unit] = (self.current, now)
        for unit in reads:
            self._reads.setdefault(unit, {})[self.current] = now


class RecordedStream(CopyStream):
    """A stream that takes note of its copies, and of events between it and the engine's."""

    def __init__(self, timeline, name):
        self._timeline, self.name, self.overlaps = timeline, name, True

    @contextmanager
    def copying(self):
        timeline = self._timeline
        timeline.current = self.name
        yield
        timeline.current = "engine"

    def follow(self):
        self._timeline.log.append((self.name, "follow"))
        self._timeline.learn(self.name, self._timeline.clocks["engine"])

    def record(self):
        return RecordedEvent(self._timeline, dict(self._timeline.clocks[self.name]))

    def hold(self, event):
        self._timeline.log.append(("engine", f"wait for {self.name}"))
        self._timeline.learn("engine", event.clock)

    def synchronize(self):
        self.record().synchronize()


def record_copies(monkeypatch, timelines, fails=lambda: False):
    """Record the copies of pools of vLLM's memory, by pool in `timelines`; some fail."""
    copy = layer_copies._straight

    def recorded(source, source_units, target, units):
        for pool in (source, target):
            if pool in timelines:
                timeline = timelines[pool]
                sides = ["gpu" if each is pool else "host" for each in (source, target)]
                broken = fails()
                if broken == "before":
                    raise OSError("injected before the copy")
                layers = sorted({int(unit) % pool.layers for unit in units})
                timeline.access(
                    f"copy {layers}",
                    [(sides[0], int(unit)) for unit in source_units],
                    [(sides[1], int(unit)) for unit in units],
                )
                if broken:
                    raise OSError("injected after the copy")
        copy(source, source_units, target, units)

    monkeypatch.setattr(layer_copies, "_straight", recorded)

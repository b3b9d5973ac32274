"""Devices that inject planned faults: memory, kept memory, a storage in a dict, a disk's files.

Invariant: a fault strikes when its plan says so, never by chance or by the machine's speed; what
hangs is let go by `Faults.release` alone. Cost: one lock per call of a device.
"""

import contextlib
import errno
import random
import threading
from collections import Counter
from dataclasses import dataclass
from unittest import mock

from keeping import Damage

from kvtrie import ModelShape, Tier
from kvtrie.errors import TransferError
from kvtrie.tiers import DiskStorage, KeptPool, Pool
from kvtrie.tiers.kept_tier import kept_pool

SHAPE = ModelShape(layers=4, kv_heads=1, head_dim=2, fingerprint="faulty")
SIZE = 4
OPERATIONS = ("read", "write", "copy")
FAULTS = ("error", "short", "slow", "hang")
PATIENCE_S = 60


class Faults:
    """Injects faults; shared by the devices of one engine.

    Args:
        plan: called with the name of each operation; the fault that strikes it, or None.
        clock: what a slow or hanging operation pushes past every deadline.
    """

    def __init__(self, plan, clock):
        self.plan = plan
        self.clock = clock
        self.executor = None
        self.quiet = False
        self.injected = Counter()
        self.lock = threading.Lock()
        self.gates = []

    def strike(self, operation):
        """Let a fault happen, if it is its turn; "short" and "flip" are left to the device."""
        with self.lock:
            fault = None if self.quiet else self.plan(operation)
            if fault is None:
                return None
            self.injected[operation, fault] += 1
            if fault in ("slow", "hang"):
                self.clock.now += 2 * self.executor.runner.ledger.deadline_ns
                gate = threading.Event()
                self.gates += [gate] * (fault == "hang")
        if fault == "error":
            raise OSError(errno.EIO, f"{operation} failed")
        if fault in ("short", "flip"):
            return fault
        with contextlib.suppress(TransferError):  # it may be closed by now
            self.executor.poll()  # another poll finds it late
        if fault == "hang":
            assert gate.wait(PATIENCE_S)
        return None

    def release(self):
        """Let go of everything that hangs."""
        with self.lock:
            for gate in self.gates:
                gate.set()
            self.gates.clear()


class FailingCopies:
    """Of a pool: its copies fail, before they begin or after half of the units."""

    faults: Faults

    def copy_from(self, source, source_units, units):
        if self.faults.strike("copy") == "short":
            half = len(units) // 2
            super().copy_from(source, source_units[:half], units[:half])
            raise RuntimeError(f"broke off after {half} of {len(units)} units")
        super().copy_from(source, source_units, units)


class FaultyPool(FailingCopies, Pool):
    """A pool whose copies fail."""

    def __init__(self, faults, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.faults = faults


class FaultyKept(FailingCopies, KeptPool):
    """Host memory in a file, whose copies fail."""

    @classmethod
    def open(cls, faults, path, blocks, clock):
        """Open the file, or make it."""
        tier = Tier("host", blocks, keep=str(path))
        with mock.patch("kvtrie.tiers.kept_tier.KeptPool", cls):
            pool = kept_pool(SHAPE, tier, SIZE, clock=clock)
        pool.faults = faults
        return pool

    def flip(self):
        """Flip a bit in some of the blocks that an earlier process left."""
        draw = random.Random(self.faults.clock.now)
        for slot in self.file.index(self.wall()).slot.tolist():
            if self.faults.strike("found") == "flip":
                layer = slot * self.layers + draw.randrange(self.layers)
                row = self.planes[0][layer]
                row[draw.randrange(len(row))] ^= 1 << draw.randrange(8)


class FaultyShelf:
    """A storage of slots in a dict, which fails, before it begins or after half of the layers.

    Attributes:
        wrong: what must not be: another block in a slot, or two calls for one slot at a time.
    """

    def __init__(self, faults):
        self.faults = faults
        self.cells = {}
        self.busy = set()
        self.wrong = []

    def write(self, key, slot, layers, memory, label):
        assert label
        with self._one_call(slot):
            short = self.faults.strike("write") == "short"
            for layer, unit in self._part(layers, memory, short):
                self.cells[slot, layer] = (key, unit.clone())
            if short:
                raise OSError(errno.ENOSPC, "no space left after half of the layers")

    def read(self, key, slot, layers, memory):
        with self._one_call(slot):
            short = self.faults.strike("read") == "short"
            for layer, unit in self._part(layers, memory, short):
                stored, row = self.cells.get((slot, layer), (None, None))
                if stored != key:
                    self.wrong.append(f"slot {slot}, layer {layer}: not the block asked for")
                    raise LookupError(self.wrong[-1])
                unit.copy_(row)
            if short:
                raise OSError(errno.EIO, "the file ends here")

    def _part(self, layers, memory, short):
        lo, hi = layers
        end = (lo + hi) // 2 if short else hi
        return zip(range(lo, end), memory[: end - lo], strict=True)

    @contextlib.contextmanager
    def _one_call(self, slot):
        with self.faults.lock:
            if slot in self.busy:
                self.wrong.append(f"slot {slot}: two calls at a time")
            self.busy.add(slot)
        try:
            yield
        finally:
            with self.faults.lock:
                self.busy.discard(slot)


class FaultyDisk(DiskStorage):
    """The files of a disk tier, in which a bit flips just before a block is read.

    Attributes:
        wrong: reads that did not notice.
    """

    def __init__(self, faults, folder, blocks):
        super().__init__(folder, SHAPE, blocks, SIZE, durability="none")
        self.faults = faults
        self.files = Damage(folder)
        self.draw = random.Random(0)
        self.wrong = []

    def write(self, key, slot, layers, memory, label):
        self.faults.strike("write")
        super().write(key, slot, layers, memory, label)

    def read(self, key, slot, layers, memory):
        if self.faults.strike("read") != "flip":
            super().read(key, slot, layers, memory)
            return
        with self.faults.lock:
            layer, bit = self.draw.randrange(*layers), self.draw.randrange(8 * memory.shape[1])
        self.files.flip(slot, layer, bit)
        super().read(key, slot, layers, memory)
        self.wrong.append(f"slot {slot}, layer {layer}: bit {bit} flipped unnoticed")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault: its operations and its frequency.

    Attributes:
        name: for people.
        faults: what may happen; none for a run without faults.
        operations: to which calls of a device.
        share: to how many of them.
        files: whether the disk tier is one of files; they are proved on every read.
        keep: whether host memory is a file that the next engine finds.
    """

    name: str
    faults: tuple[str, ...]
    operations: tuple[str, ...] = OPERATIONS
    share: float = 0.1
    files: bool = False
    keep: bool = False

    def plan(self, seed):
        """The plan of an engine, the same for equal seeds."""
        draw = random.Random(seed)

        def plan(operation):
            if operation not in self.operations or draw.random() >= self.share:
                return None
            return draw.choice(self.faults)

        return plan


NONE = Kind("no fault", (), ())
NONE_KEPT = Kind("no fault, host memory kept", (), (), keep=True)
KINDS = (
    Kind("read fails", ("error",), ("read",), 0.7),
    Kind("read is cut short", ("short",), ("read",), 0.7),
    Kind("write fails", ("error",), ("write",), 0.5),
    Kind("write is cut short", ("short",), ("write",), 0.5),
    Kind("copy fails", ("error",), ("copy",), 0.3),
    Kind("copy is cut short", ("short",), ("copy",), 0.3),
    Kind("slower than the deadline", ("slow",), share=0.3),
    Kind("hangs", ("hang",), share=0.2),
    Kind("a bit flips", ("flip",), ("read",), 0.7, files=True),
    Kind("all but flipped bits", FAULTS, share=0.2),
    Kind("copy fails, host memory kept", ("error", "short"), ("copy",), 0.3, keep=True),
    Kind("a bit of kept memory flips", ("flip",), ("found",), 0.5, keep=True),
)

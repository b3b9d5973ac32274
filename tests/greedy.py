"""Calls everything with arguments that claim more than there is, under a limit of memory.

Run by `test_limits.py`: an allocation that fails would end the process. Each line names a call
before it is made; a call that raises another error than kvtrie's, or changes a manager, is
reported in a line with FAILED. The last line is END and the number of calls.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
from surface import arguments, methods

from kvtrie import (
    BlockManager,
    Cost,
    Demote,
    Index,
    KvtrieError,
    Lane,
    LayerGroup,
    Layout,
    ModelShape,
    Prefetch,
    Progress,
    Quota,
    Release,
    ResumeAt,
    ResumePoints,
    Retain,
    Scope,
    Tier,
)
from kvtrie._kvtrie import Lease

LIMIT = 3 << 30
MOST = 2**32 - 2
SLOW = 30
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9]


class Claims:
    """A sequence of three that says that it is longer."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, at):
        if at > 2:
            raise IndexError(at)
        return at


def huge(kind, whole):
    """A call that needs more memory than there is; `whole` takes seconds to be refused."""
    one = np.broadcast_to(np.uint32(1), 10**12)
    given = {
        "range(10**12)": range(10**12),
        "range(10**30)": range(10**30),
        "claims 10**12": Claims(10**12),
        "claims 10**8": Claims(10**8),
        "uint32[10**12]": one,
        "int64[10**9]": np.broadcast_to(np.int64(1), 10**9),
        "uint64[10**12]": np.broadcast_to(np.uint64(1), 10**12),
        "float64[10**12]": np.broadcast_to(np.float64(1), 10**12),
        "int8[10**6, 10**6]": np.broadcast_to(np.int8(1), (10**6, 10**6)),
        "memoryview[10**12]": memoryview(one),
        "unaligned[10**9]": np.broadcast_to(np.zeros(5, np.uint8)[1:].view(np.uint32), 10**9),
        "[range(10**12)]": [range(10**12)],
        "[[uint32[10**9]]]": [np.broadcast_to(np.uint32(1), 10**9)],
        "2**32": 2**32,
        "2**34": 2**34,
        "2**44": 2**44,
        "2**63 - 1": 2**63 - 1,
        "10**30": 10**30,
        "10**5000": 10**5000,
        "8e9": 8e9,
        "nan": float("nan"),
        "2.5": 2.5,
        "surrogate": "\ud800",
        "long": "x" * 10**7,
        "long bytes": bytes(10**8),
        "(0, 2**44)": (0, 2**44),
        "hints": [Retain(tokens=range(10**12)), Retain(tokens=one)],
        "True": True,
    }
    if kind == "settings":
        given["Tier"] = [Tier("gpu", blocks=MOST)]
        given["slow Tier"] = [Tier("gpu", blocks=MOST), Tier("host", blocks=MOST)]
    if whole:
        given["hint"] = [Retain(tokens=np.broadcast_to(np.uint32(1), 2**27))]
        given["zeros[10**8]"] = np.zeros(10**8, np.uint32)
        given["zeros[2**28]"] = np.zeros(2**28, np.uint32)
        given["int32[2**27]"] = np.zeros(2**27, np.int32)
        given["list[10**7]"] = [1] * 10**7
        given["lists[10**6]"] = [TOKENS] * 10**6
        given["hints[10**6]"] = [Retain(tokens=TOKENS)] * 10**6
    elif kind == "world":
        given = {name: given[name] for name in SHARE}
    return given


SHARE = [
    "range(10**12)",
    "claims 10**8",
    "uint32[10**12]",
    "int8[10**6, 10**6]",
    "memoryview[10**12]",
    "[range(10**12)]",
    "2**32",
    "2**34",
    "2**44",
    "10**5000",
    "surrogate",
    "hints",
]
MODEL = ModelShape(layers=4, kv_heads=2, head_dim=8)


class World:
    """A manager that holds a lease, of one kind."""

    KINDS = ("small", "large", "engine", "layers", "blocks of one token", "priced")

    def __init__(self, kind):
        settings = {"block_tokens": 1 if kind == "blocks of one token" else 4}
        room = {"small": 8, "engine": 8}.get(kind, MOST // (4 if kind == "layers" else 1))
        owner = "engine" if kind == "engine" else "kvtrie"
        layers = kind == "layers"
        tiers = [
            Tier("gpu", blocks=room, owner=owner, layer_slots=layers),
            Tier("host", blocks=room, layer_slots=layers),
        ]
        if kind == "priced":
            settings["cost"] = "python"
        self.manager = BlockManager(MODEL, tiers, **settings)
        done = self.manager.acquire(TOKENS, now=1)
        done.commit(TOKENS, now=1)
        done.release(now=1)
        self.lease = self.manager.acquire(TOKENS, now=2, reserve=4, session="s")
        while len(moves := self.manager.moves()):
            self.manager.complete(moves.id, now=2)


REQUIRED = {
    "BlockManager": {
        "acquire": {"tokens": TOKENS},
        "audit": {},
        "clear_copies": {"blocks": [], "tier": 1, "group": 1},
        "close": {},
        "commit_many": {"lease_ids": [], "tokens": []},
        "complete": {"ids": []},
        "expected_sessions": {},
        "sort_versions": {"keep": [], "blocks": 0},
        "cost": {"layer": 0, "block": 0, "session_blocks": 1, "context": 0},
        "evict": {"count": 0},
        "evictions": {},
        "explain": {"block": 0},
        "explain_miss": {"tokens": TOKENS},
        "failed": {},
        "flush": {},
        "hint": {"hints": []},
        "index": {},
        "keys": {"tokens": TOKENS},
        "known": {"tokens": TOKENS},
        "layer_tiers": {"block": 0},
        "lease": {"lease_id": 0},
        "load_index": {"index": Index()},
        "longest_resume": {"parts": [], "most": 0},
        "lookup": {"tokens": TOKENS},
        "lookup_many": {"tokens": [TOKENS]},
        "mark": {"tokens": TOKENS, "tier": 1, "present": True},
        "moves": {},
        "next_due": {},
        "parts_above": {"tokens": TOKENS, "tier": 1},
        "pin_copies": {"blocks": [], "tier": 1},
        "policies": {},
        "predict": {"ids": []},
        "reset": {},
        "resume_needs": {"border": 0},
        "add_lane_busy": {"lane": "gpu read", "busy_ns": 1},
        "sessions": {},
        "set_costs": {"ids": [], "costs": []},
        "snapshot": {},
        "stats": {},
        "take_events": {},
        "transmit": {"lane": "gpu read", "tokens": 4},
        "unpin_copies": {"pin": 1},
        "unpriced": {},
    },
    "Lease": {
        "bind": {"first_block": 0, "slots": []},
        "unbind": {"first_block": 0, "group": 1},
        "commit": {"new_tokens": [7]},
        "drop_ahead": {},
        "fork": {"n": 1},
        "load": {},
        "ready": {},
        "release": {},
        "reserve": {"tokens": 4},
        "resume": {},
        "slots": {},
        "store_ahead": {},
        "suspend": {},
        "truncate": {"tokens": 4},
    },
}

SETTINGS = {
    BlockManager: {"model": MODEL, "tiers": [Tier("gpu", blocks=8), Tier("host", blocks=8)]},
    Cost: {},
    Demote: {"tokens": TOKENS},
    Index: {},
    Lane: {"name": "up", "bytes_per_s": 1e9},
    LayerGroup: {"layers": (0, 1)},
    Layout: {},
    ModelShape: {"layers": 4, "kv_heads": 2, "head_dim": 8},
    Prefetch: {"session": "s"},
    Progress: {"session": "s", "eta": 1},
    Quota: {"tenant": b"t"},
    Release: {"session": "s"},
    ResumeAt: {"session": "s", "borders": [4]},
    ResumePoints: {},
    Retain: {"session": "s"},
    Scope: {},
    Tier: {"kind": "gpu", "blocks": 8},
}

METHODS = {
    (Cost, "ns_of"): {"model": MODEL},
    (Cost, "default"): {"model": MODEL},
    (Layout, "planes"): {"block_tokens": 4, "kv_heads": 2, "head_dim": 8},
    (Layout, "packed_parts"): {"block_tokens": 4, "kv_heads": 2, "head_dim": 16},
    (Layout, "scales_at"): {"numbers": 4},
    (ModelShape, "from_config"): {"config": None},
    (ModelShape, "block_bytes"): {"block_tokens": 4},
    (ModelShape, "form"): {"group": None},
    (ModelShape, "layer_bytes"): {"block_tokens": 4},
    (Tier, "paced"): {"model": MODEL, "block_tokens": 4},
    (Tier, "room"): {"model": MODEL, "block_tokens": 4},
    (Tier, "room_bytes"): {"model": MODEL, "block_tokens": 4},
    (Tier, "pace"): {"lane": Lane("up", 1e9), "model": MODEL, "block_tokens": 4},
}


class Report:
    """Names calls, makes them, and reports what went wrong."""

    def __init__(self, file):
        self.file = file
        self.calls = 0

    def tell(self, line):
        self.file.write(line + "\n")
        self.file.flush()

    def call(self, name, function, arguments):
        """Makes a call. Whether it was refused."""
        self.calls += 1
        self.tell(name)
        began = perf_counter()
        try:
            function(**arguments)
        except KvtrieError as error:
            if len(str(error)) > 2000:
                self.tell(f"FAILED {name}: a message of {len(str(error))} characters")
            return True
        except BaseException as error:  # noqa: BLE001 - a panic is no Exception
            self.tell(f"FAILED {name}: {type(error).__name__}: {error!s:.200}")
        finally:
            if (took := perf_counter() - began) > SLOW:
                self.tell(f"FAILED {name}: took {took:.1f} s")
        return False


def of_settings(report, values):
    for kind, required in SETTINGS.items():
        for parameter, (value, given) in product(arguments(kind), values):
            name = f"{kind.__name__}({parameter}={value})"
            report.call(name, kind, required | {parameter: given})
    for (kind, method), required in METHODS.items():
        this = kind(**SETTINGS[kind])
        for parameter, (value, given) in product(required, values):
            if kind is Cost or parameter in {"model", "tier", "lane", "numbers"}:
                continue
            name = f"{kind.__name__}.{method}({parameter}={value})"
            report.call(name, getattr(this, method), required | {parameter: given})


def of_world(report, kind, values):
    world = World(kind)
    before = world.manager.snapshot()
    for of, calls in REQUIRED.items():
        signatures = methods(BlockManager if of == "BlockManager" else Lease)
        for method, signature in signatures.items():
            names = [name for name in signature.parameters if name != "self"]
            for parameter, (value, given) in product(names, values):
                this = world.manager if of == "BlockManager" else world.lease
                said = calls[method] | ({"now": 3} if "now" in names else {}) | {parameter: given}
                name = f"{kind}: {of}.{method}({parameter}={value})"
                refused = report.call(name, getattr(this, method), said)
                world.manager.audit()
                same = world.manager.snapshot() == before
                if refused and not same:
                    report.tell(f"FAILED {name}: it was refused and changed something")
                if not same:
                    world = World(kind)


def product(parameters, values):
    return [(parameter, value) for parameter in parameters for value in values.items()]


def main():
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    whole = sys.argv[2] == "whole"
    with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
        report = Report(file)
        of_settings(report, huge("settings", whole))
        for kind in World.KINDS if whole else World.KINDS[:2]:
            of_world(report, kind, huge("world", whole))
        report.tell(f"END {report.calls}")


if __name__ == "__main__":
    main()

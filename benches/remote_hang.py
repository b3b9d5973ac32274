"""Rows of the benches of a remote tier without a server: a store that hangs, and content keys.

Invariant: a row compares two runs of one manager. Cost: milliseconds per pair.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from benches.record import Result
from benches.remote_sides import DEADLINE_S, Size, paired
from kvtrie import BlockManager, Tier
from kvtrie.tiers import open_pools
from kvtrie.tiers.remote import RemoteStorage
from kvtrie.tiers.remote import Result as Outcome
from kvtrie.transfer import Executor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class HangingStore:
    """A store in memory whose reads return only when they are released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self._inside = threading.Semaphore(0)

    def reached(self) -> None:
        """Return when one read more hangs."""
        if not self._inside.acquire(timeout=DEADLINE_S):
            raise SystemExit("no read reached the store")

    def exists_many(self, names: list, deadline: int) -> list[Outcome]:  # noqa: ARG002 - of the protocol
        """Every block is there."""
        return [Outcome("ok") for _ in names]

    def get_many(self, rows: list, deadline: int) -> list[Outcome]:  # noqa: ARG002 - of the protocol
        """Hang."""
        self._inside.release()
        self.released.wait()
        return [Outcome("missing") for _ in rows]  # late ones would open the breaker

    def put_many(self, rows: list, deadline: int) -> list[Outcome]:  # noqa: ARG002 - of the protocol
        """Keep nothing."""
        return [Outcome("ok") for _ in rows]

    def remove_many(self, names: list, deadline: int) -> list[Outcome]:  # noqa: ARG002 - of the protocol
        """Remove nothing."""
        return [Outcome("ok") for _ in names]

    def close(self) -> None:
        """Let reads end."""
        self.released.set()


@contextmanager
def hanging(executor: Executor, store: HangingStore, prompts: list[np.ndarray]) -> Iterator[None]:
    """Loads from the store that do not end within the block, one per prompt."""
    store.released.clear()
    manager = executor.manager
    with ExitStack() as stack:
        leases = []
        for tokens in prompts:
            manager.mark(tokens, "remote", present=True, now=executor.clock())
            lease = manager.acquire(tokens, now=executor.clock(), keep=0, load="all")
            leases.append(stack.enter_context(lease))
            executor.poll()
            store.reached()  # later ones would join this call
        yield
        store.released.set()
        for lease in leases:
            executor.wait(lease)
    executor.drain()


def hang_rows(_: Path, size: Size, pairs: int) -> Iterator[Result]:
    """A hit in host memory while all threads of the store hang, and with a healthy store."""
    blocks = max(size.blocks // 4, 1)
    tiers = [
        Tier("gpu", blocks=blocks + 16, write="never"),
        Tier("host", blocks=blocks + 16, write="never"),
        Tier("remote", blocks=1000 * blocks),
    ]
    store = HangingStore()
    storage = RemoteStorage("folder:/nowhere", size.model, size.tokens, store=store)
    manager = BlockManager(size.model, tiers, block_tokens=size.tokens)
    pools = [*open_pools(size.model, tiers[:2], size.tokens), storage]
    executor = Executor(manager, pools, deadline_s=DEADLINE_S)
    threads = sum("tier2" in thread.name for thread in executor.runner.threads)
    tokens = np.arange(blocks * size.tokens, dtype=np.uint32)
    manager.mark(tokens, "host", present=True, now=executor.clock())
    fresh = iter(range(1, 1 << 30))

    def hit() -> float:
        began = time.perf_counter()
        with manager.acquire(tokens, now=executor.clock(), keep=0, load="all") as lease:
            executor.wait(lease)
            if lease.matched < len(tokens):
                raise SystemExit("a host hit was lost")
        took = time.perf_counter() - began
        manager.mark(tokens, "gpu", present=False, now=executor.clock())
        return blocks * size.bytes / took

    def hit_while_hanging() -> float:
        prompt = np.arange(size.tokens, dtype=np.uint32)
        others = [prompt + 1000 * len(tokens) * next(fresh) for _ in range(threads)]
        with hanging(executor, store, others):
            return hit()

    hit()
    yield paired(
        "host hit, store hangs", hit_while_hanging, hit, "healthy store", goal=0.65, pairs=3 * pairs
    )
    executor.close()


def keys_rows(_: Path, size: Size, pairs: int) -> Iterator[Result]:
    """Content keys of a prompt of 1000 blocks, next to its lookup."""
    blocks = 1000
    manager = BlockManager(size.model, [Tier("host", blocks=blocks, owner="none")], block_tokens=16)
    tokens = np.arange(16 * blocks, dtype=np.uint32)
    manager.mark(tokens, "host", present=True, now=1)
    figures: dict[str, list[float]] = {"keys": [], "lookup": []}
    calls = {"keys": lambda: manager.keys(tokens), "lookup": lambda: manager.lookup(tokens, now=2)}
    for _pair in range(10 * pairs):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            figures[name].append(1e6 * (time.perf_counter() - began))
    ours, peer = median(figures["keys"]), median(figures["lookup"])
    yield Result("keys", round(ours, 1), "us", round(peer, 1), "lookup", round(peer / ours, 3))

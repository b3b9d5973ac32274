"""Short prompts: every request is one block, in the streams on which recency alone fails.

Each stream is scaled by the room, so that a small room shows what a large one does. libcachesim's
ARC, S3-FIFO, LIRS and LFU serve the same requests; on single blocks their meaning is exact. Figures
are hits per cent. Cost: about ten microseconds per request and policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtrie import Tier
from kvtrie.sim.replay import open_manager

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.random import Generator

ROOMS = (64, 640)
# Requests per block of room.
LENGTH = 300
PEERS = ("ARC", "S3FIFO", "LIRS", "LFU")
OURS = ("learned", "lru", "retention")
# Ids of blocks that one request alone asks for.
ONCE = 1 << 24


def _one_hit_wonders(rng: Generator, room: int, requests: int) -> np.ndarray:
    """Three requests in ten are of a popular set that fits, the others are never repeated."""
    popular = rng.integers(0, 5 * room // 8, requests)
    return np.where(rng.random(requests) < 0.3, popular, ONCE + np.arange(requests))


def _alternation(rng: Generator, room: int, requests: int) -> np.ndarray:
    """Every second request is of a set of half the room, the others are never repeated."""
    popular = rng.integers(0, room // 2, requests)
    return np.where(np.arange(requests) % 2 == 1, popular, ONCE + np.arange(requests))


def _zipf(exponent: float) -> Callable[[Generator, int, int], np.ndarray]:
    def stream(rng: Generator, room: int, requests: int) -> np.ndarray:
        shares = np.arange(1, 80 * room + 1) ** -exponent
        return rng.choice(len(shares), requests, p=shares / shares.sum())

    return stream


def _loop(rng: Generator, room: int, requests: int) -> np.ndarray:
    """Blocks in turn, a quarter more than fit."""
    del rng
    return np.arange(requests) % (5 * room // 4)


def _shift(rng: Generator, room: int, requests: int) -> np.ndarray:
    """A set that fits, replaced by another one after thirty requests per block of room."""
    epoch = np.arange(requests) // (30 * room)
    return rng.integers(0, 3 * room // 4, requests) + epoch * room


STREAMS: dict[str, Callable[[Generator, int, int], np.ndarray]] = {
    "one-hit wonders": _one_hit_wonders,
    "alternation": _alternation,
    "zipf 0.8": _zipf(0.8),
    "zipf 1.0": _zipf(1.0),
    "zipf 1.2": _zipf(1.2),
    "loop": _loop,
    "shift": _shift,
}


def stream_of(name: str, room: int, seed: int) -> np.ndarray:
    """The block of each request, uint32."""
    rng = np.random.default_rng(seed)
    return STREAMS[name](rng, room, LENGTH * room).astype(np.uint32)


def hits(name: str, room: int, seed: int, policy: str) -> float:
    """Hits of one of our policies or of a peer's, in per cent."""
    stream = stream_of(name, room, seed)
    found = _theirs(stream, room, policy) if policy in PEERS else _ours(stream, room, policy)
    return 100 * found / len(stream)


def _ours(stream: np.ndarray, room: int, policy: str) -> int:
    manager = open_manager([Tier("gpu", blocks=room)], policy=policy)
    found = 0
    for now, block in enumerate(stream.reshape(-1, 1)):
        lease = manager.acquire(block, now=now, keep=0)
        found += lease.matched
        lease.commit(block[lease.matched :], now=now)
        lease.release(now=now)
    return found


def _theirs(stream: np.ndarray, room: int, policy: str) -> int:
    import libcachesim

    cache = getattr(libcachesim, policy)(cache_size=room)
    wanted = libcachesim.Request()
    wanted.obj_size = 1
    found = 0
    for block in stream.tolist():
        wanted.obj_id = block
        found += cache.get(wanted)
    return found

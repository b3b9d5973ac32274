"""Small managers and whole requests, as several tests want them."""

from __future__ import annotations

import numpy as np

from kvtrie import BlockManager, ModelShape, Tier

MODEL = ModelShape(layers=4, kv_heads=2, head_dim=8, fingerprint="served")
ABSENT = 2**32 - 1


def one_tier(blocks=8, **settings):
    return BlockManager(MODEL, [Tier("gpu", blocks=blocks)], block_tokens=4, **settings)


def two_tiers(gpu=4, host=8, *, layer_slots=False, **settings):
    tiers = [
        Tier("gpu", blocks=gpu, layer_slots=layer_slots),
        Tier("host", blocks=host, layer_slots=layer_slots),
    ]
    return BlockManager(MODEL, tiers, block_tokens=4, **settings)


def tokens(blocks, start=0):
    return np.arange(start, start + 4 * blocks, dtype=np.uint32)


def serve(manager, prompt, now, **asked):
    """A whole request: acquire, commit, release, with all moves carried out."""
    lease = manager.acquire(prompt, now=now, **asked)
    complete_all_moves(manager, now)
    lease.commit(prompt[lease.matched :], now=now)
    lease.release(now=now)
    complete_all_moves(manager, now)


def complete_all_moves(manager, now):
    while len(moves := manager.moves()):
        manager.complete(moves.id, now=now)


def demoting():
    """A manager in which the second request has just made room for itself."""
    manager = two_tiers(gpu=2)
    serve(manager, tokens(2), now=1)
    lease = manager.acquire(tokens(2, start=100), now=2)
    return manager, lease

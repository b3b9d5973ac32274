"""The managers that our benchmarks run: one model, tiers without bytes.

Invariant: the same settings in every benchmark, so that their figures belong together. Cost: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benches.workload import BLOCK
from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.settings.tier import DEFAULT_POLICY

if TYPE_CHECKING:
    import numpy as np

    from kvtrie import Lease

MODEL = ModelShape(layers=32, kv_heads=8, head_dim=128, hidden=4096, dtype="bfloat16")
STEP = 1_000_000  # nanoseconds from one request to the next
KINDS = ("gpu", "host", "disk", "remote")


def manager(blocks: int, policy: str = DEFAULT_POLICY, *below: int) -> BlockManager:
    """A tier of `blocks` blocks and those below it; each writes everything down at once."""
    sizes = (blocks, *below)
    last = len(sizes) - 1
    tiers = [
        Tier(kind, blocks=number, owner="none", write="back" if at == last else "through")
        for at, (kind, number) in enumerate(zip(KINDS, sizes, strict=False))
    ]
    return BlockManager(MODEL, tiers, block_tokens=BLOCK, policy=policy)


def insert(managed: BlockManager, tokens: np.ndarray, now: int) -> Lease:
    """Room for an unrelated sequence and its commit; victims leave where there is none."""
    lease = managed.acquire(tokens, now=now)
    lease.commit(tokens[lease.matched :], now=now)
    return lease


def carry_out(managed: BlockManager, now: int) -> None:
    """Every move that is asked for, as by an executor that reads the slots and copies nothing."""
    moves = managed.moves()
    if len(moves):
        assert len(moves.src_slot) == len(moves.dst_slot)
        managed.complete(moves.id, now=now)

"""Memory per block at a million blocks: growth of resident memory, everything included.

The common trace with one, two and three tiers, each holding a copy of every block, and unrelated
sequences of four blocks and of one. The difference is the cost of a further tier.
Cost: about a minute and half a gigabyte.
"""

from __future__ import annotations

import argparse
import gc
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from benches.measure import Clock, emit, resident_bytes
from benches.ours.manager import STEP, carry_out, insert, manager
from benches.ours.request import PARTS, play
from benches.workload import BLOCK, CONVERSATIONS, RUNNING, SEED, VOCABULARY, Trace
from kvtrie.settings.tier import DEFAULT_POLICY

if TYPE_CHECKING:
    from kvtrie import Lease

FULL = 0.99


def of_trace(trace: Trace, blocks: int, tiers: int, policy: str) -> tuple[float, int]:
    """Bytes per block, and blocks, with `tiers` tiers."""
    before = resident_bytes()
    managed = manager(blocks, policy, *[blocks] * (tiers - 1))
    running: deque[Lease] = deque()
    for i, (_, prompt, signed) in enumerate(trace):
        now, tokens = STEP * i, signed.view(np.uint32)
        lease = managed.acquire(tokens[:prompt], now=now, reserve=len(tokens) - prompt)
        lease.commit(tokens[lease.matched :], now=now)
        # One round takes a copy one tier down.
        for _ in range(tiers - 1):
            carry_out(managed, now)
        running.append(lease)
        if len(running) > RUNNING:
            running.popleft().release(now=now)
        if managed.stats().tiers["gpu"].free <= (1 - FULL) * blocks:
            break
    stored = managed.stats().blocks
    del tokens, signed, lease
    return (resident_bytes() - before) / stored, stored


def of_sequences(length: int, blocks: int, draw: np.random.Generator) -> tuple[float, int]:
    """Bytes per block, and blocks, of unrelated sequences of `length` blocks."""
    before = resident_bytes()
    managed = manager(blocks)
    for i in range(int(FULL * blocks) // length):
        now = STEP * i
        tokens = draw.integers(1, VOCABULARY, size=length * BLOCK, dtype=np.uint32)
        insert(managed, tokens, now).release(now=now)
    stored = managed.stats().blocks
    return (resident_bytes() - before) / stored, stored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["1", "2", "3", "sequences"], help="tiers, or sequences")
    parser.add_argument("--policy", default=DEFAULT_POLICY, help="of tiers")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    trace = Trace(given.seed, given.conversations)
    # Load everything that first use loads.
    play(trace, manager(1000), Clock(*PARTS), 500)
    gc.collect()
    if given.what == "sequences":
        draw = np.random.default_rng(given.seed)
        for length in (4, 1):
            each, stored = of_sequences(length, given.blocks, draw)
            emit("kvtrie", f"memory.sequences_{length}", each, "B", blocks=stored)
        return
    each, stored = of_trace(trace, given.blocks, int(given.what), given.policy)
    default = given.policy == DEFAULT_POLICY
    what = f"tiers_{given.what}" if default else given.policy
    emit("kvtrie", f"memory.{what}", each, "B", blocks=stored, policy=given.policy)


if __name__ == "__main__":
    main()

"""A whole request of the common trace with a host tier below a small GPU tier.

The GPU tier holds what is running and little more, so that a conversation's earlier turns are
loaded from the host tier, and every new block is stored there: acquire with its loads, moves taken
and reported, commits, the stores taken and reported, release. The peer's figure has its offload
manager alone in it; ours has the GPU tier's work too.
Cost: about ten seconds.
"""

from __future__ import annotations

import argparse
import gc
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from benches.measure import Clock, emit
from benches.ours.manager import STEP, carry_out, manager
from benches.workload import BLOCK, CONVERSATIONS, LRU_POOL, RUNNING, SEED, Trace
from kvtrie.settings.tier import DEFAULT_POLICY

if TYPE_CHECKING:
    from kvtrie import Lease

PARTS = ("acquire", "load", "commit", "store", "release")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    parser.add_argument("--gpu", type=int, default=12_000, help="blocks of the GPU tier")
    parser.add_argument("--blocks", type=int, default=LRU_POOL, help="blocks of the host tier")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    trace, clock = Trace(given.seed, given.conversations), Clock(*PARTS)
    managed = manager(given.gpu, given.policy, given.blocks)
    running: deque[Lease] = deque()
    requested = found = 0
    gc.freeze()
    for i, (_, prompt, signed) in enumerate(trace):
        now, tokens = STEP * i, signed.view(np.uint32)
        question, room = tokens[:prompt], len(tokens) - prompt
        clock.start()
        lease = managed.acquire(question, now=now, reserve=room, load="all")
        clock.lap("acquire")
        carry_out(managed, now)
        clock.lap("load")
        matched = lease.matched
        rest = tokens[matched:]
        clock.start()
        lease.commit(rest, now=now)
        clock.lap("commit")
        carry_out(managed, now)
        clock.lap("store")
        running.append(lease)
        if len(running) > RUNNING:
            oldest = running.popleft()
            clock.start()
            oldest.release(now=now)
            clock.lap("release")
        clock.next()
        requested += prompt // BLOCK
        found += matched // BLOCK
    tiers = managed.stats().tiers
    context = {
        "policy": given.policy,
        "gpu": given.gpu,
        "blocks": given.blocks,
        "requests": len(trace),
        "hit_rate": round(found / requested, 4),
        "parts": clock.means(),
        "loads": tiers["gpu"].moves,
        "stores": tiers["host"].moves,
    }
    emit("kvtrie", "offload", clock.us().mean(), "us", **context)


if __name__ == "__main__":
    main()

"""One `acquire` after one `prefetch` takes each block from the tier that has it sooner.

The beginning of a prompt is in this machine's tiers, its end in a store to which another process
wrote it: a folder, or memory that a machine lends to a Mooncake store.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager

import pytest
import torch
from tests import namespace, store_servers
from tests.remote_requests import SHAPE, SIZE, prefill, request, serving

from kvtrie import BlockManager, Tier
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

PROMPT = [7 * at for at in range(8 * SIZE)]


@contextmanager
def machine(url, folder):
    """An executor with every tier, which writes each block to all of them."""
    tiers = [
        Tier("gpu", blocks=20, write="through"),
        Tier("host", blocks=4000, write="through"),
        Tier("disk", blocks=40, path=str(folder), write="through"),
        Tier("remote", blocks=100_000, path=url),
    ]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    executor = Executor(manager, open_pools(SHAPE, tiers, SIZE), deadline_s=30.0)
    try:
        yield executor
    finally:
        executor.close()
        executor.pools[3].close()


@pytest.fixture(params=["folder", "mooncake"])
def places(request, tmp_path):
    """The URL of this machine, and of the one that fills the store."""
    if request.param == "folder":
        yield f"folder:{tmp_path / 'kv'}", f"folder:{tmp_path / 'kv'}"
        return
    if not namespace.INSIDE:
        pytest.skip("test_mooncake_store.py runs it in a network namespace")
    sys.path.append(str(store_servers.SITE))
    with store_servers.mooncake(tmp_path / "master") as server:
        url = f"mooncake://127.0.0.1:{server.port}"
        yield url, f"{url}?segment_bytes={64 << 20}"


def fastest(executor):
    """The number of blocks by the fastest tier that has them."""
    match = executor.manager.lookup(PROMPT, now=executor.clock(), keep=0)
    kinds = [executor.manager.tiers[block.copies[0].tier].kind for block in match.blocks]
    return {kind: kinds.count(kind) for kind in kinds}


def test_a_prompt_comes_from_all_tiers_and_the_store_at_once(places, tmp_path):
    own, others = places
    with machine(own, tmp_path / "disk") as executor, serving(others, deadline_s=30.0) as other:
        manager, pool = executor.manager, executor.pools[0]
        request(executor, PROMPT[: 6 * SIZE])
        executor.drain()
        request(other, PROMPT)
        other.drain()
        for tier in ("gpu",) * 4 + ("host",) * 2:
            manager.evict(1, tier, now=executor.clock())
        assert fastest(executor) == {"gpu": 2, "host": 2, "disk": 2}
        assert executor.prefetch(PROMPT, deadline_s=10.0) == (2, 2, 0, 0)
        with manager.acquire(PROMPT, now=executor.clock(), keep=0, load="all") as lease:
            ready = [span.ready for span in lease.plan.spans]
            assert ready == sorted(ready)
            assert (lease.plan.spans[0].tier, lease.plan.spans[0].action) == (0, "reuse")
            executor.wait(lease)
            assert lease.matched == len(PROMPT)
            table, at = pool.table(lease.slots(0)), torch.arange(len(PROMPT))
            for layer, slots in zip(prefill(PROMPT), table, strict=True):
                for kv, right in zip(pool.gather(slots[at // SIZE], at % SIZE), layer, strict=True):
                    assert torch.equal(kv, right)
        assert executor.pools[3].stats().results["get", "ok"] == 2
        manager.audit()

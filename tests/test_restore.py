"""The policy `restore`: its cost is what the next plan takes longer."""

import numpy as np
import pytest

from kvtrie import BlockManager, Cost, Lane, ModelShape, Tier

SHAPE = ModelShape(layers=4, kv_heads=1, head_dim=16, dtype="float16", query_heads=1, hidden=16)
PATH, ROOM = 6, 12


def manager(load_ns: int) -> BlockManager:
    """Blocks of 16 tokens that take 16 microseconds to compute and `load_ns` to load from host."""
    idle = {"owner": "none", "free_low": 0.0, "growth_reserve": 0.0}
    up = Lane("up", bytes_per_s=1e18, latency_ns=load_ns)
    tiers = [
        Tier("gpu", blocks=ROOM, **idle),
        Tier("host", blocks=64, read=up, store=Lane("down", bytes_per_s=1e18), **idle),
    ]
    cost = Cost(alpha=0.0, ns_per_token=1000.0)
    return BlockManager(SHAPE, tiers, block_tokens=16, policy="restore", cost=cost)


def land(managed: BlockManager, now: int) -> None:
    while len(moves := managed.moves()):
        managed.complete(moves.id, now=now)


def serve(managed: BlockManager, tokens: np.ndarray, now: int) -> None:
    with managed.acquire(tokens, now=now, keep=0) as lease:
        land(managed, now)
        lease.commit(tokens[lease.matched :], now=now)
        lease.release(now=now)


def shortened(load_ns: int, gone: int) -> tuple[BlockManager, np.ndarray]:
    """A path whose last `gone` blocks were written down for another request, and its tokens."""
    managed = manager(load_ns)
    path = np.arange(PATH * 16, dtype=np.uint32)
    serve(managed, path, 10)
    serve(managed, np.arange((ROOM - PATH + gone) * 16, dtype=np.uint32) + 1000, 20)
    assert managed.stats().tiers["gpu"].evicted_dirty == gone
    return managed, path


@pytest.mark.parametrize("load_ns", [1_000, 4_000, 6_000, 10_000, 15_000, 100_000])
def test_a_block_costs_what_the_next_plan_takes_longer(load_ns):
    finish, cost = [], []
    for gone in range(PATH):
        managed, path = shortened(load_ns, gone)
        tail = managed.lookup(path, now=30, keep=0).blocks[PATH - 1 - gone]
        cost.append(managed.explain(tail.block, now=30).cost)
        managed.audit()
        lease = managed.acquire(path, now=1_000_000, keep=0)
        finish.append(lease.plan.finish - 1_000_000)
        assert lease.plan.exact
    assert [1000 * c for c in cost[:-1]] == pytest.approx(np.diff(finish))
    # A lane's bytes take a nanosecond more.
    assert 1000 * cost[0] == pytest.approx(min(load_ns, 16_000), abs=1.5)


def test_some_loads_hide_behind_a_computation():
    """Five blocks load in less time than one is computed and the others load."""
    managed, path = shortened(4_000, 4)
    tail = managed.lookup(path, now=30, keep=0).blocks[1]
    assert managed.explain(tail.block, now=30).cost < 0.01


def test_on_a_single_tier_a_block_costs_its_computation():
    cost = Cost(alpha=0.5, ns_per_token=1000.0)
    tiers = [Tier("gpu", blocks=8, owner="none")]
    managed = BlockManager(SHAPE, tiers, block_tokens=16, policy="restore", cost=cost)
    path = np.arange(64, dtype=np.uint32)
    serve(managed, path, 10)
    costs = [managed.explain(b.block, now=30).cost for b in managed.lookup(path, now=30).blocks]
    # Sixteen tokens after the middle of the block, a microsecond and half of one per token each.
    assert costs == pytest.approx([16 * (1 + 0.5 * (16 * block + 8)) for block in range(3)])

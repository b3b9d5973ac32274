"""Bytes of groups of layers between two tiers: a request finds each block with its own bytes."""

import hashlib
import random
from dataclasses import replace

import pytest
import torch

from kvtrie import (
    BlockManager,
    ConfigError,
    LayerGroup,
    Layout,
    ModelShape,
    NoSpaceError,
    ResumePoints,
    Tier,
)
from kvtrie.tiers import GroupPool, open_pools
from kvtrie.transfer import Executor

SIZE = 4
NOTHING = 2**32 - 1
FULL = LayerGroup((0, 3))
WINDOW = LayerGroup((1, 2, 4), kind="sliding", window=7)
WIDE = replace(WINDOW, kv_heads=4, head_dim=6, v_head_dim=2)
STATE = LayerGroup((5, 6), kind="state", state_bytes=88)
CHUNKED = LayerGroup((7,), kind="chunked", window=8)
MODELS = {
    "windows": (FULL, WINDOW),
    "other heads and sinks": (FULL, replace(WIDE, sinks=3)),
    "states": (FULL, STATE),
    "four groups": (FULL, WIDE, STATE, CHUNKED),
}


class World:
    """A manager with pools, and a twin that knows the bytes of each block by its tokens."""

    def __init__(self, groups, *, gpu, host, seed=0, fails=0.0):
        self.model = ModelShape(8, 2, 8, groups=groups)
        kinds = (("gpu", gpu), ("host", host))
        self.tiers = [Tier(kind, bytes=room) for kind, room in kinds if room]
        resume = ResumePoints()
        self.manager = BlockManager(self.model, self.tiers, block_tokens=SIZE, resume=resume)
        self.pools = open_pools(self.model, self.tiers, SIZE, resume=resume)
        for pool in self.pools:
            pool.memory.view(torch.float32).fill_(float("nan"))
        self.now = 0
        self.compared = [0, 0]
        self.executor = Executor(self.manager, self.pools, workers=0, clock=self.tick)
        self.random = random.Random(seed)
        self.failed = dict.fromkeys(range(len(groups)), 0)
        self.moved = dict.fromkeys(range(len(groups)), 0)
        for pool in self.pools:
            for group, one in enumerate(pool.groups):
                one.copy_into = self.failing(one, group, fails)

    def tick(self):
        self.now += 1000
        return self.now

    def failing(self, pool, group, fails):
        def copy(units, target, target_units):
            if self.random.random() < fails:
                self.failed[group] += 1
                raise OSError("a copy that fails")
            self.moved[group] += 1
            GroupPool.copy_into(pool, units, target, target_units)

        return copy

    def bytes_of(self, group, tokens, place):
        name = repr((group, tokens[: (place + 1) * SIZE])).encode()
        size = self.model.block_bytes(SIZE, group)
        return torch.frombuffer(bytearray(hashlib.shake_128(name).digest(size)), dtype=torch.uint8)

    def check(self, lease, tokens):
        """Compare what the lease holds on the first tier, and all blocks of it below."""
        settled = not self.executor.poll()  # otherwise stores may be writing
        for group, _ in enumerate(self.model.groups):
            for tier, pool in enumerate(self.pools[: 1 + settled]):
                table = lease.slots(tier, group)[: len(tokens) // SIZE].tolist()
                for place, slot in enumerate(table):
                    if slot != NOTHING:
                        self.compared[tier] += 1
                        found = pool.groups[group].block(slot)
                        wanted = self.bytes_of(group, tokens, place)
                        assert torch.equal(found, wanted), (group, tier, place)

    def commit(self, lease, tokens, upto):
        """Write and commit tokens of a sequence, as a pass that ends there does."""
        done = lease.tokens
        self.executor.wait(lease)
        for group, pool in enumerate(self.pools[0].groups):
            table = lease.slots(0, group)
            for place in range(done // SIZE, upto // SIZE):
                if table[place] != NOTHING:
                    pool.block(int(table[place])).copy_(self.bytes_of(group, tokens, place))
        lease.commit(tokens[done:upto], now=self.tick())

    def serve(self, tokens, answer):
        """A request that ends its passes where it should; return its match."""
        reserve = len(answer)
        try:
            lease = self.manager.acquire(tokens, now=self.tick(), reserve=reserve, load="all")
        except NoSpaceError:
            self.executor.drain()
            return None
        with lease:
            self.executor.wait(lease)
            if self.random.random() < 0.3:
                self.executor.drain()
            matched = lease.tokens
            sequence = tokens + answer
            self.check(lease, sequence[:matched])
            try:  # a load that failed has made the match shorter
                lease.reserve(len(sequence) - matched, now=self.tick())
            except NoSpaceError:
                return matched
            self.executor.wait(lease)
            for border in (*lease.plan.resume, len(tokens)):
                if border > lease.tokens:
                    self.commit(lease, sequence, border)
            for end in range(len(tokens), len(sequence)):
                self.commit(lease, sequence, end + 1)
            self.executor.poll()
            self.check(lease, sequence)
        return matched


def play(world, requests):
    sessions = [[] for _ in range(5)]
    stem = [world.random.randrange(50) for _ in range(9)]
    found = 0
    for _ in range(requests):
        at = world.random.randrange(5)
        if not sessions[at] or world.random.random() < 0.2:
            sessions[at] = stem[: world.random.randrange(10)]
        turn = [world.random.randrange(50) for _ in range(world.random.randrange(1, 14))]
        answer = [world.random.randrange(50) for _ in range(world.random.randrange(6))]
        matched = world.serve(sessions[at] + turn, answer)
        found += matched or 0
        sessions[at] = (sessions[at] + turn + answer)[:90]
        if world.random.random() < 0.1:
            world.executor.drain()
            world.manager.audit()
    world.executor.drain()
    world.manager.audit()
    return found


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)
def test_every_group_keeps_its_bytes_over_random_moves(groups, seed):
    world = World(groups, gpu=60_000, host=160_000, seed=seed)
    assert play(world, 250) > 500
    assert min(world.moved.values()) > 0
    assert min(world.compared) > 100
    world.executor.close()


@pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)
def test_copies_that_fail_in_any_group_are_misses(groups):
    world = World(groups, gpu=60_000, host=160_000, seed=3, fails=0.2)
    play(world, 400)
    assert min(world.failed.values()) > 0
    world.executor.close()


def test_slots_of_two_groups_never_share_bytes():
    resume, tier = ResumePoints(), Tier("gpu", bytes=40_000)
    model = ModelShape(8, 2, 8, groups=MODELS["four groups"])
    (pools,) = open_pools(model, [tier], SIZE, resume=resume)
    for pool in pools.groups:
        pools.memory.zero_()
        for slot in range(pool.blocks):
            assert not pool.block(slot).any()
            pool.block(slot).fill_(1)


def test_rows_of_tokens_are_where_the_view_of_a_unit_has_them():
    model = ModelShape(8, 2, 8, groups=MODELS["other heads and sinks"])
    (pools,) = open_pools(model, [Tier("gpu", bytes=60_000)], SIZE, resume=ResumePoints())
    generator = torch.Generator().manual_seed(0)
    for pool in pools.groups:
        fmt = pool.block_format
        units = torch.tensor([slot * pool.layers + slot % pool.layers for slot in (0, 3, 8, 5)])
        offsets = torch.tensor([1, 0, 3, 2])
        keys = torch.randn(4, fmt.heads, fmt.head_dim, generator=generator)
        values = torch.randn(4, fmt.heads, fmt.v_head_dim, generator=generator)
        pool.scatter(units, offsets, keys, values)
        found = pool.gather(units, offsets)
        assert torch.equal(found[0], keys)
        assert torch.equal(found[1], values)
        for at, (unit, offset) in enumerate(zip(units.tolist(), offsets.tolist(), strict=True)):
            mine, theirs = pool.view(unit)
            assert torch.equal(mine[offset], keys[at])
            assert torch.equal(theirs[offset], values[at])


def test_what_groups_cannot_have_is_refused():
    resume = ResumePoints()
    model = ModelShape(8, 2, 8, groups=MODELS["states"])
    gpu = Tier("gpu", bytes=40_000)
    with pytest.raises(ConfigError, match="tiers disk, 1 ranks"):
        open_pools(model, [gpu, Tier("disk", bytes=40_000, path="kv")], SIZE, resume=resume)
    host = Tier("host", bytes=40_000, layout=Layout(dtype="int8", scales="token"))
    with pytest.raises(ConfigError, match="'host' has layout"):
        open_pools(model, [gpu, host], SIZE, resume=resume)
    odd = replace(STATE, state_bytes=89)
    with pytest.raises(ConfigError, match="89 bytes for 2 layers"):
        open_pools(replace(model, groups=(FULL, odd)), [gpu], SIZE, resume=resume)
    manager = BlockManager(model, [gpu], block_tokens=SIZE, resume=resume)
    with pytest.raises(ConfigError, match="keeps 2 groups of layers apart, the manager 2"):
        Executor(manager, open_pools(model, [gpu], 2 * SIZE, resume=resume))
    plain = BlockManager(replace(model, groups=()), [gpu], block_tokens=SIZE)
    with pytest.raises(ConfigError, match="keeps 2 groups of layers apart, the manager 0"):
        Executor(plain, open_pools(model, [gpu], SIZE, resume=resume))

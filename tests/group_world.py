"""A manager of groups of layers with bytes, and a twin that knows the bytes of each block.

The bytes of a block in a group are a function of all tokens up to its end, so each block that a
request finds can be checked, also one of an earlier process.
"""

from __future__ import annotations

import hashlib
import random
from contextlib import suppress
from dataclasses import replace

import torch

from kvtrie import (
    BlockManager,
    ConfigError,
    LayerGroup,
    ModelShape,
    NoSpaceError,
    ResumePoints,
    Tier,
)
from kvtrie.tiers import DiskStorage, KeptPool, Pool, open_pools
from kvtrie.tiers.remote import RemoteStorage
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

    def __init__(
        self,
        groups,
        *,
        gpu,
        host=0,
        disk=0,
        folder=None,
        remote=None,
        keep=None,
        seed=0,
        fails=0.0,
        layout=None,
        structure="leaf-only",
    ):
        self.model = ModelShape(8, 2, 8, groups=groups, fingerprint="groups")
        kinds = (("gpu", gpu, None), ("host", host, None), ("disk", disk, str(folder)))
        self.tiers = [
            Tier(
                kind,
                bytes=room,
                path=path,
                keep=keep if kind == "host" else None,
                layout=layout if kind != "gpu" else None,
            )
            for kind, room, path in kinds
            if room
        ]
        if remote is not None:  # what is below it has to reach the store
            self.tiers = [replace(tier, write="through") for tier in self.tiers]
            self.tiers.append(Tier("remote", blocks=5000, path=remote))
        self.remote = remote
        resume = ResumePoints()
        self.manager = BlockManager(
            self.model, self.tiers, block_tokens=SIZE, resume=resume, structure=structure
        )
        self.holes = structure == "holes"
        self.filled = 0
        self.pools = open_pools(self.model, self.tiers, SIZE, resume=resume)
        self.memory = [pool for pool in self.pools if isinstance(pool, Pool)]
        for pool in self.memory:
            if not isinstance(pool, KeptPool):
                pool.planes[0].view(-1).view(torch.float32).fill_(float("nan"))
        self.now = 0
        self.found = []
        self.compared = [0] * len(self.pools)
        self.executor = Executor(self.manager, self.pools, workers=0, clock=self.tick)
        self.random = random.Random(seed)
        self.failed = dict.fromkeys(range(len(groups)), 0)
        self.moved = dict.fromkeys(range(len(groups)), 0)
        for pool in self.memory:
            for group, one in enumerate(pool.groups):
                one.copy_into = self.failing(one, group, fails)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.executor.close()
        for pool in self.pools:
            if isinstance(pool, DiskStorage | KeptPool | RemoteStorage):
                pool.close()

    def tick(self):
        self.now += 1000
        return self.now

    def failing(self, pool, group, fails):
        def copy(units, target, target_units):
            if self.random.random() < fails:
                self.failed[group] += 1
                raise OSError("a copy that fails")
            self.moved[group] += 1
            Pool.copy_into(pool, units, target, target_units)

        return copy

    def bytes_of(self, group, tokens, place):
        name = repr((group, tokens[: (place + 1) * SIZE])).encode()
        size = self.model.block_bytes(SIZE, group)
        return torch.frombuffer(bytearray(hashlib.shake_128(name).digest(size)), dtype=torch.uint8)

    def check(self, lease, tokens):
        """Compare what the lease holds on the first tier, and all blocks of it below."""
        stores_ended = not self.executor.poll()  # otherwise stores may be writing
        for group, _ in enumerate(self.model.groups):
            for tier, pool in enumerate(self.memory[: 1 + stores_ended]):
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

    def lose(self, tokens):
        """A block amid a sequence is lost on all tiers, unless something uses it."""
        place = self.random.randrange(max(1, len(tokens) // SIZE))
        for tier in self.tiers:
            with suppress(ConfigError):
                end = (place + 1) * SIZE
                self.manager.mark(
                    tokens[:end], tier.kind, present=False, now=self.tick(), skip=place
                )

    def fill(self, lease, tokens):
        """Write the blocks that a lease computes within its match, in all groups."""
        for place in sorted(set((lease.plan.recompute() // SIZE).tolist())):
            self.filled += 1
            for group, pool in enumerate(self.pools[0].groups):
                slot = int(lease.slots(0, group)[place])
                if slot != NOTHING:
                    pool.block(slot).copy_(self.bytes_of(group, tokens, place))

    def serve(self, tokens, answer):
        """A request that ends its passes where it should; return its match."""
        reserve = len(answer)
        if self.remote is not None:
            self.executor.prefetch(tokens, deadline_s=30.0)
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
            self.found.append(matched)
            sequence = tokens + answer
            self.fill(lease, sequence)
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


def prompt(seed, blocks):
    """The tokens of some blocks; longer ones of a seed begin with shorter ones."""
    draw = random.Random(seed)
    return [draw.randrange(50) for _ in range(blocks * SIZE)]


def play(world, requests):
    """Requests of five sessions with one stem; return the sessions."""
    sessions = [[] for _ in range(5)]
    stem = [world.random.randrange(50) for _ in range(9)]
    for _ in range(requests):
        at = world.random.randrange(5)
        if not sessions[at] or world.random.random() < 0.2:
            sessions[at] = stem[: world.random.randrange(10)]
        turn = [world.random.randrange(50) for _ in range(world.random.randrange(1, 14))]
        answer = [world.random.randrange(50) for _ in range(world.random.randrange(6))]
        world.serve(sessions[at] + turn, answer)
        sessions[at] = (sessions[at] + turn + answer)[:90]
        if world.holes and world.random.random() < 0.5:
            world.lose(world.random.choice(sessions))
        if world.random.random() < 0.1:
            world.executor.drain()
            world.manager.audit()
    world.executor.drain()
    world.manager.audit()
    return sessions

"""Layer by layer to and from a host tier that is kept: adopted blocks are found, damage fails."""

from contextlib import contextmanager

import pytest
import torch
from kept import flip, memory_folder
from layer_world import LAYERS, retrieved
from rig import SHAPE, SIZE, fetch, prompt, rows, store

from kvtrie import BlockManager, Tier
from kvtrie.errors import TransferError
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor, LayerwiseEngine

HOST = 12


@contextmanager
def world(path, *, staging=0):
    """An executor and an engine over gpu and a kept host tier, with what was found."""
    tiers = [
        Tier("gpu", blocks=6, write="through"),
        Tier("host", blocks=HOST, keep=str(path)),
    ]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    pools = open_pools(SHAPE, tiers, SIZE, staging=staging)
    with Executor(manager, pools) as executor, LayerwiseEngine(executor) as engine:
        found = executor.restore()
        yield executor, engine, found
    pools[1].close()


@pytest.fixture
def path():
    """A path for a kept file."""
    with memory_folder() as folder:
        yield folder / "pool"


def stored(executor, engine, tokens, kv):
    """Store the KV of a prompt layer by layer."""
    pool = executor.pools[0]
    with engine.acquire(tokens, keep=0) as lease:
        steps = engine.store_layer(lease, tokens)
        for layer in range(LAYERS):
            pool.scatter(*rows(pool, lease, len(tokens))[layer], *kv[layer])
            next(steps)
        next(steps)
    executor.drain()


def test_blocks_that_were_stored_layer_by_layer_are_found_again(path):
    prompts = [prompt(seed, 2) for seed in range(4)]
    kv = [torch.randn(LAYERS, 2, 2 * SIZE, 2, 4) for _ in prompts]
    with world(path, staging=3) as (executor, engine, _):
        for tokens, layers in zip(prompts, kv, strict=True):
            stored(executor, engine, tokens, layers)
        executor.save()
        assert executor.pools[1].kept_blocks == 8
    with world(path, staging=3) as (executor, engine, found):
        assert found == 8
        for tokens, layers in zip(prompts, kv, strict=True):
            assert retrieved(engine, tokens, layers) == 2 * SIZE
        assert torch.equal(fetch(executor, prompts[0]), kv[0])
        # The places that were adopted are the slots' now: more blocks are stored past them.
        for seed in range(10, 13):
            tokens = prompt(seed, 2)
            stored(executor, engine, tokens, torch.randn(LAYERS, 2, 2 * SIZE, 2, 4))
        assert torch.equal(fetch(executor, prompts[3]), kv[3])
        executor.manager.audit()


def test_a_pass_that_was_aborted_leaves_nothing(path):
    tokens = prompt(1, 2)
    with world(path, staging=3) as (executor, engine, _):
        with engine.acquire(tokens, keep=0) as lease:
            steps = engine.store_layer(lease, tokens)
            next(steps)
            steps.close()
        executor.save()
        assert executor.pools[1].kept_blocks == 0
    with world(path, staging=3) as (executor, _, found):
        assert (found, dict(executor.pools[1].lost_blocks)) == (0, {})


def test_a_damaged_block_fails_its_pass_and_no_other_block(path):
    tokens = prompt(1, 3)
    with world(path) as (executor, _, _):
        kv = store(executor, tokens, 1)
        executor.save()
        match = executor.manager.lookup(tokens, now=executor.clock(), keep=0)
        damaged = int(match.blocks[1].copies[-1].slots[0])
    block = SHAPE.block_bytes(SIZE)
    with path.open("rb") as file:
        file.seek(80)
        pool = int.from_bytes(file.read(8), "little")
    flip(path, pool + damaged * block + 9)
    with world(path) as (executor, engine, found):
        assert found == 3
        with (
            engine.acquire(tokens, keep=0, load="all") as lease,
            pytest.raises(TransferError, match="damaged"),
        ):
            list(engine.retrieve_layer(lease))
        executor.drain()
        assert dict(executor.pools[1].lost_blocks) == {"checksum": 1}
        with engine.acquire(tokens, keep=0, load="all") as lease:
            assert lease.matched >= SIZE, "the block before it is good"
        assert retrieved(engine, tokens[:SIZE], kv[:, :, :SIZE]) == SIZE
        executor.manager.audit()

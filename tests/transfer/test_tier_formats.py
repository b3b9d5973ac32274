"""A host tier in another format than the gpu's: under executor and layer-wise engine, above a disk.

The KV that comes back from it is that of the format's twins, number by number: nothing on the way
may round it once more.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from keeping import Damage
from rig import Time, prompt

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.errors import ConfigError
from kvtrie.model.layout import Layout
from kvtrie.tiers import DiskStorage, Pool, open_pools
from kvtrie.transfer import Executor, Layerwise, LayerwiseEngine, runner

SHAPE = ModelShape(layers=4, kv_heads=2, head_dim=16, fingerprint="formats")
SIZE = 4
FORMATS = {
    "bfloat16": Layout(dtype="bfloat16"),
    "fp8": Layout(dtype="float8_e4m3fn", scales="token"),
    "int8": Layout(dtype="int8", scales="group"),
}
INT4 = Layout(dtype="int4", scales="channel")


@contextmanager
def running(
    layout,
    folder=None,
    *,
    disk=None,
    gpu=4,
    host=12,
    write="back",
    staging=0,
    layer_slots=False,
    **how,
):
    """An executor over a first tier in fp32, a host in `layout` and perhaps a disk below it."""
    tiers = [
        Tier("gpu", blocks=gpu, write=write, layer_slots=layer_slots),
        Tier("host", blocks=host, layout=layout, layer_slots=layer_slots),
    ]
    if folder is not None:
        tiers.append(Tier("disk", blocks=60, path=str(folder), layout=disk or layout))
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    pools = open_pools(SHAPE, tiers, SIZE, staging=staging)
    try:
        with Executor(manager, pools, clock=Time(), **how) as executor:
            yield executor
    finally:
        for pool in pools:
            if isinstance(pool, DiskStorage):
                pool.close()


def kv(seed, blocks):
    """Computed KV of a prompt, `(layers, 2, tokens, heads, dim)`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE.layers, 2, blocks * SIZE, 2, 16, generator=generator)


def through(layout, numbers):
    """Numbers after they have been in a pool of that format: what its twins make of them."""
    blocks = numbers.shape[2] // SIZE
    one, other = Pool(SHAPE, blocks, SIZE), Pool(SHAPE, blocks, SIZE, layout=layout)
    units = one.layer_units(torch.arange(blocks).numpy(), 0)
    every = torch.arange(blocks * SHAPE.layers).numpy()
    for layer in range(SHAPE.layers):
        for block in range(blocks):
            for side, view in enumerate(one.view(int(units[block]) + layer)):
                view.copy_(numbers[layer, side, block * SIZE : (block + 1) * SIZE])
    other.copy_from(one, every, every)
    one.copy_from(other, every, every)
    return read(
        one, torch.arange(blocks)[None] * SHAPE.layers + torch.arange(SHAPE.layers)[:, None]
    )


def places(tokens):
    at = torch.arange(tokens)
    return at // SIZE, at % SIZE


def read(pool, table):
    """K and V of the blocks of a table of units, `(layers, 2, tokens, heads, dim)`."""
    block, offset = places(table.shape[1] * SIZE)
    return torch.stack([torch.stack(pool.gather(units[block], offset)) for units in table])


def compute(executor, seed, blocks):
    """Write the KV of a prompt that is not cached, and keep it."""
    tokens, numbers = prompt(seed, blocks), kv(seed, blocks)
    pool, now = executor.pools[0], executor.clock()
    with executor.manager.acquire(tokens, now=now, keep=0) as lease:
        executor.wait(lease)
        assert lease.matched == 0
        block, offset = places(len(tokens))
        for layer, units in enumerate(pool.table(lease.slots(0))[:, :blocks]):
            pool.scatter(units[block], offset, *numbers[layer])
        lease.commit(tokens, now=now)
    executor.drain()
    return tokens, numbers


def fetched(executor, tokens):
    """The KV of a prompt that is cached whole, on the first tier."""
    with executor.manager.acquire(tokens, now=executor.clock(), keep=0, load="all") as lease:
        assert lease.matched == len(tokens)
        executor.wait(lease)
        return read(
            executor.pools[0], executor.pools[0].table(lease.slots(0))[:, : len(tokens) // SIZE]
        )


def came_back(got, numbers, layout):
    """Every layer of every block is what was computed, where it stayed above, or the format's."""
    rounded = through(layout, numbers)
    away = 0
    for layer in range(SHAPE.layers):
        for at in range(0, numbers.shape[2], SIZE):
            mine, exact, its = (each[layer, :, at : at + SIZE] for each in (got, numbers, rounded))
            assert torch.equal(mine, exact) or torch.equal(mine, its)
            away += not torch.equal(mine, exact)
    assert away


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layer_slots", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_demoted_prompt_comes_back_as_its_format_says(name, layer_slots, workers):
    layout = FORMATS[name]
    with running(layout, layer_slots=layer_slots, workers=workers) as executor:
        mine = [compute(executor, seed, 2) for seed in range(4)]
        assert torch.equal(fetched(executor, mine[-1][0]), mine[-1][1])  # still on the first tier
        for tokens, numbers in mine[:2]:
            came_back(fetched(executor, tokens), numbers, layout)
        executor.manager.audit()
        assert not executor.manager.failed()


def test_a_host_in_the_format_of_the_first_tier_keeps_every_bit():
    for layout in (None, Layout()):
        with running(layout, workers=0) as executor:
            mine = [compute(executor, seed, 2) for seed in range(4)]
            for tokens, numbers in mine:
                assert torch.equal(fetched(executor, tokens), numbers)


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_blocks_on_a_disk_are_found_after_a_restart(name, tmp_path):
    layout = FORMATS[name]
    with running(layout, tmp_path, workers=0) as executor:
        mine = [compute(executor, seed, 2) for seed in range(4)]
        executor.save()
        storage = executor.pools[2]
        unit = executor.pools[1].planes[0].shape[1]
        assert storage.store.layer_bytes == unit < Pool(SHAPE, 1, SIZE).planes[0].shape[1]
    with running(layout, tmp_path, workers=0) as executor:
        assert executor.restore() == 8
        for tokens, numbers in mine:
            assert torch.equal(fetched(executor, tokens), through(layout, numbers))
        executor.manager.audit()
    with running(None, tmp_path, workers=0) as executor:
        assert executor.restore() == 0  # KV of another format is another store's


NARROWER = {
    "native above int8": (None, FORMATS["int8"]),
    "native above int4": (None, INT4),
    "int8 above int4": (FORMATS["int8"], INT4),
    "bfloat16 above fp8": (FORMATS["bfloat16"], FORMATS["fp8"]),
}


@pytest.mark.parametrize("name", NARROWER)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_disk_keeps_fewer_bits_than_the_memory_above_it(name, workers, tmp_path):
    """Blocks come back as the disk's format leaves them, also from the next process."""
    above, below = NARROWER[name]
    with running(above, tmp_path, disk=below, workers=workers) as executor:
        mine = [compute(executor, seed, 2) for seed in range(4)]
        executor.save()
        [unit] = below.planes(SIZE, 2, 16)
        assert executor.pools[2].store.layer_bytes == unit < executor.pools[1].unit_bytes
    with running(above, tmp_path, disk=below, workers=workers) as executor:
        assert executor.restore() == 8
        for tokens, numbers in mine:
            rounded = numbers if above is None else through(above, numbers)
            rounded = through(below, rounded)
            got = fetched(executor, tokens)
            assert torch.equal(got, rounded if above is None else through(above, rounded))
        executor.manager.audit()
        assert not executor.manager.failed()
    with running(above, tmp_path, disk=above, workers=0) as executor:
        assert executor.restore() == 0  # blocks of another format are another store's


def test_a_damaged_block_in_fewer_bits_is_a_miss(tmp_path):
    with running(None, tmp_path, disk=INT4, workers=0) as executor:
        tokens, _ = compute(executor, 0, 2)
        executor.save()
        match = executor.manager.lookup(tokens, now=executor.clock())
        slot = next(copy.slot for copy in match.blocks[0].copies if copy.tier == 2)
    Damage(tmp_path).flip(slot, 1)
    with running(None, tmp_path, disk=INT4, workers=0) as executor:
        assert executor.restore() == 2
        with executor.manager.acquire(tokens, now=executor.clock(), load="all") as lease:
            executor.wait(lease)
            assert lease.matched == 0
        executor.manager.audit()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "settings",
    [Layerwise(), Layerwise(use_gpu=True, staging_bytes=3000), Layerwise(blending=True)],
    ids=["direct", "staged", "blending"],
)
@pytest.mark.parametrize("disk", [False, True])
def test_layers_come_and_go_one_by_one(name, settings, disk, tmp_path):
    layout, folder = FORMATS[name], tmp_path if disk else None
    world = running(layout, folder, gpu=6, host=6 if disk else 40, write="through", staging=2)
    with world as executor, LayerwiseEngine(executor, settings) as engine:
        pool, mine = executor.pools[0], []
        for seed in range(5):
            tokens, numbers = prompt(seed, 2), kv(seed, 2)
            with engine.acquire(tokens, keep=0) as lease:
                executor.wait(lease)
                storing = engine.store_layer(lease, tokens)
                block, offset = places(len(tokens))
                for layer, units in enumerate(pool.table(lease.slots(0))[:, :2]):
                    pool.scatter(units[block], offset, *numbers[layer])
                    assert next(storing) == layer
                next(storing)
            executor.drain()
            mine.append((tokens, numbers))
        for tokens, numbers in mine[:2]:
            with engine.acquire(tokens, keep=0, load="all") as lease:
                assert lease.matched == len(tokens)
                steps = list(engine.retrieve_layer(lease))
                assert steps == [8, 0, 1, 2, 3, 8]
                came_back(read(pool, pool.table(lease.slots(0))[:, :2]), numbers, layout)
        executor.drain()
        executor.manager.audit()


def test_a_copy_counts_the_bytes_that_its_lane_carries(monkeypatch):
    seen, carry_out = [], runner.carry_out

    def counting(ledger, jobs, *given):
        seen.extend((job.store, job.bytes // len(job.ids)) for job in jobs)
        carry_out(ledger, jobs, *given)

    monkeypatch.setattr(runner, "carry_out", counting)
    layout = FORMATS["int8"]
    tiers = [Tier("gpu", blocks=4), Tier("host", blocks=12, layout=layout)]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    with Executor(manager, open_pools(SHAPE, tiers, SIZE), clock=Time(), workers=0) as executor:
        mine = [compute(executor, seed, 2) for seed in range(4)]
        fetched(executor, mine[0][0])
    [unit] = layout.planes(SIZE, 2, 16)
    assert unit == 2 * SIZE * 2 * (16 + 4)
    assert set(seen) == {(True, 4 * unit), (False, 4 * unit)}


def test_pools_of_one_tier_must_agree_with_the_manager(tmp_path):
    tiers = [Tier("gpu", blocks=4), Tier("host", blocks=4)]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    int8 = FORMATS["int8"]
    first = [Pool(SHAPE, 4, SIZE, layout=int8), Pool(SHAPE, 4, SIZE)]
    with pytest.raises(ConfigError, match=r"the manager and tier 0 \(gpu\) differ: dtype"):
        Executor(manager, first, workers=0)
    tiers = [*tiers, Tier("disk", blocks=4)]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    with DiskStorage(tmp_path, SHAPE, 4, SIZE) as disk:
        pools = [Pool(SHAPE, 4, SIZE), Pool(SHAPE, 4, SIZE, layout=int8), disk]
        with pytest.raises(ConfigError, match=r"tier 1 \(host\) and tier 2 \(disk\) differ: dtype"):
            Executor(manager, pools, workers=0)

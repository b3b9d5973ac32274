"""How a disk's bytes travel: several blocks a call, either queue, both ways; costs are kept."""

import numpy as np
import pytest

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie._kvtrie import DiskStore, Faults
from kvtrie.errors import ConfigError
from kvtrie.tiers import DiskStorage, Pool

SHAPE = ModelShape(layers=4, kv_heads=2, head_dim=64, dtype="float16", fingerprint="travel")
TOKENS = 16
BLOCKS = 9
WAYS = [(io, queue) for io in ("direct", "buffered") for queue in ("best", "threads")]


def open_store(folder, io="direct", queue="best", opener=DiskStore):
    return opener(
        folder,
        identity=b"1" * 32,
        about="{}",
        layers=SHAPE.layers,
        layer_bytes=SHAPE.layer_bytes(TOKENS),
        block_tokens=TOKENS,
        blocks=BLOCKS,
        io=io,
        queue=queue,
    )


def priced():
    """A manager that knows blocks with costs of the user's on its disk."""
    tiers = [Tier("disk", blocks=BLOCKS, owner="none")]
    return BlockManager(SHAPE, tiers, block_tokens=TOKENS, cost="python")


def disk_index():
    """Keys, labels and costs of some blocks."""
    manager = priced()
    manager.mark(np.arange(BLOCKS * TOKENS), "disk", present=True, now=1)
    blocks = manager.unpriced(BLOCKS).id
    manager.set_costs(blocks, np.arange(BLOCKS) + 0.5, now=2)
    index = manager.index(now=3)
    return manager, index, [key.tobytes() for key in index.key], [row[0] for row in index]


def rows(pool, keys, labels=None):
    planes = pool.planes[0].numpy().reshape(BLOCKS, SHAPE.layers, -1)
    whole = (0, SHAPE.layers)
    given = zip(keys, range(BLOCKS), [whole] * BLOCKS, planes, strict=True)
    if labels is None:
        return list(given)
    return [(*row, label) for row, label in zip(given, labels, strict=True)]


@pytest.mark.parametrize(("io", "queue"), WAYS)
def test_blocks_go_and_come_several_at_once(tmp_path, io, queue):
    _, _, keys, labels = disk_index()
    wrote, read = Pool(SHAPE, BLOCKS, TOKENS), Pool(SHAPE, BLOCKS, TOKENS)
    assert wrote.planes[0].data_ptr() % 4096 == 0
    wrote.planes[0].random_(256)
    store = open_store(tmp_path, io, queue)
    direct, moved_by, reasons = store.travel
    assert direct == (io == "direct") or reasons
    assert moved_by == ("threads" if queue == "threads" else "io_uring") or reasons
    assert store.write_many(rows(wrote, keys, labels), 0, depth=4) == [None] * BLOCKS
    assert store.read_many(rows(read, keys), depth=4) == [None] * BLOCKS
    assert read.planes[0].equal(wrote.planes[0])
    keys[3] = b"0" * 32
    errors = store.read_many(rows(read, keys))
    assert "holds" in errors[3]
    assert [why for at, why in enumerate(errors) if at != 3] == [None] * (BLOCKS - 1)


@pytest.mark.parametrize("queue", ["best", "threads"])
def test_a_device_that_fails_below_a_queue_is_reported_for_each_block(tmp_path, queue):
    _, _, keys, labels = disk_index()
    pool, faults = Pool(SHAPE, BLOCKS, TOKENS), Faults(7, queue=queue)
    store = open_store(tmp_path, opener=faults.open)
    faults.inject("short-write", per_mille=500)
    assert store.write_many(rows(pool, keys, labels), 0) == [None] * BLOCKS
    faults.inject("read", per_mille=300)
    errors = store.read_many(rows(pool, keys))
    assert any(errors)
    assert all(why is None or "error" in why.lower() for why in errors)
    faults.heal()
    assert store.read_many(rows(pool, keys)) == [None] * BLOCKS


def test_costs_of_the_user_survive_a_restart(tmp_path):
    manager, index, keys, labels = disk_index()
    store = open_store(tmp_path)
    store.write_many(rows(Pool(SHAPE, BLOCKS, TOKENS), keys, labels), 0)
    manager.set_costs(manager.mark(np.arange(TOKENS), "disk", present=True, now=4), [9.5], now=4)
    for saved in (index, manager.index(now=5)):
        store.save(saved, 0)
        store.close()
        store = open_store(tmp_path)
        later = priced()
        assert later.load_index(store.index(0), now=10) == BLOCKS
        assert len(later.unpriced(BLOCKS).id) == 0
        later.audit()
        first = np.asarray([row[0] for row in later.index(now=11)])
        again = np.asarray([row[0] for row in saved])
        costs = [[label[32:40] for label in labels] for labels in (first, again)]
        assert sorted(costs[0]) == sorted(costs[1])


def test_words_that_are_none_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="io is 'direct' or 'buffered'"):
        open_store(tmp_path, io="fast")
    with pytest.raises(ConfigError, match="queue is 'best' or 'threads'"):
        open_store(tmp_path, queue="slow")
    with pytest.raises(ConfigError, match="io of a tier"):
        Tier("disk", blocks=1, io="fast")


def test_a_tier_chooses_the_page_cache(tmp_path):
    tier = Tier("disk", blocks=4, path=str(tmp_path), io="buffered")
    with DiskStorage.of_tier(SHAPE, tier, TOKENS) as storage:
        assert storage.store.travel[0] is False

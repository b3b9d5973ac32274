"""KeyedRemote: blocks by an engine's keys in a shared store, proved, and by a deadline."""

from __future__ import annotations

import numpy as np
import pytest
from shelf import NS, Clock, Shelf

from kvtrie import ConfigError, TransferError
from kvtrie.tiers.remote.keyed import KeyedRemote

SIZE = 3000
KEYS = [b"page %d" % at for at in range(5)]


def block(seed):
    return np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)


def blocks(keys=KEYS):
    return [(key, block(at)) for at, key in enumerate(keys)]


def opened(store, *, url="folder:/nowhere", meaning="a model", **more):
    limits = {"lookup_s": 1.0, "deadline_s": 5.0} | more
    return KeyedRemote(url, meaning=meaning, size=SIZE, store=store, **limits)


def found(remote, keys=KEYS):
    """Number of blocks that are read; all of them are right."""
    rows = [(key, np.zeros(SIZE, np.uint8)) for key in keys]
    results = remote.read_many(rows)
    for at, (good, (_, memory)) in enumerate(zip(results, rows, strict=True)):
        assert not good or (memory == block(at)).all()
    return sum(results)


def test_blocks_are_found_by_another_process_of_the_same_meaning():
    store = Shelf()
    one = opened(store)
    assert one.leading(KEYS) == 0
    assert one.write_many(blocks()[:3], after=b"before") == [True] * 3
    other = opened(store)
    assert other.leading(KEYS) == 3
    assert KEYS[2] in other
    assert KEYS[3] not in other
    assert found(other, KEYS[:3]) == 3
    for strange in ({"meaning": "another"}, {"secret": b"hunter2"}):
        assert opened(store, **strange).leading(KEYS) == 0
    assert other.leading([]) == 0
    assert other.read_many([]) == other.write_many([]) == []


def test_a_swapped_or_changed_block_is_a_miss():
    store = Shelf()
    one = opened(store)
    one.write_many(blocks())
    first, second, third, *_ = store.values
    store.values[first], store.values[second] = store.values[second], store.values[first]
    store.values[third] = store.values[third][:-1] + bytes([store.values[third][-1] ^ 1])
    assert found(one) == 2
    assert one.stats().results["get", "damaged"] == 3


def test_a_block_that_could_not_be_read_is_not_asked_for_until_the_backoff_has_passed():
    store, clock = Shelf(), Clock()
    one = opened(store, clock=clock)
    one.write_many(blocks())
    kept = dict(store.values)
    store.values.clear()
    assert one.leading(KEYS) == 5  # a belief
    assert found(one) == 0
    store.values.update(kept)
    assert one.leading(KEYS) == 0
    clock.now += 2 * NS
    assert one.leading(KEYS) == found(one) == 5
    store.values.clear()
    one.clear()
    assert one.leading(KEYS) == 0


def test_each_call_has_its_limit():
    store, clock = Shelf(), Clock()
    seen = []

    def noted(call):
        def noting(rows, deadline):
            seen.append(deadline - clock.now)
            return call(rows, deadline)

        return noting

    for name in ("exists_many", "get_many", "put_many"):
        setattr(store, name, noted(getattr(store, name)))
    one = opened(store, clock=clock, lookup_s=0.5, deadline_s=2.0)
    one.leading(KEYS)
    one.write_many(blocks())
    found(one)
    assert seen == [NS // 2, 2 * NS, 2 * NS]


def test_only_own_blocks_with_a_local_lookup():
    store = Shelf()
    opened(store).write_many(blocks())
    one = opened(store, lookup="local")
    assert one.leading(KEYS) == 0
    one.write_many(blocks()[:2])
    assert one.leading(KEYS) == 2


def test_a_store_that_fails_is_a_miss(tmp_path):
    store = Shelf()
    one = opened(store)
    store.fails = "unreachable"
    for _ in range(3):
        assert one.leading(KEYS) == found(one) == 0
    assert one.write_many(blocks()) == [False] * 5
    assert one.stats().breaker == "open"
    one.close()
    one.close()
    assert one.leading(KEYS) == 0
    (tmp_path / "file").touch()
    with pytest.raises((ConfigError, TransferError), match="file"):
        opened(None, url=f"folder:{tmp_path / 'file'}?strict=1")

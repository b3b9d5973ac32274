"""RemoteClient: what it asks a store, what it believes, and when it calls a store no more."""

from __future__ import annotations

import numpy as np
import pytest
from shelf import NS, SHAPE, SIZE, TOKENS, Clock, Shelf, kv, labelled, storage_of

from kvtrie import BlockManager, Tier
from kvtrie.tiers.remote import Result
from kvtrie.tiers.remote.beliefs import Beliefs


def test_asking_ends_at_the_first_block_that_is_missing():
    store = Shelf()
    tokens = list(range(200 * SIZE))
    keys = BlockManager(SHAPE, [Tier("gpu", blocks=8)], block_tokens=SIZE).keys(tokens)
    clock = Clock()
    storage = storage_of(store, clock)
    names = storage._names(keys)
    store.values = dict.fromkeys(names[:100])
    assert storage.find(keys, 2**62) == (100, 64 + 128, 0, 0)
    assert storage.find(keys, 2**62) == (100, 92, 0, 0)  # reported ones are trusted
    clock.now += 61 * NS
    del store.values[names[70]]
    assert storage.find(keys, 2**62) == (70, 64 + 128, 1, 0)
    # A refuted name is asked for again after its backoff.
    store.values[names[70]] = None
    assert storage.find(keys, 2**62) == (70, 0, 1, 0)
    clock.now += NS
    assert storage.find(keys, 2**62).blocks == 100


def test_a_missing_block_may_be_asked_for_at_once():
    store = Shelf()
    storage = storage_of(store)
    keys = BlockManager(SHAPE, [Tier("gpu", blocks=8)], block_tokens=SIZE).keys(TOKENS)
    assert storage.find(keys, 2**62) == (0, 2, 0, 0)
    store.values = dict.fromkeys(storage._names(keys))
    assert storage.find(keys, 2**62) == (2, 2, 0, 0)


def test_the_backoff_of_a_value_that_exists_and_cannot_be_read_doubles():
    store, clock = Shelf(), Clock()
    storage = storage_of(store, clock)
    keys = BlockManager(SHAPE, [Tier("gpu", blocks=8)], block_tokens=SIZE).keys(TOKENS[:4])
    key, (name,) = bytes(keys[0]), storage._names(keys)
    store.remove_many = lambda names, _: [Result("refused")] * len(names)
    store.values[name] = bytes(100_000)
    backoff = NS
    for _ in range(12):
        assert storage.find(keys, 2**62).blocks == 1
        assert storage.read_many([(key, 0, (0, 3), kv(0))])[0].startswith("damaged")
        clock.now += backoff - 1
        assert storage.find(keys, 2**62) == (0, 0, 1, 0)
        clock.now += 1
        backoff = min(2 * backoff, 300 * NS)


def test_the_table_of_beliefs_is_bounded_and_a_forgotten_name_is_unknown():
    beliefs = Beliefs(60.0, Clock(), most=3)
    names = [bytes([at]) * 32 for at in range(4)]
    beliefs.refute(names[0])
    for name in names[1:3]:
        beliefs.confirm(name)
    assert beliefs.kind(names[0]) == "refuted"
    beliefs.report(names[3])
    assert len(beliefs) == 3
    kinds = [beliefs.kind(name) for name in names]
    assert kinds == ["unknown", "confirmed", "confirmed", "reported"]


@pytest.mark.parametrize("outcome", ["full", "refused", "unreachable", "late"])
def test_dropped_blocks_are_counted_by_the_outcome_of_the_latest_put(outcome):
    store = Shelf()
    storage = storage_of(store)
    keys, labels = labelled(TOKENS)
    block = (keys[0], 0, (0, 3), kv(1), labels[0])
    store.fails = outcome
    storage.write_many([block])
    storage.count_dropped(2)
    store.fails = None
    storage.write_many([block])
    storage.count_dropped(1)  # the store answers, and was not soon enough
    dropped = storage.stats().dropped
    assert dropped == ({"late": 3} if outcome == "late" else {outcome: 2, "late": 1})


def test_only_own_blocks_are_believed_with_a_local_lookup():
    store = Shelf()
    keys, labels = labelled(TOKENS)
    storage, other = storage_of(store, lookup="local"), storage_of(store)
    all_keys = np.frombuffer(b"".join(keys), np.uint8).reshape(2, 32)
    other.write(keys[0], 0, (0, 3), kv(1), labels[0])
    assert storage.find(all_keys, 2**62) == (0, 0, 0, 0)
    storage.write(keys[0], 0, (0, 3), kv(1), labels[0])
    store.asked.clear()
    assert storage.find(all_keys, 2**62) == (1, 0, 0, 0)
    assert not store.asked


@pytest.mark.parametrize("outcome", ["late", "unreachable"])
def test_the_breaker_stops_calls_and_a_probe_closes_it(outcome):
    store, clock = Shelf(), Clock()
    storage = storage_of(store, clock)
    keys, labels = labelled(TOKENS)
    block = (keys[0], 0, (0, 3), kv(1), labels[0])
    store.fails = outcome
    for _ in range(3):
        assert storage.stats().breaker == "closed"
        assert storage.write_many([block]) == [f"{outcome}: as the test says"]
    assert storage.stats().breaker == "open"
    store.asked.clear()
    wait = NS
    for _ in range(8):
        clock.now += wait - 1
        assert storage.write_many([block]) == ["unreachable: the circuit breaker is open"]
        assert not store.asked
        clock.now += 1
        assert storage.write_many([block]) == [f"{outcome}: as the test says"]
        assert len(store.asked) == 1
        store.asked.clear()
        wait = min(2 * wait, 60 * NS)
    store.fails = None
    clock.now += wait
    assert storage.write_many([block]) == [None]
    assert storage.stats().breaker == "closed"


@pytest.mark.parametrize("outcome", ["full", "refused", "unreachable", "late"])
def test_puts_that_all_fail_stop_puts_and_not_lookups(outcome, caplog):
    store, clock = Shelf(), Clock()
    storage = storage_of(store, clock)
    (key, other), labels = labelled(TOKENS)
    block, keys = (key, 0, (0, 3), kv(1), labels[0]), np.frombuffer(other, np.uint8)[None]

    wait = 60 * NS
    put = storage._store._store.put_many
    store.put_many = lambda rows, _: [Result(outcome, f"error {clock.now}")] * len(rows)
    for _ in range(3):
        assert storage.stats().writes == "closed"
        assert storage.write_many([block])[0].startswith(f"{outcome}: error")
        assert storage.find(keys, 2**62).late == 0
        storage.forget()
    assert (storage.stats().writes, storage.stats().breaker) == ("open", "closed")
    assert storage.write_many([block]) == ["unreachable: the circuit breaker of writes is open"]
    assert storage.find(keys, 2**62).late == 0
    clock.now += wait
    assert storage.write_many([block])[0].startswith(f"{outcome}: error")
    assert storage.stats().writes == "open"
    store.put_many = put
    clock.now += wait
    assert storage.write_many([block]) == [None]
    assert storage.stats().writes == "closed"
    lines = [line.getMessage() for line in caplog.records]
    (said,) = [line for line in lines if "put: " in line]
    assert said.startswith(f"{storage.url}: put: {outcome}: error {10 * NS} (")
    assert [line for line in lines if "breaker" in line] == [
        f"{storage.url}: the circuit breaker of writes is open after a put",
        f"{storage.url}: the circuit breaker of writes is closed after a put",
    ]


def test_a_fault_is_logged_again_when_it_changes_or_after_a_day(caplog):
    store, clock = Shelf(), Clock()
    storage = storage_of(store, clock)
    keys, labels = labelled(TOKENS)
    block = (keys[0], 0, (0, 3), kv(1), labels[0])
    day = 86_400 * NS
    for fails, after, lines in (
        ("full", 0, 1), ("full", day - 1, 0), ("refused", 0, 1), ("full", 1, 1), ("full", 0, 0)
    ):  # fmt: skip
        caplog.clear()
        store.fails, clock.now = fails, clock.now + after
        storage._store.writes.note(ok=True)
        storage.write_many([block])
        found = [line.getMessage() for line in caplog.records if "breaker" not in line.getMessage()]
        assert len(found) == lines
        assert all(str(storage.url) in line and f"put: {fails}" in line for line in found)


def test_blocks_of_some_layers_are_no_fault_of_the_store(caplog):
    storage = storage_of(Shelf())
    keys, labels = labelled(TOKENS)
    for _ in range(4):
        answers = storage.write_many([(keys[0], 0, (0, 2), kv(1)[:2], labels[0])])
        assert answers == ["refused: only whole blocks are stored"]
    assert storage.stats().writes == "closed"
    assert not caplog.records


def test_a_store_that_raises_is_unreachable():
    store = Shelf()
    store.get_many = lambda *_: 1 // 0
    keys, _ = labelled(TOKENS)
    answers = storage_of(store).read_many([(keys[0], 0, (0, 3), kv(0))])
    assert answers == ["unreachable: ZeroDivisionError: integer division or modulo by zero"]

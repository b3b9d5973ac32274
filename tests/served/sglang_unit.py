"""The behaviour that SGLang's own unit tests of its radix cache check; both caches agree."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace

import benches.peers.stand_ins  # noqa: F401 - without it sglang does not load

import pytest  # isort: skip
import torch
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from kvtrie.engines.sglang import KvtrieRadixCache

pytestmark = [
    pytest.mark.parametrize("kind", ["ours", "theirs"]),
    pytest.mark.usefixtures("page_hashes"),
]


def make_cache(kind, page_size=1, *, events=False, disable=False, blocks=64):
    freed = []
    allocator = SimpleNamespace(
        device=torch.device("cpu"),
        free_segment=lambda slots, **_: freed.extend(slots.tolist()),
    )
    params = CacheInitParams(
        disable=disable,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=allocator,
        page_size=page_size,
        enable_kv_cache_events=events,
    )
    cache = RadixCache(params) if kind == "theirs" else KvtrieRadixCache(params, blocks=blocks)
    return cache, freed


def insert(cache, ids, slots=None, **scope):
    value = None if slots is None else torch.tensor(slots)
    return cache.insert(InsertParams(key=RadixKey(array("q", ids), **scope), value=value))


def found(cache, ids, **scope):
    match = cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", ids), **scope)))
    slots = cache.path_device_indices(match.last_device_node).tolist()
    assert len(slots) == match.device_prefix_len
    return slots


@pytest.mark.parametrize(("page_size", "disable", "events"), [(1, 0, 0), (4, 0, 1), (1, 1, 0)])
def test_a_new_cache_has_the_settings_given(kind, page_size, disable, events):
    cache, _ = make_cache(kind, page_size, events=bool(events), disable=bool(disable))
    assert (cache.page_size, cache.disable) == (page_size, bool(disable))
    assert cache.kv_events.enabled == bool(events)
    assert cache.device == torch.device("cpu")
    assert len(cache.root_node.key) == 0


def test_inserts_are_found_and_counted_until_a_reset(kind):
    cache, _ = make_cache(kind)
    assert insert(cache, [1, 2, 3], [10, 20, 30]).prefix_len == 0
    assert insert(cache, [4, 5], [40, 50]).prefix_len == 0
    assert found(cache, [1, 2, 3]) == [10, 20, 30]
    assert found(cache, [1, 2]) == [10, 20]
    assert cache.total_size() == cache.evictable_size() == 5
    assert sorted(cache.all_values_flatten().tolist()) == [10, 20, 30, 40, 50]
    cache.pretty_print()
    cache.reset()
    assert cache.total_size() == cache.evictable_size() == cache.protected_size() == 0
    assert found(cache, [1, 2, 3]) == []


def test_a_disabled_cache_keeps_nothing(kind):
    cache, _ = make_cache(kind, disable=True)
    assert insert(cache, [1, 2, 3], [10, 20, 30]).prefix_len == 0
    assert cache.total_size() == 0


@pytest.mark.parametrize("page_size", [1, 2])
def test_an_insert_without_values_takes_tokens_for_slots(kind, page_size):
    cache, _ = make_cache(kind, page_size)
    assert insert(cache, [1, 2, 3, 4, 5]).prefix_len == 0
    assert found(cache, [1, 2, 3, 4, 5]) == [1, 2, 3, 4, 5][: 5 // page_size * page_size]


def test_extra_keys_and_salts_are_separate_scopes(kind):
    cache, _ = make_cache(kind)
    scopes = [
        {"extra_key": "key1"}, {"extra_key": "key2"}, {},
        {"extra_key": "bc", "cache_salt": "a"}, {"extra_key": "c", "cache_salt": "ab"},
    ]  # fmt: skip
    for at, scope in enumerate(scopes):
        insert(cache, [1, 2, 3], [at * 10, at * 10 + 1, at * 10 + 2], **scope)
    for at, scope in enumerate(scopes):
        assert found(cache, [1, 2, 3], **scope) == [at * 10, at * 10 + 1, at * 10 + 2]
    assert found(cache, [1, 2, 3], extra_key="another") == []


def test_a_lock_protects_a_path(kind):
    cache, freed = make_cache(kind)
    insert(cache, [1, 2, 3], [10, 20, 30])
    node = cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", [1, 2, 3]))))
    cache.inc_lock_ref(node.last_device_node)
    assert (cache.protected_size(), cache.evictable_size()) == (3, 0)
    assert cache.evict(EvictParams(num_tokens=3)).num_tokens_evicted == 0
    cache.dec_lock_ref(node.last_device_node)
    assert (cache.protected_size(), cache.evictable_size()) == (0, 3)
    assert freed == []


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("zero", [0, 3])
def test_at_least_the_requested_tokens_are_evicted(kind, page_size, zero):
    """Also where token 0 has a block: the reservation that evicts begins with that token."""
    for count in range(1, 5 * page_size + 1):
        cache, freed = make_cache(kind, page_size, blocks=40)
        for first in (zero, 1, 2, 50, 60):
            ids = [first, *range(100, 99 + page_size)]
            insert(cache, ids, [first * page_size + at for at in range(page_size)])
        size = cache.total_size()
        evicted = cache.evict(EvictParams(num_tokens=count)).num_tokens_evicted
        assert evicted >= count
        assert evicted == len(freed) == size - cache.total_size()


@pytest.mark.parametrize(("page_size", "length"), [(1, 5), (2, 5), (4, 6)])
def test_matches_are_whole_pages(kind, page_size, length):
    cache, _ = make_cache(kind, page_size)
    insert(cache, list(range(length)), list(range(length)))
    assert found(cache, list(range(length))) == list(range(length // page_size * page_size))


@pytest.mark.parametrize("page_size", [1, 2])
def test_branches_inside_a_node_are_found(kind, page_size):
    cache, _ = make_cache(kind, page_size)
    long, short = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 9, 10]
    insert(cache, long, [each * 10 for each in long])
    insert(cache, short, [each * 10 for each in short])
    assert cache.total_size() == 10
    assert found(cache, [1, 2, 3, 4, 999, 1000]) == [10, 20, 30, 40]
    assert found(cache, long) == [each * 10 for each in long]
    assert found(cache, [1, 2, 3, 4, 5, 6, 777, 888]) == [10, 20, 30, 40, 50, 60]
    assert found(cache, short) == [each * 10 for each in short]
    assert cache.total_size() == 10


def test_repeated_tokens_have_hashes_by_position(kind):
    cache, _ = make_cache(kind, 4, events=True)
    insert(cache, [1, 2, 3, 4, 1, 2, 3, 4])
    (stored,) = [each for each in cache.take_events() if isinstance(each, BlockStored)]
    assert len(set(stored.block_hashes)) == 2
    assert stored.parent_block_hash is None
    assert stored.token_ids == [1, 2, 3, 4, 1, 2, 3, 4]


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("salt", [None, "tenant-a"])
def test_a_node_is_removed_in_the_order_in_which_it_was_stored(kind, page_size, salt):
    cache, _ = make_cache(kind, page_size, events=True)
    insert(cache, [1, 2, 3, 4], [10, 20, 30, 40], cache_salt=salt)
    assert cache.evict(EvictParams(num_tokens=4)).num_tokens_evicted == 4
    events = cache.take_events()
    stored = [
        each for event in events if isinstance(event, BlockStored) for each in event.block_hashes
    ]
    (removed,) = [each for each in events if isinstance(each, BlockRemoved)]
    assert removed.block_hashes == stored
    assert len(stored) == 4 // page_size


def play(cache, seed):
    """Random inserts, matches and evictions of everything; the events of each."""
    draw = random.Random(seed)
    for _ in range(12):
        for _ in range(draw.randint(1, 6)):
            head = [draw.randrange(3)] * draw.randint(1, 3)
            ids = [
                each
                for page in head + [draw.randrange(3)] * draw.randint(0, 4)
                for each in (page, 7)
            ]
            if draw.random() < 0.7:
                insert(cache, ids, list(range(len(ids))))
            else:
                found(cache, ids)
        if draw.random() < 0.5:
            cache.evict(EvictParams(num_tokens=1000))
        yield cache.take_events()


def flat(events):
    """Hashes in their order; an event may hold one or several."""
    return [
        (type(event).__name__, each)
        for event in events
        for each in getattr(event, "block_hashes", [])
    ]


def test_events_after_node_splits_have_sglangs_hashes(kind):
    """Stores are equal in order; removals are the same, in the order of evictions."""
    for seed in range(20):
        ours, theirs = (make_cache(each, 2, events=True)[0] for each in (kind, "theirs"))
        for mine, right in zip(play(ours, seed), play(theirs, seed), strict=True):
            stores = [
                [each for each in flat(events) if each[0] == "BlockStored"]
                for events in (mine, right)
            ]
            assert stores[0] == stores[1]
            assert sorted(flat(mine)) == sorted(flat(right))


def test_a_chain_split_by_a_match_leaves_as_sglangs_nodes_do(kind):
    cache, _ = make_cache(kind, 2, events=True)
    insert(cache, [1, 2, 3, 4, 5, 6, 7, 8], list(range(8)))
    found(cache, [1, 2, 3, 4, 9, 9])
    (stored,) = [each for each in cache.take_events() if isinstance(each, BlockStored)]
    cache.evict(EvictParams(num_tokens=8))
    (removed,) = [each for each in cache.take_events() if isinstance(each, BlockRemoved)]
    assert removed.block_hashes == stored.block_hashes[2:] + stored.block_hashes[:2]

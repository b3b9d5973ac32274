"""Events of servers with several groups of layers: they are read, checked and played."""

from itertools import pairwise

import numpy as np
import pytest
from hybrid_engine import Group, HybridEngine
from publishing import message, stored

from kvtrie import BlockManager, LayerGroup, ModelShape, ResumePoints
from kvtrie.advise.groups import grouping
from kvtrie.advise.predict import Setting, bound, play
from kvtrie.advise.tier_bytes import TierBytes
from kvtrie.advise.window import Window
from kvtrie.advise.wire import Batch, Part, Reader
from kvtrie.errors import ConfigError
from kvtrie.sim.trace import TraceRequest
from kvtrie.sim.workloads import FAMILIES

BASE = 16
NS = 10**9
FULL = Group("full_attention", 0, 16)
SLIDING = Group("sliding_window", 256, 32)
STATE = Group("mamba", 0, 64)
WINDOWS = LayerGroup((1, 2, 3), kind="sliding", window=256)
KINDS = {
    "windows": ([FULL, SLIDING], (LayerGroup((0,)), WINDOWS)),
    "windows in smaller blocks": (
        [FULL._replace(size=32), SLIDING._replace(size=16)],
        (LayerGroup((0,)), WINDOWS),
    ),
    "windows in two groups": (
        [SLIDING, FULL, SLIDING],
        (LayerGroup((0,)), WINDOWS),
    ),
    "windows and states": (
        [FULL, SLIDING, STATE],
        (LayerGroup((0,)), WINDOWS, LayerGroup((4, 5), kind="state", state_bytes=65_536)),
    ),
}


def shape(groups):
    return ModelShape(6, 1, 64, "bfloat16", groups=groups)


def trace(name, number):
    """A workload in whole blocks of the engine: each id of it is eight of these."""
    requests = []
    for one in FAMILIES[name](requests=number):
        parts = np.arange(8, dtype=np.uint32)
        blocks = (one.blocks[:, None] * 8 + parts).reshape(-1)[: one.input_tokens // 64]
        requests.append(TraceRequest(one.at, len(blocks) * BASE, 1, blocks.astype(np.uint32)))
    return requests


def heard(engine, requests):
    window = Window()
    window.add_all(engine.batches(requests))
    return window


def served(requests, setting, model, tokens, since):
    """Tokens that a manager finds on host for the requests from a time on, without a simulator."""
    manager = BlockManager(
        model,
        setting.tiers(),
        block_tokens=1,
        token_weight=tokens,
        policy=setting.policy,
        resume=ResumePoints(),
    )

    def on_host():
        return manager.stats().tiers["host"].tokens_hit

    def carry_out(now):
        while len(moves := manager.moves()):
            manager.complete(moves.id, now=now)

    before = 0
    for request in requests:
        path = request.blocks[tokens // BASE - 1 :: tokens // BASE]
        if request.at < since:
            before = on_host()
        if not len(path):
            continue
        lease = manager.acquire(path, now=request.at, keep=0, load="all")
        carry_out(request.at)
        for first, last in pairwise([lease.matched, *lease.plan.resume, len(path)]):
            if last > first:
                lease.commit(path[first:last], now=request.at)
        lease.release(now=request.at)
        carry_out(request.at)
    manager.audit()
    return (on_host() - before) * tokens


@pytest.mark.grid
@pytest.mark.parametrize(("name", "number"), [("chats", 1200), ("agents", 600)])
@pytest.mark.parametrize("kind", KINDS)
def test_predictions_are_those_of_a_manager_that_serves_all_requests(name, number, kind):
    groups, layers = KINDS[kind]
    model, requests, room = shape(layers), trace(name, number), 800
    window = heard(HybridEngine(room, BASE, groups), requests)
    played = grouping(model, window.groups, window.rebuilt.size)
    tokens, gpu = played.block_tokens, room * played.page
    assert tokens == (64 if STATE in groups else 32)
    since, first = bound(lambda: requests, BASE).since, requests[0].at
    prompts = sum(one.input_tokens for one in requests if one.at >= since)
    for policy in ("lru", "learned"):
        setting = Setting(gpu, 4 * gpu, policy=policy)
        wanted = served(requests, setting, model, tokens, since) / prompts
        rebuilt = played.requests(window.rebuilt.requests())
        found = play(
            rebuilt,
            setting,
            model=model,
            block_tokens=tokens,
            since=since - first,
            resume=played.resume,
        ).found
        assert wanted > 0.015
        assert abs(found[:, 1:].sum() / prompts - wanted) <= 0.02


def test_sparse_windows_give_the_same_requests():
    requests = [
        TraceRequest(60 * NS * at, one.input_tokens, 1, one.blocks)
        for at, one in enumerate(trace("agents", 200))
    ]
    dense, sparse = (
        heard(HybridEngine(10**6, BASE, [FULL, SLIDING], dense=dense), requests)
        for dense in (True, False)
    )
    paths = [[one.blocks.tolist() for one in each.rebuilt.requests()] for each in (dense, sparse)]
    assert all(path in paths[1] for path in paths[0])
    assert sparse.groups.resident < dense.groups.resident


def window_of(*events):
    """A window of one step."""
    window = Window()
    window.add(Reader().read(message(0, 0.0, list(events))))
    return window


def windows(blocks, window=256, size=32, **more):
    """An event of a group of sliding windows."""
    kind = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": window}
    tokens = [0] * (size * max(1, len(blocks)))
    more = {"group_idx": 1, "token_ids": tokens, **kind} | more
    return stored(blocks, None, size, **more)


def full(blocks, parent=None, size=16, **more):
    return stored(blocks, parent, size, kv_cache_spec_kind="full_attention", **more)


def test_blocks_in_the_gpu_are_counted_over_all_groups():
    window = window_of(full([1, 2, 3]), windows([2, 4]), windows([6, 8]))
    window.add(Batch(1, 1.0, rank=0, parts=[Part(1, removed=[2])]))
    assert window.groups.resident == 3 + 4
    played = grouping(shape(KINDS["windows"][1]), window.groups, 16)
    assert played.page == 3 * 32 * 256  # three layers with windows, in blocks of 32 tokens
    assert window.resident_bytes(played) == 7 * played.page
    window.after = {"num_gpu_blocks": 103.0}
    assert window.gpu_bytes(played) == 100 * played.page
    window.add(Batch(2, 2.0, cleared=True, rank=0))
    assert not window.groups.groups[1].blocks_on_gpu


def test_a_played_block_is_named_by_the_last_of_the_blocks_that_it_joins():
    window = window_of(full([1, 2, 3, 4, 5]), windows([2, 4]))
    played = grouping(shape(KINDS["windows"][1]), window.groups, 16)
    base = TraceRequest(0, 56, 48, np.array([1, 2, 3]), None, np.array([4, 5, 6]))
    (joined,) = played.requests([base])
    assert (joined.blocks.tolist(), joined.answer.tolist()) == ([2], [4, 6])
    assert joined.input_tokens == 56


def test_the_end_of_a_prompt_within_a_block_is_no_block():
    reader = Reader()
    batch = reader.read(message(0, 0.0, [full([1], size=32), windows([9, 1], size=16)]))
    assert [one.hashes for one in batch.stored] == [[1]]
    batch = reader.read(message(1, 1.0, [full([7], 6), full([2, 3], 1, size=32)]))
    assert [one.hashes for one in batch.stored] == [[2, 3]]


def test_one_group_keeps_all_layers_of_all_tokens():
    model = shape(KINDS["windows"][1])
    for window in (window_of(full([1])), window_of(full([1]), full([2], group_idx=1))):
        played = grouping(model, window.groups, 16)
        assert (played.resume, played.block_tokens, played.times) == (None, 16, 1)


@pytest.mark.parametrize(
    ("events", "groups", "said"),
    [
        ([windows([1], 128)], (LayerGroup((0,)), WINDOWS), "of 128 tokens .*sliding of 256 tokens"),
        ([windows([1])], (), "the model has full attention alone: a shape with these groups"),
        (
            [windows([1], kv_cache_spec_kind="cross_attention")],
            (LayerGroup((0,)), WINDOWS),
            "cross_attention",
        ),
        (
            [windows([1], size=2**20 - 1)],
            (LayerGroup((0,)), WINDOWS),
            r"blocks of \[16, 1048575\] tokens, which share a border every 16777200 tokens",
        ),
    ],
)
def test_groups_that_are_not_those_of_the_model_are_refused(events, groups, said):
    window = window_of(full([1]), *events)
    with pytest.raises(ConfigError, match=said):
        grouping(shape(groups), window.groups, 16)


def test_windows_alone_name_no_prompts():
    with pytest.raises(ConfigError, match="no group with full attention"):
        window_of(windows([1])).check()


def test_a_group_that_changes_is_refused():
    window = window_of(full([1]), windows([1]))
    with pytest.raises(ConfigError, match=r"group 1 as .* 64 tokens, before it was .* 32 tokens"):
        window.add(Batch(1, 1.0, rank=0, parts=[Part(1, "sliding_window", 256, 64, [3])]))


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (windows([1, 2], token_ids=[0] * 32), "2 blocks of 32 tokens of group 1 with 32 token ids"),
        (windows([1], group_idx=2**16), "group_idx of message 0 is 65536"),
        (windows([1], kv_cache_spec_sliding_window=0), "sliding window of message 0 is 0"),
        (windows([1]) | {"block_size": 0}, "blocks of 0 tokens of group 1"),
    ],
)
def test_an_event_of_a_group_that_cannot_be_is_refused(event, said):
    with pytest.raises(ConfigError, match=said):
        window_of(full([1]), event)


def test_loads_carry_the_windows_of_the_slowest_tier():
    model = shape(KINDS["windows and states"][1])
    sizes = TierBytes.of(model, 64, ResumePoints())
    token, state, span = 2 * 64 * 2, 65_536, 3 * 256 * 2 * 64 * 2
    carried = sizes.carried(np.array([[640, 0], [64, 128], [0, 0]]))
    assert carried.tolist() == [
        [640 * token + span + state, 0],
        [64 * token, 128 * token + 3 * 192 * token + state],
        [0, 0],
    ]
    assert sizes.least == 3 * sizes.unit


def test_a_tier_for_all_that_was_stored_has_it():
    requests = trace("chats", 60)
    model = shape(KINDS["windows"][1])
    window = bound(lambda: requests, BASE)
    sizes = TierBytes.of(model, BASE, ResumePoints())
    stored_bytes = sizes.stored(window)
    assert window.distinct * model.block_bytes(BASE, 0) < stored_bytes
    assert stored_bytes <= window.distinct * model.block_bytes(BASE) + 2 * sizes.unit
    assert TierBytes.of(model, BASE, None).stored(window) == (
        window.distinct * model.block_bytes(BASE)
    )

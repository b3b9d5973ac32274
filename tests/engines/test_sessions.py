"""KV by conversation, block and layer: what was put is got, or said to be elsewhere."""

import gc
import itertools
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.engines.sessions import Sessions
from kvtrie.errors import ConfigError, NoSpaceError
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

SHAPE = ModelShape(layers=3, kv_heads=2, head_dim=4)
SIZE = 4


def serve(gpu=4, host=8, *, layer_slots=False, structure="holes", policy="lru"):
    tiers = [Tier("gpu", blocks=gpu, layer_slots=layer_slots)]
    tiers += [Tier("host", blocks=host, layer_slots=layer_slots)] if host else []
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE, structure=structure, policy=policy)
    return Executor(manager, open_pools(SHAPE, tiers, SIZE), workers=0)


def invent(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        layer: tuple(torch.randn(2, SIZE, 2, 4, generator=generator))
        for layer in range(SHAPE.layers)
    }


def talk(sessions, name, blocks, seed):
    """Put a conversation of some blocks; returns tokens and KV of each."""
    stored = []
    for block in range(blocks):
        tokens = np.random.default_rng([seed, block]).integers(0, 99, SIZE).tolist()
        kv = invent(100 * seed + block)
        sessions.put(name, block, tokens, kv)
        stored.append((tokens, kv))
    return stored


@pytest.mark.parametrize("layer_slots", [False, True])
def test_every_layer_of_every_block_is_found_where_it_is(layer_slots):
    executor = serve(layer_slots=layer_slots)
    sessions = Sessions(executor)
    stored = {name: talk(sessions, name, 3, seed) for seed, name in enumerate(("a", "b"), 1)}
    executor.drain()
    tiers = set()
    for name, blocks in stored.items():
        for block, (_, kv) in enumerate(blocks):
            for layer, (keys, values) in kv.items():
                chunk = sessions.get(name, block, layer)
                tiers.add(chunk.tier)
                assert torch.equal(chunk.keys, keys)
                assert torch.equal(chunk.values, values)
                assert (chunk.session, chunk.block, chunk.layer) == (name, block, layer)
                assert (chunk.context, chunk.session_blocks, chunk.layers) == (block * SIZE, 3, 3)
                assert 0 < chunk.last_access <= executor.clock()
    assert tiers == {"gpu", "host"}


def test_blocks_that_are_only_in_a_shared_store_are_gathered(tmp_path):
    model = replace(SHAPE, fingerprint="sessions")
    tiers = [
        Tier("gpu", blocks=4, write="through"),
        Tier("host", blocks=4, write="through"),
        Tier("remote", blocks=100, path=f"folder:{tmp_path / 'kv'}"),
    ]
    manager = BlockManager(model, tiers, block_tokens=SIZE, structure="holes", policy="lru")
    with Executor(manager, open_pools(model, tiers, SIZE), deadline_s=30.0) as executor:
        sessions = Sessions(executor)
        stored = {}
        for seed in range(4):
            stored[seed] = talk(sessions, str(seed), 3, seed)
            executor.drain()
        places = {sessions.get(str(seed), at, 0).tier for seed in stored for at in range(3)}
        assert "remote" in places
        assert sessions.get("0", 0, 0).keys is None
        for seed, blocks in stored.items():
            found = sessions.gather(str(seed), 1)
            assert not len(found.holes)
            assert torch.equal(found.keys, torch.cat([kv[1][0] for _, kv in blocks]))
            assert torch.equal(found.values, torch.cat([kv[1][1] for _, kv in blocks]))
        executor.pools[2].close()


@pytest.mark.parametrize("layer_slots", [False, True])
def test_a_layer_is_gathered_in_logical_order(layer_slots):
    executor = serve(layer_slots=layer_slots)
    sessions = Sessions(executor)
    stored = talk(sessions, "a", 4, 1)
    talk(sessions, "b", 3, 2)
    for layer in range(SHAPE.layers):
        gathered = sessions.gather("a", layer)
        assert torch.equal(gathered.keys, torch.cat([kv[layer][0] for _, kv in stored]))
        assert torch.equal(gathered.values, torch.cat([kv[layer][1] for _, kv in stored]))
        assert len(gathered.holes) == 0
    executor.drain()
    executor.manager.audit()


@pytest.mark.parametrize("layer_slots", [False, True])
def test_dropped_blocks_are_holes_and_can_be_put_again(layer_slots):
    executor = serve(gpu=4, host=0, layer_slots=layer_slots)
    sessions = Sessions(executor)
    stored = talk(sessions, "a", 3, 1)
    talk(sessions, "b", 2, 2)  # takes the room of the first block of "a"
    assert sessions.get("a", 0, 0).tier == "dropped"
    assert sessions.get("a", 0, 0).keys is None
    assert sessions.get("a", 0, 0).last_access is None
    gathered = sessions.gather("a", 0)
    assert gathered.holes.tolist() == list(range(SIZE))
    assert torch.equal(gathered.keys[SIZE:], torch.cat([kv[0][0] for _, kv in stored[1:]]))
    assert not gathered.keys[:SIZE].any()
    with pytest.raises(ConfigError, match="put them"):
        sessions.put("a", 3, [1, 2, 3, 4], invent(9))
    sessions.put("a", 0, *stored[0])
    assert len(sessions.gather("a", 0).holes) == 0
    assert torch.equal(sessions.get("a", 0, 2).values, stored[0][1][2][1])
    executor.manager.audit()


def fail(pool, monkeypatch, nth):
    """Let one copy into a pool fail."""
    copy, count = pool.copy_from, itertools.count(1)

    def copy_from(*args):
        if next(count) == nth:
            raise OSError("no such page")
        copy(*args)

    monkeypatch.setattr(pool, "copy_from", copy_from)


@pytest.mark.parametrize("structure", ["leaf-only", "holes"])
@pytest.mark.parametrize("layer_slots", [False, True])
@pytest.mark.parametrize("nth", [1, 3])
def test_blocks_that_could_not_be_loaded_are_holes_and_can_be_put_again(
    structure, layer_slots, nth, monkeypatch
):
    executor = serve(layer_slots=layer_slots, structure=structure)
    sessions = Sessions(executor)
    stored = talk(sessions, "a", 4, 1)
    talk(sessions, "b", 4, 2)
    executor.drain()
    assert {sessions.get("a", block, 0).tier for block in range(4)} == {"host"}
    executor.runner.ledger.moves_per_job = 1
    fail(executor.pools[0], monkeypatch, nth)
    gathered = sessions.gather("a", 1)
    holes = set(gathered.holes.tolist())
    assert 0 < len(holes) <= 4 * SIZE
    assert len(gathered.keys) == len(gathered.values) == 4 * SIZE
    for at in range(4 * SIZE):
        keys, values = stored[at // SIZE][1][1]
        if at in holes:
            assert not gathered.keys[at].any()
            assert not gathered.values[at].any()
        else:
            assert torch.equal(gathered.keys[at], keys[at % SIZE])
            assert torch.equal(gathered.values[at], values[at % SIZE])
    executor.manager.audit()
    for block, (tokens, kv) in enumerate(stored):
        sessions.put("a", block, tokens, kv)
    for layer in range(SHAPE.layers):
        again = sessions.gather("a", layer)
        assert len(again.holes) == 0
        assert torch.equal(again.keys, torch.cat([kv[layer][0] for _, kv in stored]))
    executor.drain()
    executor.manager.audit()


@pytest.mark.parametrize("structure", ["leaf-only", "holes"])
def test_a_block_whose_load_fails_while_it_is_put_is_written(structure, monkeypatch):
    executor = serve(structure=structure)
    sessions = Sessions(executor)
    stored = talk(sessions, "a", 4, 1)
    talk(sessions, "b", 4, 2)
    executor.drain()
    assert {sessions.get("a", block, 0).tier for block in range(4)} == {"host"}
    executor.runner.ledger.moves_per_job = 1
    fail(executor.pools[0], monkeypatch, 4)
    sessions.put("a", 3, *stored[3])
    again = sessions.gather("a", 2)
    assert len(again.holes) == 0
    assert torch.equal(again.values, torch.cat([kv[2][1] for _, kv in stored]))
    executor.manager.audit()


def test_a_prefix_stands_once():
    executor = serve()
    sessions = Sessions(executor)
    kv = invent(1)
    sessions.put("a", 0, [1, 2, 3, 4], kv)
    sessions.put("b", 0, [1, 2, 3, 4], invent(2))  # cached already: nothing is written
    assert torch.equal(sessions.get("b", 0, 1).keys, kv[1][0])
    assert executor.manager.stats().blocks == 1


def test_what_cannot_be_is_refused():
    sessions = Sessions(serve())
    sessions.put("a", 0, [1, 2, 3, 4], invent(1))
    for block, tokens, kv in (
        (2, [1, 2, 3, 4], invent(1)),  # not the next
        (1, [1, 2, 3], invent(1)),  # not a full block
        (0, [4, 3, 2, 1], invent(1)),  # other tokens
        (1, [5, 6, 7, 8], {0: invent(1)[0]}),  # not all layers
    ):
        with pytest.raises(ConfigError):
            sessions.put("a", block, tokens, kv)
    for call in (
        lambda: sessions.get("b", 0, 0),
        lambda: sessions.get("a", 1, 0),
        lambda: sessions.get("a", 0, 3),
        lambda: sessions.gather("a", 3),
        lambda: sessions.gather("b", 0),
    ):
        with pytest.raises(ConfigError):
            call()
    assert sessions.get("a", 0, 0).session_blocks == 1


def test_an_ended_conversation_is_forgotten_and_its_blocks_leave_first():
    executor = serve()
    sessions = Sessions(executor)
    stored = talk(sessions, "a", 2, 1)
    talk(sessions, "b", 2, 2)
    manager = executor.manager
    sessions.end("a")
    assert [name for name, *_ in manager.sessions()] == ["b"]
    tokens = [token for block, _ in stored for token in block]
    found = manager.lookup(tokens, now=executor.clock(), keep=0).blocks
    priorities = [manager.explain(at.block, now=executor.clock()).priority for at in found]
    assert priorities == [0, 0]
    for call in (
        lambda: sessions.get("a", 0, 0),
        lambda: sessions.gather("a", 0),
        lambda: sessions.end("a"),
        lambda: sessions.end("never"),
    ):
        with pytest.raises(ConfigError, match="no session"):
            call()
    sessions.put("a", 0, [9, 9, 9, 9], invent(5))  # the name is free
    assert torch.equal(sessions.get("a", 0, 0).keys, invent(5)[0][0])
    manager.audit()


def weights(executor, tokens):
    found = executor.manager.lookup(tokens, now=executor.clock(), keep=0).blocks
    explain = executor.manager.explain
    return [explain(at.block, now=executor.clock()).weights["position"] for at in found]


def test_position_weights_use_the_given_length_and_never_less_than_the_stored_one():
    executor = serve(policy="weighted")
    sessions = Sessions(executor)
    path = [1, 2, 3, 4]
    sessions.put("a", 0, path, invent(1), session_blocks=4, context=0, layers=3)
    assert weights(executor, path) == [1 / 4]
    assert sessions.get("a", 0, 0).session_blocks == 4
    sessions.put("a", 1, [5, 6, 7, 8], invent(2), context=SIZE)
    path += [5, 6, 7, 8]
    assert weights(executor, path) == [1 / 4, 2 / 4]
    sessions.gather("a", 0)
    assert weights(executor, path) == [1 / 4, 2 / 4]
    sessions.put("a", 1, [5, 6, 7, 8], invent(2), session_blocks=1)
    assert weights(executor, path) == [1 / 2, 1.0]
    assert sessions.get("a", 0, 0).session_blocks == 2


def test_a_context_or_number_of_layers_that_is_not_its_own_is_refused():
    sessions = Sessions(serve())
    sessions.put("a", 0, [1, 2, 3, 4], invent(1))
    for wrong in ({"context": 0}, {"context": 5}, {"layers": 2}, {"layers": 4}):
        with pytest.raises(ConfigError, match="4 tokens before it and 3 layers"):
            sessions.put("a", 1, [5, 6, 7, 8], invent(2), **wrong)
    assert sessions.get("a", 0, 0).session_blocks == 1
    for blocks in (-1, 2**32):
        with pytest.raises(ConfigError, match="session_blocks"):
            sessions.put("a", 1, [5, 6, 7, 8], invent(2), session_blocks=blocks)
    sessions.put("a", 1, [5, 6, 7, 8], invent(2), context=4, layers=3)


def test_no_lease_is_left_after_a_put_that_fails_and_after_del():
    executor = serve()
    manager = executor.manager
    sessions = Sessions(executor)
    with pytest.raises(ConfigError, match="lacks"):
        sessions.put("given up", 0, [1, 2, 3, 4], {})
    assert manager.sessions() == []
    talk(sessions, "a", 2, 1)
    gone = weakref.ref(sessions)
    del sessions
    gc.collect()
    assert gone() is None
    assert manager.stats().leases == 0
    manager.audit()


def test_of_a_chunk_the_full_blocks_are_stored_and_counted():
    sessions = Sessions(serve())
    parts = [invent(seed) for seed in (1, 2, 3)]
    kv = {
        layer: tuple(torch.cat([part[layer][which] for part in parts])[:10] for which in (0, 1))
        for layer in range(SHAPE.layers)
    }
    assert sessions.put("a", 0, list(range(10)), kv) == 8
    assert sessions.put("a", 2, [8, 9], {at: (k[8:], v[8:]) for at, (k, v) in kv.items()}) == 0
    for layer in range(SHAPE.layers):
        found = sessions.gather("a", layer)
        assert torch.equal(found.keys, kv[layer][0][:8])
        assert torch.equal(found.values, kv[layer][1][:8])
        assert not len(found.holes)
    with pytest.raises(ConfigError, match="no tokens"):
        sessions.put("a", 2, [], {})


def test_a_chunk_that_does_not_fit_stores_nothing():
    executor = serve(gpu=4)
    sessions = Sessions(executor)
    kv = {layer: tuple(torch.zeros(2, 6 * SIZE, 2, 4)) for layer in range(SHAPE.layers)}
    with pytest.raises(NoSpaceError):
        sessions.put("a", 0, list(range(6 * SIZE)), kv)
    with pytest.raises(ConfigError, match="no session"):
        sessions.get("a", 0, 0)
    assert executor.manager.stats().blocks == 0
    executor.manager.audit()

"""KvtrieCache from disk: a pass begins with the first layer, and computes damaged blocks."""

import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from keeping import Damage
from tinymodels import BLOCK, agree, answer, some

from kvtrie import BlockManager, Cost, ModelShape, Scope, Tier
from kvtrie.engines.identity.fingerprint import fingerprint
from kvtrie.engines.transformers import KvtrieCache
from kvtrie.engines.transformers.arrival import Arrival
from kvtrie.tiers import DiskStorage, open_pools
from kvtrie.transfer import Executor, Layerwise, LayerwiseEngine

pytestmark = pytest.mark.engine

PROMPT = 9 * BLOCK + 3
FOUND = 9 * BLOCK
HALF = 4  # blocks
SCOPES = [Scope(structure="leaf-only"), Scope(structure="holes")]


@contextmanager
def tiers_over(model, folder, *, gpu=80, host=40):
    """An executor over gpu, host and the disk in a folder, with what the disk has."""
    shape = replace(ModelShape.from_config(model.config), fingerprint=fingerprint(model))
    tiers = [Tier("gpu", gpu), Tier("host", host), Tier("disk", 100, path=str(folder))]
    slow = Cost(ns_per_token=1e9)  # computing costs more than any load
    manager = BlockManager(shape, tiers, block_tokens=BLOCK, cost=slow)
    pools = open_pools(shape, tiers, BLOCK)
    for pool in pools[:2]:
        for plane in pool.planes:
            plane.fill_(255)  # NaN: whatever is read without having been written shows
    with pools[2], Executor(manager, pools, workers=1) as executor:
        executor.restore()
        yield executor


@pytest.fixture
def stored(llama, tmp_path):
    """Two prompts, and a function that leaves their blocks on disk and returns their answers."""
    ids = torch.cat([some(0, 1, PROMPT), some(1, 1, PROMPT)])

    def store(scope):
        with tiers_over(llama, tmp_path) as executor:
            with KvtrieCache(llama, executor, ids, scope=scope) as cache:
                truth = answer(llama, ids, cache)
            executor.save()
        return truth

    return ids, store, tmp_path


@pytest.mark.parametrize("scope", SCOPES, ids=lambda scope: scope.structure)
def test_a_pass_begins_with_the_first_layer_that_has_come(llama, stored, scope, monkeypatch):
    """The reads of all later layers wait until the first layer has computed."""
    ids, store, folder = stored
    truth = store(scope)
    gate, read_many, computed = threading.Event(), DiskStorage.read_many, []

    def late(self, blocks):
        if blocks[0][2][0] > 0:
            assert gate.wait(60)
        return read_many(self, blocks)

    update = KvtrieCache.update

    def noted(self, keys, values, layer, *more, **named):
        seen = update(self, keys, values, layer, *more, **named)
        computed.append(layer)
        gate.set()
        return seen

    monkeypatch.setattr(DiskStorage, "read_many", late)
    monkeypatch.setattr(KvtrieCache, "update", noted)
    with (
        tiers_over(llama, folder) as executor,
        KvtrieCache(llama, executor, ids, scope=scope) as cache,
    ):
        assert cache.get_seq_length() == FOUND
        assert not gate.is_set()
        agree(truth, answer(llama, ids, cache))
        assert cache.recovered == 0
    assert computed[0] == 0


@pytest.mark.grid
@pytest.mark.parametrize("scope", SCOPES, ids=lambda scope: scope.structure)
@pytest.mark.parametrize(("layer", "block"), [(0, 4), (3, 4), (4, 0), (2, 8)])
def test_a_damaged_block_is_computed_amid_the_pass(llama, stored, scope, layer, block):
    ids, store, folder = stored
    truth = store(scope)
    with tiers_over(llama, folder) as executor:
        match = executor.manager.lookup(ids[1].numpy(), now=executor.clock(), scope=scope)
        (slot,) = [copy.slot for copy in match.blocks[block].copies if copy.tier == 2]
        Damage(folder).flip(slot, layer)
        with KvtrieCache(llama, executor, ids, scope=scope) as cache:
            assert cache.get_seq_length() == FOUND
            agree(truth, answer(llama, ids, cache))
            # The row's other loads end with the failed one, unless they had come.
            assert BLOCK <= cache.recovered <= FOUND
        with KvtrieCache(llama, executor, ids, scope=scope) as cache:
            agree(truth, answer(llama, ids, cache))
            assert cache.recovered == 0
        executor.manager.audit()


def flip(executor, folder, ids, block, layer):
    """Flip a bit of a layer of a block of a prompt on disk."""
    match = executor.manager.lookup(ids.numpy(), now=executor.clock(), scope=SCOPES[0])
    (slot,) = [copy.slot for copy in match.blocks[block].copies if copy.tier == 2]
    Damage(folder).flip(slot, layer)


@pytest.fixture
def early(monkeypatch):
    """Whether each cache began with its first layer."""
    noted, of = [], Arrival.of

    def noting(*given, **named):
        found = of(*given, **named)
        noted.append(found is not None)
        return found

    monkeypatch.setattr(Arrival, "of", noting)
    return noted


def test_opening_waits_where_loads_wait_for_slots_of_full_tiers(llama, tmp_path, early):
    prompts = [some(seed, 1, PROMPT) for seed in range(6)]
    truths = []
    with tiers_over(llama, tmp_path) as executor:
        for ids in prompts:
            with KvtrieCache(llama, executor, ids) as cache:
                truths.append(answer(llama, ids, cache))
        executor.save()
    early.clear()
    with tiers_over(llama, tmp_path, gpu=24, host=12) as executor:
        for times in range(3):
            for seed, (ids, truth) in enumerate(zip(prompts, truths, strict=True)):
                with KvtrieCache(llama, executor, ids) as cache:
                    agree(truth, answer(llama, ids, cache))
                # Blocks of the first tier alone are stored before others take their slots.
                other = some(100 + 10 * times + seed, 1, PROMPT)
                with KvtrieCache(llama, executor, other) as cache, torch.no_grad():
                    llama(other, past_key_values=cache)
        executor.drain()
        executor.manager.audit()
    assert early[0]
    assert not all(early[::2])


@pytest.mark.grid
@pytest.mark.parametrize("damaged", [None, 4])
@pytest.mark.parametrize(
    ("ahead", "order", "layerwise"),
    [(None, (0, 1), True), (None, (1, 0), True), (None, (1, 0), False), (0, (1, 0), True)],
)
def test_two_caches_await_the_same_blocks(llama, stored, ahead, damaged, order, layerwise):
    """The second one has claimed no loads: it goes on though the first one's pass has not come."""
    ids, store, folder = stored
    truth = store(SCOPES[0])
    with (
        tiers_over(llama, folder) as executor,
        LayerwiseEngine(executor, Layerwise(look_ahead=ahead)),
    ):
        if damaged is not None:
            flip(executor, folder, ids[0], damaged, layer=2)
        caches = [
            KvtrieCache(llama, executor, ids, scope=SCOPES[0], use_layerwise=at == 0 or layerwise)
            for at in range(2)
        ]
        for at in order:
            agree(truth, answer(llama, ids, caches[at]))
        for cache in caches:
            cache.close()
        executor.drain()
        executor.manager.audit()


@pytest.mark.parametrize("damaged", [None, 0, 4])
def test_two_threads_await_the_same_blocks(llama, stored, damaged):
    ids, store, folder = stored
    truth = store(SCOPES[0])
    with tiers_over(llama, folder) as executor:
        if damaged is not None:
            flip(executor, folder, ids[1], damaged, layer=3)
        both, answers = threading.Barrier(2), []

        def serve_one():
            both.wait(60)
            with KvtrieCache(llama, executor, ids, scope=SCOPES[0]) as cache:
                both.wait(60)
                answers.append(answer(llama, ids, cache))

        threads = [threading.Thread(target=serve_one) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == 2
        for mine in answers:
            agree(truth, mine)
        executor.drain()
        executor.manager.audit()


def test_a_read_that_fails_gives_back_what_others_wait_for(llama, stored, monkeypatch):
    """The first cache is open and never runs."""
    ids, store, folder = stored
    truth = store(SCOPES[0])
    read_many, reads = DiskStorage.read_many, []

    def failing(self, blocks):
        reads.append(blocks)
        if len(reads) == 3:
            raise OSError("unreadable")
        return read_many(self, blocks)

    with tiers_over(llama, folder) as executor:
        monkeypatch.setattr(DiskStorage, "read_many", failing)
        idle = KvtrieCache(llama, executor, ids, scope=SCOPES[0])
        with KvtrieCache(llama, executor, ids, scope=SCOPES[0]) as cache:
            agree(truth, answer(llama, ids, cache))
        assert len(reads) > 3
        idle.close()
        assert not executor.runner.ledger.schedule.running
        executor.drain()
        executor.manager.audit()


def test_two_rows_that_await_the_same_blocks_wait_for_all(llama, stored, early):
    ids, store, folder = stored
    truth = store(SCOPES[0])
    truth.sequences = truth.sequences[[0, 0]]
    truth.logits = [one[[0, 0]] for one in truth.logits]
    early.clear()
    with (
        tiers_over(llama, folder) as executor,
        KvtrieCache(llama, executor, ids[[0, 0]], scope=SCOPES[0]) as cache,
    ):
        assert early == [False]
        agree(truth, answer(llama, ids[[0, 0]], cache))
        executor.manager.audit()


@pytest.mark.parametrize("scope", SCOPES, ids=lambda scope: scope.structure)
def test_a_cache_that_is_closed_while_layers_come_lets_go_of_its_loads(
    llama, stored, scope, monkeypatch
):
    ids, store, folder = stored
    truth = store(scope)
    gate, began, read_many = threading.Event(), threading.Event(), DiskStorage.read_many

    def late(self, blocks):
        began.set()
        assert gate.wait(60)
        return read_many(self, blocks)

    monkeypatch.setattr(DiskStorage, "read_many", late)
    with tiers_over(llama, folder) as executor:
        cache = KvtrieCache(llama, executor, ids, scope=scope)
        assert began.wait(60)
        opener = threading.Thread(target=gate.set)
        opener.start()
        cache.close()
        opener.join()
        executor.drain()
        assert executor.manager.stats().leases == 0
        assert not executor.runner.ledger.claimed
        executor.manager.audit()
        with KvtrieCache(llama, executor, ids, scope=scope) as cache:
            agree(truth, answer(llama, ids, cache))


@pytest.fixture
def disk_before_host(llama, stored):
    """An executor with a prompt's first half on disk and its second half in host memory."""
    ids, store, folder = stored
    store(SCOPES[0])
    with tiers_over(llama, folder, gpu=16) as executor:
        mark = partial(executor.manager.mark, scope=SCOPES[0], present=False)
        with KvtrieCache(llama, executor, ids[:1], scope=SCOPES[0]) as cache:
            truth = answer(llama, ids[:1], cache)
        mark(ids[0, :FOUND].numpy(), "disk", now=executor.clock(), skip=HALF)
        for seed in range(3):
            other = some(5 + seed, 1, PROMPT)
            with KvtrieCache(llama, executor, other) as cache, torch.no_grad():
                llama(other, past_key_values=cache)
        executor.drain()
        match = executor.manager.lookup(ids[0].numpy(), now=executor.clock(), scope=SCOPES[0])
        tiers = [copy.tier for block in match.blocks for copy in block.copies]
        assert tiers == [2] * HALF + [1] * (9 - HALF)
        yield executor, ids[:1], truth


def test_loads_of_others_that_fail_while_a_cache_opens_are_computed(
    llama, disk_before_host, monkeypatch
):
    """Another cache loads the first half and fails, when the loads of the second are claimed."""
    executor, ids, truth = disk_before_host
    gate, began, of = threading.Event(), threading.Event(), Arrival.of

    def failing(_, blocks):
        began.set()
        assert gate.wait(60)
        return ["unreadable"] * len(blocks)

    def shortened(executor, leases, **named):
        (lease,) = leases
        if lease.matched < FOUND:
            return of(executor, leases, **named)  # of the other cache
        gate.set()
        while lease.tokens == FOUND:
            executor.poll()
        arrival = of(executor, leases, **named)
        assert arrival is not None
        return arrival

    monkeypatch.setattr(DiskStorage, "read_many", failing)
    monkeypatch.setattr(Arrival, "of", shortened)

    def load_first_half():
        part = ids[:, : HALF * BLOCK + 1]
        KvtrieCache(llama, executor, part, scope=SCOPES[0], use_layerwise=False).close()

    other = threading.Thread(target=load_first_half)
    other.start()
    assert began.wait(60)
    with KvtrieCache(llama, executor, ids, scope=SCOPES[0]) as cache:
        assert cache.get_seq_length() == 0
        agree(truth, answer(llama, ids, cache))
        assert cache.leases[0].tokens == PROMPT + 7
    other.join()
    monkeypatch.undo()
    with KvtrieCache(llama, executor, ids, scope=SCOPES[0]) as cache:
        agree(truth, answer(llama, ids, cache))
    executor.drain()
    executor.manager.audit()

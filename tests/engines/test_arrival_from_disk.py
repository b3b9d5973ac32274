"""KvtrieCache from disk: a pass begins with the first layer, and computes damaged blocks."""

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from keeping import Damage
from tinymodels import BLOCK, agree, answer, some

from kvtrie import BlockManager, Cost, ModelShape, Scope, Tier
from kvtrie.engines.fingerprint import fingerprint
from kvtrie.engines.transformers import KvtrieCache
from kvtrie.tiers import DiskStorage, open_pools
from kvtrie.transfer import Executor

pytestmark = pytest.mark.engine

PROMPT = 9 * BLOCK + 3
FOUND = 9 * BLOCK
SCOPES = [Scope(structure="leaf-only"), Scope(structure="holes")]


@contextmanager
def tiers_over(model, folder):
    """An executor over gpu, host and the disk in a folder, with what the disk has."""
    shape = replace(ModelShape.from_config(model.config), fingerprint=fingerprint(model))
    tiers = [Tier("gpu", 80), Tier("host", 40), Tier("disk", 100, path=str(folder))]
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

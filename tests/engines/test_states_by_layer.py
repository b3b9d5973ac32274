"""Windows and states by layer: a pass has those of a layer when it computes the layer."""

import threading

import numpy as np
import pytest
import torch
from grouped_serving import BLOCK, allowed, apart, ask, push, serve, some
from tinymodels import agree, answer

from kvtrie.demo.families import family
from kvtrie.engines.transformers import KvtrieCache
from kvtrie.engines.transformers.open_model import close_executor
from kvtrie.errors import ConfigError
from kvtrie.tiers import Pool
from kvtrie.transfer import Layerwise, LayerwiseEngine

pytestmark = pytest.mark.engine

PROMPT = 6 * BLOCK
# Windows; states and attention in layers of their own; both in one layer; layers that keep nothing.
NAMES = ["gemma-3", "lfm2", "falcon-h1", "gemma-4-shared"]


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return family(request.param)


@pytest.fixture
def pushed_down(model):
    """An executor whose first tier has no room for a prompt any more, and the prompt."""
    executor = serve(model, gpu=20, host=200, points=6)
    sequence, _ = ask(model, executor, some(15, 1, PROMPT))
    push(model, executor, 6)
    yield executor, torch.cat([sequence, some(16, 1, 3)], dim=1)
    executor.manager.audit()
    executor.close()


def grouped_layers(executor):
    return sorted({layer for group in executor.manager.model.groups for layer in group.layers})


def test_each_layer_is_waited_for_when_it_computes(model, pushed_down, waited):
    executor, ids = pushed_down
    waited.clear()
    layers = grouped_layers(executor)
    truth = answer(model, ids)
    with KvtrieCache(model, executor, ids, reserve=8) as cache:
        assert cache.leases[0].matched == 6 * BLOCK
        mine = answer(model, ids, cache)
        # A layer with attention and a state is waited for twice, the end of the pass for the last.
        first = list(dict.fromkeys(waited))
        assert first == layers
        assert cache.recovered == 0
    agree(truth, mine)
    assert apart(truth, mine) < allowed(model, ids, truth)


def test_without_it_opening_waits_for_all(model, pushed_down, waited):
    executor, ids = pushed_down
    waited.clear()
    with KvtrieCache(model, executor, ids, reserve=8, use_layerwise=False) as cache:
        assert all(lease.ready() for lease in cache.leases)
        agree(answer(model, ids), answer(model, ids, cache))
    assert waited == []


def test_a_pass_begins_with_the_first_layer_that_has_come(model, tmp_path, monkeypatch):
    """From a disk: the copies of all later layers wait until the first one has computed."""
    executor = serve(model, gpu=40, host=60, disk=tmp_path)
    sequence, _ = ask(model, executor, some(15, 1, PROMPT))
    executor.save()
    close_executor(executor)
    executor = serve(model, gpu=40, host=60, disk=tmp_path)
    assert executor.restore() > 0
    ids = torch.cat([sequence, some(16, 1, 3)], dim=1)
    truth, gate = answer(model, ids), threading.Event()
    engine = LayerwiseEngine.of(executor)
    copy, update = engine.connector.copy, KvtrieCache.update
    first = min(layer for layer in grouped_layers(executor) if _attends(executor, layer))

    def late(source, source_units, target, units):
        group = [pool is target for pool in executor.pools[0].groups].index(True)
        layers = executor.manager.model.groups[group].layers
        if any(layers[at] > first for at in np.unique(units % len(layers)).tolist()):
            assert gate.wait(60)
        copy(source, source_units, target, units)

    def noted(self, keys, values, layer, *more, **named):
        seen = update(self, keys, values, layer, *more, **named)
        gate.set()
        return seen

    monkeypatch.setattr(engine.connector, "copy", late)
    monkeypatch.setattr(KvtrieCache, "update", noted)
    with KvtrieCache(model, executor, ids, reserve=8) as cache:
        assert cache.leases[0].matched == 6 * BLOCK
        mine = answer(model, ids, cache)
        assert cache.recovered == 0
    agree(truth, mine)
    assert apart(truth, mine) < allowed(model, ids, truth)
    executor.manager.audit()
    close_executor(executor)


def _attends(executor, layer):
    groups = executor.manager.model.groups
    return any(layer in group.layers and group.kind != "state" for group in groups)


@pytest.mark.grid
@pytest.mark.parametrize("layer", range(4))
def test_a_load_that_fails_amid_a_pass_is_computed(model, pushed_down, layer, monkeypatch):
    executor, ids = pushed_down
    truth = answer(model, ids)
    copy_from, failed = Pool.copy_from, []

    def failing(self, source, source_units, units):
        groups = executor.pools[0].groups
        if self in groups and not failed:
            layers = executor.manager.model.groups[groups.index(self)].layers
            if layer in {layers[at] for at in np.unique(units % len(layers)).tolist()}:
                failed.append(layer)
                raise OSError("unreadable")
        copy_from(self, source, source_units, units)

    monkeypatch.setattr(Pool, "copy_from", failing)
    with KvtrieCache(model, executor, ids, reserve=8) as cache:
        mine = answer(model, ids, cache)
        assert failed == ([layer] if layer in grouped_layers(executor) else [])
        assert (cache.recovered > 0) == bool(failed)
    agree(truth, mine)
    assert apart(truth, mine) < allowed(model, ids, truth)


def test_rows_of_a_batch_and_their_copies_have_what_they_await(model, pushed_down):
    executor, ids = pushed_down
    rows = torch.cat([torch.nn.functional.pad(ids[:, 9:], (9, 0)), ids])
    mask = torch.ones_like(rows)
    mask[0, :9] = 0
    ask(model, executor, rows, attention_mask=mask)
    truth = answer(model, ids, num_beams=3)
    push(model, executor, 6)
    with KvtrieCache(model, executor, ids, reserve=16) as cache:
        agree(truth, answer(model, ids, cache, num_beams=3))


def test_a_cache_that_is_closed_before_its_pass_lets_go_of_its_loads(model, pushed_down):
    executor, ids = pushed_down
    KvtrieCache(model, executor, ids).close()
    executor.drain()
    assert not executor.runner.ledger.claimed
    assert executor.manager.stats().leases == 0
    agree(answer(model, ids), ask_again(model, executor, ids))


def ask_again(model, executor, ids):
    with KvtrieCache(model, executor, ids, reserve=8) as cache:
        return answer(model, ids, cache)


def test_groups_are_neither_stored_by_layer_nor_laid_out_in_buffers(pushed_down):
    executor, ids = pushed_down
    for settings in (Layerwise(blending=True), Layerwise(use_gpu=True)):
        with pytest.raises(ConfigError, match="groups of layers are kept apart"):
            LayerwiseEngine(executor, settings)
    apart = pytest.raises(ConfigError, match="groups of layers are kept apart")
    with LayerwiseEngine(executor) as engine, engine.acquire(ids[0].numpy()) as lease, apart:
        next(engine.store_layer(lease, ids[0, :1].numpy()))

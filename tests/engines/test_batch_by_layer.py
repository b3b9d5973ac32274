"""KvtrieCache by layer: a first pass waits for each layer when it computes it, and no longer."""

import gc
import threading
from contextlib import nullcontext

import pytest
import torch
from tinymodels import BLOCK, agree, answer, before, serve, some

from kvtrie.engines.transformers import KvtrieCache
from kvtrie.engines.transformers.recovery import RowRecovery
from kvtrie.errors import TransferError
from kvtrie.transfer import LayerwiseEngine

pytestmark = pytest.mark.engine

PROMPT = 9 * BLOCK + 3
FOUND = 9 * BLOCK


@pytest.fixture
def pushed_down(llama):
    """Makes an executor whose host holds a prompt that the first tier has no room for any more."""
    executors = []

    def make(**how):
        executor = serve(llama, 22, 100, **how)
        executors.append(executor)
        ids, other = some(0, 1, PROMPT), some(99, 1, 170)
        with KvtrieCache(llama, executor, ids) as cache:
            truth = answer(llama, ids, cache)
        with KvtrieCache(llama, executor, other) as cache, torch.no_grad():
            llama(other, past_key_values=cache)
        executor.drain()
        return executor, ids, truth

    yield make
    for executor in executors:
        executor.close()


def test_each_layer_is_waited_for_when_it_computes(llama, pushed_down, waited):
    executor, ids, truth = pushed_down()
    waited.clear()
    layers = llama.config.num_hidden_layers
    with KvtrieCache(llama, executor, ids) as cache:
        assert cache.get_seq_length() == FOUND
        assert waited == []
        mine = answer(llama, ids, cache)
        assert waited[:layers] == list(range(layers))
        assert set(waited[layers:]) <= {layers - 1}  # the end of the first pass; no later one waits
        assert cache.recovered == 0
        agree(truth, mine)
    assert executor.staged_bytes == 0
    executor.manager.audit()


def test_without_it_opening_waits_for_all(llama, pushed_down, waited):
    executor, ids, truth = pushed_down()
    waited.clear()
    with KvtrieCache(llama, executor, ids, use_layerwise=False) as cache:
        assert all(lease.ready() for lease in cache.leases)
        agree(truth, answer(llama, ids, cache))
    assert waited == []


@pytest.mark.parametrize("waits_for_moves", [True, False])
def test_what_is_loaded_by_layer_is_what_was_computed(llama, pushed_down, waits_for_moves):
    """A load that has not come when a layer computes is waited for: the slots begin as NaN."""
    executor, ids, truth = pushed_down()
    gate = threading.Event()
    if waits_for_moves:
        LayerwiseEngine.of(executor).load.submit(gate.wait)
    else:
        gate.set()
    with KvtrieCache(llama, executor, ids) as cache:
        timer = threading.Thread(target=gate.set)
        assert not cache.leases[0].ready() or not waits_for_moves
        timer.start()
        agree(truth, answer(llama, ids, cache))
        timer.join()


@pytest.mark.parametrize("layer", range(5))
def test_a_pass_that_ends_at_any_layer_leaves_nothing(llama, pushed_down, layer):
    executor, ids, truth = pushed_down()
    assert llama.config.num_hidden_layers == 5
    mlp = llama.model.layers[layer].mlp
    with KvtrieCache(llama, executor, ids) as cache, torch.no_grad():
        with before(mlp, stop), pytest.raises(KeyboardInterrupt):
            llama(ids[:, FOUND:], past_key_values=cache)
        # The same pass again goes on with what is there, or still on its way.
        logits = llama(ids[:, FOUND:], past_key_values=cache).logits
        assert torch.isfinite(logits).all()
    cache = KvtrieCache(llama, executor, ids)
    with cache, before(mlp, stop), torch.no_grad(), pytest.raises(KeyboardInterrupt):
        llama(ids[:, FOUND:], past_key_values=cache)
    executor.drain()
    assert executor.staged_bytes == 0
    assert not executor.manager.audit()
    with KvtrieCache(llama, executor, ids) as cache:
        agree(truth, answer(llama, ids, cache))


def stop(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("change", ["crop", "reset", "fork", "reorder", "longer"])
def test_whatever_comes_before_the_first_pass_waits(llama, pushed_down, change):
    executor, ids, _ = pushed_down()
    with KvtrieCache(llama, executor, ids) as cache, torch.no_grad():
        if change == "crop":
            cache.crop(-BLOCK - 1)
        elif change == "reset":
            cache.reset()
        elif change == "fork":
            cache.batch_repeat_interleave(2)
        elif change == "reorder":
            cache.reorder_cache(torch.tensor([0]))
        given = ids
        if change == "longer":  # more columns than opening made room for
            given = torch.cat([ids, some(7, 1, BLOCK)], 1)
        past = cache.get_seq_length()
        rows = len(cache.leases)
        logits = llama(given[:, past:].expand(rows, -1), past_key_values=cache).logits
        expected = llama(given).logits[:, past:]
        assert (logits - expected).abs().max() < 1e-4
    executor.drain()
    executor.manager.audit()


def test_a_cache_that_is_dropped_lets_go_of_its_loads(llama, pushed_down):
    executor, ids, truth = pushed_down()
    cache = KvtrieCache(llama, executor, ids)
    lease = cache.leases[0].id
    del cache
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "kvtrie-abandon":
            thread.join()
    executor.drain()
    assert lease not in executor.runner.ledger.claimed
    with KvtrieCache(llama, executor, ids) as cache:
        agree(truth, answer(llama, ids, cache))


@pytest.mark.parametrize("computes", [True, False])
def test_a_leaf_only_match_that_breaks_amid_a_pass_is_computed(
    llama, pushed_down, monkeypatch, computes
):
    """It is an error where the model cannot compute single tokens."""
    executor, ids, _ = pushed_down(lossy=True, structure="leaf-only")
    gpu, host = executor.pools
    match = executor.manager.lookup(ids[0].numpy(), now=executor.clock())
    slots = [copy.slot for block in match.blocks for copy in block.copies if copy.tier == 1]
    gpu.lost = frozenset(host.units(slots[-1], 0, host.layers).tolist())
    if not computes:
        monkeypatch.setattr(RowRecovery, "computes", lambda *_: False)
    error = pytest.raises(TransferError, match="open another")
    outcome = nullcontext() if computes else error
    with KvtrieCache(llama, executor, ids) as cache, torch.no_grad(), outcome:
        logits = llama(ids[:, FOUND:], past_key_values=cache).logits
        assert (logits - llama(ids).logits[:, FOUND:]).abs().max() < 1e-4
        assert cache.recovered > 0
    gpu.lost = frozenset()
    with KvtrieCache(llama, executor, ids) as cache, torch.no_grad():
        past = cache.get_seq_length()
        logits = llama(ids[:, past:], past_key_values=cache).logits
        assert (logits - llama(ids).logits[:, past:]).abs().max() < 1e-4
    executor.manager.audit()


def test_a_pass_goes_on_while_another_thread_adds_or_removes_a_cache(llama, pushed_down):
    """Torch then calls the other cache's hook without keyword arguments."""
    executor, ids, _ = pushed_down()
    with KvtrieCache(llama, executor, ids) as cache, torch.no_grad():
        with_kwargs = llama.model._forward_pre_hooks_with_kwargs
        kept = dict(with_kwargs)
        with_kwargs.clear()
        right = llama(ids).logits
        with_kwargs.update(kept)
        logits = llama(ids[:, FOUND:], past_key_values=cache).logits
    assert (logits - right[:, FOUND:]).abs().max() < 1e-4

"""Passes over a selective cache leave the model as it was, whichever way they end."""

from __future__ import annotations

import threading

import pytest
import torch
from decoders import answer, tokens

from kvtrie.errors import ClosedError
from kvtrie.selective import CacheSettings, SelectiveCache, attention


def test_other_passes_are_what_they_were(llama):
    ids, other = tokens(8, 1, 60), tokens(9, 1, 30)
    with torch.no_grad():
        before = llama(other).logits
    hooks = len(llama.model._forward_pre_hooks)
    with SelectiveCache(llama, CacheSettings("h2o-default", cache_length=20)) as cache:
        cache.read(ids[:, :40])
        with torch.no_grad():
            assert torch.equal(llama(other).logits, before)
        assert torch.equal(answer(llama, other), answer(llama, other))
        cache.read(ids[:, 40:])
        assert torch.is_grad_enabled()
    assert llama.config._attn_implementation == "sdpa"
    assert len(llama.model._forward_pre_hooks) == hooks
    with pytest.raises(ClosedError):
        cache.read(ids)
    out = llama(other)  # gradients flow where no selective cache is
    assert out.logits.requires_grad


def test_a_pass_that_fails_leaves_the_model_alone(llama, monkeypatch):
    with SelectiveCache(llama, CacheSettings("h2o-default", cache_length=20)) as cache:

        def fail(*_):
            raise MemoryError

        cache.read(tokens(1, 1, 5))
        monkeypatch.setattr(cache.caches[1], "forward", fail)
        with pytest.raises(MemoryError):
            cache.read(tokens(2, 1, 5))
        assert llama.config._attn_implementation == "sdpa"
        with pytest.raises(ClosedError, match="ended midway"):
            cache.read(tokens(2, 1, 5))
        monkeypatch.undo()
        cache.reset()
        assert cache.read(tokens(1, 1, 5)).isfinite().all()


def test_a_cache_that_is_dropped_leaves_the_model(llama):
    hooks = len(llama.model._forward_pre_hooks)
    cache = SelectiveCache(llama, CacheSettings("h2o-default", cache_length=20))
    assert len(llama.model._forward_pre_hooks) == hooks + 1
    del cache
    assert len(llama.model._forward_pre_hooks) == hooks


def test_threads_on_one_model_wait_for_one_another(llama):
    settings = CacheSettings("h2o-default", cache_length=20)
    ids = [tokens(seed, 1, 40) for seed in range(2)]
    truth = []
    for each in ids:
        with SelectiveCache(llama, settings) as cache:
            truth.append(cache.read(each))
    found, inside, waits = {}, threading.Event(), threading.Event()

    def first():
        """Stay in the first pass until the other thread asks for the model."""
        with SelectiveCache(llama, settings) as cache:
            run = cache.caches[1].forward

            def pause(*given):
                inside.set()
                waits.wait(20)
                return run(*given)

            cache.caches[1].forward = pause
            found[0] = cache.read(ids[0])

    def second():
        inside.wait(20)
        waits.set()
        with SelectiveCache(llama, settings) as cache:
            found[1] = cache.read(ids[1])

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [torch.equal(found[at], truth[at]) for at in range(2)] == [True, True]
    assert llama.config._attn_implementation == "sdpa"


def test_a_pass_that_was_interrupted_leaves_the_model_to_others(llama, monkeypatch):
    """Neither Ctrl-C nor another BaseException runs torch's hooks after a pass."""
    settings = CacheSettings("h2o-default", cache_length=20)
    with SelectiveCache(llama, settings) as cache:
        truth = cache.read(tokens(1, 1, 5))

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    def interrupted():
        with SelectiveCache(llama, settings) as cache:
            monkeypatch.setattr(cache.caches[1], "forward", interrupt)
            cache.read(tokens(1, 1, 5))

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert llama.config._attn_implementation == "sdpa"
    assert torch.is_grad_enabled()
    with SelectiveCache(llama, settings) as cache:
        monkeypatch.setattr(cache.caches[1], "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.read(tokens(1, 1, 5))
        monkeypatch.undo()
        with pytest.raises(ClosedError, match="ended midway"):
            cache.read(tokens(1, 1, 5))
        cache.reset()
        assert torch.equal(cache.read(tokens(1, 1, 5)), truth)


def test_an_opening_waits_for_a_pass_of_another_thread(llama, monkeypatch):
    """A pass exchanges the model's attention, which is no other model to an opening."""
    settings = CacheSettings("h2o-default", cache_length=20)
    config, reached, opened = llama.model.config, threading.Event(), []
    with SelectiveCache(llama, settings) as cache:
        passing = attention.Passing(config)
        passing.begin(cache)
        lock = attention._locks[id(config)]

        class Noting:
            """The lock, which says when another thread comes to it."""

            def __enter__(self):
                reached.set()
                lock.acquire()

            def __exit__(self, *_):
                lock.release()

        def other():
            try:
                SelectiveCache(llama, settings).close()
                opened.append(True)
            finally:
                reached.set()

        with monkeypatch.context() as patch:
            patch.setitem(attention._locks, id(config), Noting())
            thread = threading.Thread(target=other)
            thread.start()
            reached.wait(20)
            passing.end()
            thread.join(60)
    assert opened == [True]

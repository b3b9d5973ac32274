"""Fusion in several threads: decoders, stores and monitors are shared, passes go on meanwhile."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import get_ident

import pytest
import torch
from fusing import context_of, decoder_of, ids_of, last_logits, model_of, plain, world
from tinymodels import answer, some
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from kvtrie.engines.transformers import Decoder, KvtrieCache
from kvtrie.errors import ConfigError
from kvtrie.fuse import Fusor, Monitor

pytestmark = pytest.mark.engine


@pytest.fixture
def threads():
    with ThreadPoolExecutor(6) as made:
        yield made


def amid(monkeypatch, cls, work):
    """Run `work` once in another thread when this thread comes to the forward of a class."""
    me, inner, results = get_ident(), cls.forward, []

    def forward(self, *args, **kwargs):
        if get_ident() == me and not results:
            results.append(None)
            with ThreadPoolExecutor(1) as other:
                results[0] = other.submit(work).result()
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", forward)
    return results


def layer_with_summed_weights(decoder, ids):
    weights = torch.zeros(len(ids))
    places = torch.arange(len(ids))
    hidden = decoder.embed(ids)
    hidden = decoder.layer(1, hidden, places, len(ids), lambda k, v: (k, v), weights=weights)
    return torch.cat([hidden.flatten(), weights])


CALLS = {
    "embed": (LlamaModel, lambda decoder, ids: decoder.embed(ids)),
    "head": (LlamaModel, lambda decoder, ids: decoder.head(decoder.embed(ids))),
    "prefill": (LlamaModel, lambda decoder, ids: decoder.prefill(ids)),
    "layer with summed weights": (LlamaDecoderLayer, layer_with_summed_weights),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_pass_of_another_thread_amid_a_decoders_is_what_it_was(call, monkeypatch):
    model, decoder = decoder_of()
    cls, run = CALLS[call]
    ids, other = some(1, 1, 9)[0], some(2, 1, 14)
    truth, right = last_logits(model, other), run(decoder, ids)
    seen = amid(monkeypatch, cls, lambda: last_logits(model, other))
    mine = run(decoder, ids)
    assert torch.equal(seen[0], truth)
    assert torch.equal(mine, right)


def test_another_threads_length_leaves_the_rotations_of_a_fusion():
    model, decoder = decoder_of()
    context = context_of(decoder, (17, 9, 12))

    def choose(candidates, count):  # noqa: ARG001 - as a way to choose is called
        with ThreadPoolExecutor(1) as other:
            other.submit(decoder.ropes, 200).result()
        return torch.arange(0)

    def logits(select):
        with Fusor(decoder, select=select, ratio=0.0).fuse(context) as fused:
            return last_logits(model, fused.ids, fused.cache)

    right = logits(lambda *_: torch.arange(0))
    assert torch.equal(logits(choose), right)


def exact(fusor, model, seeds):
    """Fusions that compute all tokens, with a pass over each; the largest error of a logit."""
    worst = 0.0
    for seed in seeds:
        context = plain((17, 9), query=3 + seed, seed=seed)
        with fusor.fuse(context) as fused:
            mine = last_logits(model, fused.ids, fused.cache)
            worst = max(worst, float((mine - last_logits(model, fused.ids)).abs().max()))
    return worst


@pytest.mark.parametrize("select", ["all", "first+question"])
def test_threads_share_a_store_a_monitor_and_a_decoder(select, threads):
    model, decoder = decoder_of()
    store, executor = world(model, gpu=160)
    monitor = Monitor(rate=0.5)
    decoders = [decoder, decoder, Decoder(model)]
    fusors = [Fusor(one, store, select=select, ratio=1.0, monitor=monitor) for one in decoders]
    runs = [threads.submit(exact, one, model, range(at, at + 4)) for at, one in enumerate(fusors)]
    assert max(run.result() for run in runs) < 1e-4
    executor.drain()
    executor.manager.audit()


def test_a_cache_serves_while_its_model_is_fused(threads):
    model, decoder = decoder_of()
    store, executor = world(model, gpu=200)
    fusor = Fusor(decoder, store, select="first+question", ratio=1.0)
    prompts = [some(seed, 1, 30) for seed in range(3)]
    truth = [answer(model, one).sequences for one in prompts]

    def serve(prompt):
        with KvtrieCache(model, executor, prompt) as cache:
            return answer(model, prompt, cache).sequences

    fused = threads.submit(exact, fusor, model, range(5))
    served = [threads.submit(serve, one) for one in prompts * 2]
    for one, right in zip(served, truth * 2, strict=True):
        assert torch.equal(one.result(), right)
    assert fused.result() < 1e-4
    executor.manager.audit()


def test_a_fetch_that_another_thread_has_open_is_no_ones_else(threads):
    model = model_of()
    store, _ = world(model)
    context = plain((17, 9))
    fetches = [store.fetch_many(context.chunks) for _ in range(2)]
    with pytest.raises(ConfigError, match="2 fetches of this store are open in other threads"):
        threads.submit(store.fetch_many, context.chunks).result()
    for fetch in fetches:
        fetch.close()
    threads.submit(store.fetch_many, context.chunks).result().close()


def test_weights_are_not_summed_when_the_configuration_does_not_choose_the_attention():
    _, decoder = decoder_of()
    attention = decoder.model.model.layers[1].self_attn
    usual = attention.forward
    attention.forward = partial(usual)
    with pytest.raises(ConfigError, match="attention of LlamaDecoderLayer is not chosen"):
        layer_with_summed_weights(decoder, ids_of(plain((5,))))

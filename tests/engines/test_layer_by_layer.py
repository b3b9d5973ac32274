"""Real models under the layer-wise engine: each layer is there when it computes, bit for bit."""

import logging

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import Cache, DynamicCache

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.demo.model import smollm, tiny
from kvtrie.engines.transformers import fingerprint
from kvtrie.engines.transformers.step import Step
from kvtrie.errors import ConfigError
from kvtrie.tiers import Pool, open_pools
from kvtrie.transfer import Executor, Layerwise, LayerwiseEngine, Request

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

log = logging.getLogger(__name__)

BLOCK = 8
ROOM = 20
"""Blocks of the first tier: a prompt of 15 and an answer fit, with little to spare."""


REAL = pytest.param("SmolLM2-135M", marks=pytest.mark.deep)
CARD = pytest.param("tiny on a card", marks=pytest.mark.gpu)


@pytest.fixture(scope="module")
def model(request):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if request.param == "tiny":
        yield tiny(layers=5).model
    elif request.param == "tiny on a card":
        yield tiny(layers=5).model.cuda()
    else:
        try:
            yield smollm(Console(quiet=True)).model
        except ConfigError as error:
            pytest.skip(f"needs the weights in a package: {error}")
    torch.set_num_threads(threads)


class ByLayer(Cache):
    """One pass of one sequence: awaits each layer's load before computing it, then stores it.

    Attributes:
        computed: per layer, the K and V `(2, tokens, heads, dim)` that the model gave.
        retrieved: per layer, K and V in the lease's slots when the layer's load had ended.
    """

    def __init__(self, engine, lease, tokens):
        super().__init__(layers=[])
        self.engine, self.lease, self.past = engine, lease, lease.tokens
        self.pool = engine.executor.pools[0]
        self.computed, self.retrieved = [], []
        self.step = Step.of_columns(
            self.pool,
            [self.pool.table(lease.slots(0))],
            pads=[0],
            cached=[self.past],
            past=self.past,
            queries=len(tokens),
        )

    def update(self, key_states, value_states, layer_idx, *_, **__):
        self.engine.wait_for_layer_load(layer_idx)
        seen = self.step.read(layer_idx)
        kv = torch.stack([one[0].transpose(0, 1) for one in seen])
        self.retrieved.append(kv[:, : self.past].clone())
        self.step.write(layer_idx, key_states, value_states)
        fresh = [one[0].transpose(0, 1) for one in (key_states, value_states)]
        self.computed.append(torch.stack(fresh).clone())
        seen = self.step.read(layer_idx)
        self.engine.save_kv_layer(layer_idx)
        return seen

    def get_seq_length(self, layer_idx=0):  # noqa: ARG002
        return self.past

    def get_mask_sizes(self, query_length, layer_idx):  # noqa: ARG002
        return self.past + query_length, 0


@torch.no_grad()
def forward(engine, model, lease, tokens):
    """A pass over what follows a lease: the last logits, and the cache that it went through."""
    engine.start_load_kv([Request(lease, tokens)])
    cache = ByLayer(engine, lease, tokens)
    ids = torch.as_tensor(tokens, device=model.device)[None]
    logits = model(input_ids=ids, past_key_values=cache).logits[0, -1]
    engine.wait_for_save()
    return logits, cache


@torch.no_grad()
def uncached(model, tokens):
    """The last logits of a sequence, computed without reuse, and K and V of each layer."""
    cache = DynamicCache()
    ids = torch.as_tensor(tokens, device=model.device)[None]
    logits = model(input_ids=ids, past_key_values=cache).logits[0, -1]
    kv = [torch.stack([x.keys[0], x.values[0]]).transpose(1, 2) for x in cache.layers]
    return logits, kv


def serve(engine, model, prompt, computed_kv, *, answer=0):
    """Answer a prompt greedily and compare layers and logits; return hit tokens and their tiers.

    Args:
        engine: the layer-wise engine.
        model: the model.
        prompt: the tokens.
        known: K and V per layer that a pass has computed for the beginning of this prompt.
        answer: how many tokens to generate.
    """
    manager, clock = engine.executor.manager, engine.executor.clock
    found = manager.lookup(prompt, now=clock()).blocks
    stood = {block.copies[0].tier for block in found}
    tokens = prompt.tolist()
    with engine.acquire(prompt, load="all", reserve=answer + 1) as lease:
        hit = lease.matched
        assert len(lease.plan.recompute()) == 0
        fresh = prompt[hit:]
        computed = []
        for _ in range(answer + 1):
            logits, cache = forward(engine, model, lease, fresh)
            if not computed:
                computed = cache.computed
                assert len(cache.retrieved) == len(computed)
                for layer, kv in enumerate(computed_kv):
                    assert torch.equal(cache.retrieved[layer], kv[:, :hit]), f"layer {layer}"
            expected, _ = uncached(model, tokens)
            assert torch.allclose(logits, expected, atol=1e-4, rtol=0)
            fresh = np.array([int(expected.argmax())])
            tokens += fresh.tolist()
        lease.commit([], now=clock())
    engine.executor.drain()
    manager.audit()
    return hit, stood, computed


def world(model, *, host, folder=None):
    shape = ModelShape.from_config(model.config, fingerprint=fingerprint(model))
    tiers = [Tier("gpu", blocks=ROOM, write="through"), Tier("host", blocks=host)]
    if folder is not None:
        tiers.append(Tier("disk", blocks=200, path=str(folder)))
    manager = BlockManager(shape, tiers, block_tokens=BLOCK)
    pools = open_pools(shape, tiers, BLOCK, staging=ROOM)
    for pool in pools:
        for plane in pool.planes if isinstance(pool, Pool) else ():
            plane.fill_(255)  # NaN: whatever is read without having been written shows
    return manager, pools


SETTINGS = {
    "direct": Layerwise(),
    "staged": Layerwise(use_gpu=True, staging_bytes=1 << 20),
    "all at once": Layerwise(use_layerwise=False),
}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *(("tiny", name) for name in SETTINGS),
        *(pytest.param(*CARD.values, name, marks=CARD.marks) for name in SETTINGS),
        pytest.param(*REAL.values, "direct", marks=REAL.marks),
    ],
    indirect=["model"],
)
def test_what_is_retrieved_by_layer_is_what_was_computed(model, tmp_path, name):
    manager, pools = world(model, host=20, folder=tmp_path)
    random = np.random.default_rng(3)
    prompts = [random.integers(1, model.config.vocab_size, 15 * BLOCK) for _ in range(3)]
    with (
        Executor(manager, pools) as executor,
        LayerwiseEngine(executor, SETTINGS[name]) as engine,
    ):
        computed = []
        for prompt in prompts:
            hit, _, kv = serve(engine, model, prompt, [])
            assert hit == 0
            computed.append(kv)
            executor.flush()
        tiers = set()
        for prompt, kv in zip(prompts, computed, strict=True):
            hit, stood, _ = serve(engine, model, prompt, kv, answer=4)
            assert hit == 14 * BLOCK
            tiers |= stood
        assert tiers == {1, 2}
        # A prefix that the tiers have, then tokens that no request has had.
        shared = np.concatenate([prompts[0][: 7 * BLOCK + 3], random.integers(1, 99, 20)])
        hit, _, _ = serve(engine, model, shared, computed[0], answer=4)
        assert hit == 7 * BLOCK
        _, whole = uncached(model, prompts[0])
        far = max(
            float((mine - anew).abs().max()) for mine, anew in zip(computed[0], whole, strict=True)
        )
        log.info("%s: KV of a pass by layer is within %.1e of a plain one's", name, far)
        assert far < 1e-4


@pytest.mark.parametrize("model", ["tiny", CARD, REAL], indirect=True)
def test_requests_of_one_batch_get_their_own_layers(model):
    manager, pools = world(model, host=100)
    random = np.random.default_rng(4)
    prompts = [random.integers(1, model.config.vocab_size, 5 * BLOCK + 1) for _ in range(3)]
    with Executor(manager, pools) as executor, LayerwiseEngine(executor) as engine:
        computed_kv = [serve(engine, model, prompt, [])[2] for prompt in prompts]
        serve(engine, model, random.integers(1, 99, 15 * BLOCK), [])  # sends them to the host
        leases = [engine.acquire(prompt, load="all") for prompt in prompts]
        assert (
            engine.start_load_kv(
                [Request(lease, prompt[-1:]) for lease, prompt in zip(leases, prompts, strict=True)]
            )
            == [5 * BLOCK] * 3
        )
        caches = [
            ByLayer(engine, lease, prompt[-1:])
            for lease, prompt in zip(leases, prompts, strict=True)
        ]
        for layer in range(len(computed_kv[0])):
            engine.wait_for_layer_load(layer)
            for cache, kv in zip(caches, computed_kv, strict=True):
                seen = cache.step.read(layer)
                mine = torch.stack([one[0].transpose(0, 1) for one in seen])[:, : 5 * BLOCK]
                assert torch.equal(mine, kv[layer][:, : 5 * BLOCK])
            for cache, kv in zip(caches, computed_kv, strict=True):
                last = [one[-1:].transpose(0, 1)[None] for one in kv[layer]]
                cache.step.write(layer, *last)
            engine.save_kv_layer(layer)
        engine.wait_for_save()
        for lease in leases:
            lease.release()
        executor.drain()
        manager.audit()

"""Memory of a fused cache: it grows, is freed at once, and no other request can match it."""

import gc

import pytest
import torch
from fusing import (
    SIZES,
    decoder_of,
    ids_of,
    last_logits,
    plain,
    world,
)

from kvtrie import Scope
from kvtrie.errors import ClosedError
from kvtrie.fuse import Fusor

pytestmark = pytest.mark.engine


def test_generation_goes_on_after_a_fused_cache():
    model, decoder = decoder_of()
    store, _ = world(model)
    context = plain(SIZES)
    ids = ids_of(context)[None]
    plainly = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False
    )
    with Fusor(decoder, store, ratio=1.0).fuse(context) as fused:
        mine = model.generate(
            fused.ids,
            attention_mask=torch.ones_like(fused.ids),
            past_key_values=fused.cache,
            max_new_tokens=20,
            do_sample=False,
        )
    assert mine.tolist() == plainly.tolist()


def test_closing_frees_the_blocks_at_once_and_the_cache_raises():
    model, decoder = decoder_of()
    store, executor = world(model)
    context = plain(SIZES)
    Fusor(decoder, store).fuse(context).close()
    executor.drain()
    before = executor.manager.stats().tiers["gpu"].free
    fused = Fusor(decoder, store).fuse(context)
    assert executor.manager.stats().tiers["gpu"].free < before
    fused.close()
    fused.close()
    assert executor.manager.stats().tiers["gpu"].free == before
    with pytest.raises(ClosedError, match="fuse the chunks again"):
        last_logits(model, fused.ids, fused.cache)
    cache = Fusor(decoder, store).fuse(context).cache
    gc.collect()
    assert executor.manager.stats().tiers["gpu"].free < before  # the cache is in use
    del cache
    gc.collect()
    assert executor.manager.stats().tiers["gpu"].free == before
    executor.manager.audit()


def test_no_other_request_can_match_a_fused_cache():
    model, decoder = decoder_of()
    prefix = tuple(range(1, 12))
    store, executor = world(model, prefix=prefix)
    context = plain(SIZES)
    first = len(prefix) + SIZES[0]
    with Fusor(decoder, store, reserve=16).fuse(context) as fused:
        last_logits(model, fused.ids, fused.cache)
        for again in range(2):
            ids = fused.ids[0].numpy()
            scopes = [None, store.scope, store.scope_of(SIZES[1]), Scope(tenant=b"other")]
            for scope in scopes:
                match = executor.manager.lookup(ids, now=executor.clock(), scope=scope, keep=0)
                # The prefix and the first chunk are plain KV, and exact.
                assert match.tokens <= (first if scope is None or not scope.tenant else 0)
            fused.close()
            assert again or executor.manager.audit() is None
    with Fusor(decoder, store).fuse(context) as other:
        assert set(other.lease.plan.recompute()) == set()
        assert other.lease.matched == 0

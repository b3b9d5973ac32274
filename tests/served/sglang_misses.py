"""Computed prompt tokens by cause, over SGLang's own `match_prefix`, `lock` and `checkpoint`."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from types import SimpleNamespace

from benches.peers.stand_ins import Pool  # isort: skip - without it sglang does not load

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvtrie.engines.sglang import KvtrieRadixCache, misses

PAGE = Pool.page_size
TEXT = list(range(1000, 1000 + 40 * PAGE))


@pytest.fixture(autouse=True)
def exported(monkeypatch):
    """The exported counter by cause; SGLang's environment here has no Prometheus client."""
    counts = Counter()

    def labels(cause):
        return SimpleNamespace(inc=lambda more: counts.update({cause: more}))

    monkeypatch.setattr(misses, "_counter", lambda _: SimpleNamespace(labels=labels))
    return counts


class Rows:
    """The table of requests and their slots."""

    def __init__(self, rows=16):
        self.req_to_token = torch.zeros((rows, 200 * PAGE), dtype=torch.int32)

    def write(self, where, values):
        self.req_to_token[where] = values.to(torch.int32)


class Server:
    """Admits batches of requests, and inserts their blocks after a step, as SGLang does."""

    def __init__(self, blocks):
        self.pool = Pool(blocks)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=Rows(),
            token_to_kv_pool_allocator=self.pool,
            page_size=PAGE,
        )
        self.cache = KvtrieRadixCache(params, blocks=blocks, count_misses=True)
        self.computed = 0

    @property
    def missed(self):
        self.cache.misses.drain()
        return +self.cache.misses.tokens

    def request(self, name, ids, **more):
        fields = {"extra_key": None, "cache_salt": None, "priority": None} | more
        return SimpleNamespace(
            rid=name, origin_input_ids=array("q", ids), output_ids=array("q"), lock=None, **fields
        )

    def match(self, request):
        key = RadixKey(
            request.origin_input_ids,
            request.extra_key,
            limit=len(request.origin_input_ids) - 1,
            cache_salt=request.cache_salt,
        )
        return self.cache.match_prefix(MatchPrefixParams(key=key, req=request))

    def run(self, *requests):
        """A batch: all are matched and admitted, then all are inserted."""
        for at, one in enumerate(requests):
            self.admit(at, one)
        for one in requests:
            self.cache.checkpoint(one, up_to=len(one.origin_input_ids))
        for one in requests:
            one.output_ids.append(1)
            assert self.match(one).last_device_node.matched is None
            self.cache.unlock(one.lock)
            row = self.cache.req_to_token_pool.req_to_token[one.kv.req_pool_idx]
            last = -(-len(one.origin_input_ids) // PAGE) * PAGE
            self.pool.free_segment(row[one.kv.cache_protected_len : last])

    def admit(self, row, one):
        for _ in range(2):  # SGLang locks the prefix while it looks for room, at times in vain
            probe = self.match(one)
            self.cache.unlock(self.cache.lock(probe.last_device_node))
        ids = one.origin_input_ids
        one.last_node, found = probe.last_device_node, probe.device_prefix_len
        one.lock = self.cache.lock(one.last_node)
        need = -(-(len(ids) - found) // PAGE)
        if need > self.pool.free_blocks:
            self.cache.evict(EvictParams(num_tokens=(need - self.pool.free_blocks) * PAGE))
        slots = torch.cat([self.cache.path_device_indices(one.last_node), self.pool.alloc(need)])
        self.cache.req_to_token_pool.write((row, slice(0, len(slots))), slots)
        one.full_untruncated_fill_ids = ids
        one.kv = SimpleNamespace(
            req_pool_idx=row, swa_evict_floor=0, cache_protected_len=found, cache_inserted_len=0
        )
        self.computed += len(ids) - found


def test_a_break_a_new_prompt_and_a_batch_of_equal_ones_have_their_causes():
    server = Server(400)
    tail = (len(TEXT) - 1) % PAGE + 1  # the block of the last token is computed in any case
    server.run(server.request("old", TEXT))
    assert server.missed == {"new": len(TEXT)}
    before = server.missed
    server.cache.misses._why._min_tokens = 1
    broken = [*TEXT[: PAGE + 3], 7, *TEXT[PAGE + 3 :]]
    server.run(server.request("broken", broken))
    assert server.missed - before == {"diverged": 39 * PAGE, "not cacheable": 1}
    before = server.missed
    server.run(server.request("again", TEXT))
    assert server.missed - before == {"not cacheable": tail}
    before, new = server.missed, [token + 9000 for token in TEXT[: 2 * PAGE]]
    server.run(server.request("one", new), server.request("two", new))
    assert server.missed - before == {"new": 4 * PAGE}
    before = server.missed
    server.run(server.request("salted", TEXT, cache_salt="s"))
    assert server.missed - before == {"new": len(TEXT)}
    before = server.missed
    server.run(server.request("adapter", TEXT, extra_key="lora"))
    assert server.missed - before == {"other scope": len(TEXT)}
    before = server.missed
    server.run(server.request("image", [2**40, *TEXT]))
    assert server.missed - before == {"not cacheable": len(TEXT) + 1}
    assert server.missed.total() == server.computed


@pytest.mark.parametrize("seed", range(3))
def test_the_causes_sum_to_the_computed_tokens_and_are_exported(seed, exported):
    draw, server = random.Random(seed), Server(64)
    for at in range(60):
        batch = []
        for copy in range(draw.randint(1, 2)):
            tail = [draw.randrange(5000) for _ in range(draw.randint(0, 6 * PAGE))]
            ids = [*TEXT[: draw.choice([1, 2 * PAGE, 5 * PAGE + 1])], *tail]
            batch.append(server.request(f"{at}-{copy}", ids))
        server.run(*batch)
    assert server.missed.total() == server.computed
    assert {"new", "unclassified", "not cacheable"} & set(server.missed)
    assert exported == server.missed

"""Computed tokens of SGLang's requests in Prometheus; `tests/served` has SGLang's own classes."""

from array import array
from types import SimpleNamespace

import prometheus_client

from kvtrie import BlockManager, ModelShape, Scope, Tier
from kvtrie.engines.sglang.misses import Matched, RequestMisses


def test_the_counter_is_exported_once_per_process_with_sglangs_labels():
    shape = ModelShape(layers=1, kv_heads=1, head_dim=4)
    manager = BlockManager(shape, [Tier("gpu", blocks=64)], block_tokens=16, explain=True)
    for rank in range(2):
        misses = RequestMisses()
        misses.use(manager)
        misses.labels = {"tp_rank": rank, "cache_type": "KvtrieRadixCache"}
        key = SimpleNamespace(token_ids=array("q", range(100)))
        for scope in (Scope(), None):
            matched = Matched("name", key, scope)
            misses.inserted(matched)  # not locked yet
            misses.locked(matched, 16 * rank)
            misses.locked(matched, 96)  # counts once
            misses.inserted(matched)
        misses.drain()
    text = prometheus_client.generate_latest().decode()
    row = 'kvtrie_missed_tokens_total{cache_type="KvtrieRadixCache",cause="%s",tp_rank="%d"} %d.0'
    assert row % ("new", 0, 96) in text
    assert row % ("new", 1, 80) in text
    assert row % ("not cacheable", 1, 4 + 84) in text

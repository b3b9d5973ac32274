"""Computed prompt tokens of `KvtrieCache` by cause."""

from __future__ import annotations

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from kvtrie.engines import transformers
from kvtrie.engines.transformers.cache_misses import counter_of
from kvtrie.metrics import Collector

TEXT = torch.arange(100) % 30 + 5
BROKEN = torch.cat([TEXT[:40], torch.tensor([40]), TEXT[40:]])


@pytest.fixture
def kv(llama):
    with transformers.open(llama, host="2MB", gpu="1MB", block_tokens=8) as opened:
        yield opened


def compare_all(kv):
    """Let every prompt be compared, however short."""
    why = counter_of(kv.executor)
    why._min_tokens = 1
    return why


def run(kv, ids, **more):
    """Generate a token; return the columns that the first pass computes."""
    with kv.cache(ids, reserve=2, **more) as cache:
        computed = ids.shape[1] - cache.get_seq_length()
        kv.model.generate(
            ids,
            past_key_values=cache,
            max_new_tokens=1,
            do_sample=False,
            attention_mask=more.get("attention_mask", torch.ones_like(ids)),
        )
    return computed


def test_computed_tokens_are_counted_by_cause_and_exported(kv):
    why = compare_all(kv)
    assert run(kv, TEXT[None]) == 100
    assert run(kv, BROKEN[None]) == 61
    why.drain()
    missed = kv.executor.missed_tokens
    assert missed == {"new": 96, "diverged": 56, "not cacheable": 4 + 5}
    assert why.tokens is missed
    registry = CollectorRegistry()
    registry.register(Collector(kv.executor))
    scraped = generate_latest(registry).decode()
    assert 'kvtrie_missed_tokens_total{cause="diverged",machine="0"} 56.0' in scraped
    why.close()


def test_short_prompts_are_not_compared(kv):
    run(kv, TEXT[None])
    run(kv, BROKEN[None])
    assert kv.executor.missed_tokens == {"new": 96, "unclassified": 56, "not cacheable": 4 + 5}


def test_rows_that_compute_cached_tokens_count_them_as_recomputed(kv):
    run(kv, TEXT[None])
    kv.executor.missed_tokens.clear()
    new = torch.arange(100) + 100
    assert run(kv, torch.stack([TEXT, new])) == 100
    assert kv.executor.missed_tokens == {
        "unclassified": 96,
        "recomputed": 96,
        "not cacheable": 8,
    }


def test_a_padded_row_counts_its_own_tokens(kv):
    mask = torch.ones(2, 100, dtype=torch.int64)
    mask[1, :30] = 0
    new = torch.arange(100) + 100
    run(kv, torch.stack([TEXT, new]), attention_mask=mask)
    assert kv.executor.missed_tokens == {"new": 96 + 64, "not cacheable": 4 + 6}


def test_blocks_that_were_dropped_amid_a_match_are_evicted(llama):
    with transformers.open(llama, host=None, gpu="150kB", block_tokens=8) as kv:
        run(kv, TEXT[None])
        run(kv, (torch.arange(160) + 50)[None])  # takes blocks of the first
        kv.executor.missed_tokens.clear()
        with kv.cache(TEXT[None], reserve=2) as cache:
            computed = 100 - cache.get_seq_length() + cache.recovered
        missed = kv.executor.missed_tokens
        assert sum(missed.values()) == computed
        assert missed["evicted"] >= 8
        assert set(missed) <= {"evicted", "not cacheable"}

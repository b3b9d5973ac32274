"""Policies that evict the rows of lowest score: the ring, sinks, order of rows and logs."""

from __future__ import annotations

import pytest
import torch
from playing import CHOOSING, SCORING, SIZES, step

from kvtrie.errors import ConfigError
from kvtrie.selective import (
    AttnWeightsKVCache,
    AttnWeightsReplayLog,
    KVCacheWithBuffers,
    make_cache,
)


@pytest.mark.parametrize("policy", ["h2o", "h2o-vlen", "tova"])
def test_weights_of_a_step_sum_to_its_tokens(policy, monkeypatch):
    cache = make_cache(f"{policy}-default", cache_length=12, dtype=torch.float32, **SIZES)
    monkeypatch.setattr(type(cache), "update_requires_attn_weights", True)
    sums = []
    cache._cumulate = lambda weights, new, ran=cache._cumulate: (
        sums.append((weights.sum(dim=-1), new)),
        ran(weights, new),
    )
    generator = torch.Generator().manual_seed(1)
    for new in (5, 7, 3, 1, 12):  # while it fills, and full
        cache(*step(generator, new))
    assert sums
    for total, new in sums[-4:]:
        assert torch.allclose(total, torch.tensor(float(new)), atol=1e-5)
    if policy == "h2o":
        fresh = make_cache("h2o-default", cache_length=12, dtype=torch.float32, **SIZES)
        fresh(*step(generator, 5))
        assert not fresh.scores.any()  # the first step gives no weights
        fresh(*step(generator, 7))
        assert torch.allclose(fresh.scores.sum(dim=-1), torch.tensor(7.0), atol=1e-5)


@pytest.mark.parametrize("policy", SCORING)
def test_the_order_of_rows_decides_nothing(policy):
    pair = [
        make_cache(f"{policy}-torch-quantized8", cache_length=12, dtype=torch.float32, **SIZES)
        for _ in range(2)
    ]
    generator, draw = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    for new in (12, 3, 5, 1, 7):
        given = step(generator, new)
        one, other = (cache(*given) for cache in pair)
        assert torch.allclose(one, other, atol=1e-6)
        turn = torch.rand(2, 2, 12, generator=draw).argsort(dim=-1)
        if policy == "h2o-orig":  # which chooses rows for the whole batch
            turn = turn[:1].expand_as(turn)
        pair[1].arranged(turn, 12)
        assert torch.equal(*(cache.token_pos.sort().values for cache in pair))


@pytest.mark.parametrize("policy", CHOOSING)
def test_batch_mates_change_nothing(policy):
    arguments = {"cache_length": 10, "dtype": torch.float32}
    both = make_cache(f"{policy}-default", **arguments, **SIZES)
    alone = make_cache(f"{policy}-default", **arguments, **{**SIZES, "batch": 1})
    generator = torch.Generator().manual_seed(5)
    for new in (10, 4, 6, 1):
        given = step(generator, new)
        assert torch.allclose(both(*given)[:1], alone(*(each[:1] for each in given)), atol=1e-6)
        assert torch.equal(both.token_pos[:1], alone.token_pos)


@pytest.mark.parametrize("policy", [name for name in SCORING if name != "h2o-orig"])
def test_a_limit_of_steps_changes_no_decision(policy):
    pair = [
        make_cache(f"{policy}-int8", cache_length=12, dtype=torch.float32, **SIZES, **limit)
        for limit in ({}, {"max_chunk_size": 3})
    ]
    generator = torch.Generator().manual_seed(6)
    for new in (12, 3, 2, 3, 1):
        given = step(generator, new)
        assert torch.equal(*(cache(*given) for cache in pair))
        assert torch.equal(pair[0].token_pos, pair[1].token_pos)
    assert pair[1].largest_step == 3


@pytest.mark.parametrize("policy", ["lastrec", *SCORING])
def test_steps_as_long_as_the_cache_are_independent(policy):
    """Each step then overwrites everything: it attends to itself alone."""
    buffers = "torch-quantized8" if policy[0] == "q" else "default"
    cache = make_cache(f"{policy}-{buffers}", cache_length=8, dtype=torch.float32, **SIZES)
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        given = step(generator, 8)
        fresh = make_cache("dense-default", cache_length=8, dtype=torch.float32, **SIZES)
        assert torch.allclose(cache(*given), fresh(*given), atol=1e-5)


def test_a_ring_clears_the_scores_of_what_enters_it():
    """A token that enters the ring has nothing of the one that left it, over turns of the ring."""
    cache = make_cache("h2o-default", cache_length=8, dtype=torch.float32, grace_period=3, **SIZES)
    generator = torch.Generator().manual_seed(8)
    cache(*step(generator, 8))
    for _ in range(10):
        cache(*step(generator, 1))
        newest = cache.token_pos == cache.input_pos - 1
        # One query saw it, so it has at most that query's weight.
        assert (cache.scores[newest] <= 1).all()
        held = cache.token_pos.sort(dim=-1).values[..., -3:]
        assert (held == torch.arange(cache.input_pos - 3, cache.input_pos)).all()


@pytest.mark.parametrize("new", [24, 13, 1])
def test_the_first_eviction_spares_the_ring(new):
    cache = make_cache("h2o-default", cache_length=32, dtype=torch.float32, grace_period=8, **SIZES)
    generator = torch.Generator().manual_seed(10)
    cache(*step(generator, 32))
    cache(*step(generator, new))
    newest = cache.token_pos.sort(dim=-1).values[..., -8 - new :]  # those of before, and the step's
    assert (newest == torch.arange(24, 32 + new)).all()


def test_rows_of_a_step_lie_as_documented():
    """Victims take what leaves the ring, then the first new tokens; the ring takes the last."""
    cache = make_cache("h2o-default", cache_length=10, dtype=torch.float32, grace_period=3, **SIZES)
    cache.replay_log = log = AttnWeightsReplayLog()
    generator = torch.Generator().manual_seed(11)
    cache(*step(generator, 10))
    for new in (2, 5, 1, 7):
        start = cache.input_pos
        cache(*step(generator, new))
        chosen = log.chosen(len(log.steps) - 1)
        held = cache.token_pos.gather(2, chosen)
        assert (held == start - 3 + torch.arange(new)).all()
    assert log.steps == [10, 2, 5, 1, 7]
    assert log.rows[0] is None


def test_a_log_replays_the_same_outputs():
    made = {"cache_length": 9, "dtype": torch.float32, "grace_period": 2}
    cache = make_cache("h2o-default", **made, **SIZES)
    cache.replay_log = AttnWeightsReplayLog()
    generator = torch.Generator().manual_seed(12)
    given = [step(generator, new) for new in (4, 5, 3, 7, 1)]
    truth = [cache(*each) for each in given]
    other = make_cache("random-default", **made, **SIZES)
    other.replay(cache.replay_log)
    for each, out in zip(given, truth, strict=True):
        assert torch.allclose(other(*each), out, atol=1e-6)
    assert torch.equal(other.token_pos, cache.token_pos)
    with pytest.raises(ConfigError, match="20 tokens were given"):
        other.replay(cache.replay_log)


def inherit_in_the_ring(monkeypatch):
    """Scores stay where they are when a token enters the ring."""

    def put(self, rows, positions, key, value):
        before = {name: plane.clone() for name, plane in self._state.items()}
        plain(self, rows, positions, key, value)
        grace, new = self.arguments.grace_period, min(rows.shape[2], self.arguments.grace_period)
        if self.evicted and grace:
            ring = rows[:, :, rows.shape[2] - new :]
            for name, plane in self._state.items():
                plane.scatter_(2, ring, before[name].gather(2, ring))

    plain = KVCacheWithBuffers._put
    monkeypatch.setattr(KVCacheWithBuffers, "_put", put)


def choose_in_the_ring(monkeypatch):
    """The first eviction begins where the share ends, and takes rows of the ring too."""

    def initial(self, new):
        del new
        start = int(self.arguments.keep_initial_fraction * self.cache_length)
        later = self.token_pos - start
        return torch.where(later < 0, later + 2 * self.cache_length, later).float()

    def positions(self, new):
        if self.prefill_length == self.cache_length and not self.evicted and not self._prefill:
            return self._initial(new).topk(new, dim=-1, largest=False).indices
        return plain(self, new)

    plain = AttnWeightsKVCache.next_positions
    monkeypatch.setattr(AttnWeightsKVCache, "_initial", initial)
    monkeypatch.setattr(AttnWeightsKVCache, "next_positions", positions)


@pytest.mark.parametrize(
    ("plant", "test"),
    [
        (inherit_in_the_ring, test_a_ring_clears_the_scores_of_what_enters_it),
        (choose_in_the_ring, lambda: test_the_first_eviction_spares_the_ring(24)),
    ],
)
def test_a_planted_defect_is_seen(monkeypatch, plant, test):
    test()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test()

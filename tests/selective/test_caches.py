"""Every policy, token by token, against loops that know no tensors of rows."""

from __future__ import annotations

import random

import pytest
import torch
from playing import SIZES, play, step

from kvtrie.errors import ConfigError
from kvtrie.selective import (
    AttnWeightsKVCache,
    AttnWeightsReplayLog,
    KVCacheWithBuffers,
    make_cache,
)
from kvtrie.selective.policies import VLengthH2OKVCache

SEVEN = ("dense", "lastrec", "h2o", "qh2o", "h2o-vlen", "qh2o-vlen", "h2o-orig")
SMALL = ("keydiff", "knorm", "tova", "snapkv", "expected", "h2o-decay", "random")
MIXES = ("mix-h2o+keydiff", "mix-tova+h2o-vlen", "mix-snapkv+random")
BUFFERS = ("default", "torch-quantized8", "torch-quantized4", "int8", "fp8")
ARGUMENTS = (
    {},
    {"grace_period": 4},
    {"grace_period": 3, "sinks": 2, "normalize_scores": True},
    {"sinks": 3, "max_chunk_size": 4},
    {"prefill_scores": 4},
    {"prefill_scores": 0, "keep_initial_fraction": 0.3},
    {"prefill_scores": 0, "grace_period": 5, "normalize_scores": True},
    {"grace_period": 2, "first": [0, 5]},
    {"sinks": 2, "first": [3, 0]},
    {"sinks": 3, "keep_initial_fraction": 0.0},
    {"init_grace_tokens": 3},
)


def allowed(policy):
    """The arguments of a policy that some case gives, as the documentation names them."""
    if policy == "dense":
        return set()
    if policy == "lastrec":
        return {"sinks", "init_grace_tokens"}
    scored = {"prefill_scores", "keep_initial_fraction", "sinks"}
    more = {"grace_period", "normalize_scores", "max_chunk_size"}
    return scored if policy == "h2o-orig" else scored | more


def cases():
    for policy in (*SEVEN, *SMALL, *MIXES):
        for buffers in BUFFERS:
            if buffers == "default" and policy.startswith("q"):
                continue
            for arguments in ARGUMENTS:
                names = set(arguments)
                padded = policy == "h2o-orig" and "first" in names
                if not padded and names - {"first"} <= allowed(policy):
                    yield policy, buffers, arguments


@pytest.mark.parametrize("policy", [*SEVEN, *SMALL, *MIXES])
def test_a_policy_does_what_loops_do(policy):
    mine = [case for case in cases() if case[0] == policy]
    draw = random.Random(policy)
    for at, (_, buffers, arguments) in enumerate(draw.sample(mine, min(4, len(mine)))):
        _, oracle, steps, _ = play(policy, buffers, at, total=45, **arguments)
        assert oracle.ties < steps


@pytest.mark.parametrize("buffers", BUFFERS)
def test_buffers_keep_what_loops_keep(buffers):
    policy = "h2o" if buffers == "default" else "qh2o-vlen"
    play(policy, buffers, 7, total=45, grace_period=3, sinks=2)


@pytest.mark.parametrize("policy", [*SEVEN[1:], *SMALL, *MIXES])
def test_a_first_step_may_fill_the_cache(policy):
    """So the first eviction comes right after it, scored by its last queries or not."""
    buffers = "torch-quantized8" if policy.startswith("q") else "default"
    scored = "prefill_scores" in allowed(policy)
    for arguments in ({}, {"prefill_scores": 5}, {"prefill_scores": 0}) if scored else ({},):
        play(policy, buffers, 1, total=30, length=9, steps=[9, 4, 1], **arguments)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(6))
def test_every_policy_and_buffer_does_what_loops_do(seed, capsys):
    count, steps, ties, worst = 0, 0, 0, 0.0
    for policy, buffers, arguments in cases():
        _, oracle, ran, error = play(policy, buffers, seed, **arguments)
        count, steps, ties = count + 1, steps + ran, ties + oracle.ties
        worst = max(worst, error)
    said = f"seed {seed}: {count} caches, {steps} steps, {ties} ties, worst {worst:.2g}"
    with capsys.disabled():
        print(said)  # noqa: T201


@pytest.mark.parametrize("policy", ["h2o", "h2o-vlen", "tova"])
def test_weights_of_a_step_sum_to_its_tokens(policy, monkeypatch):
    cache = make_cache(f"{policy}-default", cache_length=12, dtype=torch.float32, **SIZES)
    monkeypatch.setattr(type(cache), "update_requires_attn_weights", True)
    told = []
    cache._cumulate = lambda weights, new, ran=cache._cumulate: (
        told.append((weights.sum(dim=-1), new)),
        ran(weights, new),
    )
    generator = torch.Generator().manual_seed(1)
    for new in (5, 7, 3, 1, 12):  # while it fills, and full
        cache(*step(generator, new))
    assert told
    for total, new in told[-4:]:
        assert torch.allclose(total, torch.tensor(float(new)), atol=1e-5)
    if policy == "h2o":
        fresh = make_cache("h2o-default", cache_length=12, dtype=torch.float32, **SIZES)
        fresh(*step(generator, 5))
        assert not fresh.scores.any()  # the first step gives no weights
        fresh(*step(generator, 7))
        assert torch.allclose(fresh.scores.sum(dim=-1), torch.tensor(7.0), atol=1e-5)


SCORING = [*SEVEN[2:], *SMALL, *MIXES]


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


# `h2o-orig` chooses once for a whole batch, and `dense` not at all.
CHOOSING = [
    name for name in (*SEVEN, *SMALL) if name[0] != "q" if name not in {"h2o-orig", "dense"}
]


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


def test_lengths_of_values_decide():
    """The same errors and weights, other norms of values: `qh2o-vlen` is not `qh2o`."""
    caches = {
        name: make_cache(f"{name}-torch-quantized8", cache_length=12, dtype=torch.float32, **SIZES)
        for name in ("qh2o", "qh2o-vlen")
    }
    generator = torch.Generator().manual_seed(9)
    for new in (6, 6, 4):
        query, key, value = step(generator, new)
        value *= torch.rand(2, 2, new, 1, generator=generator) * 9
        for cache in caches.values():
            cache(query, key, value)
    assert not torch.equal(*(cache.token_pos.sort().values for cache in caches.values()))


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


@pytest.mark.parametrize("buffers", BUFFERS)
def test_untouched_rows_do_not_drift(buffers):
    """Sinks stay the same bits while ten thousand tokens pass them."""
    cache = make_cache(f"lastrec-{buffers}", cache_length=40, dtype=torch.float32, sinks=4, **SIZES)
    generator = torch.Generator().manual_seed(13)
    cache(*step(generator, 40))
    before = [plane[:, :, :4].clone() for plane in cache.buffers.planes]
    seen = [plane[:, :, :4].clone() for plane in cache.keys_values()]
    given = step(generator, 36)
    for new in (36,) * 275 + (1,) * 100:
        cache(*(each[:, :, :new] for each in given))
    assert cache.input_pos == 10_040
    for old, plane in zip(before, cache.buffers.planes, strict=True):
        assert torch.equal(old, plane[:, :, :4])
    for old, plane in zip(seen, cache.keys_values(), strict=True):
        assert torch.equal(old, plane[:, :, :4])


@pytest.mark.parametrize("policy", ["lastrec", "h2o", "qh2o-vlen", "snapkv", "mix-h2o+keydiff"])
def test_a_shared_working_copy_changes_nothing(policy):
    from kvtrie.selective.buffers import WorkingCopy

    shared = WorkingCopy()
    made = {"cache_length": 9, "dtype": torch.float32, **SIZES}
    name = f"{policy}-torch-quantized8"
    pair = [make_cache(name, working=shared, **made) for _ in range(2)]
    alone = [make_cache(name, **made) for _ in range(2)]
    generator = torch.Generator().manual_seed(14)
    for new in (5, 4, 3, 6, 1):
        for one, other in zip(pair, alone, strict=True):
            given = step(generator, new)
            assert torch.equal(one(*given), other(*given))
            for mine, theirs in zip(one.buffers.planes, other.buffers.planes, strict=True):
                assert torch.equal(mine, theirs)


@pytest.mark.parametrize("policy", ["lastrec", "h2o", "keydiff", "mix-h2o+keydiff", "snapkv"])
@pytest.mark.parametrize("sinks", [0, 2])
def test_a_shrunk_cache_goes_on(policy, sinks):
    cache = make_cache(
        f"{policy}-torch-quantized8", cache_length=14, dtype=torch.float32, sinks=sinks, **SIZES
    )
    generator = torch.Generator().manual_seed(15)
    for new in (14, 5, 3):
        cache(*step(generator, new))
    before = [set(row) for row in cache.token_pos.flatten(0, 1).tolist()]
    cache.shrink(8)
    assert cache.token_pos.shape == (2, 2, 8)
    for row, held in zip(cache.token_pos.flatten(0, 1).tolist(), before, strict=True):
        assert set(row) <= held
        assert set(range(sinks)) <= set(row)
    for new in (8 - sinks, 1, 3, 2):
        out = cache(*step(generator, new))
        assert out.isfinite().all()
        held = cache.token_pos.sort(dim=-1).values
        assert (held.diff() > 0).all()
        if policy == "lastrec":
            assert held[0, 0, sinks:].tolist() == list(
                range(cache.input_pos - 8 + sinks, cache.input_pos)
            )
    with pytest.raises(ConfigError, match="cannot shrink 8 rows to 9"):
        cache.shrink(9)


def test_a_crop_is_exact_until_something_was_evicted():
    cache = make_cache("h2o-default", cache_length=8, dtype=torch.float32, **SIZES)
    dense = make_cache("dense-default", cache_length=8, dtype=torch.float32, **SIZES)
    generator = torch.Generator().manual_seed(16)
    first, second, third = (step(generator, new) for new in (4, 3, 4))
    cache(*first)
    cache(*second)
    cache.crop(3)
    dense(*first)
    assert torch.allclose(cache(*third), dense(*third), atol=1e-5)
    cache(*second)
    with pytest.raises(ConfigError, match="cannot crop by 1 of 11 tokens"):
        cache.crop(1)


def test_the_oracle_sees_a_wrong_score(monkeypatch):
    from kvtrie.selective.policies import H2OKVCache

    monkeypatch.setattr(H2OKVCache, "_compute_scores", lambda _, rows: rows.token_pos.float())
    with pytest.raises(AssertionError):
        play("h2o", "default", 0)


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


def forget_lengths(monkeypatch):
    """`qh2o-vlen` cumulates as `qh2o` does."""
    monkeypatch.setattr(VLengthH2OKVCache, "_cumulate", AttnWeightsKVCache._cumulate)


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
        (forget_lengths, test_lengths_of_values_decide),
        (choose_in_the_ring, lambda: test_the_first_eviction_spares_the_ring(24)),
    ],
)
def test_a_planted_defect_is_seen(monkeypatch, plant, test):
    test()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test()


def test_a_first_step_is_torchs_fast_kernel(monkeypatch):
    """No weights are computed then, even by a policy that wants them in every other step."""
    from kvtrie.selective import cache as module

    def slow(*_, **__):
        raise AssertionError

    cache = make_cache("h2o-default", cache_length=12, dtype=torch.float32, **SIZES)
    monkeypatch.setattr(module, "attend", slow)
    cache(*step(torch.Generator(), 9))
    assert not cache.scores.any()
    with pytest.raises(AssertionError):
        cache(*step(torch.Generator(), 1))


@pytest.mark.parametrize("policy", ["keydiff", "knorm", "random", "lastrec"])
def test_a_policy_that_needs_no_weights_gets_none(policy, monkeypatch):
    from kvtrie.selective import attn_weights
    from kvtrie.selective import cache as module

    for each in (module, attn_weights):
        monkeypatch.setattr(each, "attend", None)
    cache = make_cache(f"{policy}-default", cache_length=8, dtype=torch.float32, **SIZES)
    for new in (8, 3, 1):
        assert cache(*step(torch.Generator(), new)).isfinite().all()


def test_tokens_lie_as_lastrec_says():
    """Token t in row t until full; the first rows stay, the others are a ring."""
    cache = make_cache(
        "lastrec-default", cache_length=8, dtype=torch.float32, init_grace_tokens=3, **SIZES
    )
    generator = torch.Generator().manual_seed(18)
    cache(*step(generator, 5))
    cache(*step(generator, 3))
    assert (cache.token_pos == torch.arange(8)).all()
    assert cache.largest_step == 5
    cache(*step(generator, 2))
    assert (cache.token_pos == torch.tensor([0, 1, 2, 8, 9, 5, 6, 7])).all()
    cache(*step(generator, 5))
    assert (cache.token_pos == torch.tensor([0, 1, 2, 13, 14, 10, 11, 12])).all()


@pytest.mark.deep
@pytest.mark.parametrize("buffers", BUFFERS)
def test_untouched_rows_do_not_drift_in_ten_thousand_steps(buffers):
    cache = make_cache(f"h2o-{buffers}", cache_length=12, dtype=torch.float32, sinks=4, **SIZES)
    generator = torch.Generator().manual_seed(19)
    cache(*step(generator, 12))
    rows = cache.token_pos < 4
    before = [plane[rows] for plane in (*cache.buffers.planes, *cache.keys_values())]
    given = step(generator, 1)
    for _ in range(10_000):
        cache(*given)
    assert torch.equal(cache.token_pos < 4, rows)
    after = [plane[rows] for plane in (*cache.buffers.planes, *cache.keys_values())]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))

"""Fusion on real, if tiny, models: exact where it must be, and what it holds and frees."""

import gc

import numpy as np
import pytest
import torch
from fusing import (
    BLOCK,
    KINDS,
    MODELS,
    ORIGINAL,
    context_of,
    decoder_of,
    kv_of,
    last_logits,
    model_of,
    plain,
    world,
)
from tinymodels import some
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from kvtrie import Layout, Scope
from kvtrie.engines.transformers import Decoder
from kvtrie.errors import ClosedError, ConfigError, NoSpaceError
from kvtrie.fuse import Chunk, Context, Fusor, Monitor
from kvtrie.fuse.gate import divergence, rotation_error

pytestmark = pytest.mark.engine

SIZES = (17, 9, 12)
GRID = [(model, kind) for model in MODELS for kind in KINDS]


def ids_of(context, prefix=()):
    parts = [np.asarray(prefix, dtype=np.int64), *(chunk.tokens for chunk in context.chunks)]
    return torch.from_numpy(np.concatenate([*parts, context.query]))


@pytest.mark.parametrize(("name", "kind"), GRID)
def test_ratio_1_is_the_full_prefill_and_ratio_0_plain_reuse(name, kind):
    model, decoder = decoder_of(name, kind)
    context = context_of(decoder, SIZES)
    right = last_logits(model, ids_of(context)[None])
    with Fusor(decoder, select="first", ratio=1.0).fuse(context) as fused:
        mine = last_logits(model, fused.ids, fused.cache)
        assert fused.log.shares == pytest.approx([1 - SIZES[0] / sum(SIZES)] * 4)
    assert (mine - right).abs().max() < 1e-4
    assert divergence(right, mine) < 1e-8
    with Fusor(decoder, ratio=0.0).fuse(context) as fused:
        reused = last_logits(model, fused.ids, fused.cache)
        assert fused.log.computed == 0
    # Plain reuse by hand: each chunk computed at its own positions, attending only to itself.
    past, at = DynamicCache(config=None), 0
    for chunk in context.chunks:
        ids = torch.from_numpy(chunk.tokens)[None]
        separate = DynamicCache(config=None)
        places = torch.arange(at, at + ids.shape[1])[None]
        with torch.no_grad():
            model(ids, position_ids=places, past_key_values=separate)
        for layer, each in enumerate(separate.layers):
            past.update(each.keys, each.values, layer)
        at += ids.shape[1]
    with torch.no_grad():
        by_hand = model(torch.from_numpy(context.query)[None], past_key_values=past).logits[0, -1]
    assert (reused - by_hand).abs().max() < 1e-4
    assert (reused - right).abs().max() > 1e-2  # or the test shows nothing


@torch.no_grad()
def answer(model, fused, steps=3):
    for _ in range(steps):
        model(fused.ids[:, -1:], past_key_values=fused.cache)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_beyond_the_length_where_frequencies_change_the_gate_refuses(kind):
    _, decoder = decoder_of(kind=kind)
    fusor = Fusor(decoder)
    reach = ORIGINAL - (kind == "dynamic")
    with fusor.fuse(context_of(decoder, (20, 20), query=ORIGINAL - 41)) as fused:
        assert fused.ids.shape[1] == ORIGINAL - 1
        with pytest.raises(ConfigError, match=rf"a pass reaches {reach + 1}"):
            answer(decoder.model, fused)  # which passes the length
        assert fused.cache.get_seq_length() == reach
    with pytest.raises(ConfigError, match=rf"position {ORIGINAL + 6} .* {ORIGINAL + 7} tokens"):
        fusor.fuse(context_of(decoder, (30, 30), query=ORIGINAL + 7 - 60))


@pytest.mark.parametrize(
    "select", ["random", "first", "keys", "values", "question", "first+question", "values+question"]
)
def test_every_selection_computes_its_share_and_lowers_the_error(select):
    model, decoder = decoder_of()
    context = context_of(decoder, (40, 40, 40))
    right = last_logits(model, ids_of(context)[None])
    apart = []
    for ratio in (0.0, 0.3, 1.0):
        with Fusor(decoder, select=select, ratio=ratio).fuse(context) as fused:
            apart.append(divergence(right, last_logits(model, fused.ids, fused.cache)))
            assert fused.log.shares[-1] == pytest.approx(min(ratio, 2 / 3), abs=0.01)
            assert fused.cost_ns > 0
    assert apart[2] < 1e-8 < apart[0]
    assert apart[1] != apart[0]


def test_a_callable_selects_and_falling_ratios_filter_from_layer_to_layer():
    _, decoder = decoder_of()
    context = context_of(decoder, (20, 20, 20))
    seen = []

    def mine(among, count):
        seen.append((len(among), count, among.chunks.unique().tolist()))
        return torch.tensor([3, 1])

    with Fusor(decoder, select=mine).fuse(context) as fused:
        assert np.flatnonzero(fused.log.grid[0, :60]).tolist() == [21, 23]
    assert seen == [(40, 9, [1, 2])]
    ratios = (0.4, 0.4, 0.2, 0.1)
    with Fusor(decoder, select="values", at=1, ratio=ratios).fuse(context) as fused:
        assert fused.log.shares == pytest.approx([2 / 3, 0.4, 0.2, 0.1])
        assert fused.log.overlaps == [1.0, 1.0, 1.0]  # each from the choice of the one before
        selected = fused.log.grid[2, :60].nonzero()[0]
        best = fused.deviation[1].positions[:12].sort().values
        assert selected.tolist() == best.tolist()


def test_the_deviation_is_that_of_reused_and_full_kv():
    _, decoder = decoder_of()
    context = context_of(decoder, (20, 20, 20))
    ids = ids_of(context)
    full = kv_of(decoder, ids)
    with Fusor(decoder, ratio=0.0).fuse(context) as fused:
        reused = [tuple(each.clone() for each in fused.cache._kv.read(at, 60)) for at in range(4)]
    with Fusor(decoder, select="all").fuse(context) as fused:
        for layer, found in enumerate(fused.deviation):
            for part, mine in enumerate((found.keys, found.values)):
                apart = (full[layer][part][:60] - reused[layer][part]).square().sum(dim=(1, 2))
                assert torch.allclose(mine, apart[found.positions], atol=1e-4)
            total = found.keys + found.values
            assert (total[:-1] >= total[1:]).all()


def test_question_ranks_by_the_attention_of_the_query():
    model, decoder = decoder_of(attn_implementation="eager")
    context = context_of(decoder, (20, 20, 20))
    with Fusor(decoder, ratio=0.0).fuse(context) as fused:
        kv = [tuple(each.clone() for each in fused.cache._kv.read(at, 60)) for at in range(4)]
    past = DynamicCache(config=None)
    for layer, pair in enumerate(kv):
        past.update(*(each.transpose(0, 1)[None] for each in pair), layer)
    query = torch.from_numpy(context.query)[None]
    with torch.no_grad():
        seen = model(query, past_key_values=past, output_attentions=True).attentions
    right = sum(seen[layer][0, :, :, 20:60].sum(dim=(0, 1)) for layer in (1, 3))
    given = []

    def look(among, _):
        given.append(among.attention())
        return torch.empty(0, dtype=torch.int64)

    with Fusor(decoder, select=look, rank_layers=(1, 3)).fuse(context):
        assert torch.allclose(given[0], right, atol=1e-4)


def test_the_former_name_of_rank_layers_warns():
    _, decoder = decoder_of()
    with pytest.warns(DeprecationWarning, match="rank_layers"):
        fusor = Fusor(decoder, heed=(1, 3))
    assert fusor._rank_layers == (1, 3)
    with pytest.raises(ConfigError, match="one of them"):
        Fusor(decoder, heed=(1,), rank_layers=(1,))


@pytest.mark.parametrize("prefix", [(), tuple(range(1, 12))])
def test_through_a_store_it_is_what_it_is_from_memory(prefix):
    model, decoder = decoder_of()
    store, executor = world(model, prefix=prefix)
    context = plain(SIZES)
    for ratio in (0.0, 0.2, 1.0):
        parts = [torch.from_numpy(chunk.tokens) for chunk in context.chunks]
        with Fusor(decoder, store, ratio=ratio, select="values").fuse(context) as fused:
            mine = last_logits(model, fused.ids, fused.cache)
            states = [chunk.state for chunk in fused.log.chunks]
            assert fused.log.chunks[0].exact
            assert fused.log.reused[0] == SIZES[0]
            assert len(fused.lease.slots(0)) * BLOCK >= fused.ids.shape[1] - 1
        assert set(states) == ({"absent"} if ratio == 0 else {"hit"})
        executor.manager.audit()
        if not prefix:
            given = [Chunk(part.numpy(), kv_of(decoder, part)) for part in parts]
            with Fusor(decoder, ratio=ratio, select="values").fuse(
                Context(given, context.query)
            ) as fused:
                other = last_logits(model, fused.ids, fused.cache)
            assert (mine - other).abs().max() < 1e-4
    right = last_logits(model, ids_of(context, prefix)[None])
    assert (mine - right).abs().max() < 1e-4


def test_the_first_chunk_after_the_prefix_is_exact_and_a_chunk_may_come_twice():
    model, decoder = decoder_of()
    prefix = tuple(range(1, 12))
    store, _ = world(model, prefix=prefix)
    chunk, query = some(1, 1, 21)[0].numpy(), some(2, 1, 5)[0].numpy()
    context = Context([chunk], query)
    with Fusor(decoder, store).fuse(context) as fused:
        assert fused.log.computed == 0
        assert fused.quality == (1.0, "exact", None)
        mine = last_logits(model, fused.ids, fused.cache)
    assert (mine - last_logits(model, ids_of(context, prefix)[None])).abs().max() < 1e-4
    context = Context([chunk, some(3, 1, 9)[0].numpy(), chunk], query)
    with Fusor(decoder, store, ratio=1.0).fuse(context) as fused:
        assert [one.exact for one in fused.log.chunks] == [True, False, False]
        assert [one.state for one in fused.log.chunks] == ["hit", "absent", "hit"]
        mine = last_logits(model, fused.ids, fused.cache)
    assert (mine - last_logits(model, ids_of(context, prefix)[None])).abs().max() < 1e-4


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


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_chunks_from_a_tier_of_codes_fuse_too(dtype):
    model, decoder = decoder_of(num_attention_heads=4)
    exact, _ = world(model)
    coded, executor = world(model, layout=Layout(dtype=dtype, scales="token"))
    context = plain((24, 16, 24))
    fusors = [Fusor(decoder, one, select="values", ratio=0.3) for one in (exact, coded)]
    logits = []
    for fusor in fusors:
        fusor.fuse(context).close()  # computes and keeps
        fusor.store.executor.drain()
        fusor.fuse(plain((314,), seed=50)).close()  # pushes all else down
        fusor.store.executor.drain()
        with fusor.fuse(context) as fused:
            assert [chunk.state for chunk in fused.log.chunks] == ["hit"] * 3
            logits.append(last_logits(model, fused.ids, fused.cache))
    assert executor.manager.stats().tiers["host"].load_time.count > 0
    assert 0 < divergence(*logits) < 0.05


@pytest.mark.parametrize("layer", [0, 2])
def test_a_chunk_that_is_damaged_on_the_way_is_recomputed_and_the_rest_goes_on(layer):
    model, decoder = decoder_of()
    store, executor = world(model, lossy=True)
    context = plain((24, 16, 24))
    fusor = Fusor(decoder, store, select="values", ratio=0.3)
    with fusor.fuse(context) as fused:
        right = last_logits(model, fused.ids, fused.cache)
    executor.drain()
    fusor.fuse(plain((314,), seed=50)).close()  # pushes all else down
    executor.drain()
    gpu, host = executor.pools
    ids = context.chunks[1].tokens
    match = executor.manager.lookup(ids, now=executor.clock(), scope=store.scope_of(16), keep=0)
    (copy,) = match.blocks[1].copies
    gpu.lost = frozenset(host.units(copy.slot, layer, layer + 1).tolist())
    with fusor.fuse(context) as fused:
        assert [chunk.state for chunk in fused.log.chunks] == ["hit", "lost", "hit"]
        assert (last_logits(model, fused.ids, fused.cache) - right).abs().max() < 1e-4
        assert fused.log.nanoseconds["absent"] > 0
    with fusor.fuse(context) as fused:
        assert [chunk.state for chunk in fused.log.chunks] == ["hit"] * 3
    executor.drain()
    executor.manager.audit()


def test_bad_input_is_refused_with_numbers_and_leases_nothing():
    model, decoder = decoder_of()
    store, executor = world(model, gpu=12)
    fusor = Fusor(decoder, store)
    with pytest.raises(ConfigError, match="query of 0 tokens"):
        Context([[1, 2]], [])
    with pytest.raises(ConfigError, match="chunk of 0 tokens"):
        Context([[]], [1])
    free = executor.manager.stats().tiers["gpu"].free
    with pytest.raises(NoSpaceError):
        fusor.fuse(plain((70, 70)))
    with pytest.raises(NoSpaceError):  # the chunks fit, the fused cache does not
        fusor.fuse(plain((24, 24)))
    executor.drain()
    stats = executor.manager.stats().tiers["gpu"]
    assert stats.free + stats.evictable == free
    kv = kv_of(decoder, torch.tensor([1, 2]))
    shallow = Context([Chunk([1, 2], kv[:3])], [3])
    with pytest.raises(ConfigError, match=r"3 layers, the model has 4"):
        Fusor(decoder).fuse(shallow)
    narrow = Context([Chunk([1, 2], [(keys[:, :1], values) for keys, values in kv])], [3])
    with pytest.raises(ConfigError, match=r"layer 0, .* wanted"):
        Fusor(decoder).fuse(narrow)
    with pytest.raises(ConfigError, match=r"chunks \[0\] come without K and V"):
        Fusor(decoder).fuse(Context([[1, 2]], [3]))
    with pytest.raises(ConfigError, match="no selection is called best"):
        Fusor(decoder, select="first+best")
    for ratio in (-0.1, 1.1, (0.1, 0.2), "0.5", b"1", float("nan"), True, [], [[0.5]], {}, 1j):
        with pytest.raises(ConfigError, match="ratio"):
            Fusor(decoder, ratio=ratio)
    for name, wrong in (
        *(("rank_layers", layers) for layers in ((4,), (), 1, (0.5,), "1")),
        *(("at", at) for at in (4, -1, 1.5, "1", True)),
        *(("reserve", many) for many in (-1, 0.5, "1")),
        *(("seed", seed) for seed in (-1, 0.5, "1", 2**64)),
        *(("select", way) for way in (1, b"first", ["first"])),
        ("monitor", 0.5),
        ("controller", 0.5),
        ("store", decoder),
    ):
        with pytest.raises(ConfigError, match=name):
            Fusor(decoder, **{name: wrong})
    other = model_of()
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
    with pytest.raises(ConfigError, match="the store keeps KV of"):
        Fusor(Decoder(other), store)
    executor.manager.audit()


def test_tokens_beyond_the_vocabulary_are_refused_and_lease_nothing():
    model, decoder = decoder_of()
    most = model.config.vocab_size
    store, executor = world(model)
    fusor = Fusor(decoder, store)
    for chunks, query, message in (
        ([[1, 2], [most, 3]], [4], f"chunk 1 has token {most}, the model has embeddings of {most}"),
        ([[1, 2]], [most + 5], f"the query has token {most + 5}"),
    ):
        with pytest.raises(ConfigError, match=message):
            fusor.fuse(Context(chunks, query))
    with pytest.raises(ConfigError, match="context is"):
        fusor.fuse([[1, 2], [3]])
    assert executor.manager.stats().leases == 0
    fusor.fuse(Context([[1, most - 1]], [4])).close()


class Bytes:
    """A tokenizer of bytes."""

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return list(text.encode())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Context([[1]], [[2, 3]]),
        lambda: Context([[1]], [1.0]),
        lambda: Context([[1]], torch.tensor([1.0], requires_grad=True)),
        lambda: Context([[1]], "text"),
        lambda: Context([[True]], [1]),
        lambda: Context([[2**70]], [1]),
        lambda: Context(7, [1]),
        lambda: Context(None, [1]),
        lambda: Chunk([1], at=0.5),
        lambda: Chunk([1], [(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))], at=2**40),
        lambda: Chunk([1], [(torch.zeros(1, 1, 1),)]),
        lambda: Chunk([1], [(None, None)]),
        lambda: Chunk([1], 7),
        lambda: Context.of(Bytes(), "a \ud800", "b"),
        lambda: Context.of(Bytes(), "a", "\ud800"),
        lambda: Context.of(Bytes(), ["a", b"b"], "c"),
        lambda: Context.of(Bytes(), None, "c"),
        lambda: Context.of(Bytes(), "a", None),
        lambda: Context.of(Bytes(), "a", "b", size=1.5),
        lambda: Context.of(Bytes(), "a", "b", size="1"),
        lambda: Context.of(Bytes(), "a", "b", separator=1),
        lambda: Monitor(rate="0.1"),
        lambda: Monitor(step=float("nan")),
        lambda: Monitor(step=0),
        lambda: Monitor(good=1.5),
        lambda: Monitor(probe=True),
        lambda: Monitor(extra=-1),
    ],
)
def test_hostile_arguments_of_fusion_are_config_errors(make):
    with pytest.raises(ConfigError):
        make()


def test_a_model_without_rotary_positions_is_refused():
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50)
    with pytest.raises(ConfigError, match="rotary_emb"):
        Decoder(GPT2LMHeadModel(config).eval())


def test_wrong_tables_and_a_wrong_layer_do_not_pass_the_gate(monkeypatch):
    _, decoder = decoder_of()
    context = context_of(decoder, SIZES)
    ids = ids_of(context)
    assert rotation_error(decoder, ids) < 1e-5
    ropes = decoder.ropes
    with monkeypatch.context() as patch:
        patch.setattr(type(decoder), "ropes", lambda _, length: _shuffled(ropes(length)))
        assert rotation_error(decoder, ids) > 0.5
        with pytest.raises(ConfigError, match="of their norm away"):
            Fusor(decoder).fuse(context)
    embed = decoder.embed
    with monkeypatch.context() as patch:
        patch.setattr(type(decoder), "embed", lambda _, given: embed(given) * 2)
        with pytest.raises(ConfigError, match="all tokens recomputed"):
            Fusor(decoder).fuse(context)
    Fusor(decoder).fuse(context).close()


def _shuffled(ropes):
    from kvtrie.kernels import Rope

    return [Rope(rope.cos.flip(1).contiguous(), rope.sin.flip(1).contiguous()) for rope in ropes]


def test_the_monitor_raises_the_ratio_and_lets_it_fall_again():
    model, decoder = decoder_of()
    context = context_of(decoder, (20, 20, 20))
    right = last_logits(model, ids_of(context)[None])
    monitor = Monitor(rate=0.5, threshold=0.999, step=0.25, good=2, probe=4)
    fusor = Fusor(decoder, select="values", ratio=0.0, monitor=monitor)
    shares, scores = [], []
    for _ in range(8):
        with fusor.fuse(context) as fused:
            mine = last_logits(model, fused.ids, fused.cache)
            shares.append(fused.log.shares[-1])
            scores.append(fused.quality)
            if fused.quality.how == "full prefill":
                assert fused.quality.kl == pytest.approx(divergence(right, mine), abs=1e-6)
    assert [score.how for score in scores[:4]] == ["count", "full prefill"] * 2
    assert shares[0] == pytest.approx(4 / 60)  # only the probed tokens
    assert max(shares) == pytest.approx(2 / 3)
    assert monitor.raised >= 3
    assert monitor.lowered >= 1
    assert all(0 <= score.score <= 1 for score in scores)
    with pytest.raises(ConfigError, match="threshold is 2"):
        Monitor(threshold=2)

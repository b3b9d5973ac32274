"""`Fusor`: chunks of a store or with their own K and V; what it refuses, and how it recovers."""

import pytest
import torch
from fusing import (
    BLOCK,
    SIZES,
    context_of,
    decoder_of,
    ids_of,
    kv_of,
    last_logits,
    model_of,
    plain,
    world,
)
from tinymodels import some

from kvtrie import Layout
from kvtrie.engines.transformers import Decoder
from kvtrie.errors import ConfigError, NoSpaceError
from kvtrie.fuse import Chunk, Context, Fusor
from kvtrie.fuse.gate import divergence

pytestmark = pytest.mark.engine


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

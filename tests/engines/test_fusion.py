"""Fusion on real, if tiny, models: exact where it must be, and what it holds and frees."""

import numpy as np
import pytest
import torch
from fusing import (
    KINDS,
    MODELS,
    ORIGINAL,
    SIZES,
    context_of,
    decoder_of,
    ids_of,
    kv_of,
    last_logits,
)
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from kvtrie.engines.transformers import Decoder
from kvtrie.errors import ConfigError
from kvtrie.fuse import Fusor, Monitor
from kvtrie.fuse.gate import divergence, rotation_error

pytestmark = pytest.mark.engine

GRID = [(model, kind) for model in MODELS for kind in KINDS]


@pytest.mark.grid
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

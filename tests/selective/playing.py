"""Plays a cache and its oracle side by side."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch
from loops import Oracle

from kvtrie.selective import make_cache

BATCH, GROUPS, HEADS, DIM = 2, 2, 4, 16
SIZES = {"batch": BATCH, "kv_heads": GROUPS, "query_heads": HEADS, "head_dim": DIM}

SEVEN = ("dense", "lastrec", "h2o", "qh2o", "h2o-vlen", "qh2o-vlen", "h2o-orig")
SMALL = ("keydiff", "knorm", "tova", "snapkv", "expected", "h2o-decay", "random")
MIXES = ("mix-h2o+keydiff", "mix-tova+h2o-vlen", "mix-snapkv+random")
BUFFERS = ("default", "torch-quantized8", "torch-quantized4", "int8", "fp8")
SCORING = [*SEVEN[2:], *SMALL, *MIXES]
# `h2o-orig` chooses once for a whole batch, and `dense` not at all.
CHOOSING = [
    name for name in (*SEVEN, *SMALL) if name[0] != "q" if name not in {"h2o-orig", "dense"}
]


def step(generator, new, *, batch=BATCH, groups=GROUPS, heads=HEADS, dim=DIM):
    draw = [torch.randn(batch, n, new, dim, generator=generator) for n in (heads, groups, groups)]
    draw[0] *= 2  # so that attention is uneven
    draw[1][..., 0] += 1
    return draw


def drawn_steps(draw, cache, total):
    """Lengths that the cache allows, of any size."""
    while cache.input_pos < total and (most := cache.largest_step):
        yield draw.choice([1, most, draw.randint(1, most)])


CUMULATED = {
    "h2o": "s", "qh2o": "s", "h2o-orig": "s", "h2o-vlen": "vlen", "qh2o-vlen": "vlen",
    "h2o-decay": "slow",
}  # fmt: skip


def alike(cache, oracle):
    """The same tokens in every row of every head, with the same scores and numbers.

    Returns the worst difference of scores.
    """
    keys, values = cache.keys_values()
    attribute = CUMULATED.get(oracle.policy)
    worst = 0.0
    for (b, g), rows in oracle.rows.items():
        mine = cache.token_pos[b, g].tolist()
        assert sorted(mine) == sorted(token.pos for token in rows), (b, g)
        by_pos = {token.pos: token for token in rows}
        assert len(by_pos) == len(rows)
        for row, pos in enumerate(mine):
            token = by_pos[pos]
            assert np.array_equal(keys[b, g, row].numpy(), token.now_k.astype(np.float32))
            assert np.array_equal(values[b, g, row].numpy(), token.now_v.astype(np.float32))
            if attribute is not None:
                worst = max(worst, abs(cache.scores[b, g, row].item() - getattr(token, attribute)))
    assert worst < 1e-4
    return worst


def play(policy, buffers, seed, *, total=70, length=None, first=None, steps=(), **kwargs):
    """Take `steps`, then draw some until there are `total` tokens; compare after each.

    Returns the cache, the oracle, the number of steps, and the worst difference of any number.
    """
    draw = random.Random(seed)
    length = length or draw.choice([9, 12, 16])
    generator = torch.Generator().manual_seed(seed)
    cache = make_cache(
        f"{policy}-{buffers}", cache_length=length, dtype=torch.float32, **SIZES, **kwargs
    )
    oracle = Oracle(policy, buffers, BATCH, GROUPS, HEADS, length, first=first, **kwargs)
    if first is not None:
        cache.pad(torch.tensor(first))
    count, worst = 0, 0.0
    for new in itertools.chain(steps, drawn_steps(draw, cache, total)):
        query, key, value = step(generator, new)
        out = cache(query, key, value)
        kept = {(b, g): set(cache.token_pos[b, g].tolist()) for b, g in oracle.rows}
        truth = oracle.step(*(each.double().numpy() for each in (query, key, value)), kept=kept)
        real = torch.ones_like(out, dtype=torch.bool)
        if first is not None:
            columns = torch.arange(cache.input_pos - new, cache.input_pos)
            real = (columns >= torch.tensor(first)[:, None])[:, None, :, None].expand_as(out)
        if real.any():
            worst = max(worst, (out - torch.from_numpy(truth))[real].abs().max().item())
        assert worst < 1e-4
        worst = max(worst, alike(cache, oracle))
        count += 1
    return cache, oracle, count, worst

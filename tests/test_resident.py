"""`Match.resident`: how much of a match is complete on a tier, compared with its blocks."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.errors import ConfigError, NoSpaceError

SIZE, LAYERS = 4, 3


def manager():
    shape = ModelShape(layers=LAYERS, kv_heads=1, head_dim=16)
    tiers = [Tier("gpu", blocks=8), Tier("host", blocks=6, write="through"), Tier("disk", blocks=9)]
    return BlockManager(shape, tiers, block_tokens=SIZE)


def stands(block, tier):
    """The meaning of `resident`, block by block."""
    return any(
        copy.tier == tier and not copy.leaving and (copy.layer_lo, copy.layer_hi) == (0, LAYERS)
        for copy in block.copies
    )


def naive(match, tier, first):
    count = 0
    while first + count < len(match.blocks) and stands(match.blocks[first + count], tier):
        count += 1
    return count


@pytest.mark.parametrize("seed", range(6))
def test_it_is_what_the_blocks_say(seed):
    draw, made, under_way = random.Random(seed), manager(), []
    seen = set()
    for now in range(1, 400):
        path = [draw.randrange(3) for _ in range(draw.randint(1, 5))]
        tokens = np.repeat(np.asarray(path, dtype=np.uint32), SIZE)
        match = made.lookup(tokens, now=now, keep=0)
        for tier in range(3):
            for first in range(len(match.handles) + 1):
                counted = match.resident(tier, skip=first)
                assert counted == naive(match, tier, first)
                seen.add((tier, counted > 0, counted < len(match.handles) - first))
        assert match.resident("host") == match.resident(1)
        with suppress(NoSpaceError), made.acquire(tokens, now=now, keep=0, load="none") as lease:
            if lease.ready():
                lease.commit(tokens[lease.matched :], now=now)
            lease.release(now=now)
        under_way += made.moves().id.tolist()
        for _ in range(draw.randrange(6)):
            if under_way:
                layers = draw.choice([None, None, 1])
                ident = under_way.pop(0) if layers is None else under_way[0]
                made.complete([ident], now=now, layers_done=layers)
    made.audit()
    assert seen >= {(tier, True, less) for tier in (0, 1, 2) for less in (True, False)}


def test_what_cannot_be_is_told():
    match = manager().lookup(np.zeros(SIZE, np.uint32), now=1, keep=0)
    assert match.resident(0) == 0
    with pytest.raises(ConfigError, match="skip is 1, of a match of 0 blocks"):
        match.resident(0, skip=1)
    with pytest.raises(ConfigError, match="tier"):
        match.resident(3)
    with pytest.raises(ConfigError, match="there is no tier 'remote'"):
        match.resident("remote")

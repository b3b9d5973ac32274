"""Keys: names of blocks by content, equal in every process and to those that moves carry."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvtrie import BlockManager, ConfigError, ModelShape, Scope, Tier

SHAPE = ModelShape(layers=2, kv_heads=2, head_dim=4, fingerprint="keys")
SIZE = 4
TOKENS = list(range(4 * SIZE + 3))
SCOPES = [
    None,
    Scope(tenant=b"one"),
    Scope(lora="two"),
    Scope(extra=((0, b"a"), (5, b"b"), (7, b"c"), (18, b"d"))),
    Scope(tenant=b"one", extra=((7, b"c"), (5, b"b"))),
]


def manager():
    tiers = [Tier("gpu", blocks=16), Tier("host", blocks=16)]
    return BlockManager(SHAPE, tiers, block_tokens=SIZE)


@pytest.mark.parametrize("scope", SCOPES)
def test_keys_are_those_of_cached_blocks(scope):
    blocks = manager()
    before = blocks.keys(TOKENS, scope=scope)
    assert before.shape == (4, 32)
    assert before.dtype == np.uint8
    blocks.mark(TOKENS, "host", present=True, now=1, scope=scope)
    assert np.array_equal(blocks.index("host", now=1).key, before)
    assert np.array_equal(blocks.keys(TOKENS, scope=scope), before)
    assert len(blocks.keys(TOKENS[:3], scope=scope)) == 0


def test_keys_differ_from_the_first_difference_on():
    blocks = manager()
    plain = blocks.keys(TOKENS)
    other = blocks.keys([*TOKENS[:9], 99, *TOKENS[10:]])
    assert [bool(np.array_equal(*pair)) for pair in zip(plain, other, strict=True)] == [
        True,
        True,
        False,
        False,
    ]
    image = blocks.keys(TOKENS, scope=Scope(extra=((9, b"x"),)))
    assert np.array_equal(image[:2], plain[:2])
    assert not np.array_equal(image[2], plain[2])
    firsts = {bytes(blocks.keys(TOKENS, scope=scope)[0]) for scope in SCOPES}
    assert len(firsts) == 4  # two of them differ first in their second block


def test_keys_are_equal_in_another_process():
    code = (
        "from kvtrie import BlockManager, ModelShape, Tier\n"
        "shape = ModelShape(layers=2, kv_heads=2, head_dim=4, fingerprint='keys')\n"
        "manager = BlockManager(shape, [Tier('gpu', blocks=1)], block_tokens=4)\n"
        "print(manager.keys(list(range(19))).tobytes().hex())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert bytes.fromhex(found.stdout) == manager().keys(TOKENS).tobytes()


def test_a_long_sequence_has_the_keys_of_its_parts():
    tokens = np.arange(70_000, dtype=np.uint32)
    keys = manager().keys(tokens)
    assert np.array_equal(keys[:1000], manager().keys(tokens[:4000]))


def test_tokens_that_could_be_digests_are_refused():
    with pytest.raises(ConfigError, match="token 2147483648 at 1"):
        manager().keys([1, 2**31, 3, 4], scope=Scope(extra=((0, b"x"),)))
    with pytest.raises(ConfigError, match="fingerprint"):
        BlockManager(ModelShape(2, 2, 4), [Tier("gpu", blocks=1)]).keys(TOKENS)

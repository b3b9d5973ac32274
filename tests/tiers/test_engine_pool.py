"""An engine's own tensors as a pool: whatever their strides, a block comes back bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.errors import ConfigError
from kvtrie.model.layout import Layout
from kvtrie.tiers import EnginePool, Pool
from kvtrie.transfer import Executor

SHAPE = ModelShape(layers=3, kv_heads=2, head_dim=16, fingerprint="given")
SIZE, BLOCKS = 4, 6
GIVEN = Layout(opaque="test.heads_first")


def tensors(axis, order, *, apart, padded, dtype=torch.float32, seed=0):
    """One tensor per layer, or K and V: `axis` is that of blocks, the others are in `order`."""
    generator = torch.Generator().manual_seed(seed)
    inner = [SIZE, 2, 16] if apart else [2, SIZE, 2, 16]
    inner = [inner[at % len(inner)] for at in order] if len(set(order)) == len(inner) else inner

    def one():
        shape = [*inner[:axis], BLOCKS + padded, *inner[axis:]]
        numbers = torch.rand(shape, generator=generator).to(dtype)
        return numbers.narrow(axis, 0, BLOCKS)

    return [[one(), one()] if apart else one() for _ in range(SHAPE.layers)]


def bytes_of(each, axis, slot):
    """The bytes of a slot by a naive engine: K, then V."""
    parts = each if isinstance(each, list) else [each]
    return b"".join(part.select(axis, slot).contiguous().numpy().tobytes() for part in parts)


@given(
    axis=st.integers(0, 3),
    order=st.permutations(range(4)),
    apart=st.booleans(),
    padded=st.integers(0, 2),
    slots=st.permutations(range(BLOCKS)),
    there=st.permutations(range(BLOCKS)),
    count=st.integers(1, BLOCKS),
)
def test_blocks_go_down_and_come_back_as_they_were(axis, order, apart, padded, slots, there, count):
    axis = min(axis, 3 if apart else 4)
    given_ = tensors(axis, order, apart=apart, padded=padded)
    engine = EnginePool(SHAPE, SIZE, given_, block_axis=axis, opaque=GIVEN.opaque)
    host = Pool(SHAPE, BLOCKS, SIZE, layout=GIVEN)
    before = [[bytes_of(each, axis, slot) for slot in range(BLOCKS)] for each in given_]
    source, target = np.array(slots[:count]), np.array(there[:count])
    layers = np.arange(SHAPE.layers)
    units = (source[:, None] * SHAPE.layers + layers).reshape(-1)
    below = (target[:, None] * SHAPE.layers + layers).reshape(-1)
    host.copy_from(engine, units, below)
    for layer in range(SHAPE.layers):
        for block, down in zip(source, target, strict=True):
            unit = host.planes[0][down * SHAPE.layers + layer].numpy().tobytes()
            assert unit == before[layer][block]
    # Into other slots: those hold what went down, all others what they held.
    rolled = np.roll(source, 1)
    engine.copy_from(host, below, (rolled[:, None] * SHAPE.layers + layers).reshape(-1))
    for layer, each in enumerate(given_):
        expected = list(before[layer])
        for slot, of in zip(rolled, source, strict=True):
            expected[slot] = before[layer][of]
        assert [bytes_of(each, axis, slot) for slot in range(BLOCKS)] == expected


def test_copying_one_layer_of_some_blocks_changes_no_other():
    given_ = tensors(0, range(4), apart=False, padded=0)
    engine = EnginePool(SHAPE, SIZE, given_, opaque=GIVEN.opaque)
    host = Pool(SHAPE, BLOCKS, SIZE, layout=GIVEN)
    before = [each.clone() for each in given_]
    engine.copy_from(
        host, host.layer_units(np.array([0, 1]), 1), engine.layer_units(np.array([4, 2]), 1)
    )
    assert torch.equal(given_[0], before[0])
    assert torch.equal(given_[2], before[2])
    assert not given_[1][[2, 4]].any()
    assert torch.equal(given_[1][[0, 1, 3, 5]], before[1][[0, 1, 3, 5]])


def test_a_tier_below_keeps_another_format_only_if_the_bytes_have_a_meaning():
    small = Layout(dtype="float16")
    given_ = tensors(0, range(4), apart=True, padded=0)
    engine = EnginePool(SHAPE, SIZE, given_)
    host = Pool(SHAPE, BLOCKS, SIZE, layout=small)
    before = [[part.clone() for part in each] for each in given_]
    units = np.arange(BLOCKS * SHAPE.layers)
    host.copy_from(engine, units, units)
    for each in given_:
        for part in each:
            part.fill_(torch.nan)
    engine.copy_from(host, units, units)
    for each, was in zip(given_, before, strict=True):
        for part, old in zip(each, was, strict=True):
            assert torch.equal(part, old.half().float())
    manager = BlockManager(
        SHAPE,
        [Tier("gpu", blocks=BLOCKS, owner="engine"), Tier("host", blocks=2, layout=small)],
        block_tokens=SIZE,
    )
    opaque = EnginePool(SHAPE, SIZE, given_, opaque="only.mine")
    with pytest.raises(ConfigError, match=r"opaque only\.mine and "):
        Executor(manager, [opaque, host])
    with pytest.raises(ConfigError, match=r"'only\.mine' mean something to its engine only"):
        Pool(SHAPE, 2, SIZE, layout=Layout(dtype="float16", opaque="only.mine"))
    with pytest.raises(ConfigError, match=r"only 'only\.mine' knows"):
        _ = Pool(SHAPE, 2, SIZE, layout=Layout(opaque="only.mine")).keys


def test_an_executor_serves_a_manager_whose_first_tier_the_engine_owns():
    given_ = tensors(1, range(4), apart=False, padded=1)
    engine = EnginePool(SHAPE, SIZE, given_, block_axis=1, opaque=GIVEN.opaque)
    host = Pool(SHAPE, 8, SIZE, layout=GIVEN)
    manager = BlockManager(
        SHAPE,
        [Tier("gpu", blocks=BLOCKS, owner="engine", write="through"), Tier("host", blocks=8)],
        block_tokens=SIZE,
    )
    tokens = np.arange(3 * SIZE, dtype=np.uint32)
    wanted = [[bytes_of(each, 1, slot) for slot in (5, 0, 3)] for each in given_]
    with Executor(manager, [engine, host], workers=0, clock=lambda: 1) as executor:
        with manager.acquire(tokens, now=1, keep=0) as lease:
            lease.bind(0, [5, 0, 3])
            lease.commit(tokens, now=1)
            executor.drain()
        for each in given_:
            each.zero_()
        with manager.acquire(tokens, now=1, keep=0, load="all") as lease:
            assert lease.matched == len(tokens)
            lease.bind(0, [1, 2, 4])
            executor.wait(lease)
            assert [[bytes_of(each, 1, slot) for slot in (1, 2, 4)] for each in given_] == wanted
    manager.audit()


def test_tensors_that_do_not_fit_are_refused_with_their_numbers():
    given_ = tensors(0, range(4), apart=False, padded=0)
    with pytest.raises(ConfigError, match="2 layers of tensors for 3 of the model"):
        EnginePool(SHAPE, SIZE, given_[:2])
    with pytest.raises(ConfigError, match=r"tensors of \[5, 6\] blocks"):
        EnginePool(SHAPE, SIZE, [given_[0], given_[1][:5], given_[2]])
    with pytest.raises(ConfigError, match="1024 bytes in the engine's tensors and 2048 by the"):
        EnginePool(SHAPE, 2 * SIZE, given_)
    with pytest.raises(ConfigError, match="no axis 7 of blocks"):
        EnginePool(SHAPE, SIZE, given_, block_axis=7)
    engine = EnginePool(SHAPE, SIZE, given_)
    with pytest.raises(ConfigError, match="joined K and V only"):
        engine.copy_from(engine, np.arange(2), np.arange(2))
    with pytest.raises(ConfigError, match="differ: block_tokens 4 and 8"):
        engine.copy_from(Pool(SHAPE, 2, 2 * SIZE), np.arange(2), np.arange(2))

"""SlotNumbers: units of slots in both forms, and spare blocks that become those of slots."""

import numpy as np
import pytest

from kvtrie.errors import ConfigError, NoSpaceError
from kvtrie.model.shape import ModelShape
from kvtrie.tiers import Pool

SHAPE = ModelShape(layers=3, kv_heads=2, head_dim=4, fingerprint="slots")


def test_layers_of_a_block_are_adjacent():
    pool = Pool(SHAPE, 4, 8)
    assert pool.units(2, 0, 3).tolist() == [6, 7, 8]
    assert pool.units(2, 1, 2).tolist() == [7]
    assert pool.table(np.array([2, 0], dtype=np.uint32)).tolist() == [[6, 0], [7, 1], [8, 2]]


def test_any_layer_sits_in_any_layer_slot():
    pool = Pool(SHAPE, 4, 8, layer_slots=True)
    assert pool.units(11, 2, 3).tolist() == [11]
    slots = np.array([[3, 9], [0, 11], [7, 1]], dtype=np.uint32)
    assert pool.table(slots).tolist() == slots.tolist()
    with pytest.raises(ConfigError, match="one layer"):
        pool.units(3, 0, 2)


def test_slots_beyond_the_pool_are_refused():
    for pool, slot in ((Pool(SHAPE, 4, 8), 4), (Pool(SHAPE, 4, 8, layer_slots=True), 12)):
        with pytest.raises(ConfigError, match="outside a pool"):
            pool.units(slot, 0, 1)


def test_a_slot_adopts_a_spare_block_and_gives_its_own():
    pool = Pool(SHAPE, 4, 8, spare=2)
    spares = pool.set_aside(2)
    assert pool.spare_units(spares).tolist() == [spare * 3 for spare in spares]
    assert pool.staged_bytes == 2 * 3 * pool.unit_bytes
    with pytest.raises(NoSpaceError, match="0 of 2 are free"):
        pool.set_aside(1)
    pool.adopt(np.array([1]), np.array(spares[:1]))
    assert pool.units(1, 0, 3).tolist() == [spares[0] * 3 + layer for layer in range(3)]
    assert pool.set_aside(1) == [1]
    pool.put_back([1, spares[1]])
    assert pool.staged_bytes == 0
    with pytest.raises(ConfigError, match="adopts none"):
        Pool(SHAPE, 4, 8).adopt(np.array([1]), np.array([0]))
    with pytest.raises(ConfigError, match="0 where a slot is one layer"):
        Pool(SHAPE, 4, 8, layer_slots=True, spare=1)


def test_blocks_in_spare_places_get_slots_without_a_block():
    pool = Pool(SHAPE, 3, 8, spare=2)
    pool.arrange([0, 3, 4])  # places with a block: those of slots 1 and 2 have none
    assert sorted(pool.slot_of_place()[[0, 3, 4]].tolist()) == [0, 1, 2]
    assert pool.slot_of_place()[[1, 2]].tolist() == [-1, -1]
    assert sorted(pool.set_aside(2)) == [1, 2]

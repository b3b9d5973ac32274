"""`LayerCopies`: each layer once and in order; a block that fails leaves the other blocks alone."""

import numpy as np
import pytest

from kvtrie import ModelShape
from kvtrie.tiers import Pool
from kvtrie.transfer.layer_copies import LayerCopies

LAYERS, BLOCKS = 4, 6
SHAPE = ModelShape(layers=LAYERS, kv_heads=1, head_dim=2, dtype="float32")
SLOTS = np.array([[0, 5], [3, 1], [4, 0]])


def make_pools():
    source, target = Pool(SHAPE, BLOCKS, 2), Pool(SHAPE, BLOCKS, 2)
    for unit, row in enumerate(source.planes[0]):
        row.fill_(unit + 1)
    return source, target


def values(pool, slots, layers):
    """The value of each unit of some layers of slots; 0 where nothing was copied."""
    units = pool.layer_units(slots.astype(np.int64), 0)[:, None] + np.arange(*layers)
    return pool.planes[0][units.reshape(-1), 0].numpy().reshape(units.shape)


def test_layers_are_copied_once_and_in_order():
    source, target = make_pools()
    calls = []

    def copy(source, source_units, target, units):
        calls.append(len(units))
        target.copy_from(source, source_units, units)

    copies = LayerCopies.of_slots(source, target, SLOTS, (0, LAYERS), copy=copy)
    for upto in (1, 1, 3, 2, LAYERS, LAYERS):
        assert copies.advance(upto) == {}
        assert copies.done >= upto
        done = copies.done
        assert (
            values(target, SLOTS[:, 1], (0, done)) == values(source, SLOTS[:, 0], (0, done))
        ).all()
        assert not values(target, SLOTS[:, 1], (done, LAYERS)).any()
    assert calls == [3, 6, 3]  # blocks times layers


@pytest.mark.parametrize("broken", [[0], [1, 2], [0, 1, 2]])
def test_block_that_fails_does_not_affect_other_blocks(broken):
    source, target = make_pools()
    bad = {int(source.layer_units(SLOTS[[at], 0], 1)[0]) for at in broken}

    def copy(source, source_units, target, units):
        if bad.intersection(source_units.tolist()):
            raise OSError("a link error")
        target.copy_from(source, source_units, units)

    copies = LayerCopies.of_slots(source, target, SLOTS, (0, LAYERS), copy=copy)
    assert copies.advance(1) == {}
    assert copies.advance(2) == dict.fromkeys(broken, "OSError: a link error")
    assert copies.advance(LAYERS) == {}
    well = [at for at in range(len(SLOTS)) if at not in broken]
    assert copies.blocks.tolist() == well
    assert (
        values(target, SLOTS[well, 1], (0, LAYERS)) == values(source, SLOTS[well, 0], (0, LAYERS))
    ).all()
    assert not values(target, SLOTS[broken, 1], (1, LAYERS)).any()


def test_copies_of_a_range_count_layers_from_its_first():
    source, target = make_pools()
    LayerCopies.of_slots(source, target, SLOTS, (1, 3)).copy(1, 2)
    assert (values(target, SLOTS[:, 1], (2, 3)) == values(source, SLOTS[:, 0], (2, 3))).all()
    assert not values(target, SLOTS[:, 1], (1, 2)).any()

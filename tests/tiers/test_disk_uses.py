"""Ages and uses that are noted on a disk while it is open."""

import shutil

import numpy as np
import pytest
from keeping import DISK, SHAPE, SIZE, WALL, Clock, ask, fill, prompt, serving

from kvtrie import Index
from kvtrie.errors import ClosedError, ConfigError, TransferError
from kvtrie.tiers import DiskStorage


def test_noted_uses_outlive_a_process_that_does_not_close(tmp_path):
    wall = Clock(WALL)
    with serving(tmp_path / "alive", wall=wall) as executor:
        for seed in range(6):
            ask(executor, prompt(seed, 2))
        executor.save()
        storage, manager = executor.pools[2], executor.manager

        def some(*seeds):
            found = [manager.lookup(prompt(s, 2), now=executor.clock(), keep=0) for s in seeds]
            blocks = np.concatenate([one.handles for one in found])
            index = manager.index("disk", now=executor.clock(), blocks=blocks)
            assert len(index) == len(blocks) == 2 * len(seeds)
            # As a request would have it that was here for the ninth time, 70 ns ago.
            return aged(index, 70, 9)

        used = some(4, 1)
        assert [row[1:] for row in used] == [row[1:] for row in some(4, 1)]
        storage.note_uses(used)
        wall.now += 30
        storage.note_uses(some(2), wall.now - 5)
        shutil.copytree(tmp_path / "alive", tmp_path / "died")
    with serving(tmp_path / "died", wall=wall) as executor:
        found = executor.pools[2].recall()
        assert len(found) == 12
        ages = dict(
            zip(map(bytes, found.key), zip(found.age, found.uses, strict=True), strict=True)
        )
        for index, age in ((used, 100), (some(2), 75)):
            assert {ages[bytes(key)] for key in index.key} == {(age, 9)}
        assert sum(uses == 9 for _, uses in ages.values()) == 6


def aged(index, age, uses):
    """The rows with another age and number of uses, which a label begins with."""
    head = age.to_bytes(8, "little"), uses.to_bytes(4, "little")
    return Index([(head[0] + one[8:16] + head[1] + one[20:], *rest) for one, *rest in index])


def test_what_is_not_there_is_not_noted(tmp_path):
    fill(tmp_path, [prompt(1), prompt(2)])
    storage = DiskStorage(tmp_path, SHAPE, DISK, SIZE)
    first, second = storage.recall()
    swapped = [(first[0], second[1], 0, 4), (second[0], 30, 0, 4), first]
    assert storage.store.note_uses(aged(Index(swapped), 1, 5), WALL) == 1
    assert sorted(storage.recall().uses.tolist()) == [1, 5]
    with pytest.raises(ConfigError, match=f"slot {DISK}, there are {DISK}"):
        storage.note_uses(Index([(first[0], DISK, 0, 4)]))
    reader = DiskStorage(tmp_path, SHAPE, DISK, SIZE)
    reader.note_uses(Index([first]))  # nothing, as with `keep`
    with pytest.raises(TransferError, match="read-only"):
        reader.store.note_uses(Index([first]), WALL)
    reader.close()
    storage.close()
    with pytest.raises(ClosedError):
        storage.note_uses(Index([first]))

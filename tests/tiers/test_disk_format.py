"""Folders of released disk formats: later versions read every block, or refuse the folder by name.

`PYTHONPATH=tests python tests/tiers/test_disk_format.py` writes `tests/tiers/formats/N` with the
current format's number N. A stored folder is never written again.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from keeping import SECOND, WALL, Clock, serving, stores

from kvtrie import ModelShape
from kvtrie._kvtrie import DiskStore

FORMATS = Path(__file__).parent / "formats"
SHAPE = ModelShape(layers=2, kv_heads=1, head_dim=8, fingerprint="stored format")
SIZE = 4
DISK = 9
SETTINGS = {"shape": SHAPE, "size": SIZE, "disk": DISK, "gpu": 16, "host": 16}
# Two chats with a common first block, a document that is used twice, and a prompt of one block.
PROMPTS = [[1, 2, 3, 4, *range(10, 18)], [1, 2, 3, 4, *range(20, 28)], [*range(30, 38)], [7] * 4]
REMOVED = [9] * 4
BLOCKS, USED = 8, 2


def layers_of(tokens: list[int]) -> torch.Tensor:
    """Return the bytes of a prompt's last block `(layers, layer_bytes)`."""
    length = SHAPE.layer_bytes(SIZE)
    digest = hashlib.shake_256(np.array(tokens, dtype="<i8").tobytes())
    content = np.frombuffer(digest.digest(SHAPE.layers * length), dtype=np.uint8)
    return torch.from_numpy(content.reshape(SHAPE.layers, length).copy())


def ask(executor, tokens: list[int]) -> int:
    """Serve a request and compare the bytes of cached blocks; return the cached tokens."""
    manager, pool = executor.manager, executor.pools[0]
    with manager.acquire(tokens, now=executor.clock(), keep=0, load="all") as lease:
        executor.wait(lease)
        for number, units in enumerate(pool.table(lease.slots(0)).T):
            wanted, rows = (
                layers_of(tokens[: (number + 1) * SIZE]),
                pool.planes[0].view(torch.uint8),
            )
            if number * SIZE < lease.matched:
                assert torch.equal(rows[units], wanted), f"block {number} of {tokens}"
            else:
                rows[units] = wanted
        lease.commit(tokens[lease.matched :], now=executor.clock())
        return lease.matched


def write(folder: Path) -> None:
    """Write a folder with blocks, a note of their uses, and a free slot."""
    clock, wall = Clock(SECOND), Clock(WALL)
    with serving(folder, clock=clock, wall=wall, **SETTINGS) as executor:
        for tokens in [*PROMPTS, PROMPTS[2], REMOVED]:
            clock.now += SECOND
            ask(executor, tokens)
        executor.save()
        storage = executor.pools[2]
        storage.note_uses(storage.recall())
        found = executor.manager.lookup(REMOVED, now=clock(), keep=0)
        storage.store.remove(found.blocks[0].copies[-1].slots[0])


@pytest.mark.parametrize("stored", sorted(FORMATS.iterdir()), ids=lambda path: path.name)
def test_a_stored_folder_is_read_with_every_block(tmp_path, stored):
    folder = shutil.copytree(stored, tmp_path / "kv")
    (store,) = stores(folder)
    assert DiskStore.inspect(store).verify() == []
    with serving(folder, clock=Clock(SECOND), wall=Clock(WALL + SECOND), **SETTINGS) as executor:
        index = executor.pools[2].recall()
        assert len(index) == BLOCKS
        assert sorted(index.uses.tolist()) == [1] * (BLOCKS - USED - 1) + [2] * (USED + 1)
        assert executor.restore() == BLOCKS
        assert [ask(executor, tokens) for tokens in PROMPTS] == [*map(len, PROMPTS)]
        executor.manager.audit()
        executor.save()
    with serving(folder, **SETTINGS) as executor:
        assert executor.restore() == BLOCKS, "the current version has written the folder since"


if __name__ == "__main__":
    target = FORMATS / "1"
    if target.exists():
        sys.exit(f"{target} exists; stored folders stay as they are")
    write(target)

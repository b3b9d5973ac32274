"""Stores of other meanings in the folder of a disk: counted once, for the start-up line.

Invariant: they are only read. Cost: one pass over the manifest of each.
"""

from __future__ import annotations

from contextlib import closing, suppress
from typing import TYPE_CHECKING

from kvtrie._kvtrie import DiskStore
from kvtrie.errors import KvtrieError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["count_others"]


def count_others(folder: Path, ours: Callable[[str], bool]) -> int:
    """Return the number of blocks in stores of a folder that are not ours.

    A store that cannot be read counts as none.

    Args:
        folder: the folder that the stores are in.
        ours: whether a store belongs to this server, by its meaning.
    """
    count = 0
    with suppress(KvtrieError):
        for store, why in DiskStore.stores(folder):
            if why is None:
                with suppress(KvtrieError), closing(DiskStore.inspect(store)) as seen:
                    count += 0 if ours(seen.about) else len(seen.blocks(0))
    return count

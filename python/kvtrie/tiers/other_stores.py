"""Counts the stores of different meanings in the folder of a disk, for the start-up line.

Invariant: the stores are only read.
Cost: a pass over the manifest of each store.
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
    """Return the number of blocks in foreign stores of a folder.

    An unreadable store counts as empty.

    Args:
        folder: the folder of the stores.
        ours: whether a store belongs to this server, by its meaning.
    """
    count = 0
    with suppress(KvtrieError):
        for store, why in DiskStore.stores(folder):
            if why is None:
                with suppress(KvtrieError), closing(DiskStore.inspect(store)) as seen:
                    count += 0 if ours(seen.about) else len(seen.blocks(0))
    return count

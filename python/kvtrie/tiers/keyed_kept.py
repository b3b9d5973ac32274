"""KeyedKept: blocks by an engine's keys in memory that outlives the process.

Invariant: that of `KeptSlots`; a process that finds the file in use has memory of its own.
Cost: that of `KeptSlots`, and at opening a pass over the labels of the file.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import folder as path_of
from kvtrie.settings.sizes import forgotten
from kvtrie.settings.sizes import size as read_size
from kvtrie.tiers.kept_file import check_memory, open_kept_file
from kvtrie.tiers.kept_slots import KeptSlots
from kvtrie.tiers.key_label import KEY_TOKENS
from kvtrie.tiers.keyed_disk import KeyedDisk

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KeyedKept"]


class KeyedKept(KeyedDisk):
    """Blocks by an engine's keys in a file in memory that the next process finds.

    Args:
        path: the file, in a memory file system.
        meaning: all that decides what the bytes are: model, layout, rank.
        size: bytes of a block.
        bytes: memory of all blocks, also as "20GB"; or
        blocks: how many blocks.
        replace: whether a file of another meaning is replaced; otherwise it is refused.
        clock: nanoseconds of the wall clock.

    Raises:
        ConfigError: no room for one block, neither or both of `bytes` and `blocks`, a path outside
            a memory file system, a file of another meaning.
        TransferError: the file system has no room.
    """

    def __init__(  # pyright: ignore[reportMissingSuperCall] - `_start` takes its place
        self,
        path: str | Path,
        *,
        meaning: str,
        size: int,
        bytes: int | str | None = None,  # noqa: A002 - the name that `Tier` has for it
        blocks: int | None = None,
        replace: bool = False,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        if (bytes is None) == (blocks is None):
            raise ConfigError(f"bytes is {bytes} and blocks is {blocks}: one of them wanted")
        file = Path(path_of("keep", path)).absolute()
        if bytes is not None:
            room = read_size("bytes of kept memory", bytes)
            blocks = room // size
            if not blocks:
                raise ConfigError(
                    f"a budget of {room} bytes has no room for a block of {size}: more wanted"
                    f"{forgotten(room)}"
                )
        assert blocks is not None  # noqa: S101 - one of the two was given
        about = f"kvtrie keyed blocks of {size} bytes: {meaning}"
        self._start(_opened(file, about, size, blocks, replace=replace), blocks, clock)


def _opened(path: Path, about: str, size: int, blocks: int, *, replace: bool) -> KeptSlots:
    """The file; memory that ends with this process if another one has the file."""
    check_memory(path, blocks * size)
    numbers = (1, size, KEY_TOKENS, blocks)
    file = open_kept_file(path, about, numbers, replace=replace)
    if file is not None:
        return KeptSlots(file, kept=True)
    own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    file = open_kept_file(own, about, numbers, replace=False)
    if file is None:
        raise ConfigError(f"{own} is in use by another process")
    own.unlink()
    return KeptSlots(file, kept=False)

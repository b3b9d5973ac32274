"""Kept files: opened, mapped, and as much memory as there is.

`docs/design/kept.md` describes them. Invariant: one process has a file's lock; a file in use or of
another meaning stays as it is. Cost: that of the system; seconds where a killed process still frees
its memory.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from kvtrie._kvtrie import KeptFile
from kvtrie.errors import ConfigError
from kvtrie.settings.sizes import free_memory

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "PATIENCE_S",
    "advise",
    "check_memory",
    "mapped",
    "open_kept_file",
    "open_kept_memory",
    "pool_of",
]

_LOG = logging.getLogger("kvtrie.tiers.kept")
PATIENCE_S = 10.0
"""Seconds that the system takes at most to free the memory of a killed process."""
_PAUSE_S = 0.02
_POPULATE_WRITE = 23  # of Linux, from 5.14 on


def pool_of(file: KeptFile, size: int, *, touch: bool) -> torch.Tensor:
    """Return the first bytes of the pool of a file, uint8; `touch` as of `advise`."""
    memory = mapped(file)
    advise(memory, touch=touch)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]


def mapped(file: KeptFile) -> mmap.mmap:
    """Map the pool of a file."""
    start, length = file.pool
    return mmap.mmap(file.descriptors[0], length - start, offset=start)


def advise(memory: mmap.mmap, *, touch: bool) -> None:
    """Ask for huge pages and, with `touch`, for all pages now; first copies would wait for them.

    The bytes of a file that is not made yet stay.
    """
    wanted = [getattr(mmap, "MADV_HUGEPAGE", None), _POPULATE_WRITE if touch else None]
    for advice in wanted:
        with suppress(OSError):  # a kernel without it
            if advice is not None:
                memory.madvise(advice)


def open_kept_memory(process: int, file: int, start: int, size: int) -> torch.Tensor:
    """Map the memory of a kept pool of another process of this machine, without its table.

    Args:
        process: that process, `file` its descriptor and `start` the pool's offset: the `address`
            of the pool.
        file: see `process`.
        start: see `process`.
        size: bytes of the pool.

    Raises:
        ConfigError: there is no such memory.
    """
    what = f"the kept file {file} of process {process}"
    try:
        found = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{what} cannot be opened: {error}") from error
    try:
        length = os.fstat(found).st_size
        if length < start + size:
            raise ConfigError(f"{what} has {length} bytes, at least {start + size} wanted")
        mapped = mmap.mmap(found, length - start, offset=start)
    finally:
        os.close(found)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:size]


def check_memory(path: Path, wanted: int) -> None:
    """Raise if a new file would take more memory than is free: the kernel would end a process."""
    try:
        there = path.stat().st_size
    except OSError:
        there = 0
    if there < wanted and wanted - there > (free := free_memory()):
        raise ConfigError(f"{path} takes {wanted} bytes of memory: {free} are free")


def open_kept_file(
    path: Path,
    about: str,
    numbers: tuple[int, int, int, int],
    *,
    replace: bool,
    patience_s: float = PATIENCE_S,
) -> KeptFile | None:
    """Open a file of layers, bytes of a layer, tokens of a block and blocks.

    One that is new, or whose blocks cannot be used, is made when the first block is written; closed
    before that, it is as it was.

    Args:
        path: the file.
        about: all that decides the bytes of its blocks.
        numbers: those four.
        replace: whether a file with something else is replaced.
        patience_s: seconds to wait for the lock of a process that has died.

    Returns:
        The file; None if another process has it, of which the log warns.

    Raises:
        ConfigError: a path outside a memory file system, a file with something else.
        TransferError: the file system has no room.
    """
    layers, layer_bytes, block_tokens, blocks = numbers
    until = time.monotonic() + patience_s
    while True:
        file, owner, dead = KeptFile.open(
            path,
            identity=hashlib.blake2b(about.encode(), digest_size=32).digest(),
            about=about,
            layers=layers,
            layer_bytes=layer_bytes,
            block_tokens=block_tokens,
            blocks=blocks,
            replace=replace,
        )
        if file is not None:
            return file
        # The system releases the lock of a killed process once its memory is freed.
        if not dead or time.monotonic() > until:
            break
        time.sleep(_PAUSE_S)
    _LOG.warning(
        "%s: %s writes there, so this process starts with a pool of its own and keeps no blocks",
        path,
        "another process" if owner is None else f"process {owner}",
    )
    return None

"""Opens and maps kept files within the available memory.

`docs/design/kept.md` describes the files.
Invariant: only one process has a file's lock. A file in use or with a different meaning is not
changed.
Cost: the system calls, and seconds while the system frees the memory of a killed process.
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
"""Maximum seconds for the system to free the memory of a killed process."""
_PAUSE_S = 0.02
_POPULATE_WRITE = 23  # Linux 5.14 or later


def pool_of(file: KeptFile, size: int, *, touch: bool) -> torch.Tensor:
    """Return the first bytes of a file's pool, uint8, with `touch` as in `advise`."""
    memory = mapped(file)
    advise(memory, touch=touch)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]


def mapped(file: KeptFile) -> mmap.mmap:
    """Map the pool of a file."""
    start, length = file.pool
    return mmap.mmap(file.descriptor, length - start, offset=start)


def advise(memory: mmap.mmap, *, touch: bool) -> None:
    """Request huge pages and, with `touch`, all pages now, so that first copies do not wait.

    The bytes of a file not yet created stay unchanged.
    """
    wanted = [getattr(mmap, "MADV_HUGEPAGE", None), _POPULATE_WRITE if touch else None]
    for advice in wanted:
        with suppress(OSError):  # a kernel without this advice
            if advice is not None:
                memory.madvise(advice)


def open_kept_memory(process: int, file: int, start: int, size: int) -> torch.Tensor:
    """Map the memory of a kept pool of another process on this machine, without its table.

    Args:
        process: the process. `process`, `file` and `start` are the `address` of the pool.
        file: the file descriptor in the process.
        start: the pool's offset.
        size: bytes of the pool.

    Raises:
        ConfigError: the memory does not exist.
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
    """Raise if a new file exceeds the free memory, because the kernel would kill a process."""
    try:
        existing = path.stat().st_size
    except OSError:
        existing = 0
    if existing < wanted and wanted - existing > (free := free_memory()):
        raise ConfigError(f"{path} takes {wanted} bytes of memory: {free} are free")


def open_kept_file(
    path: Path,
    about: str,
    numbers: tuple[int, int, int, int],
    *,
    replace: bool,
    patience_s: float = PATIENCE_S,
) -> KeptFile | None:
    """Open a file with given layers, bytes per layer, tokens per block and blocks.

    A new or unusable file is created at the first write of a block. Closing it before leaves the
    file unchanged.

    Args:
        path: the file.
        about: the meaning of the bytes of its blocks.
        numbers: layers, bytes per layer, tokens per block and blocks.
        replace: whether to replace a file with a different content.
        patience_s: seconds to wait for the lock of a dead process.

    Returns:
        The file, or None with a log warning if another process has it.

    Raises:
        ConfigError: the path is outside a memory file system, or the file has a different content.
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

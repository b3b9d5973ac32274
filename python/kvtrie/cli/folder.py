"""Folder: stores of disk tiers and files of kept host tiers, for `kvtrie disk`.

Invariant: a store in use by another writer is only read. A process started during a verification
or cleaning only reads, as with any writer. No link is followed below the folder.
Cost: `look` reads manifests. `verify` reads all bytes, with memory for one block. `clean` rewrites
manifests.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from kvtrie._kvtrie import DiskStore, Index, KeptFile
from kvtrie.cli import kept_file
from kvtrie.cli.found import Cleaned, Finding, Look, Row, Verified
from kvtrie.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from kvtrie.cli.parts import Part

__all__ = [
    "Cleaned",
    "Finding",
    "Look",
    "Row",
    "Verified",
    "clean",
    "finish_removals",
    "look",
    "stores",
    "verify",
]

_REMOVED = re.compile(r"[0-9a-f]{16}\.removed")
_LOCK = "lock"
_LINE = 64  # bytes read of a lock, with the process's name


def stores(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the readable stores in a folder, and the faults of unreadable stores.

    A file of a kept host tier counts as a store: in a folder, as the path itself, or as the files
    of all ranks or groups of layers for a path as in `keep`.

    Raises:
        ConfigError: there is no such folder, or no store in it.
        TransferError: the folder is unreadable.
    """
    if kept_file.is_file(folder):
        KeptFile.inspect(folder).close()
        return [folder], []
    if not folder.is_dir():
        if tables := kept_file.kept_at(folder):
            return tables, []
        raise ConfigError(f"there is no folder {folder}")
    found = DiskStore.stores(folder)
    kept = [path for path in sorted(folder.iterdir()) if kept_file.is_kept(path)]
    if not found and not kept:
        raise ConfigError(f"there is no store in {folder}")
    good = [store for store, why in found if why is None]
    return [*good, *kept], [why for _, why in found if why]


def look(store: Path, wall: int) -> Look:
    """Return the contents of a store, with ages as of `wall`, in nanoseconds.

    Raises:
        ConfigError: it has no good manifest.
        TransferError: it is unreadable.
    """
    if kept_file.is_file(store):
        return kept_file.look(store, wall)
    with closing(DiskStore.inspect(store)) as seen:
        rows = seen.blocks(wall)
        return Look(store, seen.about, seen.slots, seen.disk_bytes, _refusal(store), rows)


def verify(
    store: Path, wall: int, watch: Callable[[Sequence[Row]], Iterable[Row]] = iter
) -> Verified:
    """Read and verify every block, and remove damaged blocks if writing is allowed.

    Works block by block: Ctrl-C ends it between two blocks, and earlier removals stay.

    Args:
        store: the store's own folder.
        wall: the wall clock in nanoseconds.
        watch: iterates over the blocks, and may show the progress.

    Raises:
        ConfigError: it has no good manifest.
        TransferError: it is unreadable, or damaged blocks cannot be removed.
    """
    if kept_file.is_file(store):
        return kept_file.verify(store, wall, watch)
    with closing(_open(store)) as opened:
        rows = opened.blocks(wall)
        skipped = opened.reasons()
        damaged = _damaged(opened, watch(rows))
        if opened.read_only:
            # A writer may reuse slots meantime: only damage found twice is real.
            with closing(DiskStore.inspect(store)) as now:
                again = [row for row in now.blocks(wall) if row[:2] in damaged]
                persistent = now.reasons()
                damaged = _damaged(now, again)
            skipped = [reason for reason in skipped if reason in persistent]
            left = set(damaged)
        else:
            left = {row[:2] for row in opened.blocks(wall)}
            if damaged or skipped:
                opened.gc()
        why = opened.refusal
    findings = [Finding(None, None, reason, why is None) for reason in skipped]
    findings += [
        Finding(*block, reason, block not in left) for block, reason in sorted(damaged.items())
    ]
    return Verified(store, len(rows), why, findings)


def clean(
    store: Path, wall: int, older_than: int | None = None, part: Part | None = None
) -> Cleaned:
    """Free the space of free slots and dead entries, or remove the whole store.

    In a store of a later group of layers, also blocks without their block in the first group.

    Args:
        store: the store's own folder.
        wall: the wall clock in nanoseconds.
        older_than: nanoseconds. Removes the store if it has blocks and all are older. A model with
            several groups needs old blocks in all its stores.
        part: facts from the stores of all groups of its model.

    Raises:
        ConfigError: it has no good manifest.
        TransferError: it is unreadable or unwritable.
    """
    if not store.is_dir():
        return kept_file.clean(store, wall, older_than)
    with closing(DiskStore.inspect(store)) as seen:
        before = seen.disk_bytes
    with closing(_open(store)) as opened:
        if opened.read_only:
            return Cleaned(store, 0, removed=False, read_only=opened.refusal)
        age = min((row[4] for row in opened.blocks(wall)), default=None)
        if part is not None:
            age = part.age
        if older_than is None or age is None or age <= older_than:
            if part is not None and part.keys is not None:
                _keep_only(opened, part.keys, wall)
            opened.gc()
            freed = max(0, before - opened.disk_bytes)
            return Cleaned(store, freed, removed=False, read_only=None)
        opened.sync()
        if opened.read_only:  # it was moved, and its path has a new store or none
            return Cleaned(store, 0, removed=False, read_only=opened.refusal)
        # The rename is atomic, and the lock is held until then.
        gone = store.with_name(f"{store.name}.removed")
        try:
            store.rename(gone)
        except OSError as error:
            raise TransferError(f"removing {store}: {error.strerror}") from error
    _remove(gone)
    return Cleaned(store, before, removed=True, read_only=None)


def _keep_only(store: DiskStore, keys: frozenset[bytes], wall: int) -> None:
    """Free the slots of all blocks without one of these keys."""
    index = store.index(wall)
    kept = [row for row, key in zip(index, index.key, strict=True) if key.tobytes() in keys]
    if len(kept) < len(index):
        store.save(Index(kept), wall)


def finish_removals(folder: Path) -> int:
    """Finish interrupted removals of stores, and return the bytes freed.

    Raises:
        TransferError: a leftover file cannot be removed.
    """
    if not folder.is_dir():
        return 0
    left = [path for path in folder.iterdir() if _REMOVED.fullmatch(path.name)]
    return sum(_remove(path) for path in left if _is_folder(path))


def _remove(path: Path) -> int:
    """Remove a renamed store, its lock last. A folder without a lock is not a store."""
    files = sorted(path.iterdir(), key=lambda file: file.name == _LOCK)
    if files and files[-1].name != _LOCK:
        return 0
    try:
        freed = sum(512 * file.lstat().st_blocks for file in files)
        for file in files:
            if _is_folder(file):
                shutil.rmtree(file)
            else:
                file.unlink()
        path.rmdir()
    except OSError as error:
        raise TransferError(f"removing {path}: {error.strerror}") from error
    return freed


def _is_folder(path: Path) -> bool:
    """Return whether a path is a folder, not a link to a folder."""
    return path.is_dir() and not path.is_symlink()


def _open(store: Path) -> DiskStore:
    """Open a store as its writer, or read-only if writing is refused."""
    seen = DiskStore.inspect(store)
    identity = hashlib.blake2b(seen.about.encode(), digest_size=32).digest()
    if (wanted := identity[:8].hex()) != store.name:
        raise ConfigError(f"{store} is not the folder of what it holds, that would be {wanted}")
    return DiskStore(
        store.parent,
        identity=identity,
        about=seen.about,
        layers=seen.layers,
        layer_bytes=seen.layer_bytes,
        block_tokens=seen.block_tokens,
        blocks=seen.slots,
    )


def _refusal(store: Path) -> str | None:
    """Return the reason for a read-only store: another writer, or no permission."""
    lock = store / _LOCK
    try:
        found = lock.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            return f"{lock} is no file of its own; without it the store is read-only"
        with open(lock, "rb", opener=kept_file.without_waiting) as file:
            try:
                # Shared and for microseconds: readers do not block each other.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                who = file.read(_LINE).decode(errors="replace").strip()
                return f"{who or 'another process'} writes here"
    except OSError:
        pass
    return None if os.access(store, os.W_OK) else "nothing may be written here"


def _damaged(store: DiskStore, rows: Iterable[Row]) -> dict[tuple[int, bytes], str]:
    """Return slot and key of the unverified blocks, with the reason."""
    memory = np.empty((store.layers, store.layer_bytes), dtype=np.uint8)
    damaged: dict[tuple[int, bytes], str] = {}
    for slot, key, lo, hi, *_ in rows:
        try:
            store.read(key, slot, (lo, hi), memory[: hi - lo])
        except TransferError as error:
            damaged[slot, key] = str(error).removeprefix(f"slot {slot}: ")
    return damaged

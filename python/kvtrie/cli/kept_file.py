"""Kept file: the memory of a kept host tier, for `kvtrie disk`.

Invariant: a file locked by an engine is only read. Cost: `look` reads the table. `verify` reads all
bytes, with memory for one block.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrie._kvtrie import KeptFile
from kvtrie.cli.found import Cleaned, Finding, Look, Verified
from kvtrie.errors import TransferError
from kvtrie.model.group_pages import layer_digests, slot_start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from kvtrie.cli.found import Row

__all__ = ["clean", "is_file", "is_kept", "kept_at", "look", "verify", "without_waiting"]

_MAGIC = b"kvtrieK1"
_OWNER = 128  # offset of the writer's process in the header


def is_file(path: Path) -> bool:
    """Return whether a path is a file, not a link to a file."""
    return path.is_file() and not path.is_symlink()


def is_kept(path: Path) -> bool:
    """Return whether a path is the file of a kept host tier."""
    if not is_file(path):
        return False
    try:
        with open(path, "rb", opener=without_waiting) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def look(path: Path, wall: int) -> Look:
    """Return the contents of a kept file, with ages as of `wall`."""
    with closing(KeptFile.inspect(path)) as seen:
        size = 512 * path.stat().st_blocks
        return Look(path, seen.about, seen.slots, size, _writer(path), seen.blocks(wall))


def verify(path: Path, wall: int, watch: Callable[[Sequence[Row]], Iterable[Row]]) -> Verified:
    """Verify every block, as the writer, or without removals while an engine has the file."""
    taken, _, _ = _take(path)
    with closing(taken or KeptFile.inspect(path)) as opened:
        why = _writer(path) if taken is None else None
        if taken is None and why is None:
            why = "another process writes here"
        rows = opened.blocks(wall)
        lost = opened.lost.get("entry", 0)
        findings = [Finding(None, None, "an entry is damaged", why is None)] * lost
        for row in watch(rows):
            try:
                _verify(opened, row)
            except TransferError as error:
                # A writer may reuse slots meantime: only damage found twice is real.
                if taken is None and _changed(path, row, wall):
                    continue
                reason = str(error).removeprefix(f"slot {row[0]}: ")
                findings.append(Finding(*row[:2], reason, why is None))
        return Verified(path, len(rows), why, findings)


def _verify(file: KeptFile, row: Row) -> None:
    """Read a block and verify it. A group of layers has its blocks in the pages of all groups.

    Raises:
        TransferError: the block is damaged.
    """
    slot, key, *_ = row
    sizes = _sizes(file.about)
    if sizes is None:
        file.verify(slot, key)
        return
    layers = file.layers_to_verify(slot)
    if layers is None:
        return
    lo, hi = layers
    each = sizes[1] // file.layers
    try:
        with open(_pages(file.path), "rb", opener=without_waiting) as pages:
            pages.seek(slot_start(slot, *sizes) + lo * each)
            block = pages.read((hi - lo) * each)
    except OSError:
        block = b""
    block = block.ljust((hi - lo) * each, b"\0")  # pages may be cut or missing
    digests = np.frombuffer(layer_digests(block, hi - lo), np.uint8)
    file.verify_block(slot, key, digests.reshape(hi - lo, -1))


def _sizes(about: str) -> tuple[int, int] | None:
    """Return the bytes of a page and of a slot, for a table with its blocks in pages."""
    try:
        fields: dict[str, Any] = dict(json.loads(about))
        return int(fields["page_bytes"]), int(fields["slot_bytes"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def _changed(path: Path, row: Row, wall: int) -> bool:
    """Return whether a slot no longer has the block of a row, or the block is good by now."""
    with closing(KeptFile.inspect(path)) as now:
        if row[:2] not in {other[:2] for other in now.blocks(wall)}:
            return True
        try:
            _verify(now, row)
        except TransferError:
            return False
        return True


def clean(path: Path, wall: int, older_than: int | None) -> Cleaned:
    """Remove the file if all its blocks are older than `older_than`. It cannot shrink.

    The tables of a model's groups are removed together, with their pages.
    """
    tables = _tables_with(path)
    if not tables:  # removed with the table of another group
        return Cleaned(path, 0, removed=True, read_only=None)
    with ExitStack() as held:
        taken: list[KeptFile] = []
        for table in tables:
            file, _, _ = _take(table)
            if file is None:
                why = _writer(table) or "another process writes"
                return Cleaned(path, 0, removed=False, read_only=why)
            taken.append(held.enter_context(closing(file)))
        ages = [row[4] for file in taken for row in file.blocks(wall)]
        if older_than is None or not ages or min(ages) <= older_than:
            return Cleaned(path, 0, removed=False, read_only=None)
        # An engine opens pages only with the locks of all tables.
        pages = [] if tables == [path] and _sizes(taken[0].about) is None else [_pages(path)]
        freed = sum(map(_remove, filter(is_file, pages)))
        for table, file in zip(tables, taken, strict=True):
            freed += _remove(table, file.descriptor)
        return Cleaned(path, freed, removed=True, read_only=None)


def _remove(path: Path, descriptor: int | None = None) -> int:
    """Remove a file and return its bytes, if its path still leads to a descriptor's file.

    Raises:
        TransferError: the file cannot be removed.
    """
    try:
        found = path.lstat()
        if descriptor is not None and not os.path.samestat(found, os.fstat(descriptor)):
            return 0  # another process has replaced it
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise TransferError(f"removing {path}: {error.strerror}") from error
    return 512 * found.st_blocks


def _pages(table: Path) -> Path:
    """Return the pages of the table of a group."""
    return table.with_name(f"{table.name.rpartition('-group')[0]}-pages")


def _tables_with(path: Path) -> list[Path]:
    """Return the tables of all groups of a file's model, or the file alone."""
    base, named, _ = path.name.rpartition("-group")
    tables = kept_at(path.with_name(base)) if named else []
    return tables or ([path] if is_file(path) or not named else [])


def kept_at(path: Path) -> list[Path]:
    """Return the files made by engines for a `keep` path: of each rank, or of each group."""
    part = re.compile(re.escape(path.name) + r"-(group)?\d+")
    if not path.parent.is_dir():
        return []
    found = [file for file in path.parent.iterdir() if part.fullmatch(file.name)]
    return sorted(filter(is_kept, found))


def _take(path: Path) -> tuple[KeptFile | None, int | None, bool]:
    """Open a kept file with its lock, or return None while another process has the lock."""
    with closing(KeptFile.inspect(path)) as seen:
        return KeptFile.open(
            path,
            identity=seen.identity,
            about=seen.about,
            layers=seen.layers,
            layer_bytes=seen.layer_bytes,
            block_tokens=seen.block_tokens,
            blocks=seen.slots,
        )


def _writer(path: Path) -> str | None:
    """Return a description of the process with the lock of a kept file."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(_OWNER)
                return f"process {int.from_bytes(file.read(8), 'little')} writes here"
    except OSError:
        pass
    return None if os.access(path, os.W_OK) else "nothing may be written here"


def without_waiting(path: str, flags: int) -> int:
    """Open a descriptor, but no link, and no pipe with a missing other end."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

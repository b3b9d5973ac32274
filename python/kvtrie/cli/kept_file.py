"""Kept file: the memory of a kept host tier, as `kvtrie disk` looks at it and cleans it.

Invariant: a file that an engine has locked is only read. Cost: `look` reads the table; `verify`
reads all bytes, with memory for one block.
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
_OWNER = 128  # where the header has the writer's process


def is_file(path: Path) -> bool:
    """Whether it is a file and no link to one."""
    return path.is_file() and not path.is_symlink()


def is_kept(path: Path) -> bool:
    """Whether it is the file of a kept host tier."""
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
    """Prove every block, as the writer, or without removals while an engine has the file."""
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
                _prove(opened, row)
            except TransferError as error:
                # A writer uses slots again in the meantime: only what a second look shows is real.
                if taken is None and _changed(path, row, wall):
                    continue
                reason = str(error).removeprefix(f"slot {row[0]}: ")
                findings.append(Finding(*row[:2], reason, why is None))
        return Verified(path, len(rows), why, findings)


def _prove(file: KeptFile, row: Row) -> None:
    """Read a block and prove it; that of a group of layers is in the pages of all groups.

    Raises:
        TransferError: it is damaged.
    """
    slot, key, *_ = row
    sizes = _sizes(file.about)
    if sizes is None:
        file.verify(slot, key)
        return
    layers = file.to_prove(slot)
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
    block = block.ljust((hi - lo) * each, b"\0")  # pages that were cut or are not there
    digests = np.frombuffer(layer_digests(block, hi - lo), np.uint8)
    file.prove(slot, key, digests.reshape(hi - lo, -1))


def _sizes(about: str) -> tuple[int, int] | None:
    """Bytes of a page and of a slot, of a table whose blocks are in pages."""
    try:
        fields: dict[str, Any] = dict(json.loads(about))
        return int(fields["page_bytes"]), int(fields["slot_bytes"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def _changed(path: Path, row: Row, wall: int) -> bool:
    """Whether a slot no longer has the block of a row, or the block is good by now."""
    with closing(KeptFile.inspect(path)) as now:
        if row[:2] not in {other[:2] for other in now.blocks(wall)}:
            return True
        try:
            _prove(now, row)
        except TransferError:
            return False
        return True


def clean(path: Path, wall: int, older_than: int | None) -> Cleaned:
    """Remove the file if all blocks are older than `older_than`; no part can be given back.

    The tables of the groups of a model go together, and their pages with them.
    """
    tables = _tables_with(path)
    if not tables:  # gone with the table of another group
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
            freed += _remove(table, file.descriptors[0])
        return Cleaned(path, freed, removed=True, read_only=None)


def _remove(path: Path, descriptor: int | None = None) -> int:
    """Remove a file, if its path still leads to the one of a descriptor; returns its bytes.

    Raises:
        TransferError: it cannot be removed.
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
    """The pages of the table of a group."""
    return table.with_name(f"{table.name.rpartition('-group')[0]}-pages")


def _tables_with(path: Path) -> list[Path]:
    """The tables of all groups of a model, of which a file is one; or that file."""
    base, named, _ = path.name.rpartition("-group")
    tables = kept_at(path.with_name(base)) if named else []
    return tables or ([path] if is_file(path) or not named else [])


def kept_at(path: Path) -> list[Path]:
    """The files that engines made of a path given as `keep`: of each rank, or of each group."""
    part = re.compile(re.escape(path.name) + r"-(group)?\d+")
    if not path.parent.is_dir():
        return []
    found = [file for file in path.parent.iterdir() if part.fullmatch(file.name)]
    return sorted(filter(is_kept, found))


def _take(path: Path) -> tuple[KeptFile | None, int | None, bool]:
    """A kept file with its lock; None while another process has it."""
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
    """The process that has the lock of a kept file, in words."""
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
    """A descriptor of no link, and of no pipe that waits for its other end."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

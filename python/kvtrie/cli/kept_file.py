"""Kept file: the memory of a kept host tier, as `kvtrie disk` looks at it and cleans it.

Invariant: a file that an engine has locked is only read. Cost: `look` reads the table; `verify`
reads all bytes, with memory for one block.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import closing
from typing import TYPE_CHECKING

from kvtrie._kvtrie import KeptFile
from kvtrie.cli.found import Cleaned, Finding, Look, Verified
from kvtrie.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from kvtrie.cli.found import Row

__all__ = ["clean", "is_file", "is_kept", "look", "verify", "without_waiting"]

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
                opened.verify(*row[:2])
            except TransferError as error:
                # A writer uses slots again in the meantime: only what a second look shows is real.
                if taken is None and _changed(path, row, wall):
                    continue
                reason = str(error).removeprefix(f"slot {row[0]}: ")
                findings.append(Finding(*row[:2], reason, why is None))
        return Verified(path, len(rows), why, findings)


def _changed(path: Path, row: Row, wall: int) -> bool:
    """Whether a slot no longer has the block of a row, or the block is good by now."""
    with closing(KeptFile.inspect(path)) as now:
        if row[:2] not in {other[:2] for other in now.blocks(wall)}:
            return True
        try:
            now.verify(*row[:2])
        except TransferError:
            return False
        return True


def clean(path: Path, wall: int, older_than: int | None) -> Cleaned:
    """Remove the file if all blocks are older than `older_than`; no part can be given back."""
    taken, _, _ = _take(path)
    if taken is None:
        return Cleaned(path, 0, removed=False, read_only=_writer(path) or "another process writes")
    with closing(taken):
        ages = [row[4] for row in taken.blocks(wall)]
        if older_than is None or not ages or min(ages) <= older_than:
            return Cleaned(path, 0, removed=False, read_only=None)
        before = 512 * path.stat().st_blocks
        try:
            path.unlink()
            before += _remove_pages(path)
        except OSError as error:
            raise TransferError(f"removing {path}: {error.strerror}") from error
        return Cleaned(path, before, removed=True, read_only=None)


def _remove_pages(path: Path) -> int:
    """Remove the pages of groups of layers with the last of their tables; returns their bytes."""
    base, named, _ = path.name.rpartition("-group")
    pages = path.with_name(f"{base}-pages")
    if not named or not pages.is_file() or [*path.parent.glob(f"{base}-group*")]:
        return 0
    size = 512 * pages.stat().st_blocks
    pages.unlink()
    return size


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

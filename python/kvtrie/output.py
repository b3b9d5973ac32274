"""Output files: writing a file named by a user.

A regular file is replaced by a rename once all of it is written, so a failed run leaves the old
file or no file. A link's target is written in place, and the link stays. Named pipes and character
devices (`/dev/stdout`, `/dev/null`) are also written in place.
Invariant: no link, pipe or device is ever replaced. Sockets, folders and block devices are refused.
Cost: a write to a neighbouring name and a rename.
"""

from __future__ import annotations

import codecs
import os
import secrets
import stat
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path
    from typing import BinaryIO, TextIO

__all__ = ["check_output", "write_output", "writing", "writing_text"]

_REFUSED = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a block device"),
)
_LONGEST = 40  # characters of the path's name in a temporary name


def check_output(path: Path) -> None:
    """Refuse an unwritable output path, before the work for it begins.

    Raises:
        ConfigError: a folder, a socket or a block device, or no folder to write a new file in.
    """
    with _errors(path):
        _in_place(path)


def write_output(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a whole file, as `writing` does.

    Args:
        path: the file.
        content: text is written as UTF-8.
        durable: wait until a new file is on its device.

    Raises:
        ConfigError: the file is unwritable.
    """
    with writing(path, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def writing_text(path: Path) -> Generator[codecs.StreamWriter]:
    """Open an output as `writing` does, for text as UTF-8 with unchanged line ends.

    Raises:
        ConfigError: the file is unwritable.
    """
    with writing(path) as file:
        yield codecs.getwriter("utf-8")(file)


@contextmanager
def writing(path: Path, *, durable: bool = False) -> Generator[BinaryIO]:
    """Open a file for an output.

    Args:
        path: the file. A regular or new file takes the content when the block succeeds.
        durable: wait until a new file is on its device.

    Raises:
        ConfigError: the file is unwritable, or a folder, a socket or a block device.
        BrokenPipeError: the reader of a pipe has ended.
    """
    with _errors(path):
        own = _own(path)
        if own is not None:
            # A rename would take the file away from the shell that opened it.
            with os.fdopen(os.dup(own.fileno()), "wb") as file:
                own.flush()
                yield file
        elif _in_place(path):
            with path.open("wb") as file:
                yield file
        else:
            with _replacing(path, durable=durable) as file:
                yield file


@contextmanager
def _replacing(path: Path, *, durable: bool) -> Generator[BinaryIO]:
    """Open a file that takes the path's name and permissions when the block succeeds."""
    part = path.with_name(f".{path.name[:_LONGEST]}.{secrets.token_hex(4)}.part")
    opened = part.open("xb")
    try:
        with opened as file:
            with suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _in_place(path: Path) -> bool:
    """Return whether to write in place, not replace: a link, a pipe or a character device."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        path.parent.stat()
        return False
    linked = stat.S_ISLNK(mode)
    # Writing through a dangling link makes its target.
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode
    for refused, kind in _REFUSED:
        if refused(mode):
            raise ConfigError(
                f"cannot write {path}: it is {kind}; a file, a named pipe or a character device "
                "wanted"
            )
    return linked or not stat.S_ISREG(mode)


def _own(path: Path) -> TextIO | None:
    """Return the process's own standard output or error, if the path names it."""
    for own in (sys.stdout, sys.stderr):
        # Neither need be a file, nor need the path be there.
        with suppress(OSError, ValueError, AttributeError):
            if os.path.samestat(path.stat(), os.fstat(own.fileno())):
                return own
    return None


@contextmanager
def _errors(path: Path) -> Generator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error

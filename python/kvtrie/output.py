"""Output files: the one way in which the library writes a file that a user names.

A regular file is replaced by a rename once all of it is written, so a run that fails leaves the old
one, or none. Through a link the file that it names is written in place, and the link stays; so are
named pipes and character devices written (`/dev/stdout`, `/dev/null`).
Invariant: no link, pipe or device is ever replaced; sockets, folders and block devices are refused.
Cost: one write to a neighbouring name and a rename.
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
_LONGEST = 40  # of a name that a temporary name begins with


def check_output(path: Path) -> None:
    """Refuse a path that no output can be written to, before the work for it begins.

    Raises:
        ConfigError: a folder, a socket or a block device; no folder to write a new file in.
    """
    with _errors(path):
        _in_place(path)


def write_output(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a whole file, as `writing` does.

    Args:
        path: where.
        content: text is written as UTF-8.
        durable: wait until a new file is on its device.

    Raises:
        ConfigError: it cannot be written.
    """
    with writing(path, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def writing_text(path: Path) -> Generator[codecs.StreamWriter]:
    """As `writing`, for text as UTF-8 with line ends as they are given.

    Raises:
        ConfigError: it cannot be written.
    """
    with writing(path) as file:
        yield codecs.getwriter("utf-8")(file)


@contextmanager
def writing(path: Path, *, durable: bool = False) -> Generator[BinaryIO]:
    """A file to write an output into.

    Args:
        path: where. A regular file, or none, takes the content when the block ends well.
        durable: wait until a new file is on its device.

    Raises:
        ConfigError: it cannot be written; a folder, a socket or a block device.
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
    """A file that takes the path's name, and its permissions, when the block ends well."""
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
    """Whether what is there is written, not replaced: a link, a pipe or a character device."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        path.parent.stat()
        return False
    linked = stat.S_ISLNK(mode)
    # A link that leads nowhere makes a file where it leads.
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
    """The process's own standard output or error, if that is what the path names."""
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

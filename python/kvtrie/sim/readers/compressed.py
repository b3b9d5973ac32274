"""Open a trace as text, decompressing gzip and zstd, or for writing with compression by name.

The compression of a read file is detected from its first bytes, so its name does not matter and a
pipe works.
Invariant: an unreadable, damaged or truncated file raises a `ConfigError` with its name. Cost: a
pass over the file, and a buffer of the decompressor.
"""

from __future__ import annotations

import gzip
import importlib
import io
import sys
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from kvtrie.errors import ConfigError
from kvtrie.output import writing

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path
    from typing import BinaryIO

__all__ = ["compressed", "compressing", "open_trace"]

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"


def compressed(head: bytes) -> bool:
    """Return whether a file starting with these bytes is gzip or zstd."""
    return head.startswith((_GZIP, _ZSTD))


@contextmanager
def open_trace(path: Path) -> Generator[io.TextIOWrapper]:
    """Open a trace for reading as UTF-8. A byte order mark is skipped.

    Raises:
        ConfigError: the file cannot be opened, its compression or text is damaged or truncated
            (found while the caller reads), or no installed module reads zstd.
    """
    errors: tuple[type[Exception], ...] = (OSError, UnicodeDecodeError, zlib.error)
    try:
        with path.open("rb") as file:
            head, plain = file.peek(len(_ZSTD)), cast("Any", file)
            if head.startswith(_GZIP):
                plain = gzip.GzipFile(fileobj=file)
            elif head.startswith(_ZSTD):
                zstd = _zstd(path)
                plain, errors = zstd.ZstdFile(file), (*errors, zstd.ZstdError)
            with io.TextIOWrapper(plain, encoding="utf-8-sig") as text:
                yield text
    except EOFError:
        raise ConfigError(
            f"cannot read the trace {path}: its compressed data is cut short"
        ) from None
    except errors as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the trace {path}: {reason}") from error


@contextmanager
def compressing(path: Path) -> Generator[BinaryIO]:
    """Open a trace file for writing, compressed if its name ends in `.gz` or `.zst`.

    Raises:
        ConfigError: the file cannot be written, or no installed module writes zstd.
    """
    zstd = _zstd(path) if path.suffix == ".zst" else None
    with writing(path) as file:
        if zstd is not None:
            with zstd.ZstdFile(file, "wb") as packed:
                yield packed
        elif path.suffix == ".gz":
            with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
                yield cast("BinaryIO", packed)
        else:
            yield file


def _zstd(path: Path) -> Any:  # noqa: ANN401 - a module with two names
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"the trace {path} is compressed with zstd, which needs: pip install 'kvtrie[cli]'"
        ) from error

"""The back end `folder:`: a file per value in 256 subfolders of a possibly shared folder.

`folder:/path?ttl=SECONDS&io=direct`. A file is written under a staging name and linked under its
final name when complete, so several machines can share a folder on NFS, Lustre or Weka without
locks. Opening removes staging files older than an hour, because their writers have ended. With
`ttl`, a hit refreshes a file's time at most once per half of the `ttl`, and `kvtrie remote gc`
removes older files. Files and subfolders get the mode of the folder, so all users with write access
share it.
Invariant: no file changes after it was linked. Only files written by kvtrie are removed, as
recognised by their first bytes and name, and no link below the folder is followed.
Cost: an open per block. Bytes are copied directly between the file and pool memory, without the
interpreter lock.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvtrie._kvtrie import ValueFolder
from kvtrie.errors import ConfigError
from kvtrie.settings.argument import folder as path_of
from kvtrie.settings.argument import word
from kvtrie.tiers.remote.protocol import Result

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from kvtrie._kvtrie import ValueFormat
    from kvtrie.tiers.remote.protocol import Get, Outcome, Put
    from kvtrie.tiers.remote.url import RemoteUrl

__all__ = ["FolderStore", "Removed", "as_it_was", "collect"]

_NS = 1_000_000_000
_YEARS = 100 * 365 * 86_400.0
_STALE_S = 3_600.0  # a writer has ended if its file is not linked after an hour
_TTL = "ttl"
_MARKER = "kvtrie-values"  # the file marking a folder as a store


class FolderStore:
    """Values in the files of a folder.

    Args:
        url: `folder:` and a path, with options `ttl` in seconds and `io`, "direct" or "buffered".
        form: the format of the values.

    Raises:
        ConfigError: no path, an unknown option, a folder without write access, or foreign files in
            place of values.
    """

    def __init__(self, url: RemoteUrl, form: ValueFormat) -> None:
        url.only((_TTL, "io"))
        ttl = _ttl(url)
        io = word(f"option io of {url.scheme}:", url.options.get("io", "direct"), _IO)
        self._form = form
        self._files = ValueFolder(
            folder_of(url),
            header_bytes=form.header_bytes,
            value_bytes=form.value_bytes,
            ttl=None if ttl is None else int(ttl * _NS),
            io=io,
        )
        self._files.sweep(_ns(time.time() - _STALE_S))

    def exists_many(self, names: Sequence[bytes], deadline: int) -> list[Result]:
        """Check for files of these names with the length of a value."""
        return _results(self._files.exists_many(list(names), _left(deadline)))

    def get_many(self, rows: Sequence[Get], deadline: int) -> list[Result]:
        """Read headers and layers."""
        at = self._form.layer_at
        wanted = [(row.name, row.header, at(row.layers[0]), row.memory) for row in rows]
        return _results(self._files.get_many(wanted, _left(deadline)))

    def put_many(self, rows: Sequence[Put], deadline: int) -> list[Result]:
        """Write absent values."""
        values = [(row.name, row.header, row.memory) for row in rows]
        return _results(self._files.put_many(values, _left(deadline)))

    def remove_many(self, names: Sequence[bytes], deadline: int) -> list[Result]:
        """Remove files."""
        del deadline
        return _results(self._files.remove_many(list(names)))

    def path(self, name: bytes) -> Path:
        """Return the file of a value."""
        return self._files.path(name)

    def plain(self, name: bytes) -> object:
        """Return the bytes of a value, as read by Python alone."""
        return self.path(name).read_bytes()

    def close(self) -> None:
        """Do nothing, because no file stays open."""


_IO = ("direct", "buffered")


def folder_of(url: RemoteUrl) -> str:
    """Return the folder of a URL.

    Raises:
        ConfigError: the URL has a host, or no path.
    """
    if url.host or url.user or not url.path:
        raise ConfigError(f"{url} names no folder: folder:/path wanted")
    return path_of("the path of folder:", url.path)


@contextmanager
def as_it_was(url: RemoteUrl) -> Generator[None]:
    """Remove the marker and empty folders created by a first store in a folder, at the end.

    Blocks stored by other processes during the check stay, and the next open reads them.

    Args:
        url: the folder. An existing store is not changed.
    """
    root = Path(folder_of(url))
    if os.access(root / _MARKER, os.F_OK):
        yield
        return
    missing = [path for path in (root, *root.parents) if not os.access(path, os.F_OK)]
    before = _inside(root)
    try:
        yield
    finally:
        new = _inside(root) - before
        for path in (*new, *missing):
            with suppress(OSError):  # in use, or already removed
                path.unlink() if path.name == _MARKER else path.rmdir()


def _inside(folder: Path) -> set[Path]:
    """Return the entries of a folder, empty if unreadable, as reported by its store."""
    with suppress(OSError):
        return set(folder.iterdir())
    return set()


def _ttl(url: RemoteUrl) -> float | None:
    return url.seconds(_TTL, 1.0, _YEARS)


def _left(deadline: int) -> int:
    return max(0, deadline - time.monotonic_ns())


def _results(found: Iterable[tuple[str, str]]) -> list[Result]:
    return [Result(cast("Outcome", outcome), reason) for outcome, reason in found]


@dataclass(frozen=True, slots=True)
class Removed:
    """Files removed by `collect`.

    Attributes:
        expired: values older than the time to live.
        staged: files of writers ended before linking.
        bytes: bytes of both.
        kept: remaining values.
    """

    expired: int
    staged: int
    bytes: int
    kept: int


def collect(url: RemoteUrl, *, now: float | None = None) -> Removed:
    """Remove expired values and stale staging files of a folder, possibly in use.

    Args:
        url: the folder. Without its option `ttl` no value expires.
        now: seconds of the wall clock, by default the current time.

    Raises:
        ConfigError: the folder does not exist, or is no store of kvtrie.
    """
    url.only((_TTL, "io"))
    ttl = _ttl(url)
    now = time.time() if now is None else now
    expired, staged, size, kept = ValueFolder.collect(
        folder_of(url),
        expired=None if ttl is None else _ns(now - ttl),
        stale=_ns(now - _STALE_S),
    )
    return Removed(expired, staged, size, kept)


def _ns(seconds: float) -> int:
    return max(0, int(seconds * _NS))

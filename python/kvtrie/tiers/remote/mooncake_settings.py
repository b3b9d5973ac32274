"""Settings of a Mooncake client, read from a URL.

Invariant: a bad option is refused before the library is called.
Cost: a connection to the master's port.
"""

from __future__ import annotations

from pathlib import Path
from socket import create_connection
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError, TransferError
from kvtrie.settings.argument import whole

if TYPE_CHECKING:
    from kvtrie.tiers.remote.url import RemoteUrl

__all__ = ["reach", "settings_of"]

_PORT = 50051
_CONNECT_S = 2.0
_BUFFER = 16 << 20  # bytes of the library's own buffer, unused by our calls
_MOST_SEGMENT = 1 << 44
_OPTIONS = ("host", "segment_bytes", "disk", "protocol", "device", "metadata")


def settings_of(url: RemoteUrl) -> tuple[object, ...]:
    """Return the arguments of the library's `setup`.

    Raises:
        ConfigError: no master in the URL, an unknown option, an invalid size, a disk without
            memory, or a folder that cannot be created.
    """
    url.only(_OPTIONS)
    if not url.host:
        raise ConfigError(f"{url} names no master: mooncake://host:port wanted")
    options = url.options
    given = options.get("segment_bytes", "0")
    number: object = int(given) if given.isdecimal() else given
    lent = whole(f"option segment_bytes of {url.scheme}:", number, 0, _MOST_SEGMENT)
    master = f"{url.host}:{url.port or _PORT}"
    host, metadata = options.get("host", "127.0.0.1"), options.get("metadata", "P2PHANDSHAKE")
    protocol, device = options.get("protocol", "tcp"), options.get("device", "")
    disk = _disk(options.get("disk", ""), lent)
    return host, metadata, lent, _BUFFER, protocol, device, master, None, bool(disk), disk


def _disk(folder: str, lent: int) -> str:
    """Return the folder lent by this machine, or an empty text."""
    if not folder:
        return ""
    if not lent:
        raise ConfigError(
            "option disk of mooncake: needs segment_bytes, because Mooncake writes to a machine's "
            "disk only values that are in its memory"
        )
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"option disk of mooncake: {folder}: {error.strerror}") from error
    return folder


def reach(url: RemoteUrl) -> None:
    """Connect to the master's port, because the library would retry a closed port for 90 s.

    Raises:
        TransferError: the port is closed.
    """
    try:
        create_connection((url.host, url.port or _PORT), _CONNECT_S).close()
    except OSError as error:
        raise TransferError(f"the master of {url}: {error}") from error

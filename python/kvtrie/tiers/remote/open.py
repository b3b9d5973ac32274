"""Opens a store by the scheme of its URL, and reads the secret of a deployment.

`_OWN` names the back ends of this package. Further back ends register under the entry point group
`kvtrie.remote`.
Invariant: no error contains a secret or password.
Cost: an import of the selected back end.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError
from kvtrie.tiers.remote.protocol import RemoteStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrie._kvtrie import ValueFormat
    from kvtrie.tiers.remote.url import RemoteUrl

__all__ = ["open_store", "read_secret", "schemes"]

_GROUP = "kvtrie.remote"
_MOST_SECRET = 1 << 16
# Scheme: module, class, extra.
_OWN = {
    "folder": ("kvtrie.tiers.remote.folder", "FolderStore", ""),
    "redis": ("kvtrie.tiers.remote.redis", "RedisStore", "redis"),
    "rediss": ("kvtrie.tiers.remote.redis", "RedisStore", "redis"),
    "unix": ("kvtrie.tiers.remote.redis", "RedisStore", "redis"),
    "s3": ("kvtrie.tiers.remote.object", "ObjectStore", "object"),
    "gs": ("kvtrie.tiers.remote.object", "ObjectStore", "object"),
    "az": ("kvtrie.tiers.remote.object", "ObjectStore", "object"),
    "mooncake": ("kvtrie.tiers.remote.mooncake", "MooncakeStore", "mooncake"),
}


def schemes() -> list[str]:
    """Return the supported schemes in alphabetical order."""
    return sorted({*_OWN, *(entry.name for entry in entry_points(group=_GROUP))})


def open_store(url: RemoteUrl, form: ValueFormat) -> RemoteStore:
    """Open the store at a URL.

    Args:
        url: the place.
        form: the format of its values.

    Raises:
        ConfigError: an unknown scheme or option, or a setting refused by the store.
        TransferError: the store does not answer.
    """
    store = _factory(url)(url, form)
    if not isinstance(store, RemoteStore):
        raise ConfigError(f"the back end of {url.scheme}: is no RemoteStore")
    return store


def _factory(url: RemoteUrl) -> Callable[[RemoteUrl, ValueFormat], Any]:
    own = _OWN.get(url.scheme)
    if own is not None:
        module, name, extra = own
        try:
            return getattr(import_module(module), name)
        except ImportError as error:
            raise ConfigError(
                f"{url.scheme}: needs: pip install 'kvtrie[{extra}]' ({error})"
            ) from error
    for entry in entry_points(group=_GROUP, name=url.scheme):
        return entry.load()
    known = ", ".join(f"{scheme}:" for scheme in schemes())
    raise ConfigError(f"{url}: unknown scheme, one of {known} wanted")


def read_secret(path: str | None) -> bytes | None:
    """Read the secret in a file, stripped of white space, or None without a path.

    Raises:
        ConfigError: the file is missing, empty, or larger than 64 KiB.
    """
    if path is None:
        return None
    try:
        with Path(path).open("rb") as file:
            found = file.read(_MOST_SECRET + 1)
    except OSError as error:
        raise ConfigError(f"secret_file {path}: {error.strerror}") from error
    if len(found) > _MOST_SECRET:
        raise ConfigError(f"secret_file {path} has more than {_MOST_SECRET} bytes")
    secret = found.strip()
    if not secret:
        raise ConfigError(f"secret_file {path} is empty")
    return secret

"""Opening of a store by the scheme of its URL, and the secret of a deployment.

Back ends of this package are named in `_OWN`; others register under the entry point group
`kvtrie.remote`. Invariant: no secret and no password appears in an error. Cost: one import of the
back end that is used.
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
    """The schemes that can be opened, in alphabetical order."""
    return sorted({*_OWN, *(entry.name for entry in entry_points(group=_GROUP))})


def open_store(url: RemoteUrl, form: ValueFormat) -> RemoteStore:
    """Open the store at a URL.

    Args:
        url: the place.
        form: the format of its values.

    Raises:
        ConfigError: an unknown scheme or option, or a setting that the store refuses.
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
    """The secret in a file, without white space at its ends; None without a file.

    Raises:
        ConfigError: no such file, an empty one, or one above 64 KiB.
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

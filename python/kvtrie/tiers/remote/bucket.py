"""Access to a bucket through obstore: its client, and readable errors for bad settings.

Invariant: no error contains a credential from the environment or a signed query.
Cost: a client per store, and a request or two at opening.
"""

from __future__ import annotations

import re
import ssl
from datetime import timedelta
from pathlib import Path
from socket import create_connection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from kvtrie.errors import ConfigError, TransferError
from kvtrie.settings.argument import masked

if TYPE_CHECKING:
    from kvtrie.tiers.remote.url import RemoteUrl

__all__ = ["DENIED", "OPTIONS", "check_bucket", "client_of", "line_of"]

DENIED = (PermissionDeniedError, UnauthenticatedError)
"""Errors of a bucket with denied access."""

OPTIONS = {
    "s3": ("endpoint", "region", "ca", "connect_s"),
    "gs": ("endpoint", "ca", "connect_s"),
    "az": ("endpoint", "ca", "connect_s"),
}
"""Options of a URL, by scheme."""

_SETTINGS = {
    "s3": {"endpoint": "endpoint", "region": "region"},
    "gs": {"endpoint": "base_url"},
    "az": {"endpoint": "endpoint"},
}
"""Settings of obstore by scheme and option."""

_CONNECT_S = 2.0
_UNLIMITED = timedelta(days=1)  # the deadline of a call ends its requests

# A server may have closed an idle connection. A request notices only after sending.
_RETRIES: Any = {
    "max_retries": 2,
    "backoff": {
        "init_backoff": timedelta(milliseconds=5),
        "max_backoff": timedelta(milliseconds=50),
        "base": 2,
    },
}


def client_of(url: RemoteUrl) -> Any:  # noqa: ANN401 - one of several library classes
    """Return the library's client of a bucket, not yet connected."""
    if url.user or url.password:
        raise ConfigError(f"{url}: credentials come from the environment, not from the URL")
    if not url.host:
        raise ConfigError(f"{url} names no bucket")
    endpoint = url.options.get("endpoint")
    options: dict[str, Any] = {
        "timeout": _UNLIMITED,
        "connect_timeout": timedelta(seconds=url.seconds("connect_s", 1e-3, 600.0) or _CONNECT_S),
        "allow_http": endpoint is not None and urlsplit(endpoint).scheme == "http",
    }
    if (ca := url.options.get("ca")) is not None:
        try:
            options["root_certificate"] = Path(ca).read_bytes()
        except OSError as error:
            raise ConfigError(f"option ca of {url.scheme}: {ca}: {error.strerror}") from error
    place, config = _place(url)
    make: Any = from_url
    try:
        return make(
            place,
            config=config,
            client_options=options,
            retry_config=_RETRIES,
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(f"{url}: {line_of(error)}") from error


def _place(url: RemoteUrl) -> tuple[str, dict[str, str]]:
    """Return the URL in obstore's form, and its settings.

    Raises:
        ConfigError: an Azure account without a container.
    """
    names = _SETTINGS[url.scheme]
    config = {names[name]: value for name, value in url.options.items() if name in names}
    place = f"{url.scheme}://{url.host}{url.path}"
    if url.scheme == "az":  # obstore takes the account from its settings
        container, _, prefix = url.path.strip("/").partition("/")
        if not container:
            raise ConfigError(f"{url} names no container: az://account/container/prefix wanted")
        place, config["account_name"] = f"az://{container}/{prefix}", url.host
    return place, config


def _verify_certificate(url: RemoteUrl) -> None:
    """Raise if an endpoint's certificate is not trusted, because obstore has no error for it.

    Raises:
        ConfigError: the certificate is not accepted.
    """
    parts = urlsplit(url.options.get("endpoint", ""))
    if parts.scheme != "https" or parts.hostname is None:
        return
    context = ssl.create_default_context(cafile=url.options.get("ca"))
    try:
        with create_connection((parts.hostname, parts.port or 443), _CONNECT_S) as plain:
            context.wrap_socket(plain, server_hostname=parts.hostname).close()
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"{url}: {error}") from error
    except OSError:
        return  # no answer at all


async def check_bucket(url: RemoteUrl, client: Any, probe: str) -> None:  # noqa: ANN401 - as above
    """List the bucket before any write, because a server may create a missing bucket.

    Args:
        url: the bucket.
        client: the library's client of the bucket.
        probe: a name without an object.

    Raises:
        ConfigError: the bucket does not exist, or its certificate is not trusted.
        TransferError: the store does not answer.
    """
    try:
        library: Any = obstore  # its stubs use a type of another package
        await library.list_with_delimiter_async(client, probe)
    except BaseError as error:
        try:
            await obstore.head_async(client, probe)
        except FileNotFoundError:
            raise ConfigError(f"{url}: no such bucket, or it may not be listed") from error
        except DENIED:
            raise
        except BaseError as second:
            _verify_certificate(url)
            raise TransferError(line_of(second)) from second
        raise


def line_of(error: BaseException) -> str:
    """Return the first line of an error, without URL queries, which may be signed."""
    lines = str(error).splitlines() or [type(error).__name__]
    return masked(re.sub(r"\?\S+", "?...", lines[0]))[:300]

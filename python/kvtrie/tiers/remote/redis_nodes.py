"""Connections to a Redis server, or to the nodes of a cluster, made by the client library.

The library connects, authenticates, encrypts, and maps names to nodes.
Invariant: a connection serves a single call at a time. No text contains a password.
Cost: connecting, once per connection. For a cluster also its slot list, at opening and after a slot
moved.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException
from redis.retry import Retry

from kvtrie.errors import ConfigError, TransferError
from kvtrie.settings.argument import masked
from kvtrie.tiers.remote.resp import LateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.tiers.remote.url import RemoteUrl

__all__ = ["Nodes"]

_NS = 1_000_000_000
_CONNECT_S = 2.0
_PORT = 6379
_MOST_IDLE = 64  # connections per node
_OPTIONS = ("ttl", "password_file", "connect_s")
_PASSWORD = "KVTRIE_REDIS_PASSWORD"  # noqa: S105 - the name of a variable


class Nodes:
    """Connections by node. A single server is the node `""`.

    Args:
        url: the server, or with `cluster=1` any node of the cluster.

    Raises:
        ConfigError: an unknown option, a wrong password or certificate.
        TransferError: no server answers.
    """

    def __init__(self, url: RemoteUrl) -> None:
        url.only(
            _OPTIONS + {"rediss": ("ca", "cluster"), "unix": ("db",)}.get(url.scheme, ("cluster",))
        )
        self._url = url
        self._connect_s = url.seconds("connect_s", 1e-3, 600.0) or _CONNECT_S
        self._lock = threading.Lock()
        self._idle: dict[str, list[Any]] = {}
        self._closed = False
        self._moved = False
        self._pool, self._cluster = None, None
        if url.scheme != "unix" and url.flag("cluster"):
            self._cluster = self._opened(lambda: _cluster(url, self._connect_s))
        else:
            self._pool = _pool(url, self._connect_s)
            first, _ = self.take("", new=True)
            self._opened(lambda: _answers(first))
            self.release("", first)

    def of(self, names: Sequence[bytes]) -> dict[str, list[int]]:
        """Return the positions of names by their node.

        Raises:
            TransferError: a name has no node, or no node of the cluster answers.
        """
        if self._cluster is None or not names:
            return {"": list(range(len(names)))} if names else {}
        with self._lock:
            moved = self._moved
        if moved:
            self._opened(self._cluster.nodes_manager.initialize)
            with self._lock:
                self._moved = False
        found: dict[str, list[int]] = {}
        for at, name in enumerate(names):
            node = self._opened(partial(self._cluster.get_node_from_key, name))
            found.setdefault(node.name, []).append(at)
        return found

    def client(self) -> Any:  # noqa: ANN401 - one of several library classes
        """Return the library's own client, for comparison."""
        return self._cluster or redis.Redis(connection_pool=self._pool)

    def note_move(self) -> None:
        """Record a possibly moved slot, so that `of` reloads the slot list."""
        with self._lock:
            self._moved = True

    def take(self, node: str, *, new: bool, deadline: int | None = None) -> tuple[Any, bool]:
        """Return a connection to a node, and whether it is new.

        Raises:
            ConfigError: a wrong password or certificate.
            LateError: the deadline has passed.
            TransferError: the node does not answer.
        """
        with self._lock:
            if self._closed:
                raise TransferError("the store is closed")
            idle = self._idle.get(node)
            if idle and not new:
                return idle.pop(), False
        limit = self._connect_s
        if deadline is not None:
            limit = min(limit, (deadline - time.monotonic_ns()) / _NS)
            if limit <= 0:
                raise LateError
        pool = self._pool_of(node)
        settings = {**pool.connection_kwargs, "socket_timeout": limit}
        if self._url.scheme != "unix":
            settings["socket_connect_timeout"] = limit
        connection = pool.connection_class(**settings)
        self._opened(connection.connect)
        return connection, True

    def release(self, node: str, connection: Any) -> None:  # noqa: ANN401 - a library object
        """Keep a connection for the next call."""
        with self._lock:
            idle = self._idle.setdefault(node, [])
            if not self._closed and len(idle) < _MOST_IDLE:
                idle.append(connection)
                return
        connection.disconnect()

    def close(self) -> None:
        """Close the idle connections. Connections in use close with their call."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.disconnect()
        if self._cluster is not None:
            self._cluster.close()

    def _pool_of(self, node: str) -> Any:  # noqa: ANN401 - a library object
        if self._cluster is None:
            return self._pool
        found = self._cluster.get_node(node_name=node)
        if found is None:
            self.note_move()
            raise TransferError(f"node {node} has left the cluster")
        return self._cluster.get_redis_connection(found).connection_pool

    def _opened(self, call: Any) -> Any:  # noqa: ANN401 - a library object
        """Return the result of a connecting call, converting the library's errors."""
        try:
            return call()
        except redis.AuthenticationError as error:
            raise ConfigError(f"{self._url}: the password was refused") from error
        except (redis.RedisError, RedisClusterException) as error:
            text = masked(str(error))
            if _of(error, ssl.SSLCertVerificationError):
                raise ConfigError(f"{self._url}: {text}") from error
            if _of(error, redis.AuthenticationError):
                raise ConfigError(f"{self._url}: the password was refused") from error
            raise TransferError(text) from error


def _answers(connection: Any) -> None:  # noqa: ANN401 - a library object
    """Raise if a server requires a missing password, because connecting does not check it."""
    connection.send_command("PING")
    connection.read_response()


def _of(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Return whether an error was caused by an error of a kind."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error is not None


def _settings(url: RemoteUrl, connect_s: float) -> dict[str, Any]:
    """Return the library's settings for every connection."""
    return {
        "username": url.user or None,
        "password": _password(url),
        "protocol": 2,
        "socket_timeout": connect_s,
    }


def _pool(url: RemoteUrl, connect_s: float) -> redis.ConnectionPool:
    """Return the library's connection pool of a server."""
    settings: dict[str, Any] = _settings(url, connect_s)
    settings |= {"db": _database(url), "retry": Retry(NoBackoff(), 0)}
    if url.scheme == "unix":
        if not url.path:
            raise ConfigError(f"{url} names no socket: unix:///path wanted")
        kind: Any = redis.UnixDomainSocketConnection
        return redis.ConnectionPool(connection_class=kind, path=url.path, **settings)
    settings |= _network(url, connect_s)
    if url.scheme == "redis":
        return redis.ConnectionPool(**settings)
    return redis.ConnectionPool(connection_class=redis.SSLConnection, **settings, **_tls(url))


def _cluster(url: RemoteUrl, connect_s: float) -> Any:  # noqa: ANN401 - a library object
    """Return the library's client of a cluster."""
    if _database(url):
        raise ConfigError(f"the database of {url} is {_database(url)}, a cluster has only 0")
    tls = {"ssl": True, **_tls(url)} if url.scheme == "rediss" else {}
    kind: Any = redis.RedisCluster
    return kind(
        **_settings(url, connect_s),
        **_network(url, connect_s),
        **tls,
        retry=Retry(NoBackoff(), 0),
    )


def _network(url: RemoteUrl, connect_s: float) -> dict[str, Any]:
    if not url.host:
        raise ConfigError(f"{url} names no host")
    return {
        "host": url.host,
        "port": url.port or _PORT,
        "socket_connect_timeout": connect_s,
        "socket_keepalive": True,
    }


def _tls(url: RemoteUrl) -> dict[str, Any]:
    ca = url.options.get("ca")
    if ca is not None and not Path(ca).is_file():
        raise ConfigError(f"option ca of {url.scheme}: {ca} is no file")
    return {"ssl_ca_certs": ca, "ssl_cert_reqs": "required"}


def _database(url: RemoteUrl) -> int:
    local = url.scheme == "unix"
    given = url.options.get("db", "0") if local else url.path.strip("/") or "0"
    if not given.isdecimal():
        raise ConfigError(f"the database of {url} is {given!r}, a number wanted")
    return int(given)


def _password(url: RemoteUrl) -> str | None:
    path = url.options.get("password_file")
    if path is None:
        return url.password or os.environ.get(_PASSWORD) or None
    try:
        found = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"password_file {path}: {error}") from error
    if not found:
        raise ConfigError(f"password_file {path} is empty")
    return found

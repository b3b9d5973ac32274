"""The back end `redis://`, `rediss://` and `unix://`: values in Redis 6 or later, or Valkey.

`redis://user@host:port/db?ttl=SECONDS&password_file=PATH`; `rediss://` takes `ca=PATH` too. The
client library connects, authenticates and encrypts; commands and replies then go through its
socket straight from and into pool memory. A value is written by `SET NX PX`; a hit refreshes its
time to live at most once per half of it. Whole blocks are read by `GET`, parts by `GETRANGE`.
Invariant: one connection serves one call at a time, and none that failed is used again. Cost: one
round trip per call of several blocks, two for a write.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvtrie.argument import masked
from kvtrie.errors import ConfigError, TransferError
from kvtrie.tiers.remote.protocol import Result
from kvtrie.tiers.remote.resp import (
    LateError,
    RefusedError,
    Replies,
    UnreadableError,
    command,
    send,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from kvtrie._kvtrie import ValueFormat
    from kvtrie.tiers.remote.protocol import Get, Outcome, Put
    from kvtrie.tiers.remote.resp import Part
    from kvtrie.tiers.remote.url import RemoteUrl

__all__ = ["RedisStore"]

_Row = TypeVar("_Row")

_NS = 1_000_000_000
_MOST_VALUE = 512 << 20  # bytes, of any Redis string
_TTL_S = 86_400.0
_YEAR_S = 365 * 86_400.0
_CONNECT_S = 2.0
_PORT = 6379
_MOST_IDLE = 64  # connections
_MOST_REFRESHED = 1 << 17  # names
_OPTIONS = ("ttl", "password_file", "connect_s")
_PASSWORD = "KVTRIE_REDIS_PASSWORD"  # noqa: S105 - the name of a variable
_OUTCOMES: dict[str, Outcome] = {
    "OOM": "full",
    "MISCONF": "full",
    "NOAUTH": "refused",
    "NOPERM": "refused",
    "WRONGPASS": "refused",
    "READONLY": "refused",
    "WRONGTYPE": "damaged",
}


class RedisStore:
    """Values in a Redis or Valkey server.

    Args:
        url: the server; options `ttl` in seconds (a day), `password_file`, `connect_s` and, with
            TLS, `ca`. A password is also read from the variable KVTRIE_REDIS_PASSWORD.
        form: the format of the values.

    Raises:
        ConfigError: values above 512 MiB, an unknown option, a wrong password or certificate.
        TransferError: the server does not answer.
    """

    def __init__(self, url: RemoteUrl, form: ValueFormat) -> None:
        tls = url.scheme == "rediss"
        url.only((*_OPTIONS, "ca") if tls else (*_OPTIONS, "db") if _local(url) else _OPTIONS)
        if form.value_bytes > _MOST_VALUE:
            raise ConfigError(
                f"a block of {form.value_bytes} bytes, at most {_MOST_VALUE} fit a Redis value: "
                "use fewer tokens per block"
            )
        self._url, self._form = url, form
        self._ttl_ns = int((url.seconds("ttl", 1.0, _YEAR_S) or _TTL_S) * _NS)
        connect = url.seconds("connect_s", 1e-3, 600.0) or _CONNECT_S
        self._pool = _pool(url, connect)
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._refreshed: OrderedDict[bytes, int] = OrderedDict()
        self._closed = False
        self._release(self._connect())

    def exists_many(self, names: Sequence[bytes], deadline: int) -> list[Result]:
        """Whether there are values of these names."""

        def read(replies: Replies, _: bytes) -> Result:
            return Result("ok" if replies.number() else "missing")

        return self._each(names, lambda name: command(b"EXISTS", name), read, deadline)

    def get_many(self, rows: Sequence[Get], deadline: int) -> list[Result]:
        """Read headers and layers."""
        due = {row.name for row in rows if self._due(row.name)}
        expire = b"%d" % (self._ttl_ns // 1_000_000)

        def ask(row: Get) -> list[Part]:
            parts = self._ask(row)
            return parts + command(b"PEXPIRE", row.name, expire) if row.name in due else parts

        def read(replies: Replies, row: Get) -> Result:
            result = self._read(replies, row)
            if row.name in due:
                replies.number()
            return result

        return self._each(rows, ask, read, deadline)

    def put_many(self, rows: Sequence[Put], deadline: int) -> list[Result]:
        """Write values that are absent."""
        found = self.exists_many([row.name for row in rows], deadline)
        absent = [at for at, result in enumerate(found) if result.outcome == "missing"]
        expire = b"%d" % (self._ttl_ns // 1_000_000)

        def ask(row: Put) -> list[Part]:
            value = [row.header, row.memory.data.cast("B")]
            return command(b"SET", row.name, value, b"NX", b"PX", expire)

        def read(replies: Replies, _: Put) -> Result:
            replies.done()  # null where another process was first
            return Result("ok")

        written = self._each([rows[at] for at in absent], ask, read, deadline)
        for at, result in zip(absent, written, strict=True):
            found[at] = result
        return found

    def remove_many(self, names: Sequence[bytes], deadline: int) -> list[Result]:
        """Remove values."""

        def read(replies: Replies, _: bytes) -> Result:
            return Result("ok" if replies.number() else "missing")

        return self._each(names, lambda name: command(b"UNLINK", name), read, deadline)

    def close(self) -> None:
        """Close the connections that no call uses; others close with their call."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def _ask(self, row: Get) -> list[Part]:
        form, (lo, hi) = self._form, row.layers
        if form.layer_at(hi) - form.layer_at(lo) == form.value_bytes - form.header_bytes:
            return command(b"GET", row.name)
        ranges = ((0, form.header_bytes), (form.layer_at(lo), form.layer_at(hi)))
        parts: list[Part] = []
        for start, stop in ranges:
            parts += command(b"GETRANGE", row.name, b"%d" % start, b"%d" % (stop - 1))
        return parts

    def _read(self, replies: Replies, row: Get) -> Result:
        header, memory = row.header.data, row.memory.data.cast("B")
        if len(header) + len(memory) == self._form.value_bytes:
            return _string(replies, (header, memory))
        # A range of no value is empty, as is a range of an empty one.
        first = _string(replies, (header,), empty=Result("missing"))
        second = _string(replies, (memory,), empty=Result("missing"))
        return second if first.outcome == "ok" else first

    def _each(
        self,
        rows: Sequence[_Row],
        ask: Callable[[_Row], list[Part]],
        read: Callable[[Replies, _Row], Result],
        deadline: int,
    ) -> list[Result]:
        """Send a command per row on one connection, and read a result for each."""
        results: list[Result] = []
        if not rows:
            return results
        fresh = False
        while True:
            connection = None
            replies = None
            try:
                connection, fresh = self._take(new=fresh)
                sock: socket.socket = connection._sock  # noqa: SLF001 - there is no public name
                send(sock, [part for row in rows for part in ask(row)], deadline)
                replies = Replies(sock, deadline)
                for row in rows:
                    results.append(read(replies, row))  # noqa: PERF401 - those before an error count
            except RefusedError as error:
                # Most likely the others are refused too; a row has several replies.
                text = str(error)
                why = Result(_OUTCOMES.get(text.split(" ", 1)[0], "unreachable"), text)
            except LateError:
                why = Result("late", "the deadline passed")
            except (OSError, UnreadableError, TransferError) as error:
                # A server that was restarted has closed the connections that were idle.
                if connection is not None and not fresh and not (replies and replies.begun):
                    connection.disconnect()
                    fresh = True
                    continue
                why = Result("unreachable", f"{type(error).__name__}: {error}")
            else:
                self._release(connection)
                return results
            if connection is not None:
                connection.disconnect()
            return results + [why] * (len(rows) - len(results))

    def _take(self, *, new: bool) -> tuple[Any, bool]:
        """A connection, and whether it is new."""
        with self._lock:
            if self._closed:
                raise TransferError("the store is closed")
            if self._idle and not new:
                return self._idle.pop(), False
        return self._connect(), True

    def _release(self, connection: Any) -> None:  # noqa: ANN401 - of the library's several classes
        with self._lock:
            if not self._closed and len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
                return
        connection.disconnect()

    def _connect(self) -> Any:  # noqa: ANN401 - of the library's several classes
        connection = self._pool.connection_class(**self._pool.connection_kwargs)
        try:
            connection.connect()
        except redis.AuthenticationError as error:
            raise ConfigError(f"{self._url}: the password was refused") from error
        except redis.RedisError as error:
            text = masked(str(error))
            if "certificate" in text.lower():
                raise ConfigError(f"{self._url}: {text}") from error
            raise TransferError(text) from error
        return connection

    def _due(self, name: bytes) -> bool:
        """Whether a hit refreshes the time to live; notes that it does."""
        now = time.monotonic_ns()
        with self._lock:
            before = self._refreshed.get(name)
            if before is not None and now - before < self._ttl_ns // 2:
                return False
            self._refreshed[name] = now
            self._refreshed.move_to_end(name)
            if len(self._refreshed) > _MOST_REFRESHED:
                self._refreshed.popitem(last=False)
        return True


def _string(replies: Replies, parts: tuple[memoryview, ...], empty: Result | None = None) -> Result:
    """Read a string that has to fill memory."""
    length, wanted = replies.bulk(parts), sum(map(len, parts))
    if length is None:
        return Result("missing")
    if length == 0 and empty is not None:
        return empty
    if length != wanted:
        return Result("damaged", f"{length} bytes, {wanted} wanted")
    return Result("ok")


def _local(url: RemoteUrl) -> bool:
    return url.scheme == "unix"


def _pool(url: RemoteUrl, connect_s: float) -> redis.ConnectionPool:
    """The library's settings of a connection."""
    settings: dict[str, Any] = {
        "username": url.user or None,
        "password": _password(url),
        "db": _database(url),
        "protocol": 2,
        "socket_timeout": connect_s,
        "retry": Retry(NoBackoff(), 0),
    }
    if _local(url):
        if not url.path:
            raise ConfigError(f"{url} names no socket: unix:///path wanted")
        kind: Any = redis.UnixDomainSocketConnection
        return redis.ConnectionPool(connection_class=kind, path=url.path, **settings)
    if not url.host:
        raise ConfigError(f"{url} names no host")
    settings |= {"host": url.host, "port": url.port or _PORT}
    settings |= {"socket_connect_timeout": connect_s, "socket_keepalive": True}
    if url.scheme == "redis":
        return redis.ConnectionPool(**settings)
    ca = url.options.get("ca")
    if ca is not None and not Path(ca).is_file():
        raise ConfigError(f"option ca of {url.scheme}: {ca} is no file")
    return redis.ConnectionPool(
        connection_class=redis.SSLConnection, ssl_ca_certs=ca, ssl_cert_reqs="required", **settings
    )


def _database(url: RemoteUrl) -> int:
    given = url.options.get("db", "0") if _local(url) else url.path.strip("/") or "0"
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

"""HttpClient: JSON over HTTP to a service, with a deadline for the whole call.

Invariant: a call returns or raises by its deadline, however slow the service or the name look-up.
At most `MOST_ANSWER` bytes of an answer are read. A connection left in the middle of a call, or
with unexpected bytes, is not used again, so no call gets the answer of another. Cost: a system call
per piece. Connections are kept.
"""

from __future__ import annotations

import io
import json
import select
import socket
import ssl
import threading
import time
from collections import deque
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from kvtrie.cluster.resolver import Resolver
from kvtrie.errors import ConfigError
from kvtrie.printable import printable
from kvtrie.settings.argument import masked
from kvtrie.settings.argument import url as url_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["MOST_ANSWER", "CallError", "HttpClient", "Outcome"]

Outcome: TypeAlias = Literal["late", "unreachable", "invalid", "refused", "open"]

MOST_ANSWER = 4 << 20
"""Most bytes of an answer: the selection service's answer has about 20 per block of the prompt."""

_NS = 1_000_000_000
_MOST_KEPT = 16  # idle connections
_PORTS = {"http": 80, "https": 443}


class CallError(Exception):
    """A call without a usable answer.

    Args:
        outcome: "late" (no whole answer by the deadline), "unreachable", "invalid" (not HTTP, not
            JSON, too long or with an unexpected structure), "refused" (a status without success),
            or "open" (no call was made: the circuit breaker is open).
        reason: the reason, for a log.
        status: the HTTP status of "refused".
    """

    def __init__(self, outcome: Outcome, reason: str, status: int = 0) -> None:
        super().__init__(f"{outcome}: {reason}")
        self.outcome: Outcome = outcome
        self.reason = reason
        self.status = status


class _Place(NamedTuple):
    scheme: str
    host: str
    port: int
    path: str
    head: str


def _place(name: str, given: object) -> _Place:
    """Parse the URL of a service."""
    url = url_of(name, given)
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme.lower(), parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError(f"{name} is {masked(url)!r}: {error}") from None
    if scheme not in _PORTS:
        raise ConfigError(f"{name} is {masked(url)!r}: http:// or https:// wanted")
    plain = url.isascii() and " " not in url
    if not plain or not host or "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"{name} is {masked(url)!r}: a host, a port and a path wanted, no user and no query"
        )
    place = f"[{host}]" if ":" in host else host
    head = place if port is None else f"{place}:{port}"
    return _Place(scheme, host, port or _PORTS[scheme], parts.path.rstrip("/"), head)


class HttpClient:
    """Calls of a service from several threads.

    Args:
        url: `http://HOST:PORT`, or https, with a path prefix if the service has one.
        name: the setting, for messages.

    Attributes:
        url: the URL.
        breaks: failed or broken connections: the service may have restarted.

    Raises:
        ConfigError: an unknown scheme, no host, a user, a query.
    """

    def __init__(self, url: str, *, name: str = "url") -> None:
        self._at = _place(name, url)
        self.url = str(url)
        self.breaks = 0
        self._lock = threading.Lock()
        self._kept: deque[_Connection] = deque()
        self._resolver = Resolver(self._at.host, self._at.port)
        self._tls = ssl.create_default_context() if self._at.scheme == "https" else None

    def call(self, method: str, path: str, body: object, until: int) -> Any:  # noqa: ANN401 - JSON
        """Make a call.

        Args:
            method: as "POST".
            path: the path below the URL's path, with its query.
            body: the value to send as JSON. None sends no body.
            until: the deadline, in nanoseconds of `time.monotonic_ns`.

        Returns:
            The value of the JSON answer, None for an empty answer.

        Raises:
            CallError: no answer in time, no answer at all, or no success.
        """
        request = self._request(method, path, body)
        try:
            status, answer = self._exchange(request, method, until)
        except TimeoutError as error:
            self._broke()
            raise CallError("late", f"{method} {path}: no answer by the deadline") from error
        except (OSError, EOFError) as error:
            self._broke()
            raise CallError("unreachable", f"{method} {path}: {error}") from error
        except HTTPException as error:
            raise CallError("invalid", f"{method} {path}: {printable(repr(error))}") from error
        if not 200 <= status < 300:  # noqa: PLR2004 - success
            text = answer[:200].decode("utf-8", "replace")
            raise CallError("refused", f"{method} {path}: {status} {text}", status)
        if not answer:
            return None
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise CallError("invalid", f"{method} {path}: no JSON: {error}") from error

    def close(self) -> None:
        """Close the idle connections."""
        self._drop_kept()

    def _request(self, method: str, path: str, body: object) -> bytes:
        sent = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        lines = [f"{method} {self._at.path}{path} HTTP/1.1", f"Host: {self._at.head}"]
        lines += ["Accept: application/json", f"Content-Length: {len(sent)}"]
        if sent:
            lines.append("Content-Type: application/json")
        return "\r\n".join([*lines, "", ""]).encode() + sent

    def _exchange(self, request: bytes, method: str, until: int) -> tuple[int, bytes]:
        """Send a request over a kept connection if there is one, and else over a new connection."""
        with self._lock:
            connection = self._kept.pop() if self._kept else None
        if connection is not None and not connection.idle():
            connection.close()
            connection = None
            self._broke()
        if connection is not None:
            try:
                return self._over(connection, request, method, until)
            except ConnectionError:
                # A service may close an idle connection at any time, without an answer. Its
                # reservations are named, so repeating a request reserves nothing twice.
                self._broke()
        connection = _Connection(self._resolver, self._tls, self._at.host, until)
        return self._over(connection, request, method, until)

    def _over(
        self, connection: _Connection, request: bytes, method: str, until: int
    ) -> tuple[int, bytes]:
        done = False
        try:
            connection.send(request, until)
            status, answer, done = connection.answer(method, until)
        finally:
            with self._lock:
                done = done and len(self._kept) < _MOST_KEPT
                if done:
                    self._kept.append(connection)
            if not done:
                connection.close()
        return status, answer

    def _broke(self) -> None:
        with self._lock:
            self.breaks += 1
        self._drop_kept()

    def _drop_kept(self) -> None:
        with self._lock:
            kept, self._kept = self._kept, deque()
        for connection in kept:
            connection.close()


class _Connection:
    """A connection to the first accepting address of a host."""

    def __init__(
        self, resolver: Resolver, tls: ssl.SSLContext | None, host: str, until: int
    ) -> None:
        failed: OSError | None = None
        for family, address in resolver.addresses(until):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                _limit(sock, until)
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if tls is not None:
                    _limit(sock, until)
                    sock = tls.wrap_socket(sock, server_hostname=host)
            except BaseException as error:
                sock.close()
                resolver.forget()  # the host may have a new address by now
                if not isinstance(error, OSError) or isinstance(error, TimeoutError):
                    raise
                failed = error
            else:
                self._sock = sock
                return
        raise failed or OSError(f"{host} has no address")

    def send(self, request: bytes, until: int) -> None:
        rest = memoryview(request)
        while rest:
            _limit(self._sock, until)
            rest = rest[self._sock.send(rest) :]

    def answer(self, method: str, until: int) -> tuple[int, bytes, bool]:
        """Return status and body, and whether the connection can be kept."""
        pieces = _Pieces(self._sock, until)
        response = HTTPResponse(pieces, method=method)  # pyright: ignore[reportArgumentType]
        response.begin()
        if response.length is None and not response.chunked:
            raise EOFError("an answer without a length")  # for example, its head was cut
        body = response.read(MOST_ANSWER + 1)
        if len(body) > MOST_ANSWER:
            raise HTTPException(f"an answer of more than {MOST_ANSWER} bytes")
        if response.length:
            raise EOFError(f"{response.length} bytes of the answer are missing")
        return response.status, body, not response.will_close

    def idle(self) -> bool:
        """Return whether the service has neither closed the connection nor sent extra bytes."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        self._sock.close()


class _Pieces(io.RawIOBase):
    """Bytes of a socket, awaited until the deadline of the call."""

    def __init__(self, sock: socket.socket, until: int) -> None:
        super().__init__()
        self._sock, self._until = sock, until

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return the reader of an `HTTPResponse` that uses this object as its socket."""
        del mode
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        _limit(self._sock, self._until)
        return self._sock.recv_into(buffer)


def _limit(sock: socket.socket, until: int) -> None:
    left = until - time.monotonic_ns()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    sock.settimeout(max(left / _NS, 1e-3))

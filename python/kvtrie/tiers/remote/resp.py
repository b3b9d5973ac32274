"""RESP: Redis requests and replies, directly between the socket and pool memory.

Invariant: the remaining time is set before every send and receive, so a whole call keeps its
deadline. Lengths are checked before memory is used. After an error the connection is not reused.
Cost: a system call per piece in the socket, and a copy of only a few KiB per reply.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

__all__ = ["LateError", "RefusedError", "Replies", "UnreadableError", "command", "send"]

Part: TypeAlias = "bytes | memoryview"

_NS = 1_000_000_000
_BUFFER = 4096
_LINE = 1024
_JOINED = 1 << 14  # parts up to this size are sent together


class LateError(Exception):
    """The deadline passed."""


class UnreadableError(Exception):
    """The server closed the connection or sent an invalid reply."""


class RefusedError(Exception):
    """The server answered with an error text beginning with a code."""

    @property
    def code(self) -> str:
        """The code, for example "OOM"."""
        return str(self).partition(" ")[0]

    @property
    def node(self) -> str:
        """The last word: the node named by an `ASK`."""
        return str(self).rpartition(" ")[2]


def command(*arguments: bytes | Sequence[Part]) -> list[Part]:
    """Return the parts of a command. An argument may consist of several parts."""
    parts: list[Part] = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        pieces = [argument] if isinstance(argument, bytes) else argument
        parts += [b"$%d\r\n" % sum(len(piece) for piece in pieces), *pieces, b"\r\n"]
    return parts


def send(sock: socket.socket, parts: Sequence[Part], deadline: int) -> None:
    """Send parts, joining small parts.

    Raises:
        LateError: the deadline passed in the middle of a command.
        OSError: the connection failed.
    """
    small = bytearray()
    for part in parts:
        if len(part) <= _JOINED:
            small += part
            continue
        _send(sock, memoryview(small), deadline)
        small = bytearray()
        _send(sock, memoryview(part), deadline)
    _send(sock, memoryview(small), deadline)


def _send(sock: socket.socket, rest: memoryview, deadline: int) -> None:
    while rest:
        _limit(sock, deadline)
        try:
            rest = rest[sock.send(rest) :]
        except TimeoutError as error:
            raise LateError from error


def _limit(sock: socket.socket, deadline: int) -> None:
    left = deadline - time.monotonic_ns()
    if left <= 0:
        raise LateError
    sock.settimeout(max(left / _NS, 1e-3))


class Replies:
    """Replies of a connection, in the order of its commands.

    Args:
        sock: the connection.
        deadline: of all replies, in nanoseconds of `time.monotonic_ns`.
        asking: whether an `ASKING` was sent before each command.
    """

    def __init__(self, sock: socket.socket, deadline: int, *, asking: bool = False) -> None:
        self._sock = sock
        self._deadline = deadline
        self._asking = asking
        self._bytes = bytearray(_BUFFER)
        self._buffer = memoryview(self._bytes)
        self._begin = 0
        self._end: int = 0
        self.begun = False

    def number(self) -> int:
        """Read an integer reply."""
        line = self._first()
        if line[:1] != b":":
            raise UnreadableError(f"an integer wanted, not {line[:20]!r}")
        return _integer(line)

    def done(self) -> bool:
        """Read a reply and return whether the command was executed: `OK`, or null if not."""
        line = self._first()
        if line == b"+OK":
            return True
        if line in {b"$-1", b"_", b"*-1"}:
            return False
        raise UnreadableError(f"OK wanted, not {line[:20]!r}")

    def bulk(self, parts: Sequence[memoryview]) -> int | None:
        """Read a string into memory and return its length, or None for a missing value.

        A string of a different length than the memory is read to its end and dropped.
        """
        line = self._first()
        if line in {b"$-1", b"_"}:
            return None
        if line[:1] != b"$":
            raise UnreadableError(f"a string wanted, not {line[:20]!r}")
        length = _integer(line)
        if length < 0:
            raise UnreadableError(f"a string of {length} bytes")
        if length == sum(len(part) for part in parts):
            for part in parts:
                self._fill(part)
        else:
            self._skip(length)
        self._skip(2)
        return length

    def _first(self) -> bytes:
        """Return the first line of the reply to a command."""
        if self._asking and (line := self._line()) != b"+OK":
            raise UnreadableError(f"OK wanted, not {line[:20]!r}")
        return self._line()

    def _line(self) -> bytes:
        """Return a line without its end.

        Raises:
            RefusedError: the line is an error.
        """
        line = b""
        while not line.endswith(b"\r\n"):
            if len(line) > _LINE:
                raise UnreadableError(f"a line of more than {_LINE} bytes")
            self._refill()
            # The end may be split between two pieces.
            stop = self._bytes.find(b"\n", self._begin, self._end) + 1 or self._end
            line += self._bytes[self._begin : stop]
            self._begin = stop
        self.begun = True
        if line[:1] == b"-":
            raise RefusedError(line[1:-2].decode("utf-8", "replace"))
        return line[:-2]

    def _refill(self) -> None:
        """Receive the next bytes if the buffer is empty."""
        if self._begin == self._end:
            self._begin, self._end = 0, self._receive(self._buffer)

    def _fill(self, memory: memoryview) -> None:
        count = min(len(memory), self._end - self._begin)
        memory[:count] = self._buffer[self._begin : self._begin + count]
        self._begin += count
        rest = memory[count:]
        while rest:
            rest = rest[self._receive(rest) :]

    def _skip(self, length: int) -> None:
        while length:
            # Also receives the first bytes of the next reply.
            self._refill()
            count = min(length, self._end - self._begin)
            self._begin += count
            length -= count

    def _receive(self, memory: memoryview) -> int:
        _limit(self._sock, self._deadline)
        try:
            count: int = self._sock.recv_into(memory)
        except TimeoutError as error:
            raise LateError from error
        if not count:
            raise UnreadableError("the server closed the connection")
        return count


def _integer(line: bytes) -> int:
    try:
        return int(line[1:])
    except ValueError:
        raise UnreadableError(f"a number wanted, not {line[:20]!r}") from None

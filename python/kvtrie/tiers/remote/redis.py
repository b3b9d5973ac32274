"""The back end `redis://`, `rediss://` and `unix://`: values in Redis 6 or later, or Valkey.

`redis://user@host:port/db?ttl=SECONDS&password_file=PATH`. `rediss://` also takes `ca=PATH`, and
both take `cluster=1`. The client library connects, authenticates, encrypts and chooses the node of
a cluster (`redis_nodes`). Commands and replies then go through its socket directly from and to pool
memory. A value is written by `SET NX PX`. A hit refreshes its time to live at most once per half of
it. Whole blocks are read by `GET`, parts by `GETRANGE`. A block is verified on its arrival, while
the server sends the next blocks.
Invariant: a failed connection is not reused.
Cost: a round trip per node and call of several blocks, two for a write. Reads of whole blocks need
a round trip per 4 MiB of replies.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

from kvtrie.errors import ConfigError, TransferError
from kvtrie.tiers.remote.protocol import Result
from kvtrie.tiers.remote.redis_nodes import Nodes
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

_Row = TypeVar("_Row", "bytes", "Get", "Put")

_NS = 1_000_000_000
_MOST_VALUE = 512 << 20  # maximum bytes of any Redis string
_TTL_S = 86_400.0
_YEAR_S = 365 * 86_400.0
_AHEAD = 4 << 20  # bytes of replies requested ahead, because a server buffers them in new memory
_MOST_REFRESHED = 1 << 17  # names
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
        url: the server, with options `ttl` in seconds (a day), `password_file`, `connect_s`,
            `cluster` and, with TLS, `ca`. A password is also read from the variable
            KVTRIE_REDIS_PASSWORD.
        form: the format of the values.

    Raises:
        ConfigError: values above 512 MiB, an unknown option, a wrong password or certificate.
        TransferError: the server does not answer.
    """

    def __init__(self, url: RemoteUrl, form: ValueFormat) -> None:
        if form.value_bytes > _MOST_VALUE:
            raise ConfigError(
                f"a block of {form.value_bytes} bytes, at most {_MOST_VALUE} fit a Redis value: "
                "use fewer tokens per block"
            )
        self._form = form
        self._ttl_ns = int((url.seconds("ttl", 1.0, _YEAR_S) or _TTL_S) * _NS)
        self._nodes = Nodes(url)
        self._lock = threading.Lock()
        self._refreshed: OrderedDict[bytes, int] = OrderedDict()

    def exists_many(self, names: Sequence[bytes], deadline: int) -> list[Result]:
        """Check for values of these names."""

        def read(replies: Replies, _: bytes) -> Result:
            return Result("ok" if replies.number() else "missing")

        return self._each(names, lambda name: [command(b"EXISTS", name)], read, deadline)

    def get_many(self, rows: Sequence[Get], deadline: int) -> list[Result]:
        """Read headers and layers."""
        refreshed = {row.name for row in rows if self._refreshes(row.name)}
        expire = b"%d" % (self._ttl_ns // 1_000_000)

        def ask(row: Get) -> list[list[Part]]:
            more = [command(b"PEXPIRE", row.name, expire)] if row.name in refreshed else []
            return self._ask(row) + more

        def read(replies: Replies, row: Get) -> Result:
            result = self._read(replies, row)
            if row.name in refreshed:
                replies.number()
            if result.outcome == "ok":
                row.arrived()
            return result

        ahead = max(2, _AHEAD // self._form.value_bytes)
        return self._each(rows, ask, read, deadline, ahead=ahead)

    def put_many(self, rows: Sequence[Put], deadline: int) -> list[Result]:
        """Write absent values."""
        found = self.exists_many([row.name for row in rows], deadline)
        absent = [at for at, result in enumerate(found) if result.outcome == "missing"]
        expire = b"%d" % (self._ttl_ns // 1_000_000)

        def ask(row: Put) -> list[list[Part]]:
            value = [row.header, row.memory.data.cast("B")]
            return [command(b"SET", row.name, value, b"NX", b"PX", expire)]

        def read(replies: Replies, _: Put) -> Result:
            replies.done()  # null if another process was first
            return Result("ok")

        written = self._each([rows[at] for at in absent], ask, read, deadline)
        for at, result in zip(absent, written, strict=True):
            found[at] = result
        return found

    def remove_many(self, names: Sequence[bytes], deadline: int) -> list[Result]:
        """Remove values."""

        def read(replies: Replies, _: bytes) -> Result:
            return Result("ok" if replies.number() else "missing")

        return self._each(names, lambda name: [command(b"UNLINK", name)], read, deadline)

    def plain(self, name: bytes) -> object:
        """Return the bytes of a value, as read by the client library alone."""
        return self._nodes.client().get(name)

    def close(self) -> None:
        """Close the idle connections. Connections in use close with their call."""
        self._nodes.close()

    def _ask(self, row: Get) -> list[list[Part]]:
        form, (lo, hi) = self._form, row.layers
        if form.layer_at(hi) - form.layer_at(lo) == form.value_bytes - form.header_bytes:
            return [command(b"GET", row.name)]
        ranges = ((0, form.header_bytes), (form.layer_at(lo), form.layer_at(hi)))
        return [
            command(b"GETRANGE", row.name, b"%d" % start, b"%d" % (stop - 1))
            for start, stop in ranges
        ]

    def _read(self, replies: Replies, row: Get) -> Result:
        header, memory = row.header.data, row.memory.data.cast("B")
        if len(header) + len(memory) == self._form.value_bytes:
            return _string(replies, (header, memory))
        # The range of a missing value is empty, as is a range of an empty value.
        first = _string(replies, (header,), empty=Result("missing"))
        second = _string(replies, (memory,), empty=Result("missing"))
        return second if first.outcome == "ok" else first

    def _each(
        self,
        rows: Sequence[_Row],
        ask: Callable[[_Row], list[list[Part]]],
        read: Callable[[Replies, _Row], Result],
        deadline: int,
        *,
        ahead: int | None = None,
    ) -> list[Result]:
        """Send the commands of each row to its node, and read a result for each row.

        At most `ahead` rows of commands, or all, are sent before reading the reply to their first
        row.
        """
        results = [Result("unreachable")] * len(rows)
        rest, tried = list(range(len(rows))), False
        while rest:
            again: list[int] = []
            moved = False
            for node, positions in self._nodes.of([_name(rows[at]) for at in rest]).items():
                part = [rest[at] for at in positions]
                part_rows = [rows[at] for at in part]
                found, why, refused = self._at_node(
                    node, part_rows, ask, read, deadline, ahead=ahead or len(part_rows)
                )
                lacking = part[len(found) :]
                for at, result in zip(part, found + [why] * len(lacking), strict=True):
                    results[at] = result
                if lacking and why.outcome == "unreachable":
                    self._nodes.note_move()
                if refused is not None and refused.code == "ASK":
                    # Only the slot of this row is moving to that node. The next rows are unknown.
                    at, *more = lacking
                    one, why, _ = self._at_node(
                        refused.node, [rows[at]], ask, read, deadline, ahead=1, asking=True
                    )
                    results[at] = one[0] if one else why
                    again += more
                elif refused is not None and refused.code == "MOVED" and not tried:
                    again, moved = again + lacking, True
            rest, tried = again, tried or moved
        return results

    def _at_node(
        self,
        node: str,
        rows: Sequence[_Row],
        ask: Callable[[_Row], list[list[Part]]],
        read: Callable[[Replies, _Row], Result],
        deadline: int,
        *,
        ahead: int,
        asking: bool = False,
    ) -> tuple[list[Result], Result, RefusedError | None]:
        """Send the commands of each row on a single connection.

        Args:
            node: the node.
            rows: the requests.
            ask: returns the commands of a row.
            read: reads the replies of a row.
            deadline: of the whole call.
            ahead: rows of commands sent before reading the replies to their first row.
            asking: whether to send `ASKING` before each command, because the slot is moving to the
                node.

        Returns:
            The results of leading rows, the result for all other rows, and the server's error, if
            any.
        """
        results: list[Result] = []
        fresh, refused = False, None
        while True:
            connection = None
            replies = None
            try:
                connection, fresh = self._nodes.take(node, new=fresh, deadline=deadline)
                sock: socket.socket = connection._sock  # noqa: SLF001 - without a public name
                replies, sent = Replies(sock, deadline, asking=asking), 0
                for at, row in enumerate(rows):
                    more = rows[sent : at + ahead]
                    send(sock, _parts([ask(one) for one in more], asking=asking), deadline)
                    sent += len(more)
                    results.append(read(replies, row))
            except RefusedError as error:
                # The next rows are probably refused too, and a row has several replies.
                refused = error
                why = Result(_OUTCOMES.get(error.code, "unreachable"), str(error))
            except LateError:
                why = Result("late", "the deadline passed")
            except ConfigError as error:  # the password was changed
                why = Result("refused", str(error))
            except (OSError, UnreadableError, TransferError) as error:
                # A restarted server has closed the idle connections.
                if connection is not None and not fresh and not (replies and replies.begun):
                    connection.disconnect()
                    fresh = True
                    continue
                late = time.monotonic_ns() >= deadline  # connecting has a separate limit
                why = Result("late" if late else "unreachable", f"{type(error).__name__}: {error}")
            else:
                self._nodes.release(node, connection)
                return results, Result("ok"), None
            if connection is not None:
                connection.disconnect()
            return results, why, refused

    def _refreshes(self, name: bytes) -> bool:
        """Return whether a hit refreshes the time to live, and record the refresh."""
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


def _parts(rows: Sequence[list[list[Part]]], *, asking: bool) -> list[Part]:
    """Return the commands of rows, each after an `ASKING` if needed."""
    first = command(b"ASKING") if asking else []
    return [part for commands in rows for one in commands for part in (*first, *one)]


def _string(replies: Replies, parts: tuple[memoryview, ...], empty: Result | None = None) -> Result:
    """Read a string of the exact size into memory."""
    length, wanted = replies.bulk(parts), sum(map(len, parts))
    if length is None:
        return Result("missing")
    if length == 0 and empty is not None:
        return empty
    if length != wanted:
        return Result("damaged", f"{length} bytes, {wanted} wanted")
    return Result("ok")


def _name(row: bytes | Get | Put) -> bytes:
    return row if isinstance(row, bytes) else row.name

"""Replies of a Redis server: any split into pieces reads alike, and no byte sequence does harm."""

import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrie.tiers.remote.resp import LateError, RefusedError, Replies, UnreadableError, command

MINUTE = 60_000_000_000
numbers = st.integers(-(2**63), 2**63 - 1)
strings = st.binary(max_size=9000)
replies = st.lists(st.one_of(numbers, strings, st.none(), st.booleans()), max_size=8)


def encoded(reply):
    if reply is None:
        return b"$-1\r\n"
    if reply is True:
        return b"+OK\r\n"
    if reply is False:
        return b"_\r\n"
    return b":%d\r\n" % reply if isinstance(reply, int) else b"".join(command(reply)[1:])


def read(connection, reply):
    if isinstance(reply, bool):
        return connection.done()
    if isinstance(reply, int):
        return connection.number()
    memory = bytearray(len(reply or b""))
    length = connection.bulk([memoryview(memory)[:1], memoryview(memory)[1:]])
    return None if length is None else bytes(memory)


@given(replies, st.lists(st.integers(1, 9) | st.integers(1, 5000), min_size=1, max_size=4))
def test_replies_read_alike_in_all_pieces(expected, sizes):
    class Pieces:
        """A connection that has the next piece at each call."""

        rest = b"".join(map(encoded, expected))
        calls = 0

        def settimeout(self, _):
            pass

        def recv_into(self, memory):
            size = min(sizes[self.calls % len(sizes)], len(memory), len(self.rest))
            memory[:size], self.rest = self.rest[:size], self.rest[size:]
            self.calls += 1
            return size

    connection = Replies(Pieces(), time.monotonic_ns() + MINUTE)
    assert [read(connection, reply) for reply in expected] == expected
    with pytest.raises(UnreadableError, match="closed"):
        connection.number()


@given(st.binary(max_size=3000), st.sampled_from(["number", "done", "bulk"]))
def test_any_bytes_are_a_reply_or_one_of_three_errors(sent, method):
    server, client = socket.socketpair()
    with server, client:
        server.sendall(sent)
        server.close()
        connection = Replies(client, time.monotonic_ns() + MINUTE)
        memory = bytearray(16)
        arguments = ([memoryview(memory)],) if method == "bulk" else ()
        try:
            found = getattr(connection, method)(*arguments)
        except (UnreadableError, RefusedError):
            return
        assert found is None or isinstance(found, int)


@pytest.mark.parametrize(
    ("sent", "method", "error"),
    [
        (b"-ERR no\r\n", "number", RefusedError),
        (b":1x\r\n", "number", UnreadableError),
        (b"$-7\r\n", "bulk", UnreadableError),
        (b"+" + b"a" * 2000 + b"\r\n", "done", UnreadableError),
        (b":1", "number", UnreadableError),
    ],
)
def test_a_reply_that_is_none_is_refused(sent, method, error):
    server, client = socket.socketpair()
    with server, client:
        server.sendall(sent)
        server.close()
        arguments = ([memoryview(bytearray(4))],) if method == "bulk" else ()
        with pytest.raises(error):
            getattr(Replies(client, time.monotonic_ns() + MINUTE), method)(*arguments)


def test_replies_after_asking_follow_an_ok():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"+OK\r\n:1\r\n+OK\r\n$-1\r\n+OK\r\n+OK\r\n+OK\r\n-TRYAGAIN now\r\n:1\r\n")
        connection = Replies(ours, time.monotonic_ns() + MINUTE, asking=True)
        assert connection.number() == 1
        assert connection.bulk([]) is None
        assert connection.done()
        with pytest.raises(RefusedError, match="TRYAGAIN"):
            connection.number()
        with pytest.raises(UnreadableError, match="OK wanted"):
            connection.number()
    assert RefusedError("ASK 3999 127.0.0.1:6381").node == "127.0.0.1:6381"


def test_a_passed_deadline_is_late():
    server, client = socket.socketpair()
    with server, client, pytest.raises(LateError):
        Replies(client, time.monotonic_ns()).number()

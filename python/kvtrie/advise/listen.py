"""Listen: the KV events of a running server from its history on, in order and without repeats.

Invariant: batches come by ascending sequence numbers. Batches missing from both the stream and the
replay endpoint show as a gap. Cost: at most `HIGH_WATER` waiting messages in this process. The
server never waits.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import zmq

from kvtrie.advise.wire import Batch, Reader
from kvtrie.errors import ConfigError
from kvtrie.settings.argument import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

__all__ = ["HIGH_WATER", "MOST_LOST", "Listener", "listening"]

HIGH_WATER = 100_000
"""Maximum number of waiting messages. Further messages are lost."""

MOST_LOST = 0.05
"""Lost share of sequence numbers at which a window is refused."""

_POLL_MS = 100
_MS = 1000
_PATIENCE_S = 10.0
_END = (1 << 64) - 1  # -1 on the wire
_FEW = 100
_REPLAYED = 3  # frames of a message of the history, at least


class Listener:
    """A connection to a publisher.

    Args:
        events: socket of the stream.
        replay: socket of the history, if there is one.
        endpoint: for messages.
        patience_s: seconds to wait for a first message, and for an answer of the history.
        clock: seconds.

    Attributes:
        reader: the decoder.
        lost: number of sequence numbers missing from both sockets.
    """

    def __init__(
        self,
        events: zmq.Socket[bytes],
        replay: zmq.Socket[bytes] | None,
        endpoint: str,
        patience_s: float = _PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._events, self._replay, self._endpoint = events, replay, endpoint
        self._patience_s, self._clock = patience_s, clock
        self.reader, self.lost = Reader(), 0
        self._next: int | None = None
        self._count = self._replayed_until = 0

    def history(self) -> Iterator[Batch]:
        """Yield the earlier batches still in the server's history.

        Raises:
            ConfigError: no answer, or an invalid message.
        """
        if self._replay is not None:
            yield from self._replayed(0)

    def live(self, seconds: float | None) -> Iterator[Batch]:
        """Yield batches published from now on.

        Args:
            seconds: duration. None has no end.

        Raises:
            ConfigError: no message for `patience_s`, here or before; an invalid message; a share of
                `MOST_LOST` of the messages is lost.
        """
        begin = self._clock()
        end = begin + seconds if seconds is not None else None
        while end is None or self._clock() < end:
            if not self._events.poll(_POLL_MS):
                if not self._count and self._clock() - begin >= self._patience_s:
                    raise ConfigError(
                        f"{self._endpoint} published nothing in {self._patience_s:g} s: a server "
                        "without requests, or one that does not listen there. vLLM binds only "
                        "wildcard, ipc and inproc endpoints, as tcp://*:5557; with tcp://HOST:5557 "
                        "it connects, and no listener gets anything"
                    )
                continue
            batch = self.reader.read(self._events.recv_multipart())
            yield from self._ordered(batch)

    def _ordered(self, batch: Batch) -> Iterator[Batch]:
        """Yield a batch of the stream, after the missing batches before it."""
        if self._next is not None and batch.number > self._next:
            yield from self._replayed(self._next)
        if batch.number >= self._replayed_until:
            yield self._noted(batch)

    def _noted(self, batch: Batch) -> Batch:
        if self._next is not None and batch.number > self._next:
            self.lost += batch.number - self._next
        self._next, self._count = batch.number + 1, self._count + 1
        if self.lost > max(_FEW, MOST_LOST * (self.lost + self._count)):
            raise ConfigError(
                f"{self.lost} of {self.lost + self._count} messages are lost: this listener is "
                f"too slow for the stream (high-water mark {HIGH_WATER}), or its network is; "
                "listen on the server's machine, with --replay"
            )
        return batch

    def _replayed(self, first: int) -> Iterator[Batch]:
        """Yield the history from a sequence number on."""
        replay = self._replay
        if replay is None:
            return
        replay.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            if not replay.poll(round(self._patience_s * _MS)):
                raise ConfigError(
                    f"the replay endpoint did not answer in {self._patience_s:g} s; is it the "
                    "replay_endpoint of --kv-events-config?"
                )
            frames = replay.recv_multipart()
            if len(frames) < _REPLAYED or int.from_bytes(frames[-2], "big") == _END:
                return
            batch = self.reader.read(frames[1:])  # after an empty frame
            self._replayed_until = batch.number + 1
            yield self._noted(batch)


@contextmanager
def listening(
    endpoint: str, replay: str | None = None, patience_s: float = _PATIENCE_S
) -> Generator[Listener]:
    """Connect to a publisher.

    Args:
        endpoint: its endpoint, as `tcp://HOST:5557`.
        replay: endpoint of its history.
        patience_s: as for `Listener`.

    Raises:
        ConfigError: an invalid address.
    """
    context = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []

    def connected(kind: int, address: str) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        sockets.append(socket)
        socket.set_hwm(HIGH_WATER)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot connect to {shown(address)}: {error.strerror}; tcp://HOST:PORT or "
                "ipc://PATH wanted"
            ) from error
        return socket

    try:
        events = connected(zmq.SUB, endpoint)
        history = None if replay is None else connected(zmq.DEALER, replay)
        yield Listener(events, history, endpoint, patience_s)
    finally:
        for socket in sockets:
            socket.close(linger=0)
        context.term()

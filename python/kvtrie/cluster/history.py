"""History: a publisher's recent batches, and the socket that serves them again.

Invariant: the result of `since` brings a reader with all batches before a number, or with none, to
the state after the last batch. Cost: a ring of batches, and the contents once a reader has asked
for older batches than the ring's.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

import zmq

from kvtrie.errors import KvtrieError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["END", "History", "HistoryServer"]

END = (-1).to_bytes(8, "big", signed=True)
"""Number of the last message of an answer."""

_SEND_MS = 1000
_MOST_WAITING = 100  # requests answered while closing
_FRAMES = 3  # of a request: the reader, a delimiter, the first number
_NUMBER_BYTES = 8


class History:
    """Sent batches.

    Args:
        size: maximum number of batches.
    """

    def __init__(self, size: int) -> None:
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=size)
        # A batch of all contents, as of the batch of its number.
        self._base: tuple[int, bytes] = (0, b"")

    def add(self, number: int, payload: bytes) -> None:
        """Add a batch."""
        self._ring.append((number, payload))

    def restart(self, number: int, contents: bytes) -> None:
        """Add a batch of all contents in place of all earlier batches."""
        self._ring.clear()
        self._base = (number, contents)

    def base(self, number: int, contents: bytes) -> None:
        """Keep the contents after a batch, for readers of older batches than the ring's."""
        self._base = (number, contents)

    def lacks(self, first: int) -> bool:
        """Return whether both the ring and the contents with later batches lack a batch."""
        oldest = self._ring[0][0] if self._ring else self._base[0] + 1
        return first < oldest and self._base[0] + 1 < oldest

    def since(self, first: int) -> list[tuple[int, bytes]]:
        """Return the batches from a number, after the contents if it is older than the ring."""
        oldest = self._ring[0][0] if self._ring else self._base[0] + 1
        if first >= oldest:
            return [batch for batch in self._ring if batch[0] >= first]
        return [self._base, *(batch for batch in self._ring if batch[0] > self._base[0])]


class HistoryServer:
    """Answers requests for earlier batches in a separate thread.

    Args:
        context: of the socket.
        router: the socket, bound.
        topic: first frame of the batches.
        batches_from: returns the batches from a number on.

    Attributes:
        replays: answered requests.
        refused: malformed requests.
        stuck: abandoned requests, after the reader received nothing for a second.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        topic: bytes,
        batches_from: Callable[[int], list[tuple[int, bytes]]],
    ) -> None:
        self.replays = self.refused = self.stuck = 0
        self._router, self._topic, self._batches_from = router, topic, batches_from
        # Report an error for a disconnected or stuck reader instead of losing batches silently.
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.SNDTIMEO, _SEND_MS)
        address = f"inproc://end-{id(self)}"
        self._ended = context.socket(zmq.PAIR)
        self._ended.bind(address)
        end = context.socket(zmq.PAIR)
        end.connect(address)
        self._thread = threading.Thread(target=self._serve, args=(end,), daemon=True)
        self._thread.name = "kvtrie event history"
        self._thread.start()

    def close(self) -> None:
        """End the thread and close its sockets."""
        self._ended.send(b"")
        self._thread.join()
        self._ended.close(linger=0)

    def _serve(self, end: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(end, zmq.POLLIN)
        try:
            while end not in (ready := dict(poller.poll())):
                if self._router in ready:
                    self._answer(self._router.recv_multipart())
            # Dynamo's services wait for an answer forever.
            for _ in range(_MOST_WAITING):
                if not self._router.poll(0):
                    break
                self._answer(self._router.recv_multipart())
        finally:
            end.close(linger=0)
            self._router.close(linger=0)

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != _FRAMES or len(frames[2]) != _NUMBER_BYTES:
            self.refused += 1
            return
        who, _, first = frames
        try:
            batches = self._batches_from(int.from_bytes(first, "big"))
        except KvtrieError:  # the manager is closed or broken: there are no batches any more
            batches = []
        try:
            for number, payload in batches:
                frame = number.to_bytes(_NUMBER_BYTES, "big")
                self._router.send_multipart((who, b"", self._topic, frame, payload))
            self._router.send_multipart((who, b"", b"", END, b""))
        except zmq.ZMQError:
            self.stuck += 1
            return
        self.replays += 1

"""Publisher: publishes the blocks of a manager as KV events in vLLM's format.

Routers that read vLLM's events can read these events: a ZeroMQ PUB socket with the frames topic,
batch number and msgpack, and a ROUTER socket that sends batches again. The first batch clears a
reader's knowledge of an earlier publisher, and has the contents. After a later subscription an
empty batch is sent, and its number shows the reader the gap.
Invariant: after any batch in order, a reader knows only copies that the manager had then, complete.
After all moves it knows every copy. Cost: an encoding per `pump`. The engine waits for no reader.
"""

from __future__ import annotations

import struct
import threading
import time
from typing import TYPE_CHECKING, Literal, NamedTuple

import zmq

from kvtrie._kvtrie import BlockManager, EventBatches
from kvtrie.cluster.batch_numbers import BatchNumbers
from kvtrie.cluster.history import History, HistoryServer
from kvtrie.cluster.sockets import bound
from kvtrie.errors import ClosedError
from kvtrie.settings.argument import flag, instance, text, whole

if TYPE_CHECKING:
    import os
    from typing import Self

__all__ = ["MEDIUMS", "Publisher", "PublisherCounts"]

MEDIUMS = {"gpu": "GPU", "host": "CPU", "disk": "STORAGE"}
"""Mediums of events, by kind of tier. A `remote` tier has none: each machine would be credited."""

_MOST_RANK = 2**32 - 1
_MOST_RING = 10**7
_LINGER_MS = 200
_MOST_JOINED = 100


class PublisherCounts(NamedTuple):
    """Counters of a publisher since it was made.

    Attributes:
        last: number of the last batch.
        batches: batches sent.
        stored: blocks published as stored, per tier and group of layers.
        removed: blocks published as removed.
        withheld: blocks stored, but not published: of a tenant, or after a digest.
        contents: batches of all contents: the first batch and batches after lost events.
        lost: number of gaps in the manager's events, after its ring was full.
        replays: answered requests for earlier batches.
        refused: malformed requests for earlier batches.
        stuck: abandoned requests for earlier batches, after the reader received nothing.
        unwritten: number of failed writes of `number_file`.
    """

    last: int
    batches: int
    stored: int
    removed: int
    withheld: int
    contents: int
    lost: int
    replays: int
    refused: int
    stuck: int
    unwritten: int


class Publisher:
    """Publishes the block events of a manager.

    Call `pump` after each step of the engine, and after moves have ended. A block of a scope with a
    tenant, or with a digest in `Scope.extra` at or before the block, is not published: an index
    matches by tokens and would also count it for other tenants.

    Args:
        manager: made with `events=n, events_of="residency"`. `n` bounds the events between two
            calls of `pump`. Beyond that events are lost, and all contents are published instead.
        endpoint: where readers subscribe, as `tcp://127.0.0.1:5557` or `ipc:///run/kv`.
        replay: where readers request earlier batches. None answers no requests.
        topic: first frame of all messages. llm-d reads `kv@POD@MODEL`.
        hashes: name of a block: "int" for the last 8 bytes of its content key as a big-endian
            number, "bytes" for the key.
        form: each event as a msgpack "map", as vLLM from 0.30 on, or as an "array".
        dp_rank: data-parallel rank of the engine.
        ring: number of batches kept for `replay`. A reader of an earlier batch gets the contents.
        number_file: path of a file that keeps batch numbers growing if the clock is set back
            between two runs.
        public: allow an address reachable by other machines.

    Attributes:
        endpoint: the address in use, with the actual port for port 0.
        replay: the same for `replay`.

    Raises:
        ConfigError: a wrong argument, an address in use, a reachable address without `public`, or
            a manager with a publisher already or without residency events.
    """

    def __init__(
        self,
        manager: BlockManager,
        endpoint: str,
        replay: str | None = None,
        *,
        topic: str = "",
        hashes: Literal["int", "bytes"] = "int",
        form: Literal["map", "array"] = "map",
        dp_rank: int = 0,
        ring: int = 10_000,
        number_file: str | os.PathLike[str] | None = None,
        public: bool = False,
    ) -> None:
        instance("manager", manager, BlockManager)
        self._topic = text("topic", topic).encode()
        rank = whole("dp_rank", dp_rank, 0, _MOST_RANK)
        kept = whole("ring", ring, 1, _MOST_RING)
        open_to_all = flag("public", public)
        self._rank = rank
        self._numbers = BatchNumbers(number_file, time.time_ns() // 1000)
        mediums = [MEDIUMS.get(tier.kind) for tier in manager.tiers]
        self._batches = EventBatches(manager, mediums, hashes=hashes, form=form, rank=rank)
        self._lock = threading.Lock()
        self._history = History(kept)
        self._stored = self._removed = self._withheld = self._sent = 0
        self._contents = self._lost = 0
        self._server: HistoryServer | None = None
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = bound(self._context, zmq.XPUB, "endpoint", endpoint, public=open_to_all)
            self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # each reader, not each topic
            self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
            self.replay: str | None = None
            if replay is not None:
                router = bound(self._context, zmq.ROUTER, "replay", replay, public=open_to_all)
                self.replay = router.get_string(zmq.LAST_ENDPOINT)
                self._server = HistoryServer(self._context, router, self._topic, self._batches_from)
            with self._lock:
                self._publish_contents()
        except BaseException:
            self.close()
            raise

    def pump(self) -> None:
        """Publish the changes since the last call as one batch, or nothing without changes.

        Raises:
            ClosedError: the publisher or the manager is closed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the publisher is closed")
            events, contents, counts, lost = self._batches.take(time.time(), contents=False)
            self._count(counts)
            self._lost += lost
            joined = self._joined()
            if contents is not None:
                self._send_contents(contents)
            elif events is not None:
                self._send(events)
            elif joined:
                at, rank = struct.pack(">d", time.time()), struct.pack(">I", self._rank)
                self._send(b"\x93\xcb" + at + b"\x90\xce" + rank)  # [time, [], rank]

    @property
    def counts(self) -> PublisherCounts:
        """Counters so far."""
        server = self._server
        return PublisherCounts(
            self._numbers.last,
            self._sent,
            self._stored,
            self._removed,
            self._withheld,
            self._contents,
            self._lost,
            server.replays if server else 0,
            server.refused if server else 0,
            server.stuck if server else 0,
            self._numbers.unwritten,
        )

    def close(self) -> None:
        """Stop and free the ports. Further calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._server is not None:
            self._server.close()
        self._context.destroy(linger=_LINGER_MS)
        self._batches.close()
        self._numbers.close()

    def __enter__(self) -> Self:
        """Return the publisher."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        return f"Publisher({self.endpoint!r}, replay={self.replay!r})"

    def _joined(self) -> bool:
        """Return whether readers subscribed since the last call: an empty batch shows them the gap.

        Reads at most `_MOST_JOINED` messages, so no reader delays the engine.
        """
        found = False
        for _ in range(_MOST_JOINED):
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                break
            found |= self._socket.recv(zmq.NOBLOCK)[:1] == b"\x01"
        return found

    def _publish_contents(self) -> None:
        """Publish the first batch, with all contents so far."""
        _, contents, _, _ = self._batches.take(time.time(), contents=True)
        self._send_contents(contents or b"")

    def _send_contents(self, payload: bytes) -> None:
        self._contents += 1
        self._history.restart(self._send_one(payload), payload)

    def _send(self, payload: bytes) -> None:
        self._history.add(self._send_one(payload), payload)

    def _send_one(self, payload: bytes) -> int:
        number = self._numbers.take()
        self._socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        self._sent += 1
        return number

    def _count(self, counts: tuple[int, int, int]) -> None:
        stored, removed, withheld = counts
        self._stored += stored
        self._removed += removed
        self._withheld += withheld

    def _batches_from(self, first: int) -> list[tuple[int, bytes]]:
        """Return the batches from a number, after the contents if the ring lacks some of them."""
        with self._lock:
            if not self._closed and self._history.lacks(first):
                events, contents, counts, lost = self._batches.take(time.time(), contents=True)
                self._count(counts)
                self._lost += lost
                if events is not None:
                    self._send(events)
                if lost:
                    self._send_contents(contents or b"")
                else:
                    self._history.base(self._numbers.last, contents or b"")
            return self._history.since(first)

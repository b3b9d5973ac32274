"""A TCP proxy in front of a server: it delays, stalls, or cuts the server's answers."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

_PIECE = 1 << 16


class TcpProxy:
    """A proxy on a free port of this machine, which ends with the `with` block.

    Args:
        target: port of the server.

    Attributes:
        port: its port.
        delay: seconds that each piece of an answer waits.
        cut: bytes of answers after which a connection is closed, if any.
        stalled: while it is set, no answer passes.
        carried: bytes of answers that passed.
    """

    def __init__(self, target):
        self.target, self.delay, self.cut, self.carried = target, 0.0, None, 0
        self.stalled = threading.Event()
        self._passing, self._closed = threading.Event(), threading.Event()
        self._passing.set()
        self._sockets = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._closed.set()
        self._passing.set()
        with suppress(OSError):  # wakes `accept`
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def stall(self):
        """Let no answer pass until `release`."""
        self._passing.clear()
        self.stalled.set()

    def release(self):
        """Let answers pass, without delay, whole."""
        self.delay, self.cut = 0.0, None
        self.stalled.clear()
        self._passing.set()

    def drop(self):
        """Close all connections."""
        for sock in list(self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target), 5.0)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.add(sock)
            threading.Thread(target=self._pump, args=(client, server), daemon=True).start()
            threading.Thread(
                target=self._pump, args=(server, client), kwargs={"answers": True}, daemon=True
            ).start()

    def _pump(self, source, sink, *, answers=False):
        passed = 0
        with suppress(OSError):
            while piece := source.recv(_PIECE):
                if answers:
                    if self.delay:
                        self._closed.wait(self.delay)
                    self._passing.wait()
                    if self.cut is not None and passed + len(piece) > self.cut:
                        sink.sendall(piece[: max(0, self.cut - passed)])
                        break
                    passed += len(piece)
                    self.carried += len(piece)
                sink.sendall(piece)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if answers:
            for sock in (source, sink):
                self._sockets.discard(sock)
                sock.close()

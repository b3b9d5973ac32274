"""A Mooncake store for faults: its master is killed, stopped, cut off and slowed down.

This process lends the memory, so that values outlive the processes that use them; they are lost
with the master, which alone knows where they are. Invariant: after `heal` it keeps what it takes.
"""

from __future__ import annotations

import urllib.request
from contextlib import closing, contextmanager, suppress

from tests import store_servers
from tests.remote_servers import ServerStore
from tests.tcp_proxy import TcpProxy

__all__ = ["mooncake_store"]

_LENT, _BUFFER = 256 << 20, 16 << 20
_MISSING = -704


class LostError(OSError):
    """The store did not do what it was asked for."""


class MooncakeServer(ServerStore):
    """A Mooncake master after a proxy; values go to and from this process without one."""

    faults = ("kill", "pause", "delay", "stall", "drop", "evict")
    probe_s = 1.0  # all is read in milliseconds, and a refuted name is asked for after a second
    may_be_away = False  # the library connects for a minute and keeps the interpreter's lock
    lost = LostError

    def __init__(self, server, proxy):
        from mooncake.store import MooncakeDistributedStore

        super().__init__(server, proxy)
        self.url = f"mooncake://127.0.0.1:{proxy.port}"
        self._client = MooncakeDistributedStore()
        master = f"127.0.0.1:{server.port}"
        settings = ("127.0.0.1", "P2PHANDSHAKE", _LENT, _BUFFER, "tcp", "", master)
        _done(self._client.setup(*settings))

    def heal(self):
        """Let it answer; a master that was started again has to learn of the lent memory."""
        started = self.server.process is None
        super().heal()
        if started:
            store_servers.until(self._keeps)

    def _keeps(self):
        with suppress(LostError):
            self.set("ready", b"1")
            return self.get("ready") == b"1"
        return False

    def names(self):
        if not self._reachable:
            return []
        url = f"http://127.0.0.1:{self.server.metrics}/get_all_keys"
        with urllib.request.urlopen(url, timeout=2) as answer:
            return sorted(answer.read().decode().split())

    def get(self, name):
        return bytes(self._client.get(name))

    def set(self, name, value):
        self.remove(name)
        _done(self._client.put(name, value))

    def remove(self, name):
        code = self._client.remove(name, True)
        if code != _MISSING:
            _done(code)

    def fault(self, kind, rng):
        """A fault of the master or network, or another client removes half of the values."""
        super().fault(kind, rng)
        for name in self.names() if kind == "evict" else ():
            if rng.random() < 0.5:
                self.remove(name)

    def close(self):
        self._client.close()


def _done(code):
    if code != 0:
        raise LostError(f"code {code}")


@contextmanager
def mooncake_store(folder):
    """A master and a lender, in a network namespace: clients listen on every address."""
    with (
        store_servers.mooncake(folder) as server,
        TcpProxy(server.port) as proxy,
        closing(MooncakeServer(server, proxy)) as store,
    ):
        yield store

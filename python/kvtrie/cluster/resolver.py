"""Resolver: looks up the addresses of a host in a thread, since a look-up has no deadline.

Invariant: a caller waits no longer than its deadline, and at most one look-up runs. Cost: a thread
per look-up: a look-up at first, and after each failed connection.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any, TypeAlias

from kvtrie.at_exit import end_at_exit

__all__ = ["Resolver"]

Address: TypeAlias = "tuple[socket.AddressFamily, Any]"

_NS = 1_000_000_000


class _LookUp:
    """A look-up of the addresses of a host in a thread: it has no deadline."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._over = threading.Event()
        self._found: list[Address] = []
        self._error: OSError | None = None
        thread = threading.Thread(target=self._look, name="kvtrie-resolve", daemon=True)
        thread.start()
        end_at_exit(thread)

    def running(self) -> bool:
        return not self._over.is_set()

    def addresses(self, until: int) -> list[Address]:
        if not self._over.wait(max(0, until - time.monotonic_ns()) / _NS):
            raise TimeoutError(f"the address of {self._host} is not known yet")
        if self._error is not None:
            raise self._error
        return self._found

    def _look(self) -> None:
        try:
            rows = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._found = [(row[0], row[4]) for row in rows]
        except (OSError, UnicodeError) as error:
            self._error = OSError(f"{self._host}: {error}")
        finally:
            self._over.set()


class Resolver:
    """The addresses of a host, looked up again after a failed connection.

    Args:
        host: a name or an address.
        port: the port.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._latest: _LookUp | None = None
        self._again = False

    def forget(self) -> None:
        """Look up again before the next connection."""
        self._again = True

    def addresses(self, until: int) -> list[Address]:
        """Return the addresses.

        Args:
            until: the deadline, in nanoseconds of `time.monotonic_ns`.

        Raises:
            TimeoutError: the look-up has not ended by then.
            OSError: the host has no address.
        """
        with self._lock:
            latest = self._latest
            if latest is None or (self._again and not latest.running()):
                self._again = False
                latest = self._latest = _LookUp(self._host, self._port)
        try:
            return latest.addresses(until)
        except OSError:
            self._again = True
            raise

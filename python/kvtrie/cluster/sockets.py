"""Sockets: bound addresses of a publisher.

Invariant: an address reachable by other machines is bound only at the caller's request. Cost: a
bind.
"""

from __future__ import annotations

import ipaddress
import re

import zmq

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import shown, text

__all__ = ["bound"]

_TCP = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+):(\d{1,5}|\*)")
_IPC = re.compile(r"ipc://[^\0]+")
_MOST_PORT = 65535
_MOST_READ = 1 << 20  # bytes of a frame of a reader; longer frames end the connection


def bound(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, name: str, given: object, *, public: bool
) -> zmq.Socket[bytes]:
    """Return a new socket, bound to an address.

    Args:
        context: of the socket.
        kind: as `zmq.PUB`.
        name: of the argument, for messages.
        given: its value.
        public: whether other machines may reach the address.

    Raises:
        ConfigError: an invalid address, an address in use, or a reachable address.
    """
    address = text(name, given)
    tcp = _TCP.fullmatch(address)
    if tcp is not None:
        host, port = tcp[1].strip("[]"), tcp[2]
        if port != "*" and int(port) > _MOST_PORT:
            raise ConfigError(f"{name} is {shown(address)}, a port 0 to {_MOST_PORT} wanted")
        if not public and not _loopback(host):
            raise ConfigError(
                f"{name} is {shown(address)}: other machines may reach {host}, and events show the "
                "tokens of all prompts; pass public=True, or tcp://127.0.0.1:PORT"
            )
    elif _IPC.fullmatch(address) is None:
        raise ConfigError(f"{name} is {shown(address)}, tcp://HOST:PORT or ipc://PATH wanted")
    socket = context.socket(kind)
    try:
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_READ)
        if tcp is not None and ":" in tcp[1]:
            socket.setsockopt(zmq.IPV6, 1)
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"{name} is {shown(address)}: {error}") from error
    return socket


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

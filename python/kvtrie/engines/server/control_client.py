"""Sends requests to the control socket of a running server.

Invariant: a command is sent once. Cost: a connection per request.
"""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection, HTTPException
from typing import Any

from kvtrie.errors import ConfigError

__all__ = ["ask"]

_TIMEOUT_S = 30


class _Connection(HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(self._path)


def ask(path: str, route: str, body: str | None = None) -> Any:  # noqa: ANN401 - any JSON
    """Return the answer of a control socket.

    Args:
        path: the socket.
        route: the route to read, or with a body the command.
        body: parameters of a command, as JSON.

    Raises:
        ConfigError: nothing listens there, or the server refuses the request.
    """
    connection = _Connection(path.removeprefix("unix://"))
    try:
        connection.request("GET" if body is None else "POST", route, body and body.encode())
        reply = connection.getresponse()
        status, content = reply.status, json.loads(reply.read())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; is the server running?") from error
    except (HTTPException, ValueError) as error:
        raise ConfigError(f"{path} does not answer as a control socket: {error}") from error
    finally:
        connection.close()
    if status >= 400:  # noqa: PLR2004 - HTTP's errors
        raise ConfigError(f"{path}: {content['error']}")
    return content

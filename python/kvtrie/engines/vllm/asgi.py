"""Requests of an ASGI server as a middleware reads, changes and makes them.

Invariant: a body that was read and not changed arrives with the same messages as without reading.
Cost: the messages of a body, up to a bound, until the application has read them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

__all__ = [
    "Answer",
    "App",
    "Body",
    "Message",
    "Receive",
    "Scope",
    "Send",
    "call",
    "headers_of",
    "path_of",
    "refuse",
    "with_body",
]

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_ABOUT_BODY = (b"content-length", b"transfer-encoding")


def path_of(scope: Scope) -> str:
    """Return the path of a POST without the application's root; "" for anything else."""
    if scope["type"] != "http" or scope.get("method") != "POST":
        return ""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers of a request, by names in lower case."""
    return {
        name.decode("latin-1").lower(): each.decode("latin-1") for name, each in scope["headers"]
    }


def with_body(scope: Scope, size: int) -> Scope:
    """Return the scope of a request with another body, of `size` bytes."""
    headers = [each for each in scope["headers"] if each[0].lower() not in _ABOUT_BODY]
    return {**scope, "headers": [*headers, (b"content-length", str(size).encode())]}


@dataclass(slots=True)
class Body:
    """A body that is read ahead of the application.

    Attributes:
        content: the whole body; None if it is longer than the bound, or did not end.
        too_long: whether it is longer than the bound.
    """

    _receive: Receive
    content: bytes | None = None
    too_long: bool = False
    _messages: list[Message] = field(default_factory=list[Message])

    @classmethod
    async def read(cls, receive: Receive, most: int) -> Body:
        """Read a body of at most `most` bytes; of a longer one its beginning."""
        body, parts, size = cls(receive), list[bytes](), 0
        while size <= most:
            message = await receive()
            body._messages.append(message)
            if message["type"] != "http.request":
                break
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if not message.get("more_body"):
                body.content = b"".join(parts) if size <= most else None
                break
        body.too_long = size > most
        body._messages.reverse()
        return body

    def replace(self, content: bytes) -> None:
        """Have the application read another body."""
        self._messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive(self) -> Message:
        """Return the next message of the request, as the application reads it."""
        return self._messages.pop() if self._messages else await self._receive()


class Answer:
    """An answer that passes byte for byte, and is searched for a text.

    Args:
        send: takes its messages.
        sign: the bytes that are searched for; b"" is never found.

    Attributes:
        found: whether the answer had them.
    """

    def __init__(self, send: Send, sign: bytes) -> None:
        self._send, self._sign, self._end = send, sign, b""
        self.found = False

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        if self._sign and not self.found and message["type"] == "http.response.body":
            text = self._end + message.get("body", b"")
            self.found = self._sign in text
            self._end = text[1 - len(self._sign) :]
        await self._send(message)


async def call(app: App, scope: Scope, path: str, content: bytes) -> tuple[int, bytes]:
    """Make a request of another path with the headers of a request; return status and answer."""
    status, parts, body = 0, list[bytes](), Body(_never)
    body.replace(content)

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    inside = {
        **with_body(scope, len(content)),
        "path": scope.get("root_path", "") + path,
        "raw_path": path.encode(),
        "query_string": b"",
        "state": dict(scope.get("state", {})),
    }
    await app(inside, body.receive, send)
    return status, b"".join(parts)


async def refuse(send: Send, status: int, why: str) -> None:
    """Answer a request with an error, in OpenAI's form."""
    content = json.dumps({"error": {"message": why, "type": "invalid_request_error"}}).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": content})


async def _never() -> Message:
    """Wait for ever: no client can leave a request that a middleware makes."""
    return await asyncio.get_running_loop().create_future()

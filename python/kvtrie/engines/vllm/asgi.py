"""Requests of an ASGI server: reading, changing and making them in a middleware.

Invariant: reading a body without changing it leaves the application's messages as they were.
Cost: memory for the messages of a body, up to a bound, until the application has read them.
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
    """Return the path of a POST without the application's root, or "" for anything else."""
    if scope["type"] != "http" or scope.get("method") != "POST":
        return ""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers of a request, by names in lower case."""
    return {
        name.decode("latin-1").lower(): each.decode("latin-1") for name, each in scope["headers"]
    }


def with_body(scope: Scope, size: int) -> Scope:
    """Return the scope of a request with its body replaced by `size` bytes."""
    headers = [each for each in scope["headers"] if each[0].lower() not in _ABOUT_BODY]
    return {**scope, "headers": [*headers, (b"content-length", str(size).encode())]}


@dataclass(slots=True)
class Body:
    """A body, read before the application reads it.

    Attributes:
        content: the whole body, or None if it exceeds the bound or is incomplete.
        too_long: whether it exceeds the bound.
    """

    _receive: Receive
    content: bytes | None = None
    too_long: bool = False
    _messages: list[Message] = field(default_factory=list[Message])

    @classmethod
    async def read(cls, receive: Receive, most: int) -> Body:
        """Read a body of at most `most` bytes, or only the beginning of a longer body."""
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
        """Replace the body for the application."""
        self._messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive(self) -> Message:
        """Return the next message of the request to the application."""
        return self._messages.pop() if self._messages else await self._receive()


class Answer:
    """An answer, passed on byte for byte and searched for a text.

    Args:
        send: takes its messages.
        sign: the bytes to search for, or b"" to search for nothing.

    Attributes:
        found: whether the answer so far has these bytes.
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
    """Call the application at `path` with a request's headers. Return status and answer."""
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
    """Wait forever: a request made by a middleware has no client to disconnect."""
    return await asyncio.get_running_loop().create_future()

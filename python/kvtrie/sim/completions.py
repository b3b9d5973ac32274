"""Answers of an engine's OpenAI-compatible server, with token times.

The server must accept prompts of token ids and `ignore_eos`, like vLLM and SGLang.
Invariant: a connection carries a single request. Cost: a waiting thread per answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from time import monotonic_ns
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvtrie.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Answer", "Server"]

_TIMEOUT_S = 600
_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer, with times in ns of the monotonic clock.

    Attributes:
        sent: time of the request.
        parts: time of each part. A part is a token, or several from a busy server.
        tokens: tokens of the answer.
        cached: prompt tokens found by the engine, or None if not reported.
    """

    sent: int
    parts: tuple[int, ...]
    tokens: int
    cached: int | None

    @property
    def first_ns(self) -> int:
        """Time to the first token."""
        return self.parts[0] - self.sent


class Server:
    """A server by its URL.

    Args:
        url: `http://host:port`, optionally with the path before `/v1`.

    Raises:
        ConfigError: an invalid URL.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(f"server is {url!r}, a URL as http://localhost:8000 wanted")
        self._url = url
        self._parts = parts
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._model = ""

    def _connect(self) -> HTTPConnection:
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        return kind(str(self._parts.hostname), self._parts.port, timeout=_TIMEOUT_S)

    def _ask(self, connection: HTTPConnection, path: str, body: Any) -> HTTPResponse:  # noqa: ANN401
        """Send a request, with POST if it has a body."""
        sent = None if body is None else json.dumps(body).encode()
        connection.request(
            "GET" if body is None else "POST",
            self._path + path,
            sent,
            {"Content-Type": "application/json"},
        )
        reply = connection.getresponse()
        if reply.status >= 400:  # noqa: PLR2004 - HTTP's errors
            said = reply.read(_SHOWN).decode(errors="replace")
            raise ConfigError(f"{self._url}{path} answers {reply.status}: {said}")
        return reply

    def send(self, path: str, body: Any = None) -> bytes:  # noqa: ANN401 - any JSON
        """Return the answer to a request, sent with POST if it has a body.

        Raises:
            ConfigError: the server refuses the request.
            TransferError: the server is unreachable or ends before its answer.
        """
        connection = self._connect()
        try:
            return self._ask(connection, path, body).read()
        except (OSError, HTTPException) as error:
            raise TransferError(f"{self._url}{path}: {error!r}") from error
        finally:
            connection.close()

    @property
    def model(self) -> str:
        """Name of the served model, requested once."""
        if not self._model:
            self._model = json.loads(self.send("/v1/models"))["data"][0]["id"]
        return self._model

    def answer(self, prompt: Sequence[int], tokens: int) -> Answer:
        """Return the answer to a prompt of token ids, with exactly `tokens` tokens.

        Raises:
            ConfigError: the server refuses the request.
            TransferError: the server is unreachable, or its answer has fewer tokens.
        """
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        connection = self._connect()
        times: list[int] = []
        made = 0
        cached: int | None = None
        try:
            sent = monotonic_ns()
            reply = self._ask(connection, "/v1/completions", body)
            for line in iter(reply.readline, b""):
                now = monotonic_ns()
                if not line.startswith(b"data:") or b"[DONE]" in line:
                    continue
                row: dict[str, Any] = json.loads(line.removeprefix(b"data:"))
                if row.get("choices"):
                    times.append(now)
                if usage := row.get("usage"):
                    made = usage["completion_tokens"]
                    details: dict[str, int] = usage.get("prompt_tokens_details") or {}
                    cached = details.get("cached_tokens")
        except ConfigError:
            raise
        except (OSError, HTTPException, LookupError, TypeError, ValueError) as error:
            raise TransferError(f"{self._url}/v1/completions: {error!r}") from error
        finally:
            connection.close()
        if made != tokens or not times:
            raise TransferError(f"{self._url} streamed {made} of {tokens} tokens")
        return Answer(sent, tuple(times), made, cached)

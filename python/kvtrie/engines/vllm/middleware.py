"""AgentHints: maps what agents' clients send to hints of the connector, in vLLM's HTTP server.

`vllm serve --middleware kvtrie.engines.vllm.middleware.AgentHints`. Names of sessions and markers
of prefixes become the request's `kv_transfer_params`; an answer that ends with tool calls becomes a
command to the control socket, if the connector has one.
Invariant: other paths, answers and all that is not mapped pass byte for byte: a mapped request gets
fields after its own, and JSON's readers take the last one of a name. No error of the middleware
fails a request. Cost: a body of at most 16 MiB is parsed once more; a marked prefix that is not the
whole prompt is rendered by the server itself, and its length is kept.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, cast

from kvtrie.engines.server.boundary import Boundary
from kvtrie.engines.server.client_fields import cut, read_markers, session_of
from kvtrie.engines.server.control import control_path
from kvtrie.engines.server.control_client import ask
from kvtrie.engines.server.request_hints import session_name
from kvtrie.engines.vllm.asgi import Answer, Body, call, headers_of, path_of, with_body
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import Counter

    from kvtrie.engines.server.client_fields import Place
    from kvtrie.engines.vllm.asgi import App, Receive, Scope, Send

__all__ = ["AgentHints"]

_LOG = logging.getLogger("vllm.kvtrie")  # whose lines vLLM shows
_CALLS = {  # how the JSON of an answer shows that it calls a tool; a text has other quotes
    "/v1/chat/completions": b'"tool_calls":[{',
    "/v1/completions": b"",
    "/v1/messages": b'"stop_reason":"tool_use"',
    "/v1/responses": b'"type":"function_call"',
}
_MOST_BODY = 16 << 20
_MOST_LENGTHS = 4096
_MARKED = 60  # the priority of a marked prefix
_PAUSED, _PAUSE_S = 50, 60  # the priority of a session while a tool runs, and for how long
_MAPPED = "mapped"
_RENDERED = (
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "input",
    "instructions",
    "max_tokens",
    "messages",
    "model",
    "output_config",
    "reasoning",
    "reasoning_effort",
    "system",
    "thinking",
    "tool_choice",
    "tools",
)


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A request as it is served.

    Attributes:
        content: its body with hints; None if that stays.
        session: the conversation that it belongs to.
        salt: its `cache_salt`.
    """

    content: bytes | None = None
    session: str | None = None
    salt: str = ""


class AgentHints:
    """A middleware that maps fields of agents' clients to hints.

    Args:
        app: the application below it.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._boundary = Boundary("kvtrie middleware", _LOG)
        self._lengths: OrderedDict[bytes, int] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, with hints if it has a body that they can be read from."""
        path = path_of(scope)
        if path not in _CALLS:
            await self._app(scope, receive, send)
            return
        body, mapped = await Body.read(receive, _MOST_BODY), _Mapped()
        try:
            mapped = await self._mapped(scope, path, body.content)
        except Exception as error:  # noqa: BLE001 - the request is served without hints
            self._ignored(path, "request", f"an unexpected error: {error!r}", "an unexpected error")
        if mapped.content is not None:
            body.replace(mapped.content)
            scope = with_body(scope, len(mapped.content))
        answer = Answer(send, _CALLS[path] if mapped.session else b"")
        await self._app(scope, body.receive, answer.send)
        if answer.found:
            self._pause(scope, path, mapped)

    async def _mapped(self, scope: Scope, path: str, content: bytes | None) -> _Mapped:
        """Return a request with hints for all that can be mapped."""
        if content is None:
            self._ignored(path, "request", f"a body of more than {_MOST_BODY} bytes", "too long")
            return _Mapped()
        try:
            given = json.loads(content)
        except (ValueError, RecursionError):  # the server says so to the client
            return _Mapped()
        if not isinstance(given, Mapping):
            return _Mapped()
        body = cast("Mapping[str, Any]", given)
        params = _object(body.get("kv_transfer_params"))
        own = None if params is None else _object(params.get("kvtrie"))
        if params is None or own is None:  # not the form of hints: the client's affair
            return _Mapped()
        hints: dict[str, Any] = {}
        if "session" not in own and (session := self._session(body, headers_of(scope), path)):
            hints["session"] = session
        if "retain" not in own and (rows := await self._retained(scope, path, body)):
            hints["retain"] = rows
        for name in hints:
            self._count(name, _MAPPED)
        kvtrie = {**own, **hints}
        made = None
        if hints:
            made = _appended(content, {"kv_transfer_params": {**params, "kvtrie": kvtrie}})
        session, salt = kvtrie.get("session"), body.get("cache_salt")
        named = session if isinstance(session, str) else None
        return _Mapped(made, named, salt if isinstance(salt, str) else "")

    def _session(
        self, body: Mapping[str, Any], headers: Mapping[str, str], path: str
    ) -> str | None:
        try:
            found = session_of(body, headers)
            return None if found is None else session_name("session", found)
        except ConfigError as error:
            self._ignored(path, "session", str(error), "not a name")
            return None

    async def _retained(
        self, scope: Scope, path: str, body: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the ranges of the prompt that markers keep, each token in one of them."""
        markers, rows, start = read_markers(body), list[dict[str, Any]](), 0
        for why in markers.strange:
            self._ignored(path, "retain", why, why)
        for seconds, place in markers.found:
            row = {"start": start, "priority": _MARKED, "ttl_s": seconds}
            if place is not None:
                end = await self._length(scope, path, body, place)
                if end is None:
                    why = "a marked prefix that cannot be rendered"
                    self._ignored(path, "retain", why, why)
                    continue
                if end <= start:
                    continue
                row["end"] = start = end
            rows.append(row)
        return rows

    async def _length(
        self, scope: Scope, path: str, body: Mapping[str, Any], place: Place
    ) -> int | None:
        """Return the tokens of a prompt that ends at a place; None if it cannot be rendered."""
        shown = {name: body[name] for name in _RENDERED if name in body} | cut(body, place)
        if path == "/v1/chat/completions":
            shown["add_generation_prompt"] = False
        content = json.dumps(shown).encode()
        # A length is as private as the prompt: a known one is found sooner.
        about = [path, body.get("cache_salt"), headers_of(scope).get("authorization")]
        key = blake2b(json.dumps(about).encode() + content, digest_size=16).digest()
        if (known := self._lengths.get(key)) is not None:
            self._lengths.move_to_end(key)
            return known
        status, answer = await call(self._app, scope, f"{path}/render", content)
        if status != 200:  # noqa: PLR2004 - HTTP's success
            return None
        self._lengths[key] = found = len(json.loads(answer)["token_ids"])
        if len(self._lengths) > _MOST_LENGTHS:
            self._lengths.popitem(last=False)
        return found

    def _pause(self, scope: Scope, path: str, mapped: _Mapped) -> None:
        """Keep the blocks of a session while the tools run that its answer calls."""
        sockets = _sockets(scope)
        if not sockets:
            self._count("pause", "no control socket")
            return
        rows = [{"priority": _PAUSED, "ttl_s": _PAUSE_S}]
        about = {"session": mapped.session, "cache_salt": mapped.salt}
        command = json.dumps({**about, "owner": "tools that run", "retain": rows})
        task = asyncio.create_task(self._command(sockets, "/retain", command, path))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _command(self, sockets: list[str], route: str, command: str, path: str) -> None:
        """Send a command to all ranks: one of them has the session."""
        for socket in sockets:
            try:
                await asyncio.to_thread(ask, socket, route, command)
            except ConfigError as error:
                self._ignored(path, "pause", str(error), "refused by the control socket")
                return
        self._count("pause", _MAPPED)

    def _ignored(self, path: str, hint: str, why: str, reason: str) -> None:
        self._boundary.ignored(path, f"{hint}: {why}")
        self._count(hint, reason)

    def _count(self, hint: str, outcome: str) -> None:
        _counter().labels(hint=hint, outcome=outcome).inc()


@cache
def _counter() -> Counter:
    from prometheus_client import Counter

    return Counter(
        "vllm:kvtrie_client_hints",
        "Hints that the middleware found in requests, and whether they were mapped",
        ["hint", "outcome"],
    )


def _sockets(scope: Scope) -> list[str]:
    """Return the control sockets of the server's ranks."""
    with suppress(KeyError, AttributeError, TypeError):  # another application than vLLM's
        config = scope["app"].state.vllm_config
        control = config.kv_transfer_config.kv_connector_extra_config.get("control")
        ranks = config.parallel_config.data_parallel_size
        if control is not None:
            return [control_path(control, rank, ranks) for rank in range(ranks)]
    return []


def _appended(content: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return the text of a JSON object with further fields at its end."""
    text = content.decode(json.detect_encoding(content), "surrogatepass").rstrip()
    own = text[:-1].rstrip()
    more = json.dumps(fields)[1:]
    return f"{own}{'' if own.endswith('{') else ', '}{more}".encode("utf-8", "surrogatepass")


def _object(given: object) -> Mapping[str, Any] | None:
    """A mapping, an empty one for null; None for anything else."""
    if given is None:
        return {}
    return cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else None

"""AgentHints: maps fields of agent clients to hints of the connector, in vLLM's HTTP server.

`vllm serve --middleware kvtrie.engines.vllm.middleware.AgentHints`. Names of sessions and markers
of prefixes become the request's `kv_transfer_params`. An answer ending with tool calls becomes
commands to the control socket, if the connector has one. A tenant named in a header by the
operator's front end is signed.
Invariant: answers, unmapped paths and unmapped requests pass byte for byte. A mapped request gets
additional fields at its end, because JSON parsers use the last field of a name. No error of the
middleware fails a request. Only with tenants, a too long body is refused, because it would have no
tenant.
Cost: a body of at most 16 MiB is parsed a second time. The server itself renders a marked prefix
shorter than the prompt, and its length is cached.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from kvtrie.engines.server.boundary import Boundary
from kvtrie.engines.server.client_fields import carries_tool_results, read_markers, session_of
from kvtrie.engines.server.control_client import ask
from kvtrie.engines.server.pauses import Pauses
from kvtrie.engines.server.request_hints import session_name
from kvtrie.engines.server.tenant import salt_of, signed
from kvtrie.engines.vllm.asgi import Answer, Body, headers_of, path_of, refuse, with_body
from kvtrie.engines.vllm.prompt_lengths import PromptLengths
from kvtrie.engines.vllm.served_settings import ServedSettings
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import Counter

    from kvtrie.engines.vllm.asgi import App, Receive, Scope, Send

__all__ = ["AgentHints"]

_LOG = logging.getLogger("vllm.kvtrie")  # below vLLM's logger, for its handlers
_CALLS = {  # the JSON of a tool call in an answer. Quotes inside a text are escaped
    "/v1/chat/completions": b'"tool_calls":[{',
    "/v1/completions": b"",
    "/v1/messages": b'"stop_reason":"tool_use"',
    "/v1/responses": b'"type":"function_call"',
}
_MOST_BODY = 16 << 20
_MARKED = 60  # the priority of a marked prefix
_PAUSED, _PAUSE_S = 50, 60  # priority and least seconds of a session's retention during a tool run
_MAPPED = "mapped"
_TENANT = ("tenant", "tenant_mac")  # the fields of a signed tenant


@dataclass(slots=True)
class _Request:
    """A request with its body.

    Attributes:
        scope: its scope.
        path: its path, below the application's root.
        headers: its headers.
        content: its body.
        body: its body as JSON.
        params: its `kv_transfer_params`.
        own: the client's own hints.
        hints: the added hints.
        fields: the added fields of its body.
    """

    scope: Scope
    path: str
    headers: dict[str, str]
    content: bytes
    body: Mapping[str, Any]
    params: Mapping[str, Any]
    own: Mapping[str, Any]
    hints: dict[str, Any] = field(default_factory=dict[str, Any])
    fields: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def session(self) -> tuple[str, str] | None:
        """Its session and the session's salt, or None."""
        name = {**self.own, **self.hints}.get("session")
        salt = self.fields.get("cache_salt", self.body.get("cache_salt"))
        return (name, salt if isinstance(salt, str) else "") if isinstance(name, str) else None


class AgentHints:
    """A middleware for mapping fields of agent clients to hints.

    Args:
        app: the application below it.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._boundary = Boundary("kvtrie middleware", _LOG)
        self._settings: ServedSettings | None = None
        self._lengths = PromptLengths(app)
        self._pauses, self._clock = Pauses(), time.monotonic
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, with hints if its body has fields to map."""
        path = path_of(scope)
        if path not in _CALLS:
            await self._app(scope, receive, send)
            return
        body = await Body.read(receive, _MOST_BODY)
        if body.too_long:
            self._ignored(path, "request", f"a body of more than {_MOST_BODY} bytes", "too long")
            if self._served(scope).tenant_header:
                await refuse(send, 413, f"a body of more than {_MOST_BODY} bytes has no tenant")
                return
        request = self._read(scope, path, body.content)
        if request is not None and (content := await self._changed(request)) is not None:
            body.replace(content)
            scope = with_body(scope, len(content))
        session = None if request is None else request.session
        answer = Answer(send, _CALLS[path] if session else b"")
        await self._app(scope, body.receive, answer.send)
        if answer.found and session is not None:
            self._pause(scope, path, session)

    def _served(self, scope: Scope) -> ServedSettings:
        """The operator's settings."""
        if self._settings is None:
            self._settings = ServedSettings()
            try:
                self._settings = ServedSettings.of(scope)
            except Exception as error:  # noqa: BLE001 - requests are served without them
                why = f"{error!r}" if not isinstance(error, ConfigError) else str(error)
                _LOG.error("kvtrie middleware: the connector's settings: %s", why)
        return self._settings

    def _read(self, scope: Scope, path: str, content: bytes | None) -> _Request | None:
        """Return a request, or None if its body cannot have hints."""
        try:
            body = None if content is None else json.loads(content)
        except (ValueError, RecursionError):  # the server says so to the client
            return None
        if content is None or not isinstance(body, Mapping):
            return None
        body = cast("Mapping[str, Any]", body)
        params = _object(body.get("kv_transfer_params"))
        if params is None:
            return None
        own = _object(params.get("kvtrie"))
        if own is None and not self._served(scope).tenant_header:
            return None
        return _Request(scope, path, headers_of(scope), content, body, params, own or {})

    async def _changed(self, request: _Request) -> bytes | None:
        """Return the body of a request with added fields, or None if it gets none."""
        self._name_tenant(request)
        try:
            request.hints |= await self._hinted(request)
        except Exception as error:  # noqa: BLE001 - the request is served without hints
            why = f"an unexpected error: {error!r}"
            self._ignored(request.path, "request", why, "an unexpected error")
        if request.session is not None and carries_tool_results(request.body):
            self._pauses.end(request.session, self._clock())
        kvtrie = {**request.own, **request.hints}
        if kvtrie != (request.params.get("kvtrie") or {}):
            request.fields["kv_transfer_params"] = {**request.params, "kvtrie": kvtrie}
        try:
            return _appended(request.content, request.fields) if request.fields else None
        except RecursionError:  # deeper than the server itself can read
            self._ignored(request.path, "request", "a body nested too deeply", "too deep")
            return None

    def _name_tenant(self, request: _Request) -> None:
        """Sign the tenant named by the front end. A client's own tenant fields are dropped."""
        served = self._served(request.scope)
        if not served.tenant_header:
            return
        request.own = {name: each for name, each in request.own.items() if name not in _TENANT}
        try:
            name = served.tenant_of(request.scope)
            request.hints |= signed(name, served.secret)
            salt = salt_of(name, served.secret)
        except ConfigError as error:
            self._ignored(request.path, "tenant", str(error), "not named")
            return
        if isinstance(own := request.body.get("cache_salt"), str) and own:
            digest = blake2b(own.encode("utf-8", "surrogatepass"), digest_size=16)
            salt = f"{salt}-{digest.hexdigest()}"
        request.fields["cache_salt"] = salt
        self._count("tenant", _MAPPED)

    async def _hinted(self, request: _Request) -> dict[str, Any]:
        """Return the hints mapped from a request's session and prompt markers."""
        hints: dict[str, Any] = {}
        if "session" not in request.own and (session := self._session(request)):
            hints["session"] = session
        if "retain" not in request.own and (rows := await self._retained(request)):
            hints["retain"] = rows
        for name in hints:
            self._count(name, _MAPPED)
        return hints

    def _session(self, request: _Request) -> str | None:
        try:
            found = session_of(request.body, request.headers)
            return None if found is None else session_name("session", found)
        except ConfigError as error:
            self._ignored(request.path, "session", str(error), "not a name")
            return None

    async def _retained(self, request: _Request) -> list[dict[str, Any]]:
        """Return the disjoint ranges of the prompt retained by markers."""
        markers, rows, start = read_markers(request.body), list[dict[str, Any]](), 0
        salt = request.fields.get("cache_salt", request.body.get("cache_salt"))
        for why in markers.ignored:
            self._ignored(request.path, "retain", why, why)
        for seconds, place in markers.found:
            row = {"start": start, "priority": _MARKED, "ttl_s": seconds}
            if place is not None:
                end = await self._lengths.of(request.scope, request.path, request.body, place, salt)
                if end is None:
                    why = "a marked prefix that cannot be rendered"
                    self._ignored(request.path, "retain", why, why)
                    continue
                if end <= start:
                    continue
                row["end"] = start = end
            rows.append(row)
        return rows

    def _pause(self, scope: Scope, path: str, session: tuple[str, str]) -> None:
        """Retain a session's blocks during its tool calls, and report their expected end."""
        expected = self._pauses.begin(session, self._clock())
        served = self._served(scope)
        if served.tenant_header or not served.sockets:
            # Commands find sessions by their salt, and a tenant's session has none.
            self._count("pause", "a tenant" if served.tenant_header else "no control socket")
            return
        rows = [{"priority": _PAUSED, "ttl_s": max(_PAUSE_S, 3 * expected)}]
        about = {"session": session[0], "cache_salt": session[1]}
        commands = {
            "/retain": {**about, "owner": "tools that run", "retain": rows},
            "/progress": {**about, "eta_s": expected},
        }
        task = asyncio.create_task(self._command(served.sockets, commands, path))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _command(
        self, sockets: tuple[str, ...], commands: Mapping[str, object], path: str
    ) -> None:
        """Send commands to all ranks: the middleware does not know the session's rank."""
        for socket, (route, command) in product(sockets, commands.items()):
            try:
                await asyncio.to_thread(ask, socket, route, json.dumps(command))
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


def _appended(content: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return the text of a JSON object with further fields at its end."""
    text = content.decode(json.detect_encoding(content), "surrogatepass").rstrip()
    own = text[:-1].rstrip()
    more = json.dumps(fields)[1:]
    return f"{own}{'' if own.endswith('{') else ', '}{more}".encode("utf-8", "surrogatepass")


def _object(given: object) -> Mapping[str, Any] | None:
    """Return a mapping, an empty mapping for null, or None for anything else."""
    if given is None:
        return {}
    return cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else None

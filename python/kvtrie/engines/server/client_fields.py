"""Reads session names and prefix markers of agents' clients from requests' JSON bodies.

Bodies have the shapes of OpenAI's chat completions, completions and responses, and of Anthropic's
messages. Markers are Anthropic's `cache_control` and OpenAI's `prompt_cache_breakpoint`,
`prompt_cache_options` and `prompt_cache_retention`.
Invariant: reading raises nothing and changes no body. Fields not understood are named in `ignored`.
Cost: a visit of each block of content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "Marker",
    "Markers",
    "Place",
    "carries_tool_results",
    "cut",
    "read_markers",
    "session_of",
]

_SECONDS = {"5m": 300, "30m": 1800, "1h": 3600, "12h": 43_200, "24h": 86_400}
_ANTHROPIC, _OPENAI, _RETENTION = ("5m", "1h"), ("30m", "12h"), ("24h",)
_IN_MEMORY = ("in_memory", "in-memory")  # OpenAI's default without the field
_SYSTEM = ("system", "developer")
_SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id")
_TEXT = (  # blocks rendered by a server without fetching or decoding anything
    "text",
    "input_text",
    "output_text",
    "reasoning_text",
    "thinking",
    "redacted_thinking",
    "refusal",
    "tool_use",
    "tool_result",
    "tool_reference",
)


class Place(NamedTuple):
    """The end of a marked prefix in a body.

    Attributes:
        part: the field with the marked block: tools, system, or the field with the messages.
        at: items of the field before the block's item.
        upto: blocks of this item up to the marked block, 0 for the whole item.
    """

    part: str
    at: int
    upto: int = 0


class Marker(NamedTuple):
    """A marked prefix of a prompt.

    Attributes:
        seconds: caching time requested by the client.
        place: its end, None for the end of the prompt.
    """

    seconds: int
    place: Place | None = None


@dataclass(slots=True)
class Markers:
    """The markers of a body.

    Attributes:
        found: valid markers, in the order of the prompt: tools, system, messages. A marker is
            dropped if a later marker lasts at least as long, so times fall.
        ignored: reasons for ignored markers, without any text of a client.
    """

    found: list[Marker] = field(default_factory=list[Marker])
    ignored: list[str] = field(default_factory=list[str])

    def add(self, times: Iterable[int], place: Place | None = None) -> None:
        """Add markers at a place after all earlier markers."""
        for seconds in times:
            while self.found and self.found[-1].seconds <= seconds:
                self.found.pop()
            self.found.append(Marker(seconds, place))


def session_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """Return the name of a request's conversation.

    The first value present is used: the body's `session_id`, the headers `X-Session-ID` and
    `X-Claude-Code-Session-Id`, `vllm_xargs.session_id`, `metadata.session_id`, the session in
    `metadata.user_id` or its whole value, `prompt_cache_key`, and `user`.

    Args:
        body: the body of the request.
        headers: the headers, by name in lower case.
    """
    extra, metadata = (_object(body.get(name)) for name in ("vllm_xargs", "metadata"))
    names = [
        body.get("session_id"),
        *(headers.get(name) for name in _SESSION_HEADERS),
        extra.get("session_id"),
        metadata.get("session_id"),
        _session_of_user(metadata.get("user_id")),
        body.get("prompt_cache_key"),
        body.get("user"),
    ]
    return next((name for name in names if isinstance(name, str) and name), None)


def _session_of_user(user: object) -> object:
    """Return the session written by Claude Code to `metadata.user_id`, else the user.

    The form is `user_…_account_…_session_ID`, in newer versions a JSON object with `session_id`.
    """
    if not isinstance(user, str):
        return None
    if user.startswith("{"):
        try:
            return _object(json.loads(user)).get("session_id") or user
        except (ValueError, RecursionError):
            return user
    return user.rpartition("_session_")[2]


def carries_tool_results(body: Mapping[str, Any]) -> bool:
    """Return whether a request continues after a tool call: its last message is a tool result."""
    last = _object((_list(body.get(_conversation(body))) or [None])[-1])
    if last.get("role") in ("tool", "function"):
        return True
    if str(last.get("type")).endswith("_call_output"):
        return True
    return any(_object(each).get("type") == "tool_result" for each in _list(last.get("content")))


def read_markers(body: Mapping[str, Any]) -> Markers:
    """Read the markers of a body."""
    markers = Markers()
    options = _object(body.get("prompt_cache_options"))
    default = options.get("ttl") or "30m"
    media = False
    for block, place, content in _blocks(body):
        media |= content and block.get("type") not in _TEXT
        times = [*_seconds(block, default, markers.ignored)]
        if times and media and place is not None:
            markers.ignored.append("a marker after media")
        else:
            markers.add(times, place)
    markers.add(_seconds(body, default, markers.ignored))
    if options and options.get("mode", "implicit") == "implicit":
        markers.add(_known(default, _OPENAI, markers.ignored))
    retention = body.get("prompt_cache_retention")
    if retention is not None and retention not in _IN_MEMORY:
        markers.add(_known(retention, _RETENTION, markers.ignored))
    return markers


def cut(body: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Return the changed fields of a body with its prompt cut at a place."""
    name = _conversation(body)
    messages = _list(body.get(name))
    if place.part == "tools":
        # Templates write tools next to the system prompt, before or after it.
        opening = 0
        while opening < len(messages) and _object(messages[opening]).get("role") in _SYSTEM:
            opening += 1
        return {name: messages[:opening]}
    if place.part == "system":
        return {"system": _list(body.get("system"))[: place.at + 1], name: []}
    kept = messages[: place.at + 1]
    if place.upto:
        last = _object(kept[-1])
        kept[-1] = {**last, "content": _list(last.get("content"))[: place.upto]}
    return {name: kept}


def _blocks(
    body: Mapping[str, Any],
) -> Iterator[tuple[Mapping[str, Any], Place | None, bool]]:
    """Yield each part that may have a marker, its place, and whether it is a block of content."""
    name = _conversation(body)
    messages = _list(body.get(name))
    for part in ("tools", "system"):
        for at, block in enumerate(_list(body.get(part))):
            yield _object(block), Place(part, at), part == "system"
    for at, message in enumerate(messages):
        end = Place(name, at) if at + 1 < len(messages) else None
        content = _list(_object(message).get("content"))
        for upto, block in enumerate(content, 1):
            place = Place(name, at, upto) if upto < len(content) else end
            for inner in _list(_object(block).get("content")):  # of a tool's result
                yield _object(inner), place, True
            yield _object(block), place, True
        yield _object(message), end, False


def _seconds(block: Mapping[str, Any], default: object, ignored: list[str]) -> Iterator[int]:
    """Yield the times of the markers of a block."""
    if (marker := block.get("cache_control")) is not None:
        given = _object(marker)
        if given.get("type") == "ephemeral":
            yield from _known(given.get("ttl") or "5m", _ANTHROPIC, ignored)
        else:
            ignored.append("an unknown marker")
    if (marker := block.get("prompt_cache_breakpoint")) is not None:
        given = _object(marker)
        if given.get("mode") == "explicit":
            yield from _known(given.get("ttl") or default, _OPENAI, ignored)
        else:
            ignored.append("an unknown marker")


def _known(time: object, times: tuple[str, ...], ignored: list[str]) -> list[int]:
    if isinstance(time, str) and time in times:
        return [_SECONDS[time]]
    ignored.append("an unknown time of a marker")
    return []


def _conversation(body: Mapping[str, Any]) -> str:
    return "input" if "input" in body else "messages"


def _object(given: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else {}


def _list(given: object) -> list[Any]:
    return cast("list[Any]", given) if isinstance(given, list) else []

"""Hints of a vLLM request: its priority, its ranges and its envelope, as hints of the manager.

vLLM passes on an envelope `kv_hints` of actions, each with a type, a version and a payload, without
interpreting it. Four types are supported: `kv.retain`, `kv.release` (also called `kv.deref`),
`kv.prefetch` and `kv.progress`, of version 1.
Invariant: a hint is soft. An invalid action is reported in `ignored`, and the valid actions apply.
Cost: a hint per action and range, once per request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvtrie.engines.server.request_hints import FAR, MOST_RANGES, RetainedRange, session_name
from kvtrie.errors import ConfigError, KvtrieError
from kvtrie.settings.argument import few, flag, real, shown
from kvtrie.settings.hint import Prefetch, Progress, Release, Retain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    from kvtrie.settings.hint import Hint
    from kvtrie.settings.scope import Scope

__all__ = ["EnvelopeHints", "envelope_hints", "envelope_ranges", "priority_hint", "range_hints"]

_PLAIN, _HIGHEST = 35, 100
_ITS_OWN = "the session of the request"  # for a caller without its name
_SERVED = ("kv.retain", "kv.prefetch", "kv.progress")
_RELEASES = ("kv.release", "kv.deref")
_RANGE = ("start", "end", "priority", "duration", "covers_output")
_MOST_ACTIONS = 64
_LONGEST_S = 1e9


@dataclass(slots=True)
class EnvelopeHints:
    """Hints read from an envelope.

    Attributes:
        hints: for the manager, at once.
        end: whether the session ends with this request.
        ignored: the invalid actions and the reasons.
    """

    hints: list[Hint] = field(default_factory=list["Hint"])
    end: bool = False
    ignored: list[str] = field(default_factory=list[str])


def envelope_hints(
    envelope: KvHintsEnvelope,
    tokens: NDArray[np.uint32],
    scope: Scope | None,
    session: str | None,
    now: int = 0,
) -> EnvelopeHints:
    """Return the hints in a request's envelope.

    Args:
        envelope: with `actions`, each with an `action_type`, an `action_version` and a `payload`.
        tokens: the request's prompt.
        scope: the scope of its blocks.
        session: its session.
        now: the start of a prefetch's deadline.
    """
    advice = EnvelopeHints()
    actions = cast("object", envelope.actions)
    if not isinstance(actions, Sequence):
        advice.ignored.append(f"actions are {shown(actions)}, a list wanted")
        return advice
    for at, action in enumerate(cast("Sequence[KvHintAction]", actions)):
        if at == _MOST_ACTIONS:
            advice.ignored.append(f"{len(envelope.actions)} actions, the first {at} are read")
            break
        try:
            _serve(action, advice, tokens, scope, session, now=now)
        except (KvtrieError, TypeError, ValueError, AttributeError) as error:
            kind = shown(getattr(action, "action_type", None))
            advice.ignored.append(f"{kind}: {error}")
    return advice


def envelope_ranges(envelope: KvHintsEnvelope) -> tuple[list[RetainedRange], list[str]]:
    """Return the prompt ranges retained by an envelope, for a cache with opaque keys.

    A release of the request's session gives the prompt the lowest priority. Hints on further
    sessions and prefetches are not supported there.

    Returns:
        The ranges, and the unsupported actions with the reasons.
    """
    advice = envelope_hints(envelope, np.zeros(0, np.uint32), None, _ITS_OWN)
    ranges = [RetainedRange(0, FAR, 0, None)] if advice.end else []
    for hint in advice.hints:
        if isinstance(hint, Retain) and hint.tokens is not None:
            last = FAR if hint.end is None else hint.end
            ranges.append(
                RetainedRange(hint.start, last, hint.priority, cast("int | None", hint.ttl))
            )
        else:
            advice.ignored.append(f"{type(hint).__name__}: nothing is known of that here")
    return ranges, advice.ignored


def _serve(
    action: KvHintAction,
    advice: EnvelopeHints,
    tokens: NDArray[np.uint32],
    scope: Scope | None,
    session: str | None,
    *,
    now: int,
) -> None:
    kind, version = str(action.action_type), str(action.action_version)
    if kind not in (*_SERVED, *_RELEASES):
        raise ConfigError(f"no such action: {', '.join(_SERVED)} and {_RELEASES[0]} are served")
    if version.partition(".")[0] != "1":
        raise ConfigError(f"version {shown(version)}: version 1 is served")
    payload = cast("Mapping[str, Any]", action.payload)
    if kind == "kv.retain":
        _check_keys(payload, ("scope", "directives"))
        owner = _session("scope", payload.get("scope")) or session
        # All or nothing: an invalid range makes its whole action invalid.
        rows = few("directives", payload.get("directives") or (), MOST_RANGES)
        advice.hints += [_retain(row, tokens, scope, owner, session) for row in rows]
        return
    if kind == "kv.progress":
        _check_keys(payload, ("session_id", "eta"))
        advice.hints.append(_progress(payload, scope, session))
        return
    _check_keys(payload, ("session_id", "deadline") if kind == "kv.prefetch" else ("session_id",))
    named = _session("session_id", payload.get("session_id"))
    if kind == "kv.prefetch":
        prompt = tokens.copy() if named is None else None
        deadline = None
        if payload.get("deadline") is not None:
            deadline = now + round(real("deadline", payload["deadline"], 0, _LONGEST_S) * 1e9)
        advice.hints.append(
            Prefetch(tokens=prompt, session=named, tier="host", deadline=deadline, scope=scope)
        )
    elif named is None or named == session:
        if session is None:
            raise ConfigError("neither the request nor the action names a session")
        advice.end = True
    else:
        advice.hints.append(Release(session=named, scope=scope))


def _progress(payload: Mapping[str, Any], scope: Scope | None, session: str | None) -> Progress:
    named = _session("session_id", payload.get("session_id")) or session
    if named is None:
        raise ConfigError("neither the request nor the action names a session")
    eta = timedelta(seconds=real("eta", payload.get("eta"), 0, _LONGEST_S))
    return Progress(session=named, eta=eta, tier="host", scope=scope)


def _session(name: str, given: object) -> str | None:
    return None if given is None else session_name(name, given)


def _check_keys(given: object, keys: tuple[str, ...]) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"it says {shown(given)}, an object wanted")
    named = cast("Mapping[object, object]", given)
    if unknown := [shown(key) for key in named if key not in keys]:
        raise ConfigError(f"it has no {', '.join(unknown)}: {', '.join(keys)}")


def _retain(
    row: Mapping[str, Any],
    tokens: NDArray[np.uint32],
    scope: Scope | None,
    owner: str | None,
    session: str | None,
) -> Retain:
    _check_keys(row, _RANGE)
    if "priority" not in row:
        raise ConfigError("a range without a priority")
    seconds = row.get("duration")
    ttl = None if seconds is None else timedelta(seconds=real("duration", seconds, 0, _LONGEST_S))
    if not flag("covers_output", row.get("covers_output", False)):
        return Retain(
            tokens=tokens.copy(),
            scope=scope,
            owner=owner,
            priority=row["priority"],
            start=row.get("start", 0),
            end=row.get("end"),
            ttl=ttl,
        )
    if session is None or "start" in row or "end" in row:
        raise ConfigError("covers_output is said of a session's answers, without a range")
    # The prompt is not retained: an empty range.
    return Retain(
        session=session,
        scope=scope,
        owner=owner,
        end=0,
        decode_priority=row["priority"],
        decode_ttl=ttl,
    )


def range_hints(
    ranges: Iterable[RetainedRange],
    tokens: NDArray[np.uint32],
    scope: Scope | None,
    owner: str | None,
) -> list[Retain]:
    """Return the hints for retaining ranges of a prompt.

    Args:
        ranges: the ranges.
        tokens: the request's prompt.
        scope: the scope of its blocks.
        owner: its session, or None.
    """
    return [
        Retain(
            tokens=tokens.copy(),
            scope=scope,
            owner=owner,
            priority=each.priority,
            start=each.start,
            end=None if each.last == FAR else each.last,
            ttl=each.ttl_ns,
        )
        for each in ranges
    ]


def priority_hint(
    rank: int, tokens: NDArray[np.uint32], scope: Scope | None, owner: str | None
) -> Retain:
    """Return the retention hint for a request's `priority`: vLLM serves low numbers first.

    0 is the default priority. Each step below 0 raises kvtrie's priority (0 to 100) by 1, each step
    above lowers it by 1.
    """
    priority = min(max(_PLAIN - rank, 0), _HIGHEST)
    return Retain(tokens=tokens.copy(), scope=scope, owner=owner, priority=priority)

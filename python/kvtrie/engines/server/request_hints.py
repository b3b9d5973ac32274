"""RequestHints: the hints in the fields of a request, read and checked once.

Used by all engines. Invariant: reading raises nothing. Invalid fields are left out and named in
`ignored`. Cost: a few checks per range, once per request. At most `MOST_RANGES` ranges are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import few, flag, real, shown, text, whole

__all__ = [
    "FAR",
    "MOST_RANGES",
    "RequestHints",
    "RetainedRange",
    "read_hints",
    "read_ranges",
    "session_name",
]

FAR = 2**63 - 1
"""End of a range without an end."""

MOST_RANGES = 64
"""Maximum number of ranges read from a request."""

_KEYS = ("session", "end", "retain", "why")
_SIGNED = ("tenant", "tenant_mac")  # by the front end, for `tenant.py`
_RANGE = ("start", "end", "priority", "ttl_s")
_NORMAL, _HIGHEST = 35, 100
_LONGEST_NAME = 256  # bytes: a manager keeps the names of sessions
_SHORTEST_S, _LONGEST_S = 1e-9, 1e9


class RetainedRange(NamedTuple):
    """A range of a prompt to keep.

    Attributes:
        start: its first token.
        last: its end (exclusive).
        priority: 0 to 100.
        ttl_ns: time to keep it in nanoseconds, None for no limit.
    """

    start: int
    last: int
    priority: int
    ttl_ns: int | None


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The valid part of a request's hints.

    Attributes:
        session: the conversation of the request.
        end: whether the conversation ends with this request.
        ranges: the ranges of its prompt to keep.
        why: whether the request asks for the causes of its misses.
        ignored: the fields left out, with reasons.
    """

    session: str | None = None
    end: bool = False
    ranges: tuple[RetainedRange, ...] = ()
    ignored: tuple[str, ...] = ()
    why: bool = False


def read_hints(params: object, session: object = None) -> RequestHints:
    """Read `{"kvtrie": {"session": ..., "end": ..., "retain": [...], "why": ...}}`.

    Args:
        params: the parameters of a request, of any type.
        session: the conversation, if the parameters name none.
    """
    ignored: list[str] = []
    given = _section(params, ignored)
    ignored += [
        f"it has no {shown(key)}: {', '.join(_KEYS)}"
        for key in given
        if key not in (*_KEYS, *_SIGNED)
    ]
    named = given.get("session")
    if named is None or named == "":
        named = session
    found, ranges = None, list[RetainedRange]()
    try:
        found = None if named is None or named == "" else session_name("session", named)
    except ConfigError as error:
        ignored.append(str(error))
    end, why = (_flag(name, given, ignored) for name in ("end", "why"))
    rows = given.get("retain")
    if rows is not None and (not isinstance(rows, Sequence) or isinstance(rows, str)):
        ignored.append(f"retain is {shown(rows)}, a list of ranges wanted")
        rows = None
    listed = cast("Sequence[object]", rows or ())
    if len(listed) > MOST_RANGES:
        ignored.append(f"retain has {len(listed)} ranges, the first {MOST_RANGES} are read")
    for row in listed[:MOST_RANGES]:
        try:
            ranges.append(_retained_range(row))
        except ConfigError as error:
            ignored.append(str(error))
    return RequestHints(found, end, tuple(ranges), tuple(ignored), why)


def session_name(name: str, given: object) -> str:
    """Check the name of a session chosen by a client.

    Raises:
        ConfigError: no str, lone surrogates, or more than 256 bytes.
    """
    found = text(name, given)
    if (size := len(found.encode())) > _LONGEST_NAME:
        raise ConfigError(f"{name} has {size} bytes, at most {_LONGEST_NAME} wanted")
    return found


def read_ranges(rows: object) -> tuple[RetainedRange, ...]:
    """Check ranges to keep, all or none.

    Raises:
        ConfigError: no list, more than `MOST_RANGES`, or an invalid range.
    """
    return tuple(_retained_range(row) for row in few("retain", rows, MOST_RANGES))


def _flag(name: str, given: Mapping[str, Any], ignored: list[str]) -> bool:
    try:
        return given.get(name) is not None and flag(name, given[name])
    except ConfigError as error:
        ignored.append(str(error))
        return False


def _section(params: object, ignored: list[str]) -> Mapping[str, Any]:
    if not isinstance(params, Mapping):
        return {}
    given = cast("Mapping[str, object]", params).get("kvtrie")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        ignored.append(f"kvtrie is {shown(given)}, an object wanted")
        return {}
    return cast("Mapping[str, Any]", given)


def _retained_range(row: object) -> RetainedRange:
    if not isinstance(row, Mapping):
        raise ConfigError(f"a range is {shown(row)}, an object wanted")
    given = cast("Mapping[str, object]", row)
    if unknown := [shown(key) for key in given if key not in _RANGE]:
        raise ConfigError(f"retain has no {', '.join(unknown)}: {', '.join(_RANGE)}")
    start = whole("start", given.get("start", 0), 0, FAR)
    end, seconds = given.get("end"), given.get("ttl_s")
    last = FAR if end is None else whole("end", end, 0, FAR)
    if last < start:
        raise ConfigError(f"a range of tokens from {start} to {last}")
    ttl = None
    if seconds is not None:
        ttl = int(real("ttl_s", seconds, _SHORTEST_S, _LONGEST_S) * 1e9)
    priority = whole("priority", given.get("priority", _NORMAL), 0, _HIGHEST)
    return RetainedRange(start, last, priority, ttl)

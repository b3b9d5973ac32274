"""Waits: requests arriving only after the end of earlier requests of the trace.

`request_id` names a request, and `wait_for` lists names of requests above it. `tool_wait_ms` plus
`delay` is the pause between their last answer and the request.
Invariant: a request waits only for requests above it, so there are no cycles. Cost: the position of
each named request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import real, shown, text

if TYPE_CHECKING:
    from kvtrie.sim.readers.rows import OptionalFields

__all__ = ["Waits", "waits_of"]

_NS_PER_MS = 1e6
_LONGEST_MS = 2**53 / _NS_PER_MS
_TWICE = -1


def waits_of(row: dict[str, Any]) -> tuple[str | None, list[Any] | None, float | None] | None:
    """Return `(request_id, wait_for, pause in ms)` of a line, or None without any of them.

    Raises:
        ConfigError: a name neither text nor whole number, no list of names, or an invalid pause.
    """
    name, parents = row.get("request_id"), row.get("wait_for")
    pauses = [row.get("tool_wait_ms"), row.get("delay") if parents else None]
    if name is None and parents is None and pauses == [None, None]:
        return None
    name = None if name is None else _name("request_id", name)
    if not isinstance(parents, (list, type(None))):
        raise ConfigError(f"wait_for is {shown(parents)}, a list of names wanted")
    pause = sum(
        real(field, given, 0, _LONGEST_MS)
        for field, given in zip(("tool_wait_ms", "delay"), pauses, strict=True)
        if given is not None
    )
    listed = cast("list[Any] | None", parents)
    return name, listed, None if pauses == [None, None] else pause


class Waits:
    """Positions of the named requests of a trace."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def more(
        self, name: str | None, parents: list[Any] | None, pause_ms: float | None
    ) -> OptionalFields:
        """Return the wait fields of a request.

        Args:
            name: name of the request, if any.
            parents: names of the requests to wait for.
            pause_ms: delay from their ends to its arrival.

        Raises:
            ConfigError: an unknown or ambiguous name.
        """
        more: OptionalFields = {"named": name is not None}
        if parents:
            more["after"] = [self._place(at, one, name) for at, one in enumerate(parents)]
            more["pause"] = round((pause_ms or 0) * _NS_PER_MS)
        return more

    def add(self, name: str | None, place: int) -> None:
        """Record the name of the request at a position."""
        if name is not None:
            self._places[name] = _TWICE if name in self._places else place

    def _place(self, at: int, given: object, name: str | None) -> int:
        parent = _name(f"wait_for[{at}]", given)
        place = self._places.get(parent)
        if place is None:
            which = "itself" if parent == name else "one that no line above has as its request_id"
            raise ConfigError(f"wait_for[{at}] is {shown(parent)}, {which}: one above it wanted")
        if place == _TWICE:
            raise ConfigError(
                f"wait_for[{at}] is {shown(parent)}, the request_id of two lines above: one wanted"
            )
        return place


def _name(field: str, given: object) -> str:
    return str(given) if type(given) is int else text(field, cast("Any", given))

"""Times of traces: numbers with a unit, text of digits, or dates.

The first time decides the unit. A number between the years 2000 and 2100 in seconds, milliseconds,
microseconds or nanoseconds since 1970 has this unit, any remaining number has milliseconds. Times
since 1970 and dates are relative to the first time.
Invariant: all times of a file have the same unit, and never decrease. Cost: a multiplication per
whole number.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import shown
from kvtrie.sim.readers.lines import Ascending

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TIME_UNITS", "Clock", "moment"]

TIME_UNITS = ("auto", "s", "ms", "us", "ns")
"""Units of times. The first detects the unit from the first time."""

_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_SINCE, _UNTIL = 946_684_800, 4_102_444_800  # seconds from 1970 to the years 2000 and 2100
_LATEST = 2**63
_DIGITS = re.compile(r"\d{1,20}(\.\d{1,9})?", re.ASCII)
_MOMENT = re.compile(
    r"(\d{4}-?\d\d-?\d\d[ T]\d\d:?\d\d(?::?\d\d)?)(?:[.,](\d{1,9}))?(.*)", re.ASCII
)


def moment(name: str, text: str) -> int:
    """Return an ISO 8601 date and time in nanoseconds since 1970, in UTC unless it has a zone.

    Args:
        name: name of the field, for messages.
        text: date and time.

    Raises:
        ConfigError: not a date and time.
    """
    found = _MOMENT.fullmatch(text)
    try:
        if found is None:
            raise ValueError  # noqa: TRY301 - the same message as for a thirteenth month
        seconds, part, zone = found.groups()
        date = datetime.fromisoformat(seconds + (zone or "+00:00")).astimezone(UTC)
    except (ValueError, OverflowError):  # before the year 1 in UTC
        raise ConfigError(f"{name} is {shown(text)}, a date and time wanted") from None
    return int(date.timestamp()) * _NS["s"] + int((part or "").ljust(9, "0"))


class Clock:
    """Clock converting the times of a trace to nanoseconds from its start.

    Args:
        unit: a unit in `TIME_UNITS`.
        on_unit: called once with the detected unit, except for plain numbers from 0 on and dates.
    """

    def __init__(self, unit: str, on_unit: Callable[[str], object]) -> None:
        self._given = None if unit == TIME_UNITS[0] else unit
        self._on_unit = on_unit
        self._unit = ""
        self._ns = 1
        self._plain = range(0)  # numbers in the unit of the first
        self._base = 0
        self._order = Ascending("timestamp")

    @property
    def last(self) -> int:
        """Time of the last request, in ns."""
        return self._order.last

    def take(self, given: object) -> int:
        """Return the time of `timestamp`.

        Raises:
            ConfigError: not a time, a different unit than above, or before the last time.
        """
        if type(given) is int and given in self._plain:
            return self._order.take(given * self._ns - self._base)
        if isinstance(given, str) and _DIGITS.fullmatch(given) is None:
            return self._take(moment("timestamp", given), "date")
        number = Decimal(given) if isinstance(given, str) else given
        if isinstance(number, bool) or not isinstance(number, (int, float, Decimal)):
            raise ConfigError(f"timestamp is {shown(given)}, a number, digits or a date wanted")
        guess = self._given or next((unit for unit in _NS if _since_1970(number, unit)), None)
        unit = guess or (self._unit if self._unit in _NS else "ms")
        if self._given is None and unit == "s" and self._unit == "ms" and not self._base:
            unit = "ms"  # eleven days after the start
        if not 0 <= number <= _LATEST // _NS[unit]:
            raise ConfigError(
                f"timestamp is {shown(given)}, a number from 0 to {_LATEST // _NS[unit]} wanted"
            )
        at = int(number * _NS[unit])
        new = not self._unit
        taken = self._take(at, unit, since_1970=_since_1970(number, unit))
        if new and self._given is None and (self._base or isinstance(given, str)):
            self._on_unit(unit)
        return taken

    def take_ns(self, at: int) -> int:
        """Return the time of `arrival_ns`.

        Raises:
            ConfigError: as for `take`.
        """
        if self._unit == "arrival_ns":
            return self._order.take(at)
        return self._take(at, "arrival_ns", since_1970=False)

    def _take(self, at: int, unit: str, *, since_1970: bool = True) -> int:
        if not self._unit:
            self._unit = unit
            self._base = at if since_1970 else 0
            if unit in _NS:
                self._ns = _NS[unit]
                each = _NS["s"] // self._ns
                self._plain = (
                    range(_SINCE * each, _UNTIL * each) if since_1970 else range(_SINCE * each)
                )
            self._order = Ascending("timestamp", unit, self._ns)
        elif unit != self._unit:
            raise ConfigError(
                f"the time is one in {_named(unit)}, but those above are in {_named(self._unit)}: "
                "one unit wanted"
            )
        return self._order.take(at - self._base)


def _since_1970(number: float | Decimal, unit: str) -> bool:
    each = _NS["s"] // _NS[unit]
    return _SINCE * each <= number < _UNTIL * each


def _named(unit: str) -> str:
    return {"date": "dates"}.get(unit, unit)

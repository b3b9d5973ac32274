"""Times of traces: numbers in a unit, text of digits, dates.

The first time decides the unit: a number between the years 2000 and 2100 in seconds, milliseconds,
microseconds or nanoseconds since 1970 is in that unit, any other in milliseconds. Times since 1970
and dates count from the first one.
Invariant: all times of a file have one unit, and none is before the one above it. Cost: a
multiplication for a whole number.
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
"""Units of times; the first takes what the first time suggests."""

_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_SINCE, _UNTIL = 946_684_800, 4_102_444_800  # seconds from 1970 to the years 2000 and 2100
_LATEST = 2**63
_DIGITS = re.compile(r"\d{1,20}(\.\d{1,9})?", re.ASCII)
_MOMENT = re.compile(
    r"(\d{4}-?\d\d-?\d\d[ T]\d\d:?\d\d(?::?\d\d)?)(?:[.,](\d{1,9}))?(.*)", re.ASCII
)


def moment(name: str, text: str) -> int:
    """Return a date and time of ISO 8601 in nanoseconds since 1970; without a zone it is UTC.

    Args:
        name: of the field, for the message.
        text: the date and time.

    Raises:
        ConfigError: it is none.
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
    """Times of a trace's requests in nanoseconds from its start.

    Args:
        unit: one of `TIME_UNITS`.
        on_unit: called once with the unit that the first time suggests, unless it is that of plain
            numbers from 0 on, or a date.
    """

    def __init__(self, unit: str, on_unit: Callable[[str], object]) -> None:
        self._given = None if unit == TIME_UNITS[0] else unit
        self._on_unit = on_unit
        self._unit = ""
        self._ns = 1
        self._plain = range(0)  # numbers that are in the unit of the first
        self._base = 0
        self._order = Ascending("timestamp")

    @property
    def last(self) -> int:
        """The time of the last request, in ns."""
        return self._order.last

    def take(self, given: object) -> int:
        """Return the time of `timestamp`.

        Raises:
            ConfigError: no time, another unit than those above, or before the last one.
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
            ConfigError: as of `take`.
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

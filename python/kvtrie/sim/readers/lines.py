"""Lines: a trace's lines, each checked before it is played.

Invariant: a line that cannot be ends the run with its number and the field, or with `Skipped` is
counted and left out. Cost: one line is held.
"""

from __future__ import annotations

import logging
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.input import json_of
from kvtrie.settings.argument import shown
from kvtrie.sim.readers.compressed import open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = [
    "MOST",
    "MOST_BLOCKS",
    "MOST_CHARACTERS",
    "UNREAD",
    "Ascending",
    "Skipped",
    "check_blocks",
    "checked",
    "ids_of",
    "lines_of",
    "log_unit",
    "name_unread",
    "row_of",
]

MOST = 2**32 - 1
"""The greatest token, id and count."""

MOST_CHARACTERS = 2**26
"""The longest line, and the longest conversation of ShareGPT."""

MOST_BLOCKS = 2**20
"""The most blocks of one prompt, unless a tier holds more: a short line can name billions."""

UNREAD = (
    *("chat_id", "parent_chat_id", "delay", "turn", "type"),
    *("request_id", "wait_for", "branches", "prefix_reset", "tool_wait_ms"),
)
"""Fields that other simulators read and this one does not, or not everywhere."""

_LOG = logging.getLogger(__name__)
_Parsed = TypeVar("_Parsed")


class Skipped:
    """The lines that were left out.

    Attributes:
        lines: how many.
        parsed: how many others there were.
        first: what was wrong with the first.
    """

    def __init__(self) -> None:
        self.lines = self.parsed = 0
        self.first: ConfigError | None = None

    def add(self, error: ConfigError) -> None:
        """Count one."""
        self.lines += 1
        self.first = self.first or error


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are not empty, with their numbers from 1 on.

    Raises:
        ConfigError: the file cannot be read, or a line has more than `MOST_CHARACTERS`: a small
            compressed file can expand to one line that fills the memory.
    """
    with open_trace(path) as file:
        for number, line in enumerate(iter(partial(file.readline, MOST_CHARACTERS + 1), ""), 1):
            if len(line) > MOST_CHARACTERS:
                raise ConfigError(
                    f"{path}, line {number}: more than {MOST_CHARACTERS} characters, the most "
                    "that are read as one line"
                )
            if line.strip():
                yield number, line


def checked(
    path: Path,
    lines: Iterable[tuple[int, str]],
    parse: Callable[[str], _Parsed],
    skipped: Skipped | None,
) -> Iterator[_Parsed]:
    """Yield each line as `parse` reads it.

    Args:
        path: for the messages.
        lines: with their numbers.
        parse: raises `ConfigError` for a line that cannot be.
        skipped: counts such lines; None ends with the first.

    Raises:
        ConfigError: a line that cannot be, or no line that can.
    """
    found = False
    for number, line in lines:
        try:
            parsed = parse(line)
        except ConfigError as error:
            refused = ConfigError(f"{path}, line {number}: {error}")
            if skipped is None:
                raise refused from None
            skipped.add(refused)
            continue
        found = True
        if skipped is not None:
            skipped.parsed += 1
        yield parsed
    if not found:
        left = f": {skipped.first}" if skipped and skipped.first else ""
        raise ConfigError(f"the trace {path} holds no request{left}")


class Ascending:
    """The times of a trace, which may not go back.

    A time counts from when it is taken, so a line that is left out sets none.

    Args:
        name: of the field, for the message.
        unit: of the field, for the message.
        ns: nanoseconds of that unit.
    """

    def __init__(self, name: str, unit: str = "", ns: int = 1) -> None:
        self._name, self._unit, self._ns = name, unit, ns
        self._last = 0

    @property
    def last(self) -> int:
        """The last time, in ns."""
        return self._last

    def take(self, at: int) -> int:
        """Return a time in ns that is not before the last one.

        Raises:
            ConfigError: it is before the last one.
        """
        if at < self._last:
            found, last = at, self._last
            if self._ns > 1:
                found, last = at / self._ns, self._last / self._ns
            unit = self._unit and f" {self._unit}"
            raise ConfigError(
                f"{self._name} is {found}{unit}, before the {last}{unit} of the request above"
            )
        self._last = at
        return at


def row_of(line: str) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        ConfigError: it is none.
    """
    row = json_of(line, "no JSON")
    if not isinstance(row, dict):
        raise ConfigError(f"a JSON object wanted, not {line.strip()[:40]}")
    return cast("dict[str, Any]", row)


def check_blocks(blocks: int, most: int) -> None:
    """Refuse a prompt before its blocks are made.

    Args:
        blocks: number of its blocks.
        most: the most that are allowed.

    Raises:
        ConfigError: more blocks than `most`.
    """
    if blocks > most:
        raise ConfigError(
            f"the prompt has {blocks} blocks, at most {most} wanted: more than any tier holds"
        )


def name_unread(path: Path, names: Collection[str], *, waits: bool = False) -> None:
    """Log fields that other simulators read and this one does not, each once a file.

    Args:
        path: the file.
        names: of the fields of a line, those of `UNREAD` among them.
        waits: whether `wait_for` is read.
    """
    logged = _logged(path)
    unread = [name for name in UNREAD if name in names and name not in logged]
    if not unread:
        return
    logged.update(unread)
    listed = " and ".join([*([", ".join(unread[:-1])] if unread[1:] else []), unread[-1]])
    _LOG.warning(
        "%s: %s not read: requests come at their timestamps%s, no prefix is reset, and `session` "
        "or `session_id` names the conversation",
        path,
        f"{listed} {'are' if unread[1:] else 'is'}",
        " or after those of `wait_for`" if waits else "",
    )


def log_unit(path: Path, unit: str) -> None:
    """Log the unit in which the times of a file are read, once a file.

    Args:
        path: the file.
        unit: one of `times.TIME_UNITS`.
    """
    logged = _logged(path)
    if unit not in logged:
        logged.add(unit)
        _LOG.warning(
            "%s: timestamp is read in %s, by its first value; --time-unit or trace.time_unit takes "
            "another unit",
            path,
            unit,
        )


@lru_cache(maxsize=256)
def _logged(path: Path) -> set[str]:
    """The fields and units of a file that were logged."""
    del path  # of which the cache has one set
    return set()


def ids_of(name: str, given: object) -> NDArray[np.uint32]:
    """Return a list of at least one integer below 2**32 as uint32 `(n,)`.

    Args:
        name: of the field, for the message.
        given: its value.

    Raises:
        ConfigError: another value; it names the place.
    """
    if not isinstance(given, list) or not given:
        raise ConfigError(f"{name} is {shown(cast('Any', given))}, a list of at least one wanted")
    ids = cast("list[Any]", given)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= MOST:
        return np.array(ids, dtype=np.uint32)
    wrong = (at for at, one in enumerate(ids) if type(one) is not int or not 0 <= one <= MOST)
    at = next(wrong)
    raise ConfigError(f"{name}[{at}] is {shown(ids[at])}, 0 to {MOST} wanted")

"""Lines of a trace, each checked before it is played.

Invariant: an invalid line ends the run with its number and the field, or is counted and skipped
with `Skipped`. Cost: a line in memory.
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
"""Maximum of tokens, ids and counts."""

MOST_CHARACTERS = 2**26
"""Maximum length of a line and of a ShareGPT conversation."""

MOST_BLOCKS = 2**20
"""Default maximum of blocks per prompt, because a short line can claim billions."""

UNREAD = (
    *("chat_id", "parent_chat_id", "delay", "turn", "type"),
    *("request_id", "wait_for", "branches", "prefix_reset", "tool_wait_ms"),
)
"""Trace fields of third-party simulators, not read here or not in every mode."""

_LOG = logging.getLogger(__name__)
_Parsed = TypeVar("_Parsed")


class Skipped:
    """Skipped lines.

    Attributes:
        lines: number of skipped lines.
        parsed: number of valid lines.
        first: error of the first skipped line.
    """

    def __init__(self) -> None:
        self.lines = self.parsed = 0
        self.first: ConfigError | None = None

    def add(self, error: ConfigError) -> None:
        """Count a skipped line."""
        self.lines += 1
        self.first = self.first or error


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the non-empty lines of a file, with their numbers from 1 on.

    Raises:
        ConfigError: an unreadable file, or a line over `MOST_CHARACTERS`, because a small
            compressed file can expand to a line filling the memory.
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
    """Yield the result of `parse` for each line.

    Args:
        path: path for messages.
        lines: pairs of line number and text.
        parse: parser raising `ConfigError` for an invalid line.
        skipped: counts and skips invalid lines. None stops at the first invalid line.

    Raises:
        ConfigError: an invalid line, or no valid line.
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
    """Check for non-decreasing times of a trace.

    A skipped line sets no time, because a time counts only once taken.

    Args:
        name: name of the field, for messages.
        unit: unit of the field, for messages.
        ns: nanoseconds per unit.
    """

    def __init__(self, name: str, unit: str = "", ns: int = 1) -> None:
        self._name, self._unit, self._ns = name, unit, ns
        self._last = 0

    @property
    def last(self) -> int:
        """Last time in ns."""
        return self._last

    def take(self, at: int) -> int:
        """Return a time in ns after checking it against the last time.

        Raises:
            ConfigError: a time before the last time.
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
        ConfigError: not a JSON object.
    """
    row = json_of(line, "no JSON")
    if not isinstance(row, dict):
        raise ConfigError(f"a JSON object wanted, not {line.strip()[:40]}")
    return cast("dict[str, Any]", row)


def check_blocks(blocks: int, most: int) -> None:
    """Check the number of a prompt's blocks before they are created.

    Args:
        blocks: number of blocks.
        most: maximum number of blocks.

    Raises:
        ConfigError: more blocks than `most`.
    """
    if blocks > most:
        raise ConfigError(
            f"the prompt has {blocks} blocks, at most {most} wanted: more than any tier holds"
        )


def name_unread(path: Path, names: Collection[str], *, waits: bool = False) -> None:
    """Log each field of third-party simulators not read here, once per file.

    Args:
        path: the file.
        names: fields of a line, including known unread fields.
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
    """Log the time unit of a file, once per file.

    Args:
        path: the file.
        unit: a unit in `times.TIME_UNITS`.
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
    """Return the logged fields and units of a file."""
    del path  # the cache has a set per path
    return set()


def ids_of(name: str, given: object) -> NDArray[np.uint32]:
    """Return a list of at least one integer below 2**32 as uint32 `(n,)`.

    Args:
        name: name of the field, for messages.
        given: value of the field.

    Raises:
        ConfigError: an invalid value, with its position.
    """
    if not isinstance(given, list) or not given:
        raise ConfigError(f"{name} is {shown(cast('Any', given))}, a list of at least one wanted")
    ids = cast("list[Any]", given)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= MOST:
        return np.array(ids, dtype=np.uint32)
    wrong = (at for at, one in enumerate(ids) if type(one) is not int or not 0 <= one <= MOST)
    at = next(wrong)
    raise ConfigError(f"{name}[{at}] is {shown(ids[at])}, 0 to {MOST} wanted")

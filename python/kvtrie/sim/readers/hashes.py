"""Traces with prompts as block hashes, with a JSON object per line.

Fields: `timestamp` (see `times`) or `arrival_ns`, `input_length` and `output_length` in tokens, and
`hash_ids` with a hash per block of the prompt, or `ranges` with pairs `[first, end)` of consecutive
hashes. Equal hashes mean equal prompts up to the block's end. A hash is a 64-bit number or a text
of up to 16 hexadecimal digits.
Invariant: equal hashes have equal ids, distinct hashes distinct ids. A hash below half of the id
range is its id, all larger hashes are numbered in order of appearance. Cost: a line in memory, an
entry per numbered hash, and an entry per `request_id` if waits are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvtrie._kvtrie import HashLines
from kvtrie.errors import ConfigError
from kvtrie.settings.argument import few, shown, text, whole
from kvtrie.sim.readers.lines import (
    MOST,
    MOST_BLOCKS,
    UNREAD,
    check_blocks,
    checked,
    lines_of,
    log_unit,
    name_unread,
    row_of,
)
from kvtrie.sim.readers.times import TIME_UNITS, Clock
from kvtrie.sim.readers.waits import Waits, waits_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvtrie.sim.readers.lines import Skipped
    from kvtrie.sim.readers.rows import AnyRow

__all__ = ["Reading", "hash_rows", "session_of"]

_LATEST = 2**63 - 1
_MOST_HASH = 2**64 - 1
_UNREAD = tuple(set(UNREAD) - {"request_id", "wait_for", "tool_wait_ms"})
_HEX = re.compile(r"(0x)?[0-9a-fA-F]{1,16}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reading:
    """Options of the reader of hashed traces.

    Attributes:
        hash_tokens: tokens per hash, or None for no check. With a value, every line must have a
            hash per block of the prompt, with or without a last partial block.
        most: maximum hashes per prompt.
        time_unit: unit of `timestamp`, in `TIME_UNITS`.
        waits: read the waits between requests. Otherwise a warning names the fields.
        parts: blocks per hash. The id range is divided by it.
        renumber: number every hash.
    """

    hash_tokens: int | None = None
    most: int = MOST_BLOCKS
    time_unit: str = TIME_UNITS[0]
    waits: bool = False
    parts: int = 1
    renumber: bool = False


def hash_rows(path: Path, skipped: Skipped | None, reading: Reading) -> Iterator[AnyRow]:
    """Yield the requests of a trace. Waiting requests have additional fields.

    Args:
        path: the file.
        skipped: counts and skips invalid lines. None stops at the first invalid line.
        reading: options of the reader.

    Raises:
        ConfigError: an unreadable file, or a file without a request. A line that is not a JSON
            object, lacks a field, has an invalid number or a decreasing time, or waits for a
            request not above it.
    """
    return checked(path, lines_of(path), _Lines(path, reading).row, skipped)


def session_of(row: dict[str, Any]) -> str | None:
    """Return the conversation named in a line, if any.

    Raises:
        ConfigError: neither a word nor a whole number, or two different names.
    """
    names = {
        name: str(given) if type(given) is int else text(name, given)
        for name in ("session", "session_id")
        if (given := row.get(name)) is not None
    }
    if len(set(names.values())) > 1:
        raise ConfigError(
            f"session is {shown(names['session'])} and session_id {shown(names['session_id'])}: "
            "one of them wanted"
        )
    return next(iter(names.values()), None)


class _Lines:
    """Lines of a file."""

    def __init__(self, path: Path, reading: Reading) -> None:
        room = (MOST + 1) // reading.parts
        self._own = 0 if reading.renumber else room // 2
        size, most = reading.hash_tokens, reading.most
        if size is not None:
            size = min(size, MOST)  # no prompt has as many tokens
        self._native = HashLines(most=most, own=self._own, room=room, hash_tokens=size)
        self._path, self._reading = path, reading
        self._clock = Clock(reading.time_unit, lambda unit: log_unit(path, unit))
        self._waits = Waits()
        self._place = 0

    def row(self, line: str) -> AnyRow:
        found = self._native.row(line) or self._unusual(row_of(line))
        time, at_ns, prompt, answer, ids, session, unread, waits = found
        if unread is not None or waits is not None:
            return self._more(found)
        at = self._clock.take(time) if at_ns is None else self._clock.take_ns(at_ns)
        self._place += 1
        return at, ids, prompt, answer, session

    def _more(self, found: tuple[Any, ...]) -> AnyRow:
        """Return the request of a line with waits or with fields not read."""
        time, at_ns, prompt, answer, ids, session, unread, waits = found
        name, parents, pause = waits or (None, None, None)
        played = self._reading.waits
        if not (played and parents) and pause is not None:
            unread = [*(unread or ()), "tool_wait_ms"]
        if not played:
            given = {"request_id": name, "wait_for": parents}
            unread = [*(unread or ()), *(field for field, one in given.items() if one is not None)]
        if unread:
            name_unread(self._path, unread, waits=played)
        more = self._waits.more(name, parents, pause) if played else None
        if time is None and at_ns is None and more and "after" in more:
            at = self._clock.last
        else:
            at = self._clock.take(time) if at_ns is None else self._clock.take_ns(at_ns)
        if more is None or waits is None:
            self._place += 1
            return at, ids, prompt, answer, session
        self._waits.add(name, self._place)
        self._place += 1
        return at, ids, prompt, answer, session, more

    def _unusual(self, row: dict[str, Any]) -> tuple[Any, ...]:
        """Return the result of `HashLines.row` for a line it refused."""
        at_ns = row.get("arrival_ns")
        if at_ns is not None:
            if row.get("timestamp") is not None:
                raise ConfigError("timestamp and arrival_ns are both given, one of them wanted")
            at_ns = whole("arrival_ns", at_ns, 0, _LATEST)
        prompt = _count(row, "input_length")
        answer = _count(row, "output_length")
        ids, session = self._ids(row, prompt), session_of(row)
        waits = waits_of(row)
        played = self._reading.waits and waits is not None and waits[1]
        unread = [name for name in _UNREAD if name in row and not (played and name == "delay")]
        return row.get("timestamp"), at_ns, prompt, answer, ids, session, unread or None, waits

    def _ids(self, row: dict[str, Any], length: int) -> NDArray[np.uint32]:
        """Return the ids of a line, in either form."""
        hashes, ranges = row.get("hash_ids"), row.get("ranges")
        if ranges is None:
            given = _hashes(hashes)
            self._check(len(given), length)
            return self._numbered(given)
        if hashes is not None:
            raise ConfigError("hash_ids and ranges are both given, one of them wanted")
        spans = _spans(ranges, length)
        self._check(sum(end - first for first, end in spans), length)
        return np.concatenate([self._span(first, end) for first, end in spans])

    def _span(self, first: int, end: int) -> NDArray[np.uint32]:
        if end <= self._own:
            return np.arange(first, end, dtype=np.uint32)
        return self._numbered(range(first, end))

    def _numbered(self, hashes: Sequence[int]) -> NDArray[np.uint32]:
        try:
            return self._native.ids(hashes)
        except ConfigError as error:
            raise ConfigError(f"hash_ids: {error}") from None

    def _check(self, ids: int, length: int) -> None:
        """Check the number of ids for `length` tokens, before the ids are created.

        Raises:
            ConfigError: a contradiction to `hash_tokens`, or more than `most`.
        """
        size = self._reading.hash_tokens
        if size is not None and not length // size <= ids <= -(-length // size):
            raise ConfigError(
                f"input_length is {length} in {ids} hashes, but a hash has {size} tokens "
                f"(trace.hash_tokens, or --block-tokens of `kvtrie replay`): "
                f"{_fitting(ids, length)}"
            )
        check_blocks(ids, self._reading.most)


def _fitting(ids: int, length: int) -> str:
    """Describe the tokens per hash fitting a line: a power of two if possible."""
    low = length // (ids + 1) + 1
    high = (length - 1) // (ids - 1) if ids > 1 else max(1, length)
    if high < low or not length:
        return "no number fits"
    power = 1 << (low - 1).bit_length()
    if power <= high:
        return f"{power} fits"
    return f"{low} fits" if low == high else f"{low} to {high} fit"


def _count(row: dict[str, Any], name: str) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST:
        raise ConfigError(f"{name} is {shown(value)}, a number from 0 to {MOST} wanted")
    return value


def _hashes(given: object) -> list[int]:
    if not isinstance(given, list) or not given:
        raise ConfigError(f"hash_ids is {shown(cast('Any', given))}, a list of at least one wanted")
    found: list[int] = []
    for at, one in enumerate(cast("list[Any]", given)):
        if isinstance(one, str) and _HEX.fullmatch(one):
            found.append(int(one, 16))
        elif type(one) is int and 0 <= one <= _MOST_HASH:
            found.append(one)
        else:
            raise ConfigError(
                f"hash_ids[{at}] is {shown(one)}, 0 to {_MOST_HASH} or a text of up to 16 "
                "hexadecimal digits wanted"
            )
    return found


def _spans(given: object, length: int) -> list[tuple[int, int]]:
    if not isinstance(given, list) or not given:
        raise ConfigError(f"ranges is {shown(cast('Any', given))}, a list of at least one wanted")
    spans: list[tuple[int, int]] = []
    left = max(1, length)  # a block has at least a token, so a short line cannot name billions
    for at, one in enumerate(few("ranges", cast("Any", given), left)):
        pair: Any = one
        if not (isinstance(pair, list) and list(map(type, cast("Any", pair))) == [int, int]):
            raise ConfigError(f"ranges[{at}] is {shown(cast('Any', pair))}, [first, end) wanted")
        first, end = cast("list[int]", pair)
        if not 0 <= first < end <= _MOST_HASH + 1:
            raise ConfigError(
                f"ranges[{at}] is [{shown(first)}, {shown(end)}), ascending and at most "
                f"{_MOST_HASH + 1} wanted"
            )
        if end - first > left:
            raise ConfigError(f"ranges[{at}] is [{first}, {end}): more ids than {length} tokens")
        left -= end - first
        spans.append((first, end))
    return spans

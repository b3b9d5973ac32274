"""Traces of requests whose prompts are given as block hashes, one JSON object per line.

The format is that of the traces published with Mooncake: `timestamp` in milliseconds,
`input_length` and `output_length` in tokens, and `hash_ids`, one per block of the prompt. Equal ids
mean equal prompts up to that block's end. Instead of `hash_ids` there may be `ranges`: pairs
`[first, end)` of ids that follow each other. `session` or `session_id`, a word or a number, names
the conversation.
Invariant: what is read is checked, and an error names the line. Cost: one pass over the file, of
which one line is held.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvtrie._kvtrie import hashed_line
from kvtrie.errors import ConfigError
from kvtrie.output import writing_text
from kvtrie.settings.argument import few, shown, text
from kvtrie.sim.readers.lines import (
    MOST,
    MOST_BLOCKS,
    UNREAD,
    Ascending,
    check_blocks,
    checked,
    ids_of,
    lines_of,
    name_unread,
    row_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from kvtrie.sim.readers.lines import Skipped

__all__ = ["TraceRequest", "iter_trace", "read_trace", "session_of", "write_trace"]

_NS_PER_MS = 1_000_000
_LATEST_MS = 2**63 // _NS_PER_MS
_MAYBE_UNREAD = re.compile(f'"(?:{"|".join(UNREAD)})"')


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        at: when it arrives, in nanoseconds from the trace's start.
        input_tokens: length of its prompt in tokens.
        output_tokens: length of its answer in tokens.
        blocks: uint32 `(n,)`, ids of its prompt's blocks, first to last.
        session: the conversation it belongs to, if the trace says so.
        answer: uint32, ids of the blocks that its answer fills, where that is known.
    """

    at: int
    input_tokens: int
    output_tokens: int
    blocks: NDArray[np.uint32]
    session: str | None = None
    answer: NDArray[np.uint32] | None = None


def read_trace(
    path: Path, skipped: Skipped | None = None, *, hash_tokens: int | None = None
) -> list[TraceRequest]:
    """Read a whole trace.

    Args:
        path: the file.
        skipped: counts lines that cannot be, which are left out; None ends with the first.
        hash_tokens: as for `iter_trace`.

    Raises:
        ConfigError: the file cannot be read or holds no request; a line is no JSON object, lacks a
            field, has a number that cannot be, or a time before that of the line above.
    """
    return list(iter_trace(path, skipped, hash_tokens=hash_tokens))


def iter_trace(
    path: Path,
    skipped: Skipped | None = None,
    *,
    hash_tokens: int | None = None,
    most: int = MOST_BLOCKS,
) -> Iterator[TraceRequest]:
    """As `read_trace`, request by request; a bad line is found when it is reached.

    Args:
        path: the file.
        skipped: as for `read_trace`.
        hash_tokens: tokens per hash. Every line is checked against it: `hash_ids` has
            one per block of the prompt, with or without a last partial one.
        most: ids of one prompt.
    """
    clock = Ascending("timestamp", "ms", _NS_PER_MS)

    def parse(line: str) -> TraceRequest:
        return _request(path, line, clock, hash_tokens, most)

    return checked(path, lines_of(path), parse, skipped)


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a trace that `read_trace` reads; times are rounded down to milliseconds.

    Args:
        path: the file, which is replaced.
        requests: in the order of arrival.

    Raises:
        ConfigError: the file cannot be written.
    """
    with writing_text(path) as file:
        for request in requests:
            row: dict[str, Any] = {
                "timestamp": request.at // _NS_PER_MS,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.blocks.tolist(),
            }
            if request.session is not None:
                row["session"] = request.session
            file.write(json.dumps(row) + "\n")


def session_of(row: dict[str, Any]) -> str | None:
    """Return the conversation that a line names, if it does.

    Raises:
        ConfigError: neither a word nor a whole number, or two names that differ.
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


def _request(
    path: Path, line: str, clock: Ascending, hash_tokens: int | None, most: int
) -> TraceRequest:
    usual = None if '"session_id"' in line else hashed_line(line)
    if usual is not None:
        time, prompt, answer, blocks, session = usual
        _check_ids(len(blocks), prompt, hash_tokens, most)
        if _MAYBE_UNREAD.search(line):
            name_unread(path, row_of(line))
        return TraceRequest(clock.take(time), prompt, answer, blocks, session)
    row = row_of(line)
    name_unread(path, row)
    at = int(_number(row, "timestamp", _LATEST_MS, whole=False) * _NS_PER_MS)
    length = int(_number(row, "input_length", MOST))
    return TraceRequest(
        input_tokens=length,
        output_tokens=int(_number(row, "output_length", MOST)),
        blocks=_blocks(row, length, hash_tokens, most),
        session=session_of(row),
        at=clock.take(at),
    )


def _check_ids(ids: int, length: int, hash_tokens: int | None, most: int) -> None:
    """Refuse a number of ids that `length` tokens cannot have, before the ids are made.

    Raises:
        ConfigError: it contradicts `hash_tokens`; it is more than `most`.
    """
    if hash_tokens is not None and not length // hash_tokens <= ids <= -(-length // hash_tokens):
        raise ConfigError(
            f"input_length is {length} in {ids} hashes, but a hash has {hash_tokens} tokens "
            f"(trace.hash_tokens, or --block-tokens of `kvtrie replay`): {_fitting(ids, length)}"
        )
    check_blocks(ids, most)


def _fitting(ids: int, length: int) -> str:
    """Name the tokens per hash that fit a line: a power of two where there is one."""
    low = length // (ids + 1) + 1
    high = (length - 1) // (ids - 1) if ids > 1 else max(1, length)
    if high < low or not length:
        return "no number fits"
    power = 1 << (low - 1).bit_length()
    if power <= high:
        return f"{power} fits"
    return f"{low} fits" if low == high else f"{low} to {high} fit"


def _number(row: dict[str, Any], name: str, most: int, *, whole: bool = True) -> float:
    value = row.get(name)
    wanted = int if whole else (int, float)
    if not isinstance(value, wanted) or isinstance(value, bool) or not 0 <= value <= most:
        raise ConfigError(f"{name} is {value!r}, a number from 0 to {most} wanted")
    return value


def _blocks(
    row: dict[str, Any], length: int, hash_tokens: int | None, most: int
) -> NDArray[np.uint32]:
    """The ids of a line, in either form."""
    if "ranges" not in row:
        ids = ids_of("hash_ids", row.get("hash_ids"))
        _check_ids(len(ids), length, hash_tokens, most)
        return ids
    if "hash_ids" in row:
        raise ConfigError("hash_ids and ranges are both given, one of them wanted")
    given: Any = row["ranges"]
    if not isinstance(given, list) or not given:
        raise ConfigError(f"ranges is {shown(cast('Any', given))}, a list of at least one wanted")
    spans: list[tuple[int, int]] = []
    left = max(1, length)  # a block has a token at least: a short line names no billion of them
    for at, one in enumerate(few("ranges", cast("Any", given), left)):
        pair: Any = one
        if not (isinstance(pair, list) and list(map(type, cast("Any", pair))) == [int, int]):
            raise ConfigError(f"ranges[{at}] is {shown(cast('Any', pair))}, [first, end) wanted")
        first, end = cast("list[int]", pair)
        if not 0 <= first < end <= MOST + 1:
            raise ConfigError(
                f"ranges[{at}] is [{first}, {end}), ascending and at most {MOST + 1} wanted"
            )
        if end - first > left:
            raise ConfigError(f"ranges[{at}] is [{first}, {end}): more ids than {length} tokens")
        left -= end - first
        spans.append((first, end))
    _check_ids(sum(end - first for first, end in spans), length, hash_tokens, most)
    return np.concatenate([np.arange(first, end, dtype=np.uint32) for first, end in spans])

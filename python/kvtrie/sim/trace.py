"""Traces of requests whose prompts are given as block hashes, one JSON object per line.

The format is that of the traces published with Mooncake: `timestamp` in milliseconds,
`input_length` and `output_length` in tokens, and `hash_ids`, one per block of the prompt. Equal ids
mean equal prompts up to that block's end. Instead of `hash_ids` there may be `ranges`: pairs
`[first, end)` of ids that follow each other. `session`, a word or a number, names the conversation.
Invariant: what is read is checked, and an error names the line. Cost: one pass over the file, of
which one line is held.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvtrie._kvtrie import hashed_line
from kvtrie.argument import few, shown, text
from kvtrie.errors import ConfigError
from kvtrie.output import writing_text
from kvtrie.sim.readers.lines import MOST, Ascending, checked, ids_of, lines_of, row_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from kvtrie.sim.readers.lines import Skipped

__all__ = ["TraceRequest", "iter_trace", "read_trace", "session_of", "write_trace"]

_NS_PER_MS = 1_000_000
_LATEST_MS = 2**63 // _NS_PER_MS


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


def read_trace(path: Path, skipped: Skipped | None = None) -> list[TraceRequest]:
    """Read a whole trace.

    Args:
        path: the file.
        skipped: counts lines that cannot be, which are left out; None ends with the first.

    Raises:
        ConfigError: the file cannot be read or holds no request; a line is no JSON object, lacks a
            field, has a number that cannot be, or a time before that of the line above.
    """
    return list(iter_trace(path, skipped))


def iter_trace(path: Path, skipped: Skipped | None = None) -> Iterator[TraceRequest]:
    """As `read_trace`, request by request; a bad line is found when it is reached."""
    clock = Ascending("timestamp", "ms", _NS_PER_MS)
    return checked(path, lines_of(path), lambda line: _request(line, clock), skipped)


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a trace that `read_trace` reads; times are rounded down to milliseconds."""
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
    """The conversation that a line names, if it does.

    Raises:
        ConfigError: neither a word nor a whole number.
    """
    given = row.get("session")
    if given is None:
        return None
    return str(given) if type(given) is int else text("session", given)


def _request(line: str, clock: Ascending) -> TraceRequest:
    usual = hashed_line(line)
    if usual is not None:
        time, asked, answer, blocks, session = usual
        return TraceRequest(clock.take(time), asked, answer, blocks, session)
    row = row_of(line)
    at = int(_number(row, "timestamp", _LATEST_MS, whole=False) * _NS_PER_MS)
    length = int(_number(row, "input_length", MOST))
    return TraceRequest(
        input_tokens=length,
        output_tokens=int(_number(row, "output_length", MOST)),
        blocks=_blocks(row, length),
        session=session_of(row),
        at=clock.take(at),
    )


def _number(row: dict[str, Any], name: str, most: int, *, whole: bool = True) -> float:
    value = row.get(name)
    wanted = int if whole else (int, float)
    if not isinstance(value, wanted) or isinstance(value, bool) or not 0 <= value <= most:
        raise ConfigError(f"{name} is {value!r}, a number from 0 to {most} wanted")
    return value


def _blocks(row: dict[str, Any], length: int) -> NDArray[np.uint32]:
    """The ids of a line, in either form."""
    if "ranges" not in row:
        return ids_of("hash_ids", row.get("hash_ids"))
    if "hash_ids" in row:
        raise ConfigError("hash_ids and ranges are both given, one of them wanted")
    given: Any = row["ranges"]
    if not isinstance(given, list) or not given:
        raise ConfigError(f"ranges is {shown(cast('Any', given))}, a list of at least one wanted")
    parts: list[NDArray[np.uint32]] = []
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
        parts.append(np.arange(first, end, dtype=np.uint32))
    return np.concatenate(parts)

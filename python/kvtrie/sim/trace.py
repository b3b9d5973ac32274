"""Traces of requests whose prompts are given as block hashes, one JSON object per line.

The format is that of the traces published with Mooncake: `timestamp` in milliseconds,
`input_length` and `output_length` in tokens, and `hash_ids`, one per block of the prompt. Equal ids
mean equal prompts up to that block's end.
Invariant: what is read is checked, and an error names the line. Cost: one pass over the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["TraceRequest", "iter_trace", "lines_of", "read_trace", "write_trace"]

_NS_PER_MS = 1_000_000
_LATEST_MS = 2**63 // _NS_PER_MS
_MOST = 2**32 - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        at: when it arrives, in nanoseconds from the trace's start.
        input_tokens: length of its prompt in tokens.
        output_tokens: length of its answer in tokens.
        blocks: uint32 `(n,)`, ids of its prompt's blocks, first to last.
    """

    at: int
    input_tokens: int
    output_tokens: int
    blocks: NDArray[np.uint32]


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a whole trace.

    Raises:
        ConfigError: the file cannot be read or holds no request; a line is no JSON object, lacks a
            field, has a number that cannot be, or a time before that of the line above.
    """
    return list(iter_trace(path))


def iter_trace(path: Path) -> Iterator[TraceRequest]:
    """As `read_trace`, request by request; a bad line is found when it is reached."""
    earliest = 0
    for number, line in lines_of(path):
        try:
            request = _request(line, earliest)
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        earliest = request.at
        yield request


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a trace that are not empty, with their numbers.

    Raises:
        ConfigError: the file cannot be read, or holds none.
    """
    found = False
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    found = True
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the trace {path}: {reason}") from error
    if not found:
        raise ConfigError(f"the trace {path} holds no request")


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a trace that `read_trace` reads; times are rounded down to milliseconds."""
    rows = (
        {
            "timestamp": request.at // _NS_PER_MS,
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": request.blocks.tolist(),
        }
        for request in requests
    )
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _request(line: str, earliest: int) -> TraceRequest:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"a JSON object wanted, not {line.strip()[:40]}")
    row = cast("dict[str, Any]", row)
    at = int(_number(row, "timestamp", _LATEST_MS, whole=False) * _NS_PER_MS)
    if at < earliest:
        raise ConfigError(
            f"timestamp is {at / _NS_PER_MS} ms, before the {earliest / _NS_PER_MS} ms of the "
            "request above"
        )
    return TraceRequest(
        at=at,
        input_tokens=int(_number(row, "input_length", _MOST)),
        output_tokens=int(_number(row, "output_length", _MOST)),
        blocks=_blocks(row),
    )


def _number(row: dict[str, Any], name: str, most: int, *, whole: bool = True) -> float:
    value = row.get(name)
    wanted = int if whole else (int, float)
    if not isinstance(value, wanted) or isinstance(value, bool) or not 0 <= value <= most:
        raise ConfigError(f"{name} is {value!r}, a number from 0 to {most} wanted")
    return value


def _blocks(row: dict[str, Any]) -> NDArray[np.uint32]:
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not ids:
        raise ConfigError(f"hash_ids is {ids!r}, a list of at least one wanted")
    values = cast("list[Any]", ids)
    for at, value in enumerate(values):
        if type(value) is not int or not 0 <= value <= _MOST:
            raise ConfigError(f"hash_ids[{at}] is {value!r}, 0 to {_MOST} wanted")
    return np.array(values, dtype=np.uint32)

"""Traces of requests with prompts given as block ids.

`iter_trace` reads the format of `readers.hashes`, used by the traces published with Mooncake.
`write_trace` writes its compact form, with `arrival_ns` and `ranges` of ids.
Invariant: a written trace is read as the same requests. Cost: a pass over the file, with a single
line in memory.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrie.sim.readers.compressed import compressing
from kvtrie.sim.readers.hashes import Reading, hash_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from kvtrie.sim.readers.lines import Skipped
    from kvtrie.sim.readers.rows import AnyRow, OptionalFields

__all__ = ["TraceRequest", "iter_trace", "read_trace", "request_of", "write_trace"]

_NS_PER_MS = 1_000_000
_READING = Reading()


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace.

    Attributes:
        at: arrival in nanoseconds from the trace's start.
        input_tokens: number of prompt tokens.
        output_tokens: number of answer tokens.
        blocks: uint32 `(n,)`, ids of the prompt's blocks, first to last.
        session: conversation name, if known.
        answer: uint32, ids of the blocks filled by its answer, if known.
        waits: wait fields of the request, if read.
    """

    at: int
    input_tokens: int
    output_tokens: int
    blocks: NDArray[np.uint32]
    session: str | None = None
    answer: NDArray[np.uint32] | None = None
    waits: OptionalFields | None = None


def read_trace(
    path: Path, skipped: Skipped | None = None, *, hash_tokens: int | None = None
) -> list[TraceRequest]:
    """Read a whole trace.

    Args:
        path: the file.
        skipped: counts and skips invalid lines. None stops at the first invalid line.
        hash_tokens: as in `Reading`.

    Raises:
        ConfigError: as of `hash_rows`.
    """
    return list(iter_trace(path, skipped, Reading(hash_tokens=hash_tokens)))


def iter_trace(
    path: Path, skipped: Skipped | None = None, reading: Reading = _READING
) -> Iterator[TraceRequest]:
    """Read a trace request by request. A bad line is found when it is reached.

    Args:
        path: the file.
        skipped: as for `read_trace`.
        reading: options of the reader.
    """
    return map(request_of, hash_rows(path, skipped, reading))


def request_of(row: AnyRow) -> TraceRequest:
    """Return the request of a row with block ids as tokens."""
    at, blocks, prompt, answer, session = row[:5]
    waits = row[5] if len(row) > 5 else None  # noqa: PLR2004 - a row with more
    return TraceRequest(at, prompt, answer, blocks, session, waits=waits)


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Write the compact form of a trace, compressed if the name ends in `.gz` or `.zst`.

    Args:
        path: output file, replaced if it exists.
        requests: requests in arrival order.

    Returns:
        The number of requests.

    Raises:
        ConfigError: the file cannot be written.
    """
    written = 0
    with compressing(path) as file:
        for place, request in enumerate(requests):
            row: dict[str, Any] = {
                "arrival_ns": request.at,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                **_ids(request.blocks),
            }
            if request.session is not None:
                row["session"] = request.session
            if request.waits is not None:
                row |= _waits(request.waits, place)
            file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
            written = place + 1
    return written


def _ids(blocks: NDArray[np.uint32]) -> dict[str, list[Any]]:
    """Return the ids as ranges, or as a list if shorter."""
    ids = blocks.astype(np.int64)
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    if 2 * len(cuts) + 2 > len(ids):
        return {"hash_ids": ids.tolist()}
    firsts, ends = ids[np.r_[0, cuts]], ids[np.r_[cuts - 1, -1]] + 1
    return {"ranges": np.stack([firsts, ends], axis=1).tolist()}


def _waits(waits: OptionalFields, place: int) -> dict[str, Any]:
    """Return the wait fields of a request. Names are positions in the trace."""
    row: dict[str, Any] = {"request_id": str(place)} if waits.get("named") else {}
    if "after" in waits:
        pause = waits.get("pause", 0) / _NS_PER_MS
        row["wait_for"] = [str(parent) for parent in waits["after"]]
        row["tool_wait_ms"] = int(pause) if pause.is_integer() else pause
    return row

"""Requests of a simulation or a replay, streamed from a trace.

Invariant: a line is checked before it is played, and an error names the line and the field.
Cost: a pass over the file, with a single line in memory. See the readers for their state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.sim.readers.hashes import Reading, hash_rows
from kvtrie.sim.readers.lines import MOST_BLOCKS
from kvtrie.sim.readers.rows import RequestRow
from kvtrie.sim.readers.sharegpt import sharegpt_requests, tokenizer_of
from kvtrie.sim.readers.tables import azure_requests, burstgpt_requests
from kvtrie.sim.readers.tokens import token_requests
from kvtrie.sim.trace import TraceRequest, request_of
from kvtrie.sim.workloads.family import Family

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvtrie.sim.config import TraceSource
    from kvtrie.sim.readers.lines import Skipped
    from kvtrie.sim.readers.rows import AnyRow

__all__ = ["RequestRow", "block_requests", "trace_requests"]


def trace_requests(
    source: TraceSource,
    block_tokens: int,
    skipped: Skipped | None = None,
    most: int = MOST_BLOCKS,
    *,
    waits: bool = True,
    renumber: bool = False,
) -> Iterator[AnyRow]:
    """Yield the requests of a trace in its order. Waiting requests have additional fields.

    Args:
        source: trace to read.
        block_tokens: real tokens per block. A hash of a Mooncake trace becomes a token for each of
            its blocks.
        skipped: counts and skips invalid lines. None stops at the first invalid line.
        most: maximum blocks of a prompt, because a short line can claim billions.
        waits: read the waits between requests. Otherwise a warning names the fields.
        renumber: number the hashes of a trace from 0 on.

    Raises:
        ConfigError: an invalid line, or a file without a valid line.
    """
    if block_tokens < 1:
        raise ConfigError(f"block_tokens is {block_tokens}, at least 1 wanted")
    parts = max(1, source.hash_tokens // block_tokens)
    reading = Reading(
        hash_tokens=source.hash_tokens,
        most=most // parts,
        time_unit=source.time_unit,
        waits=waits,
        parts=parts,
        renumber=renumber,
    )
    rows = _requests(source, block_tokens, skipped, most, reading)
    if source.output:
        yield from rows
    else:
        for row in rows:
            yield (*row[:3], 1, *row[4:])  # pyright: ignore[reportReturnType] - the same length


def block_requests(
    source: TraceSource,
    block_tokens: int,
    skipped: Skipped | None = None,
    most: int = MOST_BLOCKS,
    *,
    waits: bool = False,
    renumber: bool = False,
) -> Iterator[TraceRequest]:
    """Yield the requests of a trace as block ids, equal for prompts equal up to there.

    Requests come in trace order, without waiting for each other.

    Args:
        source: trace to read. With tokens, all distinct blocks are kept in memory.
        block_tokens: real tokens per block.
        skipped: counts and skips invalid lines. None stops at the first invalid line.
        most: maximum blocks of a prompt, because a short line can claim billions.
        waits: as for `trace_requests`.
        renumber: as for `trace_requests`.

    Raises:
        ConfigError: an invalid line, a file without a valid line, or requests whose order depends
            on the end of answers.
    """
    if source.clients is not None:
        raise ConfigError(
            'trace.arrivals.kind is "closed": the order of requests depends on the run'
        )
    rows = trace_requests(source, block_tokens, skipped, most, waits=waits, renumber=renumber)
    if source.hashed:
        yield from map(request_of, rows)
        return
    seen: dict[tuple[int, bytes], int] = {}
    for at, tokens, *rest in rows:
        row: Any = (at, _named(tokens, block_tokens, seen), *rest)
        yield request_of(row)


def _named(
    tokens: np.ndarray[tuple[int], np.dtype[np.uint32]],
    block_tokens: int,
    seen: dict[tuple[int, bytes], int],
) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return the ids of a prompt's blocks. The last block may be partial."""
    ids: list[int] = []
    parent = -1
    for first in range(0, len(tokens), block_tokens):
        block = (parent, tokens[first : first + block_tokens].tobytes())
        parent = seen.setdefault(block, len(seen))
        ids.append(parent)
    return np.array(ids, dtype=np.uint32)


def _requests(
    source: TraceSource, block_tokens: int, skipped: Skipped | None, most: int, reading: Reading
) -> Iterable[AnyRow]:
    generator, path = source.generator, source.path
    if isinstance(generator, Family):
        made = generator.made(source.seed)
        rows = (
            (one.at, one.blocks, one.input_tokens, one.output_tokens, one.session) for one in made
        )
        return _split(rows, source, reading.parts) if reading.parts > 1 else rows
    if generator is not None:
        return generator.made(block_tokens, source.seed)
    match source.format:
        case "mooncake":
            rows = hash_rows(path, skipped, reading)
            return _split(rows, source, reading.parts) if reading.parts > 1 else rows
        case "azure" | "burstgpt":
            read = azure_requests if source.format == "azure" else burstgpt_requests
            return read(path, block_tokens, skipped, most)
        case "sharegpt":
            return sharegpt_requests(
                path,
                source.arrivals.opened(source.seed),
                tokenize=tokenizer_of(source.tokenizer),
                think_s=source.think_s,
                seed=source.seed,
                skipped=skipped,
            )
        case _:
            return token_requests(path, skipped)


def _split(requests: Iterable[AnyRow], source: TraceSource, parts: int) -> Iterator[AnyRow]:
    """Split each hash of the requests into its blocks."""
    for row in requests:
        # The reader has refused hashes with more blocks than a tier, before memory is taken.
        tokens, inside = row[1], np.arange(parts, dtype=np.uint64)
        wide = (tokens.astype(np.uint64)[:, None] * parts + inside).reshape(-1)
        # The last hash may have fewer tokens.
        full = len(tokens) * source.hash_tokens
        short = max(0, full - row[2]) // (source.hash_tokens // parts)
        wide = wide[: len(wide) - min(short, parts - 1)].astype(np.uint32)
        yield (row[0], wide, *row[2:])  # pyright: ignore[reportReturnType] - the same length

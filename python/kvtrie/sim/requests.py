"""Requests of a simulation or a replay, read from a trace as it runs.

Invariant: a line is checked before it is played, and an error names the line and the field.
Cost: one pass over the file, of which one line is held; see the readers for what they keep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.sim.readers.lines import MOST, MOST_BLOCKS
from kvtrie.sim.readers.rows import RequestRow
from kvtrie.sim.readers.sharegpt import sharegpt_requests, tokenizer_of
from kvtrie.sim.readers.tables import azure_requests, burstgpt_requests
from kvtrie.sim.readers.tokens import token_requests
from kvtrie.sim.trace import TraceRequest, iter_trace
from kvtrie.sim.workloads.family import Family

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvtrie.sim.config import TraceSource
    from kvtrie.sim.readers.lines import Skipped

__all__ = ["RequestRow", "block_requests", "trace_requests"]


def trace_requests(
    source: TraceSource,
    block_tokens: int,
    skipped: Skipped | None = None,
    most: int = MOST_BLOCKS,
) -> Iterator[RequestRow]:
    """Yield the requests of a trace, in its order.

    Args:
        source: the trace.
        block_tokens: real tokens of a block. A hash of a Mooncake trace becomes one token for each
            block in it.
        skipped: counts lines that cannot be, which are left out; None ends with the first.
        most: blocks of a prompt of hashes or lengths, which a short line can claim.

    Raises:
        ConfigError: a line that cannot be, or a file without one that can.
    """
    for at, tokens, prompt, answer, session in _requests(source, block_tokens, skipped, most):
        yield at, tokens, prompt, answer if source.output else 1, session


def block_requests(
    source: TraceSource,
    block_tokens: int,
    skipped: Skipped | None = None,
    most: int = MOST_BLOCKS,
) -> Iterator[TraceRequest]:
    """Yield the requests of a trace as ids of blocks, equal if the prompts are up to there.

    Args:
        source: the trace. Of one with tokens, each block that differs is remembered.
        block_tokens: real tokens of a block.
        skipped: counts lines that cannot be, which are left out; None ends with the first.
        most: blocks of a prompt of hashes or lengths, which a short line can claim.

    Raises:
        ConfigError: a line that cannot be, or a file without one that can; requests whose order
            hangs on when answers end.
    """
    if source.clients is not None:
        raise ConfigError(
            'trace.arrivals.kind is "closed": the order of requests depends on the run'
        )
    rows = trace_requests(source, block_tokens, skipped, most)
    seen: dict[tuple[int, bytes], int] = {}
    for at, tokens, prompt, answer, session in rows:
        blocks = tokens if source.hashed else _named(tokens, block_tokens, seen)
        yield TraceRequest(at, prompt, answer, blocks, session)


def _named(
    tokens: np.ndarray[tuple[int], np.dtype[np.uint32]],
    block_tokens: int,
    seen: dict[tuple[int, bytes], int],
) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """The ids of a prompt's blocks, of which the last may be a part of one."""
    ids: list[int] = []
    parent = -1
    for first in range(0, len(tokens), block_tokens):
        block = (parent, tokens[first : first + block_tokens].tobytes())
        parent = seen.setdefault(block, len(seen))
        ids.append(parent)
    return np.array(ids, dtype=np.uint32)


def _requests(
    source: TraceSource, block_tokens: int, skipped: Skipped | None, most: int
) -> Iterable[RequestRow]:
    generator = source.generator
    if isinstance(generator, Family):
        return _parted(generator.made(source.seed), source, block_tokens)
    if generator is not None:
        return generator.made(block_tokens, source.seed)
    return _read(source, block_tokens, skipped, most)


def _read(
    source: TraceSource, block_tokens: int, skipped: Skipped | None, most: int
) -> Iterable[RequestRow]:
    path = source.path
    match source.format:
        case "mooncake":
            ids, size = most // max(1, source.hash_tokens // block_tokens), source.hash_tokens
            read = iter_trace(path, skipped, hash_tokens=size, most=ids)
            return _parted(read, source, block_tokens)
        case "azure":
            return azure_requests(path, block_tokens, skipped, most)
        case "burstgpt":
            return burstgpt_requests(path, block_tokens, skipped, most)
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


def _parted(
    requests: Iterable[TraceRequest], source: TraceSource, block_tokens: int
) -> Iterator[RequestRow]:
    """Split each hash of the requests into its blocks."""
    parts = source.hash_tokens // block_tokens
    for request in requests:
        tokens = request.blocks
        if parts > 1:
            inside = np.arange(parts, dtype=np.uint64)
            wide = (tokens.astype(np.uint64)[:, None] * parts + inside).reshape(-1)
            # The last hash may have fewer tokens.
            full = len(tokens) * source.hash_tokens
            short = max(0, full - request.input_tokens) // (source.hash_tokens // parts)
            wide = wide[: len(wide) - min(short, parts - 1)]
            if int(wide.max()) > MOST:
                raise ConfigError(
                    f"{source.path}: hash_ids has {int(tokens.max())}, at most {MOST // parts} "
                    f"wanted where a hash is {parts} blocks"
                )
            tokens = wide.astype(np.uint32)
        yield request.at, tokens, request.input_tokens, request.output_tokens, request.session

"""Rows: the sequences of a batch that is padded on the left, each held by one lease.

Column `c` of a row is token `c - pad` of it. Invariant: a lease holds every token whose KV was
written by a finished pass, and nothing else; what raises leaves rows and leases as they were.
Cost: one call into the manager per row; a step costs what `Step` says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvtrie.engines.transformers.step import Step
from kvtrie.errors import ConfigError, NoSpaceError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from numpy.typing import NDArray

    from kvtrie import Lease
    from kvtrie.tiers import Pool
    from kvtrie.transfer import Executor

__all__ = [
    "Row",
    "check_repeated",
    "fresh_tokens",
    "patiently",
    "select",
    "step_of",
]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence: its lease, the columns before it, its prompt and what passes appended."""

    lease: Lease
    pad: int
    tokens: NDArray[np.int64]

    def reserve(self, executor: Executor, end: int) -> None:
        """Make room for columns up to `end`.

        Raises:
            NoSpaceError: there is none.
        """
        new = max(0, end - self.pad - self.lease.tokens)
        patiently(executor, partial(self.lease.reserve, new))

    def commit(self, new: NDArray[np.int64], now: int) -> Row:
        """Commit tokens whose KV is written; return the row with those beyond its own."""
        self.lease.commit(new, now=now)
        more = self.lease.tokens - len(self.tokens)
        if more <= 0:
            return self
        return replace(self, tokens=np.concatenate([self.tokens, new[-more:]]))

    def cut(self, end: int, now: int) -> Row:
        """Forget the columns from `end` on; return the row without their tokens."""
        keep = max(0, end - self.pad)
        if self.lease.tokens > keep:
            self.lease.truncate(keep, now=now)
        # Other tokens may follow the cut.
        return replace(self, tokens=self.tokens[:keep])


def patiently(executor: Executor, ask: Callable[..., _T]) -> _T:
    """Ask for room; if there is none, once more when no move is under way.

    Args:
        executor: carries out the moves.
        ask: called with the time as `now`.

    Raises:
        NoSpaceError: there is none.
    """
    try:
        return ask(now=executor.clock())
    except NoSpaceError:
        # Moves may have ended since: whether some are still under way says nothing.
        executor.drain()
    return ask(now=executor.clock())


def select(rows: Sequence[Row], sources: Sequence[int], now: int) -> list[Row]:
    """Return the rows of a batch that goes on from some rows, each of them any number of times.

    The leases of the others are released.

    Args:
        rows: the rows so far.
        sources: by new row, the row that it continues.
        now: the time.

    Raises:
        NoSpaceError: no room for the last block of a row that goes on twice.
    """
    forks: dict[int, list[Lease]] = {}
    try:
        for source, times in Counter(sources).items():
            more = times - 1
            forks[source] = rows[source].lease.fork(more, now=now) if more else []
    except BaseException:
        for leases in forks.values():
            for lease in leases:
                lease.release()
        raise
    for at, row in enumerate(rows):
        if at in forks:
            forks[at].append(row.lease)
        else:
            row.lease.release()
    return [replace(rows[at], lease=forks[at].pop()) for at in sources]


def step_of(rows: Sequence[Row], pool: Pool, past: int, queries: int) -> Step:
    """Return the slots that a pass over `queries` columns after `past` others reads and writes."""
    return Step.of_columns(
        pool,
        [pool.table(row.lease.slots(0)) for row in rows],
        pads=[row.pad for row in rows],
        cached=[row.lease.tokens for row in rows],
        past=past,
        queries=queries,
    )


def fresh_tokens(
    rows: Sequence[Row], holds: Sequence[int], ids: torch.Tensor, past: int
) -> list[NDArray[np.int64]]:
    """Return, per row, the tokens of a pass whose KV the row does not hold yet.

    Args:
        rows: the batch.
        holds: per row, the number of tokens that it holds or awaits.
        ids: int64 `(rows, queries)`, the tokens of the pass.
        past: columns before the pass.

    Raises:
        ConfigError: tokens that do not continue a prompt.
        TransferError: tokens of a row were lost.
    """
    fresh: list[NDArray[np.int64]] = []
    for row, has, columns in zip(rows, holds, ids.cpu().numpy(), strict=True):
        start = max(0, past - row.pad)
        given = columns[max(0, row.pad - past) :]
        if has < start:
            raise TransferError(
                f"the copy of a block failed: {start - has} tokens are lost; crop the cache by "
                "as many and pass them again"
            )
        expected = row.tokens[start : start + len(given)]
        if not np.array_equal(given[: len(expected)], expected):
            raise ConfigError(
                f"the pass does not continue its prompt at token {start}: "
                f"the cache holds {past} columns, so pass only what follows them"
            )
        fresh.append(given[max(0, has - start) :])
    return fresh


def check_repeated(rows: Sequence[Row], ids: torch.Tensor) -> None:
    """Refuse columns of a pass that repeat other tokens than the rows have.

    Args:
        rows: the batch.
        ids: int64 `(n × rows, columns)`, the first columns of the pass; each row is repeated.

    Raises:
        ConfigError: a row of the pass is another sequence.
    """
    times = len(ids) // len(rows)
    for at, columns in enumerate(ids.cpu().numpy()):
        row = rows[at // times]
        mine = columns[row.pad :]
        other = np.flatnonzero(mine != row.tokens[: len(mine)])
        if len(other):
            raise ConfigError(
                f"row {at} of the pass is another sequence than the cache holds from token "
                f"{other[0]} on: open a KvtrieCache for it"
            )

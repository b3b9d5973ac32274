"""Rows: sequences of a left-padded batch, with one lease each.

Column `c` of a row is its token `c - pad`. Invariant: a lease holds exactly the tokens with KV
written by a finished pass. Exceptions leave rows and leases unchanged.
Cost: one call into the manager per row, and a `Step` per pass.
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
    "select",
    "step_of",
    "with_retry",
]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence: its lease, the columns before it, and the tokens of its prompt and passes."""

    lease: Lease
    pad: int
    tokens: NDArray[np.int64]

    def reserve(self, executor: Executor, end: int) -> None:
        """Make room for columns up to `end`.

        Raises:
            NoSpaceError: there is no room.
        """
        new = max(0, end - self.pad - self.lease.tokens)
        with_retry(executor, partial(self.lease.reserve, new))

    def commit(self, new: NDArray[np.int64], now: int) -> Row:
        """Commit tokens after their KV is written. Return the row extended by new tokens."""
        self.lease.commit(new, now=now)
        more = self.lease.tokens - len(self.tokens)
        if more <= 0:
            return self
        return replace(self, tokens=np.concatenate([self.tokens, new[-more:]]))

    def cut(self, end: int, now: int) -> Row:
        """Remove the columns from `end` on. Return the row without their tokens."""
        keep = max(0, end - self.pad)
        if self.lease.tokens > keep:
            self.lease.truncate(keep, now=now)
        # Different tokens may follow the cut.
        return replace(self, tokens=self.tokens[:keep])


def with_retry(executor: Executor, ask: Callable[..., _T]) -> _T:
    """Ask for room. If there is none, retry once after all moves have ended.

    Args:
        executor: carries out the moves.
        ask: called with the time as `now`.

    Raises:
        NoSpaceError: there is no room after the retry.
    """
    try:
        return ask(now=executor.clock())
    except NoSpaceError:
        # Retry even if no move is in flight now, because moves may have ended since.
        executor.drain()
    return ask(now=executor.clock())


def select(rows: Sequence[Row], sources: Sequence[int], now: int) -> list[Row]:
    """Return new rows continued from source rows. A source may be used several times.

    The leases of unused rows are released.

    Args:
        rows: the rows so far.
        sources: by new row, the index of its source row.
        now: the time.

    Raises:
        NoSpaceError: no room for the last block of a repeated row.
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
    """Return the slots read and written by a pass over `queries` columns after `past` columns."""
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
    """Return, per row, the tokens of a pass not yet held by the row.

    Args:
        rows: the batch.
        holds: per row, the number of tokens held or loading.
        ids: int64 `(rows, queries)`, the tokens of the pass.
        past: columns before the pass.

    Raises:
        ConfigError: the tokens do not continue a prompt.
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
    """Refuse a pass if its repeated columns differ from the tokens of the rows.

    Args:
        rows: the batch.
        ids: int64 `(n × rows, columns)`, the first columns of the pass, with each row repeated.

    Raises:
        ConfigError: a row of the pass is a different sequence.
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

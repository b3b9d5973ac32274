"""RowRecovery: the tokens that rows of a cache miss, computed by their model.

Invariant: a row is ready before anything is computed for it, and a pass rotates as the rows did.
Cost: that of `recover`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvtrie.engines.transformers.recovery import recover
from kvtrie.engines.transformers.rows import patiently

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvtrie.engines.transformers.guard import Guard
    from kvtrie.engines.transformers.rows import Row
    from kvtrie.tiers import Pool
    from kvtrie.transfer import Executor

__all__ = ["RowRecovery"]


class RowRecovery:
    """What computes missing tokens of the rows of one cache.

    Args:
        executor: carries out the loads of the rows.
        model: the model that computes.
        entry: the module of it that is given tokens and a cache.
        pool: the memory of the first tier.
        guard: knows what the model computes.
        reach: as of `recover`.

    Attributes:
        recovered: tokens that were computed.
    """

    def __init__(
        self,
        executor: Executor,
        model: PreTrainedModel,
        entry: torch.nn.Module,
        pool: Pool,
        guard: Guard,
        *,
        reach: int | None,
    ) -> None:
        self.recovered = 0
        self._executor = executor
        self._model, self._entry, self._pool = model, entry, pool
        self._guard = guard
        self._reach = reach

    def computes(self, longest: int) -> bool:
        """Return whether the model can compute single tokens of prompts up to this length."""
        return self._guard.fills and self._guard.recovers(longest)

    def fill(self, rows: list[Row]) -> None:
        """Wait for what is loaded, and compute what misses amid the matches.

        Raises:
            ConfigError: tokens miss that the model cannot compute.
            TransferError: a load cannot be carried out.
        """
        longest = max(len(row.tokens) for row in rows)
        for row in rows:
            self._executor.wait(row.lease)
            if len(row.lease.plan.recompute()):
                self._guard.check_recovery(longest)
            self._recover(row)
            row.lease.commit([], now=self._executor.clock())

    def extend(self, row: Row, end: int, room: int) -> None:
        """Compute the tokens from the last one that a row holds up to `end`, and commit them.

        Args:
            row: the row.
            end: where to stop.
            room: tokens of the row to make room for.

        Raises:
            NoSpaceError: there is no room.
        """
        lease, has = row.lease, row.lease.tokens
        patiently(self._executor, partial(lease.reserve, room - has))
        self._executor.wait(lease)
        self._recover(row, end)
        lease.commit(row.tokens[has:end], now=self._executor.clock())

    def _recover(self, row: Row, end: int | None = None) -> None:
        self.recovered += recover(
            self._model, self._entry, self._pool, row.lease, row.tokens, reach=self._reach, end=end
        )

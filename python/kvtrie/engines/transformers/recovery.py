"""RowRecovery: the KV that rows of a cache miss, computed again at its own positions.

Every missing token of a prefix goes through the model in one pass, wherever the holes are: queries
carry their own positions, keys are in logical order, and a query sees the keys at positions up
to its own (Pensieve, section 4.3.4, recovers dropped tokens the same way). The pass ends at the
deepest layer that misses a token: the layers above are complete.
Invariant: a row is ready before anything is computed for it, and a pass rotates as the rows did;
only missing (layer, position) pairs are written, so what is reused stays bit-identical.
Cost: one forward over the missing tokens, with attention over the prefix up to the last of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers import Cache

from kvtrie.engines.transformers.mask import masks
from kvtrie.engines.transformers.rows import patiently
from kvtrie.engines.transformers.step import Step
from kvtrie.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.engines.transformers.passes import Passes
    from kvtrie.engines.transformers.rows import Row
    from kvtrie.tiers import Pool
    from kvtrie.transfer import Executor

__all__ = ["RowRecovery"]


class RowRecovery:
    """What computes missing tokens of the rows of one cache.

    Args:
        executor: carries out the loads of the rows.
        passes: the model, and what it computes.
        pool: the memory of the first tier.

    Attributes:
        recovered: tokens that were computed.
    """

    def __init__(self, executor: Executor, passes: Passes, pool: Pool) -> None:
        self.recovered = 0
        self._executor, self._passes, self._pool = executor, passes, pool

    def computes(self, longest: int) -> bool:
        """Return whether the model can compute single tokens of prompts up to this length."""
        return self._passes.computes(longest)

    def fill(self, rows: Sequence[Row]) -> None:
        """Wait for what is loaded, and compute what misses amid the matches.

        Raises:
            ConfigError: tokens miss that the model cannot compute, as a kind of layer whose mask is
                not known here, or an implementation of attention that takes no mask.
            TransferError: a load cannot be carried out.
        """
        longest = max(len(row.tokens) for row in rows)
        for row in rows:
            self._executor.wait(row.lease)
            plan, layers = row.lease.plan, range(self._pool.layers)
            if len(plan.recompute()):
                self._passes.guard.check_recovery(longest)
                missing = [torch.from_numpy(plan.recompute(layer)) for layer in layers]  # type: ignore[no-untyped-call]
                self._compute(row, torch.from_numpy(plan.recompute()), missing)  # type: ignore[no-untyped-call]
            row.lease.commit([], now=self._executor.clock())

    def extend_all(
        self, rows: Sequence[Row], ends: Sequence[int], columns: int, error: TransferError
    ) -> None:
        """Compute what matches lost at their ends, and make room for columns of a pass.

        Args:
            rows: the rows.
            ends: tokens that each match had.
            columns: of the pass, those before it included.
            error: why the tokens are lost.

        Raises:
            TransferError: the model cannot compute single tokens.
        """
        for row, end in zip(rows, ends, strict=True):
            if row.lease.tokens >= end:
                continue
            if not self.computes(len(row.tokens)):
                raise TransferError(f"{error}; the match is shorter now: open another") from error
            self.extend(row, end, max(end, columns - row.pad))

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
        missing = torch.arange(has, end)
        self._compute(row, missing, [missing] * self._pool.layers)
        lease.commit(row.tokens[has:end], now=self._executor.clock())

    def _compute(self, row: Row, missing: torch.Tensor, per_layer: Sequence[torch.Tensor]) -> None:
        """Compute positions of a row, ascending, and write those of each layer."""
        by, pool = self._passes, self._pool
        positions = missing = missing.to(pool.device)
        per_layer = [each.to(pool.device) for each in per_layer]
        step = Step.of_positions(pool, pool.table(row.lease.slots(0)), missing, per_layer)
        last = max(layer for layer, found in enumerate(per_layer) if len(found))
        ids = torch.as_tensor(row.tokens, device=pool.device)[missing]
        if by.reach is not None and int(missing[-1]) < by.reach:
            # A query more, of any token: its K and V are not written, and no other query sees them.
            ids = torch.cat([ids, ids[-1:]])
            positions = torch.cat([missing, missing.new_tensor([by.reach])])
        try:
            with torch.no_grad():
                by.entry(
                    input_ids=ids[None],
                    position_ids=positions[None],
                    attention_mask=masks(by.model, positions, step.keys),
                    past_key_values=_Missing(step, last),
                    use_cache=True,
                )
        except _Complete:
            pass
        self.recovered += len(missing)


class _Complete(Exception):  # noqa: N818 - not an error: the pass has done its work
    """Nothing is missing above this layer."""


class _Missing(Cache):
    """The model's cache during the pass."""

    def __init__(self, step: Step, last: int) -> None:
        super().__init__(layers=[])
        self._step = step
        self._last = last

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._step.write(layer_idx, key_states, value_states)
        if layer_idx == self._last:
            raise _Complete
        return self._step.read(layer_idx)

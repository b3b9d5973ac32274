"""RowRecovery: recomputes missing KV of a cache's rows at its own positions.

All missing tokens of a prefix go through the model in a single pass, wherever the holes are.
Queries carry their own positions, keys are in logical order, and a query sees keys up to its own
position (Pensieve, section 4.3.4, recovers dropped tokens the same way). The pass ends at the
deepest layer with a missing token, because the layers above are complete.
Invariant: a row is ready before its tokens are computed, and a pass uses the RoPE rotation of the
rows. Only missing (layer, position) pairs are written, so reused KV stays bit-identical.
Cost: a forward over the missing tokens, with attention over the prefix up to the last missing
token.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers import Cache

from kvtrie.engines.transformers.mask import masks
from kvtrie.engines.transformers.rows import with_retry
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
    """Computes missing tokens of a cache's rows.

    Args:
        executor: carries out the loads of the rows.
        passes: the passes of the model.
        pool: the memory of the first tier.

    Attributes:
        recovered: number of computed tokens.
    """

    def __init__(self, executor: Executor, passes: Passes, pool: Pool) -> None:
        self.recovered = 0
        self._executor, self._passes, self._pool = executor, passes, pool

    def computes(self, longest: int) -> bool:
        """Return whether the model can compute single tokens of prompts up to this length."""
        return self._passes.computes(longest)

    def fill(self, rows: Sequence[Row]) -> None:
        """Wait for loads, and compute missing tokens inside the matches.

        Raises:
            ConfigError: the model cannot compute missing tokens, for example because a kind of
                layer has no known mask or its attention takes no mask.
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
        """Compute the lost ends of matches, and make room for columns of a pass.

        Args:
            rows: the rows.
            ends: original number of tokens of each match.
            columns: columns of the cache after the pass.
            error: the reason for the loss.

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
        """Compute and commit the tokens of a row after its committed tokens, up to `end`.

        Args:
            row: the row.
            end: token to stop at.
            room: tokens of the row to make room for.

        Raises:
            NoSpaceError: there is no room.
        """
        lease, has = row.lease, row.lease.tokens
        with_retry(self._executor, partial(lease.reserve, room - has))
        self._executor.wait(lease)
        missing = torch.arange(has, end)
        self._compute(row, missing, [missing] * self._pool.layers)
        lease.commit(row.tokens[has:end], now=self._executor.clock())

    def _compute(self, row: Row, missing: torch.Tensor, per_layer: Sequence[torch.Tensor]) -> None:
        """Compute ascending positions of a row, and write the missing KV of each layer."""
        by, pool = self._passes, self._pool
        positions = missing = missing.to(pool.device)
        per_layer = [each.to(pool.device) for each in per_layer]
        step = Step.of_positions(pool, pool.table(row.lease.slots(0)), missing, per_layer)
        last = max(layer for layer, found in enumerate(per_layer) if len(found))
        ids = torch.as_tensor(row.tokens, device=pool.device)[missing]
        if by.reach is not None and int(missing[-1]) < by.reach:
            # An extra query for the RoPE regime, of any token. Its K and V are neither written nor
            # seen by the missing tokens.
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

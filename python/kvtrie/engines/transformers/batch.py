"""Batch: the rows of a cache with their memory, from opening to the commits of passes.

Each row has a lease with the blocks of the first group of layers. Later groups are tensors,
`Windows` and `States`. A model with a single group has neither.

```text
match                       border of the prompt       pass of generate()
|---------------------------|--------------------------|-----
 blocks and windows read     passes computed at opening  live windows and states
```

Loads arrive layer by layer during the first pass. A failed load shortens a match or leaves a hole,
and frees its slots. The missing tokens are then computed in the middle of the pass, and K and V
already stored by the pass are written again to the new slots.
Invariant: after the wait for a layer, it is in the slots of the step for every row. Bytes are
written before their slots are committed. Cost: as `Arrival`. The K and V of the first pass are kept
until its end while loads arrive.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtrie.engines.transformers.admission import common_column
from kvtrie.engines.transformers.arrival import Arrival
from kvtrie.engines.transformers.parts import Parts
from kvtrie.engines.transformers.rows import fresh_tokens, select, step_of
from kvtrie.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvtrie.engines.transformers.layer_trial import Tried
    from kvtrie.engines.transformers.recovery import RowRecovery
    from kvtrie.engines.transformers.rows import Row
    from kvtrie.engines.transformers.states import States
    from kvtrie.engines.transformers.step import Step
    from kvtrie.engines.transformers.windows import WindowLayer, Windows
    from kvtrie.tiers import Pool
    from kvtrie.transfer import Executor

__all__ = ["Batch"]

_OTHER = "KvtrieCache names KV by tokens: run the model that it was opened for, on input_ids"


class Batch:
    """The rows of a cache.

    Args:
        executor: carries out the loads.
        pool: the memory of the first group of layers in the first tier.
        tried: cache contents of each layer, None for a model with a single group.
        recovery: computes the tokens of failed loads.
        compute: computes the only row of a batch, without padding, up to a token.
        room: columns reserved in the leases at opening.

    Attributes:
        pool: as given, as is `recovery`.
        rows: the sequences, in a list changed in place.
        past: columns held by all rows.
        parts: windows and states, empty for a model with a single group.
        arrivals: loads by layer, empty after the first pass.
        step: the addresses of the running pass, None between passes.
    """

    def __init__(
        self,
        executor: Executor,
        pool: Pool,
        tried: Tried | None,
        recovery: RowRecovery,
        *,
        compute: Callable[[Batch, int], None],
        room: int,
    ) -> None:
        self.pool, self.recovery, self._compute = pool, recovery, compute
        self._executor, self._tried, self._room = executor, tried, room
        self.rows: list[Row] = []
        self.past = 0
        self.arrivals: list[Arrival] = []
        self.step: Step | None = None
        self._expected: list[int] = []  # tokens of each row's match while its loads arrive
        self._fresh: list[NDArray[np.int64]] = []
        # K and V of the pass, with the number of their layer in the first group.
        self._new: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.parts = Parts(executor, tried, self._read_part)
        model = executor.manager.model
        self._first = model.groups[0].layers if self.parts else range(pool.layers)
        self._last = max(self._first[-1], self.parts.last)

    def window(self, layer: int) -> WindowLayer | None:
        """Return the window of a layer, None for a layer without a window."""
        windows = self.parts.windows
        return None if windows is None else windows.layers.get(layer)

    def over(self, rows: Sequence[Row]) -> Self:
        """Return a batch of the same model over the given rows, with no columns yet."""
        made = type(self)(
            self._executor,
            self.pool,
            self._tried,
            copy(self.recovery),
            compute=self._compute,
            room=self._room,
        )
        made.rows += rows
        return made

    def fork(self, made: Self) -> None:
        """Fork this batch into `made`, a batch without rows.

        Raises:
            NoSpaceError: no room for the last block of each row.
        """
        now = self._executor.clock()
        for row in self.rows:
            (lease,) = row.lease.fork(1, now=now)
            made.rows.append(replace(row, lease=lease))
        made.parts.take([self.parts], [range(len(self.rows))])
        made.past = self.past

    def select(self, sources: Sequence[int]) -> None:
        """Continue from the source rows, as `rows.select`."""
        self.finish_loads()
        self.rows[:] = select(self.rows, sources, self._executor.clock())
        self.parts.take([self.parts], [sources])

    def repeat(self, rows: int) -> None:
        """Replace each row by adjacent copies, up to `rows` rows in all.

        Raises:
            ConfigError: `rows` is not a multiple of the current number.
        """
        if rows % len(self.rows):
            raise ConfigError(f"a batch of {rows} does not continue {len(self.rows)} rows")
        times = rows // len(self.rows)
        if times != 1:
            self.select([row for row in range(len(self.rows)) for _ in range(times)])

    def cut(self, columns: int) -> None:
        """Remove the last columns. Not for a batch with windows or states."""
        self.finish_loads()
        self.past -= columns
        for at, row in enumerate(self.rows):
            self.rows[at] = row.cut(self.past, self._executor.clock())

    def load(self, *, disk: bool) -> bool:
        """Start the loads of the rows layer by layer, if possible. Return whether it is.

        Args:
            disk: whether blocks on a disk may load by layer.
        """
        arrival = Arrival.of(self._executor, [row.lease for row in self.rows], disk=disk)
        # From here on a wait for a layer reports failed loads.
        self._expected = [row.lease.tokens for row in self.rows]
        if arrival is not None:
            self.arrivals.append(arrival)
        return arrival is not None

    def open(self, *, layerwise: bool, disk: bool) -> None:
        """Open the rows at their matches, after all loads except layerwise loads.

        Rows with windows or states are computed separately, up to a common column.

        Args:
            layerwise: whether the loads were claimed.
            disk: as for `load`.
        """
        rows = self.rows
        if not self.parts:
            if layerwise and self.load(disk=disk):
                held = self._expected
            else:
                self.recovery.fill(rows)
                held = [row.lease.tokens for row in rows]
            self.past = min(row.pad + tokens for row, tokens in zip(rows, held, strict=True))
            return
        alone = [self]
        if len(rows) > 1 or rows[0].pad:
            alone = [self.over([replace(row, pad=0)]) for row in rows]
        try:
            for one in alone:
                one._open_at_match(layerwise=layerwise)  # noqa: SLF001 - same class
            column = common_column(rows, [one.past for one in alone], self.parts.states)
            for at, (one, row) in enumerate(zip(alone, rows, strict=True)):
                self._compute(one, column - row.pad)
                if one is not self:
                    one.finish_loads()
                rows[at] = replace(one.rows[0], pad=row.pad)
        except BaseException:
            for one in alone:
                one.abandon()
            raise
        if alone != [self]:
            self.parts.take([one.parts for one in alone], [[0]] * len(alone))
            self.past = column

    def _open_at_match(self, *, layerwise: bool) -> None:
        """Open the only row, without padding, at its match."""
        (row,) = self.rows
        if layerwise and self.load(disk=True):
            self.past = self._expected[0]
        else:
            self._executor.wait(row.lease)
            self.past = row.lease.tokens
        if self.past:
            self.parts.expect()
        if not self.arrivals:
            self.finish_loads()

    def reserve(self, end: int) -> None:
        """Make room for columns up to `end`.

        Raises:
            NoSpaceError: there is none.
        """
        for row in self.rows:
            row.reserve(self._executor, end)

    def drop_pass(self) -> None:
        """Drop the state of the running pass."""
        self.step, self._new = None, []

    def begin(self, ids: torch.Tensor | None) -> None:
        """Begin a pass: check its tokens, reserve slots and compute addresses.

        Args:
            ids: int64 `(rows, queries)`, the tokens, None if unknown.

        Raises:
            ConfigError: the tokens do not continue the prompts, or are unknown.
            NoSpaceError: there is no room. The pass may be tried again later.
            TransferError: tokens of a row were lost.
        """
        if ids is None:
            raise ConfigError(_OTHER)
        end = self.past + ids.shape[1]
        if end > self._room:
            self.finish_loads()
        self.reserve(end)
        if not self.arrivals:
            for row in self.rows:
                self._executor.wait(row.lease)
        holds = self._expected if self.arrivals else [row.lease.tokens for row in self.rows]
        self._fresh = fresh_tokens(self.rows, holds, ids, self.past)
        self.step = step_of(self.rows, self.pool, self.past, ids.shape[1])
        if self._recover_if_failed():
            self.reserve(end)
            self.step = step_of(self.rows, self.pool, self.past, ids.shape[1])

    def store(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store K and V of a layer, after waiting for its loads.

        Returns:
            K and V of the layer at all columns visible to the pass.
        """
        if self.step is None:
            raise ConfigError(_OTHER)
        windows = self.parts.windows
        if windows is not None and layer in windows.layers:
            self._read_part(windows, layer)
            return windows.layers[layer].update(keys, values, self.past)
        index = self._first.index(layer)
        if self.arrivals:
            self._new.append((index, keys, values))
            self._wait(layer)
        self.step.write(index, keys, values)
        seen = self.step.read(index)
        for arrival in self.arrivals:
            arrival.read()
        # A failed load has freed its slots for other leases, so read from the row's new slots.
        if self._recover_if_failed():
            seen = self.step.read(index)
        return seen

    def commit(self) -> None:
        """End the pass and commit its tokens."""
        if self.step is None:
            return
        self.finish_loads()
        end, size = self.step.keys, self.pool.block_tokens
        for row, new in zip(self.rows, self._fresh, strict=True):
            if (lost := end - row.pad - row.lease.tokens - len(new)) > 0:
                # Their blocks would get the names of other tokens.
                raise TransferError(f"{lost} tokens before the pass are lost: open another cache")
        for at, (row, new) in enumerate(zip(self.rows, self._fresh, strict=True)):
            if self.parts:
                self._executor.wait(row.lease)
            filled = range(row.lease.tokens // size, (row.lease.tokens + len(new)) // size)
            self.parts.write(at, row, filled, end)
            self.rows[at] = row.commit(new, self._executor.clock())
        self.parts.trim()
        self.past = end
        self.drop_pass()
        self._executor.poll()

    def finish_loads(self) -> None:
        """Block until all loads have ended. Needed before any operation except the first pass.

        Raises:
            TransferError: a load has failed, and its tokens cannot be computed.
        """
        if self.arrivals:
            self._wait(self._last)
            self._recover_if_failed()
        for part in self.parts:
            for layer in [*part.late]:
                self._read_part(part, layer)
        while self.arrivals:
            self.arrivals.pop().finish()

    def release(self) -> None:
        """Release all leases, and abandon loads on a new thread."""
        for arrival in self.arrivals:
            arrival.abandon_elsewhere()
        for row in self.rows:
            row.lease.release()
        self.rows.clear()

    def abandon(self) -> None:
        """Return unfinished loads to the executor."""
        while self.arrivals:
            self.arrivals.pop().abandon()

    def _wait(self, layer: int) -> None:
        """Wait for a layer, and compute the tokens of failed loads.

        Raises:
            TransferError: a load has failed, and the model cannot compute single tokens.
        """
        try:
            for arrival in self.arrivals:
                arrival.wait(layer)
        except TransferError as error:
            self._recover_failed_loads(error)

    def _read_part(self, part: Windows | States, layer: int) -> None:
        """Read the window or the states of a layer, after waiting for its loads."""
        if layer in part.late:
            self._wait(layer)
        if layer in part.late:  # otherwise they were computed
            try:
                part.read(layer, self.rows[0], self.past)
            except TransferError as error:
                self._recover_failed_loads(error)
            for arrival in self.arrivals:
                arrival.read()
            self._recover_if_failed()
            part.late.pop(layer, None)

    def _recover_if_failed(self) -> bool:
        """Compute the tokens of failed loads. Return whether a load has failed."""
        if not self._has_failed_load():
            return False
        self._recover_failed_loads(TransferError("a load has failed"))
        return True

    def _recover_failed_loads(self, error: TransferError) -> None:
        """Compute missing tokens, and write the K and V stored by this pass again."""
        self.abandon()
        columns = self.past if self.step is None else self.step.keys
        if self.parts:
            self._compute_match(error, columns)
        else:
            self.recovery.fill(self.rows)
            self.recovery.extend_all(self.rows, self._expected, columns, error)
        if self.step is not None:
            # So far the pass has written to slots no longer held by the leases.
            self.step = step_of(self.rows, self.pool, self.past, columns - self.past)
            for at, keys, values in self._new:
                self.step.write(at, keys, values)

    def _compute_match(self, error: TransferError, columns: int) -> None:
        """Compute the lost part of the only row's match, and reserve columns for the pass.

        Layers not yet reached by the pass continue with windows and states from this computation.
        """
        one = self.over(self.rows)
        one._open_at_match(layerwise=False)  # noqa: SLF001 - same class
        self.recovery.recovered += self.past - one.past
        self._compute(one, self.past)
        self.rows[:] = one.rows
        self.parts.adopt(one.parts)
        self.reserve(columns)
        states = self.parts.states
        if states is not None and states.stop(self.rows, self.past, columns) != columns:
            raise TransferError(f"{error}; the match is shorter now: open another") from error

    def _has_failed_load(self) -> bool:
        """Return whether a failed load has shortened a match or left a hole.

        Any thread may report a failure. Addresses taken before this returns False are valid.
        """
        pairs = zip(self.rows, self._expected, strict=True) if self.arrivals else ()
        leases = [(row.lease, expected) for row, expected in pairs]
        return any(one.tokens < expected or len(one.plan.recompute()) for one, expected in leases)

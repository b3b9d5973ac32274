"""FirstPass: the pass of a cache during which its rows' loads arrive, layer by layer.

A load that fails shortens a match or leaves a hole, and gives its slots back. The missing tokens
are computed amid the pass, and the K and V that it has stored are stored again in the new slots.
Invariant: a layer that `wait` was called for is in the slots of the returned step, in every row.
Cost: as `Arrival`; the K and V of the pass are kept until its end while loads arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.engines.transformers.arrival import Arrival
from kvtrie.engines.transformers.rows import step_of
from kvtrie.errors import TransferError

if TYPE_CHECKING:
    import torch

    from kvtrie.engines.transformers.row_recovery import RowRecovery
    from kvtrie.engines.transformers.rows import Row
    from kvtrie.engines.transformers.step import Step
    from kvtrie.tiers import Pool
    from kvtrie.transfer import Executor

__all__ = ["FirstPass"]


class FirstPass:
    """The loads of a cache's rows, from opening to the end of the first pass.

    Args:
        executor: carries out the loads.
        pool: the memory of the first tier.
        rows: the rows of the cache, which changes them in place.
        recovery: computes what does not come.

    Attributes:
        arrivals: loads that arrive by layer; none after the first pass.
    """

    def __init__(
        self, executor: Executor, pool: Pool, rows: list[Row], recovery: RowRecovery
    ) -> None:
        self.arrivals: list[Arrival] = []
        self._executor, self._pool, self._rows, self._recovery = executor, pool, rows, recovery
        self._expected: list[int] = []  # tokens of each row's match while its loads arrive
        self._new: list[tuple[torch.Tensor, torch.Tensor]] = []  # K and V of the pass, by layer

    def load(self, *, disk: bool) -> bool:
        """Begin the loads of the rows, by layer where that is possible; return whether it is.

        Args:
            disk: whether blocks on a disk can be loaded by layer.
        """
        self._expected = [row.lease.tokens for row in self._rows]
        arrival = Arrival.of(self._executor, [row.lease for row in self._rows], disk=disk)
        if arrival is not None:
            self.arrivals.append(arrival)
        return arrival is not None

    def holds(self) -> list[int]:
        """Return the tokens that each row holds or awaits."""
        return self._expected if self.arrivals else [row.lease.tokens for row in self._rows]

    def begin(self) -> None:
        """Begin a pass: no layer has K and V."""
        self._new = []

    def store(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, step: Step, past: int
    ) -> tuple[Step, tuple[torch.Tensor, torch.Tensor]]:
        """Store K and V of a layer of a pass, which waits for the layer while loads arrive.

        Returns:
            The step to go on with, and K and V of the layer at all columns.
        """
        if self.arrivals:
            self._new.append((keys, values))
            step = self.wait(layer, step, past) or step
        step.write(layer, keys, values)
        seen = step.read(layer)
        for arrival in self.arrivals:
            arrival.read()
        # A load that failed has freed its slots for other leases: the row has new ones to read.
        if self.shrunk():
            step = self.wait(self._pool.layers - 1, step, past) or step
            seen = step.read(layer)
        return step, seen

    def wait(self, layer: int, step: Step | None, past: int) -> Step | None:
        """Wait for a layer; what does not come is computed amid the pass.

        Args:
            layer: which.
            step: the step of the pass; None before it has begun.
            past: columns before the pass.

        Returns:
            The step to go on with.

        Raises:
            TransferError: a load does not come, and the model cannot compute single tokens.
        """
        try:
            for arrival in self.arrivals:
                arrival.wait(layer)
        except TransferError as error:
            self.abandon()
            self._recovery.fill(self._rows)
            self._recover_ends(error, past if step is None else step.keys)
            if step is not None:
                # What the pass has stored so far is of slots that the leases had before.
                step = step_of(self._rows, self._pool, past, step.keys - past)
                for at, (keys, values) in enumerate(self._new):
                    step.write(at, keys, values)
        return step

    def _recover_ends(self, error: TransferError, columns: int) -> None:
        """Compute what matches lost at their ends, and make room for columns of the pass."""
        for row, end in zip(self._rows, self._expected, strict=True):
            if row.lease.tokens >= end:
                continue
            if not self._recovery.computes(len(row.tokens)):
                raise TransferError(f"{error}; the match is shorter now: open another") from error
            self._recovery.extend(row, end, max(end, columns - row.pad))

    def shrunk(self) -> bool:
        """Whether a load has failed, so that a match is shorter or has a hole.

        Any thread may report that: addresses that were taken before this says no are right.
        """
        pairs = zip(self._rows, self._expected, strict=True) if self.arrivals else ()
        leases = [(row.lease, expected) for row, expected in pairs]
        return any(one.tokens < expected or len(one.plan.recompute()) for one, expected in leases)

    def finish(self) -> None:
        """Block until all is there and nothing on its way.

        Raises:
            TransferError: loads do not come.
        """
        while self.arrivals:
            self.arrivals.pop().finish()

    def abandon(self) -> None:
        """Leave what has not come to the executor."""
        while self.arrivals:
            self.arrivals.pop().abandon()

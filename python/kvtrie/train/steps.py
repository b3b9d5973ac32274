"""Steps: batches and learning rates of the steps of a run.

Invariant: a step's batch and rate depend only on settings and its number, so a run can resume at
any step. Cost: a shuffle per epoch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvtrie.train.data import epoch

if TYPE_CHECKING:
    from kvtrie.train.data import DataModule
    from kvtrie.train.run import Run

__all__ = ["Steps"]


class Steps:
    """The optimiser steps of a run.

    Args:
        run: its settings.
        data: prepared data.
    """

    def __init__(self, run: Run, data: DataModule) -> None:
        self._run, self._data = run, data
        self._size = run.global_batch_size
        self.per_epoch = max(1, len(data.train.places) // self._size)
        total = self.per_epoch * run.train.epochs
        most = run.train.max_steps
        self._order: tuple[int, list[list[int]]] = (-1, [])
        self.total = total if most is None else min(total, most)
        if run.train.max_tokens is not None:
            self.total = self._within(run.train.max_tokens)
        share = run.train.lr_warmup_fraction
        wanted = run.train.lr_warmup_steps if share is None else int(share * self.total)
        self.warmup = min(wanted, self.total // 2)

    def _within(self, tokens: int) -> int:
        """Return the number of steps needed to read a number of tokens."""
        split = self._data.train
        lengths = dict(zip(split.places, split.lengths, strict=True))
        for step in range(self.total):
            tokens -= sum(lengths[place] for place in self.batch(step))
            if tokens <= 0:
                return step + 1
        return self.total

    def batch(self, step: int) -> list[int]:
        """Return the indices of a step's cases in the data, with `step` from 0."""
        number, at = divmod(step, self.per_epoch)
        if self._order[0] != number:
            split = self._data.train
            order = epoch(
                split.lengths,
                self._size,
                seed=self._run.seed,
                number=number,
                longest_first=self._data.longest_first,
            )
            self._order = number, [[split.places[each] for each in batch] for batch in order]
        return self._order[1][at]

    def factor(self, step: int) -> float:
        """Return the factor of a step's learning rate: a linear rise, then a cosine to 0."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / max(1, self.total - self.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def rate(self, step: int, base: float) -> float:
        """Return the learning rate of a step, from the peak `base` down to `train.min_lr`."""
        factor, least = self.factor(step), self._run.train.min_lr
        return base * factor if step < self.warmup else least + (base - least) * factor

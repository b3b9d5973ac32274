"""Batches: cases put side by side, padded on the left.

Invariant: an epoch's order depends on the seed and the epoch alone, so a run can go on anywhere.
Cost: one pass over the tokens.
"""

# pyright: reportUnknownMemberType=false
# (torch leaves parts untyped)

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvtrie.train.head import IGNORED

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Batch", "Case", "collate", "epoch"]


@dataclass(frozen=True, slots=True)
class Case:
    """One sequence.

    Attributes:
        input_ids: its tokens.
        targets: those of the last outputs: next tokens, or one class.
    """

    input_ids: list[int]
    targets: list[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences side by side.

    Attributes:
        input_ids: int64 `(batch, tokens)`.
        targets: int64 `(batch, up to tokens)`, `IGNORED` where there is none.
        attention_mask: int64 `(batch, tokens)`, 0 for padding; None where there is none.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    attention_mask: torch.Tensor | None

    @property
    def tokens(self) -> int:
        """Tokens that are no padding."""
        mask = self.attention_mask
        return self.input_ids.numel() if mask is None else int(mask.sum())

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        mask = self.attention_mask
        return Batch(
            self.input_ids.to(device),
            self.targets.to(device),
            None if mask is None else mask.to(device),
        )


def collate(cases: Sequence[Case], pad: int = 0) -> Batch:
    """A batch of cases; short ones are padded on the left.

    Args:
        cases: at least one.
        pad: the token of padding, which nothing ever sees.
    """
    longest = max(len(case.input_ids) for case in cases)
    widest = max(len(case.targets) for case in cases)
    ids = [[pad] * (longest - len(case.input_ids)) + case.input_ids for case in cases]
    targets = [[IGNORED] * (widest - len(case.targets)) + case.targets for case in cases]
    mask = None
    if any(len(case.input_ids) < longest for case in cases):
        seen = [[0] * (longest - n) + [1] * n for n in (len(case.input_ids) for case in cases)]
        mask = torch.tensor(seen)
    return Batch(torch.tensor(ids), torch.tensor(targets), mask)


def epoch(
    lengths: Sequence[int], size: int, *, seed: int, number: int, longest_first: bool = False
) -> list[list[int]]:
    """The cases of each batch of an epoch, shuffled; a last batch that is not full is left out.

    Args:
        lengths: of the cases.
        size: cases per batch.
        seed: of the order.
        number: of the epoch.
        longest_first: let the first batch of the first epoch hold the longest cases.
    """
    order = list(range(len(lengths)))
    random.Random(f"{seed} {number}").shuffle(order)  # noqa: S311 - nothing is secret here
    if longest_first and number == 0:
        longest = set(sorted(order, key=lambda at: -lengths[at])[:size])
        order = [at for at in order if at in longest] + [at for at in order if at not in longest]
    if len(order) < size:  # fewer cases than a batch has: some come twice
        order = [order[at % len(order)] for at in range(size)]
    return [order[lo : lo + size] for lo in range(0, len(order) - size + 1, size)]

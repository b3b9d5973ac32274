"""Batches: groups of cases, padded on the left.

Invariant: an epoch's order depends only on the seed and the epoch, so a run can resume at any step.
Cost: a pass over the tokens.
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
    """A sequence with targets.

    Attributes:
        input_ids: its tokens.
        targets: targets of the last outputs: next tokens, or a class.
    """

    input_ids: list[int]
    targets: list[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of sequences.

    Attributes:
        input_ids: int64 `(batch, tokens)`.
        targets: int64 `(batch, up to tokens)`, `IGNORED` for no target.
        attention_mask: int64 `(batch, tokens)`, 0 for padding. None without padding.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    attention_mask: torch.Tensor | None

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        mask = self.attention_mask
        return self.input_ids.numel() if mask is None else int(mask.sum())

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        mask = self.attention_mask
        return Batch(
            self.input_ids.to(device),
            self.targets.to(device),
            None if mask is None else mask.to(device),
        )


def collate(cases: Sequence[Case], pad: int = 0) -> Batch:
    """Return a batch of cases, with short cases padded on the left.

    Args:
        cases: cases, at least 1.
        pad: the token of padding, masked in attention.
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
    """Return the shuffled cases of each batch of an epoch, without a partial last batch.

    Args:
        lengths: lengths of the cases.
        size: cases per batch.
        seed: seed of the order.
        number: number of the epoch.
        longest_first: put the longest cases into the first batch of the first epoch.
    """
    order = list(range(len(lengths)))
    random.Random(f"{seed} {number}").shuffle(order)  # noqa: S311 - not used for secrets
    if longest_first and number == 0:
        longest = set(sorted(order, key=lambda at: -lengths[at])[:size])
        order = [at for at in order if at in longest] + [at for at in order if at not in longest]
    if len(order) < size:  # fewer cases than a batch: repeat cases
        order = [order[at % len(order)] for at in range(size)]
    return [order[lo : lo + size] for lo in range(0, len(order) - size + 1, size)]

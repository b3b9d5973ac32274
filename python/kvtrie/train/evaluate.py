"""Evaluate: loss and exact matches of cases with a cache's policy.

Invariant: cases run in the given order, and no gradient is computed. Cost: inference.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtrie.train.data import collate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtrie.train.data import DataModule
    from kvtrie.train.gradients import LongContextGradients

__all__ = ["Measured", "evaluate"]


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of an evaluation.

    Attributes:
        cases: number of cases.
        tokens: number of their tokens.
        loss: their mean loss.
        exact: share of cases with all targets predicted, None if undefined for the head.
    """

    cases: int
    tokens: int
    loss: float
    exact: float | None


def evaluate(
    tool: LongContextGradients,
    data: DataModule,
    places: Sequence[int],
    *,
    size: int,
    most: int | None = None,
    each: Callable[[int], Any] | None = None,
) -> Measured:
    """Run cases by inference.

    Args:
        tool: model, head and cache settings.
        data: prepared data.
        places: indices of the cases in the data.
        size: cases per pass.
        most: largest number of passes. None runs all.
        each: called with the number of finished cases after each pass.
    """
    batches = [places[lo : lo + size] for lo in range(0, len(places), size)][:most]
    cases = tokens = right = 0
    loss = 0.0
    reported = True
    module: Any = tool.decoder.model
    learned = module.training
    module.eval()
    try:
        for batch in batches:
            made = collate([data.case(at) for at in batch]).to(module.device)
            mean = tool.loss(made.input_ids, made.targets, attention_mask=made.attention_mask)
            loss += float(mean) * len(batch)
            cases, tokens = cases + len(batch), tokens + made.tokens
            if tool.right is None:
                reported = False
            else:
                whole = tool.head.num_target_entries(made.targets).to(tool.right.device)
                right += int((tool.right == whole).sum())
            if each is not None:
                each(cases)
    finally:
        module.train(learned)
    shown = right / cases if reported and cases else None
    return Measured(cases, tokens, loss / max(1, cases), shown)


def random_state(seed: int, step: int, rank: int) -> None:
    """Seed random numbers by the step, so that a run can resume at any step."""
    torch.manual_seed(seed * 1_000_003 + step * 1009 + rank)

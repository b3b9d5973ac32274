"""AttnWeightsReplayLog: the decisions of a cache, to be replayed.

Invariant: the log has the lengths of all steps, and from the first overwrite on the rows per batch
row and head. Cost: four bytes per token, batch row and KV head from the first overwrite on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["AttnWeightsReplayLog"]


@dataclass(slots=True)
class AttnWeightsReplayLog:
    """Steps in order.

    Attributes:
        steps: number of tokens of each step.
        rows: per step the chosen rows, int32 `(batch, kv_heads, m)`, or None while the cache fills.
    """

    steps: list[int] = field(default_factory=list[int])
    rows: list[torch.Tensor | None] = field(default_factory=list[torch.Tensor | None])

    def note(self, new: int, rows: torch.Tensor | None) -> None:
        """Append a step."""
        self.steps.append(new)
        self.rows.append(None if rows is None else rows.to(torch.int32))

    def chosen(self, step: int) -> torch.Tensor:
        """Return the rows of a step, int64.

        Raises:
            IndexError: the step is missing or filled empty rows.
        """
        rows = self.rows[step]
        if rows is None:
            raise IndexError(f"step {step} of the log filled empty rows")
        return rows.long()

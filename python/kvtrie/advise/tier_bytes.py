"""TierBytes: bytes of a model's tiers, of a window's stored blocks, and of loads.

Invariant: a tier has a whole number of units: blocks of all layers, or pages shared by groups of
layers kept apart. Cost: arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtrie._kvtrie import page_bytes
from kvtrie.settings.resume import has_groups

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie.advise.predict import Bound
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.resume import ResumePoints

__all__ = ["TierBytes"]


@dataclass(frozen=True, slots=True)
class TierBytes:
    """Sizes of a model's blocks.

    Attributes:
        unit: the bytes of every tier are a multiple of it.
        block: bytes of a block of the first group, or of all layers unless groups are kept apart.
        token: bytes per token of the same block.
        parts: for each further group the bytes of a block or state, the maximum number of its
            blocks for a resume point, and its bytes per token (None for a state).
    """

    unit: int
    block: int
    token: float
    parts: tuple[tuple[int, int, float | None], ...] = ()

    @classmethod
    def of(cls, model: ModelShape, block_tokens: int, resume: ResumePoints | None) -> TierBytes:
        """Return the sizes of a model.

        Args:
            model: the shape.
            block_tokens: tokens of a block.
            resume: resumable borders. None if all layers keep all tokens.
        """
        if not has_groups(model, resume):
            block = model.block_bytes(block_tokens)
            return cls(block, block, block / block_tokens)
        slots = [model.block_bytes(block_tokens, at) for at in range(len(model.groups))]
        parts: list[tuple[int, int, float | None]] = []
        for slot, group in zip(slots[1:], model.groups[1:], strict=True):
            if group.kind == "state":
                parts.append((slot, 1, None))
            else:
                needed = -(-group.window // block_tokens) - (-group.sinks // block_tokens)
                parts.append((slot, needed, slot / block_tokens))
        return cls(page_bytes(slots), slots[0], slots[0] / block_tokens, tuple(parts))

    @property
    def least(self) -> int:
        """Bytes of the smallest tier: a block of each group."""
        return self.unit * (1 + len(self.parts))

    def rounded(self, size: int) -> int:
        """Return bytes rounded down to whole units."""
        return size // self.unit * self.unit

    def stored(self, window: Bound) -> int:
        """Return the bytes of all blocks stored in a window, on a tier without evictions.

        The first group has all blocks. Each further group has the blocks for two resume points per
        request, the ends of its prompt and of its answer, or all blocks if these are fewer.
        """
        total = self._units(window.distinct, self.block)
        for slot, needed, _ in self.parts:
            total += self._units(min(window.distinct, 2 * window.requests * needed), slot)
        return total * self.unit

    def carried(self, below: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the bytes loaded by each tier for each request.

        The windows and states for a resume come from the slowest tier with some of the request's
        tokens: the tiers above evict the end of a path first.

        Args:
            below: int64 `(requests, tiers)`, tokens found on the tiers below the first.
        """
        loaded = below.astype(np.float64) * self.token
        found = below.sum(axis=1)
        point = np.zeros(len(below))
        for slot, needed, token in self.parts:
            most = float(slot * needed)
            point += np.where(
                found > 0, most if token is None else np.minimum(most, found * token), 0
            )
        for at in range(below.shape[1] - 1, -1, -1):
            covered = below[:, at] > 0
            loaded[:, at] += np.where(covered, point, 0.0)
            point = np.where(covered, 0.0, point)
        return loaded

    def _units(self, blocks: int, block: int) -> int:
        return -(-blocks // (self.unit // block))

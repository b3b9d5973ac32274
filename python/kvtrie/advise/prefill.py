"""Prefill: the time to compute a prompt after its found tokens.

Measured passes (`kvtrie profile`) have a fixed time per step and times over context. A server's
metrics alone have a mean time per token, with the fixed time included. Invariant: more found tokens
never take longer. Cost: an interpolation per request and step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtrie.model.cost import Cost

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie.sim.passes import Grid, Passes

__all__ = ["computation", "seconds"]

_NS = 1e9


def computation(found: NDArray[np.int64], prompt: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the computation of the tokens after the found ones, in tokens without context.

    Args:
        found: tokens of each prompt not to be computed.
        prompt: tokens of each prompt.
    """
    context, tokens = found.astype(np.float64), (prompt - found).astype(np.float64)
    return tokens * (1 + Cost().alpha * (context + tokens / 2))


def seconds(
    passes: Passes, found: NDArray[np.int64], prompt: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the time to compute the tokens after the found tokens, one request at a time.

    A prompt with more tokens than the largest measured pass takes several steps.

    Args:
        passes: measured step times.
        found: as for `computation`.
        prompt: as for `computation`.
    """
    context, left = found.astype(np.float64), (prompt - found).astype(np.float64)
    total, most = np.zeros(len(prompt)), float(passes.prefill[1][-1])
    while (left > 0).any():
        tokens = np.minimum(left, most)
        total += np.where(tokens > 0, passes.base + _between(passes.prefill, context, tokens), 0.0)
        context, left = context + tokens, left - tokens
    return total / _NS


def _between(
    grid: Grid, context: NDArray[np.float64], tokens: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Interpolate linearly along both axes. After the last context the slope continues."""
    contexts, counts, rows = grid
    along = np.array([np.interp(tokens, counts, row) for row in rows])
    if len(contexts) == 1:
        return along[0]
    low = np.clip(np.searchsorted(contexts, context, side="right") - 1, 0, len(contexts) - 2)
    axis, at = np.array(contexts, dtype=np.float64), np.arange(len(context))
    part = np.maximum(0, (context - axis[low]) / (axis[low + 1] - axis[low]))
    return along[low, at] + (along[low + 1, at] - along[low, at]) * part

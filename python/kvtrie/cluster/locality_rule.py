"""Locality: the simulator's router `locality`, for deployments with an index and no selector.

Invariant: simulator and production use the same rule, in `rust/sim`. Cost: O(machines).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie import _kvtrie
from kvtrie.settings.argument import pairs, real

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["locality"]

_RATIO_ONE = 2**32
_MOST_RATIO = 2.0**31
_MOST_MACHINES = 2**16


def locality(candidates: Sequence[tuple[int, int]], *, ratio: float = 2.0) -> int:
    """Choose the machine with most of a prompt, unless it is much busier than the idlest machine.

    Ties go to the least loaded machine, then to the first machine.

    Args:
        candidates: `(load, hit)` of each machine, at least one machine: unfinished requests there,
            and tokens or blocks of the prompt there.
        ratio: limit of a considered machine's requests, this request counted, in multiples of the
            fewest requests. 1 to 2^31.

    Returns:
        The index of the machine in `candidates`.

    Raises:
        ConfigError: no candidates or more than 65 536, a candidate that is no pair of whole numbers
            of 0 or more, or a ratio out of range.
    """
    rows = list(pairs("candidates", candidates, _MOST_MACHINES))
    return _kvtrie.locality(rows, round(real("ratio", ratio, 1.0, _MOST_RATIO) * _RATIO_ONE))

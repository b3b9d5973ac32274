"""Locality: the simulator's router of that name, for deployments with an index and no selector.

Invariant: simulator and production choose by one rule, which is in `rust/sim`. Cost: O(machines).
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
    """Choose the machine that has most of a prompt, unless it is much busier than another.

    Of equal hits it is the least loaded one, then the one that comes first.

    Args:
        candidates: `(load, hit)` of each machine, at least one: requests there that have not
            ended, and tokens or blocks of the prompt that it has.
        ratio: only machines whose requests, this one counted, are at most `ratio` times as many as
            the fewest are considered; 1 to 2^31.

    Returns:
        The index of the machine in `candidates`.

    Raises:
        ConfigError: no candidates or more than 65 536, one that is no pair of whole numbers of 0 or
            more, or a ratio out of range.
    """
    rows = list(pairs("candidates", candidates, _MOST_MACHINES))
    return _kvtrie.locality(rows, round(real("ratio", ratio, 1.0, _MOST_RATIO) * _RATIO_ONE))

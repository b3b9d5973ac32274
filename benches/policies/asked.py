"""Cells of online policies: both halves of a trace, and first-token times.

Cost: none.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benches.evaluation import Cell
from benches.policies.finds import CORE, FIRST, ONLINE, SECOND, halves, middle
from benches.policies.online import NAMES, NEEDS
from benches.policies.waits import DIRECT, GIVEN, LOADS, Wait, waits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benches.policies.cells import Row
    from benches.policies.traces import Source


def online_cells(source: Source, *, check: bool) -> Iterator[Cell]:
    """Both halves of a trace under online policies, and first-token times of the chosen ones.

    Args:
        source: the trace.
        check: whether libcachesim is installed.
    """
    room, asked = middle(source), [name for name in (*CORE, *NAMES) if check or name not in NEEDS]
    for policy in asked:
        keys = [(source.name, source.seed, room, half, 1, policy) for half in (FIRST, SECOND)]
        yield Cell(keys, partial(_all, halves, source, policy))
    for structure, policies in ((DIRECT, CORE), (GIVEN, ONLINE)):
        for policy in policies:
            if policy in asked:
                keys = [(source.name, source.seed, room, structure, load, policy) for load in LOADS]
                yield Cell(keys, partial(_all, waits, source, structure, policy))


def _all(call: Callable[..., list[Row] | list[Wait]], *given: object) -> list[Row] | list[Wait]:
    return call(*given[:-1])

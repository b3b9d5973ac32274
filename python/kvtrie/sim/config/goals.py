"""The table `goals`: what a request must meet to count as goodput."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtrie.sim.config.table import Table

__all__ = ["Goals", "goals_of"]

_MOST_NS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Goals:
    """The most that a request may take.

    Attributes:
        ttft_ns: nanoseconds from its arrival to its first token.
        tpot_ns: nanoseconds from one token to the next, in its mean.
    """

    ttft_ns: int = _MOST_NS
    tpot_ns: int = _MOST_NS


def goals_of(table: Table) -> Goals | None:
    """Return the goals of a table, None if it states none."""
    goals = Goals(
        ttft_ns=table.number("ttft_ns", _MOST_NS, 0, _MOST_NS),
        tpot_ns=table.number("tpot_ns", _MOST_NS, 0, _MOST_NS),
    )
    table.close()
    return None if goals == Goals() else goals

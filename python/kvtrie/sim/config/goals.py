"""Table `goals`: latency limits of a request to count as goodput."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtrie.sim.config.table import Table

__all__ = ["Goals", "goals_of"]

_MOST_NS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Goals:
    """Latency limits of a request.

    Attributes:
        ttft_ns: nanoseconds from arrival to the first token.
        tpot_ns: mean nanoseconds between tokens.
    """

    ttft_ns: int = _MOST_NS
    tpot_ns: int = _MOST_NS


def goals_of(table: Table) -> Goals | None:
    """Return the goals of a table, or None if it is empty."""
    goals = Goals(
        ttft_ns=table.number("ttft_ns", _MOST_NS, 0, _MOST_NS),
        tpot_ns=table.number("tpot_ns", _MOST_NS, 0, _MOST_NS),
    )
    table.close()
    return None if goals == Goals() else goals

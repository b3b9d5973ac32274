"""Table `directory`: how routers and peers learn block locations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtrie.sim.config.table import Table

__all__ = ["directory_of"]

_LATEST_NS = 2**63 - 1


def directory_of(table: Table) -> dict[str, Any]:
    """Return the delay of events in ns, for `Simulation`. None queries every manager."""
    delay_ns = None
    if table.word("kind", ("exact", "events")) == "events":
        delay_ns = table.number("delay_ns", 0, 0, _LATEST_NS)
    table.close()
    return {"directory_ns": delay_ns}

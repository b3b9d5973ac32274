"""The table `router`: which machine a request is sent to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtrie.sim.config.table import Table

__all__ = ["router_of"]


def router_of(table: Table) -> dict[str, Any]:
    """The arguments of `Simulation` that requests are sent by."""
    more = {"router": table.word("kind", ("round-robin", "least-loaded", "hash"))}
    table.close()
    return more

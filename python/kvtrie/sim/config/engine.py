"""The table `engine`: how a machine runs its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtrie.sim.config.table import Table

__all__ = ["engine_of"]


def engine_of(table: Table) -> dict[str, Any]:
    """The arguments of `Simulation` that an engine runs by."""
    table.word("kind", ("serial",))
    more = {"wait": table.word("wait", ("all", "layer"))}
    table.close()
    return more

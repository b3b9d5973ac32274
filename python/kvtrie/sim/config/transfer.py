"""Top-level keys for the timing of moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtrie.sim.config.table import Table

__all__ = ["transfer_of"]


def transfer_of(top: Table) -> dict[str, Any]:
    """Return the arguments of `Simulation` for moves."""
    return {
        "transfer": top.word("transfer", ("executor", "predicted")),
        "moves_per_job": top.number("moves_per_job", 64, 1, 2**31 - 1),
        "prefetch": top.word("prefetch", ("never", "arrival")),
    }

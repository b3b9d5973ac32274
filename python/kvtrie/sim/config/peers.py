"""Table `peers`: network between machines, and whether they fetch blocks from peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError
from kvtrie.settings.tier import Lane
from kvtrie.sim.config.table import made

if TYPE_CHECKING:
    from kvtrie.sim.config.table import Table

__all__ = ["peers_of"]


def peers_of(table: Table, engine: str) -> dict[str, Any]:
    """Return the arguments of `Simulation` for the lanes between machines."""
    lookup_all = table.word("lookup", ("own", "all")) == "all"
    stated = {"name": "peers", **table.some("bytes_per_s", "latency_ns", "shares")}
    table.close()
    hands_over = engine == "disaggregated"
    if "bytes_per_s" not in stated and (lookup_all or hands_over):
        wants = 'lookup = "all"' if lookup_all else 'engine.kind = "disaggregated"'
        raise ConfigError(f"peers.bytes_per_s is missing: {wants} wants it")
    lane = made("peers", Lane, stated) if lookup_all or hands_over else None
    return {"peers": lane if lookup_all else None, "network": lane if hands_over else None}

"""The table `peers`: the network between machines that ask each other for blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError
from kvtrie.sim.config.table import made
from kvtrie.tier import Lane

if TYPE_CHECKING:
    from kvtrie.sim.config.table import Table

__all__ = ["peers_of"]


def peers_of(table: Table) -> Lane | None:
    """The lane between two machines, if one fetches from another."""
    asks = table.word("lookup", ("own", "all")) == "all"
    stated = {"name": "peers", **table.some("bytes_per_s", "latency_ns", "shares")}
    table.close()
    if not asks:
        return None
    if "bytes_per_s" not in stated:
        raise ConfigError('peers.bytes_per_s is missing: lookup = "all" wants it')
    return made("peers", Lane, stated)

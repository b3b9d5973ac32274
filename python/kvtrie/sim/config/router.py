"""Table `router`: routing of requests to machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtrie.sim.config.table import Table

__all__ = ["router_of"]

_KINDS = ("round-robin", "least-loaded", "hash", "locality", "score")
_RATIO_ONE = 2**32
_MOST_RATIO = 2.0**31
_MOST_WEIGHT = 2**32 - 1


def router_of(table: Table) -> dict[str, Any]:
    """Return the router's arguments of `Simulation`."""
    kind = table.word("kind", _KINDS)
    router: Any = kind
    if kind == "locality":
        router = (kind, round(table.real("ratio", 2.0, 1.0, _MOST_RATIO) * _RATIO_ONE))
    elif kind == "score":
        weights = ("hit_weight", "load_weight")
        router = (kind, *(table.number(weight, 1, 0, _MOST_WEIGHT) for weight in weights))
    table.close()
    return {"router": router}

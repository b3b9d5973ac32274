"""The table `cost`: what a token takes to compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from kvtrie.argument import pairs, real, whole
from kvtrie.cost import Cost
from kvtrie.errors import ConfigError
from kvtrie.sim.config.table import made

if TYPE_CHECKING:
    from kvtrie.shape import ModelShape
    from kvtrie.sim.config.table import Table

__all__ = ["Price", "cost_of"]

Price: TypeAlias = "tuple[int, int] | list[tuple[int, int]]"
"""Parts of a nanosecond, 2**-32 each: `(base, slope)` or points `(context, price)`."""

_PART = 2**32
_MOST_NS = 2.0**31
_MOST_POINTS = 2**16 - 1


def cost_of(table: Table, model: ModelShape) -> tuple[Price, Cost]:
    """What a token takes to compute, and the same for managers."""
    if table.word("kind", ("affine", "table")) == "affine":
        ns = table.real("ns_per_token", Cost.ns_of(model), 0, _MOST_NS)
        alpha = table.real("alpha", Cost().alpha, 0, _MOST_NS)
        table.close()
        slope = real("cost.alpha times cost.ns_per_token", ns * alpha, 0, _MOST_NS)
        return (round(ns * _PART), round(slope * _PART)), Cost(alpha=alpha, ns_per_token=ns)
    given = pairs("cost.points", table.take("points", ()), _MOST_POINTS)
    table.close()
    points = [
        (
            whole("context of cost.points", at, 0, 2**63 - 1),
            real("nanoseconds of cost.points", ns, 0, _MOST_NS),
        )
        for at, ns in given
    ]
    if not points:
        raise ConfigError("cost.points is (), pairs of context and nanoseconds per token wanted")
    cost = made("cost.points", Cost, {"table": points, "ns_per_token": points[0][1]})
    return [(at, round(ns * _PART)) for at, ns in points], cost

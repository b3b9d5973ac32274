"""Table `cost`: computation time of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kvtrie.errors import ConfigError
from kvtrie.model.cost import Cost
from kvtrie.settings.argument import pairs, real, shown, whole
from kvtrie.sim.config.table import made, plain
from kvtrie.sim.passes import Grid, read_passes
from kvtrie.sim.roofline import Roofline

if TYPE_CHECKING:
    from kvtrie.model.shape import ModelShape
    from kvtrie.sim.config.table import Table

__all__ = ["Price", "cost_of"]

Price: TypeAlias = "tuple[int, int] | list[tuple[int, int]] | tuple[int, Grid, Grid, int]"
"""Units of 2**-32 ns: `(base, slope)`, points `(context, price)`, or `Passes` in ns."""

_PART = 2**32
_MOST_NS = 2.0**31
_MOST_POINTS = 2**16 - 1


def cost_of(table: Table, model: ModelShape, folder: Path = Path()) -> tuple[Price, Cost]:
    """Return the computation time of tokens, for the engine and for the managers.

    A relative path of a profile starts at `folder` if the file exists there.
    """
    match table.word("kind", ("affine", "table", "profile", "roofline")):
        case "affine":
            return _affine(table, model)
        case "table":
            return _points(table)
        case "profile":
            given = table.take("path")
            table.close()
            if not isinstance(given, str) or not given:
                raise ConfigError(f"cost.path is {shown(given)}, the name of a file wanted")
            path = folder / given
            passes = read_passes(path if path.exists() else Path(given))
        case _:
            stated = table.some(*plain(Roofline))
            table.close()
            passes = made("cost", Roofline, stated).passes(model)
    return passes.price(), passes.cost()


def _affine(table: Table, model: ModelShape) -> tuple[Price, Cost]:
    ns = table.real("ns_per_token", Cost.ns_of(model), 0, _MOST_NS)
    alpha = table.real("alpha", Cost().alpha, 0, _MOST_NS)
    table.close()
    slope = real("cost.alpha times cost.ns_per_token", ns * alpha, 0, _MOST_NS)
    return (round(ns * _PART), round(slope * _PART)), Cost(alpha=alpha, ns_per_token=ns)


def _points(table: Table) -> tuple[Price, Cost]:
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

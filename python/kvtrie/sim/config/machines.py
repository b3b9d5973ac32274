"""Key `machines`: their number, or a list of tables for different machines.

Invariant: all machines have tiers of the same kinds and layouts, so blocks can move between all of
them. Cost: that of the tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import few, whole
from kvtrie.sim.config.cost import cost_of
from kvtrie.sim.config.rent import rent_of
from kvtrie.sim.config.table import Table
from kvtrie.sim.config.tiers import tiers_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvtrie.model.cost import Cost
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Lane, Tier
    from kvtrie.sim.config.cost import Price
    from kvtrie.sim.config.rent import Rent

__all__ = ["Machines", "machines_of"]

_MOST = 2**20
_OWN = ("tiers", "cost", "price")


@dataclass(frozen=True, slots=True)
class Machines:
    """A group of equal machines.

    Attributes:
        count: number of machines.
        tiers: tiers of each machine, fastest first.
        price: computation time of tokens.
        cost: the managers' cost model of the same engine.
        rent: price of each machine per hour.
    """

    count: int
    tiers: tuple[Tier, ...]
    price: Price
    cost: Cost | str
    rent: Rent | None = None


def machines_of(
    given: object,
    shared: Mapping[str, Any],
    model: ModelShape,
    lanes: Mapping[str, Lane],
    folder: Path,
) -> tuple[Machines, ...]:
    """Return the machines, grouped by item.

    Args:
        given: a number, or a list of tables with `count`, `tiers`, `cost` and `price`.
        shared: default `tiers`, `cost` and `price`.
        model: the model on each machine.
        lanes: as for `tiers_of`.
        folder: as for `cost_of`.

    Raises:
        ConfigError: an invalid number or table, or tiers with kinds or layouts different from the
            first machine's.
    """
    several = isinstance(given, list)
    stated = cast("list[Any]", given) if several else [{"count": given}]
    if not stated:
        raise ConfigError("machines is [], a number or tables of at least one machine wanted")
    found: list[Machines] = []
    for at, one in enumerate(few("machines", stated, _MOST)):
        name = f"machines.{at}"
        table = Table(name, one)
        count = whole(f"{name}.count" if several else "machines", table.take("count", 1), 1, _MOST)
        own = {key: (f"{name}.{key}", table.take(key)) for key in _OWN}
        table.close()
        own = {key: (key, shared.get(key)) if own[key][1] is None else own[key] for key in _OWN}
        tiers = tiers_of(*own["tiers"], lanes)
        price, cost = cost_of(_table(*own["cost"]), model, folder)
        found.append(Machines(count, tiers, price, cost, rent_of(_table(*own["price"]))))
        _check(name, found)
    whole("machines", sum(one.count for one in found), 1, _MOST)
    return tuple(found)


def _table(name: str, given: object) -> Table:
    return Table(name, {} if given is None else given)


def _check(name: str, found: list[Machines]) -> None:
    """Check for the tier kinds and layouts of the first machine."""
    wanted, own = (
        [(tier.kind, tier.layout) for tier in one.tiers] for one in (found[0], found[-1])
    )
    if own != wanted:
        kinds = ([kind for kind, _ in of] for of in (own, wanted))
        given, first = (", ".join(each) for each in kinds)
        raise ConfigError(
            f"{name}.tiers are {given}: the kinds and layouts of the first machine, {first}, wanted"
        )

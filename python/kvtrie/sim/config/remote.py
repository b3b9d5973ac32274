"""Table `remote`: a store shared by all machines as their last tier."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError
from kvtrie.sim.config.table import Table, made
from kvtrie.sim.config.tiers import tier_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtrie.settings.tier import Lane, Tier
    from kvtrie.sim.config.machines import Machines

__all__ = ["remote_of", "with_remote"]

_LANE = ("bytes_per_s", "latency_ns", "shares")


def remote_of(given: object, lanes: Mapping[str, Lane]) -> tuple[Tier, str] | None:
    """Return the tier and its lookup, "all" or "local". None without a table.

    Args:
        given: the table, or None.
        lanes: as for `tiers_of`. `remote read` and `remote store` apply to a table without a
            bandwidth.
    """
    if given is None:
        return None
    table = Table("remote", given)
    if not table.flag("shared", default=True):
        raise ConfigError(
            "remote.shared is False, True wanted: a store of one machine is a tier of kind 'remote'"
        )
    lookup = table.word("lookup", ("all", "local"))
    stated = table.some(*_LANE)
    room = table.some("blocks", "bytes", "layout")
    table.close()
    tier = tier_of("remote", {"kind": "remote", "policy": "lru", **room}, lanes)
    read, store = (made("remote", partial(replace, lane), stated) for lane in tier.lanes())
    return replace(tier, read=read, store=store), lookup


def with_remote(machines: Sequence[Machines], tier: Tier, blocks: int) -> tuple[Machines, ...]:
    """Return the machines with a shared store as their last tier.

    Args:
        machines: machines without the store.
        tier: tier of the store.
        blocks: room of the store.

    Raises:
        ConfigError: a machine already has a tier `remote`.
    """
    count = sum(one.count for one in machines)
    for one in machines:
        for at, own in enumerate(one.tiers):
            if own.kind == "remote":
                raise ConfigError(
                    f"tiers.{at} is 'remote', a store of one machine, and remote is a store of "
                    f"{blocks} blocks for all {count} machines: one of them wanted"
                )
    return tuple(replace(one, tiers=(*one.tiers, tier)) for one in machines)

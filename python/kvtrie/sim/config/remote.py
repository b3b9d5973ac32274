"""The table `remote`: a store of all machines, the last tier of each."""

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
    """Return the tier and its lookup, "all" or "local"; None without a table.

    Args:
        given: the table, or None.
        lanes: as of `tiers_of`: `remote read` and `remote store` are those of a table that states
            no bandwidth.
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
    """Return machines whose last tier is a store of all.

    Args:
        machines: the machines.
        tier: the store.
        blocks: its room.

    Raises:
        ConfigError: a machine that has a tier `remote` already.
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

"""List `tiers`: storage tiers of each machine, fastest first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError
from kvtrie.model.layout import Layout
from kvtrie.settings.argument import few
from kvtrie.settings.sizes import is_share
from kvtrie.settings.tier import Lane, Tier
from kvtrie.sim.config.table import Table, made, plain

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["tier_of", "tiers_of"]

_MOST_TIERS = 16
_NOT_SIMULATED = (
    "path",
    "owner",
    "io_budget",
    "durability",
    "io",
    "workers",
    "write_limit",
    "trust_s",
    "lookup",
    "secret_file",
    "keep",
    "keep_replace",
)


def tiers_of(name: str, given: object, lanes: Mapping[str, Lane]) -> tuple[Tier, ...]:
    """Return the tiers of a list of one to four tables.

    Args:
        name: key of the list.
        given: the list, or None for an empty list.
        lanes: default lanes by name, for example `host read`.
    """
    tiers = few(name, () if given is None else given, _MOST_TIERS)
    if not tiers:
        raise ConfigError(f"{name} is (), one to four wanted")
    return tuple(tier_of(f"{name}.{at}", one, lanes) for at, one in enumerate(tiers))


def tier_of(name: str, given: object, lanes: Mapping[str, Lane]) -> Tier:
    """Return the tier of a table, without memory. `name` and `lanes` as for `tiers_of`."""
    table = Table(name, given)
    keys = plain(Tier, *_NOT_SIMULATED)
    settings = table.some(*keys)
    table.close()
    if is_share(settings.get("bytes")):
        raise ConfigError(
            f"{name}.bytes is {settings['bytes']!r}, a size wanted: a simulated machine has "
            "no share of this one's memory or disk"
        )
    kind = settings.get("kind")
    for way in ("read", "store"):
        if way in settings:
            lane = Table(f"{name}.{way}", settings[way])
            stated = {"name": f"{kind} {way}", "bytes_per_s": None}
            stated |= lane.some("name", "bytes_per_s", "latency_ns", "shares")
            lane.close()
            settings[way] = made(f"{name}.{way}", Lane, stated)
        elif (lane := lanes.get(f"{kind} {way}")) is not None:
            settings[way] = lane
    if "layout" in settings:
        layout = Table(f"{name}.layout", settings["layout"])
        stated = layout.some(*plain(Layout))
        layout.close()
        settings["layout"] = made(f"{name}.layout", Layout, stated)
    return made(name, Tier, {**settings, "owner": "none"})

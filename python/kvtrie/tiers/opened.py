"""Opens the pools and storages of tiers, all or none, and closes them.

Invariant: after an error no pool or storage stays open.
Cost: opening each tier.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtrie.settings.tier import Tier

__all__ = ["close_pools", "open_each"]

_Opened = TypeVar("_Opened")


@runtime_checkable
class _Closes(Protocol):
    def close(self) -> None: ...


def open_each(
    tiers: Sequence[Tier], open_tier: Callable[[int, Tier], _Opened]
) -> tuple[_Opened, ...]:
    """Open each tier. If a tier fails to open, close all opened tiers.

    Disks open last, because opening a disk with a smaller budget frees blocks at once.
    """
    pools: dict[int, _Opened] = {}
    try:
        for at in sorted(range(len(tiers)), key=lambda at: tiers[at].kind == "disk"):
            pools[at] = open_tier(at, tiers[at])
    except BaseException:
        close_pools(pools.values())
        raise
    return tuple(pools[at] for at in range(len(tiers)))


def close_pools(pools: Iterable[object]) -> None:
    """Release the memory, files, locks and connections of pools and storages."""
    with ExitStack() as closing:
        for pool in pools:
            if isinstance(pool, _Closes):
                closing.callback(pool.close)

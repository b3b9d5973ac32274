"""Checks the formats and total size of a manager's tiers before opening them.

Invariant: a failed check has opened nothing.
Cost: arithmetic on the settings. The machine's memory size is read once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtrie.errors import ConfigError
from kvtrie.model.group_pages import GroupPages
from kvtrie.settings.sizes import check_exists
from kvtrie.tiers.allocation import all_of_device
from kvtrie.tiers.block_format import BlockFormat
from kvtrie.tiers.conversion import agree
from kvtrie.tiers.gpu import default_device
from kvtrie.tiers.narrowed import require_narrower

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier

__all__ = ["check_tiers"]

_MEMORY = ("gpu", "host")


def check_tiers(
    model: ModelShape,
    tiers: Sequence[Tier],
    block_tokens: int,
    *,
    ranks: int,
    staging: int,
    separate_groups: bool,
) -> dict[int, BlockFormat]:
    """Raise if tiers cannot be opened together. The arguments are as in `open_pools`.

    Returns:
        The format of the memory above each disk with a different format, by tier.

    Raises:
        ConfigError: as in `open_pools`.
    """
    if tiers and tiers[0].keep is not None:
        raise ConfigError(
            "keep is for a host tier below the first one, whose blocks moves bring: the first tier "
            "is written by the engine"
        )
    if not separate_groups:
        above = _check_formats(model, tiers, block_tokens)
        _check_together(tiers, lambda tier: tier.room_bytes(model, block_tokens))
        return above
    _check_groups(tiers, ranks=ranks, staging=staging)
    _check_together(tiers, lambda tier: GroupPages.of(model, tier, block_tokens).bytes)
    return {}


def _check_formats(
    model: ModelShape, tiers: Sequence[Tier], block_tokens: int
) -> dict[int, BlockFormat]:
    """Raise if tiers cannot exchange KV, checking each from the first tier down.

    Returns:
        The format of the memory above each disk with a different format, by tier.

    Raises:
        ConfigError: different layouts, a format without conversion, or a disk in a format not
            narrower than the memory above it.
    """
    mine = [
        (at, tier, BlockFormat.of(model, tier.layout, block_tokens))
        for at, tier in enumerate(tiers)
        if tier.owner == "kvtrie" and (tier.kind in ("gpu", "host") or tier.path is not None)
    ]
    first = [
        ("the model", BlockFormat.first(model, fmt.layout, block_tokens), False)
        for at, _, fmt in mine
        if at == 0
    ]
    named = [(f"tier {at} ({tier.kind})", fmt, tier.kind in _MEMORY) for at, tier, fmt in mine]
    agree(row for row in named if row[2])
    above = _memory_above(mine)
    named = [
        (name, above.get(at, fmt), memory)
        for (at, _, _), (name, fmt, memory) in zip(mine, named, strict=True)
    ]
    agree([*first, *((name, fmt, False) for name, fmt, _ in named[: len(first)])])
    agree(named)
    return above


def _memory_above(tiers: Sequence[tuple[int, Tier, BlockFormat]]) -> dict[int, BlockFormat]:
    """Return the format of the memory above each disk with a different format, by tier.

    Raises:
        ConfigError: the disk's format is not narrower.
    """
    found: dict[int, BlockFormat] = {}
    memory: tuple[str, BlockFormat] | None = None
    for at, tier, own in tiers:
        name = f"tier {at} ({tier.kind})"
        if tier.kind in _MEMORY:
            memory = name, own
        elif tier.kind == "disk" and memory is not None and memory[1] != own:
            require_narrower(*memory, name, own)
            found[at] = memory[1]
    return found


def _check_groups(tiers: Sequence[Tier], *, ranks: int, staging: int) -> None:
    """Raise on tiers, formats and settings unsupported with separate groups of layers.

    Raises:
        ConfigError: several ranks, staging, a first tier not native, or a disk or store in a
            different format than the tier above it.
    """
    if ranks > 1 or staging:
        raise ConfigError(
            f"ranks is {ranks} and staging {staging} blocks: groups of layers are kept apart for 1 "
            "rank without staging"
        )
    above = tiers[0]
    for at, tier in enumerate(tiers):
        stored = tier.kind in ("disk", "remote")
        odd = tier.layout if at == 0 else stored and tier.layout != above.layout
        if odd:
            raise ConfigError(
                f"tier {at} ({tier.kind}) has layout {tier.layout}: with groups of layers the "
                "first tier is native, and a disk or a store has the layout of the tier above, "
                f"{above.layout}"
            )
        above = tier


def _check_together(tiers: Sequence[Tier], room: Callable[[Tier], int]) -> None:
    """Raise if the tiers in the same memory, as on a CPU, exceed its size together.

    Raises:
        ConfigError: the tiers are too large.
    """
    kinds = _MEMORY if default_device().type == "cpu" else ("host",)
    rooms = {
        tier.kind: room(tier) for tier in tiers if tier.owner == "kvtrie" and tier.kind in kinds
    }
    if len(rooms) > 1:
        all_memory = all_of_device(torch.device("cpu"))
        check_exists(
            f"tiers {' and '.join(rooms)} together", sum(rooms.values()), all_memory, "the memory"
        )

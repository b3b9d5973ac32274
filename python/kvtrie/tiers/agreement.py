"""Tiers of one manager, compared with one another before any is opened: formats and rooms.

Invariant: a check that raises has opened nothing. Cost: arithmetic on their settings; the memory of
the machine is read once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtrie.errors import ConfigError
from kvtrie.settings.sizes import check_exists
from kvtrie.tiers.gpu import default_device
from kvtrie.tiers.narrowed import require_narrower
from kvtrie.tiers.pool import all_of_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtrie.settings.tier import Tier
    from kvtrie.tiers.block_format import BlockFormat

__all__ = ["MEMORY", "check_group_formats", "check_together", "memory_above"]

MEMORY = ("gpu", "host")
"""Kinds of tiers that are memory."""


def check_together(tiers: Sequence[Tier], room: Callable[[Tier], int]) -> None:
    """Refuse tiers in one memory, as those of a CPU, that are larger together than it.

    Raises:
        ConfigError: they are.
    """
    kinds = MEMORY if default_device().type == "cpu" else ("host",)
    rooms = {
        tier.kind: room(tier) for tier in tiers if tier.owner == "kvtrie" and tier.kind in kinds
    }
    if len(rooms) > 1:
        there = all_of_device(torch.device("cpu"))
        check_exists(
            f"tiers {' and '.join(rooms)} together", sum(rooms.values()), there, "the memory"
        )


def memory_above(tiers: Sequence[tuple[int, Tier, BlockFormat]]) -> dict[int, BlockFormat]:
    """Return the format of the memory above each disk that has another format, by tier.

    Raises:
        ConfigError: a format that is not narrower.
    """
    found: dict[int, BlockFormat] = {}
    memory: tuple[str, BlockFormat] | None = None
    for at, tier, own in tiers:
        name = f"tier {at} ({tier.kind})"
        if tier.kind in MEMORY:
            memory = name, own
        elif tier.kind == "disk" and memory is not None and memory[1] != own:
            require_narrower(*memory, name, own)
            found[at] = memory[1]
    return found


def check_group_formats(tiers: Sequence[Tier]) -> None:
    """Refuse formats that tiers of groups of layers cannot have.

    Raises:
        ConfigError: a first tier that is not native, or a disk in another format than the tier
            above it.
    """
    above = tiers[0]
    for at, tier in enumerate(tiers):
        odd = tier.layout if at == 0 else tier.kind == "disk" and tier.layout != above.layout
        if odd:
            raise ConfigError(
                f"tier {at} ({tier.kind}) has layout {tier.layout}: with groups of layers the "
                f"first tier is native, and a disk has the layout of the tier above, {above.layout}"
            )
        above = tier

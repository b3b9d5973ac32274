"""ResidentLayers: the resident layers of blocks on each tier, from the manager's events.

Invariant: a block is known while any of its layers is on a tier. Cost: a set of layers per block,
group and tier.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtrie import Event

__all__ = ["ResidentLayers"]


class ResidentLayers:
    """Layers by tier, group and key."""

    def __init__(self) -> None:
        self._layers: dict[tuple[int, int, bytes], set[int]] = {}
        self._places: Counter[bytes] = Counter()  # tiers and groups with any layer

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def note(self, event: Event, key: bytes) -> tuple[int, int]:
        """Apply an event of a block.

        Returns:
            The number of layers of the event's group on its tier, before the event and after it.
        """
        place = event.tier, event.group, key
        layers = self._layers.setdefault(place, set())
        before, named = len(layers), range(event.layer_lo, event.layer_hi)
        if event.kind == "stored":
            layers.update(named)
        else:
            layers.difference_update(named)
        if layers and not before:
            self._places[key] += 1
        if not layers:
            del self._layers[place]
            if before:
                self._places[key] -= 1
                if not self._places[key]:
                    del self._places[key]
        return before, len(layers)

"""Announced: blocks that outsiders were told stand on host or disk.

Invariant: a block is announced when all of its layers have come to a tier, once, and taken back
when any of them leaves; blocks in the GPU's memory are vLLM's to tell of. Cost: a dictionary entry
per block and tier, and a step per event of the manager.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvtrie import Event

__all__ = ["Announced", "Change"]


class Change(NamedTuple):
    """A block that came whole to a tier, or that is whole there no more.

    Attributes:
        stored: whether it came.
        tier: index of the tier.
        key: the block's content key.
        parent: that of the block before it; None for a first one.
        tokens: its tokens.
    """

    stored: bool
    tier: int
    key: bytes
    parent: bytes | None
    tokens: list[int]


class Announced:
    """The books of what was told.

    Args:
        layers: layers of a whole block.

    Attributes:
        missed: events that the manager overwrote before they were taken.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._there: dict[tuple[int, bytes], set[int]] = {}
        self._tiers: Counter[bytes] = Counter()  # that have something of a block, vLLM's too
        self._next = 0
        self.missed = 0

    def take(self, events: Iterable[Event]) -> Iterator[Change]:
        """What outsiders should hear of, in order.

        Args:
            events: events of residency, as the manager gave them.
        """
        for event in events:
            number, key, parent = event.number, event.key, event.parent
            if number is None or key is None or parent is None:
                continue
            self.missed += number - self._next
            self._next = number + 1
            before, after = self._note(event, key)
            if event.tier and (before == self._layers) != (after == self._layers):
                # A first block stands behind its scope, which no tier has.
                behind = parent if parent in self._tiers else None
                stored = after == self._layers
                yield Change(stored, event.tier, key, behind, list(event.tokens or ()))

    def clear(self) -> Iterator[Change]:
        """Take all back."""
        for (tier, key), layers in self._there.items():
            if tier and len(layers) == self._layers:
                yield Change(False, tier, key, None, [])  # noqa: FBT003 - a named tuple's field
        self._there, self._tiers = {}, Counter()

    def _note(self, event: Event, key: bytes) -> tuple[int, int]:
        """Layers of the event's block on the event's tier, before it and after it."""
        layers = self._there.setdefault((event.tier, key), set())
        before, named = len(layers), range(event.layer_lo, event.layer_hi)
        if event.kind == "stored":
            layers.update(named)
        else:
            layers.difference_update(named)
        if layers and not before:
            self._tiers[key] += 1
        if not layers:
            del self._there[event.tier, key]
            if before:
                self._tiers[key] -= 1
                if not self._tiers[key]:
                    del self._tiers[key]
        return before, len(layers)

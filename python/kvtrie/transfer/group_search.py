"""GroupSearch: the longest border that a shared store and the faster tiers resume together.

A store keeps a value per block and group of layers. Of the first group a border needs all blocks
before it, of windows the last ones, of a state one; which borders have them, only the store knows.
So after the leading blocks of the first group are found, the other groups are asked for what the
last borders need, then for those before them.
Invariant: a border counts only if each group has all that it needs, on a faster tier or in the
store; no value is asked for twice. Cost: a question per group for 64, 128, … 1024 borders, the last
ones first.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

from kvtrie.tiers.remote import Found

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie import BlockManager
    from kvtrie.tiers.remote.search import Answer

    Answers: TypeAlias = Callable[[int, NDArray[np.uint8], int], list[Answer]]

__all__ = ["GroupSearch"]

_FIRST_BATCH = 64  # borders of the first question; most prompts end soon after a known one
_MOST_BATCH = 1024


class GroupSearch:
    """A question about all groups of the blocks of one prompt.

    Args:
        manager: the manager, which has the rules of its groups.
        answers: returns what the store says of blocks of a group, each by itself, by a time of
            `monotonic_ns`; its arguments are the group, content keys and that time.
        keys: content keys `(blocks, 32)` of the prompt.
        parts: for each group the blocks that faster tiers have, from the first one on.

    Attributes:
        near: leading blocks of the first group that faster tiers have.
        local: the longest border that faster tiers resume alone.
        stored: leading blocks of the first group that faster tiers or the store have.
        border: the longest border that they resume together.
    """

    def __init__(
        self,
        manager: BlockManager,
        answers: Answers,
        keys: NDArray[np.uint8],
        parts: Sequence[Sequence[bool]],
    ) -> None:
        self._manager, self._answers, self._keys = manager, answers, keys
        first, *others = ([*part[: len(keys)]] for part in parts)
        rest = len(keys) - len(first)
        self._there = [other + [False] * rest for other in others]
        self._answered: list[dict[int, Answer]] = [{} for _ in others]
        self.near = next((at for at, has in enumerate(first) if not has), len(first))
        self.local = manager.longest_resume(self._there, self.near)
        self.stored = self.border = self.near

    def search(self, found: Found, until: int) -> Found:
        """Find the longest border, once the store has answered about the first group.

        Args:
            found: its answer about the blocks of the first group after `near`.
            until: nanoseconds of `monotonic_ns` after which nothing is asked.

        Returns:
            The answer about all groups: `blocks` are those before the border after `near`.
        """
        queried, refuted, late = found.queried, found.refuted, found.late
        top, size = self.near + found.blocks, _FIRST_BATCH
        self.stored, self.border = top, self.local
        while top > self.local:
            low = max(self.local, top - size)
            for group, places in enumerate(self._unknown(low, top), 1):
                if not places:
                    continue
                answers = self._answers(group, self._keys[places], until)
                self._answered[group - 1].update(zip(places, answers, strict=True))
                queried += len(places)
                refuted += answers.count("refuted")
                late += answers.count("late")
            border = self._manager.longest_resume(self._known(), top)
            if border > low:
                self.border = border
                break
            top, size = low, min(2 * size, _MOST_BATCH)
        return Found(max(0, self.border - self.near), queried, refuted, late)

    def needed(self) -> Iterator[tuple[int, int, int]]:
        """Group, first and last block plus 1 of the parts that the border needs of the store."""
        ranges = self._manager.resume_needs(self.border)
        for group, (leading, trailing) in enumerate(ranges, 1):
            there = self._there[group - 1]
            for first, end in (leading, trailing):
                places = (at for at in range(first, end) if not there[at])
                yield from ((group, *each) for each in _ranges(places))

    def lost(self) -> Iterator[tuple[int, int, int]]:
        """Group, first and last block plus 1 of the parts that the store does not have."""
        for group, answered in enumerate(self._answered, 1):
            places = (
                at for at, answer in sorted(answered.items()) if answer in {"missing", "refuted"}
            )
            yield from ((group, *each) for each in _ranges(places))

    def _unknown(self, low: int, top: int) -> list[list[int]]:
        """Of each group the unknown blocks that borders after `low` up to `top` need.

        Later borders need later blocks, and as many of the sinks or more.
        """
        first, last = self._manager.resume_needs(low + 1), self._manager.resume_needs(top)
        unknown: list[list[int]] = []
        for at, ((_, (start, _)), ((_, sinks), _)) in enumerate(zip(first, last, strict=True)):
            places = (*range(min(sinks, start)), *range(start, top))
            there, answered = self._there[at], self._answered[at]
            unknown.append(
                [place for place in places if not there[place] and place not in answered]
            )
        return unknown

    def _known(self) -> list[list[bool]]:
        """Of each group the blocks that faster tiers have, or the store."""
        known: list[list[bool]] = []
        for there, answered in zip(self._there, self._answered, strict=True):
            has = [*there]
            for place, answer in answered.items():
                has[place] = has[place] or answer == "ok"
            known.append(has)
        return known


def _ranges(places: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The consecutive ones of ascending places: the first, and the last plus 1."""
    for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0]):
        consecutive = [place for _, place in run]
        yield consecutive[0], consecutive[-1] + 1

"""GroupSearch: finds the longest resumable border over a shared store and the faster tiers.

A store keeps a value per block and group of layers. A border needs every previous block of the
first group, the last blocks of a sliding window and the last block of a state. Only the store knows
the borders with all these blocks. So once the leading blocks of the first group are found, the
search queries the blocks needed by the last borders, then by earlier borders.
Invariant: a border counts only if each group has all needed blocks on a faster tier or in the
store. No value is queried twice.
Cost: a query per group for 64, 128, … 1024 borders, last borders first.
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

_FIRST_BATCH = 64  # borders of the first query; most prompts end soon after a known border
_MOST_BATCH = 1024


class GroupSearch:
    """A search over all groups of the blocks of a prompt.

    Args:
        manager: the manager, with the rules of its groups.
        answers: returns the store's answer for each block of a group. Its arguments are the group,
            content keys and a deadline of `monotonic_ns`.
        keys: content keys `(blocks, 32)` of the prompt.
        parts: for each group the presence of the blocks on faster tiers, from the first block on.

    Attributes:
        local_blocks: leading blocks of the first group on faster tiers.
        local: the longest border resumable from faster tiers alone.
        stored: leading blocks of the first group on faster tiers or in the store.
        border: the longest border resumable from both together.
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
        self._resident = [other + [False] * rest for other in others]
        self._answered: list[dict[int, Answer]] = [{} for _ in others]
        self.local_blocks = next((at for at, has in enumerate(first) if not has), len(first))
        self.local = manager.longest_resume(self._resident, self.local_blocks)
        self.stored = self.border = self.local_blocks

    def search(self, found: Found, until: int) -> Found:
        """Find the longest border, after the store's answer for the first group.

        Args:
            found: the answer for the blocks of the first group after `local_blocks`.
            until: deadline of the last query, in nanoseconds of `monotonic_ns`.

        Returns:
            The answer for all groups: `blocks` counts the blocks between `local_blocks` and the
            border.
        """
        queried, refuted, late = found.queried, found.refuted, found.late
        top, size = self.local_blocks + found.blocks, _FIRST_BATCH
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
        return Found(max(0, self.border - self.local_blocks), queried, refuted, late)

    def needed(self) -> Iterator[tuple[int, int, int]]:
        """Yield group, first block and end block of the parts to load from the store."""
        ranges = self._manager.resume_needs(self.border)
        for group, (leading, trailing) in enumerate(ranges, 1):
            resident = self._resident[group - 1]
            for first, end in (leading, trailing):
                places = (at for at in range(first, end) if not resident[at])
                yield from ((group, *each) for each in _ranges(places))

    def lost(self) -> Iterator[tuple[int, int, int]]:
        """Yield group, first block and end block of the parts missing in the store."""
        for group, answered in enumerate(self._answered, 1):
            places = (
                at for at, answer in sorted(answered.items()) if answer in {"missing", "refuted"}
            )
            yield from ((group, *each) for each in _ranges(places))

    def _unknown(self, low: int, top: int) -> list[list[int]]:
        """Return per group the unknown blocks needed by borders after `low` up to `top`.

        Later borders need later blocks, and at least as many sinks.
        """
        first, last = self._manager.resume_needs(low + 1), self._manager.resume_needs(top)
        unknown: list[list[int]] = []
        for at, ((_, (start, _)), ((_, sinks), _)) in enumerate(zip(first, last, strict=True)):
            places = (*range(min(sinks, start)), *range(start, top))
            resident, answered = self._resident[at], self._answered[at]
            unknown.append(
                [place for place in places if not resident[place] and place not in answered]
            )
        return unknown

    def _known(self) -> list[list[bool]]:
        """Return per group the presence of the blocks on faster tiers or in the store."""
        known: list[list[bool]] = []
        for resident, answered in zip(self._resident, self._answered, strict=True):
            has = [*resident]
            for place, answer in answered.items():
                has[place] = has[place] or answer == "ok"
            known.append(has)
        return known


def _ranges(places: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first place and the end of each run of consecutive ascending places."""
    for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0]):
        consecutive = [place for _, place in run]
        yield consecutive[0], consecutive[-1] + 1

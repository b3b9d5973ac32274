"""UnverifiedBlocks: unverified blocks of an earlier server in host memory.

Only verified blocks are reported to vLLM. So the scheduler asks the workers to verify the checksums
of the blocks of a waiting request, and the request waits until every rank has answered.
Invariant: a slot is verified once all ranks have answered, or once it is rewritten. A slot found
damaged by any rank is a miss until it is rewritten.
Cost: nothing once all slots are verified. Before, a step per matched block in host memory, and 40
bytes per restored block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtrie.engines.vllm.restored import HOST

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from kvtrie import Index, MatchedBlock, Moves
    from kvtrie.engines.vllm.messages import Place

__all__ = ["UnverifiedBlocks"]


class UnverifiedBlocks:
    """Unverified slots of host memory, by group of layers.

    Args:
        index: the blocks found again by every rank in host memory.
        ranks: number of workers.

    Attributes:
        damaged: number of blocks found damaged.
    """

    def __init__(self, index: Index, ranks: int) -> None:
        slots, self._keys, groups = index.slot.astype(np.int64), index.key, index.group
        # By group, row of each slot in `_keys`, below 0 once the slot is verified.
        self._rows = [
            np.full(int(slots[groups == group].max(initial=-1)) + 1, -1, dtype=np.int64)
            for group in range(int(groups.max(initial=0)) + 1)
        ]
        for group, rows in enumerate(self._rows):
            rows[slots[groups == group]] = np.flatnonzero(groups == group)
        self._unverified = len(slots)
        self._asked: dict[Place, set[int]] = {}  # the ranks with an answer
        self._new: list[Place] = []
        self._bad: set[Place] = set()
        self._ranks = ranks
        self.damaged = 0

    def __bool__(self) -> bool:
        """Return whether any slot is unverified or damaged."""
        return bool(self._unverified or self._bad)

    @property
    def pending(self) -> bool:
        """Whether workers have unanswered questions."""
        return bool(self._asked)

    def usable(self, blocks: Sequence[MatchedBlock]) -> tuple[int, bool]:
        """Return the number of verified leading blocks, and whether more are being verified.

        Starts the verification of unverified copies in host memory.

        Args:
            blocks: blocks with their first group whole in host memory.
        """
        verified, waits = len(blocks), False
        for at, block in enumerate(blocks):
            for copy in block.copies:
                place = copy.group, copy.slot
                if copy.tier != HOST:
                    continue
                if place in self._bad:
                    return min(verified, at), waits
                if self._lacks(place):
                    verified, waits = min(verified, at), True
                    if place not in self._asked:
                        self._asked[place] = set()
                        self._new.append(place)
        return verified, waits

    def damaged_parts(self, blocks: Sequence[MatchedBlock]) -> list[tuple[int, int]]:
        """Return the handles and groups of damaged windows and states of blocks."""
        return [
            (block.block, copy.group)
            for block in blocks
            for copy in block.copies
            if copy.group and copy.tier == HOST and (copy.group, copy.slot) in self._bad
        ]

    def questions(self, stores: Iterable[Moves]) -> list[tuple[Place, bytes]]:
        """Return places and keys of the blocks to verify with the next step.

        Args:
            stores: the moves of this step. Slots written by them need no verification.
        """
        if self:
            for moves in stores:
                into: NDArray[np.bool_] = moves.dst == HOST
                groups, slots = moves.group[into].tolist(), moves.dst_slot[into].tolist()
                self._written(zip(groups, slots, strict=True))
        new, self._new = self._new, []
        return [
            (place, self._keys[self._rows[place[0]][place[1]]].tobytes())
            for place in new
            if self._lacks(place)
        ]

    def on_answers(self, rank: int, answers: Mapping[Place, bool]) -> None:
        """Record a rank's answers: by place, whether its block is valid."""
        for place, good in answers.items():
            if place not in self._asked:
                continue  # rewritten since
            self._asked[place].add(rank)
            if not good and place not in self._bad:
                self._bad.add(place)
                self.damaged += 1
            if len(self._asked[place]) == self._ranks:
                self._end_verification(place)

    def clear(self) -> None:
        """Forget all slots, after host memory was emptied."""
        self._unverified, self._asked, self._new, self._bad = 0, {}, [], set()
        for rows in self._rows:
            rows.fill(-1)

    def _written(self, places: Iterable[Place]) -> None:
        for place in places:
            self._bad.discard(place)
            if self._lacks(place):
                self._end_verification(place)

    def _lacks(self, place: Place) -> bool:
        group, slot = place
        rows = self._rows[group] if group < len(self._rows) else ()
        return slot < len(rows) and bool(rows[slot] >= 0)

    def _end_verification(self, place: Place) -> None:
        group, slot = place
        self._rows[group][slot] = -1
        self._unverified -= 1
        self._asked.pop(place, None)

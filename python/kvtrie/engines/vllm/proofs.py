"""Proofs: blocks in host memory that an earlier server left and that no worker has proved yet.

Only verified blocks are reported to vLLM. So the scheduler asks the workers for the checksums of
the blocks of a waiting request, and the request waits until every rank has answered.
Invariant: a slot counts as proved once all ranks have proved it, or once it is written again; a
slot that one rank found damaged is a miss until then.
Cost: nothing once all slots are proved; before that a step per matched block in host memory, and 40
bytes per block that was found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtrie.engines.vllm.restored import HOST

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtrie import Index, MatchedBlock, Moves

__all__ = ["Proofs"]


class Proofs:
    """Slots of host memory and the proofs that they lack.

    Args:
        index: the blocks that the manager found again in host memory.
        ranks: number of workers.

    Attributes:
        damaged: number of blocks that a rank found damaged.
    """

    def __init__(self, index: Index, ranks: int) -> None:
        slots, self._keys = index.slot.astype(np.int64), index.key
        # Row of each slot in `_keys`; below 0 once it is proved.
        self._row = np.full(int(slots.max(initial=-1)) + 1, -1, dtype=np.int64)
        self._row[slots] = np.arange(len(slots))
        self._unproved = len(slots)
        self._asked: dict[int, set[int]] = {}  # the ranks that have answered
        self._new: list[int] = []
        self._bad: set[int] = set()
        self._ranks = ranks
        self.damaged = 0

    def __bool__(self) -> bool:
        """Whether any slot is not proved."""
        return bool(self._unproved or self._bad)

    @property
    def pending(self) -> bool:
        """Whether workers are still to answer."""
        return bool(self._asked)

    def usable(self, blocks: Sequence[MatchedBlock]) -> tuple[int, bool]:
        """Return how many leading blocks are proved, and whether proofs of more are on their way.

        Args:
            blocks: blocks that are whole in host memory; those without a proof are asked for.
        """
        proved, waits = len(blocks), False
        for at, block in enumerate(blocks):
            slot = next(copy.slot for copy in block.copies if copy.tier == HOST)
            if slot in self._bad:
                return min(proved, at), waits
            if self._lacks(slot):
                proved, waits = min(proved, at), True
                if slot not in self._asked:
                    self._asked[slot] = set()
                    self._new.append(slot)
        return proved, waits

    def questions(self, stores: Iterable[Moves]) -> list[tuple[int, bytes]]:
        """Return slots and keys of the blocks that workers are to prove with the next step.

        Args:
            stores: the moves of that step; slots that they write need no proof.
        """
        if self:
            for moves in stores:
                self._written(moves.dst_slot[moves.dst == HOST].tolist())
        new, self._new = self._new, []
        return [(slot, self._keys[self._row[slot]].tobytes()) for slot in new if self._lacks(slot)]

    def on_answers(self, rank: int, answers: Mapping[int, bool]) -> None:
        """Take in which blocks a rank has proved."""
        for slot, good in answers.items():
            if slot not in self._asked:
                continue  # written again since
            self._asked[slot].add(rank)
            if not good and slot not in self._bad:
                self._bad.add(slot)
                self.damaged += 1
            if len(self._asked[slot]) == self._ranks:
                self._settle(slot)

    def clear(self) -> None:
        """Forget all slots, which are empty now."""
        self._unproved, self._asked, self._new, self._bad = 0, {}, [], set()
        self._row.fill(-1)

    def _written(self, slots: list[int]) -> None:
        for slot in slots:
            self._bad.discard(slot)
            if self._lacks(slot):
                self._settle(slot)

    def _lacks(self, slot: int) -> bool:
        return slot < len(self._row) and bool(self._row[slot] >= 0)

    def _settle(self, slot: int) -> None:
        self._row[slot] = -1
        self._unproved -= 1
        self._asked.pop(slot, None)

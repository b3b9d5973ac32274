"""PageSlots: the slots of groups of layers whose blocks hold fewer tokens than the manager's.

vLLM gives each group blocks of its own number of tokens, and promises hits in multiples of all of
them. That multiple is the manager's block, so a slot of such a group is several of vLLM's blocks,
here called pages:

```text
block of 64 tokens |        0        |        1        |
group 0, pages of 32 |  17  |   4    |   9   |   30    |   slot 1 = (17, 4), slot 2 = (9, 30)
group 1, pages of 64 |       5       |       12        |   slots 5 and 12
```

Invariant: a slot has one set of pages while a lease names it, and until the orders that read it are
made. Cost: a dictionary entry per slot of a running request.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtrie import Moves
    from kvtrie.engines.vllm.model import ServedGroup

__all__ = ["PageSlots", "Pages"]

Pages: TypeAlias = tuple[int, ...]
"""vLLM's blocks of a slot, in the order of their tokens; 0 for one that vLLM dropped."""


@dataclass(slots=True)
class _Names:
    """Slots of one group.

    Attributes:
        slots: the slots that leases name, by their pages.
        pages: the pages of every slot that was named.
        uses: of each slot, the leases that name it.
        free: slots that no lease names.
    """

    slots: dict[Pages, int] = field(default_factory=dict[Pages, int])
    pages: dict[int, Pages] = field(default_factory=dict[int, Pages])
    uses: Counter[int] = field(default_factory=Counter[int])
    free: list[int] = field(default_factory=list[int])


class PageSlots:
    """The manager's slots in vLLM's memory.

    Args:
        groups: the groups of the model's layers.
        blocks: blocks of vLLM's memory, which is also the number of slots.
    """

    def __init__(self, groups: Sequence[ServedGroup], blocks: int) -> None:
        self._wide = [1 if group.state else group.pages for group in groups]
        self._names = [_Names() for _ in groups]
        self._blocks = blocks

    def wide(self, group: int) -> int:
        """Pages of a slot of a group; states have one."""
        return self._wide[group]

    def name(self, group: int, pages: Sequence[int], partial: range | None = None) -> list[int]:
        """Return the slots that pages make up, until `end`.

        Args:
            group: the group.
            pages: the pages, whole slots.
            partial: indices of the slots in which the first pages may have been dropped.

        Returns:
            The slots; 0 for one with dropped pages, and where no slot is free.
        """
        wide = self._wide[group]
        if wide == 1:
            return list(pages)
        rows = zip(*[iter(pages)] * wide, strict=True)
        return [
            self._name(self._names[group], row)
            if all(row) or (row[-1] and partial is not None and at in partial)
            else 0
            for at, row in enumerate(rows)
        ]

    def _name(self, names: _Names, pages: Pages) -> int:
        slot = names.slots.get(pages)
        if slot is None:
            if not names.free and len(names.pages) + 1 >= self._blocks:
                return 0
            slot = names.free.pop() if names.free else len(names.pages) + 1
            names.slots[pages], names.pages[slot] = slot, pages
        names.uses[slot] += 1
        return slot

    def end(self, group: int, slots: Iterable[int]) -> None:
        """End a use of slots; their pages stay known until the slots are named again."""
        names = self._names[group]
        for slot in filter(None, slots) if self._wide[group] > 1 else ():
            names.uses[slot] -= 1
            if not names.uses[slot]:
                del names.uses[slot], names.slots[names.pages[slot]]
                names.free.append(slot)

    def of_moves(self, parts: Iterable[Moves]) -> dict[int, dict[int, Pages]]:
        """Return the pages of all slots of vLLM's memory that moves read or write, by group."""
        found: dict[int, dict[int, Pages]] = {}
        for moves in parts if max(self._wide) > 1 else ():
            slots = np.where(moves.src == 0, moves.src_slot, moves.dst_slot)
            inside = (moves.src == 0) | (moves.dst == 0)
            groups: list[int] = moves.group[inside].tolist()
            for group, slot in zip(groups, slots[inside].tolist(), strict=True):
                if self._wide[group] > 1:
                    found.setdefault(group, {})[slot] = self._names[group].pages[slot]
        return found

"""PageSlots: the slots of groups with smaller blocks in vLLM than in the manager.

In vLLM each group has its own block size in tokens, and hits are in common multiples of all sizes.
The manager's block has the least common multiple. So a slot of a group with smaller blocks is
several of vLLM's blocks, called pages here:

```text
block of 64 tokens |        0        |        1        |
group 0, pages of 32 |  17  |   4    |   9   |   30    |   slot 1 = (17, 4), slot 2 = (9, 30)
group 1, pages of 64 |       5       |       12        |   slots 5 and 12
```

Invariant: the pages of a slot are fixed while it is bound to a lease, and until the orders reading
it are built. Cost: a dictionary entry per slot of a running request.
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
"""vLLM's blocks of a slot, in the order of their tokens, 0 for a dropped block."""


@dataclass(slots=True)
class _Names:
    """Slots of a group.

    Attributes:
        slots: the slots bound to leases, by their pages.
        pages: the pages of every slot ever bound.
        uses: by slot, the number of leases it is bound to.
        free: slots bound to no lease.
    """

    slots: dict[Pages, int] = field(default_factory=dict[Pages, int])
    pages: dict[int, Pages] = field(default_factory=dict[int, Pages])
    uses: Counter[int] = field(default_factory=Counter[int])
    free: list[int] = field(default_factory=list[int])


class PageSlots:
    """The manager's slots in vLLM's memory.

    Args:
        groups: the groups of the model's layers.
        blocks: blocks of vLLM's memory, also the number of slots.
    """

    def __init__(self, groups: Sequence[ServedGroup], blocks: int) -> None:
        self._wide = [1 if group.state else group.pages for group in groups]
        self._names = [_Names() for _ in groups]
        self._blocks = blocks

    def wide(self, group: int) -> int:
        """Return the pages per slot of a group, 1 for states."""
        return self._wide[group]

    def name(self, group: int, pages: Sequence[int], partial: range | None = None) -> list[int]:
        """Return the slots of pages, in use until `end`.

        Args:
            group: the group.
            pages: the pages, whole slots.
            partial: indices of slots that may lack their first pages, dropped by vLLM.

        Returns:
            The slots, 0 for a slot with unexpectedly dropped pages or if no slot is free.
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
        """End a use of slots. Their pages stay known until the slots are reused."""
        names = self._names[group]
        for slot in filter(None, slots) if self._wide[group] > 1 else ():
            names.uses[slot] -= 1
            if not names.uses[slot]:
                del names.uses[slot], names.slots[names.pages[slot]]
                names.free.append(slot)

    def of_moves(self, parts: Iterable[Moves]) -> dict[int, dict[int, Pages]]:
        """Return the pages of all slots in vLLM's memory read or written by moves, by group."""
        found: dict[int, dict[int, Pages]] = {}
        for moves in parts if max(self._wide) > 1 else ():
            slots = np.where(moves.src == 0, moves.src_slot, moves.dst_slot)
            inside = (moves.src == 0) | (moves.dst == 0)
            groups: list[int] = moves.group[inside].tolist()
            for group, slot in zip(groups, slots[inside].tolist(), strict=True):
                if self._wide[group] > 1:
                    found.setdefault(group, {})[slot] = self._names[group].pages[slot]
        return found

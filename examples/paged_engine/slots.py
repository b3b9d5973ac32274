"""Slots: the engine's own memory of blocks, its holders and its contents.

kvtrie claims nothing here beyond a lease: what ended requests leave behind is ours to find again.
Invariant: a slot is free or has holders, each a request or a move; a named slot is held and its KV
is written, so any request that begins with the same tokens may hold it too.
Cost: O(1) per slot; names hash a whole prefix per block, where a real engine would chain hashes.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Slots:
    """`count` slots of `block_tokens` tokens."""

    def __init__(self, count: int, block_tokens: int) -> None:
        self._size = block_tokens
        self._free = list(range(count))
        self._holders: Counter[int] = Counter()
        self._named: dict[tuple[int, ...], int] = {}
        self._leaving: list[tuple[set[int], list[int]]] = []  # moves, and slots that they read

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def leaving(self) -> bool:
        """Whether some become free when moves have ended."""
        return bool(self._leaving)

    def take(self, count: int) -> list[int]:
        """Hold `count` free slots; the caller has checked that they exist."""
        return self.hold([self._free.pop() for _ in range(count)])

    def hold(self, slots: list[int]) -> list[int]:
        """Hold slots, others' too."""
        self._holders.update(slots)
        return slots

    def give(self, slots: list[int], reading: Iterable[int] = ()) -> None:
        """Hold slots no longer, once the moves that are still reading them have ended."""
        self._leaving.append((set(reading), slots))
        self.ended(())

    def ended(self, moves: Iterable[int]) -> None:
        """Apply ended moves: slots without a holder become free, and lose their names."""
        before, self._leaving = self._leaving, []
        for reading, slots in before:
            reading.difference_update(moves)
            if reading:
                self._leaving.append((reading, slots))
                continue
            self._holders.subtract(slots)
            gone = {slot for slot in slots if not self._holders[slot]}
            self._free += gone
            self._named = {name: slot for name, slot in self._named.items() if slot not in gone}

    def name(self, tokens: list[int], table: list[int]) -> None:
        """Say that the KV of these tokens is written in the slots of a table."""
        for block in range(len(tokens) // self._size):
            self._named.setdefault(tuple(tokens[: (block + 1) * self._size]), table[block])

    def find(self, tokens: list[int]) -> list[int]:
        """Return the slots of the leading full blocks stored here; at least one token is left."""
        found: list[int] = []
        for end in range(self._size, len(tokens), self._size):
            if (slot := self._named.get(tuple(tokens[:end]))) is None:
                break
            found.append(slot)
        return found

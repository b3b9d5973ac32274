"""ReplicatedRanks: the ranks of a machine that compute the same KV, stored once for all of them.

Latent KV is the same on every tensor-parallel rank. Ranks of one machine share one pool of host
memory as large as theirs together: each stores an equal part of the blocks and loads any, and the
first of them has the disk.
Invariant: all ranks of a group come to the same partition. Cost: two exchanges between the ranks,
at start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrie.engines.vllm.shared_memory import SharedMemory, machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["ReplicatedRanks"]


@dataclass(frozen=True, slots=True)
class ReplicatedRanks:
    """This rank's place among those of its machine.

    Attributes:
        place: how many of them come before it; the first one has the disk.
        first: the rank of the first one in the group.
        count: how many they are.
    """

    place: int = 0
    first: int = 0
    count: int = 1

    @classmethod
    def of(cls, rank: int, gather: Callable[[Any], list[Any]] | None) -> ReplicatedRanks:
        """The ranks on the machine of this one.

        Args:
            rank: this one's in its group.
            gather: the exchange within the group; None for a rank whose KV no other has.
        """
        if gather is None:
            return cls()
        machines = gather(machine())
        mine = [at for at, name in enumerate(machines) if name == machines[rank]]
        return cls(mine.index(rank), mine[0], len(mine))

    def share(self, size: int, gather: Callable[[Any], list[Any]]) -> SharedMemory:
        """Map `size` bytes of memory that all ranks share.

        Raises:
            ConfigError: the machine has no room for it, or they cannot open each other's memory.
        """
        made = SharedMemory.make(size) if self.place == 0 else None
        address = gather(None if made is None else made.address)[self.first]
        memory = SharedMemory.open(address) if made is None else made
        gather(None)  # the first one may close it now: everybody has it
        return memory

    def stores(self, slots: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Which slots of the shared pool this rank fills."""
        return slots % np.uint32(self.count) == self.place

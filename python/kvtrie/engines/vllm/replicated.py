"""ReplicatedRanks: the ranks of a machine with equal KV, stored once for all of them.

Latent KV is equal on all tensor-parallel ranks. The ranks of a machine share a pool of host memory
with the size of all their pools together. Each rank stores an equal part of the blocks and loads
any block. The first rank has the disk.
Invariant: all ranks of a group derive the same partition. Cost: two exchanges between the ranks,
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
    """The position of this rank among the ranks of its machine.

    Attributes:
        place: the local rank. Local rank 0 has the disk.
        first: the group rank of local rank 0.
        count: the number of local ranks.
    """

    place: int = 0
    first: int = 0
    count: int = 1

    @classmethod
    def of(cls, rank: int, gather: Callable[[Any], list[Any]] | None) -> ReplicatedRanks:
        """Find the ranks on this machine.

        Args:
            rank: the rank in its group.
            gather: the exchange within the group, or None for a rank with unique KV.
        """
        if gather is None:
            return cls()
        machines = gather(machine())
        mine = [at for at, name in enumerate(machines) if name == machines[rank]]
        return cls(mine.index(rank), mine[0], len(mine))

    def share(self, size: int, gather: Callable[[Any], list[Any]]) -> SharedMemory:
        """Map `size` bytes of memory shared by all local ranks.

        Raises:
            ConfigError: no room on the machine, or the ranks cannot open each other's memory.
        """
        made = SharedMemory.make(size) if self.place == 0 else None
        address = gather(None if made is None else made.address)[self.first]
        memory = SharedMemory.open(address) if made is None else made
        gather(None)  # local rank 0 may close it now: all ranks have opened it
        return memory

    def stores(self, slots: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return the mask of slots in the shared pool filled by this rank."""
        return slots % np.uint32(self.count) == self.place

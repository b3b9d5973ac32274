"""Flaky: files of the disk tier some of whose reads fail, as the soak wants it.

Invariant: the failures are counted and have a reason of ours, so no other failure passes for one.
Cost: one count per block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtrie.errors import TransferError
from kvtrie.tiers import DiskStorage

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["EVERY", "PLANNED", "Flaky"]

EVERY = 97
PLANNED = "a read that the soak makes fail"


class Flaky(DiskStorage):
    """Fails every `EVERY`th block that is read, with `PLANNED` as the reason.

    Attributes:
        reads: blocks that were asked for, or layers of them.
        planned: how many of these failed so.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.reads = self.planned = 0

    def read(self, key: bytes, slot: int, layers: tuple[int, int], memory: torch.Tensor) -> None:
        """Read, or fail."""
        if self._fails():
            raise TransferError(PLANNED)
        super().read(key, slot, layers, memory)

    def read_many(
        self, blocks: Sequence[tuple[bytes, int, tuple[int, int], torch.Tensor]]
    ) -> list[str | None]:
        """Read those that do not fail."""
        errors: list[str | None] = [PLANNED if self._fails() else None for _ in blocks]
        good = [at for at, why in enumerate(errors) if why is None]
        found = super().read_many([blocks[at] for at in good])
        for at, why in zip(good, found, strict=True):
            errors[at] = why
        return errors

    def _fails(self) -> bool:
        # Two workers may lose a count between them: nothing hangs on the exact place.
        self.reads += 1
        fails = self.reads % EVERY == 0
        self.planned += fails
        return fails

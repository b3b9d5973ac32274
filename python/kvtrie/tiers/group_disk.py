"""GroupDisk: the files of a `disk` tier for a model whose groups of layers are kept apart.

A folder has a store per group. A slot of a group is in the group's store, at its number, so the
stores are as long as if each had all pages; a page takes space only in the store of the group that
has cut it. A group that takes a page over frees what the other groups' stores have there.

```text
manager   | page 0: group 0 | page 1: group 1 | page 2: group 0
store 0   [ slots 0 to 4   ] .................[ slots 10 to 14 ]
store 1   ..................[ slot 1         ]..................    ....: no space taken
```

Invariant: blocks are found by their key and each is proved alone, so a damaged block of one group
is a miss of that block. A resume point whose parts are not all found is not a point again. Cost:
that of `DiskStorage`; one call per other group when a page goes from group to group.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from kvtrie import Index
from kvtrie.errors import ConfigError, TransferError
from kvtrie.model.group_pages import GroupPages
from kvtrie.tiers.block_format import BlockFormat
from kvtrie.tiers.disk import DiskStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    import torch

    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier

__all__ = ["GroupDisk", "GroupStore"]

_NOBODY = -1


class GroupStore:
    """The blocks of one group on a disk: a `Storage` that several threads call.

    Args:
        storage: the group's files.
        take: frees the pages of slots that other groups had.
    """

    def __init__(self, storage: DiskStorage, take: Callable[[Iterable[int]], None]) -> None:
        self.storage, self._take = storage, take

    def read(self, key: bytes, slot: int, layers: tuple[int, int], memory: torch.Tensor) -> None:
        """Read layers of a block; see `DiskStorage.read`."""
        self.storage.read(key, slot, layers, memory)

    def write(
        self, key: bytes, slot: int, layers: tuple[int, int], memory: torch.Tensor, label: bytes
    ) -> None:
        """Write layers of a block; see `DiskStorage.write`."""
        self._take([slot])
        self.storage.write(key, slot, layers, memory, label)

    def read_many(
        self, blocks: Sequence[tuple[bytes, int, tuple[int, int], torch.Tensor]]
    ) -> list[str | None]:
        """Read blocks; see `DiskStorage.read_many`."""
        return self.storage.read_many(blocks)

    def write_many(
        self, blocks: Sequence[tuple[bytes, int, tuple[int, int], torch.Tensor, bytes]]
    ) -> list[str | None]:
        """Write blocks; see `DiskStorage.write_many`."""
        self._take(slot for _, slot, *_ in blocks)
        return self.storage.write_many(blocks)


class GroupDisk:
    """The stores of all groups in one folder.

    Args:
        model: the shape whose KV is kept; its `fingerprint` may not be empty.
        tier: its path, budget, format and durability.
        block_tokens: tokens of a block.
        open_storage: opens the files of one group; `DiskStorage` by default.

    Attributes:
        groups: the blocks of each group.
        model: the shape whose KV is kept.
        block_tokens: tokens of a block.
        pages: the pages that all groups share.
        folder: the folder of all stores.

    Raises:
        ConfigError: a tier without a path or with layer slots, a budget that holds no page, and as
            of `DiskStorage`.
        TransferError: the folder cannot be read or made.
    """

    def __init__(
        self,
        model: ModelShape,
        tier: Tier,
        block_tokens: int,
        *,
        open_storage: Callable[..., DiskStorage] = DiskStorage,
    ) -> None:
        if tier.path is None or tier.layer_slots:
            raise ConfigError("a disk keeps a block's layers in one slot, in files at its path")
        self.model, self.block_tokens = model, block_tokens
        self.pages = GroupPages.of(model, tier, block_tokens)
        if not self.pages.count:
            raise ConfigError(
                f"tier 'disk' has {tier.bytes} bytes, of which {self.pages.bytes} are for blocks, "
                f"and a page takes {self.pages.page}"
            )
        self._lock = threading.Lock()
        self._owner = np.full(self.pages.count, _NOBODY, dtype=np.int16)
        formats = [
            BlockFormat.of_group(model, at, block_tokens, tier.layout)
            for at in range(len(model.groups))
        ]
        storages: list[DiskStorage] = []
        with ExitStack() as opened:
            for group, fmt in enumerate(formats):
                storage = open_storage(
                    tier.path,
                    model,
                    self.pages.count * self.pages.per_page[group],
                    block_tokens,
                    durability=tier.durability,
                    io=tier.io,
                    group=(group, fmt),
                )
                opened.callback(storage.close)
                storages.append(storage)
            opened.pop_all()
        self._storages = tuple(storages)
        self.groups = tuple(
            GroupStore(storage, self._taker(group)) for group, storage in enumerate(storages)
        )
        self.folder: Path = storages[0].folder

    def __repr__(self) -> str:
        return f"GroupDisk({len(self.groups)} groups, {self.folder})"

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.pages.count * self.pages.page

    @property
    def read_only(self) -> bool:
        """Whether nothing is written to one of the stores, and so to none."""
        return self.refusal is not None

    @property
    def logs_failures(self) -> bool:
        """As `DiskStorage.logs_failures`."""
        return self.read_only

    @property
    def refusal(self) -> str | None:
        """The reason why nothing is written; None if blocks are."""
        found = (storage.refusal for storage in self._storages)
        return next((why for why in found if why is not None), None)

    def recall(self) -> Index:
        """Return the index of the blocks that are here, those of the first group first."""
        index = Index()
        for storage in self._storages:
            index += storage.recall()
        return index

    def keep(self, index: Index) -> None:
        """Persist that exactly the blocks of `index` are here; a read-only disk does nothing."""
        for storage in self._storages:
            storage.keep(index)

    def note_uses(self, index: Index, wall: int | None = None) -> None:
        """Persist ages and uses of the blocks of `index`; see `DiskStorage.note_uses`."""
        for storage in self._storages:
            storage.note_uses(index, wall)

    def other_blocks(self) -> int:
        """Return the number of blocks of other models, or of other layouts, in the folder."""
        return self._storages[0].other_blocks()

    def close(self) -> None:
        """Give the folder back. Closing twice does nothing."""
        with ExitStack() as closing:
            for storage in self._storages:
                closing.callback(storage.close)

    def _taker(self, group: int) -> Callable[[Iterable[int]], None]:
        def take(slots: Iterable[int]) -> None:
            if (why := self.refusal) is not None:
                raise TransferError(f"{self.folder} is read-only: {why}")
            each = self.pages.per_page[group]
            with self._lock:
                for page in {slot // each for slot in slots}:
                    # A slot beyond the pages is refused by the store.
                    if page < len(self._owner) and self._owner[page] != group:
                        self._free(page, group)
                        self._owner[page] = group

        return take

    def _free(self, page: int, group: int) -> None:
        """Give the space back that groups other than one have in a page."""
        for other, storage in enumerate(self._storages):
            if other != group:
                each = self.pages.per_page[other]
                storage.store.clear(page * each, (page + 1) * each)

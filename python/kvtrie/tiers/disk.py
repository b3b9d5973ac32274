"""The storage of the `disk` tier: blocks in files of a folder, restored by later processes.

`docs/design/disk.md` describes the files. Every layer is verified on every read. A damaged,
truncated or foreign file is a miss with a logged reason and is removed.
Invariant: KV of a different model, layout, block size or rank is not found. Only one process writes
to a store, and a second process reads only and logs it. The folder is opened once and held, so a
change of the working directory does not affect it. If the folder is removed or replaced, a warning
is logged once and nothing more is written.
Cost: a read or write is a single call without the interpreter lock, without copies if memory and
layers are whole pages (the memory of a `Pool` starts on a page). GPU memory needs an additional
copy through the host. A disk in a narrower format than the memory above it converts each block in
the reading or writing thread.

A model with separate groups of layers has a store per group in the folder. A group's slot has the
same number in the group's store, so each store is as long as if it had all pages. A page uses space
only in the store of its group:

```text
manager   | page 0: group 0 | page 1: group 1 | page 2: group 0
store 0   [ slots 0 to 4   ] .................[ slots 10 to 14 ]
store 1   ..................[ slot 1         ]..................    ....: no space taken
```

Each block is verified separately, so a damaged block of a group is a miss of that block. A resume
point with a missing part is lost.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvtrie._kvtrie import DiskStore
from kvtrie.errors import ConfigError, TransferError
from kvtrie.model.shape import require_fingerprint
from kvtrie.settings.argument import folder as path_of
from kvtrie.settings.sizes import all_disk, check_exists
from kvtrie.tiers.block_files import BlockFiles
from kvtrie.tiers.group_slots import GroupSlots
from kvtrie.tiers.meaning import meaning, of_all_parts
from kvtrie.tiers.narrowed import Alike, Narrowed, require_narrower
from kvtrie.tiers.other_stores import count_others
from kvtrie.tiers.page_owners import PageOwners

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Literal, Self

    from kvtrie import Index
    from kvtrie.model.layout import Layout
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier
    from kvtrie.tiers.block_format import BlockFormat

__all__ = ["DiskStorage"]


class DiskStorage(BlockFiles):
    """The files of a `disk` tier.

    Args:
        folder: folder of the files, possibly shared by several models.
        model: the shape of the model. Its `fingerprint` distinguishes models of the same shape and
            must not be empty.
        blocks: number of slots, equal to the tier's blocks.
        block_tokens: tokens per block.
        layout: layout of a layer of a block in the files, or None for kvtrie's default.
        above: format of the memory exchanging blocks with the disk, if different.
        durability: the event survived by a finished write: "none" a clean close, "flush" the death
            of the process, "fsync" a power loss.
        io: "direct" bypasses the system's page cache if the file system allows it, or "buffered".
        queue: mechanism for concurrent operations: "best" uses the kernel's queue if available, or
            else "threads".
        rank: the tensor-parallel rank of this part of the KV.
        clock: the wall clock in nanoseconds, also for ages across processes.
        slots: the slots of a group of the model's layers, or None for all layers.
        owners: the owners of the pages shared with other groups.
        rest: the files of the groups after it.

    Attributes:
        block_format: format of the bytes passed to and from the storage.
        nbytes: bytes of the slots of all groups.
        store: the files.
        read_only: whether a second process writes to the store, the folder is not writable, or it
            was removed or replaced.

    `store.travel` has the I/O methods in use, and the reasons for deviations from the settings.

    A storage works only in the process of its creation: in a fork every call is a `ConfigError`.

    Raises:
        ConfigError: a model without a fingerprint, invalid numbers, memory above in a format not
            wider, or a store in two folders, as written by earlier versions.
        TransferError: the folder cannot be read or created.
    """

    def __init__(
        self,
        folder: str | Path,
        model: ModelShape,
        blocks: int,
        block_tokens: int,
        *,
        layout: Layout | None = None,
        above: BlockFormat | None = None,
        durability: Literal["none", "flush", "fsync"] = "flush",
        io: Literal["direct", "buffered"] = "direct",
        queue: Literal["best", "threads"] = "best",
        rank: int = 0,
        clock: Callable[[], int] = time.time_ns,
        slots: GroupSlots | None = None,
        owners: PageOwners | None = None,
        rest: Self | None = None,
    ) -> None:
        require_fingerprint(model, f"the disk folder {folder}")
        if rank < 0:
            raise ConfigError(f"rank is {rank}, at least 0 wanted")
        slots = slots or GroupSlots.of(model, blocks, block_tokens, layout)
        own, size = slots.block_format, slots.block_format.unit_bytes
        self.block_format = above or own
        way = Alike()
        if self.block_format != own:
            require_narrower("memory", self.block_format, f"the disk folder {folder}", own)
            way = Narrowed(self.block_format, own)
        about = meaning(model, own.layout, block_tokens, rank, slots.group)
        folder = path_of("the folder of a disk", folder)
        room = slots.blocks * own.layers * size
        check_exists(f"a disk tier in {folder}", room, all_disk(folder), "its file system")
        store = DiskStore(
            folder,
            identity=hashlib.blake2b(about.encode(), digest_size=32).digest(),
            about=about,
            layers=own.layers,
            layer_bytes=size,
            block_tokens=block_tokens,
            blocks=slots.blocks,
            durability=durability,
            io=io,
            queue=queue,
        )
        take = None if owners is None else owners.join(slots.number, store.clear)
        super().__init__(store, way, clock, take)
        self._group, self._rest, self.nbytes = slots.number, rest, slots.nbytes
        self._pid = os.getpid()

    @property
    def groups(self) -> tuple[Self, ...]:
        """The files of each group of layers, beginning with this storage for the first group."""
        return (self,) if self._rest is None else (self, *self._rest.groups)

    @property
    def read_only(self) -> bool:
        """Whether the storage currently refuses writes."""
        return self.refusal is not None

    @property
    def logs_failures(self) -> bool:
        """Whether the log already has the reason of failed writes: the storage refuses them."""
        return self.read_only

    @property
    def refusal(self) -> str | None:
        """The reason for refusing writes, or None if blocks are written."""
        return next((why for part in self.groups if (why := part.store.refusal) is not None), None)

    @property
    def folder(self) -> Path:
        """The parent folder of the store's folder."""
        return self.store.folder.parent

    @classmethod
    def of_tier(
        cls,
        model: ModelShape,
        tier: Tier,
        block_tokens: int,
        *,
        above: BlockFormat | None = None,
        rank: int = 0,
        ranks: int = 1,
        clock: Callable[[], int] = time.time_ns,
        separate_groups: bool = False,
    ) -> Self:
        """Open the files of a tier.

        Args:
            model: the shape of the model.
            tier: its path, its budget per rank, its layout and durability.
            block_tokens: tokens per block.
            above: format of the memory exchanging blocks with the disk, if different.
            rank: the tensor-parallel rank of this part of the KV. Ranks share a folder with a
                separate store each.
            ranks: number of ranks, as in the manager.
            clock: the wall clock in nanoseconds.
            separate_groups: whether the model's layer groups are separate.

        Raises:
            ConfigError: a tier without a path, or with layer slots, an invalid rank, or a budget
                smaller than a block or page.
        """
        if not 0 <= rank < ranks:
            raise ConfigError(f"rank is {rank}, 0 to {ranks - 1} wanted, for {ranks} ranks")
        if tier.path is None:
            raise ConfigError("a disk tier with files needs a path")
        if tier.layer_slots:
            raise ConfigError("a disk keeps a block's layers in one slot: layer_slots=False")
        groups = GroupSlots.of_tier(model, tier, block_tokens, separate_groups=separate_groups)
        owners = PageOwners(groups) if separate_groups else None
        parts: list[Self] = []
        with ExitStack() as opened:
            for slots in reversed(groups):
                part = cls(
                    tier.path,
                    model,
                    slots.blocks,
                    block_tokens,
                    above=above,
                    durability=tier.durability,
                    io=tier.io,
                    rank=rank,
                    clock=clock,
                    slots=slots,
                    owners=owners,
                    rest=parts[-1] if parts else None,
                )
                opened.callback(part.close)
                parts.append(part)
            opened.pop_all()
        return parts[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if os.getpid() == self._pid:  # a fork must not close the parent's files
            self.close()

    def recall(self) -> Index:
        """Return the index of the stored blocks with current ages, group after group."""
        index = self.store.index(self.wall(), group=self._group)
        self.log()
        return index if self._rest is None else index + self._rest.recall()

    def keep(self, index: Index) -> None:
        """Persist exactly the blocks of `index` as present. A read-only storage does nothing."""
        if not self.store.read_only:
            try:
                self.store.save(index, self.wall(), group=self._group)
                self.store.sync()
            except TransferError:
                self.report_loss()
                raise
        self.log()
        if self._rest is not None:
            self._rest.keep(index)

    def other_blocks(self) -> int:
        """Return the number of blocks in the folder with a different model or layout."""
        ours = of_all_parts(self.store.about)
        return count_others(self.store.folder.parent, lambda about: of_all_parts(about) == ours)

    def note_uses(self, index: Index, wall: int | None = None) -> None:
        """Persist ages and uses of the blocks of `index`, and leave all other blocks unchanged.

        After a kill the next process finds the last saved ages and uses. Blocks no longer in their
        slots are skipped. A read-only storage does nothing.

        Args:
            index: the blocks.
            wall: the value of `wall` at the time of the ages in `index`, or None for now.

        Raises:
            TransferError: the device failed. The blocks are still found.
        """
        wall = self.wall() if wall is None else wall
        try:
            if not self.store.read_only:
                self.store.note_uses(index, wall, group=self._group)
        except TransferError:
            # Without a folder nothing can be saved, as already logged once.
            if not self.report_loss():
                raise
        if self._rest is not None:
            self._rest.note_uses(index, wall)

    def close(self) -> None:
        """Close the files and release the folder. Closing twice does nothing."""
        try:
            self.store.close()
        finally:
            if self._rest is not None:
                self._rest.close()

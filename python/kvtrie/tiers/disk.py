"""The storage of the `disk` tier: blocks in the files of a folder, found again by later processes.

`docs/design/disk.md` describes the files. Every layer is verified on every read: a damaged, cut or
foreign file is a miss with a logged reason and is removed, never a hit.
Invariant: KV of another model, layout, block size or rank is not found. One process writes to a
store; the next one reads only, and says so. The folder is opened once and held: a change of the
working directory leads to no other files, and if the folder is removed or replaced, one warning
says so and nothing more is written.
Cost: a read or write is one call that leaves the interpreter to other threads and, where memory
and layers are whole pages (those of a `Pool` start on one), copies nothing; memory of a GPU goes
through the host, by one copy more. A disk in a narrower format than the memory above it converts
each block in the thread that reads or writes it.

A model whose groups of layers are kept apart has a store per group in the folder. A slot of a group
is in the group's store, at its number, so the stores are as long as if each had all pages; a page
takes space only in the store of the group that has cut it:

```text
manager   | page 0: group 0 | page 1: group 1 | page 2: group 0
store 0   [ slots 0 to 4   ] .................[ slots 10 to 14 ]
store 1   ..................[ slot 1         ]..................    ....: no space taken
```

Each block is proved alone, so a damaged block of one group is a miss of that block. A resume point
whose parts are not all found is not a point again.
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
        folder: where the files are; several models may share one, each finds its own.
        model: the shape whose KV is kept; its `fingerprint` distinguishes models of one shape and
            may not be empty.
        blocks: slots, as many as the tier has blocks.
        block_tokens: tokens per block.
        layout: layout of a layer of a block in the files; None is kvtrie's default.
        above: format of the memory that blocks are copied to and from, if it differs.
        durability: the event that a finished write survives: "none" a clean close, "flush" the
            death of the process, "fsync" the loss of power.
        io: "direct" past the system's page cache, where the file system allows it, or "buffered".
        queue: the way to keep several operations under way: "best" is the kernel's queue where it
            has one, or else "threads".
        rank: the tensor-parallel rank whose part of the KV this is.
        clock: the wall clock in nanoseconds; ages grow by it between two processes.
        slots: those of a group of the model's layers, if the store has only that group's; None has
            all layers.
        owners: the owners of the pages that the group shares with others.
        rest: the files of the groups after it.

    Attributes:
        block_format: format of the bytes that it is given and gives.
        nbytes: bytes of the slots of all groups.
        store: the files.
        read_only: whether another process writes here, the folder cannot be written, or it was
            removed or replaced since.

    How bytes travel, and why not as was asked for, is in `store.travel`.

    It belongs to the process that opened it: in a fork every call is a `ConfigError`.

    Raises:
        ConfigError: a model without a fingerprint, numbers that cannot be, memory above in a format
            that is not wider, a store in two folders, which earlier versions could write.
        TransferError: the folder cannot be read or made.
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
        """The files of each group of layers; those of the first group are this storage."""
        return (self,) if self._rest is None else (self, *self._rest.groups)

    @property
    def read_only(self) -> bool:
        """Whether nothing is written here, by now."""
        return self.refusal is not None

    @property
    def logs_failures(self) -> bool:
        """Whether the log has the reason of a failed write: nothing is written here."""
        return self.read_only

    @property
    def refusal(self) -> str | None:
        """The reason why nothing is written; None if blocks are."""
        return next((why for part in self.groups if (why := part.store.refusal) is not None), None)

    @property
    def folder(self) -> Path:
        """The folder that the store's own folder is in."""
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
        apart: bool = False,
    ) -> Self:
        """Open the files that a tier asks for.

        Args:
            model: the shape whose KV is kept.
            tier: its path, its budget, which is that of one rank, its layout and durability.
            block_tokens: tokens per block.
            above: format of the memory that blocks are copied to and from, if it differs.
            rank: the tensor-parallel rank whose part of the KV this is; ranks share a folder, and
                each has a separate store in it.
            ranks: how many there are, as the manager has it.
            clock: the wall clock in nanoseconds.
            apart: whether the groups of the model's layers are kept apart.

        Raises:
            ConfigError: a tier without a path, or with layer slots; a rank that is not there; a
                budget that holds no block or page.
        """
        if not 0 <= rank < ranks:
            raise ConfigError(f"rank is {rank}, 0 to {ranks - 1} wanted, for {ranks} ranks")
        if tier.path is None:
            raise ConfigError("a disk tier with files needs a path")
        if tier.layer_slots:
            raise ConfigError("a disk keeps a block's layers in one slot: layer_slots=False")
        groups = GroupSlots.of_tier(model, tier, block_tokens, apart=apart)
        owners = PageOwners(groups) if apart else None
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
        if os.getpid() == self._pid:  # a fork that leaves the block leaves what its parent has
            self.close()

    def recall(self) -> Index:
        """Return the index of the blocks that are here, with ages as of now; group after group."""
        index = self.store.index(self.wall(), group=self._group)
        self.log()
        return index if self._rest is None else index + self._rest.recall()

    def keep(self, index: Index) -> None:
        """Persist that exactly the blocks of `index` are here; a read-only storage does nothing."""
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
        """Return the number of blocks of other models, or of other layouts, in the folder."""
        ours = of_all_parts(self.store.about)
        return count_others(self.store.folder.parent, lambda about: of_all_parts(about) == ours)

    def note_uses(self, index: Index, wall: int | None = None) -> None:
        """Persist ages and uses of the blocks of `index`, and leave all others as they are.

        After a kill the next process finds the ages and uses noted last. A block that has left its
        slot is left out; a read-only storage does nothing.

        Args:
            index: the blocks.
            wall: what `wall` said when the ages were as `index` has them; None is now.

        Raises:
            TransferError: the device failed; the blocks are found all the same.
        """
        wall = self.wall() if wall is None else wall
        try:
            if not self.store.read_only:
                self.store.note_uses(index, wall, group=self._group)
        except TransferError:
            # Without a folder there is nothing to note, which one warning says.
            if not self.report_loss():
                raise
        if self._rest is not None:
            self._rest.note_uses(index, wall)

    def close(self) -> None:
        """Give the folder back. Closing twice does nothing."""
        try:
            self.store.close()
        finally:
            if self._rest is not None:
                self._rest.close()

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
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from kvtrie._kvtrie import DiskStore
from kvtrie.errors import ConfigError, TransferError
from kvtrie.model.shape import require_fingerprint
from kvtrie.settings.argument import folder as path_of
from kvtrie.settings.sizes import all_disk, check_exists
from kvtrie.tiers.block_format import BlockFormat
from kvtrie.tiers.narrowed import Narrowed, require_narrower
from kvtrie.tiers.other_stores import count_others

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Literal, Self

    from kvtrie import Index
    from kvtrie.model.layout import Layout
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier

__all__ = ["DiskStorage", "meaning"]

_LOG = logging.getLogger(__name__)
_UNDER_WAY = 32 << 20  # bytes that a call keeps under way, if its blocks are neither tiny nor huge


class DiskStorage:
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
        group: a group of the model's layers and the format of its blocks, if the store has only
            that group's; None has all layers.

    Attributes:
        block_format: format of the bytes that it is given and gives.
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
        group: tuple[int, BlockFormat] | None = None,
    ) -> None:
        require_fingerprint(model, f"the disk folder {folder}")
        if rank < 0:
            raise ConfigError(f"rank is {rank}, at least 0 wanted")
        self._group, own = group or (0, BlockFormat.of(model, layout, block_tokens))
        self.block_format = above or own
        self._narrowed: Narrowed | None = None
        if self.block_format != own:
            require_narrower("memory", self.block_format, f"the disk folder {folder}", own)
            self._narrowed = Narrowed(self.block_format, own)
        size = own.head_dim if own.layout.opaque == "state" else sum(own.planes())
        about = meaning(model, own.layout, block_tokens, rank, None if group is None else group[0])
        folder = path_of("the folder of a disk", folder)
        room = blocks * own.layers * size
        check_exists(f"a disk tier in {folder}", room, all_disk(folder), "its file system")
        self.store = DiskStore(
            folder,
            identity=hashlib.blake2b(about.encode(), digest_size=32).digest(),
            about=about,
            layers=own.layers,
            layer_bytes=size,
            block_tokens=block_tokens,
            blocks=blocks,
            durability=durability,
            io=io,
            queue=queue,
        )
        self._clock = clock
        self._pid = os.getpid()
        self._lost = self.read_only
        if self.read_only:
            _LOG.warning("%s: opened read-only: %s", self.store.folder, self.store.refusal)
        for reason in self.store.travel[2]:
            _LOG.info("%s: %s", self.store.folder, reason)
        self._log()

    @property
    def read_only(self) -> bool:
        """Whether nothing is written here, by now."""
        return self.store.read_only

    @property
    def logs_failures(self) -> bool:
        """Whether the log has the reason of a failed write: nothing is written here."""
        return self.read_only

    @property
    def refusal(self) -> str | None:
        """The reason why nothing is written; None if blocks are."""
        return self.store.refusal

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

        Raises:
            ConfigError: a tier without a path, or with layer slots; a rank that is not there.
        """
        if not 0 <= rank < ranks:
            raise ConfigError(f"rank is {rank}, 0 to {ranks - 1} wanted, for {ranks} ranks")
        if tier.path is None:
            raise ConfigError("a disk tier with files needs a path")
        if tier.layer_slots:
            raise ConfigError("a disk keeps a block's layers in one slot: layer_slots=False")
        return cls(
            tier.path,
            model,
            tier.room(model, block_tokens),
            block_tokens,
            layout=tier.layout,
            above=above,
            durability=tier.durability,
            io=tier.io,
            rank=rank,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if os.getpid() == self._pid:  # a fork that leaves the block leaves what its parent has
            self.close()

    def read(self, key: bytes, slot: int, layers: tuple[int, int], memory: torch.Tensor) -> None:
        """Read layers of a block into memory, and verify each of them.

        Args:
            key: the block's content key, 32 bytes.
            slot: its slot.
            layers: the first layer, and the last plus 1.
            memory: uint8 `(layers, bytes of one layer)`, on any device.

        Raises:
            TransferError: the block is not there, is damaged, or the device failed.
        """
        on_host = memory.device.type == "cpu"
        if self._narrowed is not None:
            host = self._narrowed.buffer(len(memory))
        else:
            host = memory if on_host else torch.empty_like(memory, device="cpu")
        try:
            self.store.read(key, slot, layers, host.numpy())
        except TransferError as error:
            # Not by `_log`: that waits for the device, which may be what hangs.
            _LOG.warning("%s: %s", self.store.folder, error)
            raise
        if self._narrowed is not None:
            self._narrowed.widen(host, memory)
        elif not on_host:
            memory.copy_(host)

    def write(
        self, key: bytes, slot: int, layers: tuple[int, int], memory: torch.Tensor, label: bytes
    ) -> None:
        """Write layers of a block at a slot: all of them, or none.

        Args:
            key: the block's content key, 32 bytes.
            slot: its slot.
            layers: the first layer, and the last plus 1.
            memory: uint8 `(layers, bytes of one layer)`, on any device.
            label: what `Moves.label` has for it, by which a later process finds the block.

        Raises:
            TransferError: the device failed or is full, or this storage is read-only.
        """
        host = memory.cpu() if self._narrowed is None else self._narrowed.narrow(memory)
        try:
            self.store.write(key, slot, layers, host.numpy(), label, self._clock())
        except TransferError:
            self._report_loss()
            raise

    def read_many(
        self, blocks: Sequence[tuple[bytes, int, tuple[int, int], torch.Tensor]]
    ) -> list[str | None]:
        """Read blocks as `read` does, given as its arguments, several of them at once.

        The memory is the host's. Returns for each block the reason of its failure, or None.
        """
        if not blocks:
            return []
        hosts = [memory for *_, memory in blocks]
        if self._narrowed is not None:
            hosts = [self._narrowed.buffer(len(memory)) for memory in hosts]
        rows = [
            (key, slot, layers, host.numpy())
            for (key, slot, layers, _), host in zip(blocks, hosts, strict=True)
        ]
        reasons = self.store.read_many(rows, depth=_depth(hosts))
        if self._narrowed is not None:
            for (*_, memory), host, why in zip(blocks, hosts, reasons, strict=True):
                if why is None:
                    self._narrowed.widen(host, memory)
        for why in filter(None, reasons):
            _LOG.warning("%s: %s", self.store.folder, why)
        return reasons

    def write_many(
        self, blocks: Sequence[tuple[bytes, int, tuple[int, int], torch.Tensor, bytes]]
    ) -> list[str | None]:
        """Write blocks as `write` does, given as its arguments, several of them at once.

        The memory is the host's. Returns for each block the reason of its failure, or None.
        """
        if not blocks:
            return []
        hosts = [memory for *_, memory, _ in blocks]
        if self._narrowed is not None:
            hosts = [self._narrowed.narrow(memory) for memory in hosts]
        rows = [
            (key, slot, layers, host.numpy(), label)
            for (key, slot, layers, _, label), host in zip(blocks, hosts, strict=True)
        ]
        reasons = self.store.write_many(rows, self._clock(), depth=_depth(hosts))
        if any(reasons):
            self._report_loss()
        return reasons

    def recall(self) -> Index:
        """Return the index of the blocks that are here, with ages as of now."""
        index = self.store.index(self._clock(), group=self._group)
        self._log()
        return index

    def keep(self, index: Index) -> None:
        """Persist that exactly the blocks of `index` are here; a read-only storage does nothing."""
        if not self.read_only:
            try:
                self.store.save(index, self._clock(), group=self._group)
                self.store.sync()
            except TransferError:
                self._report_loss()
                raise
        self._log()

    def other_blocks(self) -> int:
        """Return the number of blocks of other models, or of other layouts, in the folder."""
        ours = _of_all_parts(self.store.about)
        return count_others(self.store.folder.parent, lambda about: _of_all_parts(about) == ours)

    def wall(self) -> int:
        """Return the wall clock in nanoseconds."""
        return self._clock()

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
        if self.read_only:
            return
        try:
            wall = self._clock() if wall is None else wall
            self.store.note_uses(index, wall, group=self._group)
        except TransferError:
            # Without a folder there is nothing to note, which one warning says.
            if not self._report_loss():
                raise

    def close(self) -> None:
        """Give the folder back. Closing twice does nothing."""
        self.store.close()

    def _report_loss(self) -> bool:
        """Whether the folder was removed or replaced while open; the first time, log that."""
        if not self.read_only:
            return False
        if not self._lost:
            self._lost = True
            self._log()
        return True

    def _log(self) -> None:
        for reason in self.store.reasons():
            _LOG.warning("%s: %s", self.store.folder, reason)


def _depth(memory: Sequence[torch.Tensor]) -> int:
    """Number of blocks in flight, so that small ones keep a device as busy as large ones."""
    return min(64, max(4, _UNDER_WAY // max(one.nbytes for one in memory)))


def meaning(
    model: ModelShape, layout: Layout, block_tokens: int, rank: int, group: int | None = None
) -> str:
    """Return all that decides what the bytes mean, as JSON; equal texts are equal meanings."""
    fields: dict[str, Any] = asdict(model)
    names = ("layers", "kv_heads", "head_dim", "dtype", "v_head_dim", "latent", "fingerprint")
    about = {name: fields[name] for name in (*names, "tp")}
    if model.grouped:  # stores were named before groups counted
        about["groups"] = [group.identity() for group in model.groups]
    about |= {"block_tokens": block_tokens, "rank": rank, "layout": layout.digest().hex()}
    if group is not None:
        about["group"] = group
    return json.dumps(about, sort_keys=True)


def _of_all_parts(about: str) -> dict[str, Any] | str:
    """The meaning of a store without its rank and group; the text itself if no tier wrote it."""
    try:
        fields = json.loads(about)
    except ValueError:
        return about
    parts = {"rank"} if "group" not in fields else {"rank", "group", "layout"}
    return {name: value for name, value in fields.items() if name not in parts}

"""Memory and storage of tiers: one object per tier of a manager, in the manager's order.

```text
gpu, host, kept_tier --> kept --> pool --> conversion --> block_format      addressable memory
disk --> block_files, remote        storages: `read` and `write` of layers
group_slots, page_owners            slots of one group of layers, in pages that all groups share
keyed_disk --> kept_slots, key_label, key_order      blocks by the key of an engine
narrowed, native_parts, engine_pool --> conversion      tiers in fewer bits
agreement: all tiers of a manager have one form
```

A tier's bytes are either addressable memory (`Pool`: device or host) or reached by an interface
that moves layers to and from a pool's memory (`Storage`: a disk or a remote store).
Invariant: everything here obeys slot numbers that the manager chose and chooses none itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias, cast, runtime_checkable

from kvtrie.errors import ConfigError
from kvtrie.settings.resume import has_groups
from kvtrie.tiers.agreement import check_tiers
from kvtrie.tiers.block_format import BlockFormat, HasBlockFormat
from kvtrie.tiers.conversion import agree
from kvtrie.tiers.disk import DiskStorage
from kvtrie.tiers.engine_pool import EnginePool
from kvtrie.tiers.gpu import default_device, gpu_pool
from kvtrie.tiers.host import host_pool
from kvtrie.tiers.kept import KeptPool
from kvtrie.tiers.opened import close_pools, open_each
from kvtrie.tiers.pool import Pool
from kvtrie.tiers.remote.storage import RemoteStorage

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvtrie import Index
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.resume import ResumePoints
    from kvtrie.settings.tier import Tier

__all__ = [
    "Batched",
    "BlockFormat",
    "DiskStorage",
    "EnginePool",
    "HasBlockFormat",
    "KeptPool",
    "LogsFailures",
    "NotesUses",
    "PersistentStorage",
    "Pool",
    "Recalled",
    "Storage",
    "TierBytes",
    "agree",
    "close_pools",
    "default_device",
    "gpu_pool",
    "host_pool",
    "in_memory",
    "open_pools",
    "parts_of",
    "sole_pool",
]


@runtime_checkable
class Storage(Protocol):
    """A tier without memory that a kernel could read: disk, remote.

    `memory` is always a view into a pool, `(hi - lo, bytes of one layer)` of uint8:
    reads go into it, writes come out of it, and a storage drops it with the call. Calls come from
    several threads at once, never two at a time for one slot. An error is any exception; the
    move then counts as failed.
    """

    def read(self, key: bytes, slot: int, layers: tuple[int, int], memory: torch.Tensor) -> None:
        """Read layers of a block into memory.

        Args:
            key: the block's content key, 32 bytes.
            slot: its slot.
            layers: the first layer, and the last plus 1.
            memory: uint8 `(layers, bytes of one layer)`.
        """
        ...

    def write(
        self, key: bytes, slot: int, layers: tuple[int, int], memory: torch.Tensor, label: bytes
    ) -> None:
        """Write layers of a block at a slot.

        Args:
            key: the block's content key, 32 bytes.
            slot: its slot.
            layers: the first layer, and the last plus 1.
            memory: uint8 `(layers, bytes of one layer)`.
            label: what a later manager needs to find the block again; a storage that outlives the
                process keeps it with the block, another one may ignore it.
        """
        ...


@runtime_checkable
class LogsFailures(Protocol):
    """A storage that may log its failed writes itself; of any other the `Runner` logs them."""

    @property
    def logs_failures(self) -> bool:
        """Whether it logs them now."""
        ...


TierBytes: TypeAlias = Pool | Storage
"""The bytes of a tier: memory or storage. `parts_of` has the part of each group of layers."""


def parts_of(tier: TierBytes | None) -> tuple[Pool | Storage, ...]:
    """Return the pool or storage of each group of layers of a tier; none where it has no bytes."""
    own = () if tier is None else (tier,)
    return cast("tuple[Pool | Storage, ...]", getattr(tier, "groups", own))


def in_memory(tier: TierBytes | None) -> bool:
    """Whether the bytes of a tier are addressable memory, of a device or the host."""
    return any(isinstance(part, Pool) for part in parts_of(tier))


def sole_pool(tier: TierBytes | None, use: str) -> Pool:
    """Return the memory of a first tier whose layers are one group.

    Args:
        tier: the tier.
        use: what the memory is wanted for, as "to load into".

    Raises:
        ConfigError: no memory, or groups of layers that are kept apart.
    """
    pool, *others = parts_of(tier)
    if not isinstance(pool, Pool) or others:
        apart = f": its {len(others) + 1} groups of layers are kept apart" if others else ""
        raise ConfigError(f"the first tier has no memory {use}{apart}")
    return pool


@runtime_checkable
class Batched(Storage, Protocol):
    """A storage that keeps several blocks under way in one call, in memory of the host.

    For each block they return the reason of its failure, or None.
    """

    def read_many(
        self, blocks: Sequence[tuple[bytes, int, tuple[int, int], torch.Tensor]]
    ) -> list[str | None]:
        """Read blocks as `read` does, given as its arguments."""
        ...

    def write_many(
        self, blocks: Sequence[tuple[bytes, int, tuple[int, int], torch.Tensor, bytes]]
    ) -> list[str | None]:
        """Write blocks as `write` does, given as its arguments."""
        ...


@runtime_checkable
class Recalled(Protocol):
    """A pool or storage whose blocks are found again by a later process."""

    def recall(self) -> Index:
        """Return the index of the blocks that are still there, for `BlockManager.load_index`."""
        ...

    def keep(self, index: Index) -> None:
        """Persist the blocks of `index`, with their ages and uses."""
        ...


@runtime_checkable
class PersistentStorage(Storage, Recalled, Protocol):
    """A storage whose blocks are found again by a later process."""

    def keep(self, index: Index) -> None:
        """Persist that exactly the blocks of `index` are here, with their ages and uses."""
        ...


@runtime_checkable
class NotesUses(Recalled, Protocol):
    """One that also takes ages and uses while the process runs, which may be killed."""

    def note_uses(self, index: Index) -> None:
        """Persist ages and uses of the blocks of `index`, and leave all others as they are."""
        ...


def open_pools(
    model: ModelShape,
    tiers: Sequence[Tier],
    block_tokens: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    staging: int = 0,
    resume: ResumePoints | None = None,
) -> tuple[TierBytes | None, ...]:
    """Open the pools and storages of tiers.

    Memory for `gpu` and `host`, files for a `disk` with a path, a shared store for a `remote` with
    a URL as its path.

    Args:
        model: the shape whose KV is kept.
        tiers: the manager's tiers, in its order.
        block_tokens: tokens per block, as the manager has it.
        rank: the tensor-parallel rank whose part of the KV this is: several may have one path.
        ranks: how many there are, as the manager has it.
        staging: blocks of host memory beyond the tier's budget, in which a `LayerwiseEngine` keeps
            what running passes compute; as many as one batch fills.
        resume: as the manager has it; then several groups of the model's layers are kept apart.

    Returns:
        One entry per tier, None if an engine owns the bytes, there are none, or they are elsewhere:
        the `pools` of `Executor`, once the user's storages are filled in.

    Raises:
        ConfigError: a tier of a kind that has no memory and is not `disk` or `remote`, tiers whose
            layouts differ, a format that KV cannot be converted to, a disk in a format that is not
            narrower than that of the memory above it, more memory than there is, by one tier or
            together, a rank that is not there, or `keep` for the first tier. With `resume`:
            several ranks, or staging. Nothing is opened then.
    """
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank is {rank}, 0 to {ranks - 1} wanted, for {ranks} ranks")
    apart = has_groups(model, resume)
    above = check_tiers(model, tiers, block_tokens, ranks=ranks, staging=staging, apart=apart)

    def open_tier(at: int, tier: Tier) -> TierBytes | None:
        return _open_tier(
            model,
            tier,
            block_tokens,
            above=above.get(at),
            staging=staging,
            rank=rank,
            ranks=ranks,
            apart=apart,
        )

    return open_each(tiers, open_tier)


def _open_tier(
    model: ModelShape,
    tier: Tier,
    block_tokens: int,
    *,
    above: BlockFormat | None,
    staging: int,
    rank: int,
    ranks: int,
    apart: bool,
) -> TierBytes | None:
    if tier.owner != "kvtrie" or (tier.kind in ("disk", "remote") and tier.path is None):
        return None
    if tier.kind == "disk":
        return DiskStorage.of_tier(
            model, tier, block_tokens, above=above, rank=rank, ranks=ranks, apart=apart
        )
    if tier.kind == "remote":
        return RemoteStorage.of_tier(model, tier, block_tokens, rank=rank, ranks=ranks, apart=apart)
    if tier.kind == "gpu":
        return gpu_pool(model, tier, block_tokens, apart=apart)
    if tier.kind == "host":
        return host_pool(
            model, tier, block_tokens, spare=staging, rank=rank, ranks=ranks, apart=apart
        )
    raise ConfigError(f"tier kind {tier.kind!r} has no pool: gpu, host, disk or remote")

"""Memory and storage of tiers: an object per tier of a manager, in the manager's order.

```text
gpu, host, kept_tier --> kept --> pool --> conversion --> block_format      addressable memory
disk --> block_files, remote        storages: `read` and `write` of layers
group_slots, page_owners            slots of a group of layers, in pages shared by all groups
keyed_disk --> kept_slots, key_label, key_order      blocks by the key of an engine
narrowed, native_parts, engine_pool --> conversion      tiers in fewer bits
agreement: compatible formats of all tiers of a manager
```

A tier's bytes are either addressable memory (`Pool`: device or host) or reached through an
interface that copies layers to and from a pool's memory (`Storage`: a disk or a remote store).
Invariant: the manager chooses all slot numbers. This package only uses them.
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
    """A tier without addressable memory: disk or remote.

    `memory` is always a view into a pool, `(hi - lo, bytes of one layer)` of uint8. Reads fill it,
    writes read it, and no reference may outlive the call. Several threads may call at once, but
    never two for the same slot. Any exception fails the move.
    """

    def read(self, key: bytes, slot: int, layers: tuple[int, int], memory: torch.Tensor) -> None:
        """Read layers of a block into memory.

        Args:
            key: the block's content key, 32 bytes.
            slot: its slot.
            layers: the first layer, and the end of the range.
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
            layers: the first layer, and the end of the range.
            memory: uint8 `(layers, bytes of one layer)`.
            label: data for a later manager to find the block again. A persistent storage keeps it
                with the block, and any other storage may ignore it.
        """
        ...


@runtime_checkable
class LogsFailures(Protocol):
    """A storage able to log its failed writes itself. Otherwise the `Runner` logs them."""

    @property
    def logs_failures(self) -> bool:
        """Whether the storage logs its failed writes now."""
        ...


TierBytes: TypeAlias = Pool | Storage
"""The bytes of a tier: memory or storage. `parts_of` returns the part of each layer group."""


def parts_of(tier: TierBytes | None) -> tuple[Pool | Storage, ...]:
    """Return the pool or storage of each layer group of a tier, empty if it has no bytes."""
    own = () if tier is None else (tier,)
    return cast("tuple[Pool | Storage, ...]", getattr(tier, "groups", own))


def in_memory(tier: TierBytes | None) -> bool:
    """Return whether the bytes of a tier are addressable device or host memory."""
    return any(isinstance(part, Pool) for part in parts_of(tier))


def sole_pool(tier: TierBytes | None, use: str) -> Pool:
    """Return the memory of a first tier with a single group of layers.

    Args:
        tier: the tier.
        use: purpose of the memory for the error text, as "to load into".

    Raises:
        ConfigError: the tier has no memory, or separate groups of layers.
    """
    pool, *others = parts_of(tier)
    if not isinstance(pool, Pool) or others:
        separate = f": its {len(others) + 1} groups of layers are kept apart" if others else ""
        raise ConfigError(f"the first tier has no memory {use}{separate}")
    return pool


@runtime_checkable
class Batched(Storage, Protocol):
    """A storage for several blocks per call, with the memory on the host.

    Both methods return the reason of each block's failure, or None.
    """

    def read_many(
        self, blocks: Sequence[tuple[bytes, int, tuple[int, int], torch.Tensor]]
    ) -> list[str | None]:
        """Read blocks, each given as the arguments of `read`."""
        ...

    def write_many(
        self, blocks: Sequence[tuple[bytes, int, tuple[int, int], torch.Tensor, bytes]]
    ) -> list[str | None]:
        """Write blocks, each given as the arguments of `write`."""
        ...


@runtime_checkable
class Recalled(Protocol):
    """A pool or storage with blocks restorable by a later process."""

    def recall(self) -> Index:
        """Return the index of the remaining blocks, for `BlockManager.load_index`."""
        ...

    def keep(self, index: Index) -> None:
        """Persist the blocks of `index`, with their ages and uses."""
        ...


@runtime_checkable
class PersistentStorage(Storage, Recalled, Protocol):
    """A storage with blocks restorable by a later process."""

    def keep(self, index: Index) -> None:
        """Persist exactly the blocks of `index` as present, with their ages and uses."""
        ...


@runtime_checkable
class NotesUses(Recalled, Protocol):
    """A persistent tier that saves ages and uses during the run, so a kill does not lose them."""

    def note_uses(self, index: Index) -> None:
        """Persist ages and uses of the blocks of `index`, and leave all other blocks unchanged."""
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

    A `gpu` or `host` tier gets memory, a `disk` with a path gets files, and a `remote` with a URL
    as path gets a shared store.

    Args:
        model: the shape of the model.
        tiers: the manager's tiers, in its order.
        block_tokens: tokens per block, as in the manager.
        rank: the tensor-parallel rank of this part of the KV. Several ranks may share a path.
        ranks: number of ranks, as in the manager.
        staging: blocks of host memory beyond the tier's budget, for the stores of a
            `LayerwiseEngine`: as many blocks as a batch fills.
        resume: as in the manager, for separate groups of the model's layers.

    Returns:
        An entry per tier, or None if an engine owns the bytes or they are absent or elsewhere.
        These are the `pools` of `Executor`, after filling in the user's storages.

    Raises:
        ConfigError: a tier kind without memory other than `disk` or `remote`, tiers with different
            layouts, a format without conversion, a disk in a format not narrower than the memory
            above it, more memory than available for a tier or all tiers together, an invalid rank,
            or `keep` for the first tier. With `resume`: several ranks, or staging. Then nothing is
            opened.
    """
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank is {rank}, 0 to {ranks - 1} wanted, for {ranks} ranks")
    separate_groups = has_groups(model, resume)
    above = check_tiers(
        model,
        tiers,
        block_tokens,
        ranks=ranks,
        staging=staging,
        separate_groups=separate_groups,
    )

    def open_tier(at: int, tier: Tier) -> TierBytes | None:
        return _open_tier(
            model,
            tier,
            block_tokens,
            above=above.get(at),
            staging=staging,
            rank=rank,
            ranks=ranks,
            separate_groups=separate_groups,
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
    separate_groups: bool,
) -> TierBytes | None:
    if tier.owner != "kvtrie" or (tier.kind in ("disk", "remote") and tier.path is None):
        return None
    if tier.kind == "disk":
        return DiskStorage.of_tier(
            model,
            tier,
            block_tokens,
            above=above,
            rank=rank,
            ranks=ranks,
            separate_groups=separate_groups,
        )
    if tier.kind == "remote":
        return RemoteStorage.of_tier(
            model, tier, block_tokens, rank=rank, ranks=ranks, separate_groups=separate_groups
        )
    if tier.kind == "gpu":
        return gpu_pool(model, tier, block_tokens, separate_groups=separate_groups)
    if tier.kind == "host":
        return host_pool(
            model,
            tier,
            block_tokens,
            spare=staging,
            rank=rank,
            ranks=ranks,
            separate_groups=separate_groups,
        )
    raise ConfigError(f"tier kind {tier.kind!r} has no pool: gpu, host, disk or remote")

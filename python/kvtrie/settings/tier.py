"""Tier and Lane: places of bytes on a machine, and the speed of transfers between them.

Invariant: a tier's room is given once, in blocks or in bytes. Cost: read once when a manager is
made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from kvtrie._kvtrie import DiskStore
from kvtrie.errors import ConfigError
from kvtrie.model.group_layout import group_bytes
from kvtrie.model.layout import Layout
from kvtrie.settings.argument import (
    flag,
    folder,
    instance,
    put,
    real,
    shown,
    text,
    url,
    whole,
    word,
)
from kvtrie.settings.sizes import forgotten, free_disk, free_memory, is_share, size

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrie.model.shape import ModelShape

__all__ = ["DEFAULT_POLICY", "Lane", "Tier"]

DEFAULT_POLICY = "learned"
"""The policy of every entry point without a named policy, as of `BlockManager`."""

# Bytes per second and latency in nanoseconds, the same up and down.
_SPEED = {
    "gpu": (2e12, 0),
    "host": (12e9, 10_000),
    "disk": (2e9, 100_000),
    "remote": (1e9, 1_000_000),
}
_MOST_BLOCKS = 2**32 - 2
_WORKERS = {"disk": 2, "remote": 4}
_MOST_WORKERS = 1024
_MOST_TRUST = 1e9  # seconds


@dataclass(frozen=True, slots=True)
class Lane:
    """A first-in-first-out queue of bandwidth.

    Attributes:
        name: its name, for `transmit` and in statistics.
        bytes_per_s: bandwidth in bytes per second, at least 1.
        latency_ns: nanoseconds of each transmission in addition to its bytes.
        shares: name of its queue. Lanes of the same queue wait for each other. None is a separate
            queue with the lane's name.

    Raises:
        ConfigError: an empty name or an invalid number.
    """

    name: str
    bytes_per_s: float
    latency_ns: int = 0
    shares: str | None = None

    def __post_init__(self) -> None:
        name = text("name of a lane", self.name)
        shares = None if self.shares is None else text("shares of a lane", self.shares)
        if not name or shares == "":
            raise ConfigError(f"a lane and its queue need names: {name!r}, {shares!r}")
        speed = real(f"bytes_per_s of lane {name!r}", self.bytes_per_s, 1, 2**62)
        latency = whole(f"latency_ns of lane {name!r}", self.latency_ns, 0, 2**63 - 1)
        put(self, bytes_per_s=speed, latency_ns=latency)


@dataclass(frozen=True, slots=True)
class Tier:
    """A storage level of a machine, with its budget.

    Pools, storages and executors read `path`, `io_budget`, `layout`, `durability`, `io` and
    everything after it. The manager reads from these only whether bytes outlive it.

    Attributes:
        kind: "gpu", "host", "disk" or "remote".
        blocks: room in blocks. Give either this or `bytes`.
        bytes: room in bytes, rounded down to whole blocks. Also as "8GB" (10^9), "512MiB" (2^20),
            or "25%" of the free bytes when the tier is made: of host memory, or of the disk
            together with the contents of `path`. It is an int afterwards.
        path: the folder of a disk tier's files, or the URL of a remote tier's store. None if the
            caller has its own storage.
        owner: allocator of the slots: "kvtrie". "engine" for a first tier with slots allocated by
            the engine and bound by `Lease.bind`. "none" if there are no bytes.
        write: when blocks are copied to the next tier: "back" when they are evicted or ahead of
            need, "through" as soon as they are there, "never".
        admit_after: for operators: uses before a block is worth a copy to the next tier.
        free_low: for operators: below this share of free or clean slots, or of pages if groups of
            layers are kept apart, blocks are written down ahead of need. 0 means 0.25 above a
            remote tier, since no victim is written to it.
        growth_reserve: for operators: share kept free by `acquire` for running decodes.
        retained_share: for operators: maximum share of the blocks retained by hints, see
            `kvtrie.settings.hint`.
        io_budget: for operators: maximum bytes per second of background copies. None does not limit
            them.
        read: the lane that loads blocks from here. None takes the kind's default: 2 TB/s
            for gpu, 12 GB/s and 10 us for host, 2 GB/s and 100 us for disk, 1 GB/s and 1 ms
            for remote.
        store: the lane that stores blocks here. None as for `read`.
        layer_slots: a slot per layer of a block instead of a slot per block, for evicting single
            layers.
        policy: this tier's policy. None takes the manager's.
        layout: the layout and number format of its bytes. Below the first tier the format may
            differ from the model's, and a block takes fewer bytes. None takes kvtrie's own.
        durability: the event survived by a block on disk: "none" a clean close, "flush" the death
            of the process, "fsync" the loss of power.
        io: "direct" moves a disk's bytes between device and memory without the system's page
            cache, if the file system allows it. "buffered" uses the cache.
        workers: for operators: threads of the storage of a disk or remote tier, never awaited by
            the remaining tiers. None is 2 for disk and 4 for remote.
        write_limit: for operators: maximum bytes of writes in flight to a remote tier, at least a
            block. None is an eighth of host memory.
        trust_s: for operators: seconds for which a found remote block is used without another
            lookup. None is 60.
        lookup: "all" asks the remote store for blocks of other processes. "local" uses only blocks
            written or read by this process. None is "all".
        secret_file: a file with the secret for keying a remote store's names and checksums.
        keep: path of a file in a memory file system (`/dev/shm`, a tmpfs, hugetlbfs) as the memory
            of a host tier: the next process finds the blocks. None keeps nothing.
        keep_replace: whether a file of another model, layout or version at `keep` is overwritten.

    Raises:
        ConfigError: no room or room stated twice, an unknown word, an invalid number.
    """

    kind: Literal["gpu", "host", "disk", "remote"]
    blocks: int | None = None
    bytes: int | str | None = None
    path: str | None = None
    owner: Literal["kvtrie", "engine", "none"] = "kvtrie"
    write: Literal["back", "through", "never"] = "back"
    admit_after: int = 1
    free_low: float = 0.0
    growth_reserve: float = 0.0
    retained_share: float = 0.5
    io_budget: int | str | None = None
    read: Lane | None = None
    store: Lane | None = None
    layer_slots: bool = False
    policy: str | None = None
    layout: Layout | None = None
    durability: Literal["none", "flush", "fsync"] = "flush"
    io: Literal["direct", "buffered"] = "direct"
    workers: int | None = None
    write_limit: int | str | None = None
    trust_s: float | None = None
    lookup: Literal["all", "local"] | None = None
    secret_file: str | None = None
    keep: str | None = None
    keep_replace: bool = False

    def __post_init__(self) -> None:
        words = {
            "kind": (self.kind, tuple(_SPEED)),
            "owner": (self.owner, ("kvtrie", "engine", "none")),
            "write": (self.write, ("back", "through", "never")),
            "durability": (self.durability, ("none", "flush", "fsync")),
            "io": (self.io, ("direct", "buffered")),
        }
        for name, (value, allowed) in words.items():
            word(f"{name} of a tier", value, allowed)
        if self.path is not None:
            what = f"path of tier {self.kind!r}"
            local = self.kind != "remote"
            given: Any = self.path
            named = given if isinstance(given, str) else ""
            if local and named.lower().startswith("folder:"):
                raise ConfigError(f"{what} is {shown(self.path)}: folder: is for tier 'remote'")
            put(self, path=folder(what, self.path) if local else url(what, self.path))
        self._check_storage()
        if self.keep is not None:
            put(self, keep=folder(f"keep of tier {self.kind!r}", self.keep))
        put(self, keep_replace=flag(f"keep_replace of tier {self.kind!r}", self.keep_replace))
        self._check_keep()
        self._check_room()
        self._check_shares()
        self._check_parts()

    def _check_room(self) -> None:
        if (self.blocks is None) == (self.bytes is None):
            raise ConfigError(
                f"tier {self.kind!r} needs room as blocks or as bytes: blocks is "
                f"{shown(self.blocks)}, bytes is {shown(self.bytes)}"
            )
        limits = {
            "blocks": (1, _MOST_BLOCKS),
            "admit_after": (0, 2**32 - 1),
        }
        for name, (low, high) in limits.items():
            if (given := getattr(self, name)) is not None or name == "admit_after":
                put(self, **{name: whole(f"{name} of tier {self.kind!r}", given, low, high)})
        for name, of in (("bytes", self._free()), ("io_budget", None)):
            if (given := getattr(self, name)) is not None:
                put(self, **{name: size(f"{name} of tier {self.kind!r}", given, of=of)})

    def _check_storage(self) -> None:
        what = f"of tier {self.kind!r}"
        if self.workers is not None:
            if self.kind not in _WORKERS:
                raise ConfigError(f"workers is given {what}: only a disk or remote tier has any")
            put(self, workers=whole(f"workers {what}", self.workers, 1, _MOST_WORKERS))
        for name in ("write_limit", "trust_s", "lookup", "secret_file"):
            if getattr(self, name) is not None and self.kind != "remote":
                raise ConfigError(f"{name} is given {what}: only a remote tier has one")
        if self.write_limit is not None:
            put(self, write_limit=size(f"write_limit {what}", self.write_limit))
        if self.trust_s is not None:
            name = f"trust_s {what}"
            trust = real(name, self.trust_s, 0, _MOST_TRUST)
            if not trust:
                raise ConfigError(f"{name} is 0, above 0 wanted")
            put(self, trust_s=trust)
        if self.lookup is not None:
            word(f"lookup {what}", self.lookup, ("all", "local"))
        if self.secret_file is not None:
            put(self, secret_file=folder(f"secret_file {what}", self.secret_file))

    def threads(self) -> int:
        """Return the number of threads of its storage, 0 for memory."""
        return self.workers or _WORKERS.get(self.kind, 0)

    def _check_keep(self) -> None:
        if self.keep is None:
            if self.keep_replace:
                raise ConfigError("keep_replace=True is for a tier with keep='PATH'")
            return
        if self.kind != "host" or self.owner != "kvtrie" or self.layer_slots:
            raise ConfigError(
                f"keep is {shown(self.keep)}, for a tier of kind 'host' with owner 'kvtrie' and "
                f"slots of whole blocks, not {self.kind!r}, {self.owner!r} and "
                f"layer_slots={self.layer_slots}"
            )
        if is_share(self.bytes):
            raise ConfigError(
                f"bytes of tier 'host' is {shown(self.bytes)} with keep: a share of the free "
                "memory differs at each start, and a file of another size is made again; give a "
                "number"
            )

    def _free(self) -> Callable[[], int] | None:
        """Return a function for the free bytes of this tier's medium, if they can be known."""
        if self.kind == "host":
            return free_memory
        if self.kind == "disk" and self.path is not None:
            path = self.path
            return lambda: free_disk(path)
        return None

    def _check_shares(self) -> None:
        for name in ("free_low", "growth_reserve", "retained_share"):
            share, all_of_it = getattr(self, name), name == "retained_share"
            what = f"{name} of tier {self.kind!r}"
            put(self, **{name: real(what, share, 0, 1, open_end=not all_of_it)})

    def _check_parts(self) -> None:
        put(self, layer_slots=flag(f"layer_slots of tier {self.kind!r}", self.layer_slots))
        if self.policy is not None:
            text(f"policy of tier {self.kind!r}", self.policy)
        for name, kind in (("read", Lane), ("store", Lane), ("layout", Layout)):
            if (given := getattr(self, name)) is not None:
                instance(f"{name} of tier {self.kind!r}", given, kind)

    def outlives(self) -> bool:
        """Return whether later processes may find its blocks: with a path, `keep`, or remote."""
        lasting = (
            self.kind == "remote"
            or (self.kind == "disk" and self.path is not None)
            or self.keep is not None
        )
        return lasting and self.owner != "none"

    def lanes(self) -> tuple[Lane, Lane]:
        """Return the lanes up from here and down to here, with the kind's defaults."""
        speed, latency = _SPEED[self.kind]
        read = self.read or Lane(f"{self.kind} read", speed, latency)
        store = self.store or Lane(f"{self.kind} store", speed, latency)
        return read, store

    def paced(self, model: ModelShape, block_tokens: int) -> tuple[Lane, Lane]:
        """Return the lanes in the manager's units, see `pace`.

        Args:
            model: the model.
            block_tokens: tokens of a block.

        Returns:
            The lane up from here and the lane down to here.
        """
        read, store = self.lanes()
        return self.pace(read, model, block_tokens), self.pace(store, model, block_tokens)

    def pace(self, lane: Lane, model: ModelShape, block_tokens: int) -> Lane:
        """Return a lane with its bandwidth in bytes of the model's own format, as a manager counts.

        `bytes_per_s * model's bytes of a block / the tier's bytes of a block`: a block in a smaller
        format takes less time.

        Args:
            lane: a lane with its bandwidth in bytes of the tier's format.
            model: the model.
            block_tokens: tokens of a block.
        """
        if self.layout is None:
            return lane
        if model.even:
            share = model.layer_bytes(block_tokens) / self._layer_bytes(model, block_tokens)
        else:
            # The lane carries all groups, and states keep their bytes.
            own = group_bytes(model, block_tokens, self.layout)
            share = sum(group_bytes(model, block_tokens)) / sum(own)
        speed = min(max(lane.bytes_per_s * share, 1.0), 2.0**62)
        return lane if share == 1 else replace(lane, bytes_per_s=speed)

    def room(self, model: ModelShape, block_tokens: int) -> int:
        """Return the room in blocks for the KV of a model, in the tier's layout, padding counted.

        On a disk with a path, all files are counted too.

        Args:
            model: the model. The bytes are the bytes of a rank.
            block_tokens: tokens of a block.

        Raises:
            ConfigError: `bytes` is too small for a single block, or too large.
        """
        if self.blocks is not None:
            return self.blocks
        layer = self._layer_bytes(model, block_tokens)
        each, room = model.layers * layer, int(self.bytes or 0)
        blocks = room // each
        if self.kind == "disk" and self.path is not None:
            blocks = DiskStore.blocks_in(room, model.layers, layer, block_tokens)
        if not 1 <= blocks <= _MOST_BLOCKS:
            raise ConfigError(
                f"tier {self.kind!r} has {self.bytes} bytes, which is {blocks} blocks of {each}: "
                f"1 to {_MOST_BLOCKS} wanted{forgotten(room)}"
            )
        return blocks

    def room_bytes(self, model: ModelShape, block_tokens: int) -> int:
        """Return the bytes of its blocks on a rank, padding counted.

        Args:
            model: the model.
            block_tokens: tokens of a block.

        Raises:
            ConfigError: as `room`.
        """
        blocks = self.room(model, block_tokens)
        return blocks * model.layers * self._layer_bytes(model, block_tokens)

    def _layer_bytes(self, model: ModelShape, block_tokens: int) -> int:
        if self.layout is None:
            return model.layer_bytes(block_tokens)
        widths = model.rank_heads, model.head_dim, model.v_head_dim
        return sum(self.layout.planes(block_tokens, *widths))

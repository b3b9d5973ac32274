"""Opening: creates tiers for a transformers model from the model and a few sizes.

Invariant: a failed call leaves no locked folder and no thread. Cost: the memory of the tiers,
touched once, and the digest of the weights.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from kvtrie import BlockManager, ModelShape, ResumePoints, Tier
from kvtrie.engines.identity.fingerprint import fingerprint
from kvtrie.engines.server.startup import OpenTier, startup_line, startup_warnings
from kvtrie.engines.transformers.layer_trial import model_shape, no_cache
from kvtrie.engines.transformers.open_model import OpenModel, close_executor
from kvtrie.errors import ConfigError
from kvtrie.settings.argument import instance, masked, shown
from kvtrie.settings.sizes import free_memory, path_and_size, size
from kvtrie.settings.tier import DEFAULT_POLICY
from kvtrie.tiers import (
    DiskStorage,
    KeptPool,
    Pool,
    close_pools,
    open_pools,
    parts_of,
)
from kvtrie.transfer import Executor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from kvtrie import Scope
    from kvtrie.cluster import Publisher
    from kvtrie.tiers import TierBytes

__all__ = ["check_written", "open"]

_LOG = logging.getLogger(__name__)
_SHARE = "25%"
_TRACKED = 10_000_000  # blocks of a shared store
_EVENTS = 65_536  # kept between two passes. After an overflow, all contents are published


def open(  # noqa: A001 - read as `transformers.open`
    model: PreTrainedModel,
    *,
    host: int | str | None = "8GB",
    disk: str | None = None,
    gpu: int | str | None = None,
    block_tokens: int = 16,
    policy: str = DEFAULT_POLICY,
    scope: Scope | None = None,
    keep: str | None = None,
    remote: str | None = None,
    resume: ResumePoints | None = None,
    events: str | None = None,
    replay: str | None = None,
) -> OpenModel:
    """Open tiers for the KV of a model, with the blocks left by an earlier process.

    The shape and the fingerprint come from the model. Prints the sizes to standard error.

    Args:
        model: the model, on its device.
        host: size of host memory. None for none.
        disk: folder and size of the disk, as `kv:200GB`. None for none.
        gpu: size of the first tier, in the memory of the model's device. None is a quarter of the
            free memory.
        block_tokens: tokens per block.
        policy: the eviction policy.
        scope: the scope of all caches.
        keep: path of a file in a memory file system, for example `/dev/shm/kv`, to use as host
            memory. The next process finds its blocks, also after a kill, because each block is
            copied there as soon as it is computed. None keeps nothing. If the file is in use by
            a running process, a second process starts with its own pool.
        remote: URL of a store shared by several processes, as `folder:/mnt/kv`. None for none.
            Every block is stored there as soon as it is computed.
        resume: keep groups of layers apart, so layers with a window keep only the window. None does
            so if layers keep states or KV of different shapes, and otherwise keeps all tokens of
            all layers.
        events: endpoint of a `kvtrie.cluster.Publisher`, as `tcp://127.0.0.1:5557`, where routers
            read block events. None publishes nothing.
        replay: endpoint where routers request earlier events.

    Raises:
        ConfigError: an invalid size, path, URL or policy, a model with KV that no tier can hold, a
            folder in use by a running process, a file of a different model, or groups of layers
            with a remote tier.
        TransferError: the folder cannot be read or created.
    """
    instance("model", model, torch.nn.Module)
    shape = _shape(model, by_layer=resume is not None)
    if resume is None and not shape.even:
        resume = ResumePoints()
    if resume is not None and shape.groups:
        no_cache()
    device = model.device
    # Written through, because processes share only blocks in the store, and a process after a kill
    # finds only kept blocks.
    write = "back" if remote is None else "through"
    first = size("gpu", _SHARE if gpu is None else gpu, of=lambda: _free(device))
    tiers = [Tier("gpu", bytes=first, write="through" if keep is not None else write)]
    if host is not None:
        tiers.append(Tier("host", bytes=host, keep=keep, write=write))
    elif keep is not None:
        raise ConfigError(f"keep is {keep!r}, and host is None: there is no host memory to keep")
    elif remote is not None:
        raise ConfigError(
            f"remote is {masked(str(remote))!r}, and host is None: a shared store is below host "
            "memory"
        )
    if disk is not None:
        path, room = path_and_size("disk", disk)
        tiers.append(Tier("disk", bytes=room, path=path, write=write))
    if remote is not None:
        tiers.append(Tier("remote", blocks=_TRACKED, path=remote))
    manager = BlockManager(
        shape,
        tiers,
        block_tokens=block_tokens,
        policy=policy,
        resume=resume,
        explain=True,
        events=0 if events is None else _EVENTS,
        events_of="residency",
    )
    pools = open_pools(shape, tiers, block_tokens, resume=resume)
    try:
        check_written(pools)
        executor = Executor(manager, pools)
    except BaseException:
        close_pools(pools)
        raise
    try:
        executor.restore()
        publisher = _publisher(manager, events, replay)
        _report(executor, tiers, policy)
    except BaseException:
        close_executor(executor)
        raise
    return OpenModel(model, executor, scope, publisher)


def _publisher(manager: BlockManager, events: str | None, replay: str | None) -> Publisher | None:
    if events is None:
        if replay is not None:
            raise ConfigError(
                f"replay is {shown(replay)}, and events is None: nothing is published"
            )
        return None
    from kvtrie.cluster import Publisher

    return Publisher(manager, events, replay)


def _shape(model: PreTrainedModel, *, by_layer: bool) -> ModelShape:
    """Return the shape from the configuration or, if layers differ in their KV, from a trial."""
    name = fingerprint(model)
    if not by_layer:
        dtype = str(model.dtype).removeprefix("torch.")
        with suppress(ConfigError):
            stated = ModelShape.from_config(model.config, dtype=dtype, fingerprint=name)
            with suppress(ConfigError):
                if not (shown := model_shape(model, fingerprint=name)).even:
                    return shown
            return stated
    return model_shape(model, fingerprint=name)


def check_written(pools: Sequence[TierBytes | None]) -> None:
    """Refuse read-only disks.

    Raises:
        ConfigError: a disk cannot be written, because a running process has it open.
    """
    for pool in pools:
        if isinstance(pool, DiskStorage) and pool.read_only:
            raise ConfigError(f"the folder {pool.folder} cannot be written: {pool.refusal}")


def _free(device: torch.device) -> int:
    """Return the free bytes of a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


def _report(executor: Executor, tiers: Sequence[Tier], policy: str) -> None:
    """Print the start-up line on standard error, and log warnings."""
    manager = executor.manager
    stats, tokens = manager.stats().tiers, manager.block_tokens
    kept = any(isinstance(part, KeptPool) for pool in executor.pools for part in parts_of(pool))
    disks = [pool for pool in executor.pools if isinstance(pool, DiskStorage)]
    lines = [
        OpenTier(
            tier.kind,
            pool.nbytes
            if isinstance(pool, Pool | DiskStorage)
            # The size of a store is not shown.
            else tier.room_bytes(manager.model, tokens)
            if manager.model.even
            else 0,
            stats[tier.kind].slots,
            found=stats[tier.kind].slots - stats[tier.kind].free,
            others=sum(disk.other_blocks() for disk in disks) if tier.kind == "disk" else 0,
            path=tier.path or tier.keep,
            kept=tier.keep is not None and kept,
            pinned=tier.kind == "host" and torch.cuda.is_available(),
        )
        for tier, pool in zip(tiers, executor.pools, strict=True)
    ]
    sys.stderr.write(startup_line(lines, block_tokens=tokens, policy=policy) + "\n")
    for warning in startup_warnings(lines[1:], gpu_blocks=lines[0].blocks):
        _LOG.warning("kvtrie: %s", warning)

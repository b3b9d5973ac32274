"""Park: stores a selective cache as blocks of a manager, on any tier with room.

Its bytes are cut into blocks under a private scope, and the Executor moves these blocks as usual.
If the second tier lacks room, the cache is stored in consecutive pieces. The cache is restored bit
for bit, or not at all.
Invariant: no plain scope matches parked blocks. A cache stays open if parking fails.
Cost: in addition to the moves, a copy of the bytes of the filled rows on parking and again on
resuming. With several pieces, each piece waits for its moves.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

import hashlib
import math
import secrets
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtrie import Scope
from kvtrie.errors import ClosedError, ConfigError
from kvtrie.tiers import HasBlockFormat, sole_pool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtrie import Lease
    from kvtrie.selective.buffered import KVCacheWithBuffers
    from kvtrie.tiers import Pool
    from kvtrie.transfer import Executor

__all__ = ["Blocks", "park_blocks"]

_PREFIX = b"kvtrie selective "


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor among the bytes of a layer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Blocks:
    """The bytes of a cache's layers, in blocks of a manager, until it is dropped or collected.

    Args:
        executor: executor of the manager.
        leases: suspended leases of the blocks, in the order of the bytes.
        layers: tensors and numbers of each layer.
    """

    def __init__(
        self,
        executor: Executor,
        leases: Sequence[Lease],
        layers: Sequence[tuple[Sequence[_Piece], Mapping[str, int]]],
    ) -> None:
        self._executor = executor
        mine = list(leases)
        self._leases: list[Lease] | None = mine
        self._taken: list[torch.Tensor] = []
        self.layers = layers
        self._end_of_life = weakref.finalize(self, _release, mine)
        self._end_of_life.atexit = False

    def load(self, caches: Sequence[KVCacheWithBuffers]) -> bool:
        """Copy the blocks back into caches. After an eviction, drop all blocks and return False.

        Raises:
            ClosedError: the blocks were dropped before.
            NoSpaceError: the first tier has no room now. The blocks stay on their tiers, and loaded
                pieces in memory.
            TransferError: a move failed permanently.
        """
        if self._leases is None:
            raise ClosedError("the parked cache was dropped, or some of its blocks were evicted")
        executor = self._executor
        for lease in self._leases[len(self._taken) :]:
            wanted = lease.tokens
            lease.resume(now=executor.clock(), load="all")  # without room it stays suspended
            loaded = False
            try:
                executor.wait(lease)
                loaded = lease.matched == wanted and not len(lease.plan.recompute())
                if loaded:
                    self._taken.append(_bytes_of(executor, lease).cpu())
                    lease.commit([], now=executor.clock())
                    lease.suspend(to=executor.manager.tiers[1].kind, now=executor.clock())
            finally:
                if not loaded:
                    self.drop()
            if not loaded:
                return False
            if len(self._leases) > 1:  # make room for the next piece
                executor.drain()
        taken = torch.cat(self._taken)
        self._taken = []
        at = 0
        for cache, (pieces, numbers) in zip(caches, self.layers, strict=True):
            tensors: dict[str, torch.Tensor] = {}
            for piece in pieces:
                size = math.prod(piece.shape) * piece.dtype.itemsize
                flat = taken[at : at + size].clone().view(piece.dtype)
                tensors[piece.name] = flat.view(piece.shape).to(cache.place.device)
                at += size
            cache.load_state(tensors, numbers)
        return True

    def drop(self) -> None:
        """Release the blocks. Idempotent."""
        self._end_of_life()
        self._leases = None
        self._taken = []


def park_blocks(executor: Executor, caches: Sequence[KVCacheWithBuffers], about: str) -> Blocks:
    """Write the layers' state into blocks and move the blocks to the second tier.

    Args:
        executor: executor of the manager.
        caches: the cache of each layer.
        about: identity of the state: model, settings, RoPE.

    Raises:
        ConfigError: tiers with a different KV format, or a single tier.
        NoSpaceError: the first tier has no room for the transfer.
    """
    pool, tiers = _pool(executor), executor.manager.tiers
    if len(tiers) == 1:
        raise ConfigError("a cache is parked below the first tier, and the manager has no other")
    for below, tier in zip(executor.pools[1:], tiers[1:], strict=True):
        other = below.block_format.layout if isinstance(below, HasBlockFormat) else pool.layout
        if other != pool.layout:
            raise ConfigError(
                f"{tier.kind} keeps KV as {other.dtype}, {tiers[0].kind} as {pool.layout.dtype}: "
                "parked bytes take tiers that convert nothing"
            )
    layers: list[tuple[list[_Piece], dict[str, int]]] = []
    parts: list[torch.Tensor] = []
    for cache in caches:
        tensors, numbers = cache.state()
        pieces = [_Piece(name, tuple(one.shape), one.dtype) for name, one in tensors.items()]
        parts += [one.contiguous().view(-1).view(torch.uint8) for one in tensors.values()]
        layers.append((pieces, numbers))
    whole = torch.cat([part.to(pool.device) for part in parts])
    block_bytes = pool.layers * pool.unit_bytes
    digest = _PREFIX + hashlib.blake2b(about.encode(), digest_size=32).digest()
    scope = Scope(tenant=_PREFIX + secrets.token_bytes(16), extra=((0, digest),))
    blocks = -(-len(whole) // block_bytes)
    # Half of the smaller of the first two tiers, so the next piece finds room while this piece is
    # still moving.
    per_tier = executor.manager.stats().tiers
    most = max(1, min(blocks, *(per_tier[tier.kind].slots // 2 for tier in tiers[:2])))
    leases: list[Lease] = []
    try:
        for at, part in enumerate(whole.split(most * block_bytes)):
            leases.append(_put(executor, part, scope, at))
            if blocks > most:
                executor.drain()
            else:
                executor.poll()
    except BaseException:
        for lease in leases:
            lease.release(now=executor.clock())
        raise
    return Blocks(executor, leases, layers)


def _put(executor: Executor, part: torch.Tensor, scope: Scope, at: int) -> Lease:
    """Write bytes into blocks, move them to the second tier, and return their suspended lease."""
    pool = _pool(executor)
    block_bytes = pool.layers * pool.unit_bytes
    blocks = -(-len(part) // block_bytes)
    tokens = np.zeros(blocks * pool.block_tokens, dtype=np.uint32)
    tokens[0] = at  # each piece is a different sequence
    lease = executor.manager.acquire(tokens, now=executor.clock(), scope=scope, keep=0, load="none")
    try:
        executor.wait(lease)
        units = pool.table(lease.slots(0)).T.reshape(-1)[: blocks * pool.layers]
        room = part.new_zeros(blocks * block_bytes)
        room[: len(part)] = part
        column = 0
        for plane in pool.planes:
            width = plane.shape[1]
            plane[units] = room.view(len(units), -1)[:, column : column + width]
            column += width
        lease.commit(tokens, now=executor.clock())
        lease.suspend(to=executor.manager.tiers[1].kind, now=executor.clock())
    except BaseException:
        lease.release(now=executor.clock())
        raise
    return lease


def _release(leases: Sequence[Lease]) -> None:
    for lease in leases:
        lease.release()


def _bytes_of(executor: Executor, lease: Lease) -> torch.Tensor:
    pool = _pool(executor)
    units = pool.table(lease.slots(0)).T.reshape(-1)
    return torch.cat([plane[units] for plane in pool.planes], dim=1).view(-1)


def _pool(executor: Executor) -> Pool:
    return sole_pool(executor.pools[0], "that bytes could be written to")

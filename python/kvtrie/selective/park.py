"""Park: a selective cache waits as blocks of a manager, on whatever tier has room.

Its bytes are cut into blocks under a scope of their own, as tokens that nobody asks for; the
Executor moves them as it moves any blocks. What returns is the cache, bit for bit, or nothing.
Invariant: no plain scope matches parked blocks; a cache that could not be parked is still open.
Cost: the bytes of the filled rows, copied once in and once out beside the moves.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

import hashlib
import math
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtrie import Scope
from kvtrie.errors import ClosedError, ConfigError
from kvtrie.tiers import HasBlockFormat, Pool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtrie import Lease
    from kvtrie.selective.cache import KVCacheWithBuffers
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
    """The bytes of a cache's layers, in blocks of a manager.

    Args:
        executor: of the manager.
        lease: over the blocks, suspended.
        layers: per layer its tensors and numbers.
    """

    def __init__(
        self,
        executor: Executor,
        lease: Lease,
        layers: Sequence[tuple[Sequence[_Piece], Mapping[str, int]]],
    ) -> None:
        self._executor = executor
        self._lease: Lease | None = lease
        self.layers = layers

    def load(self, caches: Sequence[KVCacheWithBuffers]) -> bool:
        """Bring the blocks back into caches, and forget them; False where some were evicted.

        Raises:
            ClosedError: they were brought back or dropped before.
            NoSpaceError: the first tier has no room now; the blocks stay where they are.
            TransferError: a move failed for good.
        """
        if self._lease is None:
            raise ClosedError("the parked cache was resumed or dropped before")
        lease, executor = self._lease, self._executor
        wanted = lease.tokens
        lease.resume(now=executor.clock(), load="all")
        try:
            executor.wait(lease)
            if lease.matched < wanted or len(lease.plan.recompute()):
                return False
            taken = _bytes_of(executor, lease).cpu()
        finally:
            self.drop()
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
        """Forget the blocks. Dropping twice does nothing."""
        if self._lease is not None:
            self._lease.release(now=self._executor.clock())
            self._lease = None


def park_blocks(executor: Executor, caches: Sequence[KVCacheWithBuffers], about: str) -> Blocks:
    """Write the layers' state into blocks and let them go down.

    Args:
        executor: of the manager whose tiers are to hold them.
        caches: one per layer.
        about: what tells this state from others: model, settings, RoPE.

    Raises:
        ConfigError: tiers that would convert bytes, or only one tier.
        NoSpaceError: the first tier has no room to pass through.
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
    blocks = -(-len(whole) // block_bytes)
    tokens = np.zeros(blocks * pool.block_tokens, dtype=np.uint32)
    tokens[0] = secrets.randbits(31)  # two parked states of one kind are two sequences
    digest = _PREFIX + hashlib.blake2b(about.encode(), digest_size=32).digest()
    scope = Scope(tenant=_PREFIX + secrets.token_bytes(16), extra=((0, digest),))
    lease = executor.manager.acquire(tokens, now=executor.clock(), scope=scope, keep=0, load="none")
    try:
        executor.wait(lease)
        units = pool.table(lease.slots(0)).T.reshape(-1)[: blocks * pool.layers]
        room = whole.new_zeros(blocks * block_bytes)
        room[: len(whole)] = whole
        at = 0
        for plane in pool.planes:
            width = plane.shape[1]
            plane[units] = room.view(len(units), -1)[:, at : at + width]
            at += width
        lease.commit(tokens, now=executor.clock())
        lease.suspend(to=tiers[1].kind, now=executor.clock())
        executor.poll()
    except BaseException:
        lease.release(now=executor.clock())
        raise
    return Blocks(executor, lease, layers)


def _bytes_of(executor: Executor, lease: Lease) -> torch.Tensor:
    pool = _pool(executor)
    units = pool.table(lease.slots(0)).T.reshape(-1)
    return torch.cat([plane[units] for plane in pool.planes], dim=1).view(-1)


def _pool(executor: Executor) -> Pool:
    pool = executor.pools[0]
    if not isinstance(pool, Pool):
        raise ConfigError("the first tier has no memory that bytes could be written to")
    return pool

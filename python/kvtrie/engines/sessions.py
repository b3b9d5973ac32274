"""Sessions: KV by conversation, block and layer, for programs with their own K and V.

The smallest engine: no model and no forward pass. It stores tensors in kvtrie's own pools and
returns views.
Invariant: `get` and `gather` return the tensors of `put` bit for bit, or report them as dropped or
on a lower tier. A conversation takes memory until `end`. Cost: `put` and `gather` acquire the whole
conversation, `get` only does a lookup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtrie import Release
from kvtrie.errors import ConfigError
from kvtrie.tiers import Pool, sole_pool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kvtrie import Lease, Scope
    from kvtrie.transfer import Executor

__all__ = ["Chunk", "Gathered", "Sessions"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A layer of a block of a conversation.

    Attributes:
        session: name of the conversation.
        block: index of the block in it.
        layer: index of the layer.
        keys: K `(block_tokens, kv_heads, head_dim)`, a view valid until the next change in the
            manager, or None if the layer is not in memory.
        values: V, in the same form.
        context: tokens before the block.
        session_blocks: blocks of the conversation, at least the number announced to `put`.
        layers: layers of the model.
        last_access: the time of its last use in nanoseconds, or None if it is dropped.
        tier: kind of the fastest tier with the layer, or "dropped".
    """

    session: str
    block: int
    layer: int
    keys: torch.Tensor | None
    values: torch.Tensor | None
    context: int
    session_blocks: int
    layers: int
    last_access: int | None
    tier: str


@dataclass(frozen=True, slots=True)
class Gathered:
    """A layer of a whole conversation, in logical order.

    Attributes:
        keys: K `(tokens, kv_heads, head_dim)`, zeros at the holes.
        values: V `(tokens, kv_heads, v_head_dim)`, zeros at the holes.
        holes: int64, ascending: positions on no tier or with failed loads.
    """

    keys: torch.Tensor
    values: torch.Tensor
    holes: NDArray[np.int64]


class Sessions:
    """Conversations as growing rows of full blocks.

    Args:
        executor: executes the moves of the KV's manager.
        scope: the scope of the blocks. Conversations with a common prefix share its KV.

    Raises:
        ConfigError: the first tier has no memory.
    """

    def __init__(self, executor: Executor, *, scope: Scope | None = None) -> None:
        pool = sole_pool(executor.pools[0], "to put K and V in")
        self._executor = executor
        self._manager = executor.manager
        self._pool = pool
        self._scope = scope
        self._conversations: dict[str, tuple[list[int], int | None]] = {}  # tokens, session_blocks

    def put(
        self,
        session: str,
        block: int,
        tokens: Sequence[int],
        kv: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        *,
        session_blocks: int | None = None,
        context: int | None = None,
        layers: int | None = None,
    ) -> int:
        """Store the next blocks of a conversation, or dropped blocks again.

        Only full blocks are stored.

        Args:
            session: name of the conversation.
            block: index of the first of the blocks in it.
            tokens: their tokens. With all tokens before them they name the KV.
            kv: per layer, K and V `(tokens, kv_heads, dim)`.
            session_blocks: the final number of blocks of the conversation, for policies with
                weights by position. At least the current number is used. None keeps the last value.
            context: tokens before the block, to check, or None.
            layers: layers of the model, to check, or None.

        Returns:
            The number of stored tokens, all in full blocks. Pass the remaining tokens again when
            their block is full.

        Raises:
            ConfigError: no tokens, K or V with a wrong number of tokens, not the next block,
                changed tokens, missing layers, a wrong `context` or `layers`, or dropped blocks
                before it, to put first.
            NoSpaceError: the conversation does not fit on the first tier.
            TransferError: an awaited move hangs.
        """
        stored, announced = self._conversations.get(session, ([], None))
        start, path = self._path(session, block, stored, tokens, kv)
        if (context not in (None, start)) or (layers not in (None, self._pool.layers)):
            raise ConfigError(
                f"block {block} of session {session!r} has {start} tokens before it and "
                f"{self._pool.layers} layers, not {context} and {layers}"
            )
        blocks = announced if session_blocks is None else session_blocks
        size, now = self._manager.block_tokens, self._executor.clock
        with self._lease(session, path, blocks) as lease:
            rows = self._missing(lease, start, len(path))
            if absent := [layer for layer, at in enumerate(rows) if len(at) and layer not in kv]:
                raise ConfigError(f"block {block} lacks K and V of layers {absent}")
            # A failed load may have freed its reserved space.
            while (lease.room or 0) < (fresh := len(path) - lease.matched):
                lease.reserve(fresh, now=now())
                self._executor.wait(lease)
            units = self._pool.table(lease.slots(0))
            for layer, at in enumerate(rows):
                if len(at):
                    written = [each[at - start] for each in kv[layer]]
                    self._pool.scatter(units[layer, at // size], at % size, *written)
            lease.commit(path[lease.matched :], now=now())
        self._conversations[session] = (max(stored, path, key=len), blocks)
        self._executor.poll()
        return len(path) - start

    def _path(
        self,
        session: str,
        block: int,
        stored: list[int],
        tokens: Sequence[int],
        kv: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[int, list[int]]:
        """Return the start of the block, and all tokens up to the last full block after it.

        Raises:
            ConfigError: the tokens do not continue the conversation, or K and V do not match them.
        """
        if not len(tokens):
            raise ConfigError(f"block {block} of session {session!r} has no tokens")
        for layer, both in kv.items():
            if wrong := [len(each) for each in both if len(each) != len(tokens)]:
                raise ConfigError(
                    f"layer {layer} has K or V of {wrong[0]} tokens, {len(tokens)} given"
                )
        size = self._manager.block_tokens
        start = block * size
        if not 0 <= start <= len(stored):
            raise ConfigError(
                f"block {block} is not the next one: session {session!r} has "
                f"{len(stored) // size} blocks of {size}"
            )
        path = [*stored[:start], *tokens[: len(tokens) - len(tokens) % size]]
        if path[: len(stored)] != stored[: len(path)]:
            raise ConfigError(f"block {block} of session {session!r} has other tokens")
        return start, path

    def _missing(self, lease: Lease, start: int, end: int) -> list[torch.Tensor]:
        """Return the positions to write from `start` to `end`, for each layer.

        Raises:
            ConfigError: positions before `start` are missing.
        """
        before = int((lease.plan.recompute() < start).sum()) + max(0, start - lease.matched)
        if before:
            raise ConfigError(f"{before} tokens before token {start} are dropped: put them")
        fresh = np.arange(lease.matched, end)
        return [
            torch.as_tensor(
                np.concatenate([lease.plan.recompute(layer), fresh]), device=self._pool.device
            )
            for layer in range(self._pool.layers)
        ]

    def end(self, session: str) -> None:
        """Forget a finished conversation. Its unshared blocks are evicted first.

        Raises:
            ConfigError: an unknown session.
        """
        self._conversation(session)
        release = Release(session=session, scope=self._scope)
        self._manager.hint([release], now=self._executor.clock())
        del self._conversations[session]

    def get(self, session: str, block: int, layer: int) -> Chunk:
        """Return the tier of a layer of a block, with views of K and V if it is in memory.

        Nothing is moved, pinned or refreshed.

        Raises:
            ConfigError: an unknown session, block or layer.
        """
        (tokens, announced), size = self._conversation(session), self._manager.block_tokens
        blocks = len(tokens) // size
        if not (0 <= block < blocks and 0 <= layer < self._pool.layers):
            raise ConfigError(
                f"block {block}, layer {layer}: session {session!r} has {blocks} blocks, the "
                f"model {self._pool.layers} layers"
            )
        now = self._executor.clock()
        found = self._manager.lookup(tokens, now=now, scope=self._scope, keep=0).blocks
        tier, keys, values, access = "dropped", None, None, None
        for copy in found[block].copies if block < len(found) else ():
            if not copy.layer_lo <= layer < copy.layer_hi:
                continue
            tier, pool = self._manager.tiers[copy.tier].kind, self._executor.pools[copy.tier]
            why = self._manager.explain(found[block].block, now=now, tier=copy.tier)
            access = now - why.idle
            if isinstance(pool, Pool):
                slot = copy.slots[layer - copy.coming_lo if pool.layer_slots else 0]
                keys, values = pool.view(int(pool.units(int(slot), layer, layer + 1)[0]))
            break
        return Chunk(
            session=session,
            block=block,
            layer=layer,
            keys=keys,
            values=values,
            context=block * size,
            session_blocks=max(blocks, announced or 0),
            layers=self._pool.layers,
            last_access=access,
            tier=tier,
        )

    def gather(self, session: str, layer: int) -> Gathered:
        """Return K and V of a layer of a whole conversation, loaded from lower tiers if needed.

        Tokens with failed loads are holes. Unless the scope's structure allows holes, all tokens
        after a hole are holes too.

        Raises:
            ConfigError: an unknown session or layer.
            NoSpaceError: the conversation does not fit on the first tier.
            TransferError: an awaited move hangs.
        """
        tokens, announced = self._conversation(session)
        if not 0 <= layer < self._pool.layers:
            raise ConfigError(f"layer {layer}: the model has {self._pool.layers}")
        with self._lease(session, tokens, announced) as lease:
            missing = np.zeros(len(tokens), dtype=bool)
            missing[lease.plan.recompute(layer)] = True
            missing[lease.matched :] = True
            holes, filled = np.flatnonzero(missing), np.flatnonzero(~missing)
            size, device = self._manager.block_tokens, self._pool.device
            at = torch.as_tensor(filled, device=device)
            units = self._pool.table(lease.slots(0))[layer, at // size]
            found = self._pool.gather(units, at % size)
        keys, values = (part.new_zeros((len(tokens), *part.shape[1:])) for part in found)
        for whole, part in zip((keys, values), found, strict=True):
            whole[at] = part
        return Gathered(keys, values, holes)

    def _conversation(self, session: str) -> tuple[list[int], int | None]:
        if session not in self._conversations:
            raise ConfigError(f"there is no session {session!r}")
        return self._conversations[session]

    def _lease(self, session: str, tokens: list[int], blocks: int | None) -> Lease:
        """Acquire a conversation and load it to the first tier, as far as any tier has it."""
        lease = self._manager.acquire(
            tokens,
            now=self._executor.clock(),
            scope=self._scope,
            session=session,
            session_blocks=blocks,
            keep=0,
            load="all",
        )
        try:
            self._executor.wait(lease)
        except BaseException:
            lease.release(now=self._executor.clock())
            raise
        return lease

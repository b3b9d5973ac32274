"""Sessions: KV by conversation, block and layer, for programs that compute K and V themselves.

The smallest engine: no model, no forward pass, only tensors put in and views taken out, in
kvtrie's own pools.
Invariant: what `get` and `gather` return is bit for bit what `put` was given, or it is said to be
elsewhere or dropped; a conversation takes memory until `end`. Cost: `put` and `gather` acquire the
whole conversation, `get` only looks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtrie import Release
from kvtrie.errors import ConfigError
from kvtrie.tiers import Pool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kvtrie import Lease, Scope
    from kvtrie.transfer import Executor

__all__ = ["Chunk", "Gathered", "Sessions"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One layer of one block of a conversation.

    Attributes:
        session: name of the conversation.
        block: index of the block in it.
        layer: index of the layer.
        keys: K `(block_tokens, kv_heads, head_dim)`, a view that holds until the manager next
            changes; None where no memory holds it.
        values: V, in the same form.
        context: tokens before the block.
        session_blocks: blocks of the conversation, with those that `put` announced ahead.
        layers: layers of the model.
        last_access: the time of its last use in nanoseconds; None if it is dropped.
        tier: kind of the fastest tier that holds it, or "dropped".
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
    """One layer of a whole conversation, in logical order.

    Attributes:
        keys: K `(tokens, kv_heads, head_dim)`; zeros at the holes.
        values: V `(tokens, kv_heads, v_head_dim)`; zeros at the holes.
        holes: int64, ascending: the positions that are on no tier, or could not be loaded.
    """

    keys: torch.Tensor
    values: torch.Tensor
    holes: NDArray[np.int64]


@dataclass(slots=True)
class _Conversation:
    """All that is known of a conversation: its tokens, and how many blocks it will have."""

    tokens: list[int] = field(default_factory=list[int])
    blocks: int | None = None


class Sessions:
    """Conversations as growing rows of full blocks.

    Args:
        executor: carries out the moves of the manager that holds the KV.
        scope: whose KV may be shared; conversations that begin with the same tokens share it.

    Raises:
        ConfigError: the first tier has no memory.
    """

    def __init__(self, executor: Executor, *, scope: Scope | None = None) -> None:
        pool = executor.pools[0]
        if not isinstance(pool, Pool):
            raise ConfigError("the first tier has no memory to put K and V in")
        self._executor = executor
        self._manager = executor.manager
        self._pool = pool
        self._scope = scope
        self._conversations: dict[str, _Conversation] = {}

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
        """Store blocks: the next ones of a conversation, or again such as were dropped.

        Of a last block that is not full nothing is stored. Each block is stored by itself: when
        one raises, those before it are stored.

        Args:
            session: name of the conversation.
            block: index of the first of the blocks in it.
            tokens: their tokens; with all before them they name the KV.
            kv: per layer, K and V `(tokens, kv_heads, dim)`.
            session_blocks: blocks that the conversation will have, for policies that weigh a block
                by its place in it; never taken for fewer than it has. None leaves what was said
                last.
            context: tokens before the block, if they are to be checked.
            layers: layers of the model, if they are to be checked.

        Returns:
            How many of the tokens are stored: those of full blocks. Give the others again when
            their block is full.

        Raises:
            ConfigError: no tokens, K and V of another number of tokens, not the next block, other
                tokens than before, missing layers, another context or number of layers than said,
                or blocks before it that are dropped and must be put first.
            NoSpaceError: the conversation does not fit on the first tier.
            TransferError: a move that it awaits hangs.
        """
        size, count = self._manager.block_tokens, len(tokens)
        if not count:
            raise ConfigError(f"block {block} of session {session!r} has no tokens")
        for layer, both in kv.items():
            if wrong := [len(each) for each in both if len(each) != count]:
                raise ConfigError(f"layer {layer} has K or V of {wrong[0]} tokens, {count} given")
        full = count - count % size
        for at in range(0, full, size):
            rows = slice(at, at + size)
            mine = {layer: (keys[rows], values[rows]) for layer, (keys, values) in kv.items()}
            before = None if context is None else context + at
            self._put(
                session, block + at // size, tokens[rows], mine, session_blocks, before, layers
            )
        return full

    def _put(  # noqa: PLR0917 - as `put` has them
        self,
        session: str,
        block: int,
        tokens: Sequence[int],
        kv: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        session_blocks: int | None,
        context: int | None,
        layers: int | None,
    ) -> None:
        """Store one full block."""
        size = self._manager.block_tokens
        before_it = self._conversations.get(session) or _Conversation()
        stored = before_it.tokens
        start = block * size
        if not 0 <= start <= len(stored):
            raise ConfigError(
                f"block {block} is not the next one: session {session!r} has "
                f"{len(stored) // size} blocks of {size}"
            )
        path = [*stored[:start], *tokens]
        if start < len(stored) and path != stored[: start + size]:
            raise ConfigError(f"block {block} of session {session!r} has other tokens")
        if (context not in (None, start)) or (layers not in (None, self._pool.layers)):
            raise ConfigError(
                f"block {block} of session {session!r} has {start} tokens before it and "
                f"{self._pool.layers} layers, not {context} and {layers}"
            )
        blocks = before_it.blocks if session_blocks is None else session_blocks
        with self._lease(session, path, blocks) as lease:
            missing = lease.plan.recompute()
            before = int((missing < start).sum()) + max(0, start - lease.matched)
            if before:
                raise ConfigError(f"{before} tokens before block {block} are dropped: put them")
            fresh = lease.matched <= start
            wanted = [
                layer
                for layer in range(self._pool.layers)
                if fresh or len(lease.plan.recompute(layer))
            ]
            if absent := [layer for layer in wanted if layer not in kv]:
                raise ConfigError(f"block {block} lacks K and V of layers {absent}")
            # A load that failed may have taken the room along.
            while fresh and (lease.room or 0) < size:
                lease.reserve(size, now=self._executor.clock())
                self._executor.wait(lease)
            offsets = torch.arange(size, device=self._pool.device)
            units = self._pool.table(lease.slots(0))[:, block]
            for layer in wanted:
                self._pool.scatter(units[layer].expand(size), offsets, *kv[layer])
            lease.commit(list(tokens) if fresh else [], now=self._executor.clock())
        self._conversations[session] = _Conversation(
            path if start == len(stored) else stored, blocks
        )
        self._executor.poll()

    def end(self, session: str) -> None:
        """Forget a conversation that is over: blocks that no other one needs are evicted first.

        Raises:
            ConfigError: there is no such session.
        """
        self._conversation(session)
        release = Release(session=session, scope=self._scope)
        self._manager.hint([release], now=self._executor.clock())
        del self._conversations[session]

    def get(self, session: str, block: int, layer: int) -> Chunk:
        """Return the tier of one layer of a block, with views of K and V if memory holds them.

        Nothing is moved, pinned or refreshed.

        Raises:
            ConfigError: there is no such session, block or layer.
        """
        conversation, size = self._conversation(session), self._manager.block_tokens
        tokens = conversation.tokens
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
            session_blocks=max(blocks, conversation.blocks or 0),
            layers=self._pool.layers,
            last_access=access,
            tier=tier,
        )

    def gather(self, session: str, layer: int) -> Gathered:
        """K and V of one layer of a whole conversation; what is on lower tiers is loaded.

        Tokens that cannot be loaded are holes; unless the scope's structure allows holes, so are
        all tokens after them.

        Raises:
            ConfigError: there is no such session or layer.
            NoSpaceError: the conversation does not fit on the first tier.
            TransferError: a move that it awaits hangs.
        """
        conversation = self._conversation(session)
        tokens = conversation.tokens
        if not 0 <= layer < self._pool.layers:
            raise ConfigError(f"layer {layer}: the model has {self._pool.layers}")
        with self._lease(session, tokens, conversation.blocks) as lease:
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

    def _conversation(self, session: str) -> _Conversation:
        if session not in self._conversations:
            raise ConfigError(f"there is no session {session!r}")
        return self._conversations[session]

    def _lease(self, session: str, tokens: list[int], blocks: int | None) -> Lease:
        """The whole conversation on the first tier, as far as any tier has it and gives it."""
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

"""KvtrieCache: a transformers `Cache` with its KV in the blocks of a shared manager.

It works wherever transformers takes a cache: `model.generate(..., past_key_values=cache)` and the
plain forward. Opening a cache looks up the prompts, waits for loads and computes tokens evicted
inside a match. The caller then computes the rest, as with any filled cache. If all blocks come from
memory or a disk, the first pass waits for each layer.

Invariants: column `c` of row `b` is token `c - pad[b]` of the row. The leases hold exactly the
tokens with KV written by a finished pass. KV computed from more than tokens is refused before it is
stored.
Cost: per pass and layer one scatter of the new tokens and one gather of all tokens. Per pass and
row one call into the manager. `batch.py` has the state of the rows.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import Cache

from kvtrie.engines.transformers.admission import (
    LOOKUP_S,
    admit,
    ask_store,
    unpadded,
)
from kvtrie.engines.transformers.arrival import Arrival
from kvtrie.engines.transformers.batch import Batch
from kvtrie.engines.transformers.guard import named, no_gradients, remainder, states
from kvtrie.engines.transformers.hook import Life, as_is
from kvtrie.engines.transformers.passes import Passes
from kvtrie.engines.transformers.recovery import RowRecovery
from kvtrie.engines.transformers.rows import check_repeated
from kvtrie.errors import ClosedError, ConfigError
from kvtrie.settings.argument import flag, instance
from kvtrie.tiers import Pool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    import torch
    from transformers import PreTrainedModel

    from kvtrie import Lease, Scope
    from kvtrie.cluster import Publisher
    from kvtrie.transfer import Executor

__all__ = ["KvtrieCache"]


class KvtrieCache(Cache):
    """KV of a batch of sequences, with one lease per row.

    Rows of different lengths are padded on the left. A pass with a multiple of the rows (beam
    search, several returned sequences) forks each row. A pass over whole rows from position 0, as
    at the start of assisted generation, computes only columns missing in the cache. A pass of
    several tokens over cached states is split at block ends, and returns the output of its last
    part. With windows or states, taking tokens back (`crop`, assisted generation) is refused,
    because states cannot be rolled back. KV is looked up by tokens, so a pass must depend on
    nothing else. Training mode, gradients, autocast, custom positions or masks, and all arguments
    not known to be harmless are refused.

    Args:
        model: the model to run, in evaluation mode. A hook on it passes the tokens of each pass to
            the cache.
        executor: carries out the moves of the shared manager.
        input_ids: int64 `(batch, columns)`, the prompts.
        attention_mask: `(batch, columns)`, 0 before each row's first token. None for no padding.
        reserve: tokens after each prompt to make room for at once. Otherwise room grows with
            every pass, and a full tier may stop a generation midway.
        scope: the scope for sharing KV. If RoPE changes beyond some length, the KV of longer
            batches gets a separate scope. With windows or states there are no holes.
        sessions: the conversation of each row, for retention.
        use_layerwise: let the first pass wait layer by layer for loads from memory or disk.
            Otherwise opening waits for all loads. Opening also waits for loads from a shared store,
            and if tokens inside a match must be computed. Passes run by opening, to compute states,
            wait layer by layer, too.
        lookup_s: time limit in seconds for looking up the prompts in a shared store, if the last
            tier is a store.
        events: a publisher of the manager's blocks, pumped after each pass, or an endpoint, as
            `tcp://127.0.0.1:5557`, where this cache publishes blocks until it is closed. None
            publishes nothing.

    Attributes:
        scope: the scope of the rows: the given scope, extended for RoPE, windows and states.

    Raises:
        ConfigError: padding that is not on the left, a model with KV that the pool cannot hold or
            that depends on more than tokens (for example by a forward hook not from kvtrie,
            transformers or accelerate), or a model different from the manager's. See `fingerprint`.
        NoSpaceError: the prompts and `reserve` do not fit next to the blocks in use.
        TransferError: a move needed by the prompts cannot be carried out.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        executor: Executor,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        reserve: int = 0,
        scope: Scope | None = None,
        sessions: Sequence[str] | None = None,
        use_layerwise: bool = True,
        lookup_s: float = LOOKUP_S,
        events: Publisher | str | None = None,
    ) -> None:
        super().__init__(layers=[])
        pool = executor.pools[0]
        if not isinstance(pool, Pool):
            raise ConfigError("the first tier has no memory that a model could compute in")
        prompts = unpadded(input_ids, attention_mask)
        longest, columns = max(map(len, prompts)), input_ids.shape[1]
        self._executor = executor
        self._passes = passes = Passes(model, executor, pool.groups, longest)
        self._ids: torch.Tensor | None = None
        self._events: Publisher | None = None
        self._own_events = False
        self.scope = passes.scope(scope)
        ask_store(executor, prompts, self.scope, lookup_s)
        recovery = RowRecovery(executor, passes, pool)
        compute, room = partial(self._compute, executor, passes), columns + reserve
        batch = Batch(executor, pool, passes.tried, recovery, compute=compute, room=room)
        plans = passes.computes(longest)
        layerwise = flag("use_layerwise", use_layerwise) and Arrival.wanted(executor)
        self._begin_life(batch)
        try:
            self._publish(events)
            admit(
                executor,
                prompts,
                batch.rows,
                columns=columns,
                scope=self.scope,
                sessions=sessions,
                reserve=reserve,
                load="plan" if plans else "all",
                layerwise=layerwise,
                alone=bool(batch.parts),
            )
            batch.open(layerwise=layerwise, disk=plans)
        except BaseException:
            self.close()
            raise

    @classmethod
    def _over(cls, executor: Executor, passes: Passes, batch: Batch) -> Self:
        """Return a cache over the rows of a batch."""
        made = object.__new__(cls)
        Cache.__init__(made, layers=[])
        made._executor, made._passes, made._ids = executor, passes, None
        made._events, made._own_events = None, False
        made._begin_life(batch)
        return made

    @classmethod
    def _compute(cls, executor: Executor, passes: Passes, batch: Batch, upto: int) -> None:
        """Compute the only row of a batch, without padding, up to a token."""
        start, (row,) = batch.past, batch.rows
        if start < upto:
            cache = cls._over(executor, passes, batch)
            try:
                passes.run(row.tokens[start:upto], start, cache)
            finally:
                cache._life.leave()  # noqa: SLF001 - same class

    def __copy__(self) -> Self:
        """Fork, as `deepcopy`: two caches must not grow the same rows."""
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Fork the cache. The fork continues separately and must be closed separately.

        The caches share blocks until either of them writes. Not allowed during a pass.

        Raises:
            ClosedError: the cache is closed.
            NoSpaceError: no room for the last block of each row.
        """
        self._open()
        self._batch.finish_loads()
        batch = self._batch.over(())
        memo[id(self)] = made = self._over(self._executor, self._passes, batch)
        made.scope = self.scope
        made._events = self._events  # noqa: SLF001 - same class
        try:
            self._batch.fork(batch)
        except BaseException:
            made.close()
            raise
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.layers) or self._batch.pool.layers

    def __repr__(self) -> str:
        if not self._life.alive:
            return "KvtrieCache(closed)"
        return f"KvtrieCache({len(self._batch.rows)} rows, {self._batch.past} columns)"

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The lease of each row, in the order of the batch."""
        return tuple(row.lease for row in self._batch.rows)

    @property
    def recovered(self) -> int:
        """Number of matched tokens computed instead of loaded.

        They were evicted, failed to load, or were faster to compute than to load.
        """
        return self._batch.recovery.recovered

    def close(self) -> None:
        """Release every lease. The blocks stay cached. Idempotent.

        A cache dropped without `close` is closed by garbage collection.
        """
        used = [lease.handles for lease in self.leases if lease.state == "active"]
        try:
            self._batch.abandon()
        finally:
            self._life.end()
            for blocks in used:
                self._executor.used(blocks)
            if self._own_events and self._events is not None:
                self._events.close()

    @as_is
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new K, V `(batch, heads, queries, dim)` of a layer. Return its visible K, V.

        Raises:
            ClosedError: the cache is closed.
            ConfigError: the tokens do not continue the prompts, a different model runs, K and V
                require gradients or differ from the first tier's format, or the model's weights or
                adapters have changed.
            NoSpaceError: no room for the new tokens. The pass may be tried again later.
            TransferError: a load of the first pass has failed, and the model cannot compute single
                tokens.
        """
        self._open()
        if self._batch.window(layer_idx) is None:
            states(key_states, value_states, self._batch.pool)
        if layer_idx == 0 and not self._batch.parts:
            self._begin(key_states.shape[0], key_states.shape[2])
        return self._batch.store(layer_idx, key_states, value_states)

    @as_is
    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - all layers hold the same
        """Return the number of cached columns, padding included."""
        self._open()
        return self._batch.past

    @as_is
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys visible to `query_length` columns, and their first index."""
        self._open()
        past, window = self._batch.past, self._batch.window(layer_idx)
        seen = past if window is None else window.visible(past)
        return seen + query_length, past - seen

    @property
    def is_compileable(self) -> bool:
        """False: the tensors of a growing cache have no fixed addresses."""
        return False

    @as_is
    def get_max_length(self, layer_idx: int | None = None) -> int:  # noqa: ARG002
        """-1: the sequences grow as long as there is room."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` columns. transformers passes a negative number.

        Raises:
            ConfigError: the cache has fewer columns, or has windows or states.
        """
        self._open()
        if self._batch.parts and tokens_to_remove:
            raise ConfigError(
                f"cannot crop by {tokens_to_remove} columns: windows and states of an earlier "
                "column are gone; open another KvtrieCache for the shorter sequence"
            )
        past = self._batch.past
        if tokens_to_remove > 0 or -tokens_to_remove > past:
            raise ConfigError(f"cannot crop by {tokens_to_remove} of {past} columns")
        if tokens_to_remove:
            self._batch.cut(-tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Refuse assisted generation, which takes tokens back, with windows or states.

        Raises:
            ConfigError: the cache has windows or states.
        """
        if self._batch.parts:
            raise ConfigError(
                "assisted generation takes tokens back, and windows and states of an earlier "
                "column are gone: generate without an assistant"
            )

    def reset(self) -> None:
        """Remove all columns of this batch. The blocks stay cached."""
        self._open()
        self.crop(-self._batch.past)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue row `i` of the batch from the former row `beam_idx[i]`."""
        self._open()
        self._batch.select(beam_idx.cpu().numpy().tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace each row by `repeats` adjacent copies."""
        self._open()
        self._batch.repeat(repeats * len(self._batch.rows))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows at `indices` (or where it is True), and release the rest."""
        self._open()
        rows = np.arange(len(self._batch.rows))
        self._batch.select(rows[indices.cpu().numpy()].tolist())

    def _begin_life(self, batch: Batch) -> None:
        """Hook into the passes of the model until the cache ends."""
        self._batch, self.layers = batch, batch.parts.layers
        entry, release = self._passes.entry, batch.release
        self._life = Life(self, entry, self._before, self._after, release=release)

    def _before(
        self, entry: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Check a pass with this cache, and note its tokens, as a pre-hook of the model."""
        # torch passes none if a concurrent thread adds or removes the hook during the pass.
        if kwargs is None:
            return None
        given = named(entry, args, kwargs)
        if given.get("past_key_values") is not self:
            return None
        batch, self._ids = self._batch, None
        if batch.parts:
            no_gradients(entry, given)
            if batch.step is not None:
                raise ClosedError(
                    "a pass over the KvtrieCache ended amid its layers: open another for the "
                    "prompts"
                )
        batch.drop_pass()  # an earlier pass that was not completed
        seen = self._passes.check(given, batch.past, [row.pad for row in batch.rows])
        if seen.repeats:
            check_repeated(batch.rows, seen.ids[:, : seen.repeats])
        self._ids, skipped = seen.ids[:, seen.repeats :], seen.repeats
        if batch.parts:
            skipped += self._split(entry, remainder(given, skipped), self._ids)
        return ((), remainder(given, skipped)) if skipped else None

    def _split(self, entry: torch.nn.Module, given: dict[str, Any], ids: torch.Tensor) -> int:
        """Run all parts of a pass except the last, and begin the last. Return the columns run."""
        batch, start = self._batch, self._batch.past
        end = start + ids.shape[1]
        batch.repeat(len(ids))
        while (recurrent := batch.parts.states) is not None and batch.past < end - 1:
            batch.reserve(end)  # slots for the next blocks
            column = recurrent.stop(batch.rows, batch.past, end)
            if column == end:
                break
            part = remainder(given, batch.past - start, column - start)
            entry(**part | {"use_cache": True})
        self._ids = ids[:, batch.past - start :]
        self._begin(*self._ids.shape)
        return batch.past - start

    def _after(
        self,
        entry: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: object = None,
    ) -> None:
        """Commit a pass with this cache, as a hook of the model.

        If torch passes no keyword arguments, as in `_before`, `kwargs` is the output.
        """
        if output is not None and named(entry, args, kwargs).get("past_key_values") is self:
            self._batch.commit()
            self._ids = None
            if self._events is not None:
                self._events.pump()

    def _publish(self, events: Publisher | str | None) -> None:
        """Begin to publish the manager's blocks."""
        if events is None:
            return
        from kvtrie.cluster import Publisher

        if isinstance(events, str):
            self._events, self._own_events = Publisher(self._executor.manager, events), True
        else:
            self._events = instance("events", events, Publisher)

    def _open(self) -> None:
        if not self._life.alive:
            raise ClosedError("the KvtrieCache is closed: open another for the same prompts")

    def _begin(self, batch: int, queries: int) -> None:
        """Check the model, and begin the pass with its tokens, before the first layer."""
        self._passes.require_same()
        self._batch.repeat(batch)
        seen = self._ids is not None and self._ids.shape == (batch, queries)
        self._batch.begin(self._ids if seen else None)

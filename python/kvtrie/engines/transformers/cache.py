"""KvtrieCache: a transformers `Cache` whose KV lives in the blocks of a shared manager.

It goes wherever transformers takes a cache: `model.generate(..., past_key_values=cache)` and the
plain forward. Opening one looks the prompts up, waits for what is loaded, computes what was
evicted inside them; the caller then computes the rest, as with any filled cache. If all blocks
come from memory or a disk, the first pass waits for each layer.
Invariants: column `c` of row `b` is token `c - pad[b]` of that row; the leases hold every token
whose KV was written by a finished pass, and nothing else; what was computed from more than tokens
is refused before it is held.
Cost: per pass and layer one scatter of the new tokens and one gather of all; per pass one call
into the manager and row. The rows are in `rows.py`, loads during the first pass in `first_pass.py`.
"""

from __future__ import annotations

import weakref
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from transformers import Cache

from kvtrie import Scope
from kvtrie.engines.identity.fingerprint import require_same
from kvtrie.engines.transformers.arrival import Arrival
from kvtrie.engines.transformers.cache_misses import count_row, explain_prompt
from kvtrie.engines.transformers.first_pass import FirstPass
from kvtrie.engines.transformers.guard import Guard, named, remainder, states
from kvtrie.engines.transformers.hook import as_is, weakly
from kvtrie.engines.transformers.opening import LOOKUP_S, ask_store
from kvtrie.engines.transformers.rope import RopeLimits
from kvtrie.engines.transformers.row_recovery import RowRecovery
from kvtrie.engines.transformers.rows import (
    Row,
    acquire,
    check_repeated,
    fresh_tokens,
    select,
    step_of,
    unpadded,
)
from kvtrie.engines.transformers.trial import check_stated, trial
from kvtrie.errors import ClosedError, ConfigError
from kvtrie.settings.argument import flag
from kvtrie.tiers import Pool, parts_of
from kvtrie.transfer import Executor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    import torch
    from numpy.typing import NDArray
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel

    from kvtrie import Lease
    from kvtrie.engines.server.why import Explained
    from kvtrie.engines.transformers.step import Step

__all__ = ["KvtrieCache"]


class KvtrieCache(Cache):
    """The KV of a batch of sequences, held by one lease each.

    Rows of different lengths are padded on the left. A batch that is a multiple of the rows (beam
    search, several returned sequences) makes each row fork when its first pass comes. A pass that
    gives whole rows from position 0 on, as assisted generation begins, computes what the cache
    lacks. KV is found again by tokens, so a pass must depend on nothing else: a model in training
    mode, gradients, autocast, given positions or masks, and every argument that is not
    known to be harmless are refused.

    Args:
        model: the model that will run, in evaluation mode; a hook on it passes the cache the
            tokens of each pass.
        executor: carries out the moves of the manager that is shared.
        input_ids: int64 `(batch, columns)`, the prompts.
        attention_mask: `(batch, columns)`, 0 before each row's first token; None for no padding.
        reserve: tokens after each prompt to make room for at once; otherwise room grows with
            every pass, and a full tier may stop a generation midway.
        scope: whose KV may be shared. If RoPE changes beyond some length, the KV of longer
            batches gets a separate scope.
        sessions: the conversation of each row, for retention.
        use_layerwise: let the first pass wait layer by layer for what is loaded from memory or
            read from a disk; otherwise opening waits for all of it, as for what is read from a
            shared store and where something amid a match is computed.
        lookup_s: seconds that opening asks a shared store for the prompts, if the last tier is one.

    Attributes:
        scope: whose KV the rows share: the given scope, with what RoPE adds to it.

    Raises:
        ConfigError: padding elsewhere than on the left, a model whose KV the pool cannot hold or
            depends on more than tokens (a forward hook that is not kvtrie's, transformers' or
            accelerate's among them), or another model than the one whose KV the manager keeps; see
            `fingerprint`.
        NoSpaceError: the prompts and `reserve` do not fit next to the blocks in use.
        TransferError: a move that the prompts await cannot be carried out.
    """

    _grouped: ClassVar[type[KvtrieCache] | None] = None

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
    ) -> None:
        super().__init__(layers=[])
        pool, *others = parts_of(executor.pools[0])
        if not isinstance(pool, Pool):
            raise ConfigError("the first tier has no memory that a model could compute in")
        use_layerwise = flag("use_layerwise", use_layerwise) and self._by_layer(executor)
        self._executor, self._model = executor, model
        if not others:  # layers of several groups the trial compares
            check_stated(model, executor.manager.model, pool)
        self._guard = Guard(model)
        self._guard.ready()
        self._rope = RopeLimits.of(model.config)
        require_same(executor.manager, model)
        self._entry = self._tried(model, pool)
        self._pool = pool
        self._rows: list[Row] = []
        self._step: Step | None = None
        self._ids: torch.Tensor | None = None
        self._fresh: list[NDArray[np.int64]] = []
        self._past = 0
        prompts = unpadded(input_ids, attention_mask)
        if sessions is not None and len(sessions) != len(prompts):
            raise ConfigError(f"{len(sessions)} sessions given for {len(prompts)} prompts")
        longest = max(map(len, prompts))
        self._room = input_ids.shape[1] + reserve  # columns that opening makes room for
        self._regime = self._rope.regime(longest)
        self.scope = self._scope_of(scope)
        ask_store(executor, prompts, self.scope, lookup_s)
        self._recovery = RowRecovery(
            executor, model, self._entry, pool, self._guard, reach=self._rope.reach(self._regime)
        )
        self._first = FirstPass(executor, pool, self._rows, self._recovery)
        plans = self._recovery.computes(longest)
        self._begin_life()
        explained: list[Explained | None] = []
        try:
            for row, prompt in enumerate(prompts):
                session = None if sessions is None else sessions[row]
                explained.append(explain_prompt(executor, prompt, self.scope, session))
                lease = acquire(
                    executor,
                    prompt,
                    scope=self.scope,
                    session=session,
                    reserve=reserve,
                    load="plan" if plans else "all",
                    layerwise=use_layerwise,
                )
                self._rows.append(Row(lease, input_ids.shape[1] - len(prompt), prompt))
            for one, row, start in zip(explained, self._rows, self._starts(), strict=True):
                count_row(executor, one, row.lease, start, len(row.tokens))
            if not (use_layerwise and self._first.load(disk=plans)):
                self._recover()
        except BaseException:
            self.close()
            raise
        self._past = min(row.pad + row.lease.tokens for row in self._rows)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: ANN401 - those of `__init__`
        """A cache of the kind that the tiers of the executor need."""
        executor = kwargs.get("executor", args[1] if len(args) > 1 else None)
        first = executor.pools[0] if isinstance(executor, Executor) else None
        if cls is KvtrieCache and len(parts_of(first)) > 1:
            assert cls._grouped is not None  # noqa: S101 - `transformers` imports it
            return cast("Self", object.__new__(cls._grouped))
        return super().__new__(cls)

    def __init_subclass__(cls, *, groups: bool = False, **more: object) -> None:
        """Note the kind of cache that serves models whose groups of layers are kept apart."""
        super().__init_subclass__(**more)
        if groups:
            KvtrieCache._grouped = cls

    def __copy__(self) -> Self:
        """A copy shares no rows, or one would grow under the other."""
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Fork the cache: a copy of the same rows, which goes on by itself and is closed by itself.

        Blocks are shared up to what either one writes. Not in the midst of a pass.

        Raises:
            ClosedError: the cache is closed.
            NoSpaceError: no room for the last block of each row.
        """
        self._open()
        self._arrive()
        rows: list[Row] = []
        memo[id(self)] = made = self._over(rows)
        now = self._executor.clock()
        try:
            for row in self._rows:
                (lease,) = row.lease.fork(1, now=now)
                rows.append(replace(row, lease=lease))
        except BaseException:
            made.close()
            raise
        return made

    def _over(self, rows: list[Row]) -> Self:
        """A cache of the same model over other rows, without a pass under way."""
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        made._rows, made._fresh = rows, []
        made._step = made._ids = None
        made._recovery = copy(self._recovery)
        made._first = FirstPass(self._executor, self._pool, rows, made._recovery)
        made._begin_life()
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self._pool.layers

    def __repr__(self) -> str:
        if not self._end_of_life.alive:
            return "KvtrieCache(closed)"
        return f"KvtrieCache({len(self._rows)} rows, {self._past} columns)"

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The lease of each row, in the order of the batch."""
        return tuple(row.lease for row in self._rows)

    @property
    def recovered(self) -> int:
        """Tokens within a match that were computed.

        They had been dropped, or did not come, or the plan found that sooner than loading them.
        """
        return self._recovery.recovered

    def close(self) -> None:
        """Release every lease; the blocks stay cached. Closing twice does nothing.

        A cache that is dropped without it is closed when it is collected.
        """
        leases = [row.lease for row in self._rows]
        used = [lease.handles for lease in leases if lease.state == "active"]
        try:
            self._first.abandon()
        finally:
            self._end_of_life()
            for blocks in used:
                self._executor.used(blocks)

    @as_is
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new K, V `(batch, heads, queries, dim)` of a layer; return those of all columns.

        Raises:
            ClosedError: the cache is closed.
            ConfigError: tokens that do not continue the prompts, a pass of another model, K and V
                that await gradients or that the first tier does not hold as they are, a model whose
                weights or adapters have changed.
            NoSpaceError: no room for the new tokens; the pass may be tried again later.
            TransferError: a load of the first pass does not come, and the model cannot compute
                single tokens.
        """
        self._open()
        states(key_states, value_states, self._pool)
        if layer_idx == 0:
            self._step = self._begin(key_states.shape[0], key_states.shape[2])
        if self._step is None:
            raise ConfigError(f"layer {layer_idx} came before layer 0")
        self._step, seen = self._first.store(
            layer_idx, key_states, value_states, self._step, self._past
        )
        if layer_idx == self._pool.layers - 1:
            self._end(key_states.shape[2])
        return seen

    @as_is
    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - all layers hold the same
        """Columns that the cache holds, padding included."""
        self._open()
        return self._past

    @as_is
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        """Number of keys that a pass over `query_length` columns sees, and the first of them."""
        self._open()
        return self._past + query_length, 0

    @as_is
    def get_max_length(self, layer_idx: int | None = None) -> int:  # noqa: ARG002
        """-1: the sequences grow as long as there is room."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` columns: transformers gives a negative number."""
        self._open()
        if tokens_to_remove > 0 or -tokens_to_remove > self._past:
            raise ConfigError(f"cannot crop by {tokens_to_remove} of {self._past} columns")
        if tokens_to_remove == 0:
            return
        self._arrive()
        self._past += tokens_to_remove
        for at, row in enumerate(self._rows):
            self._rows[at] = row.cut(self._past, self._executor.clock())

    def reset(self) -> None:
        """Forget all columns of this batch; what is cached for others stays."""
        self._open()
        self.crop(-self._past)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue row `i` of the batch from what row `beam_idx[i]` was."""
        self._select(beam_idx.cpu().numpy().tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let every row go on as `repeats` neighbouring ones."""
        self._select([row for row in range(len(self._rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows at `indices` (or where it is True), release the others."""
        self._open()
        self._select(np.arange(len(self._rows))[indices.cpu().numpy()].tolist())

    def _scope_of(self, scope: Scope | None) -> Scope | None:
        """The scope of the rows: what RoPE adds to a given one, and no holes that nothing fills."""
        found = self._rope.scope(scope, self._regime)
        if self._guard.fills:
            return found
        return replace(found or Scope(), structure="leaf-only")

    def _by_layer(self, executor: Executor) -> bool:
        """Whether the first pass may wait layer by layer."""
        return Arrival.wanted(executor)

    def _tried(self, model: PreTrainedModel, pool: Pool) -> torch.nn.Module:
        """The module of a model that takes its tokens, if the tiers can hold its KV."""
        return trial(model, pool)

    def _starts(self) -> list[int]:
        """Of each row, the first token that the pass after opening computes."""
        past = min(row.pad + row.lease.matched for row in self._rows)
        return [max(0, past - row.pad) for row in self._rows]

    def _begin_life(self) -> None:
        """Look at the passes of the model from now on, until the cache ends."""
        hook = self._entry.register_forward_pre_hook(weakly(self._before), with_kwargs=True)
        self._hooks: list[RemovableHandle] = [hook]
        # Neither refers to the cache, so that one that is dropped without `close` ends as well.
        self._end_of_life = weakref.finalize(
            self, _let_go, self._rows, self._first.arrivals, self._hooks
        )
        self._end_of_life.atexit = False

    def _recover(self) -> None:
        """Wait for what is loaded, and compute what misses amid the matches."""
        self._recovery.fill(self._rows)

    def _await(self, layer: int) -> None:
        """Let a first pass wait for a layer."""
        self._step = self._first.wait(layer, self._step, self._past)

    def _arrive(self) -> None:
        """Wait for all that is still on its way, before anything but a first pass."""
        if self._first.arrivals:
            self._await(self._pool.layers - 1)
        self._first.finish()

    def _select(self, sources: Sequence[int]) -> None:
        self._open()
        self._arrive()
        self._rows[:] = select(self._rows, sources, self._executor.clock())

    def _before(
        self, entry: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before a pass of the model: if it is one with this cache, look at it, note its tokens."""
        # torch gives none to a hook that another thread adds or removes during this thread's pass.
        if kwargs is None:
            return None
        given = named(entry, args, kwargs)
        if given.get("past_key_values") is not self:
            return None
        self._step = self._ids = None  # of a pass that did not come to its end
        self._first.begin()
        seen = self._guard.check(given, self._past, [row.pad for row in self._rows])
        self._rope.check(seen.length, self._regime)
        self._ids = seen.ids[:, seen.repeats :]
        if not seen.repeats:
            return None
        check_repeated(self._rows, seen.ids[:, : seen.repeats])
        return (), remainder(given, seen.repeats)

    def _open(self) -> None:
        if not self._end_of_life.alive:
            raise ClosedError("the KvtrieCache is closed: open another for the same prompts")

    def _begin(self, batch: int, queries: int) -> Step:
        """Before layer 0: know the tokens, have room for them, know where they go."""
        require_same(self._executor.manager, self._model)
        if batch != len(self._rows):
            if batch % len(self._rows):
                raise ConfigError(f"a batch of {batch} does not continue {len(self._rows)} rows")
            self.batch_repeat_interleave(batch // len(self._rows))
        end = self._past + queries
        if end > self._room:
            self._arrive()
        self._reserve(end)
        if not self._first.arrivals:
            for row in self._rows:
                self._executor.wait(row.lease)
        self._fresh = self._tokens(batch, queries)
        step = step_of(self._rows, self._pool, self._past, queries)
        if self._first.shrunk():
            self._await(self._pool.layers - 1)
            self._reserve(end)
            step = step_of(self._rows, self._pool, self._past, queries)
        return step

    def _reserve(self, end: int) -> None:
        """Make room for columns up to `end`."""
        for row in self._rows:
            row.reserve(self._executor, end)

    def _end(self, queries: int) -> None:
        """After the last layer: the KV of the pass is written, so its tokens count."""
        self._arrive()
        for at, (row, new) in enumerate(zip(self._rows, self._fresh, strict=True)):
            self._rows[at] = row.commit(new, self._executor.clock())
        self._past += queries
        self._step = self._ids = None
        self._first.begin()
        self._executor.poll()

    def _tokens(self, batch: int, queries: int) -> list[NDArray[np.int64]]:
        """Per row, the tokens of the running pass whose KV the row does not hold yet."""
        if self._ids is None or self._ids.shape != (batch, queries):
            raise ConfigError(
                "KvtrieCache names KV by tokens: run the model that it was opened for, on input_ids"
            )
        return fresh_tokens(self._rows, self._first.holds(), self._ids, self._past)


def _let_go(rows: list[Row], arrivals: list[Arrival], hooks: list[RemovableHandle]) -> None:
    """Hold nothing any more: neither leases nor a place in the model."""
    for hook in hooks:
        hook.remove()
    for arrival in arrivals:
        arrival.abandon_elsewhere()
    for row in rows:
        row.lease.release()
    rows.clear()

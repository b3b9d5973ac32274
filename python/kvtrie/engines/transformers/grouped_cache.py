"""GroupedCache: the `KvtrieCache` of a model whose groups of layers are kept apart.

K and V of the first group are in the blocks of the first tier, as in any `KvtrieCache`. The windows
and states of a running row are tensors of the cache: a block gets them when it is committed, in the
slots that the commit names, and opening a cache reads them at the border of the match.

```text
match                       border of the prompt       pass of generate()
|---------------------------|--------------------------|-----
 blocks and windows read     passes computed at opening  live windows and states
```

Opening computes rows up to a common column: the last border of each prompt where layers keep
states, which are there only where a pass ends, otherwise the longest match.
Invariant: bytes are written to the slots of a commit before any other call can read them; a pass
ends at the last border of each row, so that each state is that of its block. Cost: in addition to
that of a `KvtrieCache`, per row the window and one block of each layer with a window, the states,
and a copy of what a commit names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from kvtrie.engines.transformers.cache import KvtrieCache
from kvtrie.engines.transformers.guard import named, no_gradients, remainder
from kvtrie.engines.transformers.hook import as_is, weakly
from kvtrie.engines.transformers.layer_trial import LayerCache, model_shape, no_cache, try_layers
from kvtrie.engines.transformers.window_layer import WindowLayer
from kvtrie.errors import ClosedError, ConfigError, InvariantError
from kvtrie.settings.scope import Scope

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from kvtrie.engines.transformers.rows import Row
    from kvtrie.tiers import Pool
    from kvtrie.transfer import Executor

__all__ = ["GroupedCache"]

_NOTHING = 2**32 - 1


class GroupedCache(KvtrieCache, groups=True):
    """The KV and states of a batch of sequences, held by one lease each; see `KvtrieCache`.

    A pass of several tokens over cached states is split where blocks end; its output is then that
    of the part after the last split. What takes tokens back (`crop`, assisted generation) is
    refused: no state is rolled back.

    Opening waits for all that is loaded: `use_layerwise` has no effect.

    Raises:
        ConfigError: as of `KvtrieCache`, or layers that keep something else than the groups of the
            manager's model say.
    """

    _amid = False  # in a pass: some layers have its tokens, others have not

    def _scope_of(self, scope: Scope | None) -> Scope:
        """The scope of the rows, without holes: passes go front to back."""
        return replace(super()._scope_of(scope) or Scope(), structure="leaf-only")

    def _by_layer(self, executor: Executor) -> bool:  # noqa: ARG002 - that of `KvtrieCache`
        return False

    def _tried(self, model: PreTrainedModel, pool: Pool) -> torch.nn.Module:
        """Compare what the layers of a model keep with the groups of the first tier."""
        self._pools: Pool = self._executor.pools[0]  # type: ignore[assignment]
        tried, mine = try_layers(model), self._executor.manager.model
        real = model_shape(model, fingerprint=mine.fingerprint)
        theirs = replace(mine, query_heads=real.query_heads, hidden=real.hidden)
        if real.identity() != theirs.identity() or mine.tp != 1:
            raise ConfigError(
                f"the layers of {type(model.base_model).__name__} keep {real.identity().strip()}, "
                f"the manager's model {theirs.identity().strip()}: kvtrie.engines.transformers."
                "model_shape(model) gives the first"
            )
        if model.device.type != pool.device.type:
            raise ConfigError(
                f"the model is on {model.device.type}, the first tier on {pool.device.type}"
            )
        entry = tried.entry()
        if entry is None:
            raise ConfigError(f"{type(model).__name__} has changed since it was tried")
        self._kept: tuple[LayerCache, ...] = tried.layers
        self._stepwise = tried.stepwise
        self._has_states = any(layer.states for layer in tried.layers)
        self._group_of = {
            layer: (number, index)
            for number, group in enumerate(real.groups)
            if group.kind != "state"
            for index, layer in enumerate(group.layers)
        }
        self._fresh_layers()
        return entry

    def _fresh_layers(self) -> None:
        """Layers without a token: states for transformers, windows of this cache.

        Raises:
            ConfigError: a transformers that has no layers without a cache.
        """
        nothing = no_cache()
        self.layers = [
            LinearAttentionLayer(number_of_states=1 + max(one.index for one in kept.states))
            if kept.states
            else nothing()
            for kept in self._kept
        ]
        block = self._pools.block_tokens
        self._windows = {
            layer: WindowLayer(self._kept[layer].window, block)
            for layer, (number, _) in self._group_of.items()
            if number > 0
        }

    def __len__(self) -> int:
        return len(self._kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = super().__deepcopy__(memo)
        made._take_layers([self], [range(len(self._rows))])  # noqa: SLF001 - one of its kind
        return made

    @property
    def is_compileable(self) -> bool:
        """False: the tensors of a cache that grows have no fixed addresses."""
        return False

    @property
    def is_sliding(self) -> list[bool]:
        """Whether each layer has a window."""
        return [kept.kind == "sliding" for kept in self._kept]

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer has states and no K and V."""
        return [kept.kind is None and bool(kept.states) for kept in self._kept]

    @property
    def is_dummy(self) -> list[bool]:
        """Whether each layer keeps nothing."""
        return [kept.kind is None and not kept.states for kept in self._kept]

    @as_is
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new K, V `(batch, heads, queries, dim)` of a layer; return those that it sees.

        Raises:
            ClosedError: the cache is closed.
            ConfigError: a pass that does not enter the model by the module that takes its tokens.
        """
        self._open()
        if self._step is None:
            raise ConfigError(
                "KvtrieCache names KV by tokens: run the model that it was opened for, on input_ids"
            )
        number, index = self._group_of[layer_idx]
        if number:
            return self._windows[layer_idx].update(key_states, value_states, self._past)
        self._step.write(index, key_states, value_states)
        return self._step.read(index)

    @as_is
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys that a pass over `query_length` columns sees, and the first of them."""
        self._open()
        window = self._windows.get(layer_idx)
        past = self._past if window is None else window.visible(self._past)
        return past + query_length, self._past - past

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to forget columns: windows and states of an earlier one are gone.

        Raises:
            ConfigError: it would forget some.
        """
        self._open()
        if tokens_to_remove:
            raise ConfigError(
                f"cannot crop by {tokens_to_remove} columns: windows and states of an earlier "
                "column are gone; open another KvtrieCache for the shorter sequence"
            )

    def activate_past_recording(self) -> None:
        """Refuse what takes tokens back.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "assisted generation takes tokens back, and windows and states of an earlier column "
            "are gone: generate without an assistant"
        )

    def _starts(self) -> list[int]:
        return [row.lease.matched for row in self._rows]  # opening computes rows by themselves

    def _begin_life(self) -> None:
        super()._begin_life()
        self._hooks.append(self._entry.register_forward_hook(weakly(self._after), with_kwargs=True))

    def _before(
        self, entry: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if kwargs is None:
            return None
        given = named(entry, args, kwargs)
        if given.get("past_key_values") is not self:
            return None
        if self._amid:
            raise ClosedError(
                "a pass over the KvtrieCache ended amid its layers: open another for the prompts"
            )
        no_gradients(entry, given)
        changed = super()._before(entry, args, kwargs)
        given = given if changed is None else changed[1]
        ids, past = self._ids, self._past
        if ids is None:
            raise InvariantError("a pass that was looked at has no tokens")
        if len(ids) > len(self._rows) and len(ids) % len(self._rows) == 0:
            self.batch_repeat_interleave(len(ids) // len(self._rows))
        end = past + ids.shape[1]
        if self._has_states and ids.shape[1] > 1:
            while (column := self._split(end)) < end:
                self._part(entry, given, ids, past, column)
        self._ids = ids[:, self._past - past :]
        self._step = self._begin(len(ids), end - self._past)
        self._amid = True
        return ((), remainder(given, self._past - past)) if self._past > past else changed

    def _part(
        self,
        entry: torch.nn.Module,
        given: dict[str, Any],
        ids: torch.Tensor,
        past: int,
        upto: int,
    ) -> None:
        """Run the next part of a pass that began at column `past`, up to another column."""
        start, end = self._past - past, upto - past
        part = {**given, "input_ids": ids[:, start:end], "use_cache": True}
        for name in ("position_ids", "cache_position"):
            if given.get(name) is not None:
                part[name] = given[name][..., start:end]
        mask = given.get("attention_mask")
        if mask is not None:
            part["attention_mask"] = mask[:, :upto]
        entry(**part)

    def _split(self, end: int) -> int:
        """The column at which the next part of a pass up to `end` must end.

        A state is that of its block only where a pass ends, so no part goes beyond a border for
        which a row has a slot.
        """
        if self._stepwise and self._past:
            return self._past + 1
        self._reserve(end)  # slots for the next blocks
        size, column = self._pools.block_tokens, end
        for row in self._rows:
            blocks = range(row.lease.tokens // size, (end - row.pad) // size)
            for number, pool in enumerate(self._pools.groups):
                if number and pool.state:
                    borders = [
                        row.pad + (place + 1) * size
                        for place, _ in _taken(row.lease.slots(0, number), blocks)
                    ]
                    column = min([column, *(one for one in borders if one > self._past)])
        return column

    def _after(
        self,
        _entry: torch.nn.Module,
        _args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: object = None,
    ) -> None:
        """After a pass; without keyword arguments, as `_before`, `kwargs` is the output."""
        if output is None:
            return
        if kwargs.get("past_key_values") is self and self._step is not None:
            self._end(self._step.keys - self._past)

    def _end(self, queries: int) -> None:
        """After a pass: its tokens count, and blocks get their windows and states."""
        end = self._past + queries
        for at, (row, new) in enumerate(zip(self._rows, self._fresh, strict=True)):
            self._rows[at] = self._commit(at, row, new, end)
        for window in self._windows.values():
            window.trim()
        self._past, self._amid = end, False
        self._step = self._ids = None
        self._executor.poll()

    def _commit(self, at: int, row: Row, new: NDArray[np.int64], end: int) -> Row:
        """Write the windows and states of the blocks that a row's new tokens fill, and commit."""
        executor, lease, size = self._executor, row.lease, self._pools.block_tokens
        executor.wait(lease)
        filled = range(lease.tokens // size, (lease.tokens + len(new)) // size)
        if filled:
            for number, pool in enumerate(self._pools.groups[1:], 1):
                for place, slot in _taken(lease.slots(0, number), filled):
                    self._write(number, pool, (place, slot), at, end)
        return row.commit(new, executor.clock())

    def _write(self, number: int, pool: Pool, block: tuple[int, int], at: int, end: int) -> None:
        """Write the window or state of a block of a row to a slot."""
        row, size, (place, slot) = self._rows[at], self._pools.block_tokens, block
        group = self._executor.manager.model.groups[number]
        if not pool.state:
            start = row.pad + place * size - end
            for index, layer in enumerate(group.layers):
                self._windows[layer].block(at, start, size, pool.view(slot * pool.layers + index))
            return
        if (place + 1) * size != end - row.pad:
            raise InvariantError(
                f"a commit at token {end - row.pad} wants the state at {(place + 1) * size}"
            )
        for tensor, part in self._state_parts(group.layers, pool.block(slot)):
            part.copy_(tensor[at].contiguous().view(-1).view(torch.uint8))

    def _state_parts(
        self, layers: Sequence[int], memory: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The states of some layers, each with its part of a slot's bytes."""
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        start = 0
        for layer in layers:
            states: Any = self.layers[layer]
            for state in self._kept[layer].states:
                kept = states.conv_states if state.kind == "conv" else states.recurrent_states
                parts.append((kept[state.index], memory[start : start + state.bytes]))
                start += state.bytes
        return parts

    def _recover(self) -> None:
        """Wait for what is loaded, read windows and states, and bring all rows to one column."""
        for row in self._rows:
            self._executor.wait(row.lease)
        columns = self._rows[0].pad + len(self._rows[0].tokens)
        goals = [row.pad + self._goal(row) for row in self._rows]
        column = max(goals)
        if len(set(goals)) > 1:
            column = max(column, *(row.pad for row in self._rows))
        if self._stepwise or column >= columns:
            column = columns - 1
        alone = [self._alone(row) for row in self._rows]
        try:
            for at, (one, row) in enumerate(zip(alone, self._rows, strict=True)):
                one._read_match()  # noqa: SLF001 - one of its kind, as below
                one._advance(column - row.pad)  # noqa: SLF001
                self._rows[at] = replace(one._rows[0], pad=row.pad)  # noqa: SLF001
        finally:
            for one in alone:
                one._leave()  # noqa: SLF001
        self._past = column
        self._take_layers(alone, [[0]] * len(alone))

    def _goal(self, row: Row) -> int:
        """The token up to which opening computes a row by itself."""
        borders = [one for one in row.lease.plan.resume if one < len(row.tokens)]
        return max([row.lease.tokens, *(borders if self._has_states else [])])

    def _alone(self, row: Row) -> Self:
        """A cache of one row without padding, over the same lease."""
        made = self._over([replace(row, pad=0)])
        made._past = row.lease.tokens  # noqa: SLF001 - one of its kind, as below
        made._fresh_layers()  # noqa: SLF001
        return made

    def _leave(self) -> None:
        """End a cache whose leases another one goes on with."""
        self._end_of_life.detach()
        for hook in self._hooks:
            hook.remove()

    def _read_match(self) -> None:
        """Read the windows and the state at the end of the only row's match."""
        (row,) = self._rows
        size = self._pools.block_tokens
        border = row.lease.tokens // size
        if not border:
            return
        model = self._executor.manager.model
        for number, (group, pool) in enumerate(zip(model.groups, self._pools.groups, strict=True)):
            if number == 0:
                continue
            if group.kind not in ("sliding", "state"):
                raise ConfigError(f"group {number} of kind {group.kind!r} is not supported here")
            count = 1 if pool.state else min(border, -(-(group.window - 1) // size))
            slots = row.lease.slots(0, number)[border - count : border].tolist()
            if _NOTHING in slots:
                raise InvariantError(f"group {number} lacks a block of {count} before {border}")
            if pool.state:
                self._load_state(group.layers, pool, slots[0])
            else:
                self._load_window(group.layers, pool, slots)

    def _load_window(self, layers: Sequence[int], pool: Pool, slots: Sequence[int]) -> None:
        size, device = self._pools.block_tokens, pool.device
        offsets = torch.arange(size, device=device).repeat(len(slots))
        for index, layer in enumerate(layers):
            units = torch.tensor(slots, device=device, dtype=torch.int64) * pool.layers + index
            keys, values = pool.gather(units.repeat_interleave(size), offsets)
            self._windows[layer].fill(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])

    def _load_state(self, layers: Sequence[int], pool: Pool, slot: int) -> None:
        memory = pool.block(slot)
        for layer in layers:
            self._make_states(layer, 1)
        for tensor, part in self._state_parts(layers, memory):
            flat = torch.empty_like(part)
            flat.copy_(part)  # a part may start where the tensor's type may not
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))

    def _make_states(self, layer: int, rows: int) -> None:
        """States of zeros, as after no token."""
        states: Any = self.layers[layer]
        for state in self._kept[layer].states:
            empty = torch.zeros((rows, *state.shape), dtype=state.dtype, device=self._pools.device)
            kind = f"{state.kind}_states"
            states.lazy_initialization(**{kind: empty}, state_idx=state.index)
            states.has_previous_state[state.index] = True

    def _advance(self, upto: int) -> None:
        """Compute the only row up to a token."""
        (row,) = self._rows
        start = self._past
        if upto <= start:
            return
        ids = torch.as_tensor(row.tokens[start:upto], device=self._pools.device)[None]
        positions = torch.arange(start, upto, device=ids.device)[None]
        with torch.no_grad():
            self._entry(input_ids=ids, position_ids=positions, past_key_values=self, use_cache=True)

    def _select(self, sources: Sequence[int]) -> None:
        super()._select(sources)
        self._take_layers([self], [sources])

    def _take_layers(self, caches: Sequence[GroupedCache], rows: Sequence[Sequence[int]]) -> None:
        """Take the windows and states of rows of caches, one after another."""
        layers, windows = [list(one.layers) for one in caches], [one._windows for one in caches]  # noqa: SLF001
        device, past = self._pools.device, self._past
        picks = [torch.tensor(list(each), device=device, dtype=torch.int64) for each in rows]
        self._fresh_layers()
        if not past:
            return
        for layer, window in self._windows.items():
            window.join([each[layer] for each in windows], picks)
        total = sum(len(each) for each in picks)
        for layer, kept in enumerate(self._kept):
            if not kept.states:
                continue
            self._make_states(layer, total)
            states: Any = self.layers[layer]
            for state in kept.states:
                name = f"{state.kind}_states"
                found = [
                    _picked(getattr(each[layer], name)[state.index], pick, state.shape)
                    for each, pick in zip(layers, picks, strict=True)
                ]
                made = getattr(states, name)[state.index]
                made.copy_(torch.cat([_zeros(one, made) for one in found]))


def _taken(table: NDArray[np.uint32], blocks: range) -> list[tuple[int, int]]:
    """The blocks of a range that have a slot in a block table, with their slots."""
    slots = table[blocks.start : blocks.stop].tolist()
    return [row for row in zip(blocks, slots, strict=False) if row[1] != _NOTHING]


def _picked(
    tensor: torch.Tensor | None, pick: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor | tuple[int, ...]:
    """Rows of a state; of one without a token, the shape of zeros."""
    return (len(pick), *shape) if tensor is None else tensor.index_select(0, pick)


def _zeros(found: torch.Tensor | tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros(found) if isinstance(found, tuple) else found

"""States: recurrent states of running rows, in the cache layers of transformers.

A pass leaves only the state at its end. Passes therefore end at each block border with a slot, and
the commit copies the state to the block before the border.
Invariant: a slot has the state after its block. Cost: a copy per committed slot.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvtrie.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtrie.engines.transformers.group_blocks import GroupBlocks
    from kvtrie.engines.transformers.layer_trial import LayerState, Tried
    from kvtrie.engines.transformers.rows import Row

__all__ = ["States"]

_NAMES = ("conv_states", "recurrent_states")


class States:
    """The states of a batch of rows.

    Args:
        groups: the groups of layers with states.
        tried: cache contents of each layer.
        layers: empty layers of a transformers cache.

    Attributes:
        read_late: called with a layer before its first use, if its states are not yet read.
        late: layers with states not yet read, with their group and index in it.
    """

    def __init__(self, groups: Sequence[GroupBlocks], tried: Tried, layers: Sequence[Any]) -> None:
        self._groups, self._tried, self._layers = groups, tried, layers
        self.read_late: Callable[[int], object] = lambda _: None
        self.late: dict[int, tuple[GroupBlocks, int]] = {}

    def goal(self, row: Row, tokens: int) -> int:
        """Return the token up to which opening computes a row with a match of `tokens`.

        A repeat of the prompt can resume there.
        """
        return max([tokens, *(one for one in row.lease.plan.resume if one < len(row.tokens))])

    @property
    def stepwise(self) -> bool:
        """Whether a pass over states is limited to one token."""
        return self._tried.stepwise

    def stop(self, rows: Sequence[Row], past: int, end: int) -> int:
        """Return the column for splitting a pass from `past` to `end`, `end` for no split."""
        if self.stepwise and past:
            return past + 1
        borders = [end]
        for group in self._groups:
            size = group.pool.block_tokens
            for row in rows:
                blocks = range(row.lease.tokens // size, (end - row.pad) // size)
                ends = (row.pad + (place + 1) * size for place, _ in group.taken(row, blocks))
                borders += [one for one in ends if one > past]
        return min(borders)

    def expect(self) -> None:
        """Begin with a row, and read the states of each layer on first use."""
        for group in self._groups:
            for at, layer in enumerate(group.layers):
                for state in self._tried.layers[layer].states:
                    empty = torch.zeros((1, *state.shape), dtype=state.dtype)
                    self._put(layer, state, empty.to(group.pool.device))
                kept, read_late = self._layers[layer], partial(self.read_late, layer)
                for name in _NAMES:
                    setattr(kept, name, _Late(kept, name, read_late))
                self.late[layer] = group, at

    def read(self, layer: int, row: Row, tokens: int) -> None:
        """Read the states of a layer after `tokens` of the only row, as `Windows.read`."""
        group, index = self.late[layer]
        self._have(layer)
        for slot in group.last(row, tokens):
            for state, part in self._parts(group, index, slot):
                flat = torch.empty_like(part)
                flat.copy_(part)  # a part may be misaligned for the tensor's type
                self._put(layer, state, flat.view(state.dtype).view(1, *state.shape))

    def adopt(self, other: States) -> None:
        """Take layers not yet read from the states of a different batch."""
        for layer in self.late:
            self._have(layer)
            for state in self._tried.layers[layer].states:
                tensor = other._tensors(layer, state)[state.index]
                if tensor is not None:
                    self._put(layer, state, tensor)
        self.late = {}

    def write(self, at: int, row: Row, filled: range, end: int) -> None:
        """Write states to the slots of blocks filled by a pass, as `Windows.write`."""
        for group in self._groups:
            for place, slot in group.taken(row, filled):
                border = (place + 1) * group.pool.block_tokens
                if border != end - row.pad:
                    raise InvariantError(
                        f"a commit at token {end - row.pad} wants the state at {border}"
                    )
                for index, layer in enumerate(group.layers):
                    for state, part in self._parts(group, index, slot):
                        mine = self._tensors(layer, state)[state.index]
                        if mine is None:
                            raise InvariantError(f"layer {layer} has no state after a pass")
                        part.copy_(mine[at].contiguous().view(-1).view(torch.uint8))

    def take(self, others: Sequence[States], rows: Sequence[Sequence[int]]) -> None:
        """Concatenate selected rows of several batches. States before any token are zeros."""
        for layer, kept in enumerate(self._tried.layers):
            for state in kept.states:
                found = [one._tensors(layer, state)[state.index] for one in others]  # noqa: SLF001
                like = next((tensor for tensor in found if tensor is not None), None)
                if like is None:
                    continue
                parts = [
                    like.new_zeros((len(pick), *state.shape)) if tensor is None else tensor[[*pick]]
                    for tensor, pick in zip(found, rows, strict=True)
                ]
                self._put(layer, state, torch.cat(parts))

    def _parts(
        self, group: GroupBlocks, index: int, slot: int
    ) -> Iterator[tuple[LayerState, torch.Tensor]]:
        """Yield the states of a group's layer, each with its part of a slot's bytes."""
        kept = self._tried.layers[group.layers[index]]
        start = index * kept.state_bytes
        for state in kept.states:
            yield state, group.pool.block(slot)[start : start + state.bytes]
            start += state.bytes

    def _have(self, layer: int) -> None:
        """Make a layer use its tensors directly, without reading on first use."""
        kept = self._layers[layer]
        for name in _NAMES:
            setattr(kept, name, dict(getattr(kept, name)))

    def _tensors(self, layer: int, state: LayerState) -> dict[int, torch.Tensor | None]:
        """Return the states of a layer of the kind of `state`, by index."""
        return getattr(self._layers[layer], f"{state.kind}_states")

    def _put(self, layer: int, state: LayerState, tensor: torch.Tensor) -> None:
        """Set a state `(rows, ...)` of a layer."""
        layers = self._layers[layer]
        layers.lazy_initialization(**{f"{state.kind}_states": tensor}, state_idx=state.index)
        layers.has_previous_state[state.index] = True
        self._tensors(layer, state)[state.index] = tensor


class _Late(dict[int, Any]):
    """Tensors of a layer, read on first use."""

    def __init__(self, layer: Any, name: str, read: Callable[[], object]) -> None:  # noqa: ANN401
        super().__init__(getattr(layer, name))
        self._layer, self._name, self._read = layer, name, read

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 - a tensor or None
        self._read()
        return getattr(self._layer, self._name)[index]

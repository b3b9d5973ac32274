"""States: recurrent states of running rows, in the layers of transformers that compute with them.

A pass leaves the state at its end only. So it ends at each border for which a row has a slot, and
the state is then copied to the block before that border when its tokens are committed.
Invariant: the state in a slot is that after its block. Cost: a copy of what a commit names.
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
        groups: the groups of layers that have some.
        tried: what the layers of the model keep.
        layers: the layers of a cache of transformers, without a token.

    Attributes:
        settle: called with a layer that is still to be read, before its states are used.
        late: layers whose states are still to be read, with their group and place in it.
    """

    def __init__(self, groups: Sequence[GroupBlocks], tried: Tried, layers: Sequence[Any]) -> None:
        self._groups, self._tried, self._layers = groups, tried, layers
        self.settle: Callable[[int], object] = lambda _: None
        self.late: dict[int, tuple[GroupBlocks, int]] = {}

    def goal(self, row: Row, tokens: int) -> int:
        """The token up to which opening computes a row with a match of some tokens.

        A repeat of the row goes on there.
        """
        return max([tokens, *(one for one in row.lease.plan.resume if one < len(row.tokens))])

    @property
    def stepwise(self) -> bool:
        """Whether a pass over states must have one token."""
        return self._tried.stepwise

    def stop(self, rows: Sequence[Row], past: int, end: int) -> int:
        """The column at which a pass from `past` to `end` must end before it goes on."""
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
        """Begin with a row whose states are read layer by layer, when each layer asks for them."""
        for group in self._groups:
            for at, layer in enumerate(group.layers):
                for state in self._tried.layers[layer].states:
                    empty = torch.zeros((1, *state.shape), dtype=state.dtype)
                    self._put(layer, state, empty.to(group.pool.device))
                kept, settle = self._layers[layer], partial(self.settle, layer)
                for name in _NAMES:
                    setattr(kept, name, _Late(kept, name, settle))
                self.late[layer] = group, at

    def read(self, layer: int, row: Row, tokens: int) -> None:
        """Read the states of a layer after some tokens of the only row, as `Windows.read`."""
        group, index = self.late[layer]
        self._have(layer)
        for slot in group.last(row, tokens):
            for state, part in self._parts(group, index, slot):
                flat = torch.empty_like(part)
                flat.copy_(part)  # a part may start where the tensor's type may not
                self._put(layer, state, flat.view(state.dtype).view(1, *state.shape))

    def adopt(self, other: States) -> None:
        """Take the layers that are still to be read from another cache."""
        for layer in self.late:
            self._have(layer)
            for state in self._tried.layers[layer].states:
                tensor = other._tensors(layer, state)[state.index]
                if tensor is not None:
                    self._put(layer, state, tensor)
        self.late = {}

    def write(self, at: int, row: Row, filled: range, end: int) -> None:
        """Write states to the slots of the blocks that a pass has filled, as `Windows.write`."""
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
        """Take rows of the states of caches, one after another; those without a token are zeros."""
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
        """The states of a layer of a group, each with its part of a slot's bytes."""
        kept = self._tried.layers[group.layers[index]]
        start = index * kept.state_bytes
        for state in kept.states:
            yield state, group.pool.block(slot)[start : start + state.bytes]
            start += state.bytes

    def _have(self, layer: int) -> None:
        """Let a layer use its tensors as they are."""
        kept = self._layers[layer]
        for name in _NAMES:
            setattr(kept, name, dict(getattr(kept, name)))

    def _tensors(self, layer: int, state: LayerState) -> dict[int, torch.Tensor | None]:
        """The states of one kind of a layer, by their number."""
        return getattr(self._layers[layer], f"{state.kind}_states")

    def _put(self, layer: int, state: LayerState, tensor: torch.Tensor) -> None:
        """Let a layer go on from a state `(rows, ...)`."""
        layers = self._layers[layer]
        layers.lazy_initialization(**{f"{state.kind}_states": tensor}, state_idx=state.index)
        layers.has_previous_state[state.index] = True
        self._tensors(layer, state)[state.index] = tensor


class _Late(dict[int, Any]):
    """Tensors of a layer that are read before the first of them is used."""

    def __init__(self, layer: Any, name: str, settle: Callable[[], object]) -> None:  # noqa: ANN401
        super().__init__(getattr(layer, name))
        self._layer, self._name, self._settle = layer, name, settle

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 - a tensor or None
        self._settle()
        return getattr(self._layer, self._name)[index]

"""Many policies in one pass of a model: each has a batch row.

The context that fills the cache is read once for all policies; after it each row is a policy's.
Every projection then has one product for all policies.
Invariant: a policy's rows see what they would see alone. Cost: attention of each policy, the
model's other layers once for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvtrie.selective import CacheSettings, SelectiveCache, make_cache
from kvtrie.selective.buffers import WorkingCopy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from kvtrie.selective import KVCacheWithBuffers

__all__ = ["Beside", "Member"]

Member = tuple[str, dict[str, object]]
"""A cache's name, `{policy}-{buffers}`, and its arguments."""


class _Layer:
    """One layer's caches of all members: batch row i is member i's."""

    evicted = True  # as `crop` must not be asked of it
    first = None
    span = None  # no window

    def __init__(self, members: Sequence[KVCacheWithBuffers]) -> None:
        self.members = members
        self.buffers = self

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The rows of each; one row is the start of all."""
        if len(key) == 1:
            [out, *_] = [each.forward(query, key, value) for each in self.members]
            return out
        parts = zip(self.members, *(x.split(1) for x in (query, key, value)), strict=True)
        return torch.cat([each.forward(*new) for each, *new in parts])

    @property
    def input_pos(self) -> int:
        """Tokens that were given."""
        return self.members[0].input_pos

    @property
    def cache_length(self) -> int:
        """Rows of each."""
        return self.members[0].cache_length

    @property
    def largest_step(self) -> int:
        """Tokens that the next step may have."""
        return self.step_at(self.input_pos)

    def step_at(self, input_pos: int) -> int:
        """Tokens that a step may have after `input_pos` tokens."""
        return min(each.step_at(input_pos) for each in self.members)

    def pad(self, first: torch.Tensor | None) -> None:
        """Take no padding."""
        assert first is None or not first.any()

    def deallocate(self) -> None:
        """Give all memory back."""
        for each in self.members:
            each.buffers.deallocate()

    def __setattr__(self, name: str, value: object) -> None:
        if name == "scale":
            for each in self.members:
                each.scale = value  # pyright: ignore[reportAttributeAccessIssue]
        else:
            super().__setattr__(name, value)


class Beside(SelectiveCache):
    """A cache of as many batch rows as there are members, after the step that fills it.

    Args:
        model: see `SelectiveCache`.
        members: the policy of each batch row.
        rows: of every layer.
        chunk: tokens of each step after the first.
    """

    def __init__(
        self, model: PreTrainedModel, members: Sequence[Member], rows: int, chunk: int
    ) -> None:
        super().__init__(model, CacheSettings("dense-default", rows, chunk))
        one_cache: Any = self.caches[0]
        shape = {
            "batch": 1,
            "kv_heads": one_cache.kv_heads,
            "query_heads": one_cache.query_heads,
            "cache_length": rows,
            "head_dim": one_cache.head_dim,
            "dtype": one_cache.place.dtype,
        }
        copies = [WorkingCopy() for _ in members]
        layers: Any = self.caches
        layers[:] = [
            _Layer(
                [
                    make_cache(name, working=working, **shape, **given)
                    for (name, given), working in zip(members, copies, strict=True)
                ]
            )
            for _ in layers
        ]
        self._members = len(members)

    def logits(self, tokens: Sequence[int], *, keep: int = 0) -> torch.Tensor:
        """Read tokens; logits `(members, keep, vocabulary)` of the last ones, or of all."""
        start, at = self.get_seq_length(), 0
        parts: list[torch.Tensor] = []
        for step in self.steps(start + len(tokens)):
            ids = torch.tensor([tokens[at : at + step]])
            if start + at:
                ids = ids.expand(self._members, -1)
            model: Any = self._model
            out = model(ids, past_key_values=self, logits_to_keep=keep).logits
            parts.append(out.expand(self._members, -1, -1))
            self._layers.batch = self._members
            at += step
        return torch.cat(parts, dim=1)[:, -keep:]  # the last ones may come of several steps

    def states(self) -> list[Any]:
        """Return copies of all that the next step depends on, for `back`."""
        states = [each.state() for layer in self.caches for each in _members(layer)]
        return [
            ({name: one.clone() for name, one in tensors.items()}, numbers)
            for tensors, numbers in states
        ]

    def back(self, states: Sequence[Any]) -> None:
        """Restore states that `states` returned."""
        every = [each for layer in self.caches for each in _members(layer)]
        for each, (tensors, numbers) in zip(every, states, strict=True):
            each.load_state({name: one.clone() for name, one in tensors.items()}, numbers)


def _members(layer: Any) -> Sequence[KVCacheWithBuffers]:
    return layer.members

"""Parts: what the rows of a batch keep in groups of layers after the first, as tensors.

A model whose groups are kept apart has `Windows`, `States` or both; any other has none, and then
every call does nothing.
Invariant: `layers` are those that a cache of transformers itself would have. Cost: that of the
windows and states.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kvtrie.engines.transformers.group_blocks import GroupBlocks
from kvtrie.engines.transformers.states import States
from kvtrie.engines.transformers.windows import Windows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtrie.engines.transformers.layer_trial import Tried
    from kvtrie.engines.transformers.rows import Row
    from kvtrie.transfer import Executor

__all__ = ["Parts"]


class Parts:
    """The windows and states of a batch.

    Args:
        executor: its first tier has the groups.
        tried: what the layers of the model keep, if its groups are kept apart.
        settle: called with states and a layer before they are used, while they are still to be
            read.

    Attributes:
        layers: the layers of a cache of transformers, some of which have the states.
        windows: of layers that have one; None for a model without.
        states: recurrent states; None for a model without.
        last: the last layer of a group after the first; -1 without one.
    """

    def __init__(
        self, executor: Executor, tried: Tried | None, settle: Callable[[States, int], object]
    ) -> None:
        self.layers: list[Any] = []
        self.windows: Windows | None = None
        self.states: States | None = None
        self.last = -1
        if tried is None:
            return
        self.layers = [kept.empty() for kept in tried.layers]
        groups = GroupBlocks.of(executor)
        self.last = max(group.layers[-1] for group in groups)
        if windowed := [group for group in groups if group.window]:
            self.windows = Windows(windowed)
        if recurrent := [group for group in groups if not group.window]:
            self.states = States(recurrent, tried, self.layers)
            self.states.settle = partial(settle, self.states)

    def __iter__(self) -> Iterator[Windows | States]:
        return (part for part in (self.windows, self.states) if part is not None)

    def __bool__(self) -> bool:
        return self.windows is not None or self.states is not None

    def take(self, others: Sequence[Parts], rows: Sequence[Sequence[int]]) -> None:
        """Take rows of the parts of batches, one after another."""
        for mine, *theirs in zip(self, *others, strict=True):
            mine.take(theirs, rows)

    def expect(self) -> None:
        """Begin with a row whose tensors are read layer by layer, as each layer has come."""
        for part in self:
            part.expect()

    def adopt(self, other: Parts) -> None:
        """Take the layers that are still to be read from another batch."""
        if self.windows is not None and other.windows is not None:
            self.windows.adopt(other.windows)
        if self.states is not None and other.states is not None:
            self.states.adopt(other.states)

    def write(self, at: int, row: Row, filled: range, end: int) -> None:
        """Write to the slots of the blocks that a pass has filled, as `Windows.write`."""
        for part in self if filled else ():
            part.write(at, row, filled, end)

    def trim(self) -> None:
        """Forget what neither a query nor a commit will need."""
        if self.windows is not None:
            self.windows.trim()

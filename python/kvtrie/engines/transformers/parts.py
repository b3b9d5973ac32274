"""Parts: tensors of a batch's rows for groups of layers after the first.

A model with separate groups has `Windows`, `States` or both. Otherwise every call does nothing.
Invariant: `layers` are the layers of a plain transformers cache. Cost: as `Windows` and `States`.
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
        tried: cache contents of each layer, None for a model with a single group.
        read_part: called with the states and a layer before the first use of the layer, if its
            states are not yet read.

    Attributes:
        layers: the layers of a transformers cache. Some hold the states.
        windows: the windows, None for a model without windows.
        states: recurrent states, None for a model without states.
        last: the last layer of all groups after the first, -1 without groups.
    """

    def __init__(
        self, executor: Executor, tried: Tried | None, read_part: Callable[[States, int], object]
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
            self.states.read_late = partial(read_part, self.states)

    def __iter__(self) -> Iterator[Windows | States]:
        return (part for part in (self.windows, self.states) if part is not None)

    def __bool__(self) -> bool:
        return self.windows is not None or self.states is not None

    def take(self, others: Sequence[Parts], rows: Sequence[Sequence[int]]) -> None:
        """Concatenate selected rows of the parts of several batches."""
        for mine, *theirs in zip(self, *others, strict=True):
            mine.take(theirs, rows)

    def expect(self) -> None:
        """Begin with a row and read its tensors layer by layer, as loads arrive."""
        for part in self:
            part.expect()

    def adopt(self, other: Parts) -> None:
        """Take layers not yet read from the parts of a different batch."""
        if self.windows is not None and other.windows is not None:
            self.windows.adopt(other.windows)
        if self.states is not None and other.states is not None:
            self.states.adopt(other.states)

    def write(self, at: int, row: Row, filled: range, end: int) -> None:
        """Write to the slots of blocks filled by a pass, as `Windows.write`."""
        for part in self if filled else ():
            part.write(at, row, filled, end)

    def trim(self) -> None:
        """Drop columns not needed by later queries and commits."""
        if self.windows is not None:
            self.windows.trim()

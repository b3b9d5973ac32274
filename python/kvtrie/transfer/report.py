"""MoveReport: the news of some moves, for a manager in this process or in another one.

A `Sink` takes them where the manager is; `Progress` goes to a callback of the user.
Invariant: the fields of a report are the arguments of `BlockManager.complete`. Cost: one tuple per
piece of news.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie import Moves
    from kvtrie.transfer.job import Job

__all__ = ["MoveReport", "Progress", "Sink"]


class MoveReport(NamedTuple):
    """News of some moves, with the arguments of `BlockManager.complete`; it can be pickled.

    Attributes:
        ids: the moves, which are equally far.
        layers_done: the first layers of each that are copied; None once the moves have ended.
        error: why they failed; None while all is well.
        hung: they failed at the deadline and still run: a second report follows when they end.
        cancelled: they failed and never started.
    """

    ids: tuple[int, ...]
    layers_done: int | None = None
    error: str | None = None
    hung: bool = False
    cancelled: bool = False

    @property
    def ok(self) -> bool:
        """Whether the bytes are there."""
        return self.error is None


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of some moves, for a callback.

    Attributes:
        ids: the moves, which are equally far.
        layers_done: layers that are copied, the first ones of each.
        layers: layers of each move.
        error: why they failed; None while all is well.
        pending: moves of the runner that have not ended.
    """

    ids: tuple[int, ...]
    layers_done: int
    layers: int
    error: str | None
    pending: int


class Sink(Protocol):
    """The manager's side of a runner in the manager's own process.

    Every call comes from within the runner's section. Any exception breaks the runner.
    """

    def more(self) -> Moves:
        """Moves that the manager hands out now."""
        ...

    def began(self, job: Job, now: int) -> None:
        """A job starts to copy."""
        ...

    def ended(self, job: Job, now: int, *, brought: int) -> None:
        """A job has ended and brought so many bytes; 0 if it failed."""
        ...

    def report(
        self,
        ids: Sequence[int] | NDArray[np.uint64],
        now: int,
        *,
        layers_done: int | None,
        error: str | None,
        hung: bool,
        cancelled: bool,
    ) -> None:
        """News of moves, as `MoveReport` has them."""
        ...

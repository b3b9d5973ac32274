"""MoveReport: the news of some moves, for a manager in this process or in another one.

A `Sink` takes them where the manager is; `Progress` goes to a callback of the user.
Invariant: the fields of a report are the arguments of `BlockManager.complete`. Cost: one tuple per
piece of news; as bytes a few tens per move.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie import Moves
    from kvtrie.transfer.job import Job

__all__ = ["MoveReport", "Progress", "Sink"]

_VERSION = 1


class MoveReport(NamedTuple):
    """News of some moves, with the arguments of `BlockManager.complete`; it can be pickled.

    Attributes:
        ids: the moves, which are equally far.
        layers_done: the first layers of each that are copied; None once the moves have ended.
        error: why they failed; None while all is well.
        hung: they failed at the deadline and still run: a second report follows when they end.
        cancelled: they failed and never started.
        group: layer group of the moves; 0 until there are several.
    """

    ids: tuple[int, ...]
    layers_done: int | None = None
    error: str | None = None
    hung: bool = False
    cancelled: bool = False
    group: int = 0

    @property
    def ok(self) -> bool:
        """Whether the bytes are there."""
        return self.error is None

    @staticmethod
    def to_bytes(reports: Sequence[MoveReport]) -> bytes:
        """Reports as bytes, for the process that has the manager."""
        return json.dumps([_VERSION, *reports], separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes) -> list[MoveReport]:
        """What `to_bytes` gave.

        Raises:
            ConfigError: bytes of another version, cut short, or no reports.
        """
        try:
            version, *rows = json.loads(data.decode())
            if version != _VERSION:
                raise ConfigError(f"reports of version {version}, {_VERSION} wanted")
            return [_report(row) for row in rows]
        except (ValueError, TypeError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{len(data)} bytes are no reports of moves: {error}") from error


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

    def more(self, shared: int) -> Moves:
        """Moves to carry out now; stores of at most `shared` blocks to a remote tier are new."""
        ...

    def dropped(self) -> int:
        """Stores to a remote tier that eviction has dropped so far."""
        ...

    def began(self, job: Job, now: int) -> None:
        """A job starts to copy."""
        ...

    def ended(self, job: Job, now: int, *, brought: int) -> None:
        """A job has ended and copied `brought` bytes; 0 if it failed."""
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


def _report(row: Any) -> MoveReport:  # noqa: ANN401 - whatever the bytes say
    ids, layers_done, error, hung, cancelled, at = row
    whole = [*ids, at, *([] if layers_done is None else [layers_done])]
    if {*map(type, whole)} != {int} or min(whole) < 0:
        raise ConfigError(f"a report of moves {ids!r} up to layer {layers_done!r}")
    if not (error is None or isinstance(error, str)) or {type(hung), type(cancelled)} != {bool}:
        raise ConfigError(f"a report with the error {error!r}, hung {hung!r}, {cancelled!r}")
    return MoveReport(tuple(ids), layers_done, error, hung, cancelled, at)

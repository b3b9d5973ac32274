"""MoveReport: a progress or final report of moves, for a manager in any process.

A `Sink` receives reports in the manager's process. `Progress` goes to a user callback.
Invariant: the fields of a report are the arguments of `BlockManager.complete`.
Cost: a tuple per report. Serialized, a few tens of bytes per move.
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
    """Report of some moves, with the arguments of `BlockManager.complete`. It can be pickled.

    Attributes:
        ids: the moves, all equally far.
        layers_done: number of leading layers copied, or None once the moves have ended.
        error: the reason of a failure, or None.
        hung: the moves failed at the deadline and still run. A second report follows at their end.
        cancelled: the moves failed without starting.
        group: layer group of the moves, or 0 until several groups exist.
    """

    ids: tuple[int, ...]
    layers_done: int | None = None
    error: str | None = None
    hung: bool = False
    cancelled: bool = False
    group: int = 0

    @property
    def ok(self) -> bool:
        """Whether the moves have no error."""
        return self.error is None

    @staticmethod
    def to_bytes(reports: Sequence[MoveReport]) -> bytes:
        """Serialize reports for the manager's process."""
        return json.dumps([_VERSION, *reports], separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes) -> list[MoveReport]:
        """Parse the result of `to_bytes`.

        Raises:
            ConfigError: the bytes have a different version, are truncated, or contain no reports.
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
        ids: the moves, all equally far.
        layers_done: number of leading layers copied.
        layers: layers of each move.
        error: the reason of a failure, or None.
        pending: unended moves of the runner.
    """

    ids: tuple[int, ...]
    layers_done: int
    layers: int
    error: str | None
    pending: int


class Sink(Protocol):
    """Interface of the manager for a runner in the same process.

    Every call is made in the runner's section. Any exception breaks the runner.
    """

    def more(self, shared: int) -> Moves:
        """Return new moves, with stores of at most `shared` blocks to a remote tier."""
        ...

    def dropped(self) -> int:
        """Return the number of stores to a remote tier dropped by eviction so far."""
        ...

    def began(self, job: Job, now: int) -> None:
        """Record the start of a job's copy."""
        ...

    def ended(self, job: Job, now: int, *, brought: int) -> None:
        """Record the end of a job and the bytes copied, 0 after a failure."""
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
        """Receive a report of moves, with the fields of `MoveReport`."""
        ...


def _report(row: Any) -> MoveReport:  # noqa: ANN401 - unchecked JSON
    ids, layers_done, error, hung, cancelled, at = row
    whole = [*ids, at, *([] if layers_done is None else [layers_done])]
    if {*map(type, whole)} != {int} or min(whole) < 0:
        raise ConfigError(f"a report of moves {ids!r} up to layer {layers_done!r}")
    if not (error is None or isinstance(error, str)) or {type(hung), type(cancelled)} != {bool}:
        raise ConfigError(f"a report with the error {error!r}, hung {hung!r}, {cancelled!r}")
    return MoveReport(tuple(ids), layers_done, error, hung, cancelled, at)

"""RemoteStore: the operations that a back end of the `remote` tier implements.

A back end moves bytes by name and makes no decision: names, checksums, beliefs and the circuit
breaker are in `RemoteStorage`. Invariant: an operation returns one result per block, in the given
order, and raises for no store that fails. Cost: a call per batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["OUTCOMES", "Get", "Outcome", "Put", "RemoteStore", "Result"]

Outcome: TypeAlias = Literal["ok", "missing", "damaged", "late", "unreachable", "full", "refused"]

OUTCOMES: tuple[Outcome, ...] = (
    "ok",
    "missing",
    "damaged",
    "late",
    "unreachable",
    "full",
    "refused",
)
"""Every outcome.

Done; no such value; a value that is not what was written; the deadline passed; the store did not
answer or failed; it has no room; it or its settings forbid the operation.
"""


class Result(NamedTuple):
    """The result of an operation on one block.

    Attributes:
        outcome: the outcome.
        reason: the reason, for people; without secrets.
    """

    outcome: Outcome
    reason: str = ""


class Get(NamedTuple):
    """A block to read.

    Attributes:
        name: 32 bytes.
        layers: the range of layers.
        header: destination of the header, uint8.
        memory: destination of the layers, uint8 `(layers, bytes)`: pool memory.
    """

    name: bytes
    layers: tuple[int, int]
    header: NDArray[np.uint8]
    memory: NDArray[np.uint8]


class Put(NamedTuple):
    """A block to write.

    Attributes:
        name: 32 bytes.
        header: its header.
        memory: all of its layers, uint8 `(layers, bytes)`: pool memory.
    """

    name: bytes
    header: bytes
    memory: NDArray[np.uint8]


@runtime_checkable
class RemoteStore(Protocol):
    """A shared store of values by name.

    A value is a header of fixed length, then the layers at fixed offsets; see
    `kvtrie._kvtrie.ValueFormat`. `deadline` is for the whole call, in nanoseconds of
    `time.monotonic_ns()`: blocks that are not done by then are `late`. Calls come from several
    threads at once.
    """

    def exists_many(self, names: Sequence[bytes], deadline: int) -> list[Result]:
        """Whether there are values of these names: `ok` or `missing`."""
        ...

    def get_many(self, rows: Sequence[Get], deadline: int) -> list[Result]:
        """Read headers and layers; a value of another length is `damaged`."""
        ...

    def put_many(self, rows: Sequence[Put], deadline: int) -> list[Result]:
        """Write values that are absent; one that is there already is `ok`."""
        ...

    def remove_many(self, names: Sequence[bytes], deadline: int) -> list[Result]:
        """Remove values that were found damaged, or that a check wrote."""
        ...

    def close(self) -> None:
        """Release connections and files."""
        ...

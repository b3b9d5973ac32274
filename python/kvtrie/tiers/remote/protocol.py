"""RemoteStore: the operations of a back end of the `remote` tier.

A back end copies bytes by name and makes no decision: names, checksums, beliefs and the circuit
breaker are in `RemoteStorage`.
Invariant: an operation returns a result per block, in the given order, even for a failing store.
Cost: a call per batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
"""Every outcome, in this order.

Respectively: done, no value, a value different from the written value, the deadline passed, the
store did not answer or failed, the store has no room, the store or its settings forbid the
operation.
"""


class Result(NamedTuple):
    """The result of an operation on one block.

    Attributes:
        outcome: the outcome.
        reason: a readable reason, without secrets.
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
        arrived: verifies the read header and layers. Called by a back end that reads values one
            after another, so that the store sends the next value during the verification.
    """

    name: bytes
    layers: tuple[int, int]
    header: NDArray[np.uint8]
    memory: NDArray[np.uint8]
    arrived: Callable[[], None] = lambda: None


class Put(NamedTuple):
    """A block to write.

    Attributes:
        name: 32 bytes.
        header: its header.
        memory: all of its layers, uint8 `(layers, bytes)`, in pool memory.
    """

    name: bytes
    header: bytes
    memory: NDArray[np.uint8]


@runtime_checkable
class RemoteStore(Protocol):
    """A shared store of values by name.

    A value is a header of fixed length, then the layers at fixed offsets (see
    `kvtrie._kvtrie.ValueFormat`). `deadline` limits the whole call, in nanoseconds of
    `time.monotonic_ns()`: blocks not done by then are `late`. Several threads may call at once.
    """

    def exists_many(self, names: Sequence[bytes], deadline: int) -> list[Result]:
        """Check for values of these names: `ok` or `missing`."""
        ...

    def get_many(self, rows: Sequence[Get], deadline: int) -> list[Result]:
        """Read headers and layers. A value of a different length is `damaged`."""
        ...

    def put_many(self, rows: Sequence[Put], deadline: int) -> list[Result]:
        """Write absent values. A value already present is `ok`."""
        ...

    def remove_many(self, names: Sequence[bytes], deadline: int) -> list[Result]:
        """Remove damaged values, or values written by a check."""
        ...

    def close(self) -> None:
        """Release connections and files."""
        ...

"""Index: which machine has which blocks of a prompt, by a service that reads the engines' events.

Invariant: `match` returns by its deadline, and only machines that were added and not removed; an
answer that is late or wrong is no hit on any machine. Cost: one call of the service.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from kvtrie.cluster.back_ends import opened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Held", "Index", "open_index"]


class Held(NamedTuple):
    """Blocks of a prompt that a machine has, from its first one on, without a gap.

    The counts are cumulative: blocks on a lower tier continue those of the tiers above it, so the
    last one is what a request finds there.

    Attributes:
        gpu: blocks that are on GPU.
        host: blocks that are on GPU or in host memory.
        disk: blocks that are on any of the three.
    """

    gpu: int
    host: int
    disk: int


@runtime_checkable
class Index(Protocol):
    """A service that knows which machine has which blocks. Calls come from several threads."""

    def add(self, machine: int, *, events: str, replay: str | None = None) -> None:
        """Register a machine, whose events the service then reads.

        At a service that does not answer the machine is registered with a later call.

        Args:
            machine: its number, 0 or more.
            events: endpoint of its events as the service reaches it, "tcp://HOST:PORT".
            replay: endpoint of their replay; without one the service learns only of later events.

        Raises:
            ConfigError: a bad argument, or the service refuses the machine.
        """
        ...

    def remove(self, machine: int) -> None:
        """End a machine's registration; `match` does not return it any more.

        Raises:
            ConfigError: no such machine.
        """
        ...

    def match(
        self, tokens: Sequence[int] | NDArray[np.integer[Any]], *, deadline_s: float
    ) -> Mapping[int, Held]:
        """Return the blocks of a prompt that each machine has.

        Args:
            tokens: the prompt, `(tokens,)` of integers 0 to 2^32 - 1.
            deadline_s: seconds for the whole call, above 0.

        Returns:
            Blocks by machine; machines without any may be left out. Nothing without an answer in
            time.

        Raises:
            ConfigError: a bad argument.
        """
        ...


def open_index(kind: str, url: str, **options: Any) -> Index:  # noqa: ANN401 - the back end's own
    """Open an index by the name of its service.

    Args:
        kind: "dynamo", or the name of an entry point of the group `kvtrie.index`.
        url: where the service is.
        options: further arguments of the class.

    Raises:
        ConfigError: an unknown service, one that is no `Index`, or a bad argument.
    """
    own = {"dynamo": "kvtrie.cluster.dynamo_index:DynamoIndex"}
    return opened("kvtrie.index", kind, own, Index, url, **options)

"""Index: the machines' blocks of a prompt, from a service that reads the engines' events.

Invariant: `match` returns by its deadline, and returns only added machines. A late or invalid
answer is no hit on any machine. Cost: a call of the service.
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
    """Leading blocks of a prompt on a machine, without a gap.

    The counts are cumulative: blocks on a lower tier continue the blocks of the tiers above, so a
    request finds the last count.

    Attributes:
        gpu: blocks on GPU.
        host: blocks on GPU or in host memory.
        disk: blocks on any of the three tiers.
    """

    gpu: int
    host: int
    disk: int


@runtime_checkable
class Index(Protocol):
    """A service that knows the blocks of each machine. Calls come from several threads."""

    def add(self, machine: int, *, events: str, replay: str | None = None) -> None:
        """Register a machine. The service then reads its events.

        If the service does not answer, a later call registers the machine.

        Args:
            machine: its number, 0 or more.
            events: endpoint of its events as the service reaches it, "tcp://HOST:PORT".
            replay: endpoint of their replay. Without it the service learns only of later events.

        Raises:
            ConfigError: a bad argument, or the service refuses the machine.
        """
        ...

    def remove(self, machine: int) -> None:
        """End a machine's registration. `match` does not return it any more.

        Raises:
            ConfigError: an unknown machine.
        """
        ...

    def match(
        self, tokens: Sequence[int] | NDArray[np.integer[Any]], *, deadline_s: float
    ) -> Mapping[int, Held]:
        """Return the blocks of a prompt on each machine.

        Args:
            tokens: the prompt, `(tokens,)` of integers 0 to 2^32 - 1.
            deadline_s: seconds for the whole call, above 0.

        Returns:
            Blocks by machine, possibly without machines that have no blocks. Empty without an
            answer in time.

        Raises:
            ConfigError: a bad argument.
        """
        ...


def open_index(kind: str, url: str, **options: Any) -> Index:  # noqa: ANN401 - the back end's own
    """Open an index by the name of its service.

    Args:
        kind: "dynamo", or the name of an entry point of the group `kvtrie.index`.
        url: URL of the service.
        options: further arguments of the class.

    Raises:
        ConfigError: an unknown service, an object other than an `Index`, or a bad argument.
    """
    own = {"dynamo": "kvtrie.cluster.dynamo_index:DynamoIndex"}
    return opened("kvtrie.index", kind, own, Index, url, **options)

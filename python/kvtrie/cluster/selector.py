"""Selector: the machine of each request, from a service that weighs hits against load.

Invariant: `pick` returns a live machine by its deadline, whatever the service does. Cost: a call of
the service per request, and two more calls without waiting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvtrie.cluster.back_ends import opened

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Selector", "open_selector"]


@runtime_checkable
class Selector(Protocol):
    """A service for the choice of each request's machine. Calls come from several threads.

    A machine is live from `add` to `remove`, except while its last request ended with
    `failed=True`: then a single later request is its probe.
    """

    def add(self, machine: int, *, events: str, replay: str | None = None) -> None:
        """Register a machine and make it live. The service then reads its events.

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
        """End a machine's registration. No request is sent there any more.

        Raises:
            ConfigError: an unknown machine.
        """
        ...

    def pick(
        self,
        request_id: str,
        tokens: Sequence[int] | NDArray[np.integer[Any]],
        *,
        expected_output: int | None = None,
    ) -> int:
        """Choose the machine of a request: `done` has to follow.

        Args:
            request_id: the caller's name of the request.
            tokens: the prompt, `(tokens,)` of integers 0 to 2^32 - 1.
            expected_output: expected number of tokens of the answer.

        Returns:
            The machine: the service's choice, or without an answer in time the machine with the
            fewest requests by the selector's own counts, then the lowest number.

        Raises:
            ConfigError: a bad argument, or an unfinished request of the same id.
            NoMachineError: no machine is live.
        """
        ...

    def prefilled(self, request_id: str) -> None:
        """Report a computed prompt. An unknown id is ignored and counted."""
        ...

    def done(self, request_id: str, *, failed: bool = False) -> None:
        """Report the end of a request. An unknown id is ignored and counted.

        Args:
            request_id: the request.
            failed: whether the machine failed: no answer, or not in time.
        """
        ...


def open_selector(kind: str, url: str, **options: Any) -> Selector:  # noqa: ANN401 - the back end's own
    """Open a selector by the name of its service.

    Args:
        kind: "dynamo", or the name of an entry point of the group `kvtrie.selector`.
        url: URL of the service.
        options: further arguments of the class.

    Raises:
        ConfigError: an unknown service, an object other than a `Selector`, or a bad argument.
    """
    own = {"dynamo": "kvtrie.cluster.dynamo_selector:DynamoSelector"}
    return opened("kvtrie.selector", kind, own, Selector, url, **options)

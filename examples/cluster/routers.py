"""Routers: three ways to choose the machine of a request.

`selection_router` asks a service that chooses, `IndexRouter` an index of the blocks of each one,
and `RoundRobin` nothing. Cost: one HTTP call per request for the first two.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

from examples.cluster.model import SIZE
from kvtrie import NoMachineError
from kvtrie.cluster import DynamoIndex, DynamoSelector, Held, locality

if TYPE_CHECKING:
    from collections.abc import Sequence

    from examples.cluster.engine_settings import EngineSettings

ASK_S = 0.2
"""Seconds that a request waits for the service."""

_REST_S = 1.0  # that a machine gets no request after one failed


class Router(Protocol):
    """Chooses machines, with the calls of `kvtrie.cluster.Selector`."""

    def pick(self, request_id: str, tokens: Sequence[int]) -> int:
        """Choose the machine of a request.

        Raises:
            NoMachineError: none can take it now.
        """
        ...

    def prefilled(self, request_id: str) -> None:
        """Note the first token of a request's answer."""
        ...

    def done(self, request_id: str, *, failed: bool = False) -> None:
        """Note the end of a request."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


def selection_router(url: str, engines: Sequence[EngineSettings]) -> DynamoSelector:
    """The selection service chooses, by hits and by the load that it has reserved."""
    selector = DynamoSelector(url, deadline_s=ASK_S, block_tokens=SIZE)
    for engine in engines:
        selector.add(engine.machine, events=engine.events, replay=engine.replay)
    return selector


class _Counting:
    """Requests per machine, and machines that rest after a failure."""

    def __init__(self, machines: int) -> None:
        self._lock = threading.Lock()
        self._loads = [0] * machines
        self._until = [0.0] * machines
        self._machines: dict[str, int] = {}

    def pick(self, request_id: str, tokens: Sequence[int]) -> int:
        hits = self._hits(tokens)
        now = time.monotonic()
        with self._lock:
            live = [at for at, until in enumerate(self._until) if until <= now]
            if not live:
                raise NoMachineError(f"all {len(self._until)} machines rest after a failure")
            machine = self._choose(live, hits)
            self._loads[machine] += 1
            self._machines[request_id] = machine
            return machine

    def prefilled(self, request_id: str) -> None:
        pass

    def done(self, request_id: str, *, failed: bool = False) -> None:
        with self._lock:
            machine = self._machines.pop(request_id)
            self._loads[machine] -= 1
            self._until[machine] = time.monotonic() + _REST_S if failed else 0.0

    def close(self) -> None:
        pass

    def _hits(self, tokens: Sequence[int]) -> list[int]:
        del tokens
        return []

    def _choose(self, live: list[int], hits: list[int]) -> int:
        raise NotImplementedError


class RoundRobin(_Counting):
    """One machine after another."""

    def __init__(self, machines: int) -> None:
        super().__init__(machines)
        self._turn = 0

    def _choose(self, live: list[int], hits: list[int]) -> int:
        del hits
        self._turn += 1
        return live[self._turn % len(live)]


class IndexRouter(_Counting):
    """The indexer knows the hits, and the simulator's rule `locality` chooses among them."""

    def __init__(self, url: str, engines: Sequence[EngineSettings]) -> None:
        super().__init__(len(engines))
        self.index = DynamoIndex(url, block_tokens=SIZE)
        for engine in engines:
            self.index.add(engine.machine, events=engine.events, replay=engine.replay)

    def close(self) -> None:
        """Close the connections to the indexer."""
        self.index.close()

    def _hits(self, tokens: Sequence[int]) -> list[int]:
        held = self.index.match(tokens, deadline_s=ASK_S)
        nothing = Held(0, 0, 0)
        return [held.get(machine, nothing).disk for machine in range(len(self._loads))]

    def _choose(self, live: list[int], hits: list[int]) -> int:
        return live[locality([(self._loads[at], hits[at]) for at in live], ratio=2.0)]

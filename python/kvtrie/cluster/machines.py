"""Machines: their states and requests, by the selector's own counts.

    LIVE ──a request failed──> FAILED ──after 1 s, 2 s, … 60 s──> PROBED ──request ends well──> LIVE
                                 ^                                  │
                                 └──────── request failed ──────────┘

Invariant: a request counts for one machine from `begin` to `end`. A failed machine gets a single
request as a probe. A request that failed on a machine is not sent there again while another machine
is live. Cost: O(machines) per request, and at most `MOST_REQUESTS` requests are kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtrie.breaker import Breaker
from kvtrie.errors import ConfigError, NoMachineError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MOST_REQUESTS", "Candidates", "Machines", "Request"]

MOST_REQUESTS = 65_536
"""Most unfinished requests. Beyond that the oldest request counts as ended."""

_MOST_FAILED = 4096  # requests with a remembered failure


@dataclass(slots=True)
class _Machine:
    number: int
    breaker: Breaker
    requests: int = 0


@dataclass(slots=True)
class Request:
    """An unfinished request.

    Attributes:
        name: its name at the service.
        asked: whether the service may have a reservation for it.
    """

    name: str
    asked: bool = False
    machine: _Machine | None = field(default=None, repr=False)
    probes: _Machine | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Machines a request may be sent to.

    Attributes:
        live: their numbers, in order.
        probe: whether the request is a probe. Then its machine is the only candidate.
    """

    live: list[int]
    probe: bool


class Machines:
    """The machines of a selector and their requests.

    Args:
        clock: nanoseconds, monotone.

    Attributes:
        forgotten: requests counted as ended because there were too many.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._machines: dict[int, _Machine] = {}
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self._failed: OrderedDict[str, _Machine] = OrderedDict()
        self.forgotten = 0

    def add(self, number: int) -> None:
        """Make a machine live. A known machine starts over, without requests."""
        with self._lock:
            self._machines[number] = _Machine(number, Breaker(self._clock, failures=1))

    def remove(self, number: int) -> None:
        """Stop sending requests to a machine."""
        with self._lock:
            self._machines.pop(number, None)

    def requests(self) -> dict[int, int]:
        """Return the number of unfinished requests of each machine."""
        with self._lock:
            return {number: machine.requests for number, machine in self._machines.items()}

    def live(self) -> list[int]:
        """Return the machines whose last request did not fail."""
        with self._lock:
            return self._live()

    def begin(self, request_id: str, name: str) -> tuple[Request, Candidates, list[Request]]:
        """Begin a request and return its candidates, for `choose`.

        Args:
            request_id: the caller's name of the request.
            name: its name at the service.

        Returns:
            The request, its candidates, and older requests that now count as ended.

        Raises:
            ConfigError: a request of this id has not ended.
            NoMachineError: no machine is live, and none can be probed now.
        """
        with self._lock:
            if request_id in self._requests:
                raise ConfigError(f"request_id {request_id!r} is in flight: call done first")
            request = Request(name)
            candidates = self._candidates(request_id, request)
            self._requests[request_id] = request
            dropped: list[Request] = []
            while len(self._requests) > MOST_REQUESTS:
                _, oldest = self._requests.popitem(last=False)
                self._leave(oldest)
                self.forgotten += 1
                dropped.append(oldest)
            return request, candidates, dropped

    def choose(self, request: Request, wanted: int | None, candidates: Candidates) -> int:
        """Put a request on a machine, or on the least loaded candidate with the lowest number.

        Args:
            request: the request.
            wanted: the machine chosen by the service, or None.
            candidates: as `begin` returned them.

        Raises:
            NoMachineError: all candidates have left since `begin`.
        """
        with self._lock:
            usable = [self._machines[at] for at in candidates.live if at in self._machines]
            if not candidates.probe:
                usable = [at for at in usable if at.breaker.state == "closed"] or usable
            chosen = next((at for at in usable if at.number == wanted), None)
            if chosen is None:
                chosen = min(usable, key=lambda at: (at.requests, at.number), default=None)
            if chosen is None:
                raise NoMachineError(f"machines {candidates.live} have left during the call")
            chosen.requests += 1
            request.machine = chosen
            return chosen.number

    def find(self, request_id: str) -> Request | None:
        """Return an unfinished request."""
        with self._lock:
            return self._requests.get(request_id)

    def end(self, request_id: str, *, failed: bool = False) -> Request | None:
        """End a request and return it, or return None for an unknown id."""
        with self._lock:
            request = self._requests.pop(request_id, None)
            if request is None:
                return None
            machine = request.machine
            if machine is not None:
                machine.breaker.note(ok=not failed)
                request.probes = None
            self._leave(request)
            if machine is not None and failed:
                self._failed[request_id] = machine
                self._failed.move_to_end(request_id)
                if len(self._failed) > _MOST_FAILED:
                    self._failed.popitem(last=False)
            else:
                self._failed.pop(request_id, None)
            return request

    def drop(self, request_id: str) -> None:
        """End an unsent request."""
        with self._lock:
            self._leave(self._requests.pop(request_id))

    @staticmethod
    def _leave(request: Request) -> None:
        machine, request.machine = request.machine, None
        if machine is not None:
            machine.requests -= 1
        if request.probes is not None:
            request.probes.breaker.skip()

    def _live(self) -> list[int]:
        return sorted(at for at, one in self._machines.items() if one.breaker.state == "closed")

    def _candidates(self, request_id: str, request: Request) -> Candidates:
        failed = self._failed.get(request_id)
        live = self._live()
        due = [one for at, one in sorted(self._machines.items()) if at not in live]
        due = [one for one in due if one.breaker.due and (one is not failed or not live)]
        for machine in due:
            if machine.breaker.allows():
                request.probes = machine
                return Candidates([machine.number], probe=True)
        if failed is not None and len(live) > 1 and failed.number in live:
            live.remove(failed.number)
        if not live:
            count = len(self._machines)
            raise NoMachineError(f"no live machine: the last request failed on each of {count}")
        return Candidates(live, probe=False)

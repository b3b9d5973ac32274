"""Registrations: registers machines at a service, and again after the service lost them.

    add ──> registered ──service restarts──> unknown ──next call──> registered ──remove──> ended

Invariant: after a broken or refused call, the next call first asks the service for its machines. A
removed machine's registration ends as soon as the service answers. Cost: a comparison per call
while the service answers.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvtrie.cluster.http_client import CallError
from kvtrie.errors import ConfigError
from kvtrie.settings.argument import text, whole

if TYPE_CHECKING:
    from kvtrie.cluster.service import Service

__all__ = ["Engine", "Registrations", "Registry"]

_MOST_MACHINE = 2**63 - 1


class Engine(NamedTuple):
    """The engine of a machine as registered at a service.

    Attributes:
        machine: the machine's number.
        events: endpoint of its events, as "tcp://10.0.0.7:5557".
        replay: endpoint of its replay, or None.
    """

    machine: int
    events: str
    replay: str | None

    @classmethod
    def of(cls, machine: object, events: object, replay: object) -> Engine:
        """Read the arguments of `add`.

        Raises:
            ConfigError: a machine that is no whole number of 0 or more, or an endpoint that is not
                tcp://HOST:PORT.
        """
        number = whole("machine", machine, 0, _MOST_MACHINE)
        second = None if replay is None else _endpoint("replay", replay)
        return cls(number, _endpoint("events", events), second)


def _endpoint(name: str, given: object) -> str:
    found = text(name, given)
    scheme, _, place = found.partition("://")
    host, _, port = place.rpartition(":")
    number = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
    if scheme != "tcp" or not host or not number or host in {"*", "0.0.0.0"}:  # noqa: S104 - refused
        raise ConfigError(f"{name} is {found!r}, tcp://HOST:PORT wanted, as the service reaches it")
    return found


class Registry(Protocol):
    """A service's calls for registering machines. Each raises `CallError`."""

    def registered(self, until: int) -> dict[int, str]:
        """Return the registered machines, with the endpoint of their events."""
        ...

    def register(self, engine: Engine, until: int) -> None:
        """Register a machine unknown to the service, or known by another endpoint."""
        ...

    def end(self, machine: int, until: int) -> None:
        """End the registration of a machine, if it is registered."""
        ...


class Registrations:
    """Machines to keep registered at a service.

    Args:
        service: the service.
        registry: its calls.
    """

    def __init__(self, service: Service, registry: Registry) -> None:
        self._service, self._registry = service, registry
        self._lock = threading.Lock()
        self._restoring = threading.Lock()
        self._engines: dict[int, Engine] = {}
        self._ended: set[int] = set()
        self._seen = service.breaks  # breaks of the service at the last full registration
        self._unchecked = False

    def __contains__(self, machine: int) -> bool:
        """Return whether a machine was added and not removed."""
        return machine in self._engines

    def __bool__(self) -> bool:
        """Return whether there is any machine."""
        return bool(self._engines)

    def add(self, engine: Engine, until: int) -> None:
        """Register a machine, with a later call if the service does not answer.

        Raises:
            ConfigError: the service refuses it.
        """
        with self._restoring:
            try:
                self._registry.register(engine, until)
            except CallError as error:
                if error.outcome == "refused":
                    raise ConfigError(
                        f"{self._service.url} refuses machine {engine.machine}: {error.reason}"
                    ) from error
                self._service.warn(error)
                self._unchecked = True
            with self._lock:
                self._engines[engine.machine] = engine
                self._ended.discard(engine.machine)

    def known(self, machine: object) -> int:
        """Return the number of an added machine.

        Raises:
            ConfigError: no such machine.
        """
        number = whole("machine", machine, 0, _MOST_MACHINE)
        if number not in self._engines:
            raise ConfigError(f"machine is {number}, which was not added")
        return number

    def remove(self, machine: object, until: int) -> None:
        """End a registration, with a later call if the service does not answer.

        Raises:
            ConfigError: no such machine.
        """
        number = self.known(machine)
        with self._lock:
            self._engines.pop(number, None)
            self._ended.add(number)
        with self._restoring:
            self._end(number, until)

    def request_check(self) -> None:
        """Ask the service for its machines before the next call."""
        self._unchecked = True

    def restore(self, until: int) -> None:
        """Register lost machines again, if the service may have lost any.

        Returns at once while another thread restores them.

        Raises:
            CallError: the service does not answer.
        """
        if not self._unchecked and self._seen == self._service.breaks:
            return
        if not self._restoring.acquire(blocking=False):
            return
        try:
            breaks, self._unchecked = self._service.breaks, False
            try:
                self._restore(until)
            except CallError:
                self._unchecked = True
                raise
            self._seen = breaks
        finally:
            self._restoring.release()

    def _restore(self, until: int) -> None:
        known = self._registry.registered(until)
        with self._lock:
            ended, engines = list(self._ended), list(self._engines.values())
        missing = [one for one in engines if known.get(one.machine) != one.events]
        for machine in ended:
            self._end(machine, until)
        for engine in missing:
            try:
                self._registry.register(engine, until)
            except CallError as error:
                if error.outcome != "refused":
                    raise
                self._service.warn(error)  # the remaining machines may be accepted

    def _end(self, machine: int, until: int) -> None:
        try:
            self._registry.end(machine, until)
        except CallError as error:
            self._service.warn(error)
            self._unchecked = True
            if error.outcome != "refused":
                return
        with self._lock:
            self._ended.discard(machine)

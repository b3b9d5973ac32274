"""Registrations over a registry in the test: what is asked again, when, and how often."""

from __future__ import annotations

import pytest

from kvtrie import ConfigError
from kvtrie.cluster.http_client import CallError
from kvtrie.cluster.registrations import Engine, Registrations


class Registry:
    """Machines that a service knows; `error` is raised by each call."""

    def __init__(self):
        self.known, self.calls, self.error, self.refused = {}, [], None, set()

    def _call(self, *call):
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def registered(self, _):
        self._call("registered")
        return dict(self.known)

    def register(self, engine, _):
        self._call("register", engine.machine)
        if engine.machine in self.refused:
            raise CallError("refused", "no", 409)
        self.known[engine.machine] = engine.events

    def end(self, machine, _):
        self._call("end", machine)
        self.known.pop(machine, None)


class Service:
    url, breaks = "http://service", 0

    def __init__(self):
        self.warned = []

    def warn(self, error):
        self.warned.append(error.outcome)


@pytest.fixture
def registry():
    return Registry()


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def registrations(service, registry):
    return Registrations(service, registry)


def engine(machine, port=1):
    return Engine.of(machine, f"tcp://host:{port}", None)


def test_nothing_is_asked_while_the_service_answers(registrations, registry):
    registrations.add(engine(1), 0)
    for _ in range(3):
        registrations.restore(0)
    assert registry.calls == [("register", 1)]
    assert 1 in registrations
    assert 2 not in registrations


def test_after_a_break_only_what_is_missing_is_registered(registrations, registry, service):
    for machine in (1, 2, 3):
        registrations.add(engine(machine), 0)
    del registry.known[2]
    registry.known[3] = "tcp://other:1"
    service.breaks += 1
    del registry.calls[:]
    registrations.restore(0)
    registrations.restore(0)
    assert registry.calls == [("registered",), ("register", 2), ("register", 3)]


def test_a_restoration_that_fails_is_made_again(registrations, registry):
    registrations.add(engine(1), 0)
    registry.known.clear()
    registry.error = CallError("late", "no answer")
    registrations.request_check()
    with pytest.raises(CallError):
        registrations.restore(0)
    registry.error = None
    registrations.restore(0)
    assert registry.known == {1: "tcp://host:1"}


def test_a_machine_that_is_refused_later_keeps_no_other_from_the_service(
    registrations, registry, service
):
    for machine in (1, 2):
        registrations.add(engine(machine), 0)
    registry.known.clear()
    registry.refused = {1}
    registrations.request_check()
    registrations.restore(0)
    assert set(registry.known) == {2}
    assert service.warned == ["refused"]


def test_a_machine_that_is_refused_is_not_added(registrations, registry):
    registry.refused = {1}
    with pytest.raises(ConfigError, match="http://service refuses machine 1: no"):
        registrations.add(engine(1), 0)
    assert not registrations


def test_changes_while_the_service_is_away_come_later(registrations, registry):
    registrations.add(engine(1), 0)
    registry.error = CallError("unreachable", "gone")
    registrations.add(engine(2), 0)
    registrations.remove(1, 0)
    assert (1 in registrations, 2 in registrations) == (False, True)
    registry.error = None
    registrations.restore(0)
    assert set(registry.known) == {2}
    registry.calls.clear()
    registrations.restore(0)
    assert registry.calls == []


def test_a_machine_that_comes_back_is_not_ended(registrations, registry):
    registrations.add(engine(1), 0)
    registry.error = CallError("late", "no answer")
    registrations.remove(1, 0)
    registry.error = None
    registrations.add(engine(1), 0)
    registrations.restore(0)
    assert set(registry.known) == {1}
    assert registry.calls.count(("end", 1)) == 1

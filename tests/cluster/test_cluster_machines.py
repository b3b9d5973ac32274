"""Live machines and the requests on each one, without a service."""

from __future__ import annotations

import pytest

from kvtrie import ConfigError, NoMachineError
from kvtrie.cluster.machines import Machines


@pytest.fixture
def machines(clock):
    made = Machines(clock)
    for number in (5, 3, 4):
        made.add(number)
    return made


def send(machines, name, wanted=None):
    request, candidates, _ = machines.begin(name, f"name of {name}")
    return machines.choose(request, wanted, candidates)


def test_candidates_are_in_order_of_their_numbers(machines):
    _, candidates, dropped = machines.begin("a", "n")
    assert (candidates.live, candidates.probe, dropped) == ([3, 4, 5], False, [])


def test_a_wanted_machine_gets_the_request_and_else_the_least_loaded(machines):
    assert send(machines, "a", 4) == 4
    assert send(machines, "b", 9) == 3
    assert [send(machines, name) for name in "cd"] == [5, 3]
    assert machines.requests() == {5: 1, 3: 2, 4: 1}
    assert machines.end("b").name == "name of b"
    assert machines.end("b") is None
    assert machines.requests() == {5: 1, 3: 1, 4: 1}


def test_a_request_that_was_not_sent_counts_nowhere(machines, clock):
    machines.begin("a", "n")
    machines.drop("a")
    assert machines.requests() == {5: 0, 3: 0, 4: 0}
    send(machines, "b", 3)
    machines.end("b", failed=True)
    clock.seconds(1)
    _, candidates, _ = machines.begin("probe", "n")
    assert (candidates.live, candidates.probe) == ([3], True)
    machines.drop("probe")  # so the next one is the probe
    assert machines.begin("next", "n")[1].probe


def test_a_machine_that_leaves_during_the_call_is_not_chosen(machines):
    request, candidates, _ = machines.begin("a", "n")
    machines.remove(4)
    assert machines.choose(request, 4, candidates) == 3
    request, candidates, _ = machines.begin("b", "n")
    machines.remove(3)
    machines.remove(5)
    with pytest.raises(NoMachineError, match=r"machines \[3, 5\] have left during the call"):
        machines.choose(request, 3, candidates)


def test_a_machine_that_fails_during_the_call_is_not_chosen(machines):
    send(machines, "a", 4)
    request, candidates, _ = machines.begin("b", "n")
    machines.end("a", failed=True)
    assert machines.choose(request, 4, candidates) == 3
    assert machines.live() == [3, 5]


def test_failures_of_requests_in_flight_put_no_probe_off_for_ever(machines, clock):
    for name in "abc":
        send(machines, name, 3)
    machines.end("a", failed=True)
    clock.seconds(0.9)
    machines.end("b", failed=True)  # it began before the failure that is known
    clock.seconds(0.1)
    assert send(machines, "probe") == 3
    machines.end("c", failed=True)
    clock.seconds(2)
    assert send(machines, "second probe") == 3
    machines.end("second probe")
    assert machines.live() == [3, 4, 5]


def test_only_so_many_failures_are_remembered(machines, clock, monkeypatch):
    monkeypatch.setattr("kvtrie.cluster.machines._MOST_FAILED", 2)
    for name in "abc":
        send(machines, name, 3)
    for name in "abc":
        machines.end(name, failed=True)
    assert len(machines._failed) == 2
    clock.seconds(1)
    assert not machines.begin("c", "n")[1].probe
    assert machines.begin("a", "n")[1].probe  # its failure is forgotten


def test_without_a_live_machine_the_one_that_failed_is_probed_by_the_same_request(clock):
    machines = Machines(clock)
    machines.add(1)
    send(machines, "a")
    machines.end("a", failed=True)
    with pytest.raises(NoMachineError):
        machines.begin("a", "n")
    clock.seconds(1)
    assert send(machines, "a") == 1
    with pytest.raises(ConfigError, match="'a' is in flight"):
        machines.begin("a", "n")
